"""Draws from an alias table on CUDA: one kernel from the counter to ids and log-probabilities."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import cdiv
from lastlayer.kernels.philox._rounds_triton import philox

_PAIRS = 64


def draw(table: Tensor, weight: Tensor, counter: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """As the reference's."""
    ids = torch.empty(n, dtype=torch.int64, device=table.device)
    log_prob = torch.empty(n, dtype=torch.float32, device=table.device)
    if n:
        _draw[(cdiv(n, 2 * _PAIRS),)](
            table, weight, counter, ids, log_prob, n, BITS=len(table).bit_length() - 1,
            PAIRS=_PAIRS, num_warps=2, enable_fp_fusion=True,
        )  # fmt: skip
    return ids, log_prob


def log_complement(weight: Tensor, target: Tensor, bits: int, wide: bool) -> Tensor:
    """As the reference's."""
    dtype = torch.float64 if wide else torch.float32
    made = torch.empty(target.shape, dtype=dtype, device=weight.device)
    if target.numel():
        _complement[(cdiv(target.numel(), 128),)](
            weight, target.contiguous(), made, target.numel(), BITS=bits, BLOCK=128,
            enable_fp_fusion=True,
        )  # fmt: skip
    return made


@triton.jit
def _complement(weight, target, log_prob, n, BITS: tl.constexpr, BLOCK: tl.constexpr):
    LOG_2: tl.constexpr = 0.6931471805599453
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(target + place, mask=place < n, other=-1)
    own = tl.load(weight + chosen, mask=chosen >= 0, other=0)
    # 2^63 itself is no int64.
    others = (((1 << BITS) - 1) - own).to(tl.float64) + 1.0
    share = tl.log(others) - BITS * LOG_2
    tl.store(log_prob + place, share.to(log_prob.dtype.element_ty), mask=place < n)


@triton.jit
def _draw(
    table, weight, counter, ids, log_prob, n, BITS: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    a, b, c, d = philox(block, tl.load(counter), tl.load(counter + 1))
    _store(table, weight, ids, log_prob, 2 * block, n, a.to(tl.int64), b.to(tl.int64), BITS)
    _store(table, weight, ids, log_prob, 2 * block + 1, n, c.to(tl.int64), d.to(tl.int64), BITS)


@triton.jit
def _store(table, weight, ids, log_prob, place, n, upper, lower, BITS: tl.constexpr):
    LOG_2: tl.constexpr = 0.6931471805599453
    live = place < n
    column = upper >> (32 - BITS)
    entry = tl.load(table + column, mask=live, other=0)
    chosen = tl.where(lower < (entry & 0xFFFFFFFF), column, entry >> 32)
    mass = tl.load(weight + chosen, mask=live, other=1)
    tl.store(ids + place, chosen, mask=live)
    share = tl.log(mass.to(tl.float64)) - (BITS + 32) * LOG_2
    tl.store(log_prob + place, share.to(tl.float32), mask=live)
