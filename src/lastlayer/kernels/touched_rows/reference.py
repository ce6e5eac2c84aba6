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


def slots_(
    slopes: Tensor,
    hidden: Tensor,
    columns: Tensor,
    column_biases: Tensor,
    order: Tensor,
    keys: Tensor,
    factor: Tensor,
    weight: Tensor,
    bias: Tensor,
    known: Tensor | None,
    scattered: bool,
) -> None:
    """The same sums, each in the first slot of its class, with 0 in the others.

    Args:
        slopes: as of :func:`forward`.
        hidden: as of :func:`forward`.
        columns: ``(c, d)``.
        column_biases: ``(c,)``.
        order: int64 ``(c + n q,)``, the entries by class.
        keys: the class of each, ascending, int32 or int64.
        factor: one number.
        weight: ``(c + n q, d)`` to be filled, in any floating dtype; empty where not wanted.
        bias: ``(c + n q,)`` likewise.
        known: int64 ``(c + n q,)`` to be filled with the keys, or None.
        scattered: weight and bias have a row a class instead, ``(v, d)`` and ``(v,)``, and rows of
            classes without an entry are left as they are.
    """
    if known is not None:
        known.copy_(keys)
    number = torch.arange(keys.shape[0] + 1, device=keys.device)
    fresh = torch.ones_like(keys, dtype=torch.bool)
    fresh[1:] = keys[1:] != keys[:-1]
    group = fresh.cumsum(0) - 1
    # Groups that are left over are empty.
    starts = torch.searchsorted(group, number)
    given = columns, column_biases, slopes, hidden, order, starts, factor
    sums = forward(*given, weight.dim() == 2, bias.numel() > 0)
    for out, total in zip((weight, bias), sums, strict=True):
        if out.numel():
            # Of one class all slots have the same.
            values = total[group]
            if scattered:
                out.index_copy_(0, keys.long(), values.to(out.dtype))
            else:
                out.copy_(torch.where(fresh.view(-1, *(1,) * (out.dim() - 1)), values, 0.0))
