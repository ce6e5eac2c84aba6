"""Fenchel-Young losses: the loss that belongs to a map."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lastlayer._checks import (
    check_class_weight,
    check_ignore_index,
    check_reduction,
    check_scores,
    check_target,
)
from lastlayer._torch import accumulation_dtype, in_dtype, is_eager, is_vmapped
from lastlayer.fused.function import RowScale

# Maximum number of scores per chunk: on a GPU, and on a CPU.
_TOGETHER = 1 << 24, 1 << 17


def fenchel_young_loss(
    scores: Tensor,
    target: Tensor,
    predict: Callable[[Tensor], Tensor],
    entropy: Callable[[Tensor], Tensor],
    *,
    class_weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> Tensor:
    r"""The loss that belongs to a map: convex, and zero exactly where the map gives the target.

    .. math:: L(\theta, y) = \Omega^*(\theta) + \Omega(y) - \langle \theta, y \rangle,
              \qquad \nabla_\theta L = \mathrm{predict}(\theta) - y

    with :math:`\Omega = -\mathrm{entropy}` and :math:`\mathrm{predict}(\theta) =
    \arg\max_p \langle \theta, p \rangle + \mathrm{entropy}(p)`. The gradient is computed as
    that difference, never by differentiating through the map, and the Hessian is the Jacobian of
    the map. With softmax and the Shannon entropy it is the cross entropy.

    Choose it for a map of your own; the maps of this library have faster loss functions.

    Cost: one forward of the map and a few passes over the scores; backward computes the difference.

    Args:
        scores: ``(*batch, n)``; -inf masks a class out.
        target: class ids ``(*batch)``, of any integer dtype, or distributions ``(*batch, n)``.
        predict: the map over the last dimension.
        entropy: maps probabilities ``(*batch, n)`` to ``(*batch)``; concave, 0 at a one-hot.
        class_weight: one weight per class, ``(n,)``. A row counts with the weight of its class, or
            with the mean weight of its target distribution; "mean" divides by the sum of these.
        ignore_index: rows with this class id have loss and gradient 0; None if every row counts.
        reduction: "mean" over the rows that are not ignored (0 if all are), "sum" or "none".

    Returns:
        The loss in float32, or in float64 from float64 scores.

    Example:
        >>> scores, target = torch.tensor([[2.0, 0.0, 1.0]]), torch.tensor([0])
        >>> softmax = lambda s: torch.softmax(s, -1)
        >>> shannon = lambda p: torch.special.entr(p).sum(-1)
        >>> fenchel_young_loss(scores, target, softmax, shannon)
        tensor(0.4076)

    Reference:
        Blondel, Martins and Niculae, Learning with Fenchel-Young Losses, JMLR 2020,
        arXiv:1901.02324.
    """
    target, by_class, ignore_index = check_loss(
        scores, target, class_weight, ignore_index, reduction
    )
    return general_loss(
        scores, target, by_class, predict, entropy, class_weight, ignore_index, reduction
    )


def check_loss(
    scores: Any, target: Any, class_weight: Any, ignore_index: Any, reduction: Any
) -> tuple[Tensor, bool, int | None]:
    """Checks arguments; returns the target, whether it has class ids, and ``ignore_index``."""
    check_scores(scores)
    check_reduction(reduction)
    ignore_index = check_ignore_index(ignore_index)
    target, by_class, ignore_index = check_target(target, scores, ignore_index)
    if class_weight is not None:
        check_class_weight(class_weight, scores.shape[-1], scores, "scores")
    return target, by_class, ignore_index


def general_loss(
    scores: Tensor,
    target: Tensor,
    by_class: bool,
    predict: Callable[[Tensor], Tensor],
    entropy: Callable[[Tensor], Tensor],
    class_weight: Tensor | None,
    ignore_index: int | None,
    reduction: str,
    *,
    parameter: Tensor | None = None,
    entropy_slope: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """:func:`fenchel_young_loss` for checked arguments, in torch operations.

    The entropy may have one learned ``parameter`` per row. By the envelope theorem the loss depends
    on it only through the entropy: ``entropy_slope`` is its derivative at fixed probabilities.
    """
    wide: Tensor = in_dtype(scores, accumulation_dtype(scores.dtype))
    ignored = None
    if by_class and ignore_index is not None:
        ignored = target == ignore_index
        target = target.masked_fill(ignored, 0)
    elif not by_class:
        target = target.to(wide.dtype)

    probs = predict(wide)
    gap = _gap(wide.detach(), probs.detach(), target.detach())
    # The entropy may reuse this memory.
    del wide
    losses = _FenchelYoung.apply(
        gap + entropy(probs.detach()),
        scores,
        probs,
        target,
        parameter,
        entropy_slope(probs) if entropy_slope is not None else None,
    )
    if not by_class:
        losses = losses - entropy(target)
    weights = None
    if class_weight is not None:
        class_weight = class_weight.to(losses.dtype)
        weights = class_weight[target] if by_class else target @ class_weight
    if ignored is not None:
        ones = torch.ones_like(losses) if weights is None else weights
        weights = ones.masked_fill(ignored, 0.0)
    return RowScale.of(weights, reduction, losses.numel()).reduce(losses, reduction)


class _FenchelYoung(torch.autograd.Function):
    """The given value of the loss, with the given gradients.

    No gradient flows into ``probs`` and ``slope``: they are the gradient. They have their own
    autograd history, through which second derivatives flow.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        value: Tensor,
        scores: Tensor,
        probs: Tensor,
        target: Tensor,
        parameter: Tensor | None,
        slope: Tensor | None,
    ) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, scores, probs, target, _, slope = inputs
        ctx.save_for_backward(scores, probs, target, slope)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, probs, target, slope = ctx.saved_tensors
        grad_scores = grad_target = grad_parameter = None
        row = grad.unsqueeze(-1)
        if ctx.needs_input_grad[1]:
            grad_scores = score_gradient(probs, target, row, scores.dtype)
        if ctx.needs_input_grad[3]:
            grad_target = -scores * row
        if ctx.needs_input_grad[4]:
            grad_parameter = torch.where(grad == 0, 0.0, slope * grad)
        return None, grad_scores, None, grad_target, grad_parameter, None


