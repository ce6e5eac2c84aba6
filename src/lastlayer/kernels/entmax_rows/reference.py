"""The loss of entmax from probabilities and from listed scores in plain torch."""

import math

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels.entmax_rows._listed import entropy, loss_of_listed


def forward_(
    probs: Tensor, scores: Tensor, target: Tensor, row_scale: Tensor | None, alpha: float
) -> Tensor:
    """``<p - y, scores> + H(p) - H(y)`` for each row; y is a class, or a distribution (rows, n).

    Where ``row_scale`` is given, ``probs`` become the gradient of ``sum(row_scale * loss)``. A row
    without any probability costs +inf and has no gradient; nor has one of scale 0, even of NaN.
    """
    dtype = accumulation_dtype(probs.dtype)
    shares, values = probs.to(dtype), scores.to(dtype)
    if target.dim() == 2:
        return _dense_(probs, shares, values, target.to(dtype), row_scale, alpha)
    place = target.unsqueeze(-1)
    at_target = values.gather(-1, place)
    present = shares > 0
    logs = torch.log(torch.where(present, shares, 1.0))
    # Rounded probabilities need not sum to 1. To first order the loss is then off by what is
    # missing times the price of probability: score plus slope of the entropy, which is the same
    # for each class of the support.
    if alpha == 1.0:
        slope = -logs - 1.0
    else:
        slope = -(alpha * torch.expm1((alpha - 1.0) * logs) + (alpha - 1.0))
        slope = slope / (alpha * (alpha - 1.0))
    lead = torch.where(present, values - at_target, 0.0)
    mass = shares.sum(-1)
    price = (shares * (lead + slope)).sum(-1) / mass
    leads = (shares * lead).sum(-1)
    known = leads + entropy(shares, alpha)
    # Beyond the range of the dtype the correction would be infinite as well.
    loss = torch.where(leads == math.inf, leads, known - (mass - 1.0) * price)
    # A masked target cannot be met; a NaN stays one.
    out = (at_target.squeeze(-1) == -math.inf) & ~mass.isnan()
    loss = torch.where(out, math.inf, loss)
    if row_scale is not None:
        one = (mass != 0).to(dtype).unsqueeze(-1)
        gradient = shares.scatter_add(-1, place, -one)
        scale = row_scale.to(dtype).unsqueeze(-1)
        probs.copy_(torch.where(scale == 0, 0.0, gradient * scale))
    return loss


def _dense_(
    probs: Tensor, shares: Tensor, values: Tensor, wanted: Tensor, row_scale: Tensor | None,
    alpha: float,
) -> Tensor:  # fmt: skip
    peak = values.amax(-1, keepdim=True)
    distance = values - torch.where(torch.isfinite(peak), peak, 0.0)
    apart = shares - wanted
    gap = torch.where(apart == 0, 0.0, apart * distance).sum(-1)
    loss = gap + entropy(shares, alpha) - entropy(wanted, alpha)
    if row_scale is not None:
        scale = row_scale.to(values.dtype).unsqueeze(-1)
        moves = (scale != 0) & (shares != 0).any(-1, keepdim=True)
        probs.copy_(torch.where(moves, apart * scale, 0.0))  # which may be the memory of shares
    return loss


def listed(
    scores: Tensor, classes: Tensor, target: Tensor, target_scores: Tensor,
    row_scale: Tensor | None, class_weight: Tensor | None, alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``<p - y, scores> + H(p)`` of each row times the weight of its target, and its gradient.

    Args:
        scores: float32 or float64 ``(rows, k)``, of the listed classes.
        classes: int64 ``(rows, k)``, -1 for none.
        target: int64 ``(rows,)``.
        target_scores: ``(rows,)``.
        row_scale: ``(rows,)``, what the gradient is multiplied by; None where none is wanted.
        class_weight: ``(v,)`` or None.
        alpha: at least 1.

    Returns:
        The losses ``(rows,)``, and the gradient of the scores as values and classes ``(rows, k +
        1)``, the target last and 0 for padding; both are empty without ``row_scale``. A row without
        any probability costs +inf and has no gradient.
    """
    given = scores, classes, target, target_scores, row_scale, class_weight, alpha
    return loss_of_listed("reference", *given)
