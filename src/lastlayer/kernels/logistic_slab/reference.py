"""In plain torch: defines the truth."""

import torch
from torch import Tensor
from torch.nn import functional

from lastlayer._torch import accumulation_dtype


def forward_(scores: Tensor, scale: Tensor | None, smoothing: float) -> Tensor:
    """The losses of all rows (rows, labels), added up; ``scale`` has one number a row."""
    values = scores.to(accumulation_dtype(scores.dtype))
    absent = values == -torch.inf
    # Not functional.softplus: it is linear from 20 on.
    loss = -functional.logsigmoid(-values)
    if smoothing:
        loss -= smoothing * torch.where(absent, 0.0, values)
    if scale is not None:
        gradient = torch.where(absent, 0.0, torch.sigmoid(values) - smoothing)
        scores.copy_(gradient * scale.unsqueeze(-1))
    return loss.sum(-1)
