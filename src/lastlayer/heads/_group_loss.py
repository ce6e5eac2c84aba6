"""The loss of a head with several weights as one differentiable operation.

An operation of :mod:`torch.library` computes losses and gradients together; torch.compile sees it
as one node. Where the upstream gradient is one number the gradients are made in the forward pass,
from scores that are there anyway, and scaled in backward. Where it is one number a row
(``reduction="none"``) backward makes the scores again.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype, gradient_sum_dtype, is_eager
from lastlayer.fused._gradient_scale import near_one, rounded_product, scaled_gradients


class GroupProblem(NamedTuple):
    """The rows of a loss, and what they are scored with.

    ``operation`` is the name of one below ``torch.ops.lastlayer`` that takes ``(hidden, bias,
    target, row_scale, weights, *options, wanted)`` and returns the losses of all rows and the
    gradients of hidden, bias and each weight, empty ones where they are not wanted.
    """

    operation: str
    hidden: Tensor
    bias: Tensor | None
    # As the operation takes it; the last dimension has one entry a row.
    target: Tensor
    weights: Sequence[Tensor]
    options: tuple[Any, ...]


def group_loss(
    problem: GroupProblem, counts: Tensor | None, reduction: str, factor: float = 1.0
) -> Tensor:
    """``factor`` times the loss of all rows together, or of each row; 0 where it does not count.

    Args:
        problem: the rows.
        counts: which rows count, ``(n,)``; None for all of them.
        reduction: "mean" over the rows that count, "sum" or "none".
        factor: of every loss.
    """
    operation, hidden, bias, target, weights, options = problem
    recording = torch.is_grad_enabled()
    wanted = tuple(
        recording and each is not None and each.requires_grad for each in (hidden, bias, *weights)
    )
    loss: Tensor = _GroupLoss.apply(
        operation, hidden, bias, target, row_scale(hidden, counts, reduction, factor), options,
        reduction != "none", wanted, *weights,
    )  # fmt: skip
    return loss


def row_scale(hidden: Tensor, counts: Tensor | None, reduction: str, factor: float) -> Tensor:
    """What the loss of each row is multiplied by."""
    dtype, n = accumulation_dtype(hidden.dtype), hidden.shape[0]
    if counts is None:
        total = max(1, n) if reduction == "mean" else 1
        return hidden.new_full((n,), factor / total, dtype=dtype)
    scale = counts.to(dtype)
    if reduction == "mean":
        scale = scale / scale.sum().clamp(min=1.0)
    return scale if factor == 1.0 else scale * factor


class _GroupLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operation: str,
        hidden: Tensor,
        bias: Tensor | None,
        target: Tensor,
        scale: Tensor,
        options: tuple[Any, ...],
        reduced: bool,
        wanted: tuple[bool, ...],
        *weights: Tensor,
    ) -> Tensor:
        at_once = any(wanted) and reduced
        factors, size = near_one(scale, hidden.dtype)
        losses, *made = _call(
            operation, hidden, bias, target, factors if at_once else None, weights, options,
            wanted if at_once else (False,) * len(wanted),
        )  # fmt: skip
        ctx.at_once, ctx.wanted, ctx.spent = at_once, wanted, False
        ctx.rest = operation, options
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden, bias, *weights)]
        if at_once:
            ctx.save_for_backward(size, *made)
        else:
            ctx.save_for_backward(hidden, bias, target, scale, *weights)
        counted = torch.where(scale == 0, 0.0, losses * scale)
        return counted.sum() if reduced else counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "backward: this loss has no second derivatives, and create_graph=True asks for "
                "them; use log_prob(hidden, classes), which has them"
            )
        made = scaled_gradients(ctx, grad) if ctx.at_once else _recomputed(ctx, grad)
        hidden, bias, *weights = (
            each.to(dtype) if needed else None
            for each, needed, dtype in zip(made, ctx.wanted, ctx.dtypes, strict=True)
        )
        return None, hidden, bias, *(None,) * 5, *weights


def _recomputed(ctx: Any, grad: Tensor) -> list[Tensor]:
    hidden, bias, target, scale, *weights = ctx.saved_tensors
    operation, options = ctx.rest
    scale, size = near_one(scale * grad.to(scale.dtype), hidden.dtype)
    _, *made = _call(operation, hidden, bias, target, scale, weights, options, ctx.wanted)
    return made if size is None else [rounded_product(each, size) for each in made]


def _call(
    operation: str,
    hidden: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor | None,
    weights: Sequence[Tensor],
    options: tuple[Any, ...],
    wanted: Sequence[bool],
) -> list[Tensor]:
    given = hidden, bias, target, row_scale, list(weights), *options, list(wanted)
    if is_eager(hidden):
        return _functions[operation](*given)
    made: list[Tensor] = getattr(torch.ops.lastlayer, operation).default(*given)
    return made


def group_operation(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Registers ``function`` below ``torch.ops.lastlayer`` under its name, without underscores.

    It takes and returns what :class:`GroupProblem` says.
    """
    name = function.__name__.strip("_")
    define = torch.library.custom_op(f"lastlayer::{name}", mutates_args=())
    define(function).register_fake(
        lambda hidden, bias, _target, _row_scale, weights, *rest: _fake_results(
            hidden, bias, weights, rest[-1]
        )
    )
    _functions[name] = function
    return function


def _fake_results(
    hidden: Tensor, bias: Tensor | None, weights: Sequence[Tensor], wanted: Sequence[bool]
) -> list[Tensor]:
    """Empty results of the right shapes and dtypes, for tracing."""
    made = [hidden.new_empty(hidden.shape[:1], dtype=accumulation_dtype(hidden.dtype))]
    for source, needed in zip((hidden, bias, *weights), wanted, strict=True):
        if source is None or not needed:
            made.append(hidden.new_empty(0))
        else:
            dtype = source.dtype if source is hidden else gradient_sum_dtype(source.dtype)
            made.append(source.new_empty(source.shape, dtype=dtype))
    return made


_functions: dict[str, Callable[..., list[Tensor]]] = {}
