"""Builds integer alias tables: weights from shares, and columns from weights, in O(n) each."""

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
# With few classes there are more columns than needed, so that weights are fine-grained.
_LEAST_BITS = 12


def column_bits(n_classes: int) -> int:
    """log2 of the number of columns, a power of two so that bits alone choose a column."""
    return max(_LEAST_BITS, (n_classes - 1).bit_length())


def integer_weights(shares: Reals, bits: int) -> Integers:
    """Integer weights of at least 1 that sum to 2^(bits + 32), in proportion to ``shares``.

    Args:
        shares: non-negative, with a positive finite sum.
        bits: log2 of the number of columns.
    """
    # numpy uses pairwise summation, whose error hardly grows with the number of classes.
    weights: Integers = _compiled(_shared_out)(shares, float(shares.sum()), 1 << (bits + 32))
    return weights


def alias_table(weight: Integers, bits: int) -> Integers:
    """The columns of the table: alias in the upper 32 bits, threshold in the lower.

    The sweep of Hübschle-Schneider and Sanders: the excess of a heavy class fills light columns one
    after another, until the class is light itself and the next heavy one fills its column.
    """
    table: Integers = _compiled(_columns)(weight, bits)
    return table


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled by Numba at its first call; unchanged if Numba is not installed."""
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
    # Rounding remainders are carried to the next class: no weight is off by more than 1.
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
        """The next column whose class is heavy (at least a column of weight), or light."""
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
