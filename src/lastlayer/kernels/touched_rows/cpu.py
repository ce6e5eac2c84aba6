"""Sums of the entries of each class, and row-wise optimiser steps, on the CPU.

A step visits each row of a gradient once. Kernels use error_model="numpy": checks for division by
zero would prevent vectorisation.
"""

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn.functional import pad

from lastlayer._torch import as_numpy
from lastlayer.kernels._cpu import as_rows, by_rows, empty
from lastlayer.kernels._cpu_math import add_scaled, dot

# Bits per digit of the radix sort by class.
_DIGIT_BITS = 11
_DIGIT = 1 << _DIGIT_BITS
# Entries of a class that are summed before they are added to the total.
_TOGETHER = 128


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
            as_numpy(vectors.contiguous()), as_numpy(column_biases.detach()),
            as_numpy(slopes.detach().contiguous().view(-1)), as_rows(hidden), as_numpy(order),
            as_numpy(starts), as_numpy(weight), as_numpy(bias),
        )  # fmt: skip
    return weight if to_weight else weight.view(0), bias


@by_rows
@njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy")
def _touched(
    start, stop, factor, c, q, columns, column_biases, slopes, hidden, order, starts, weight, bias
):  # fmt: skip
    total, some = np.empty(hidden.shape[1], slopes.dtype), np.empty(hidden.shape[1], slopes.dtype)
    scale = slopes.dtype.type(factor)
    # To compute the row of an entry without a slow integer division.
    per_row = 1.0 / q
    for group in range(start, stop):
        if len(weight):
            total[:] = 0.0
            # Partial sums limit the rounding error of thousands of entries.
            for first in range(starts[group], starts[group + 1], _TOGETHER):
                some[:] = 0.0
                for place in range(first, min(first + _TOGETHER, starts[group + 1])):
                    entry = order[place]
                    if entry < c:
                        add_scaled(some, slopes.dtype.type(1.0), columns[entry])
                    else:
                        row, slope = np.int64((entry - c + 0.5) * per_row), slopes[entry - c]
                        for i in range(len(some)):
                            some[i] += slope * hidden[row, i]
                add_scaled(total, slopes.dtype.type(1.0), some)
            weight[group] = total * scale
        if len(bias):
            # In float64: with float32 the error is 4e-5 for sums of thousands that mostly cancel.
            level = 0.0
            for place in range(starts[group], starts[group + 1]):
                entry = order[place]
                level += column_biases[entry] if entry < c else slopes[entry - c]
            bias[group] = level * scale


