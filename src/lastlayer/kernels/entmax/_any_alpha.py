"""entmax at any alpha on the CPU: the largest probability of a row, and from it all others.

With L the logarithm of the largest probability, c = alpha - 1 and d the distance to the maximum,
p = exp(L + log1p(c d exp(-c L)) / c), which is softmax as c goes to 0. README.md has the rest.
"""

import math

import numpy as np
from numba import njit

from lastlayer.kernels._exp import exp
from lastlayer.kernels._log import log

# Sums may be reordered and so vectorised; NaN and infinities keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
# Less is softmax to the last bit.
_LEAST_EXCESS = 1e-12
# How near a sum must come to 1 for a result in float32, and in float64: the last step, which is
# taken on the probabilities, leaves about the square of it.
_NEAR_32, _NEAR_64 = 1e-5, 1e-9
_FEW_TRIPS, _MANY_TRIPS = 12, 400


@njit(nogil=True)
def room_for_any(n):
    """Room for the distances of a row in float32, in which a vector holds more, and in float64."""
    return np.empty(n, np.float32), np.empty(n, np.float64)


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def solve_any(x, room, count, excess):
    """Probabilities in place of the distances ``x[:count]`` to the maximum of a row.

    The first trips are made in float32. ``room`` is as :func:`room_for_any` makes it.
    """
    narrow, wide = room
    for i in range(count):
        narrow[i] = x[i]
        wide[i] = x[i]
    start, _, _ = _newton(narrow, count, excess, 0.0, _NEAR_32, _FEW_TRIPS)
    within = _NEAR_32 if x.itemsize == 4 else _NEAR_64
    if excess > 1.0:
        # Slopes are steep at the edge of the support, and that step leaves more.
        within *= within
    log_top, total, weight = _newton(wide, count, excess, start, within, _MANY_TRIPS)
    _finish(x, wide, count, excess, log_top, (1.0 - total) / weight)


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _newton(x, count, excess, start, within, trips):
    """Newton's method on the logarithm of the sum, in a bracket that some steps halve.

    Gives the logarithm of the largest probability, and the sums of shares and slopes there.
    """
    low, high = -math.log(count), 0.0
    # Where slopes are steep at the edge of the support Newton's steps may lead astray.
    every = 4 if excess > 1.0 else 12
    log_top, total, weight = start, 1.0, 1.0
    for trip in range(1, trips + 1):
        total, weight = _sums(x, count, log_top, excess)
        if abs(total - 1.0) <= within:
            break
        if total < 1.0:
            low = max(low, log_top)
        else:
            high = min(high, log_top)
        following = log_top - math.log(total) * total / weight
        if trip % every == 0 or not low < following < high:
            following = 0.5 * (low + high)
        if not low < following < high:
            # The bracket is closed; its upper end has the whole support.
            following = high
        if following == log_top:
            break
        log_top = following
    return log_top, total, weight


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _scale(log_top, excess):
    # Without the bound 0 * inf would drop the maximum itself when alpha is very large.
    return excess * math.exp(min(-excess * log_top, 80.0))


@njit(nogil=True, forceinline=True, fastmath={"contract"}, error_model="numpy")
def _share(distance, log_top, scale, reciprocal):
    """A probability, and its slope. Branches are choices, so that loops are vectorised."""
    number = type(distance)
    ratio = distance * scale
    inside = ratio > number(-1)
    ratio = ratio if inside else number(0)
    grown = number(1) + ratio
    slope = number(1) / grown
    # log1p: what was lost when 1 was added comes back.
    power = (log(grown) + (ratio - (grown - number(1))) * slope) * reciprocal
    share = exp(log_top + power) if inside else number(0)
    return share, share * slope


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _sums(x, count, log_top, excess):
    number = x.dtype.type
    total, weight = number(0), number(0)
    at = number(log_top)
    if excess < _LEAST_EXCESS:
        for i in range(count):
            total += exp(at + x[i])
        return float(total), float(total)
    scale, reciprocal = number(_scale(log_top, excess)), number(1.0 / excess)
    for i in range(count):
        share, slope = _share(x[i], at, scale, reciprocal)
        total += share
        weight += slope
    return float(total), float(weight)


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _finish(x, wide, count, excess, log_top, missing):
    """The last step is taken on the probabilities: rounding of the unknown is undone."""
    if excess < _LEAST_EXCESS:
        for i in range(count):
            x[i] = exp(log_top + wide[i]) * (1.0 + missing)
        return
    scale, reciprocal = _scale(log_top, excess), 1.0 / excess
    norm = 0.0
    for i in range(count):
        share, slope = _share(wide[i], log_top, scale, reciprocal)
        share = max(share + slope * missing, 0.0)
        wide[i] = share
        norm += share
    # Slopes are steep at the edge of the support where alpha > 2, and a step may overshoot.
    factor = 1.0 / norm if excess > 1.0 else 1.0
    for i in range(count):
        x[i] = wide[i] * factor


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def powers_of(shares, count, power):
    """``p ** power`` in place of p, which is at most 1 and not 0."""
    if power < 0.0:
        # These may be too large for any number.
        for i in range(count):
            shares[i] **= power
        return
    for i in range(count):
        # The second term hands a NaN on.
        shares[i] = exp(power * log(shares[i])) + shares[i] * 0.0
