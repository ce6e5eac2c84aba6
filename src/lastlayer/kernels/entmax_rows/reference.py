"""The loss of entmax from its probabilities in plain torch: defines the truth."""

import math

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype


def forward_(
    probs: Tensor, scores: Tensor, target: Tensor, row_scale: Tensor | None, alpha: float
) -> Tensor:
    """``<p - y, scores> + H(p)`` for each row.

    Where ``row_scale`` is given, ``probs`` become the gradient of ``sum(row_scale * loss)``. A row
    without any probability costs +inf and has no gradient; nor has one of scale 0, even of NaN.
    """
    dtype = accumulation_dtype(probs.dtype)
    place = target.unsqueeze(-1)
    shares, values = probs.to(dtype), scores.to(dtype)
    at_target = values.gather(-1, place)
    present = shares > 0
    logs = torch.log(torch.where(present, shares, 1.0))
    if alpha == 1.0:
        entropy = -(shares * logs).sum(-1)
    else:
        entropy = -(shares * torch.expm1((alpha - 1.0) * logs)).sum(-1) / (alpha * (alpha - 1.0))
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
    loss = (shares * lead).sum(-1) + entropy - (mass - 1.0) * price
    # A target that is out of the running cannot be met; a NaN stays one.
    out = (at_target.squeeze(-1) == -math.inf) & ~mass.isnan()
    loss = torch.where(out, math.inf, loss)
    if row_scale is not None:
        one = (mass != 0).to(dtype).unsqueeze(-1)
        gradient = shares.scatter_add(-1, place, -one)
        scale = row_scale.to(dtype).unsqueeze(-1)
        probs.copy_(torch.where(scale == 0, 0.0, gradient * scale))
    return loss
