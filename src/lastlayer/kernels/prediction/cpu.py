"""The best classes of rows, and samples, on the CPU.

Only blocks with the largest peaks are searched. A row stays in the cache between the pass that
computes peaks and the pass that sums.
"""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer._torch import accumulation_dtype, in_dtype
from lastlayer.kernels._cpu import as_array, as_rows, by_rows, empty_array
from lastlayer.kernels._cpu_math import (
    BLOCK,
    FAST,
    count_at_least,
    exp,
    find_peaks,
    lanes_of,
    room_for_peaks,
)

# Scores that are summed in float32 before they are added to the float64 total.
_SPAN = 1024
# Most bisection steps for the k-th largest number. A lower bound of it is enough.
_HALVINGS = 24


def best(
    scores: Tensor, bias: Tensor | None, softcap: float, temperature: float, k: int,
    normalised: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scores = _capped(scores, bias, softcap)
    rows = as_rows(scores)
    (values, made), (classes, ids) = (
        empty_array((len(rows), k), dtype)
        for dtype in (accumulation_dtype(scores.dtype), torch.int64)
    )
    total = np.zeros(len(rows), rows.dtype)
    if rows.size:
        scale = 1.0 / temperature
        _best_rows(*rows.shape, rows, scale, normalised, values, classes, total)
    return in_dtype(made, scores.dtype), ids, torch.from_numpy(total)


def draw(
    scores: Tensor, bias: Tensor | None, softcap: float, temperature: float, uniform: Tensor
) -> Tensor:
    rows = as_rows(_capped(scores, bias, softcap))
    drawn, made = empty_array(uniform.shape, torch.int64)
    if drawn.size:
        _draw_rows(*rows.shape, rows, 1.0 / temperature, as_array(uniform), drawn)
    return made


def _capped(scores: Tensor, bias: Tensor | None, softcap: float) -> Tensor:
    if bias is not None:
        scores = scores + bias
    if not softcap:
        return scores
    capped = softcap * torch.tanh(scores / softcap)
    return capped.masked_fill_(scores == -math.inf, -math.inf)


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _draw_rows(start, stop, rows, scale, uniform, drawn):
    """Finds the block in which the cumulative sum exceeds each number, then the class."""
    n, real = rows.shape[1], rows.dtype.type
    peaks, scale = room_for_peaks(rows), real(scale)
    shares, reached = np.empty(n, rows.dtype), np.empty(len(peaks), np.float64)
    for row in range(start, stop):
        drawn[row, :] = -1
        if find_peaks(rows, row, peaks) <= 0:
            continue
        total = 0.0
        for block in range(len(peaks) - 1):
            first, last = block * BLOCK, min(n, (block + 1) * BLOCK)
            total += _shares(rows[row, first:last], peaks[-1], scale, shares[first:last])
            reached[block] = total
        for place in range(uniform.shape[1]):
            wanted = min(uniform[row, place] * total, np.nextafter(total, 0.0))
            block = np.searchsorted(reached[:-1], wanted, side="right")
            so_far = reached[block - 1] if block else 0.0
            for i in range(block * BLOCK, min(n, (block + 1) * BLOCK)):
                # Ends at the last class with a share if the sum of the block was rounded up.
                if shares[i] > 0.0:
                    drawn[row, place] = i
                    so_far += shares[i]
                    if so_far > wanted:
                        break


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _shares(x, peak, scale, shares):
    """``exp((x - peak) * scale)`` of a block, and their sum."""
    total = 0.0
    for i in range(len(x)):
        share = exp((x[i] - peak) * scale)
        shares[i] = share
        total += share
    return total


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _best_rows(start, stop, rows, scale, normalised, values, classes, total):
    k, real = values.shape[1], rows.dtype.type
    peaks = room_for_peaks(rows)
    blocks = len(peaks) - 1
    scale = real(scale)
    # Values of the candidates of a row.
    held = np.empty((1, rows.shape[1] + lanes_of(rows.itemsize)), rows.dtype)
    column = np.empty(rows.shape[1] if k else 0, np.int32)
    order = np.empty_like(column)
    for row in range(start, stop):
        state = find_peaks(rows, row, peaks)
        log_sum = real(0.0)
        if normalised:
            log_sum = real(math.nan)
            if state >= 0:
                log_sum = _log_sum(rows[row], peaks[-1], scale)
            total[row] = log_sum
        if k == 0:
            continue
        if state <= 0 and normalised:
            values[row, :] = real(math.nan) if state < 0 else real(-math.inf)
            classes[row, :] = np.arange(k)
            continue
        if state < 0:
            _insert_all(rows[row], scale, values[row], classes[row])
            continue
        # k peaks are k values, so the k best are not below the k-th largest peak.
        low = real(-math.inf)
        if k < blocks:
            held[0, :blocks] = peaks[:blocks]
            low = _floor(held, blocks, k, peaks[-1])
        floor = low * scale - log_sum
        count, equal = 0, 0
        for block in range(blocks):
            peak = peaks[block] * scale - log_sum
            # Of the values that equal the floor, the first k are enough.
            if peak > floor or (peak == floor and equal < k):
                for i in range(block * BLOCK, min(rows.shape[1], (block + 1) * BLOCK)):
                    value = rows[row, i] * scale - log_sum
                    if value > floor or (value == floor and equal < k):
                        held[0, count], column[count] = value, i
                        count += 1
                        equal += value == floor
        if count > 2 * k:
            floor = max(floor, _floor(held, count, k, peaks[-1] * scale - log_sum))
        found = 0
        for i in range(count):
            held[0, found], column[found] = held[0, i], column[i]
            found += held[0, i] >= floor
        _sort(held, column, found, order, values[row], classes[row])


@njit(nogil=True, error_model="numpy")
def _floor(held, n, k, high):
    """The least of the first n numbers above a bound that at least k, and few more, reach.

    ``high`` is their maximum.
    """
    real, vectors = held.dtype.type, _filled_up(held, n)
    high, depth = real(high), real(1.0)
    low = high
    # Most values are near the maximum.
    while count_at_least(held, 0, vectors, low) < k:
        if depth > 1e30:
            return real(-math.inf)
        high, low = low, high - depth
        depth = depth * real(4.0)
    for _ in range(_HALVINGS):
        middle = low + real(0.5) * (high - low)
        count = count_at_least(held, 0, vectors, middle)
        if count >= k:
            low = middle
            if count <= k + k // 8:
                break
        else:
            high = middle
    # Return one of the values, so that the caller can detect ties with it.
    least = real(math.inf)
    for i in range(n):
        value = held[0, i]
        least = value if low <= value < least else least
    return least


@njit(nogil=True)
def _filled_up(held, n):
    """The number of SIMD vectors for n numbers, after padding the last one with -inf."""
    lanes = lanes_of(held.itemsize)
    vectors = (n + lanes - 1) // lanes
    for i in range(n, vectors * lanes):
        held[0, i] = -math.inf
    return vectors


@njit(nogil=True)
def _sort(held, column, n, order, values, classes):
    """Writes the best of n numbers and their classes in order.

    The number of values that are at least as large gives the rank.
    """
    vectors = _filled_up(held, n)
    order[:n] = -1
    # Ties are ranked by position: the last one gets the last place.
    for i in range(n - 1, -1, -1):
        place = min(count_at_least(held, 0, vectors, held[0, i]), n) - 1
        while order[place] >= 0:
            place -= 1
        order[place] = i
    for place in range(len(values)):
        values[place] = held[0, order[place]]
        classes[place] = column[order[place]]


@njit(nogil=True)
def _insert_all(x, scale, values, classes):
    """For a row with NaN or +inf, which rank first, ties by ascending class."""
    found = 0
    for i in range(len(x)):
        found = _insert(values, classes, found, x[i] * scale, i)


@njit(nogil=True)
def _key(value):
    return math.inf if math.isnan(value) else value


@njit(nogil=True)
def _insert(values, classes, found, value, i):
    """Inserts a class after those with at least its value; returns the new number of classes."""
    key, k = _key(value), len(values)
    if found == k and not key > _key(values[k - 1]):
        return found
    place = min(found, k - 1)
    while place > 0 and _key(values[place - 1]) < key:
        values[place], classes[place] = values[place - 1], classes[place - 1]
        place -= 1
    values[place], classes[place] = value, i
    return min(found + 1, k)


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _sum_exp(x, peak, scale):
    total = x.dtype.type(0.0)
    for i in range(len(x)):
        total += exp((x[i] - peak) * scale)
    return total


@njit(nogil=True, error_model="numpy")
def _log_sum(x, peak, scale):
    """log of the sum of ``exp(x * scale)``; -inf if the peak is -inf."""
    if peak == -math.inf:
        return peak
    total = 0.0
    for first in range(0, len(x), _SPAN):
        total += _sum_exp(x[first : first + _SPAN], peak, scale)
    return x.dtype.type(peak * scale + math.log(total))
