"""Sums of the entries of each class in plain torch: defines the truth."""

import torch
from torch import Tensor

# Numbers gathered at a time: bounds the memory.
_GATHERED = 1 << 24


def forward(
    columns: Tensor,
    column_biases: Tensor,
    slopes: Tensor,
    hidden: Tensor,
    order: Tensor,
    starts: Tensor,
    factor: Tensor,
    to_weight: bool,
    to_bias: bool,
) -> tuple[Tensor, Tensor]:
    """Sums for weight (groups, d) and bias (groups,); empty where not wanted.

    Args:
        columns: ``(c, d)``, of the dtype of the result; empty where only biases are wanted.
        column_biases: ``(c,)``; empty where only vectors are wanted.
        slopes: ``(n, q)``, of the dtype of the result.
        hidden: ``(n, d)``.
        order: int64 ``(c + n q,)``.
        starts: int64 ``(groups + 1,)``.
        factor: one number.
        to_weight: sum vectors.
        to_bias: sum biases.
    """
    groups, q = starts.shape[0] - 1, max(1, slopes.shape[1])
    c = order.shape[0] - slopes.numel()
    number = torch.arange(order.shape[0], device=order.device)
    group = torch.searchsorted(starts, number, right=True) - 1
    weight = slopes.new_zeros((groups, hidden.shape[1]) if to_weight else 0)
    bias = slopes.new_zeros(groups if to_bias else 0)
    step = max(1, _GATHERED // max(1, hidden.shape[1]))
    flat = slopes.flatten()
    for first in range(0, order.shape[0], step):
        entry, at = order[first : first + step], group[first : first + step]
        drawn = entry < c
        own = (entry - c).clamp(min=0)
        if to_weight:
            vectors = flat.new_zeros(entry.shape[0], hidden.shape[1])
            vectors[drawn] = columns[entry[drawn]]
            rest = own[~drawn]
            vectors[~drawn] = flat[rest].unsqueeze(-1) * hidden[rest // q].to(flat.dtype)
            weight.index_add_(0, at, vectors)
        if to_bias:
            values = torch.cat([column_biases, flat])
            bias.index_add_(0, at, values[entry])
    return weight.mul_(factor), bias.mul_(factor)
