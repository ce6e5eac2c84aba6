"""Top-k softmax in plain torch: the definition that the kernels are tested against."""

import math

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype


def forward(scores: Tensor, k: int) -> Tensor:
    """Softmax over the ``k`` largest scores of a row, the first of equal ones; zero elsewhere."""
    if scores.numel() == 0:
        return torch.empty_like(scores)
    values = scores.to(accumulation_dtype(scores.dtype))
    edge = values.topk(min(k, values.shape[-1]), dim=-1).values[..., -1:]
    above, equal = values > edge, values == edge
    left = k - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1) <= left))
    peak = values.amax(-1, keepdim=True)
    empty = peak == -math.inf
    kept = torch.where(taken, values, -math.inf) - peak.masked_fill(empty, 0.0)
    probs = torch.softmax(kept, -1)
    broken = ~torch.isfinite(peak) & ~empty
    return probs.masked_fill(broken, math.nan).masked_fill(empty, 0.0).to(scores.dtype)
