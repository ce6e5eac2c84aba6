"""Random words and log-uniform ids on the CPU."""

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


def log_uniform(counter: Tensor, n: int, n_classes: int) -> Tensor:
    """As the reference's."""
    ids = torch.empty(n, dtype=torch.int64)
    if n:
        _rank_rows(
            (n + 1) // 2, 32, math.log2(n_classes + 1), n_classes, counter.numpy(), ids.numpy()
        )
    return ids


@njit(nogil=True, cache=True)
def _fill(start, stop, counter, made):
    seed, step = np.uint64(counter[0]), np.uint64(counter[1])
    for block in range(start, stop):
        a, b, c, d = philox(np.uint64(block), seed, step)
        made[block, 0], made[block, 1] = np.int64(a), np.int64(b)
        made[block, 2], made[block, 3] = np.int64(c), np.int64(d)


@njit(nogil=True, cache=True)
def _ranks(start, stop, octaves, n_classes, counter, ids):
    seed, step = np.uint64(counter[0]), np.uint64(counter[1])
    for block in range(start, stop):
        a, b, c, d = philox(np.uint64(block), seed, step)
        ids[2 * block] = _rank(np.int64(a), np.int64(b), octaves, n_classes)
        if 2 * block + 1 < len(ids):
            ids[2 * block + 1] = _rank(np.int64(c), np.int64(d), octaves, n_classes)


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


_fill_rows, _rank_rows = by_rows(_fill), by_rows(_ranks)
