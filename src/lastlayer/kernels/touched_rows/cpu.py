"""Sums of the entries of each class on the CPU, one class after the other; and row-wise steps.

A step visits each row of a gradient once. Its kernels have error_model="numpy": a check of every
divisor would keep loops from being vectorised.
"""

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn.functional import pad

from lastlayer.kernels._cpu import as_rows, by_rows
from lastlayer.kernels._cpu_math import add_scaled


def forward(
    columns: Tensor, column_biases: Tensor, slopes: Tensor, hidden: Tensor, order: Tensor,
    starts: Tensor, factor: Tensor, to_weight: bool, to_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
    slopes: Tensor, hidden: Tensor, columns: Tensor, column_biases: Tensor, order: Tensor,
    keys: Tensor, factor: Tensor, weight: Tensor, bias: Tensor, known: Tensor | None,
    scattered: bool,
) -> None:  # fmt: skip
    if known is not None:
        known.copy_(keys)
    classes, counts = torch.unique_consecutive(keys, return_counts=True)
    starts = pad(counts.cumsum(0), (1, 0))
    given = columns, column_biases, slopes, hidden, order, starts, factor
    sums = forward(*given, weight.dim() == 2, bias.numel() > 0)
    for out, total in zip((weight, bias), sums, strict=True):
        if out.numel():
            if not scattered:
                out.zero_()
            out[classes.long() if scattered else starts[:-1]] = total.to(out.dtype)


@by_rows
@njit(nogil=True, cache=True)
def _touched(
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
                    add_scaled(total, slopes[entry - c], hidden[(entry - c) // q])
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


def adagrad_(
    weight: Tensor, total: Tensor, ids: Tensor, gradient: Tensor, lr: float, weight_decay: float,
    eps: float,
) -> None:  # fmt: skip
    numbers = lr, lr * weight_decay, eps
    _run(_adagrad_rows, weight, total.dtype, ids, gradient, (total.numpy(),), numbers)


def adam_(
    weight: Tensor, first: Tensor, second: Tensor, row_step: Tensor, step: Tensor, ids: Tensor,
    gradient: Tensor, lr: float, weight_decay: float, beta1: float, beta2: float, eps: float,
    decays: bool,
) -> None:  # fmt: skip
    states = first.numpy(), second.numpy(), row_step.numpy()
    numbers = int(step), lr, lr * weight_decay, beta1, beta2, eps, decays
    _run(_adam_rows, weight, first.dtype, ids, gradient, states, numbers)


def _run(
    kernel: Any, weight: Tensor, wide: torch.dtype, ids: Tensor, gradient: Tensor,
    states: tuple[Any, ...], numbers: tuple[float, ...],
) -> None:  # fmt: skip
    weight = weight.detach()
    if not gradient.numel():
        return
    ids, gradient = _each_once(ids, gradient)
    direct = weight.dtype == wide
    # Numba has no half precision: such rows are widened, moved, and rounded once.
    rows = weight if direct else weight[ids].to(wide)
    places = ids if direct else torch.arange(ids.shape[0])
    arrays = places.numpy(), ids.contiguous().numpy(), as_rows(gradient.to(wide))
    kernel(ids.shape[0], gradient.shape[1], rows.numpy(), *arrays, *states, *numbers)
    if not direct:
        weight[ids] = rows.to(weight.dtype)


def _each_once(ids: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Of slots of the same row the first."""
    again = ids[1:] == ids[:-1]
    if not bool(again.any()):
        return ids, gradient
    first = pad(~again, (1, 0), value=True)
    return ids[first], gradient[first]


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _adagrad_rows(start, stop, weight, places, ids, gradient, total, lr, decay, eps):
    for i in range(start, stop):
        sums = total[ids[i]] + _mean_square(gradient[i])
        total[ids[i]] = sums
        _move_along(weight[places[i]], gradient[i], 1.0 - decay, lr / (math.sqrt(sums) + eps))


@njit(nogil=True, fastmath={"reassoc", "contract"})
def _mean_square(values):
    total = values.dtype.type(0.0)
    for j in range(len(values)):
        total += values[j] * values[j]
    return total / len(values)


@njit(nogil=True, fastmath={"contract"}, error_model="numpy")
def _move_along(row, way, kept, factor):
    kept, factor = row.dtype.type(kept), row.dtype.type(factor)
    for j in range(len(row)):
        row[j] = kept * row[j] - factor * way[j]


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _adam_rows(
    start, stop, weight, places, ids, gradient, first, second, row_step, step, lr, decay, beta1,
    beta2, eps, decays,
):  # fmt: skip
    for i in range(start, stop):
        row = ids[i]
        before = row_step[row]
        now = step if decays else before + 1
        row_step[row] = now
        scale1 = -math.expm1(now * math.log(beta1)) if beta1 > 0.0 else 1.0
        scale2 = -math.expm1(now * math.log(beta2)) if beta2 > 0.0 else 1.0
        _adam_row(
            weight[places[i]], gradient[i], first[row], second[row], beta1 ** (now - before),
            beta2 ** (now - before), beta1, beta2, 1.0 - decay, lr / scale1,
            1.0 / math.sqrt(scale2), eps,
        )  # fmt: skip


@njit(nogil=True, fastmath={"contract"}, error_model="numpy")
def _adam_row(
    row, way, first, second, kept1, kept2, beta1, beta2, kept, factor, root_scale, eps
):  # fmt: skip
    kind = row.dtype.type
    kept, factor, root_scale, eps = kind(kept), kind(factor), kind(root_scale), kind(eps)
    kept1, new1, kept2, new2 = kind(kept1), kind(1.0 - beta1), kind(kept2), kind(1.0 - beta2)
    for j in range(len(row)):
        mean = kept1 * first[j] + new1 * way[j]
        square = kept2 * second[j] + new2 * (way[j] * way[j])
        first[j], second[j] = mean, square
        row[j] = kept * row[j] - factor * mean / (np.sqrt(square) * root_scale + eps)
