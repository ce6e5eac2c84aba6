"""Checks of what the fused losses are given, and the problem they make of it."""

from typing import Any

import torch
from torch import Tensor

from lastlayer._checks import (
    check_chunk_rows,
    check_class_weight,
    check_id_range,
    check_reduction,
    check_scores,
)
from lastlayer._torch import accumulation_dtype, is_eager
from lastlayer.fused._loss import Problem


def check_linear(hidden: Any, weight: Any, bias: Any) -> None:
    """Hidden states, class vectors and biases that fit together."""
    check_scores(hidden, name="hidden")
    check_scores(weight, name="weight")
    if weight.dim() != 2:
        raise ValueError(
            "weight: expected shape (n_classes, in_features), one row a class, as in nn.Linear, "
            f"got {tuple(weight.shape)}"
        )
    n_classes, width = weight.shape
    if n_classes == 0:
        raise ValueError(f"weight: expected at least one class, got shape {tuple(weight.shape)}")
    if hidden.shape[-1] != width:
        raise ValueError(
            f"hidden: expected shape (*batch, {width}) for weight of shape "
            f"{tuple(weight.shape)}, got {tuple(hidden.shape)}"
        )
    _check_same("weight", weight, hidden)
    if bias is None:
        return
    check_scores(bias, name="bias")
    if bias.shape != (n_classes,):
        raise ValueError(
            f"bias: expected shape ({n_classes},), one number a class, got {tuple(bias.shape)}"
        )
    _check_same("bias", bias, hidden)


def make_problem(
    hidden: Any,
    weight: Any,
    target: Any,
    bias: Any,
    *,
    ignore_index: Any,
    reduction: Any,
    class_weight: Any,
    row_weight: Any,
    weight_grad: Any,
    chunk_rows: Any,
) -> Problem:
    """Checked arguments, with the batch as rows, in the dtype of autocast where it is on."""
    check_linear(hidden, weight, bias)
    check_reduction(reduction)
    check_chunk_rows(chunk_rows)
    if ignore_index is not None and (
        not isinstance(ignore_index, int) or isinstance(ignore_index, bool)
    ):
        raise TypeError(
            f"ignore_index: expected an int, or None where every target counts, got "
            f"{type(ignore_index).__name__}"
        )
    check_class_ids(target, hidden)
    check_id_range("target", target, weight.shape[0], ignore_index)
    if class_weight is not None:
        check_class_weight(class_weight, weight.shape[0])
        _check_device("class_weight", class_weight, hidden)
        if class_weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "class_weight: expected a tensor that needs no gradient, since none flows to it, "
                "got one with requires_grad=True; give class_weight.detach()"
            )
    if row_weight is not None:
        _check_row_weight(row_weight, target)
    if weight_grad is not None:
        _check_weight_grad(weight_grad, weight)
    if _autocast_is_on(hidden) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    return Problem(
        hidden.reshape(target.numel(), hidden.shape[-1]),
        weight,
        bias,
        target.reshape(-1),
        class_weight,
        ignore_index,
        chunk_rows,
    )


def _check_same(name: str, tensor: Tensor, hidden: Tensor) -> None:
    _check_device(name, tensor, hidden)
    if tensor.dtype != hidden.dtype and not _autocast_is_on(hidden):
        raise TypeError(
            f"{name}: expected the dtype of hidden, {hidden.dtype}, got {tensor.dtype}; convert "
            "one of them, or use torch.autocast"
        )


def _autocast_is_on(tensor: Tensor) -> bool:
    device = tensor.device.type
    return device != "meta" and torch.is_autocast_enabled(device)


def _check_device(name: str, tensor: Tensor, hidden: Tensor) -> None:
    if tensor.device != hidden.device:
        raise ValueError(
            f"{name}: expected the device of hidden, {hidden.device}, got {tensor.device}"
        )


def check_class_ids(target: Any, hidden: Tensor) -> None:
    """One class id a row; which ones they are is not looked at."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target: expected a torch.Tensor, got {type(target).__name__}")
    if target.dtype != torch.int64:
        raise TypeError(
            f"target: expected torch.int64 class ids, got {target.dtype}; convert with "
            "target.long()"
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target: expected shape {tuple(hidden.shape[:-1])} for hidden of shape "
            f"{tuple(hidden.shape)}, got {tuple(target.shape)}"
        )
    _check_device("target", target, hidden)


def _check_row_weight(row_weight: Any, target: Tensor) -> None:
    if not isinstance(row_weight, Tensor) or not row_weight.is_floating_point():
        got = row_weight.dtype if isinstance(row_weight, Tensor) else type(row_weight).__name__
        raise TypeError(f"row_weight: expected a floating tensor with one weight a row, got {got}")
    if row_weight.shape != target.shape:
        raise ValueError(
            f"row_weight: expected the shape of target, {tuple(target.shape)}, got "
            f"{tuple(row_weight.shape)}"
        )
    _check_device("row_weight", row_weight, target)


def _check_weight_grad(weight_grad: Any, weight: Tensor) -> None:
    if not isinstance(weight_grad, Tensor):
        raise TypeError(
            f"weight_grad: expected a tensor to add to, got {type(weight_grad).__name__}; "
            "weight.grad is None before the first backward: set it to zeros"
        )
    wide = accumulation_dtype(weight.dtype)
    if weight_grad.dtype not in (weight.dtype, wide):
        expected = " or ".join(str(dtype) for dtype in dict.fromkeys((weight.dtype, wide)))
        raise TypeError(f"weight_grad: expected {expected}, got {weight_grad.dtype}")
    (n_classes, width), strides = weight.shape, weight_grad.stride()
    if (
        weight_grad.shape != weight.shape
        or (width > 1 and strides[1] != 1)
        or (n_classes > 1 and strides[0] < width)
    ):
        raise ValueError(
            f"weight_grad: expected shape {tuple(weight.shape)} with rows that lie together, each "
            f"in memory of its own, got {tuple(weight_grad.shape)} with strides {strides}"
        )
    _check_device("weight_grad", weight_grad, weight)
    if weight_grad is weight or (
        is_eager(weight) and weight_grad.numel() and weight_grad.data_ptr() == weight.data_ptr()
    ):
        raise ValueError("weight_grad: expected memory of its own, got that of weight")
    if torch.compiler.is_compiling():
        raise ValueError(
            "weight_grad: cannot be used inside torch.compile, which does not see that backward "
            "writes to it; call the loss outside, or leave weight_grad out"
        )
