"""Random words, integers and log-uniform ids on CUDA."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import cdiv
from lastlayer.kernels.philox._exp2 import SERIES, SQRT_2
from lastlayer.kernels.philox._rounds_triton import philox

_SERIES = tl.constexpr(SERIES)
_SQRT_2 = tl.constexpr(SQRT_2)
_STEP = tl.constexpr(2.0**-53)


def words(counter: Tensor, n: int) -> Tensor:
    """As the reference's."""
    blocks = (n + 1) // 2
    made = torch.empty(blocks, 4, dtype=torch.int64, device=counter.device)
    if n:
        _words[(cdiv(blocks, 128),)](counter, made, blocks, BLOCKS=128, enable_fp_fusion=True)
    return made.view(-1, 2)[:n]


def integers(counter: Tensor, n: int, below: int) -> Tensor:
    """As the reference's."""
    ids = torch.empty(n, dtype=torch.int64, device=counter.device)
    if n:
        _integers[(cdiv(n, 256),)](counter, ids, n, below, BLOCKS=128, enable_fp_fusion=True)
    return ids


def log_uniform(
    counter: Tensor, order: Tensor | None, n: int, n_classes: int
) -> tuple[Tensor, Tensor]:
    """As the reference's."""
    ids = torch.empty(n, dtype=torch.int64, device=counter.device)
    log_prob = torch.empty(n, dtype=torch.float32, device=counter.device)
    if n:
        # Products and sums stay apart, or they would be rounded differently from a CPU's.
        _ranks[(cdiv(n, 256),)](
            counter, order, ids, log_prob, n, n_classes, OCTAVES=math.log2(n_classes + 1),
            ORDERED=order is not None, BLOCKS=128, enable_fp_fusion=False,
        )  # fmt: skip
    return ids, log_prob


@triton.jit
def _words(counter, made, n, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    live = block < n
    a, b, c, d = philox(block, tl.load(counter), tl.load(counter + 1))
    tl.store(made + 4 * block, a.to(tl.int64), mask=live)
    tl.store(made + 4 * block + 1, b.to(tl.int64), mask=live)
    tl.store(made + 4 * block + 2, c.to(tl.int64), mask=live)
    tl.store(made + 4 * block + 3, d.to(tl.int64), mask=live)


@triton.jit
def _integers(counter, ids, n, below, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    a, b, c, d = philox(block, tl.load(counter), tl.load(counter + 1))
    first = (a * below + ((b * below) >> 32)) >> 32
    second = (c * below + ((d * below) >> 32)) >> 32
    tl.store(ids + 2 * block, first.to(tl.int64), mask=2 * block < n)
    tl.store(ids + 2 * block + 1, second.to(tl.int64), mask=2 * block + 1 < n)


@triton.jit
def _ranks(
    counter, order, ids, log_prob, n, n_classes, OCTAVES: tl.constexpr, ORDERED: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    a, b, c, d = philox(block, tl.load(counter), tl.load(counter + 1))
    first, second = _rank(a, b, n_classes, OCTAVES), _rank(c, d, n_classes, OCTAVES)
    _store(order, ids, log_prob, 2 * block, n, first, OCTAVES, ORDERED)
    _store(order, ids, log_prob, 2 * block + 1, n, second, OCTAVES, ORDERED)


@triton.jit
def _store(order, ids, log_prob, place, n, rank, OCTAVES: tl.constexpr, ORDERED: tl.constexpr):
    LOG_2: tl.constexpr = 0.6931471805599453
    live = place < n
    part = 1.0 / (rank + 1).to(tl.float64)
    # log(1 + x): what is rounded off in 1 + x is made up for.
    above = 1.0 + part
    share = tl.log(above) * (part / (above - 1.0)) / (OCTAVES * LOG_2)
    tl.store(log_prob + place, tl.log(share).to(tl.float32), mask=live)
    chosen = rank
    if ORDERED:
        chosen = tl.load(order + rank, mask=live, other=0)
    tl.store(ids + place, chosen, mask=live)


@triton.jit
def _rank(upper, lower, n_classes, OCTAVES: tl.constexpr):
    exponent = ((upper << 21) | (lower >> 11)).to(tl.float64) * _STEP * OCTAVES
    # Not negative: cutting off is rounding down.
    octave = exponent.to(tl.int64)
    place = exponent - octave.to(tl.float64) - 0.5
    power = tl.full(place.shape, _SERIES[0], tl.float64)
    for k in tl.static_range(1, 14):
        power = power * place + _SERIES[k]
    scale = tl.full(place.shape, 1, tl.int64) << octave
    rank = (power * _SQRT_2 * scale.to(tl.float64)).to(tl.int64) - 1
    return tl.minimum(tl.maximum(rank, 0), n_classes - 1)
