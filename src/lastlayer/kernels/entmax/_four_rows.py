"""sparsemax and entmax at 1.5 for short rows on the CPU: four rows at a time.

The threshold of one row is a chain of sums, each waiting for the last; four rows that wait at the
same time cost little more than one. Picking out candidates, which pays on long rows, would cost
more than it saves here. Kinds are those of _solve.py.
"""

import math

from numba import njit

from lastlayer.kernels._keys import MAGNITUDE, PLUS_INFINITY

# Sums may be reordered and so vectorised; NaN and infinities keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
# On longer rows picking out candidates, and the support, pays (measured with AVX-512).
LONGEST = 256
LONGEST_BACKWARD = 1024


@njit(nogil=True)
def are_finite(row_bits, first, stop, keys):
    """Whether no score of these rows is NaN or infinite."""
    integer = keys.dtype.type
    largest = integer(0)
    for row in range(first, stop):
        for i in range(row_bits.shape[1]):
            size = integer(row_bits[row, i] & keys[MAGNITUDE])
            largest = size if size > largest else largest
    return largest < keys[PLUS_INFINITY]


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def solve_four(rows, r0, r1, r2, r3, out, x, kind):
    """Probabilities of four rows, which may be one and the same, into ``out``.

    Each must have a finite maximum. What comes out for a row does not depend on the others.
    ``x`` is room to work in.
    """
    _centre(rows, r0, r1, r2, r3, x, kind)
    start = x.dtype.type(-1)
    t0, t1, t2, t3 = start, start, start, start
    while True:
        if kind == 1:
            a0, a1, a2, a3, b0, b1, b2, b3 = _sums(x, t0, t1, t2, t3)
        else:
            a0, a1, a2, a3, b0, b1, b2, b3 = _sums_of_squares(x, t0, t1, t2, t3)
        f0, f1 = _following(t0, a0, b0, kind), _following(t1, a1, b1, kind)
        f2, f3 = _following(t2, a2, b2, kind), _following(t3, a3, b3, kind)
        if not (f0 > t0 or f1 > t1 or f2 > t2 or f3 > t3):
            break
        # A row that is solved stays where it is.
        t0, t1 = max(f0, t0), max(f1, t1)
        t2, t3 = max(f2, t2), max(f3, t3)
    _write(x, 0, out, r0, t0, a0, b0, kind)
    _write(x, 1, out, r1, t1, a1, b1, kind)
    _write(x, 2, out, r2, t2, a2, b2, kind)
    _write(x, 3, out, r3, t3, a3, b3, kind)


@njit(nogil=True, fastmath=_FAST)
def _centre(rows, r0, r1, r2, r3, x, kind):
    """The distances of four rows to their maxima, halved for kind 2."""
    scale = x.dtype.type(1.0 / kind)
    n = rows.shape[1]
    m0, m1, m2, m3 = rows[r0, 0], rows[r1, 0], rows[r2, 0], rows[r3, 0]
    for i in range(n):
        m0, m1 = max(m0, rows[r0, i]), max(m1, rows[r1, i])
        m2, m3 = max(m2, rows[r2, i]), max(m3, rows[r3, i])
    for i in range(n):
        x[0, i] = (rows[r0, i] - m0) * scale
        x[1, i] = (rows[r1, i] - m1) * scale
        x[2, i] = (rows[r2, i] - m2) * scale
        x[3, i] = (rows[r3, i] - m3) * scale


@njit(nogil=True, fastmath=_FAST)
def _sums(x, t0, t1, t2, t3):
    """Sums of the margins, then their numbers."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    # Any margin times this is at least 1: a number that, unlike a comparison, is vectorised.
    large = x.dtype.type(1e30)
    a0, a1, a2, a3 = zero, zero, zero, zero
    b0, b1, b2, b3 = zero, zero, zero, zero
    for i in range(x.shape[1]):
        m0, m1 = max(x[0, i] - t0, zero), max(x[1, i] - t1, zero)
        m2, m3 = max(x[2, i] - t2, zero), max(x[3, i] - t3, zero)
        a0, a1, a2, a3 = a0 + m0, a1 + m1, a2 + m2, a3 + m3
        b0, b1 = b0 + min(m0 * large, one), b1 + min(m1 * large, one)
        b2, b3 = b2 + min(m2 * large, one), b3 + min(m3 * large, one)
    return a0, a1, a2, a3, b0, b1, b2, b3


@njit(nogil=True, fastmath=_FAST)
def _sums_of_squares(x, t0, t1, t2, t3):
    """Sums of the squared margins, then of the margins."""
    zero = x.dtype.type(0)
    a0, a1, a2, a3 = zero, zero, zero, zero
    b0, b1, b2, b3 = zero, zero, zero, zero
    for i in range(x.shape[1]):
        m0, m1 = max(x[0, i] - t0, zero), max(x[1, i] - t1, zero)
        m2, m3 = max(x[2, i] - t2, zero), max(x[3, i] - t3, zero)
        a0, a1, a2, a3 = a0 + m0 * m0, a1 + m1 * m1, a2 + m2 * m2, a3 + m3 * m3
        b0, b1, b2, b3 = b0 + m0, b1 + m1, b2 + m2, b3 + m3
    return a0, a1, a2, a3, b0, b1, b2, b3


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _following(threshold, total, weight, kind):
    """Newton's next threshold; _solve.py says why it never passes the root."""
    if kind == 1:
        return type(threshold)(threshold + (total - 1.0) / weight)
    norm = math.sqrt(total)
    return type(threshold)(threshold + norm * (norm - 1.0) / weight)


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _write(x, four, out, row, threshold, total, weight, kind):
    """The probabilities of one row, with the last Newton step taken on them."""
    zero = x.dtype.type(0)
    missing = x.dtype.type((1.0 - total) / weight)
    if kind == 1:
        for i in range(x.shape[1]):
            margin = x[four, i] - threshold
            share = max(margin + missing, zero)
            out[row, i] = share if margin > zero else zero
    else:
        for i in range(x.shape[1]):
            margin = max(x[four, i] - threshold, zero)
            out[row, i] = max(margin * (margin + missing), zero)


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def backward_row(probs, grad, out, row, kind):
    """The Jacobian at a short row times its gradient, for kinds 1, 2 and 3 (softmax)."""
    zero, one = probs.dtype.type(0), probs.dtype.type(1)
    large = probs.dtype.type(1e30)
    n = probs.shape[1]
    total, product = zero, zero
    for i in range(n):
        share = probs[row, i]
        if kind == 1:
            # 1 on the support, as above; the second term hands a NaN on.
            slope = min(share * large, one) + share * zero
        elif kind == 2:
            slope = math.sqrt(share)
        else:
            slope = share
        out[row, i] = slope
        total += slope
        product += slope * grad[row, i]
    mean = product / total if total != zero else zero
    for i in range(n):
        slope = out[row, i]
        out[row, i] = slope * (grad[row, i] - mean) if slope != zero else zero
