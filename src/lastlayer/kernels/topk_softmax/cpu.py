"""Top-k softmax on the CPU: the k-th largest score by halves, among the blocks that can have it."""

import math

import numpy as np
from numba import njit
from torch import Tensor

from lastlayer._torch import in_dtype
from lastlayer.kernels._arrays import as_rows, empty_rows
from lastlayer.kernels._blocks import BLOCK, find_peaks, room_for_peaks
from lastlayer.kernels._exp import exp
from lastlayer.kernels._threads import by_rows
from lastlayer.kernels._vectors import lanes_of
from lastlayer.kernels.topk_softmax._edge import edge_of

# Sums may be reordered and so vectorised; NaN and infinities keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


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
    # A vector more than a row: the last one is filled up.
    held = np.empty((1, n + lanes_of(rows.itemsize)), rows.dtype)
    column = np.empty(n, np.int32)
    for row in range(start, stop):
        state = find_peaks(rows, row, peaks)
        if state <= 0:
            out[row] = math.nan if state < 0 else 0.0
        elif 2 * k > blocks:
            # Most blocks would stay, and picking costs more than a few more counts.
            for i in range(n):
                held[0, i] = rows[row, i]
            _shares(held, n, k, peaks[-1], -math.inf)
            for i in range(n):
                out[row, i] = held[0, i]
        else:
            # k peaks are k scores: the k-th largest score is no smaller than the k-th largest peak.
            held[0, :blocks] = peaks[:blocks]
            floor, _ = edge_of(held, _filled_up(held, blocks), k, -math.inf, peaks[-1])
            count = _pick(rows, row, peaks, floor, held, column)
            _shares(held, count, k, peaks[-1], floor)
            out[row] = 0.0
            for i in range(count):
                out[row, column[i]] = held[0, i]


@njit(nogil=True)
def _pick(rows, row, peaks, floor, held, column):
    """The scores from ``floor`` on, with their columns; says how many there are."""
    n = rows.shape[1]
    count = 0
    for block in range(len(peaks) - 1):
        if peaks[block] >= floor:
            for i in range(block * BLOCK, min(n, (block + 1) * BLOCK)):
                if rows[row, i] >= floor:
                    held[0, count] = rows[row, i]
                    column[count] = i
                    count += 1
    return count


@njit(nogil=True)
def _filled_up(held, n):
    """The number of vectors that n numbers take, after the last one has been filled up."""
    lanes = lanes_of(held.itemsize)
    vectors = (n + lanes - 1) // lanes
    for i in range(n, vectors * lanes):
        held[0, i] = -math.inf
    return vectors


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _shares(held, n, k, peak, low):
    """The softmax over the k largest of n scores in place of them; 0 for the others."""
    zero = held.dtype.type(0)
    edge, count = edge_of(held, _filled_up(held, n), k, low, peak)
    if count > k:
        _drop_last(held, n, edge, count - k)
    total = zero
    for i in range(n):
        score = held[0, i]
        share = exp(score - peak) if score >= edge else zero
        held[0, i] = share
        total += share
    share = 1 / total
    for i in range(n):
        held[0, i] *= share


@njit(nogil=True)
def _drop_last(held, n, edge, excess):
    """Of equal scores the first are taken."""
    for i in range(n - 1, -1, -1):
        if excess == 0:
            break
        if held[0, i] == edge:
            held[0, i] = -math.inf
            excess -= 1


_forward_rows = by_rows(_forward)
