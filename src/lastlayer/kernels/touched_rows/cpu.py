"""Sums of the entries of each class on the CPU, one class after the other."""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer.kernels._arrays import as_rows
from lastlayer.kernels._threads import by_rows


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
    """As the reference's."""
    groups, depth = starts.shape[0] - 1, hidden.shape[1]
    weight = torch.empty((groups, depth) if to_weight else (0, depth), dtype=slopes.dtype)
    bias = torch.empty(groups if to_bias else 0, dtype=slopes.dtype)
    vectors = columns.detach() if columns.dim() == 2 else columns.detach().view(0, depth)
    if groups:
        _touched(
            groups, 2 * depth, float(factor), order.shape[0] - slopes.numel(),
            max(1, slopes.shape[1]),
            vectors.contiguous().numpy(), column_biases.detach().numpy(),
            slopes.detach().contiguous().view(-1).numpy(), as_rows(hidden), order.numpy(),
            starts.numpy(), weight.numpy(), bias.numpy(),
        )  # fmt: skip
    return weight if to_weight else weight.view(0), bias


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
    """As the reference's."""
    if known is not None:
        known.copy_(keys)
    classes, counts = torch.unique_consecutive(keys, return_counts=True)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    given = columns, column_biases, slopes, hidden, order, starts, factor
    sums = forward(*given, weight.dim() == 2, bias.numel() > 0)
    for out, total in zip((weight, bias), sums, strict=True):
        if out.numel():
            if not scattered:
                out.zero_()
            out[classes.long() if scattered else starts[:-1]] = total.to(out.dtype)


@njit(nogil=True, cache=True)
def _sums(
    start, stop, factor, c, q, columns, column_biases, slopes, hidden, order, starts, weight, bias
):  # fmt: skip
    total = np.empty(hidden.shape[1], slopes.dtype)
    scale = slopes.dtype.type(factor)
    for group in range(start, stop):
        if len(weight):
            total[:] = 0.0
            for place in range(starts[group], starts[group + 1]):
                entry = order[place]
                if entry < c:
                    _add(total, columns[entry])
                else:
                    _add_scaled(total, slopes[entry - c], hidden[(entry - c) // q])
            weight[group] = total * scale
        if len(bias):
            level = slopes.dtype.type(0.0)
            for place in range(starts[group], starts[group + 1]):
                entry = order[place]
                level += column_biases[entry] if entry < c else slopes[entry - c]
            bias[group] = level * scale


@njit(nogil=True)
def _add(total, vector):
    for i in range(len(total)):
        total[i] += vector[i]


@njit(nogil=True, fastmath={"contract"})
def _add_scaled(total, factor, vector):
    for i in range(len(total)):
        total[i] += factor * vector[i]


_touched = by_rows(_sums)
