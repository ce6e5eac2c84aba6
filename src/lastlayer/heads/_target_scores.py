"""Scores of one class a row as a differentiable operation."""

from typing import Any

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._torch import accumulation_dtype, host_sync_allowed, is_eager


def target_scores(
    rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, factor: Tensor
) -> Tensor:
    """``factor`` times the score of each row's target, in float32, or float64 from float64.

    Args:
        rows: ``(n, d)``.
        weight: ``(v, d)``.
        bias: ``(v,)`` or None.
        target: class ids ``(n,)``.
        factor: ``(n,)``, in the dtype of the result; a row with a factor of 0 is 0 without
            gradient, whatever is in it.
    """
    rows = torch.where((factor != 0).unsqueeze(-1), rows, 0.0)
    scores: Tensor = _TargetScores.apply(rows, weight, bias, target, factor)
    return scores


class _TargetScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, factor: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, target, factor)
        ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
        narrow = None if bias is None else bias.to(rows.dtype)
        scores: Tensor = kernels.products.scores(
            "auto", rows, weight.to(rows.dtype), narrow, target.unsqueeze(-1)
        )
        return scores.squeeze(-1) * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, target, factor = ctx.saved_tensors
        slopes, classes = (grad * factor).unsqueeze(-1), target.unsqueeze(-1)
        to_rows, to_weight, to_bias = ctx.needs_input_grad[:3]
        of_rows = of_weight = of_bias = None
        if to_rows:
            vectors = weight.to(rows.dtype)
            of_rows = kernels.products.to_hidden("auto", slopes, classes, vectors)
        if to_weight:
            of_weight = _weight_gradient(slopes, classes, rows, weight)
        if to_bias:
            shape, dtype = ctx.bias_like
            zeros = slopes.new_zeros(shape)
            of_bias = zeros.index_add_(0, target, slopes.squeeze(-1)).to(dtype)
        return of_rows, of_weight, of_bias, None, None


def _weight_gradient(slopes: Tensor, classes: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """In full precision until the end: a frequent class is the target of many rows.

    Where the host may wait for their number it has the touched rows alone, which autograd adds to
    the dense gradient of another loss in place.
    """
    n_classes, depth = weight.shape
    compact = is_eager(rows) and host_sync_allowed(rows)
    if compact:
        touched, classes = torch.unique(classes, return_inverse=True)
        n_classes = touched.shape[0]
    sums = rows.new_zeros(n_classes, depth, dtype=accumulation_dtype(rows.dtype))
    kernels.products.add_to_weight_("auto", slopes, classes, rows, sums)
    gradient = sums.to(weight.dtype)
    if not compact:
        return gradient
    return torch.sparse_coo_tensor(
        touched.unsqueeze(0), gradient, weight.shape, is_coalesced=True, check_invariants=False
    )
