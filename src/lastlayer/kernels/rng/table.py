"""The integers of an alias table: weights from shares, and columns from weights, in O(n) each."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lastlayer.kernels._registry import available

Integers = NDArray[np.int64]
Reals = NDArray[np.float64]
COLUMN = 1 << 32
MOST_CLASSES = 1 << 31
# Few classes get more columns than they need, so that weights are fine-grained there too.
_LEAST_BITS = 12


def column_bits(n_classes: int) -> int:
    """The logarithm of the number of columns, a power of two: a column is chosen by bits alone."""
    return max(_LEAST_BITS, (n_classes - 1).bit_length())


def integer_weights(shares: Reals, bits: int) -> Integers:
    """Weights of at least 1 that sum to 2^(bits + 32), as near to ``shares`` as integers can be.

    Args:
        shares: not negative, with a positive sum that is finite.
        bits: logarithm of the number of columns.
    """
    # numpy adds in pairs, and so without an error that grows with the number of classes.
    weights: Integers = _compiled(_shared_out)(shares, float(shares.sum()), 1 << (bits + 32))
    return weights


def alias_table(weight: Integers, bits: int) -> Integers:
    """Columns of 2^32 units each that share out the weights: alias above, threshold below.

    The sweep of Hübschle-Schneider and Sanders: what a heavy class has too much fills up light
    columns one after the other, until it has become light itself and the next heavy one fills it.
    """
    table: Integers = _compiled(_columns)(weight, bits)
    return table


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as Numba compiles it at the first call, or as it is where Numba is absent."""
    if available()["cpu"] is not None:
        return function
    from numba import njit

    compiled: Callable[..., Any] = njit(nogil=True, cache=True)(function)
    return compiled


def _shared_out(shares, mass, total):
    floors = 0
    for share in shares:
        floors += share / mass * total < 1.0
    scale = (total - floors) / mass
    weight = np.empty(len(shares), np.int64)
    # What rounding takes from one class the next one gets: no class is off by more than 1.
    carry, spent, heaviest = 0.0, 0, 0
    for i in range(len(shares)):
        exact = shares[i] * scale
        weight[i] = max(1, np.int64(np.floor(exact + carry)))
        if exact >= 1.0:
            carry += exact - weight[i]
        spent += weight[i]
        if weight[i] > weight[heaviest]:
            heaviest = i
    weight[heaviest] += total - spent
    return weight


def _columns(weight, bits):
    n, columns = len(weight), 1 << bits

    def following(place, heavy):
        """The next column whose class has at least a column of weight, or less."""
        place += 1
        while place < columns and (place < n and weight[place] >= COLUMN) != heavy:
            place += 1
        return place

    table = np.empty(columns, np.int64)
    light, heavy = following(-1, False), following(-1, True)
    left = weight[heavy]
    while True:
        if left > COLUMN:
            mine = weight[light] if light < n else 0
            table[light] = heavy << 32 | mine
            left -= COLUMN - mine
            light = following(light, False)
        elif left == COLUMN:
            table[heavy] = heavy << 32
            heavy = following(heavy, True)
            if heavy == columns:
                return table
            left = weight[heavy]
        else:
            after = following(heavy, True)
            table[heavy] = after << 32 | left
            left += weight[after] - COLUMN
            heavy = after
