"""Draws from an alias table on the CPU."""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer.kernels._threads import by_rows
from lastlayer.kernels.philox._rounds_cpu import philox

# What a draw costs in entries of a plain loop, for the choice of threads: it misses the cache.
_ENTRIES_A_PAIR = 64


def draw(table: Tensor, weight: Tensor, counter: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """As the reference's."""
    ids = torch.empty(n, dtype=torch.int64)
    log_prob = torch.empty(n, dtype=torch.float32)
    bits = len(table).bit_length() - 1
    arrays = (each.numpy() for each in (table, weight, counter, ids, log_prob))
    if n:
        _draw_rows((n + 1) // 2, _ENTRIES_A_PAIR, bits, *arrays)
    return ids, log_prob


def log_complement(weight: Tensor, target: Tensor, bits: int, wide: bool) -> Tensor:
    """As the reference's."""
    flat = target.contiguous().view(-1)
    made = torch.empty(flat.shape, dtype=torch.float64 if wide else torch.float32)
    if len(flat):
        _complement_rows(len(flat), 32, bits, *(each.numpy() for each in (weight, flat, made)))
    return made.view(target.shape)


@njit(nogil=True, cache=True)
def _complement(start, stop, bits, weight, target, made):
    most, log_total = (1 << bits) - 1, bits * math.log(2.0)
    for i in range(start, stop):
        own = weight[target[i]] if target[i] >= 0 else 0
        others = np.float64(most - own) + 1.0
        made[i] = math.log(others) - log_total if others > 0.0 else -np.inf


@njit(nogil=True, cache=True)
def _draw(start, stop, bits, table, weight, counter, ids, log_prob):
    seed, step = np.uint64(counter[0]), np.uint64(counter[1])
    log_total = (bits + 32) * math.log(2.0)
    for block in range(start, stop):
        a, b, c, d = philox(np.uint64(block), seed, step)
        ids[2 * block] = _chosen(table, bits, np.int64(a), np.int64(b))
        if 2 * block + 1 < len(ids):
            ids[2 * block + 1] = _chosen(table, bits, np.int64(c), np.int64(d))
    # A loop of its own: reads that do not wait for each other are in flight together.
    for place in range(2 * start, min(2 * stop, len(ids))):
        log_prob[place] = math.log(weight[ids[place]]) - log_total


@njit(nogil=True, inline="always")
def _chosen(table, bits, upper, lower):
    column = upper >> (32 - bits)
    entry = table[column]
    return column if lower < (entry & 0xFFFFFFFF) else entry >> 32


_draw_rows, _complement_rows = by_rows(_draw), by_rows(_complement)
