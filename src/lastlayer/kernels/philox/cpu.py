"""Random words, integers and log-uniform ids on the CPU."""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer.kernels._threads import by_rows
from lastlayer.kernels.philox._exp2 import SERIES, SQRT_2
from lastlayer.kernels.philox._rounds_cpu import philox


def words(counter: Tensor, n: int) -> Tensor:
    """As the reference's."""
    blocks = (n + 1) // 2
    made = torch.empty(blocks, 4, dtype=torch.int64)
    if n:
        _fill_rows(blocks, 4, counter.numpy(), made.numpy())
    return made.view(-1, 2)[:n]


def integers(counter: Tensor, n: int, below: int) -> Tensor:
    """As the reference's."""
    ids = torch.empty(n, dtype=torch.int64)
    if n:
        _integer_rows((n + 1) // 2, 8, below, counter.numpy(), ids.numpy())
    return ids


def log_uniform(
    counter: Tensor, order: Tensor | None, n: int, n_classes: int
) -> tuple[Tensor, Tensor]:
    """As the reference's."""
    rank = torch.empty(n, dtype=torch.int64)
    log_prob = torch.empty(n, dtype=torch.float32)
    if n:
        arrays = (each.numpy() for each in (counter, rank, log_prob))
        _rank_rows((n + 1) // 2, 64, math.log2(n_classes + 1), n_classes, *arrays)
    return (rank if order is None else order[rank]), log_prob


@njit(nogil=True, cache=True)
def _fill(start, stop, counter, made):
    seed, step = np.uint64(counter[0]), np.uint64(counter[1])
    for block in range(start, stop):
        a, b, c, d = philox(np.uint64(block), seed, step)
        made[block, 0], made[block, 1] = np.int64(a), np.int64(b)
        made[block, 2], made[block, 3] = np.int64(c), np.int64(d)


@njit(nogil=True, cache=True)
def _integers(start, stop, below, counter, ids):
    seed, step = np.uint64(counter[0]), np.uint64(counter[1])
    for block in range(start, stop):
        a, b, c, d = philox(np.uint64(block), seed, step)
        ids[2 * block] = _scaled(np.int64(a), np.int64(b), below)
        if 2 * block + 1 < len(ids):
            ids[2 * block + 1] = _scaled(np.int64(c), np.int64(d), below)


@njit(nogil=True, inline="always")
def _scaled(upper, lower, below):
    return (upper * below + (lower * below >> 32)) >> 32


@njit(nogil=True, cache=True)
def _ranks(start, stop, octaves, n_classes, counter, ids, log_prob):
    seed, step = np.uint64(counter[0]), np.uint64(counter[1])
    for block in range(start, stop):
        a, b, c, d = philox(np.uint64(block), seed, step)
        ids[2 * block] = _rank(np.int64(a), np.int64(b), octaves, n_classes)
        if 2 * block + 1 < len(ids):
            ids[2 * block + 1] = _rank(np.int64(c), np.int64(d), octaves, n_classes)
    log_total = math.log1p(n_classes)
    for place in range(2 * start, min(2 * stop, len(ids))):
        log_prob[place] = math.log(math.log1p(1.0 / (ids[place] + 1.0)) / log_total)


@njit(nogil=True, inline="always")
def _rank(upper, lower, octaves, n_classes):
    exponent = np.float64(upper << 21 | lower >> 11) * 2.0**-53 * octaves
    octave = math.floor(exponent)
    place = exponent - octave - 0.5
    power = SERIES[0]
    for k in range(1, len(SERIES)):
        power = power * place + SERIES[k]
    rank = np.int64(power * SQRT_2 * np.float64(np.int64(1) << np.int64(octave))) - 1
    return min(max(rank, 0), n_classes - 1)


_fill_rows, _integer_rows, _rank_rows = by_rows(_fill), by_rows(_integers), by_rows(_ranks)
