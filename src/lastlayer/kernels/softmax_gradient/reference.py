"""In plain torch: defines the truth."""

import math

import torch
from torch import Tensor


def forward_(
    scores: Tensor,
    target: Tensor,
    true: Tensor,
    lse: Tensor,
    push: Tensor,
    softcap: float,
    temperature: float,
) -> None:
    """``scores`` (rows, classes) become the gradient; the rest has one number a row."""
    values = scores.to(lse.dtype)
    slope: float | Tensor = 1.0 / temperature
    if softcap:
        bent, out = torch.tanh(values / softcap), values == -math.inf
        values, slope = softcap * bent, (1.0 - bent.square()) / temperature
        values = values.masked_fill(out, -math.inf)
    gradient = torch.exp(values / temperature - lse.unsqueeze(-1)) * push.unsqueeze(-1) * slope
    here = torch.arange(scores.shape[1], device=scores.device) == target.unsqueeze(-1)
    scores.copy_(torch.where(here, true.unsqueeze(-1), gradient))
