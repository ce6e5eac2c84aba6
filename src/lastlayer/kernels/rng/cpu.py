"""Random words, integers, log-uniform ids and draws from an alias table on the CPU."""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer._torch import as_numpy
from lastlayer.kernels._cpu import by_rows, empty_array
from lastlayer.kernels._cpu_math import philox
from lastlayer.kernels.rng.draws import alias_class, integer_below, log_uniform_rank


def words(counter: Tensor, n: int) -> Tensor:
    blocks = (n + 1) // 2
    made = torch.empty(blocks, 4, dtype=torch.int64)
    if n:
        _fill_rows(blocks, 4, as_numpy(counter), as_numpy(made))
    return made.view(-1, 2)[:n]


def integers(counter: Tensor, n: int, below: int) -> Tensor:
    ids = torch.empty(n, dtype=torch.int64)
    if n:
        _integer_rows((n + 1) // 2, 8, below, as_numpy(counter), as_numpy(ids))
    return ids


def log_uniform(
    counter: Tensor, order: Tensor | None, n: int, n_classes: int
) -> tuple[Tensor, Tensor]:
    ranks, rank = empty_array((n,), torch.int64)
    logs, log_prob = empty_array((n,), torch.float32)
    if n:
        base = math.log2(n_classes + 1)
        _rank_rows((n + 1) // 2, 64, base, n_classes, as_numpy(counter), ranks, logs)
    return (rank if order is None else order[rank]), log_prob


@by_rows
@njit(nogil=True, cache=True)
def _fill_rows(start, stop, counter, made):
    seed, step = np.uint64(counter[0]), np.uint64(counter[1])
    for block in range(start, stop):
        a, b, c, d = philox(np.uint64(block), seed, step)
        made[block, 0], made[block, 1] = np.int64(a), np.int64(b)
        made[block, 2], made[block, 3] = np.int64(c), np.int64(d)


@by_rows
@njit(nogil=True, cache=True)
def _integer_rows(start, stop, below, counter, ids):
    seed, step = np.uint64(counter[0]), np.uint64(counter[1])
    for block in range(start, stop):
        a, b, c, d = philox(np.uint64(block), seed, step)
        ids[2 * block] = integer_below(np.int64(a), np.int64(b), below)
        if 2 * block + 1 < len(ids):
            ids[2 * block + 1] = integer_below(np.int64(c), np.int64(d), below)


@by_rows
@njit(nogil=True, cache=True)
def _rank_rows(start, stop, octaves, n_classes, counter, ids, log_prob):
    seed, step = np.uint64(counter[0]), np.uint64(counter[1])
    for block in range(start, stop):
        a, b, c, d = philox(np.uint64(block), seed, step)
        ids[2 * block] = log_uniform_rank(np.int64(a), np.int64(b), octaves, n_classes)
        if 2 * block + 1 < len(ids):
            ids[2 * block + 1] = log_uniform_rank(np.int64(c), np.int64(d), octaves, n_classes)
    log_total = math.log1p(n_classes)
    for place in range(2 * start, min(2 * stop, len(ids))):
        log_prob[place] = math.log(math.log1p(1.0 / (ids[place] + 1.0)) / log_total)


# Cost of two draws in entries of a plain loop, to choose the number of threads: draws miss the
# cache.
_ENTRIES_A_PAIR = 64


def draw(table: Tensor, weight: Tensor, counter: Tensor, n: int) -> tuple[Tensor, Tensor]:
    ids = torch.empty(n, dtype=torch.int64)
    log_prob = torch.empty(n, dtype=torch.float32)
    bits = len(table).bit_length() - 1
    arrays = (as_numpy(each) for each in (table, weight, counter, ids, log_prob))
    if n:
        _draw_rows((n + 1) // 2, _ENTRIES_A_PAIR, bits, *arrays)
    return ids, log_prob


def log_complement(weight: Tensor, target: Tensor, bits: int, wide: bool) -> Tensor:
    flat = target.contiguous().view(-1)
    made = torch.empty(flat.shape, dtype=torch.float64 if wide else torch.float32)
    if len(flat):
        _complement_rows(len(flat), 32, bits, *(as_numpy(each) for each in (weight, flat, made)))
    return made.view(target.shape)


@by_rows
@njit(nogil=True, cache=True)
def _complement_rows(start, stop, bits, weight, target, made):
    most, log_total = (1 << bits) - 1, bits * math.log(2.0)
    for i in range(start, stop):
        own = weight[target[i]] if target[i] >= 0 else 0
        others = np.float64(most - own) + 1.0
        made[i] = math.log(others) - log_total if others > 0.0 else -np.inf


@by_rows
@njit(nogil=True, cache=True)
def _draw_rows(start, stop, bits, table, weight, counter, ids, log_prob):
    seed, step = np.uint64(counter[0]), np.uint64(counter[1])
    log_total = (bits + 32) * math.log(2.0)
    for block in range(start, stop):
        a, b, c, d = philox(np.uint64(block), seed, step)
        ids[2 * block] = alias_class(table, bits, np.int64(a), np.int64(b))
        if 2 * block + 1 < len(ids):
            ids[2 * block + 1] = alias_class(table, bits, np.int64(c), np.int64(d))
    # In a separate loop, so that the independent reads overlap.
    for place in range(2 * start, min(2 * stop, len(ids))):
        log_prob[place] = math.log(weight[ids[place]]) - log_total
