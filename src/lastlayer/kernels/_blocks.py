"""The maxima of the blocks of a row, for the CPU kernels: they tell which blocks matter."""

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lastlayer.kernels._vectors import lanes_of, top_of

# Scores a block. Loops over a block have this fixed length, which is what LLVM vectorises.
BLOCK = 64


def bits(values: NDArray[Any]) -> NDArray[Any]:
    """The same memory as signed integers."""
    return values.view(np.int32 if values.dtype.itemsize == 4 else np.int64)


@njit(nogil=True)
def room_for_peaks(rows):
    """An array for :func:`find_peaks`."""
    return np.empty((rows.shape[1] + BLOCK - 1) // BLOCK + 1, rows.dtype)


@njit(nogil=True)
def find_peaks(rows, row, peaks):
    """The maximum of each block of a row, and of the row at the end of ``peaks``.

    Says 1 where the row has a result, 0 where all is masked, -1 where a score is NaN or +inf.
    """
    n = rows.shape[1]
    vectors = BLOCK // lanes_of(rows.itemsize)
    highest = rows.dtype.type(-math.inf)
    sane = True
    for block in range(n // BLOCK):
        peak, fine = top_of(rows, row, block * BLOCK, vectors)
        peaks[block] = peak
        highest = peak if peak > highest else highest
        sane = sane and fine
    if n % BLOCK:
        peak, fine = top_of_rest(rows, row, n - n % BLOCK)
        peaks[n // BLOCK] = peak
        highest = peak if peak > highest else highest
        sane = sane and fine
    peaks[-1] = highest
    if not sane:
        return -1
    return 1 if highest > -math.inf else 0


@njit(nogil=True, forceinline=True)
def top_of_rest(rows, row, first):
    """The maximum of a row from ``first`` on, and whether no score there is NaN or +inf."""
    n = rows.shape[1]
    lanes = lanes_of(rows.itemsize)
    top, sane = top_of(rows, row, first, (n - first) // lanes)
    for i in range(n - (n - first) % lanes, n):
        score = rows[row, i]
        top = score if score > top else top
        sane = sane and score < math.inf
    return top, sane
