"""The loss of entmax on rows of scores in plain torch, with all of them sorted: the truth."""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype


def forward_(scores: Tensor, target: Tensor, row_scale: Tensor | None, alpha: float) -> Tensor:
    """``<p - y, scores> + H(p)`` for each row, ``alpha`` 1.5 or 2.

    Where ``row_scale`` is given, ``scores`` become the gradient of ``sum(row_scale * loss)``.
    """
    dtype = accumulation_dtype(scores.dtype)
    values = scores.to(dtype)
    distance = (values - values.amax(-1, keepdim=True)) * (alpha - 1.0)
    ordered = distance.sort(dim=-1, descending=True).values
    count = torch.arange(1, ordered.shape[-1] + 1, device=scores.device, dtype=dtype)
    mean = ordered.cumsum(-1) / count
    if alpha == 2.0:
        thresholds = mean - 1.0 / count
    else:
        spread = (ordered.square().cumsum(-1) / count - mean.square()) * count
        thresholds = mean - ((1.0 - spread).clamp(min=0) / count).sqrt()
    size = (ordered >= thresholds).sum(-1, keepdim=True)
    margin = (distance - thresholds.gather(-1, size - 1)).clamp(min=0)
    probs = margin if alpha == 2.0 else margin.square()
    place = target.unsqueeze(-1)
    lead = torch.where(probs > 0, values - values.gather(-1, place), 0.0)
    entropy = (probs - probs.pow(alpha)) / (alpha * (alpha - 1.0))
    loss: Tensor = (probs * lead + entropy).sum(-1)
    if row_scale is not None:
        one = torch.ones_like(place, dtype=dtype)
        scores.copy_(probs.scatter_add(-1, place, -one) * row_scale.to(dtype).unsqueeze(-1))
    return loss
