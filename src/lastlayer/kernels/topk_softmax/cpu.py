"""Top-k softmax on the CPU: bisection for the k-th largest score, in blocks that can contain it."""

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

# Steps that bisect values, which is fast for usual scores. Later ones bisect their bits as
# integers, which always ends.
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
    # One SIMD vector longer than a row, for padding.
    held = np.empty((1, n + lanes_of(rows.itemsize)), rows.dtype)
    column = np.empty(n, np.int32)
    for row in range(start, stop):
        state = find_peaks(rows, row, peaks)
        if state <= 0:
            out[row] = math.nan if state < 0 else nothing
        elif 2 * k > blocks:
            # Most blocks would remain; gathering them costs more than counting in the whole row.
            for i in range(n):
                held[0, i] = rows[row, i]
            _shares(held, n, k, peaks[-1], -math.inf, logs)
            for i in range(n):
                out[row, i] = held[0, i]
        else:
            # k peaks are k scores, so the k-th largest score is at least the k-th largest peak.
            held[0, :blocks] = peaks[:blocks]
            floor, _ = _edge_of(held, _filled_up(held, blocks), k, -math.inf, peaks[-1])
            count = _pick(rows, row, peaks, floor, held, column)
            _shares(held, count, k, peaks[-1], floor, logs)
            out[row] = nothing
            for i in range(count):
                out[row, column[i]] = held[0, i]


@njit(nogil=True)
def _pick(rows, row, peaks, floor, held, column):
    """Gathers the scores of at least ``floor`` and their columns; returns their number."""
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
    """The number of SIMD vectors for n numbers, after padding the last one with -inf."""
    lanes = lanes_of(held.itemsize)
    vectors = (n + lanes - 1) // lanes
    for i in range(n, vectors * lanes):
        held[0, i] = -math.inf
    return vectors


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _shares(held, n, k, peak, low, logs):
    """Overwrites n scores with the softmax over their k largest, or its log."""
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


# A separate function with stricter flags: those of the caller allow reordering.
@njit(nogil=True, fastmath={"contract"})
def _write_logs(held, n, edge, peak, level):
    """Subtracts the peak first, so that large scores cancel exactly."""
    real = held.dtype.type
    for i in range(n):
        score = held[0, i]
        held[0, i] = (score - peak) - real(level) if score >= edge else real(-math.inf)


@njit(nogil=True)
def _drop_last(held, n, edge, excess):
    """Masks the last ``excess`` scores equal to the edge: ties keep the lowest indices."""
    for i in range(n - 1, -1, -1):
        if excess == 0:
            break
        if held[0, i] == edge:
            held[0, i] = -math.inf
            excess -= 1


def order_of(value):
    """Maps a float to an integer of the same order."""
    return _order_of(typeof(value))(value)


def value_of(order, like):
    """Inverse of :func:`order_of`: the float, of the type of ``like``."""
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
    """The float type, the integer type of the same size, and its bits without the sign."""
    if of == types.float32:
        return np.float32, np.int32, np.int32(2**31 - 1)
    return np.float64, np.int64, np.int64(2**63 - 1)


@njit(nogil=True, error_model="numpy")
def _edge_of(values, vectors, k, low, high):
    """``(edge, count)``: ``count`` >= k numbers of the first row are at least ``edge``.

    ``count`` exceeds k only for ties with the k-th largest number, which is then the edge. The last
    of the ``vectors`` is padded with -inf. At least k numbers must be at least ``low``, which may
    be -inf; ``high`` is the maximum.
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
            # The mean, rounded up, without overflow.
            middle = value_of((first | last) - ((first ^ last) >> 1), least)
        reached = count_at_least(values, 0, vectors, middle)
        if reached >= k:
            least, count = middle, reached
        else:
            # The k-th largest is less than ``middle``: at most the float before it.
            most = value_of(order_of(middle) - 1, least)
    return least, count


@njit(nogil=True, error_model="numpy")
def _bound_below(values, vectors, k, high):
    """A lower bound of the k-th largest number, near the maximum since most scores are."""
    number = values.dtype.type
    for depth in (4.0, 32.0, 1024.0):
        low = number(high - depth)
        if count_at_least(values, 0, vectors, low) >= k:
            return low
    return number(-math.inf)
