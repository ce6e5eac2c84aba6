"""A linear layer with a multi-label loss on it as one differentiable operation.

``lastlayer::linear_label_loss`` computes losses and gradients together, as
``lastlayer::linear_loss`` does for losses with one target a row: where the upstream gradient is one
number, gradients are made in the forward pass and scaled in backward. With ``reduction="none"``
backward makes the scores again; it knows the normalisers of all rows from the forward pass.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer._labels import check_positives
from lastlayer._torch import accumulation_dtype, gradient_sum_dtype, is_eager
from lastlayer.fused._gradient_scale import (
    near_one,
    returned_gradients,
    rounded_product,
    scaled_gradients,
    unmade_gradients,
)
from lastlayer.fused._label_rows import LabelLoss, LogisticLabels, ZlprLabels
from lastlayer.fused._label_slabs import classes_at_a_time, run_labels
from lastlayer.fused._listed import GivenLists
from lastlayer.fused.engine import Wanted

# Makes a loss from its smoothing, and from the normalisers of all rows where they are known.
LABEL_LOSSES: dict[str, Callable[[float, Tensor | None], LabelLoss]] = {
    "zlpr": ZlprLabels,
    "logistic": LogisticLabels,
}


class LabelProblem(NamedTuple):
    """The rows of a multi-label loss: hidden in the dtype of the products."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    given: GivenLists
    chunk_classes: int | str


def linear_label_loss(loss: str, problem: LabelProblem, reduction: str) -> Tensor:
    """The loss of each row, ``(n,)``, or their sum or mean."""
    hidden, weight, bias, given, chunk_classes = problem
    positives, offsets, values, ignore_index, smoothing = given
    recording = torch.is_grad_enabled()
    wanted = (
        recording and hidden.requires_grad,
        recording and weight.requires_grad,
        recording and bias is not None and bias.requires_grad,
    )
    result: Tensor = _LinearLabelLoss.apply(
        hidden, weight, bias, positives, offsets, None if values is None else values.detach(),
        loss, ignore_index, smoothing, str(chunk_classes), reduction, wanted,
    )  # fmt: skip
    return result


class _LinearLabelLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        positives: Tensor,
        offsets: Tensor | None,
        values: Tensor | None,
        loss: str,
        ignore_index: int,
        smoothing: float,
        chunk_classes: str,
        reduction: str,
        wanted: tuple[bool, bool, bool],
    ) -> Tensor:
        n = hidden.shape[0]
        dtype = accumulation_dtype(hidden.dtype)
        share = 1.0 / max(1, n) if reduction == "mean" else 1.0
        scale = hidden.new_full((n,), share, dtype=dtype)
        at_once = any(wanted) and reduction != "none"
        factors, size = near_one(scale, hidden.dtype)
        operands = hidden, weight, bias, positives, offsets, values
        options = loss, ignore_index, smoothing, chunk_classes
        losses, normalisers, *made = _operation(hidden)(
            *operands, factors if at_once else None, None, *options,
            wanted if at_once else (False, False, False),
        )  # fmt: skip
        ctx.at_once, ctx.wanted, ctx.spent, ctx.options = at_once, wanted, False, options
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden, weight, bias)]
        if at_once:
            ctx.save_for_backward(size, *made)
        else:
            ctx.save_for_backward(*operands, normalisers)
        result: Tensor = losses if reduction == "none" else (losses * scale).sum()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # Where an upstream gradient is a constant, `once_differentiable` would let this pass.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "backward: a fused loss has no second derivatives, and create_graph=True asks for "
                "them; use the loss on scores, such as lastlayer.zlpr_loss_from_indices"
            )
        made = scaled_gradients(ctx, grad) if ctx.at_once else _recomputed(ctx, grad)
        gradients = (
            each.to(dtype) if needed else None
            for each, needed, dtype in zip(made, ctx.wanted, ctx.dtypes, strict=True)
        )
        return *gradients, *(None,) * 9


def _recomputed(ctx: Any, grad: Tensor) -> list[Tensor]:
    """The gradients from scores that are made again."""
    *operands, normalisers = ctx.saved_tensors
    hidden = operands[0]
    dtype = accumulation_dtype(hidden.dtype)
    scale, size = near_one(grad.to(dtype), hidden.dtype)
    known = normalisers if normalisers.numel() else None
    _, _, *made = _operation(hidden)(*operands, scale, known, *ctx.options, ctx.wanted)
    return made if size is None else [rounded_product(each, size) for each in made]


def _losses_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positives: Tensor,
    offsets: Tensor | None,
    values: Tensor | None,
    row_scale: Tensor | None,
    normalisers: Tensor | None,
    loss: str,
    ignore_index: int,
    smoothing: float,
    chunk_classes: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Losses, normalisers, and the gradients of hidden, weight and bias (empty if not wanted)."""
    chunk: int | str = int(chunk_classes) if chunk_classes.isdecimal() else chunk_classes
    at_a_time = classes_at_a_time(chunk, hidden, weight.shape[0])
    rule = LABEL_LOSSES[loss](smoothing, normalisers)
    # Dtypes are settled by now; autocast would still round the float32 sums on the way.
    with torch.autocast(hidden.device.type, enabled=False):
        result = run_labels(
            rule, hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype),
            GivenLists(positives, offsets, values, ignore_index, smoothing), row_scale,
            Wanted(wanted[0], wanted[1], wanted[2]), at_a_time, gradient_sum_dtype(weight.dtype),
        )  # fmt: skip
    bias_gradient = result.bias
    if bias_gradient is not None and bias is not None:
        bias_gradient = bias_gradient.to(gradient_sum_dtype(bias.dtype))
    made = [result.hidden, result.weight, bias_gradient]
    # What is given to an operation may not be what it returns.
    found = () if normalisers is not None else result.statistics
    empty = result.loss.new_empty(2, 0)
    return [
        result.loss,
        found[0] if found else empty,
        *(hidden.new_empty(0) if each is None else each for each in made),
    ]


@wraps(_losses_and_gradients)
def _checked(*given: Any) -> list[Tensor]:
    """With checks of values, which nobody could read while a compiler traced the caller."""
    hidden, weight, _, positives, offsets, values, _, _, _, ignore_index, smoothing, *_ = given
    check_positives(
        positives, offsets, n_rows=hidden.shape[0], n_classes=weight.shape[0],
        ignore_index=ignore_index, values=values, label_smoothing=smoothing,
    )  # fmt: skip
    losses, normalisers, *made = _losses_and_gradients(*given)
    return [losses, normalisers, *returned_gradients(hidden, made)]


_linear_label_loss = torch.library.custom_op("lastlayer::linear_label_loss", mutates_args=())(
    _checked
)


def _operation(hidden: Tensor) -> Callable[..., list[Tensor]]:
    """The function itself where nobody looks at it: an operation takes the host a while."""
    return _losses_and_gradients if is_eager(hidden) else _linear_label_loss


@_linear_label_loss.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positives: Tensor,
    offsets: Tensor | None,
    values: Tensor | None,
    row_scale: Tensor | None,
    normalisers: Tensor | None,
    loss: str,
    ignore_index: int,
    smoothing: float,
    chunk_classes: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    dtype = accumulation_dtype(hidden.dtype)
    n = hidden.shape[0]
    found = n if normalisers is None and loss == "zlpr" else 0
    return [
        hidden.new_empty(n, dtype=dtype),
        hidden.new_empty(2, found, dtype=dtype),
        *unmade_gradients(hidden, weight, bias, wanted),
    ]
