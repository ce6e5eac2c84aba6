"""sparsemax and entmax at 1.5 for short rows on the CPU: four rows at a time.

The threshold of one row is a chain of sums, each waiting for the last; four rows that wait at the
same time cost little more than one. Picking out candidates, which pays on long rows, would cost
more than it saves here. Kinds are those of _solve.py.
"""

import math

import numpy as np
from numba import njit

from lastlayer.kernels._blocks import top_of_rest
from lastlayer.kernels._vectors import lanes_of, margins, squares

# Sums may be reordered and so vectorised; NaN and infinities keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
# On longer rows picking out candidates, and the support, pays (measured with AVX-512).
LONGEST = 1024
LONGEST_BACKWARD = 1024


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def solve_short(rows, out, four, kind):
    """Probabilities of one to four rows into ``out``; says whether all of them have some.

    If not, nothing is written. ``four`` is room to work in, as :func:`room_for_four` makes it.
    """
    last = len(rows) - 1
    second, third = min(1, last), min(2, last)
    (p0, sane0), (p1, sane1) = top_of_rest(rows, 0, 0), top_of_rest(rows, second, 0)
    (p2, sane2), (p3, sane3) = top_of_rest(rows, third, 0), top_of_rest(rows, last, 0)
    if not (sane0 and sane1 and sane2 and sane3 and min(p0, p1, p2, p3) > -math.inf):
        return False
    # Inlined for a known kind, each is a loop of its own.
    if kind == 1:
        _solve_four(rows, 0, second, third, last, p0, p1, p2, p3, out, four, 1)
    else:
        _solve_four(rows, 0, second, third, last, p0, p1, p2, p3, out, four, 2)
    return True


@njit(nogil=True, forceinline=True, fastmath=_FAST, error_model="numpy")
def _solve_four(rows, r0, r1, r2, r3, p0, p1, p2, p3, out, x, kind):
    """Probabilities of four rows, which may be one and the same, into ``out``.

    ``p0`` to ``p3`` are their maxima, which must be finite. What comes out for a row does not
    depend on the others.
    """
    scale = x.dtype.type(1.0 / kind)
    _centre(rows, r0, p0, x, 0, scale)
    _centre(rows, r1, p1, x, 1, scale)
    _centre(rows, r2, p2, x, 2, scale)
    _centre(rows, r3, p3, x, 3, scale)
    count = x.shape[1] // (2 * lanes_of(x.itemsize))
    start = x.dtype.type(-1)
    t0, t1, t2, t3 = start, start, start, start
    if kind == 1:
        c0, c1, c2, c3 = start, start, start, start
        while True:
            (a0, b0), (a1, b1) = margins(x, 0, count, t0), margins(x, 1, count, t1)
            (a2, b2), (a3, b3) = margins(x, 2, count, t2), margins(x, 3, count, t3)
            # The threshold is that of the last support: if it leaves the same, it is the one.
            if b0 == c0 and b1 == c1 and b2 == c2 and b3 == c3:
                break
            t0, t1 = _unless(b0 == c0, t0, a0, b0), _unless(b1 == c1, t1, a1, b1)
            t2, t3 = _unless(b2 == c2, t2, a2, b2), _unless(b3 == c3, t3, a3, b3)
            c0, c1, c2, c3 = b0, b1, b2, b3
    else:
        while True:
            (a0, b0), (a1, b1) = squares(x, 0, count, t0), squares(x, 1, count, t1)
            (a2, b2), (a3, b3) = squares(x, 2, count, t2), squares(x, 3, count, t3)
            f0, f1 = _following(t0, a0, b0), _following(t1, a1, b1)
            f2, f3 = _following(t2, a2, b2), _following(t3, a3, b3)
            if not (f0 > t0 or f1 > t1 or f2 > t2 or f3 > t3):
                break
            # A row that is solved stays where it is.
            t0, t1 = max(f0, t0), max(f1, t1)
            t2, t3 = max(f2, t2), max(f3, t3)
    _write(x, 0, out, r0, t0, a0, b0, kind)
    _write(x, 1, out, r1, t1, a1, b1, kind)
    _write(x, 2, out, r2, t2, a2, b2, kind)
    _write(x, 3, out, r3, t3, a3, b3, kind)


@njit(nogil=True)
def room_for_four(rows, n):
    """Four rows of n scores, padded with what has no share to whole pairs of vectors."""
    pair = 2 * lanes_of(rows.itemsize)
    return np.full((4, (n + pair - 1) // pair * pair), -np.inf, rows.dtype)


@njit(nogil=True, forceinline=True, fastmath=_FAST)
def _centre(rows, row, top, x, four, scale):
    """The distances of a row to its maximum, halved for kind 2."""
    for i in range(rows.shape[1]):
        x[four, i] = (rows[row, i] - top) * scale


@njit(nogil=True, forceinline=True, fastmath=_FAST, error_model="numpy")
def _unless(solved, threshold, total, count):
    """The threshold at which so many margins would sum to 1; where it is solved, as it is.

    It never falls, and so the count never rises: rounding alone would let a score that lies on the
    threshold leave the support and return for ever.
    """
    following = type(threshold)(threshold + (total - 1.0) / count)
    return threshold if solved else max(threshold, following)


@njit(nogil=True, forceinline=True, fastmath=_FAST, error_model="numpy")
def _following(threshold, total, weight):
    """Newton's next threshold at 1.5; _solve.py says why it never passes the root."""
    norm = math.sqrt(total)
    return type(threshold)(threshold + norm * (norm - 1.0) / weight)


@njit(nogil=True, forceinline=True, fastmath=_FAST, error_model="numpy")
def _write(x, four, out, row, threshold, total, weight, kind):
    """The probabilities of one row, with the last Newton step taken on them."""
    zero = x.dtype.type(0)
    missing = x.dtype.type((1.0 - total) / weight)
    if kind == 1:
        for i in range(out.shape[1]):
            margin = x[four, i] - threshold
            share = max(margin + missing, zero)
            out[row, i] = share if margin > zero else zero
    else:
        for i in range(out.shape[1]):
            margin = x[four, i] - threshold
            share = max(margin * (margin + missing), zero)
            out[row, i] = share if margin > zero else zero


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def backward_row(probs, grad, out, row, kind):
    """The Jacobian at a short row times its gradient, for kinds 1, 2 and 3 (softmax)."""
    zero = probs.dtype.type(0)
    n = probs.shape[1]
    # This loop only reads. One that also writes is vectorised only where its arrays lie far enough
    # apart: the order of its sums, and with it the last bit, would depend on addresses.
    total, product = zero, zero
    for i in range(n):
        slope = _slope(probs[row, i], kind)
        total += slope
        product += slope * grad[row, i]
    mean = product / total if total != zero else zero
    for i in range(n):
        slope = _slope(probs[row, i], kind)
        out[row, i] = slope * (grad[row, i] - mean) if slope != zero else zero


@njit(nogil=True, forceinline=True, fastmath=_FAST, error_model="numpy")
def _slope(share, kind):
    """``p ** (2 - alpha)``, 0 outside the support."""
    zero, one, large = type(share)(0), type(share)(1), type(share)(1e30)
    if kind == 1:
        # 1 on the support, as above; the second term hands a NaN on.
        return min(share * large, one) + share * zero
    return math.sqrt(share) if kind == 2 else share
