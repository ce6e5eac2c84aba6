"""Top-k softmax on the CPU: the k-th largest score by halves, among the blocks that can have it."""

import math

import numpy as np
from numba import njit, typeof, types
from numba.extending import overload
from torch import Tensor

from lastlayer._torch import as_numpy, in_dtype
from lastlayer.kernels._cpu import as_rows, by_rows, empty_rows
from lastlayer.kernels._cpu_math import (
    BLOCK,
    FAST,
    count_at_least,
    exp,
    find_peaks,
    lanes_of,
    room_for_peaks,
)

# Halves of the values, while they bring much; then of the integers behind them, which end.
_BY_VALUE = 16


def forward(scores: Tensor, k: int) -> Tensor:
    rows, (out, result) = as_rows(scores), empty_rows(scores)
    if rows.size:
        _forward_rows(*rows.shape, rows, out, k, False)
    return in_dtype(result, scores.dtype)


def logs_into(out: Tensor, scores: Tensor, bias: Tensor | None, k: int) -> None:
    rows = as_rows(scores if bias is None else scores + bias)
    if rows.size:
        _forward_rows(*rows.shape, rows, as_numpy(out), k, True)


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _forward_rows(start, stop, rows, out, k, logs):
    nothing = -math.inf if logs else 0.0
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
            out[row] = math.nan if state < 0 else nothing
        elif 2 * k > blocks:
            # Most blocks would stay, and picking costs more than a few more counts.
            for i in range(n):
                held[0, i] = rows[row, i]
            _shares(held, n, k, peaks[-1], -math.inf, logs)
            for i in range(n):
                out[row, i] = held[0, i]
        else:
            # k peaks are k scores: the k-th largest score is no smaller than the k-th largest peak.
            held[0, :blocks] = peaks[:blocks]
            floor, _ = _edge_of(held, _filled_up(held, blocks), k, -math.inf, peaks[-1])
            count = _pick(rows, row, peaks, floor, held, column)
            _shares(held, count, k, peaks[-1], floor, logs)
            out[row] = nothing
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


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _shares(held, n, k, peak, low, logs):
    """The softmax over the k largest of n scores, or its log, in place of them."""
    zero = held.dtype.type(0)
    edge, count = _edge_of(held, _filled_up(held, n), k, low, peak)
    if count > k:
        _drop_last(held, n, edge, count - k)
    total = zero
    if logs:
        for i in range(n):
            score = held[0, i]
            total += exp(score - peak) if score >= edge else zero
        _write_logs(held, n, edge, peak, math.log(total))
        return
    for i in range(n):
        score = held[0, i]
        share = exp(score - peak) if score >= edge else zero
        held[0, i] = share
        total += share
    share = 1 / total
    for i in range(n):
        held[0, i] *= share


# With flags of its own, or it would get those of its caller, which may reorder.
@njit(nogil=True, fastmath={"contract"})
def _write_logs(held, n, edge, peak, level):
    """The peak is taken away first: large scores cancel exactly."""
    real = held.dtype.type
    for i in range(n):
        score = held[0, i]
        held[0, i] = (score - peak) - real(level) if score >= edge else real(-math.inf)


@njit(nogil=True)
def _drop_last(held, n, edge, excess):
    """Of equal scores the first are taken."""
    for i in range(n - 1, -1, -1):
        if excess == 0:
            break
        if held[0, i] == edge:
            held[0, i] = -math.inf
            excess -= 1


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
def _value_of(order, like):
    number, integer, low_bits = _kinds(like)

    def compiled(order, like):
        return integer(order if order >= 0 else order ^ low_bits).view(number)

    return compiled


def _kinds(of):
    """Floats, the integers as wide, and all bits of these but the sign."""
    if of == types.float32:
        return np.float32, np.int32, np.int32(2**31 - 1)
    return np.float64, np.int64, np.int64(2**63 - 1)


@njit(nogil=True, error_model="numpy")
def _edge_of(values, vectors, k, low, high):
    """``(edge, count)``: as many numbers of the first row are at least ``edge``, k or more.

    More only where several equal the k-th largest, which is the edge then. Of ``vectors`` the last
    one is filled up with -inf. At least k numbers are no less than ``low``, which may be -inf;
    ``high`` is the maximum.
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