def group(entries: Tensor, n_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    size, kind = entries.shape[0], torch.int32 if n_classes < 2**31 else torch.int64
    # Indices and classes of entries: input and output of a pass of the radix sort.
    order, other = empty((size,), torch.int64), empty((size,), torch.int64)
    keys, other_keys = as_numpy(empty((size,), kind)), as_numpy(empty((size,), kind))
    rest = as_numpy(order), as_numpy(other), keys, other_keys
    known, starts = _group(as_numpy(entries.contiguous()), n_classes, *rest)
    return order, torch.from_numpy(starts), torch.from_numpy(known)


@njit(nogil=True, cache=True)
def _group(entries, n_classes, order, other, keys, other_keys):
    """Radix sort by class; entries without a class come last."""
    size, passes, live = len(order), 1, 0
    while (n_classes - 1) >> (passes * _DIGIT_BITS):
        passes += 1
    counts = np.empty(_DIGIT + 1, np.int64)
    # The last pass must write to ``order``.
    if passes % 2 == 0:
        order, other, keys, other_keys = other, order, other_keys, keys
    last = size
    for number in range(passes):
        shift = number * _DIGIT_BITS
        counts[:] = 0
        if number == 0:
            for i in range(size):
                if entries[i] >= 0:
                    counts[1 + (entries[i] & (_DIGIT - 1))] += 1
                    live += 1
        else:
            for i in range(live):
                counts[1 + (other_keys[i] >> shift & (_DIGIT - 1))] += 1
        for digit in range(_DIGIT):
            counts[digit + 1] += counts[digit]
        if number == 0:
            last = live
            for i in range(size):
                if entries[i] >= 0:
                    place = counts[entries[i] & (_DIGIT - 1)]
                    counts[entries[i] & (_DIGIT - 1)] = place + 1
                    keys[place] = entries[i]
                else:
                    place = last
                    last += 1
                order[place] = i
        else:
            for i in range(live):
                digit = other_keys[i] >> shift & (_DIGIT - 1)
                place = counts[digit]
                counts[digit] = place + 1
                keys[place], order[place] = other_keys[i], other[i]
            order[live:] = other[live:]
        order, other, keys, other_keys = other, order, other_keys, keys
    return _runs(other_keys[:live])


@njit(nogil=True)
def _runs(keys):
    """The distinct classes of sorted keys, where each starts, and where the last one ends."""
    size = len(keys)
    known, starts, count = np.empty(size, np.int64), np.empty(size + 1, np.int64), 0
    for i in range(size):
        if i == 0 or keys[i] != keys[i - 1]:
            known[count], starts[count] = keys[i], i
            count += 1
    starts[count] = size
    return known[:count].copy(), starts[: count + 1].copy()


def adagrad_(
    weight: Tensor, total: Tensor, ids: Tensor, gradient: Tensor, lr: float, weight_decay: float,
    eps: float,
) -> None:  # fmt: skip
    numbers = lr, lr * weight_decay, eps
    _run(_adagrad_rows, weight, total.dtype, ids, gradient, (as_numpy(total),), numbers)


def adam_(
    weight: Tensor, first: Tensor, second: Tensor, row_step: Tensor, step: Tensor, ids: Tensor,
    gradient: Tensor, lr: float, weight_decay: float, beta1: float, beta2: float, eps: float,
    decays: bool,
) -> None:  # fmt: skip
    states = as_numpy(first), as_numpy(second), as_numpy(row_step)
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
    # Numba does not support half precision: such rows are converted, updated, and rounded once.
    rows = weight if direct else weight[ids].to(wide)
    places = ids if direct else torch.arange(ids.shape[0])
    arrays = as_numpy(places), as_numpy(ids.contiguous()), as_rows(gradient.to(wide))
    kernel(ids.shape[0], gradient.shape[1], as_numpy(rows), *arrays, *states, *numbers)
    if not direct:
        weight[ids] = rows.to(weight.dtype)


def _each_once(ids: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The first slot of each row."""
    again = ids[1:] == ids[:-1]
    if not bool(again.any()):
        return ids, gradient
    first = pad(~again, (1, 0), value=True)
    return ids[first], gradient[first]


@by_rows
@njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy")
def _adagrad_rows(start, stop, weight, places, ids, gradient, total, lr, decay, eps):
    real = weight.dtype.type
    for i in range(start, stop):
        row, way = weight[places[i]], gradient[i]
        sums = total[ids[i]] + dot(way, way) / len(way)
        total[ids[i]] = sums
        kept, factor = real(1.0 - decay), real(lr / (math.sqrt(sums) + eps))
        for j in range(len(row)):
            row[j] = kept * row[j] - factor * way[j]


@by_rows
@njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy")
def _adam_rows(
    start, stop, weight, places, ids, gradient, first, second, row_step, step, lr, decay, beta1,
    beta2, eps, decays,
):  # fmt: skip
    real = weight.dtype.type
    kept, new1, new2, least = real(1.0 - decay), real(1.0 - beta1), real(1.0 - beta2), real(eps)
    for i in range(start, stop):
        row, way, means, squares = weight[places[i]], gradient[i], first[ids[i]], second[ids[i]]
        before = row_step[ids[i]]
        now = step if decays else before + 1
        row_step[ids[i]] = now
        kept1, kept2 = real(beta1 ** (now - before)), real(beta2 ** (now - before))
        scale1 = -math.expm1(now * math.log(beta1)) if beta1 > 0.0 else 1.0
        scale2 = -math.expm1(now * math.log(beta2)) if beta2 > 0.0 else 1.0
        factor, root_scale = real(lr / scale1), real(1.0 / math.sqrt(scale2))
        for j in range(len(row)):
            mean = kept1 * means[j] + new1 * way[j]
            square = kept2 * squares[j] + new2 * (way[j] * way[j])
            means[j], squares[j] = mean, square
            row[j] = kept * row[j] - factor * mean / (np.sqrt(square) * root_scale + least)
