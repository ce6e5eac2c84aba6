"""ZLPR in plain torch: the reference. Differentiable by scores, targets and values."""

import math

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype

Rows = tuple[Tensor, Tensor, Tensor]


def forward(
    scores: Tensor, target: Tensor | None, lists: list[Tensor], values: Tensor | None,
    mask: Tensor | None, smoothing: float,
) -> Rows:  # fmt: skip
    """Losses ``(rows,)``, stats ``(4, rows)``, and which rows have a class that counts.

    The last result is empty without a mask.
    """
    target = dense_target(scores, target, lists, values, smoothing)
    losses, stats, counts = losses_of(scores, target, mask)
    return losses, stats, counts if mask is not None else counts.new_empty(0)


def losses_of(scores: Tensor, target: Tensor, mask: Tensor | None) -> Rows:
    """Like ``forward`` with a dense target; returns which rows count even without a mask."""
    negatives, positives, allowed = _sides(scores, target, mask)
    below, *left = _log_one_plus(*_terms(*negatives))
    above, *right = _log_one_plus(*_terms(*positives))
    return below + above, torch.stack([*left, *right]), allowed.any(-1)


def gradient(scores: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """The derivative of each row's loss by its scores; itself differentiable."""
    negatives, positives, allowed = _sides(scores, target, mask)
    slope = _shares(*_terms(*negatives)) - _shares(*_terms(*positives))
    return torch.where(allowed, slope, 0.0)


def backward(
    scores: Tensor, target: Tensor | None, lists: list[Tensor], values: Tensor | None,
    mask: Tensor | None, smoothing: float, _stats: Tensor, grad: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of the scores, in their dtype; recomputes the stats.

    ``grad`` has one number per row, or one for all rows.
    """
    row, target = grad.reshape(-1, 1), dense_target(scores, target, lists, values, smoothing)
    product = torch.where(row == 0, 0.0, gradient(scores, target, mask) * row)
    return product.to(scores.dtype)


def dense_target(
    scores: Tensor, target: Tensor | None, lists: list[Tensor], values: Tensor | None,
    smoothing: float,
) -> Tensor:  # fmt: skip
    """Labels of the shape of the scores; listed ids out of range are ignored."""
    if target is not None:
        return target
    n_rows, n = scores.shape
    classes, rows = lists[0].reshape(-1), torch.arange(n_rows, device=scores.device)
    if len(lists) == 1:
        rows = rows.repeat_interleave(lists[0].shape[1], output_size=classes.shape[0])
    else:
        rows = rows.repeat_interleave(lists[-1].diff(), output_size=classes.shape[0])
    dtype = accumulation_dtype(scores.dtype)
    labels = torch.ones_like(classes, dtype=dtype) if values is None else values.to(dtype)
    others = torch.full((n_rows, n + 1), smoothing, dtype=dtype, device=scores.device)
    place = torch.where((classes < 0) | (classes > n), n, classes)
    return torch.index_put(others, (rows, place), labels)[:, :n]


def _sides(scores: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Rows, Rows, Tensor]:
    """Exponents, weights and masks of the sums of negatives and positives; and the mask."""
    dtype = accumulation_dtype(scores.dtype)
    scores, labels = scores.to(dtype), target.to(dtype)
    allowed = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask
    negatives = scores, 1.0 - labels, allowed & (labels < 1)
    return negatives, (-scores, labels, allowed & (labels > 0)), allowed


def _terms(x: Tensor, weight: Tensor, keep: Tensor) -> Rows:
    """``weight · exp(x - peak)``, the peak, and the term 1 on the same scale, ``exp(-peak)``."""
    if x.shape[-1]:
        peak = torch.where(keep, x, 0.0).detach().amax(-1).clamp(min=0.0)
    else:
        peak = x.new_zeros(x.shape[:-1])
    # Masked values are replaced first, so that no derivative is 0 · NaN.
    finite = keep & (x != math.inf)
    distance = torch.where(finite, x, 0.0) - torch.where(finite, peak.unsqueeze(-1), 0.0)
    return torch.where(keep, weight, 0.0) * distance.exp(), peak, torch.exp(-peak)


def _log_one_plus(terms: Tensor, peak: Tensor, one: Tensor) -> Rows:
    total = terms.sum(-1)
    shifted = peak > 0
    value = torch.where(
        shifted,
        peak + torch.where(shifted, total + one, 1.0).log(),
        torch.where(shifted, 0.0, total).log1p(),
    )
    return value, peak, total + one


def _shares(terms: Tensor, _peak: Tensor, one: Tensor) -> Tensor:
    return terms / (terms.sum(-1) + one).unsqueeze(-1)


def slab_sums(scores: Tensor, negated: bool) -> tuple[Tensor, Tensor]:
    """The logsumexp of scores (rows, labels), and that of minus the scores or an empty tensor."""
    values = scores.to(accumulation_dtype(scores.dtype))
    if not negated:
        return values.logsumexp(-1), values.new_empty(0)
    return values.logsumexp(-1), _negated(values).logsumexp(-1)


def slab_gradient_(scores: Tensor, scale: Tensor, above: Tensor, below: Tensor | None) -> None:
    """Overwrites ``scores`` (rows, labels) with the gradient; other arguments are per row."""
    values = scores.to(accumulation_dtype(scores.dtype))
    gradient = torch.exp(values - above.unsqueeze(-1))
    if below is not None:
        gradient -= torch.exp(_negated(values) - below.unsqueeze(-1))
    scores.copy_(gradient.mul_(scale.unsqueeze(-1)))


def _negated(values: Tensor) -> Tensor:
    return torch.where(values == -torch.inf, values, -values)
