"""Floats as integers of the same order, for the CPU kernels.

A maximum over integers is vectorised without giving up NaN, which a float maximum is not: a NaN
sorts above +inf or below -inf.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

# Scores a block. Loops over a block have this fixed length, which is what LLVM vectorises.
BLOCK = 64


# Places in the array of constants that keys_of makes for one width of float.
SIGN_SHIFT, MAGNITUDE, PLUS_INFINITY, MINUS_INFINITY = range(4)


@cache
def keys_of(dtype: np.dtype[Any]) -> NDArray[Any]:
    """The constants for float32 or float64, as integers of that width."""
    integer = np.int32 if dtype.itemsize == 4 else np.int64
    infinity = int(np.array(np.inf, dtype).view(integer))
    shift = 8 * dtype.itemsize - 1
    return np.array([shift, np.iinfo(integer).max, infinity, -infinity - 1], integer)


def bits(values: NDArray[Any]) -> NDArray[Any]:
    """The same memory as signed integers."""
    return values.view(np.int32 if values.dtype.itemsize == 4 else np.int64)


@njit(nogil=True, inline="always")
def to_key(bit, keys):
    """The key of the bits of a float, and the bits of a key: it is its own inverse."""
    # Without the casts Numba would widen to int64 and halve the speed.
    integer = keys.dtype.type
    return integer(bit ^ integer(integer(bit >> keys[SIGN_SHIFT]) & keys[MAGNITUDE]))


@njit(nogil=True)
def find_peaks(row_bits, row, peak_bits, keys):
    """The maximum of each block of a row, and of the row at the end of ``peak_bits``.

    Says 1 where the row has a result, 0 where all is masked, -1 where a score is NaN or +inf.
    """
    n = row_bits.shape[1]
    highest = keys[MINUS_INFINITY]
    lowest = keys[PLUS_INFINITY]
    for block in range(n // BLOCK):
        first = block * BLOCK
        high = keys[MINUS_INFINITY]
        low = keys[PLUS_INFINITY]
        for i in range(BLOCK):
            key = to_key(row_bits[row, first + i], keys)
            high = key if key > high else high
            low = key if key < low else low
        peak_bits[block] = to_key(high, keys)
        highest = high if high > highest else highest
        lowest = low if low < lowest else lowest
    if n % BLOCK:
        high = keys[MINUS_INFINITY]
        for i in range(n - n % BLOCK, n):
            key = to_key(row_bits[row, i], keys)
            high = key if key > high else high
            lowest = key if key < lowest else lowest
        peak_bits[n // BLOCK] = to_key(high, keys)
        highest = high if high > highest else highest
    peak_bits[-1] = to_key(highest, keys)
    if highest >= keys[PLUS_INFINITY] or lowest < keys[MINUS_INFINITY]:
        return -1
    return 1 if highest > keys[MINUS_INFINITY] else 0
