"""Scores of chosen classes in plain torch: defines the truth."""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype

# Class vectors gathered at a time, in numbers: bounds the memory.
_GATHERED = 1 << 24


def forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor) -> Tensor:
    """``hidden`` (n, d), ``weight`` (v, d), ``classes`` (n, k) to scores (n, k).

    Accumulated in float32, or in float64 from float64. A class of -1 is padding: its score is 0.
    """
    dtype = accumulation_dtype(hidden.dtype)
    scores = torch.empty(classes.shape, dtype=dtype, device=hidden.device)
    rows = max(1, _GATHERED // max(1, classes.shape[1] * hidden.shape[1]))
    for first in range(0, hidden.shape[0], rows):
        part = slice(first, first + rows)
        vectors = weight[classes[part].clamp_min(0)].to(dtype)
        scores[part] = torch.einsum("nd,nkd->nk", hidden[part].to(dtype), vectors)
    if bias is not None:
        scores += bias.to(dtype)[classes.clamp_min(0)]
    return scores.masked_fill_(classes < 0, 0.0)
