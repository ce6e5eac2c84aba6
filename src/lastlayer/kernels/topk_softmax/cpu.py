"""Top-k softmax on the CPU: the k-th largest peak of the blocks tells which blocks matter."""

import math

import numpy as np
from numba import njit
from torch import Tensor

from lastlayer.kernels._arrays import as_rows, empty_rows, in_dtype
from lastlayer.kernels._blocks import BLOCK, find_peaks, room_for_peaks
from lastlayer.kernels._threads import by_rows


def forward(scores: Tensor, k: int) -> Tensor:
    """Softmax over the ``k`` largest scores of a row, the first of equal ones; zero elsewhere."""
    rows, (out, result) = as_rows(scores), empty_rows(scores)
    if rows.size:
        _forward_rows(*rows.shape, rows, out, k)
    return in_dtype(result, scores.dtype)


@njit(nogil=True, cache=True, error_model="numpy")
def _forward(start, stop, rows, out, k):
    n = rows.shape[1]
    k = min(k, n)
    peaks = room_for_peaks(rows)
    blocks = len(peaks) - 1
    values = np.empty(n, rows.dtype)
    column = np.empty(n, np.int32)
    for row in range(start, stop):
        for i in range(n):
            out[row, i] = 0.0
        state = find_peaks(rows, row, peaks)
        if state < 0:
            out[row] = math.nan
            continue
        if state == 0:
            continue
        # k peaks are k scores, so the k-th largest score is no smaller than the k-th largest peak.
        floor = np.partition(peaks[:blocks], blocks - k)[blocks - k] if k < blocks else -math.inf
        count = 0
        for block in range(blocks):
            if peaks[block] >= floor:
                for i in range(block * BLOCK, min(n, (block + 1) * BLOCK)):
                    if rows[row, i] >= floor and rows[row, i] > -math.inf:
                        values[count] = rows[row, i]
                        column[count] = i
                        count += 1
        edge, at_edge = -math.inf, count
        if count > k:
            edge = np.partition(values[:count], count - k)[count - k]
            above = 0
            for i in range(count):
                above += values[i] > edge
            at_edge = k - above
        peak = peaks[-1]
        total = 0.0
        for i in range(count):
            taken = values[i] > edge
            if values[i] == edge and at_edge > 0:
                taken = True
                at_edge -= 1
            values[i] = math.exp(values[i] - peak) if taken else 0.0
            total += values[i]
        for i in range(count):
            out[row, column[i]] = values[i] / total


_forward_rows = by_rows(_forward)
