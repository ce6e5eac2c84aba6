"""Sums of runs of sorted entries on CUDA, in their first slots: long runs are cut at fixed places.

A run of a frequent class has a good part of all entries. Blocks of slots cut it into segments, each
of which is one program's; a second kernel adds up the segments of the runs that were cut. So no
program walks far, and where a run is cut depends on nothing but where it lies.
"""

import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import cdiv, next_power_of_2

# Slots of a block, at which runs are cut.
BLOCK = 16
# Entries that a program reads together, and segments.
GROUP = 2
PARTS = 8
WIDEST = 512
WARPS = 2


def slots_(
    slopes: Tensor,
    hidden: Tensor,
    columns: Tensor,
    column_biases: Tensor,
    order: Tensor,
    keys: Tensor,
    factor: Tensor,
    weight: Tensor,
    bias: Tensor,
    known: Tensor | None,
    scattered: bool,
) -> None:
    """As the reference's."""
    size, depth = keys.shape[0], hidden.shape[1]
    to_weight, to_bias = weight.dim() == 2, bias.numel() > 0
    if not size or not (to_weight or to_bias):
        return
    width = min(WIDEST, max(16, next_power_of_2(depth)))
    tiles = cdiv(depth, width) if to_weight else 1
    blocks = cdiv(size, BLOCK)
    # Two segments of a block may be parts of longer runs: its first one and its last one.
    partial = slopes.new_empty(2 * blocks, depth if to_weight else 0)
    partial_bias = slopes.new_empty(2 * blocks)
    options = dict(
        BLOCK=BLOCK, WIDTH=width, WEIGHT=to_weight, BIAS=to_bias, SCATTERED=scattered,
        num_warps=WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    _segments[(size, tiles)](
        slopes.contiguous(), hidden, columns.contiguous(), column_biases, order, keys, factor,
        weight, bias, known, partial, partial_bias, size, size - slopes.numel(),
        max(1, slopes.shape[1]), depth, hidden.stride(0), hidden.stride(1), GROUP=GROUP,
        KNOWN=known is not None, **options,
    )  # fmt: skip
    if blocks > 1:
        _runs_that_were_cut[(blocks - 1, tiles)](
            keys, factor, weight, bias, partial, partial_bias, size, depth,
            SEARCH=size.bit_length(), PARTS=PARTS, **options,
        )  # fmt: skip


@triton.jit
def _segments(
    slopes, hidden, columns, column_biases, order, keys, factor, weight, bias, known, partial,
    partial_bias, size, c, q, depth, hidden_row, hidden_step, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    KNOWN: tl.constexpr, SCATTERED: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    step = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = step < depth
    key = tl.load(keys + slot)
    if KNOWN:
        if tl.program_id(1) == 0:
            tl.store(known + slot, key.to(tl.int64))
    first = tl.load(keys + slot - 1, mask=slot > 0, other=-1) != key
    edge = slot % BLOCK == 0
    if first | edge:
        block = slot // BLOCK
        near = slot + tl.arange(0, BLOCK)
        bound = tl.minimum((block + 1) * BLOCK, size)
        same = tl.load(keys + near, mask=near < bound, other=-1) == key
        stop = slot + tl.sum(same.to(tl.int32), 0)
        totals = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
        levels = tl.zeros((GROUP,), dtype=tl.float32)
        for start in range(slot, stop, GROUP):
            place = start + tl.arange(0, GROUP)
            live = place < stop
            entry = tl.load(order + place, mask=live, other=0).to(tl.int64)
            drawn = live & (entry < c)
            scaled = live & (entry >= c)
            slope = tl.load(slopes + (entry - c), mask=scaled, other=0.0)
            if BIAS:
                levels += slope + tl.load(column_biases + entry, mask=drawn, other=0.0)
            if WEIGHT:
                vectors = tl.load(
                    columns + entry[:, None] * depth + step[None, :],
                    mask=drawn[:, None] & inside[None, :],
                    other=0.0,
                )
                row = ((entry - c) // q)[:, None] * hidden_row
                # A row that does not count may hold anything.
                counts = scaled & (slope != 0.0)
                states = tl.load(
                    hidden + row + step[None, :] * hidden_step,
                    mask=counts[:, None] & inside[None, :],
                    other=0.0,
                )
                totals += vectors.to(tl.float32) + states.to(tl.float32) * slope[:, None]
        whole = first & (tl.load(keys + stop, mask=stop < size, other=-1) != key)
        part = 2 * block + tl.where(edge, 0, 1)
        if WEIGHT:
            total = tl.sum(totals, 0)
            if whole:
                _store(weight, key, slot, depth, step, total, factor, SCATTERED)
            else:
                tl.store(partial + part.to(tl.int64) * depth + step, total, mask=inside)
        if BIAS:
            if tl.program_id(1) == 0:
                level = tl.sum(levels, 0)
                if whole:
                    _store_one(bias, key, slot, level, factor, SCATTERED)
                else:
                    tl.store(partial_bias + part, level)
    if not SCATTERED:
        if not first:
            if WEIGHT:
                nothing = tl.zeros((WIDTH,), dtype=weight.dtype.element_ty)
                tl.store(weight + slot.to(tl.int64) * depth + step, nothing, mask=inside)
            if BIAS:
                if tl.program_id(1) == 0:
                    tl.store(bias + slot, 0.0)


@triton.jit
def _runs_that_were_cut(
    keys, factor, weight, bias, partial, partial_bias, size, depth, BLOCK: tl.constexpr,
    SEARCH: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, SCATTERED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    step = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = step < depth
    after = (block + 1) * BLOCK
    key = tl.load(keys + after - 1)
    if tl.load(keys + after) == key:
        same = tl.load(keys + block * BLOCK + tl.arange(0, BLOCK)) == key
        slot = after - tl.sum(same.to(tl.int32), 0)
        if tl.load(keys + slot - 1, mask=slot > 0, other=-1) != key:
            # The run starts in this block. Where does it end?
            low = after
            high = size
            for _ in range(SEARCH):
                middle = (low + high) // 2
                narrowing = low < high
                below = tl.load(keys + middle, mask=narrowing, other=0) <= key
                low = tl.where(narrowing & below, middle + 1, low)
                high = tl.where(narrowing & (below == 0), middle, high)
            stop = (low + BLOCK - 1) // BLOCK
            own = 2 * block + tl.where(slot % BLOCK == 0, 0, 1)
            totals = tl.zeros((PARTS, WIDTH), dtype=tl.float32)
            levels = tl.zeros((PARTS,), dtype=tl.float32)
            for start in range(block, stop, PARTS):
                other = start + tl.arange(0, PARTS)
                part = tl.where(other == block, own, 2 * other).to(tl.int64)
                live = other < stop
                if WEIGHT:
                    totals += tl.load(
                        partial + part[:, None] * depth + step[None, :],
                        mask=live[:, None] & inside[None, :],
                        other=0.0,
                    )
                if BIAS:
                    levels += tl.load(partial_bias + part, mask=live, other=0.0)
            if WEIGHT:
                _store(weight, key, slot, depth, step, tl.sum(totals, 0), factor, SCATTERED)
            if BIAS:
                if tl.program_id(1) == 0:
                    _store_one(bias, key, slot, tl.sum(levels, 0), factor, SCATTERED)


@triton.jit
def _store(weight, key, slot, depth, step, total, factor, SCATTERED: tl.constexpr):
    row = (key if SCATTERED else slot).to(tl.int64)
    total *= tl.load(factor).to(tl.float32)
    tl.store(weight + row * depth + step, total.to(weight.dtype.element_ty), mask=step < depth)


@triton.jit
def _store_one(bias, key, slot, level, factor, SCATTERED: tl.constexpr):
    place = key if SCATTERED else slot
    level *= tl.load(factor).to(tl.float32)
    tl.store(bias + place, level.to(bias.dtype.element_ty))
