"""Random words, integers, log-uniform ids and draws from an alias table on CUDA.

Philox-4x32-10 uses 32-bit words in uint64, whose products are exact.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import (
    LOG_2,
    alias_draw,
    cdiv,
    log_of_other_weights,
    log_of_others,
    philox,
    rank_of_bits,
    share_of_rank,
)

_PAIRS = 64


def words(counter: Tensor, n: int) -> Tensor:
    blocks = (n + 1) // 2
    made = torch.empty(blocks, 4, dtype=torch.int64, device=counter.device)
    if n:
        _words[(cdiv(blocks, 128),)](counter, made, blocks, BLOCKS=128)
    return made.view(-1, 2)[:n]


def integers(counter: Tensor, n: int, below: int) -> Tensor:
    ids = torch.empty(n, dtype=torch.int64, device=counter.device)
    if n:
        _integers[(cdiv(n, 256),)](counter, ids, n, below, BLOCKS=128)
    return ids


def log_uniform(
    counter: Tensor, order: Tensor | None, n: int, n_classes: int
) -> tuple[Tensor, Tensor]:
    ids = torch.empty(n, dtype=torch.int64, device=counter.device)
    log_prob = torch.empty(n, dtype=torch.float32, device=counter.device)
    if n:
        # Without fused multiply-add, so that rounding is the same as on a CPU.
        _ranks[(cdiv(n, 256),)](
            counter, order, ids, log_prob, n, n_classes, OCTAVES=math.log2(n_classes + 1),
            ORDERED=order is not None, BLOCKS=128, enable_fp_fusion=False,
        )  # fmt: skip
    return ids, log_prob


def log_uniform_share(
    target: Tensor, rank: Tensor | None, n_classes: int, complement: bool, wide: bool
) -> Tensor:
    dtype = torch.float64 if wide else torch.float32
    made = torch.empty(target.shape, dtype=dtype, device=target.device)
    if target.numel():
        _shares[(cdiv(target.numel(), 128),)](
            target.contiguous(), rank, made, target.numel(), OCTAVES=math.log2(n_classes + 1),
            RANKED=rank is not None, COMPLEMENT=complement, BLOCK=128, enable_fp_fusion=False,
        )  # fmt: skip
    return made


@kernel
def _words(counter, made, n, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    live = block < n
    a, b, c, d = philox(block, tl.load(counter), tl.load(counter + 1))
    tl.store(made + 4 * block, a.to(tl.int64), mask=live)
    tl.store(made + 4 * block + 1, b.to(tl.int64), mask=live)
    tl.store(made + 4 * block + 2, c.to(tl.int64), mask=live)
    tl.store(made + 4 * block + 3, d.to(tl.int64), mask=live)


@kernel
def _integers(counter, ids, n, below, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    a, b, c, d = philox(block, tl.load(counter), tl.load(counter + 1))
    first = (a * below + ((b * below) >> 32)) >> 32
    second = (c * below + ((d * below) >> 32)) >> 32
    tl.store(ids + 2 * block, first.to(tl.int64), mask=2 * block < n)
    tl.store(ids + 2 * block + 1, second.to(tl.int64), mask=2 * block + 1 < n)


@kernel
def _ranks(
    counter, order, ids, log_prob, n, n_classes, OCTAVES: tl.constexpr, ORDERED: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    a, b, c, d = philox(block, tl.load(counter), tl.load(counter + 1))
    first, second = rank_of_bits(a, b, n_classes, OCTAVES), rank_of_bits(c, d, n_classes, OCTAVES)
    _store_rank(order, ids, log_prob, 2 * block, n, first, OCTAVES, ORDERED)
    _store_rank(order, ids, log_prob, 2 * block + 1, n, second, OCTAVES, ORDERED)


@kernel
def _shares(
    target, rank, log_prob, n, OCTAVES: tl.constexpr, RANKED: tl.constexpr,
    COMPLEMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(target + place, mask=place < n, other=-1).to(tl.int64)
    known = tl.maximum(chosen, 0)
    if RANKED:
        known = tl.load(rank + known, mask=place < n, other=0)
    share = share_of_rank(known, OCTAVES)
    if COMPLEMENT:
        made = log_of_others(share)
    else:
        made = tl.log(share)
    made = tl.where(chosen < 0, 0.0, made)
    tl.store(log_prob + place, made.to(log_prob.dtype.element_ty), mask=place < n)


@triton.jit
def _store_rank(order, ids, log_prob, place, n, rank, OCTAVES: tl.constexpr, ORDERED: tl.constexpr):
    live = place < n
    tl.store(log_prob + place, tl.log(share_of_rank(rank, OCTAVES)).to(tl.float32), mask=live)
    chosen = rank
    if ORDERED:
        chosen = tl.load(order + rank, mask=live, other=0)
    tl.store(ids + place, chosen, mask=live)


def draw(table: Tensor, weight: Tensor, counter: Tensor, n: int) -> tuple[Tensor, Tensor]:
    ids = torch.empty(n, dtype=torch.int64, device=table.device)
    log_prob = torch.empty(n, dtype=torch.float32, device=table.device)
    if n:
        _draw[(cdiv(n, 2 * _PAIRS),)](
            table, weight, counter, ids, log_prob, n, BITS=len(table).bit_length() - 1,
            PAIRS=_PAIRS, num_warps=2,
        )  # fmt: skip
    return ids, log_prob


def log_complement(weight: Tensor, target: Tensor, bits: int, wide: bool) -> Tensor:
    dtype = torch.float64 if wide else torch.float32
    made = torch.empty(target.shape, dtype=dtype, device=weight.device)
    if target.numel():
        _complement[(cdiv(target.numel(), 128),)](
            weight, target.contiguous(), made, target.numel(), BITS=bits, BLOCK=128,
        )  # fmt: skip
    return made


@kernel
def _complement(weight, target, log_prob, n, BITS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(target + place, mask=place < n, other=-1)
    own = tl.load(weight + chosen, mask=chosen >= 0, other=0)
    share = log_of_other_weights(own, BITS)
    tl.store(log_prob + place, share.to(log_prob.dtype.element_ty), mask=place < n)


@kernel
def _draw(
    table, weight, counter, ids, log_prob, n, BITS: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    a, b, c, d = philox(block, tl.load(counter), tl.load(counter + 1))
    _store_draw(table, weight, ids, log_prob, 2 * block, n, a.to(tl.int64), b.to(tl.int64), BITS)
    _store_draw(
        table, weight, ids, log_prob, 2 * block + 1, n, c.to(tl.int64), d.to(tl.int64), BITS
    )


@triton.jit
def _store_draw(table, weight, ids, log_prob, place, n, upper, lower, BITS: tl.constexpr):
    live = place < n
    chosen = alias_draw(table, upper, lower, live, BITS)
    mass = tl.load(weight + chosen, mask=live, other=1)
    tl.store(ids + place, chosen, mask=live)
    share = tl.log(mass.to(tl.float64)) - (BITS + 32) * LOG_2
    tl.store(log_prob + place, share.to(tl.float32), mask=live)
