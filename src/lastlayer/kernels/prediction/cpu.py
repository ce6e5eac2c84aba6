"""The best classes of rows on the CPU: in the blocks with the largest peaks.

A row stays in the cache between the pass for the peaks and that for the sum.
"""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer.kernels._cpu import as_rows, by_rows
from lastlayer.kernels._cpu_math import BLOCK, FAST, exp, find_peaks, room_for_peaks

# Scores between which the sum goes over to float64.
_SPAN = 1024


def best(
    scores: Tensor, bias: Tensor | None, softcap: float, temperature: float, k: int,
    normalised: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if bias is not None:
        scores = scores + bias
    if softcap:
        capped = softcap * torch.tanh(scores / softcap)
        scores = capped.masked_fill_(scores == -math.inf, -math.inf)
    n = scores.shape[0]
    values = scores.new_empty(n, k)
    classes = torch.empty(n, k, dtype=torch.int64)
    total = scores.new_zeros(n)
    if n and scores.shape[1]:
        results = values.numpy(), classes.numpy(), total.numpy()
        _best_rows(*scores.shape, as_rows(scores), 1.0 / temperature, normalised, *results)
    return values, classes, total


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _best_rows(start, stop, rows, scale, normalised, values, classes, total):
    k, real = values.shape[1], rows.dtype.type
    peaks = room_for_peaks(rows)
    blocks = len(peaks) - 1
    scale = real(scale)
    # The candidates of a row.
    held = np.empty(rows.shape[1] if k else 0, rows.dtype)
    column = np.empty(len(held), np.int32)
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
        # k peaks are k values: none of the best is below the k-th largest peak.
        floor = real(-math.inf)
        if k < blocks:
            floor = np.partition(peaks[:blocks], blocks - k)[blocks - k] * scale - log_sum
        count = 0
        for block in range(blocks):
            if peaks[block] * scale - log_sum >= floor:
                for i in range(block * BLOCK, min(rows.shape[1], (block + 1) * BLOCK)):
                    value = rows[row, i] * scale - log_sum
                    if value >= floor:
                        held[count], column[count] = value, i
                        count += 1
        if count > k:
            floor = np.partition(held[:count], count - k)[count - k]
        found = 0
        for i in range(count):
            if held[i] >= floor:
                found = _insert(values[row], classes[row], found, held[i], column[i])


@njit(nogil=True)
def _insert_all(x, scale, values, classes):
    """For a row with a NaN or +inf, which come first, the lower class before."""
    found = 0
    for i in range(len(x)):
        found = _insert(values, classes, found, x[i] * scale, i)


@njit(nogil=True)
def _key(value):
    return math.inf if math.isnan(value) else value


@njit(nogil=True)
def _insert(values, classes, found, value, i):
    """Puts a class behind those that are no worse, which are lower classes; how many there are."""
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
    """log of the sum of ``exp(x * scale)``; -inf where the peak is."""
    if peak == -math.inf:
        return peak
    total = 0.0
    for first in range(0, len(x), _SPAN):
        total += _sum_exp(x[first : first + _SPAN], peak, scale)
    return x.dtype.type(peak * scale + math.log(total))
