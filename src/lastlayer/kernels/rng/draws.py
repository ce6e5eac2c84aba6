"""Draws of the samplers on the CPU, and their log-probabilities, for the kernels that need them.

A draw is made from two words of 32 random bits. ``number`` depends on the kind of sampler: log of
the number of classes (UNIFORM), log2 of one more (LOG_UNIFORM), log2 of the columns (ALIAS).
"""

import math

import numpy as np
from numba import njit

from lastlayer.kernels._cpu_math import philox
from lastlayer.kernels.rng import ALIAS, LOG_UNIFORM, SERIES, SQRT_2, UNIFORM

_LOG_2 = math.log(2.0)


@njit(nogil=True, inline="always")
def integer_below(upper, lower, below):
    """An integer from 0 to ``below`` - 1."""
    return (upper * below + (lower * below >> 32)) >> 32


@njit(nogil=True, inline="always")
def log_uniform_rank(upper, lower, octaves, n_classes):
    """A rank by Zipf's law; ``octaves`` is log2(n_classes + 1)."""
    exponent = np.float64(upper << 21 | lower >> 11) * 2.0**-53 * octaves
    octave = math.floor(exponent)
    place = exponent - octave - 0.5
    power = SERIES[0]
    for k in range(1, len(SERIES)):
        power = power * place + SERIES[k]
    rank = np.int64(power * SQRT_2 * np.float64(np.int64(1) << np.int64(octave))) - 1
    return min(max(rank, 0), n_classes - 1)


@njit(nogil=True, inline="always")
def alias_class(table, bits, upper, lower):
    """A class from an alias table of 2^bits columns."""
    column = upper >> (32 - bits)
    entry = table[column]
    return column if lower < (entry & 0xFFFFFFFF) else entry >> 32


@njit(nogil=True)
def draw_range(start, stop, kind, number, n_classes, counter, table, ids):
    """Draws ``start`` to ``stop`` of the sampler with this kind and table, into ``ids``."""
    seed, step = np.uint64(counter[0]), np.uint64(counter[1])
    for block in range(start // 2, (stop + 1) // 2):
        a, b, c, d = philox(np.uint64(block), seed, step)
        for odd in range(2):
            place = 2 * block + odd
            if place < start or place >= stop:
                continue
            upper, lower = np.int64(c if odd else a), np.int64(d if odd else b)
            if kind == UNIFORM:
                ids[place] = integer_below(upper, lower, n_classes)
            elif kind == LOG_UNIFORM:
                rank = log_uniform_rank(upper, lower, number, n_classes)
                ids[place] = table[rank] if len(table) else rank
            else:
                ids[place] = alias_class(table, np.int64(number), upper, lower)


@njit(nogil=True)
def log_prob_of(one, kind, number, n_classes, weight, of_others):
    """The log-probability of a class, or of all others together, in float64.

    ``weight`` is the sampler's second table: weights (ALIAS), or ranks if they are not the ids.
    """
    if kind == ALIAS:
        bits = np.int64(number) + 32
        own = np.float64(weight[one])
        if of_others:
            # In integers: nothing cancels if the class has nearly all of the probability.
            own = np.float64((np.int64(1) << bits) - 1 - weight[one]) + 1.0
        return math.log(own) - bits * _LOG_2 if own > 0.0 else -np.inf
    if kind == UNIFORM:
        share = math.exp(-number)
    else:
        rank = weight[one] if len(weight) else one
        share = math.log1p(1.0 / (rank + 1.0)) / math.log1p(n_classes)
    if of_others:
        return math.log1p(-share) if share < 1.0 else -np.inf
    return math.log(share)
