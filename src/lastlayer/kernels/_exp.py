"""exp and tanh that LLVM turns into vector instructions, for the CPU kernels.

Those of Numba ask the C library for one number at a time. softmax_rows/README.md has the why.
"""

from math import factorial

import numpy as np
from numba import njit, types
from numba.extending import overload

# Flags of the caller must not hold here: reordered, adding and taking away a shift is nothing.
_EXACT = {"fastmath": {"contract"}, "error_model": "numpy"}

# Adding it leaves the nearest whole number in the lowest bits.
_SHIFT_32, _SHIFT_64 = np.float32(1.5 * 2**23), np.float64(1.5 * 2**52)
_LOG2E_32, _LOG2E_64 = np.float32(1.4426950408889634), np.float64(1.4426950408889634)
# log(2) in two parts; the first has few enough bits to be multiplied without rounding.
_HIGH_32, _LOW_32 = np.float32(0.693359375), np.float32(-2.1219444005469057e-4)
_HIGH_64, _LOW_64 = np.float64(0.6931471803691238), np.float64(1.9082149292705877e-10)
# Below these the result is 0: it would not be a normal number.
_LEAST_32, _LEAST_64 = np.float32(-87.0), np.float64(-708.0)
# The series of exp, far enough for a remainder of half of log(2).
_A2, _A3, _A4, _A5, _A6, _A7 = (np.float32(1 / factorial(k)) for k in range(2, 8))
_B2, _B3, _B4, _B5, _B6, _B7, _B8, _B9, _B10, _B11, _B12, _B13 = (
    np.float64(1 / factorial(k)) for k in range(2, 14)
)


@njit(nogil=True, **_EXACT)
def _parts_32(x):
    """``(scale, rest)`` with ``exp(x) = scale + scale * rest``, from the least x to 80."""
    shifted = np.float32(x * _LOG2E_32 + _SHIFT_32)
    whole = shifted - _SHIFT_32
    r = (x - whole * _HIGH_32) - whole * _LOW_32
    series = ((((_A7 * r + _A6) * r + _A5) * r + _A4) * r + _A3) * r + _A2
    # Without the casts Numba would widen to int64.
    exponent = np.int32(np.int32(shifted.view(np.int32) + np.int32(127)) << np.int32(23))
    return exponent.view(np.float32), r + (r * r) * series


@njit(nogil=True, **_EXACT)
def _parts_64(x):
    shifted = np.float64(x * _LOG2E_64 + _SHIFT_64)
    whole = shifted - _SHIFT_64
    r = (x - whole * _HIGH_64) - whole * _LOW_64
    series = ((((_B13 * r + _B12) * r + _B11) * r + _B10) * r + _B9) * r + _B8
    series = (((((series * r + _B7) * r + _B6) * r + _B5) * r + _B4) * r + _B3) * r + _B2
    exponent = np.int64((shifted.view(np.int64) + 1023) << 52)
    return exponent.view(np.float64), r + (r * r) * series


def exp(x):
    """``exp(x)`` for x up to 80, within 2 units in the last place; 0 below the normal numbers."""
    return np.exp(x)


@overload(exp, jit_options=_EXACT)
def _compiled_exp(x):
    narrow = x == types.float32
    parts, least = (_parts_32, _LEAST_32) if narrow else (_parts_64, _LEAST_64)
    zero = type(least)(0)

    def compiled(x):
        # Comparisons that let a NaN through.
        small = x < least
        scale, rest = parts(least if small else x)
        return zero if small else scale + scale * rest

    return compiled


def tanh_and_slope(x):
    """``tanh(x)`` and its derivative, both without cancellation."""
    bent = np.tanh(x)
    return bent, 1 - bent * bent


@overload(tanh_and_slope, jit_options=_EXACT)
def _compiled_tanh(x):
    narrow = x == types.float32
    parts, least = (_parts_32, _LEAST_32) if narrow else (_parts_64, _LEAST_64)
    zero, one, two, four = (type(least)(number) for number in (0, 1, 2, 4))

    def compiled(x):
        double = -two * abs(x)
        scale, rest = parts(least if double < least else double)
        # With u = exp(-2|x|) tanh is (1 - u) / (1 + u), and its slope 4 u / (1 + u)^2.
        u = scale + scale * rest
        share = one / (one + u)
        size = ((one - scale) - scale * rest) * share
        return -size if x < zero else size, four * u * share * share

    return compiled