def score_gradient(probs: Tensor, target: Tensor, row: Tensor, dtype: torch.dtype) -> Tensor:
    """``(probs - target) * row`` for the factor ``(*batch, 1)`` of each row; differentiable.

    Rows with factor 0 have gradient 0 even if their scores are NaN. So have fully masked rows,
    whose probabilities are all 0.
    """
    dense = target.is_floating_point()
    moves = (row != 0) & (probs.sum(-1, keepdim=True) != 0)
    if torch.is_grad_enabled() or not is_eager(probs) or is_vmapped(row):
        if dense:
            gradient = (probs - target) * row
        else:
            gradient = (probs * row).scatter_add(-1, target.unsqueeze(-1), -row)
        return torch.where(moves, gradient, 0.0).to(dtype)
    # The same in place: one matrix is allocated instead of three.
    gradient = torch.empty_like(probs, dtype=dtype)
    if dense:
        torch.mul(probs - target, row, out=gradient)
    else:
        at_target = target.unsqueeze(-1)
        torch.mul(probs, row, out=gradient)
        # 1 is subtracted before rounding: a rounded probability near 1 would leave few digits.
        own = (probs.gather(-1, at_target) - 1.0) * row
        gradient.scatter_(-1, at_target, own.to(dtype))
    return gradient.masked_fill_(~moves, 0.0)


def _gap(scores: Tensor, probs: Tensor, target: Tensor) -> Tensor:
    """``<scores, probs> - <scores, target>``; an offset of the scores cancels."""
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], math.inf)
    if target.is_floating_point():
        peak = scores.amax(-1, keepdim=True)
        shifted = scores - torch.where(torch.isfinite(peak), peak, 0.0)
        difference = probs - target
        return torch.where(difference != 0, shifted * difference, 0.0).sum(-1)
    at_target = scores.gather(-1, target.unsqueeze(-1))
    if is_eager(scores) and scores.dim() == 2:
        # In chunks of rows, so that intermediate results stay in the cache.
        step = max(1, _TOGETHER[scores.device.type == "cpu"] // scores.shape[1])
        parts = zip(scores.split(step), at_target.split(step), probs.split(step), strict=True)
        gaps = [_leads(*part) for part in parts]
        gap = gaps[0] if len(gaps) == 1 else torch.cat(gaps)
    else:
        gap = _leads(scores, at_target, probs)
    # A masked target has infinite loss; a NaN stays NaN.
    return gap.masked_fill((at_target == -math.inf).squeeze(-1) & ~gap.isnan(), math.inf)


def _leads(scores: Tensor, at_target: Tensor, probs: Tensor) -> Tensor:
    """The mean, weighted by ``probs``, of the scores minus the score of the target."""
    # Clamped to finite values: times a probability of 0 they give 0, and no torch.where is needed.
    lowest = torch.finfo(scores.dtype).min
    leads = (scores - at_target.clamp(min=lowest)).clamp(min=lowest)
    return leads.mul_(probs).sum(-1)
