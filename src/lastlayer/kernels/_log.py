"""The logarithm as LLVM turns it into vector instructions, for the CPU kernels; see _exp.py."""

import math

import numpy as np
from numba import njit, types
from numba.extending import overload

# Flags of the caller must not hold here: the corrections would be reordered away.
_EXACT = {"fastmath": {"contract"}, "error_model": "numpy"}

# The bits of the square root of a half: what is left after powers of 2 lies from there on.
_ROOT_32, _ROOT_64 = (
    dtype(math.sqrt(0.5)).view(whole)
    for dtype, whole in ((np.float32, np.int32), (np.float64, np.int64))
)
# Numbers below are scaled up first: they have leading zeros.
_TINY_32, _TINY_64 = np.float32(2.0**-126), np.float64(2.0**-1022)
_UP_32, _UP_64 = np.float32(2.0**32), np.float64(2.0**64)
# A whole number added to the bits of it is added to it as well, as long as it is small.
_SHIFT_32, _SHIFT_64 = np.float32(1.5 * 2**23), np.float64(1.5 * 2**52)
_SHIFT_BITS_32, _SHIFT_BITS_64 = _SHIFT_32.view(np.int32), _SHIFT_64.view(np.int64)
# log(2) in two parts; the first has few enough bits to be multiplied without rounding.
_HIGH_32, _LOW_32 = np.float32(0.693359375), np.float32(-2.1219444005469057e-4)
_HIGH_64, _LOW_64 = np.float64(0.6931471803691238), np.float64(1.9082149292705877e-10)
# The series of the inverse hyperbolic tangent, times 2, in squares.
_A1, _A2, _A3, _A4 = (np.float32(2 / (2 * k + 1)) for k in range(1, 5))
_B1, _B2, _B3, _B4, _B5, _B6, _B7, _B8, _B9, _B10, _B11 = (
    np.float64(2 / (2 * k + 1)) for k in range(1, 12)
)


@njit(nogil=True, **_EXACT)
def _parts_32(x):
    """``(power, f)`` with ``x = 2 ** power * (1 + f)``, for a normal x."""
    bits = np.float32(x).view(np.int32)
    power = np.int32(np.int32(bits - _ROOT_32) >> np.int32(23))
    mantissa = np.int32(bits - np.int32(power << np.int32(23))).view(np.float32)
    # The sum of whole numbers as bits: a conversion would not be vectorised everywhere.
    shifted = np.int32(_SHIFT_BITS_32 + power).view(np.float32)
    return shifted - _SHIFT_32, mantissa - np.float32(1)


@njit(nogil=True, **_EXACT)
def _parts_64(x):
    bits = np.float64(x).view(np.int64)
    power = (bits - _ROOT_64) >> 52
    mantissa = np.int64(bits - (power << 52)).view(np.float64)
    shifted = np.int64(_SHIFT_BITS_64 + power).view(np.float64)
    return shifted - _SHIFT_64, mantissa - 1.0


@njit(nogil=True, **_EXACT)
def _series_32(z):
    return z * (_A1 + z * (_A2 + z * (_A3 + z * _A4)))


@njit(nogil=True, **_EXACT)
def _series_64(z):
    late = _B7 + z * (_B8 + z * (_B9 + z * (_B10 + z * _B11)))
    return z * (_B1 + z * (_B2 + z * (_B3 + z * (_B4 + z * (_B5 + z * (_B6 + z * late))))))


def log(x):
    """``log(x)`` for x above 0, within 2 units in the last place of it or of 1e-3."""
    return np.log(x)


@overload(log, jit_options=_EXACT)
def _compiled_log(x):
    if x == types.float32:
        number, parts, series = np.float32, _parts_32, _series_32
        tiny, up, bits, high, low = _TINY_32, _UP_32, number(32), _HIGH_32, _LOW_32
    else:
        number, parts, series = np.float64, _parts_64, _series_64
        tiny, up, bits, high, low = _TINY_64, _UP_64, number(64), _HIGH_64, _LOW_64
    zero, half, two = number(0), number(0.5), number(2)

    def compiled(x):
        small = x < tiny
        power, f = parts(x * up if small else x)
        power = power - (bits if small else zero)
        # With s = f / (2 + f), log(1 + f) is 2 (s + s^3 / 3 + ...): that is f less a small part.
        s = f / (two + f)
        square = half * f * f
        rest = s * (square + series(s * s)) + power * low
        return power * high - ((square - rest) - f)

    return compiled
