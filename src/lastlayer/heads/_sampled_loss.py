"""The loss of rows against drawn classes as one differentiable operation.

A row has targets, whose scores are computed one by one, and drawn classes. Where these are the
same for all rows their scores are one matrix product. What is made of the scores is a
:class:`Rule`. The forward pass leaves small pieces of the gradient: that of hidden, that of the
vectors drawn, and the slope of each target's score. Backward scales them and adds up what belongs
to the same class; it can be repeated. Where the upstream gradient is one number a row
(``reduction="none"``) backward makes the scores again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer._torch import is_eager
from lastlayer.fused._gradient_scale import near_one
from lastlayer.heads._group_loss import row_scale
from lastlayer.heads._sampled_one_target import suits
from lastlayer.heads._sampled_pass import Pieces, run
from lastlayer.heads._sampled_rule import Rule
from lastlayer.heads._sampled_touched import class_gradients
from lastlayer.kernels import sampled_rows

__all__ = ["Draws", "Rule", "SampledLoss", "SampledProblem", "sampled_loss"]


class Draws(NamedTuple):
    """Classes that rows are compared with."""

    ids: Tensor
    """int64 ``(m,)``, the same for every row, or ``(n, m)``."""
    log_expected: Tensor
    """Taken off their scores, such as log(m q), of the shape of ids; inf leaves a class out."""
    n_exact: int = 0
    """The first so many are no draws: they are neither shifted nor averaged over."""


class SampledProblem(NamedTuple):
    """Rows, their targets, and what these are compared with."""

    hidden: Tensor
    """``(n, d)``, in the dtype of the products."""
    weight: Tensor
    """``(v, d)``."""
    bias: Tensor | None
    """``(v,)``."""
    target: Tensor
    """int64 ``(n, p)``, negative for none: a row without a target does not count."""
    draws: Draws
    rule: Rule
    target_log_expected: Tensor | None = None
    """What is taken off the scores of targets, ``(n, p)``."""
    shift: Tensor | None = None
    """What is added to the scores of all draws of a row, ``(n,)``."""
    row_shift: Tensor | None = None
    """What is added to all scores of a row, ``(n,)``; differentiable, for a logistic rule."""
    labels: tuple[Tensor, Tensor] | None = None
    """What hits are told by instead of ids: of the draws, and of the targets."""
    temperature: float = 1.0
    """Divides scores, before anything is added to them."""


class SampledLoss(NamedTuple):
    """What comes of it."""

    loss: Tensor
    """Reduced, or ``(n,)``."""
    ess: Tensor
    """The effective sample size of the draws of each row, ``(n,)``; 0 for a logistic rule."""


def sampled_loss(
    problem: SampledProblem,
    reduction: str,
    *,
    sparse: bool = False,
    chunk_rows: int | str = "auto",
) -> SampledLoss:
    """The loss of all rows together, or of each row; 0 where a row has no target.

    Args:
        problem: the rows.
        reduction: "mean" over the rows that have a target, "sum" or "none".
        sparse: whether the gradients of weight and bias have only the rows that are touched, in
            the order of their ids. On a CPU they are coalesced. On a GPU, where the host would
            have to wait for their number, there is a slot for each draw and each target: the first
            slot of a class has its gradient, and the others, which are 0, are still there.
        chunk_rows: rows of scores held at a time, "auto" or "low".
    """
    hidden, weight, bias, target, draws, rule = problem[:6]
    recording = torch.is_grad_enabled()
    wanted = tuple(
        recording and each is not None and each.requires_grad
        for each in (hidden, weight, bias, problem.row_shift)
    )
    scale = _row_scale(hidden, target, reduction)
    loss, ess = _SampledLoss.apply(
        hidden, weight, bias, problem.row_shift, target, *draws[:2], scale,
        problem.target_log_expected, problem.shift, problem.labels, problem.temperature,
        draws.n_exact, rule, reduction != "none", sparse, str(chunk_rows), wanted,
    )  # fmt: skip
    return SampledLoss(loss, ess)


class _SampledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        row_shift: Tensor | None,
        target: Tensor,
        ids: Tensor,
        log_expected: Tensor,
        scale: Tensor,
        target_log_expected: Tensor | None,
        shift: Tensor | None,
        labels: tuple[Tensor, Tensor] | None,
        temperature: float,
        n_exact: int,
        rule: Rule,
        reduced: bool,
        sparse: bool,
        chunk_rows: str,
        wanted: tuple[bool, bool, bool, bool],
    ) -> tuple[Tensor, Tensor]:
        if not suits(hidden, weight, target, ids, labels):
            hidden = _without_uncounted(hidden, scale)
        at_once = any(wanted) and reduced
        factors, size = near_one(scale, hidden.dtype)
        of_draws, of_targets = (None, None) if labels is None else labels
        given = (
            hidden, weight, bias, row_shift, target, ids, log_expected, target_log_expected, shift,
            of_draws, of_targets,
        )  # fmt: skip
        rest = temperature, n_exact, list(rule), chunk_rows
        losses, ess, *made = _call(*given, scale, factors if at_once else None, *rest, list(wanted))
        ctx.at_once, ctx.wanted, ctx.sparse, ctx.rest = at_once, wanted, sparse, rest
        ctx.apart = ids.dim() == 2
        ctx.like = [
            (None, None) if each is None else (each.dtype, each.shape)
            for each in (hidden, weight, bias, row_shift)
        ]
        if at_once:
            ctx.save_for_backward(hidden, size, *made)
        else:
            ctx.save_for_backward(scale, *given)
        ctx.mark_non_differentiable(ess)
        return (losses.sum() if reduced else losses), ess

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "backward: a sampled loss has no second derivatives, and create_graph=True asks "
                "for them; use log_prob(hidden, classes), which has them"
            )
        if ctx.at_once:
            hidden, size, *made = ctx.saved_tensors
        else:
            scale, *given = ctx.saved_tensors
            hidden = given[0]
            factors, size = near_one(scale * grad.to(scale.dtype), hidden.dtype)
            _, _, *made = _call(*given, scale, factors, *ctx.rest, list(ctx.wanted))
            grad = scale.new_ones(())
        factor = grad if size is None else grad * size
        return *_gradients(ctx, factor, hidden, Pieces(*made)), *(None,) * 14


def _gradients(ctx: Any, factor: Tensor, hidden: Tensor, pieces: Pieces) -> list[Tensor | None]:
    """Of hidden, weight, bias and row_shift, from the pieces of the forward pass."""
    to_hidden, to_weight, to_bias, to_shift = ctx.wanted
    (dtype, _), (weight_dtype, shape), (bias_dtype, _), (shift_dtype, _) = ctx.like
    weight = bias = None
    if to_weight or to_bias:
        weight, bias = class_gradients(
            pieces, factor, hidden, shape, (weight_dtype, bias_dtype),
            (to_weight, to_bias), ctx.sparse, ctx.apart,
        )  # fmt: skip
    return [
        _scaled(pieces.hidden, factor, dtype) if to_hidden else None,
        weight,
        bias,
        (pieces.row_shift * factor).to(shift_dtype) if to_shift else None,
    ]


def _row_scale(hidden: Tensor, target: Tensor, reduction: str) -> Tensor:
    if hidden.device.type == "cuda" and hidden.dtype != torch.float64:
        scale: Tensor = sampled_rows.row_scale("auto", hidden, target, reduction == "mean")
        return scale
    return row_scale(hidden, (target >= 0).any(-1), reduction, 1.0)


def _scaled(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded once."""
    if torch.compiler.is_compiling():
        return (values * factor).to(dtype)
    return torch.mul(values, factor, out=values.new_empty(values.shape, dtype=dtype))


def _without_uncounted(hidden: Tensor, scale: Tensor) -> Tensor:
    """0 in rows that do not count, whose NaN would come into the products."""
    counts = scale != 0
    if is_eager(hidden) and hidden.device.type == "cpu" and bool(counts.all()):
        return hidden
    return torch.where(counts.unsqueeze(-1), hidden, 0.0)


def _call(*given: Any) -> Sequence[Tensor]:
    if is_eager(given[0]):
        return run(*given)
    made: Sequence[Tensor] = torch.ops.lastlayer.sampled_loss.default(*given)
    return made
