"""The loss of entmax from probabilities and from listed scores in plain torch."""

import math

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels.entmax import exp_remainder
from lastlayer.kernels.entmax_rows._listed import entropy, loss_of_listed


def forward_(
    probs: Tensor, scores: Tensor, target: Tensor, row_scale: Tensor | None, alpha: float,
    row_alpha: Tensor | None = None, slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``<p - y, scores> + H(p) - H(y)`` for each row; y is a class, or a distribution (rows, n).

    ``slopes`` receives the derivative with respect to ``row_alpha``. By the envelope theorem it is
    computed at fixed probabilities. If ``row_scale`` is given, ``probs`` becomes the gradient of
    ``sum(row_scale * loss)``. Rows whose probabilities are all 0 have loss +inf and zero gradient.
    Rows with scale 0 have zero gradient, even if they are NaN.
    """
    dtype = accumulation_dtype(probs.dtype)
    shares, values = probs.to(dtype), scores.to(dtype)
    if target.dim() == 2:
        wanted = target.to(dtype)
        own, move = _entropies(shares, alpha, row_alpha)
        theirs, their_move = _entropies(wanted, alpha, row_alpha)
        if slopes is not None:
            slopes.copy_(move - their_move)
        return _dense_(probs, shares, values, wanted, row_scale) + own - theirs
    place = target.unsqueeze(-1)
    at_target = values.gather(-1, place)
    present = shares > 0
    lead = torch.where(present, values - at_target, 0.0)
    mass, leads = shares.sum(-1), (shares * lead).sum(-1)
    own, move = _entropies(shares, alpha, row_alpha)
    if slopes is not None:
        slopes.copy_(move)
    # Rounded probabilities need not sum to 1. To first order the error of the loss is (mass - 1)
    # times the price of probability, which is score plus slope of the entropy and the same for each
    # class of the support. The sum of p times that slope is alpha H - mass / alpha.
    order = alpha if row_alpha is None else row_alpha.to(dtype)
    price = (leads + order * own) / mass - 1.0 / order
    known = leads + own
    # If the loss overflows the dtype, the correction would be infinite as well.
    loss = torch.where(leads == math.inf, leads, known - (mass - 1.0) * price)
    # A masked target has infinite loss; NaN is kept.
    out = (at_target.squeeze(-1) == -math.inf) & ~mass.isnan()
    loss = torch.where(out, math.inf, loss)
    if row_scale is not None:
        one = (mass != 0).to(dtype).unsqueeze(-1)
        gradient = shares.scatter_add(-1, place, -one)
        scale = row_scale.to(dtype).unsqueeze(-1)
        probs.copy_(torch.where(scale == 0, 0.0, gradient * scale))
    return loss


def _dense_(
    probs: Tensor, shares: Tensor, values: Tensor, wanted: Tensor, row_scale: Tensor | None
) -> Tensor:
    """Returns ``<p - y, scores>``, and overwrites ``probs`` with the gradient."""
    peak = values.amax(-1, keepdim=True)
    distance = values - torch.where(torch.isfinite(peak), peak, 0.0)
    apart = shares - wanted
    gap = torch.where(apart == 0, 0.0, apart * distance).sum(-1)
    if row_scale is not None:
        scale = row_scale.to(values.dtype).unsqueeze(-1)
        moves = (scale != 0) & (shares != 0).any(-1, keepdim=True)
        probs.copy_(torch.where(moves, apart * scale, 0.0))  # may share memory with shares
    return gap


def _entropies(probs: Tensor, alpha: float, row_alpha: Tensor | None) -> tuple[Tensor, Tensor]:
    """The entropy of each row, and its derivative with respect to ``row_alpha`` if given."""
    if row_alpha is None:
        return (made := entropy(probs, alpha)), made
    # H = -sum p log(p) f(x) / alpha with f(x) = (exp(x) - 1) / x at x = (alpha - 1) log(p).
    logs, order = torch.log(torch.where(probs > 0, probs, 1.0)), row_alpha.to(probs.dtype)
    x = (order - 1.0).unsqueeze(-1) * logs
    remainder = exp_remainder(x)
    ratio = 1.0 + x * remainder
    made = -(probs * logs * ratio).sum(-1) / order
    return made, -(made + (probs * logs.square() * (ratio - remainder)).sum(-1)) / order


def listed(
    scores: Tensor, classes: Tensor, target: Tensor, target_scores: Tensor,
    row_scale: Tensor | None, class_weight: Tensor | None, alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``<p - y, scores> + H(p)`` of each row times the weight of its target, and the gradient.

    Args:
        scores: float32 or float64 ``(rows, k)``, of the listed classes.
        classes: int64 ``(rows, k)``, -1 for padding.
        target: int64 ``(rows,)``.
        target_scores: ``(rows,)``.
        row_scale: ``(rows,)``, the factor of the gradient; None if no gradient is wanted.
        class_weight: ``(v,)`` or None.
        alpha: at least 1.

    Returns:
        The losses ``(rows,)``, and the gradient of the scores as values and classes ``(rows, k +
        1)``, the target last and 0 for padding; both are empty without ``row_scale``. Rows whose
        probabilities are all 0 have loss +inf and zero gradient.
    """
    given = scores, classes, target, target_scores, row_scale, class_weight, alpha
    return loss_of_listed("reference", *given)
