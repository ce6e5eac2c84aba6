"""The k-th largest number of a row by halves, counting in vectors: for the CPU kernel."""

import math

import numpy as np
from numba import njit, typeof, types
from numba.extending import overload

from lastlayer.kernels._vectors import count_at_least

# Halves of the values, while they bring much; then of the integers behind them, which end.
_BY_VALUE = 16


def order_of(value):
    """A float as an integer of the same order."""
    return _order_of(typeof(value))(value)


def value_of(order, like):
    """The float of the type of ``like`` behind an :func:`order_of`."""
    return _value_of(typeof(order), typeof(like))(order, like)


@overload(order_of)
def _order_of(value):
    number, integer, low_bits = _kinds(value)

    def compiled(value):
        bits = number(value).view(integer)
        return bits if bits >= 0 else integer(bits ^ low_bits)

    return compiled


@overload(value_of)
def _value_of(order, like):  # noqa: ARG001 — an overload has the arguments of its function
    number, integer, low_bits = _kinds(like)

    def compiled(order, like):  # noqa: ARG001 — as above
        return integer(order if order >= 0 else order ^ low_bits).view(number)

    return compiled


def _kinds(of):
    """Floats, the integers as wide, and all bits of these but the sign."""
    if of == types.float32:
        return np.float32, np.int32, np.int32(2**31 - 1)
    return np.float64, np.int64, np.int64(2**63 - 1)


@njit(nogil=True, error_model="numpy")
def edge_of(values, vectors, k, low, high):
    """``(edge, count)``: as many numbers of the first row are at least ``edge``, k or more.

    More only where several equal the k-th largest, which is the edge then.

    Args:
        values: a matrix, of which the first row is looked at.
        vectors: how many vectors of it; what fills up the last one is -inf.
        k: 1 or more.
        low: at least k numbers are no less. -inf will do.
        high: the maximum.
    """
    number = values.dtype.type
    least, most = number(low), number(high)
    if k == 1:
        least = most
    elif least == -math.inf:
        least = _bound_below(values, vectors, k, most)
    count = count_at_least(values, 0, vectors, least)
    for step in range(_BY_VALUE + 8 * values.itemsize):
        if count == k or not least < most:
            break
        middle = number(least + number(0.5) * (most - least))
        if step >= _BY_VALUE or not least < middle <= most:
            first, last = order_of(least), order_of(most)
            # The mean of both, rounded up, without their sum.
            middle = value_of((first | last) - ((first ^ last) >> 1), least)
        reached = count_at_least(values, 0, vectors, middle)
        if reached >= k:
            least, count = middle, reached
        else:
            # The k-th largest is below: at most the number before.
            most = value_of(order_of(middle) - 1, least)
    return least, count


@njit(nogil=True, error_model="numpy")
def _bound_below(values, vectors, k, high):
    """A number that at least k are no less than; scores mostly lie near their maximum."""
    number = values.dtype.type
    for depth in (4.0, 32.0, 1024.0):
        low = number(high - depth)
        if count_at_least(values, 0, vectors, low) >= k:
            return low
    return number(-math.inf)
