"""On a CPU: torch's vectorised functions, on as many rows as a cache holds."""

import torch
from torch import Tensor
from torch.nn import functional

from lastlayer._torch import accumulation_dtype

_NUMBERS = 1 << 16


def forward_(scores: Tensor, scale: Tensor | None, smoothing: float) -> Tensor:
    """As the reference's."""
    dtype = accumulation_dtype(scores.dtype)
    losses = scores.new_empty(scores.shape[0], dtype=dtype)
    rows = max(1, _NUMBERS // max(1, scores.shape[1]))
    for first in range(0, scores.shape[0], rows):
        part = slice(first, first + rows)
        values = scores[part].to(dtype)
        loss = functional.logsigmoid(-values).sum(-1).neg_()
        absent = values == -torch.inf if smoothing else None
        if absent is not None:
            loss -= smoothing * values.masked_fill(absent, 0.0).sum(-1)
        losses[part] = loss
        if scale is None:
            continue
        gradient = values.sigmoid()
        if absent is not None:
            gradient.sub_(smoothing).masked_fill_(absent, 0.0)
        scores[part] = gradient.mul_(scale[part].unsqueeze(-1))
    return losses
