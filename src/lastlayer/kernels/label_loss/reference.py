"""Binary cross entropy and the asymmetric loss in plain torch: the reference for tests.

Losses can be differentiated with respect to scores and targets, and gradients once more.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lastlayer._torch import accumulation_dtype, in_dtype


def forward(
    scores: Tensor, target: Tensor, mask: Tensor | None, gamma_negative: float,
    gamma_positive: float, margin: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss of each row, and which rows have a class that is kept; empty without a mask."""
    losses = losses_of(scores, target, mask, gamma_negative, gamma_positive, margin, True)
    if mask is None:
        return losses, losses.new_empty(0, dtype=torch.bool)
    return losses, mask.any(-1)


def backward(
    scores: Tensor, target: Tensor, mask: Tensor | None, gamma_negative: float,
    gamma_positive: float, margin: float, focus_gradient: bool, grad: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of the scores, in their dtype; ``grad`` has a number per row, or one for all."""
    gammas = gamma_negative, gamma_positive
    slope = gradient(scores, target, mask, *gammas, margin, focus_gradient)
    row = grad.reshape(-1, 1)
    nothing = row == 0 if mask is None else (row == 0) | ~mask
    return torch.where(nothing, 0.0, slope * row).to(scores.dtype)


def slab_(
    scores: Tensor, gamma_negative: float, gamma_positive: float, margin: float,
    focus_gradient: bool, smoothing: float, row_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    """The loss of each row if all labels are ``smoothing``; scores of -inf are ignored.

    If ``row_scale`` is given, one number per row, scores become the gradient of
    ``sum(row_scale * losses)``.
    """
    numbers = gamma_negative, gamma_positive, margin
    target = torch.full_like(scores, smoothing, dtype=accumulation_dtype(scores.dtype))
    target.masked_fill_(scores == -torch.inf, 0.0)
    losses, _ = forward(scores, target, None, *numbers)
    if row_scale is not None:
        scores.copy_(backward(scores, target, None, *numbers, focus_gradient, row_scale))
    return losses


def losses_of(
    scores: Tensor, target: Tensor, mask: Tensor | None, gamma_negative: float,
    gamma_positive: float, margin: float, focus_gradient: bool,
) -> Tensor:  # fmt: skip
    """The losses of rows ``(*batch, n)``; the mask may be broadcast."""
    found, missed, labels = _sides(scores, target, mask)
    positives = labels * logsigmoid(found)
    if gamma_positive:
        positives = positives * _focus(torch.sigmoid(-found), gamma_positive, focus_gradient)
    negatives = (1.0 - labels) * logsigmoid(-missed)
    if gamma_negative or margin:
        shifted = torch.sigmoid(missed) - margin
        counts = ~(shifted <= 0)  # True for NaN
        if margin:
            rest = torch.where(counts, torch.sigmoid(-missed) + margin, 1.0)
            negatives = (1.0 - labels) * rest.log()
        if gamma_negative:
            # Dropped entries are replaced, since a power below 1 has an infinite slope at 0.
            inside = torch.where(counts, shifted, 1.0)
            negatives = negatives * _focus(inside, gamma_negative, focus_gradient)
        negatives = torch.where(counts, negatives, 0.0)
    return -(positives + negatives).sum(-1)


def gradient(
    scores: Tensor, target: Tensor, mask: Tensor | None, gamma_negative: float,
    gamma_positive: float, margin: float, focus_gradient: bool,
) -> Tensor:  # fmt: skip
    """The gradient of each row's loss, by operations that can be differentiated again."""
    found, missed, labels = _sides(scores, target, mask)
    up = (1.0 - labels) * _slope(missed, gamma_negative, margin, focus_gradient)
    return up - labels * _slope(-found, gamma_positive, 0.0, focus_gradient)


def _slope(z: Tensor, gamma: float, margin: float, focus_gradient: bool) -> Tensor:
    """The derivative of ``-q**gamma * log(1 - q)`` for ``q = sigmoid(z) - margin``; 0 if q <= 0."""
    wrong, right = torch.sigmoid(z), torch.sigmoid(-z)
    if not gamma and not margin:
        return wrong
    inside = wrong - margin
    counts = ~(inside <= 0)
    inside = torch.where(counts, inside, 1.0)
    slope = wrong
    if margin:
        rest = torch.where(counts, right + margin, 1.0)
        slope, cost = wrong * right / rest, -rest.log()
    else:
        # At +inf the cost is infinite, but its term of the slope is 0.
        cost = -logsigmoid(-torch.where(z == torch.inf, 0.0, z))
    if gamma:
        if focus_gradient:
            slope = slope + gamma * wrong * right * cost / inside
        slope = slope * _focus(inside, gamma, focus_gradient)
    return torch.where(counts, slope, 0.0)


def _sides(scores: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Scores for the terms of positives and of negatives, and the labels.

    If a class has no such term, its score is replaced by one that is infinitely right, whose loss
    and gradient are exactly 0, even if the score is NaN.
    """
    dtype = accumulation_dtype(scores.dtype)
    scores, labels = in_dtype(scores, dtype), in_dtype(target, dtype)
    if mask is None:
        positive, negative = labels > 0, labels < 1
    else:
        positive, negative = mask & (labels > 0), mask & (labels < 1)
        labels = torch.where(mask, labels, 0.0)
    found = torch.where(positive, scores, torch.inf)
    return found, torch.where(negative, scores, -torch.inf), labels


def _focus(probability: Tensor, gamma: float, differentiated: bool) -> Tensor:
    return (probability if differentiated else probability.detach()) ** gamma
