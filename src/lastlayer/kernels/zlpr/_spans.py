"""What the CPU kernel of ZLPR does with a span of a row, in loops that LLVM vectorises."""

import math

from numba import njit

from lastlayer.kernels._blocks import BLOCK
from lastlayer.kernels._exp import exp

# Sums may be reordered and so vectorised; NaN and infinities keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def split(x, labels, allowed, up, down, up_weight, down_weight):
    """Exponents and weights of the two sums; how many classes count, and how many positives."""
    real = x.dtype.type
    never, none, one = real(-math.inf), real(0.0), real(1.0)
    n_allowed, n_positive = 0, 0
    if len(allowed) == 0:
        for i in range(len(x)):
            label = real(labels[i])
            up[i] = x[i] if label < one else never
            down[i] = -x[i] if label > none else never
            up_weight[i], down_weight[i] = one - label, label
            n_positive += label > none
        return len(x), n_positive
    for i in range(len(x)):
        keep = allowed[i] != 0
        label = real(labels[i]) if keep else none
        up[i] = x[i] if keep and label < one else never
        down[i] = -x[i] if label > none else never
        up_weight[i], down_weight[i] = one - label, label
        n_positive += label > none
        n_allowed += keep
    return n_allowed, n_positive


@njit(nogil=True)
def _largest(x, lanes):
    """The largest number that is at least 0; a NaN is left to the sums."""
    lanes[:] = 0.0
    whole = len(x) // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        # Lane by lane: a maximum over all of them is not vectorised where there may be a NaN.
        for i in range(BLOCK):
            value = x[first + i]
            lanes[i] = value if value > lanes[i] else lanes[i]
    largest = lanes[0]
    for i in range(1, BLOCK):
        largest = max(largest, lanes[i])
    for i in range(whole, len(x)):
        largest = x[i] if x[i] > largest else largest
    return largest


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _sum_from(x, weight, peak):
    zero = x.dtype.type(0.0)
    total = zero
    for i in range(len(x)):
        # The same infinity twice is a distance of 0.
        total += weight[i] * exp(zero if x[i] == peak else x[i] - peak)
    return total


@njit(nogil=True)
def onto(peak, total, x, weight, lanes):
    """A sum and its origin, with a span added."""
    top = _largest(x, lanes)
    if top > peak:
        total *= math.exp(peak - top)
        peak = top
    return peak, total + _sum_from(x, weight, peak)


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def fill(up, down, up_weight, down_weight, ends, factors, out):
    zero = up.dtype.type(0.0)
    for i in range(len(up)):
        out[i] = up_weight[i] * exp(zero if up[i] == ends[0] else up[i] - ends[0]) * factors[0]
    if factors[1] != zero:
        for i in range(len(up)):
            share = exp(zero if down[i] == ends[1] else down[i] - ends[1])
            out[i] -= down_weight[i] * share * factors[1]


@njit(nogil=True)
def hide(allowed, out):
    """Classes that do not count have no gradient in a row that has no number either."""
    for i in range(len(out)):
        out[i] = out[i] if allowed[i] != 0 else 0.0


@njit(nogil=True)
def log_one_plus(peak, total):
    return peak + math.log(total + math.exp(-peak)) if peak > 0.0 else math.log1p(total)
