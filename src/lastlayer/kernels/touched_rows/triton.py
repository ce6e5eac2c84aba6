"""Sums of the entries of each class on CUDA, without atomics: results are deterministic.

The runs of frequent classes have a large part of all sorted entries. Blocks of slots cut runs into
segments, one per program; a second kernel sums the segments of each cut run. So no program has many
entries, and where a run is cut depends only on its position. In an optimiser step a program handles
one row of the gradient.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import cdiv, load_rows, sort_ids, tile_width

__all__ = ["adagrad_", "adam_", "forward", "group", "slots_", "sort_ids"]

# Slots per block, at whose edges runs are cut; entries per step of the first kernel; segments per
# step of the second.
SLOTS, SLOT_GROUP, PARTS, WIDEST_SLOT, SLOT_WARPS = 16, 2, 8, 512, 2
WIDEST_STEP = 1024


def forward(
    columns: Tensor, column_biases: Tensor, slopes: Tensor, hidden: Tensor, order: Tensor,
    starts: Tensor, factor: Tensor, to_weight: bool, to_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    groups, depth = starts.shape[0] - 1, hidden.shape[1]
    weight = slopes.new_zeros((groups, depth) if to_weight else 0)
    bias = slopes.new_zeros(groups if to_bias else 0)
    # The group of each entry: sums are scattered to the rows of their groups.
    keys = torch.repeat_interleave(starts.diff(), output_size=order.shape[0])
    c = order.shape[0] - slopes.numel()
    levels = column_biases if to_bias else slopes.new_empty(c)
    numbers = torch.cat([levels, slopes.flatten()])
    slots_(numbers, hidden, columns, c, order, keys, factor, weight, bias, None, True)
    return weight, bias


def slots_(
    numbers: Tensor, hidden: Tensor, columns: Tensor, c: int, order: Tensor, keys: Tensor,
    factor: Tensor, weight: Tensor, bias: Tensor, known: Tensor | None, scattered: bool,
) -> None:  # fmt: skip
    size, depth = keys.shape[0], hidden.shape[1]
    to_weight, to_bias = weight.dim() == 2, bias.numel() > 0
    if not size or not (to_weight or to_bias):
        return
    width = tile_width(depth, WIDEST_SLOT)
    tiles = cdiv(depth, width) if to_weight else 1
    blocks = cdiv(size, SLOTS)
    # Only the first and the last segment of a block may be parts of longer runs.
    levels_at = 2 * blocks * depth if to_weight else 0
    room = levels_at + 2 * blocks
    partial = torch.empty(room, device=keys.device, dtype=torch.float32)
    options = dict(
        BLOCK=SLOTS, WIDTH=width, WEIGHT=to_weight, BIAS=to_bias, SCATTERED=scattered,
        num_warps=SLOT_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    _segments[(size, tiles)](
        numbers, hidden, columns, order, keys, factor, weight, bias, known, partial, size,
        levels_at, c, max(1, (size - c) // max(1, hidden.shape[0])), depth, hidden.stride(0),
        hidden.stride(1), columns.stride(0), GROUP=SLOT_GROUP, **options,
    )  # fmt: skip
    if blocks > 1:
        _runs_that_were_cut[(blocks - 1, tiles)](
            keys, factor, weight, bias, partial, size, levels_at, depth,
            SEARCH=size.bit_length(), PARTS=PARTS, **options,
        )  # fmt: skip


@kernel
def _segments(
    numbers, hidden, columns, order, keys, factor, weight, bias, known, partial, size, levels_at, c,
    q, depth, hidden_row, hidden_step, column_row, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, SCATTERED: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    step = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = step < depth
    key = tl.load(keys + slot)
    if known is not None:
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
            slope = tl.load(numbers + entry, mask=live if BIAS else scaled, other=0.0)
            if BIAS:
                levels += slope
            if WEIGHT:
                vectors = load_rows(columns, entry, column_row, step, 1, drawn, inside)
                row = ((entry - c) // q)[:, None] * hidden_row
                # A row that does not count has slope 0 and may contain NaN.
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
                    tl.store(partial + levels_at + part, level)
    if not SCATTERED:
        if not first:
            if WEIGHT:
                nothing = tl.zeros((WIDTH,), dtype=weight.dtype.element_ty)
                tl.store(weight + slot.to(tl.int64) * depth + step, nothing, mask=inside)
            if BIAS:
                if tl.program_id(1) == 0:
                    tl.store(bias + slot, 0.0)


@kernel
def _runs_that_were_cut(
    keys, factor, weight, bias, partial, size, levels_at, depth, BLOCK: tl.constexpr,
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
            # The run starts in this block; find its end by bisection.
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
                    totals += load_rows(partial, part, depth, step, 1, live, inside)
                if BIAS:
                    place = partial + levels_at + part
                    levels += tl.load(place, mask=live, other=0.0)
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


def adagrad_(
    weight: Tensor, total: Tensor, ids: Tensor, gradient: Tensor, lr: float, weight_decay: float,
    eps: float,
) -> None:  # fmt: skip
    k, depth = gradient.shape
    if gradient.numel():
        _adagrad[(k,)](
            weight, total, ids, gradient, depth, weight.stride(0), gradient.stride(0),
            gradient.stride(1), lr, 1.0 - lr * weight_decay, eps,
            WIDTH=tile_width(depth, WIDEST_STEP), enable_fp_fusion=True,
        )  # fmt: skip


def adam_(
    weight: Tensor, first: Tensor, second: Tensor, row_step: Tensor, step: Tensor, ids: Tensor,
    gradient: Tensor, lr: float, weight_decay: float, beta1: float, beta2: float, eps: float,
    decays: bool,
) -> None:  # fmt: skip
    k, depth = gradient.shape
    if gradient.numel():
        _adam[(k,)](
            weight, first, second, row_step, step, ids, gradient, depth, weight.stride(0),
            gradient.stride(0), gradient.stride(1), lr, 1.0 - lr * weight_decay, beta1, beta2,
            1.0 - beta1, 1.0 - beta2, _log(beta1), _log(beta2), eps, DECAYS=decays,
            WIDTH=tile_width(depth, WIDEST_STEP), enable_fp_fusion=True,
        )  # fmt: skip


def _log(beta: float) -> float:
    # For beta = 0: the exp of any multiple of this underflows to 0.
    return math.log(beta) if beta > 0.0 else -1e4


@triton.jit
def _comes_again(ids, place, row):
    """Whether the previous slot has the same row, and updates it."""
    return tl.load(ids + place - 1, mask=place > 0, other=-1) == row


@kernel
def _adagrad(
    weight, total, ids, gradient, depth, weight_row, gradient_row, gradient_step, lr, kept, eps,
    WIDTH: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + place).to(tl.int64)
    if not _comes_again(ids, place, row):
        squares = tl.zeros((WIDTH,), dtype=tl.float32)
        for start in range(0, depth, WIDTH):
            step = start + tl.arange(0, WIDTH)
            at = gradient + place * gradient_row + step * gradient_step
            value = tl.load(at, mask=step < depth, other=0.0).to(tl.float32)
            squares += value * value
        sums = tl.load(total + row) + tl.sum(squares, 0) / depth
        # All warps of the program must have read the old sum before one writes the new one.
        tl.debug_barrier()
        tl.store(total + row, sums)
        factor = lr / (tl.sqrt(sums) + eps)
        for start in range(0, depth, WIDTH):
            step = start + tl.arange(0, WIDTH)
            inside = step < depth
            at = gradient + place * gradient_row + step * gradient_step
            value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            there = weight + row * weight_row + step
            old = tl.load(there, mask=inside, other=0.0).to(tl.float32)
            tl.store(there, (kept * old - factor * value).to(weight.dtype.element_ty), mask=inside)


@kernel
def _adam(
    weight, first, second, row_step, step, ids, gradient, depth, weight_row, gradient_row,
    gradient_step, lr, kept, beta1, beta2, new1, new2, log1, log2, eps, DECAYS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + place).to(tl.int64)
    if not _comes_again(ids, place, row):
        before = tl.load(row_step + row)
        kept1, kept2 = beta1, beta2
        if DECAYS:
            now = tl.load(step).to(tl.int32)
            missed = (now - before).to(tl.float32)
            kept1, kept2 = tl.exp(missed * log1), tl.exp(missed * log2)
        else:
            now = before + 1
        # All warps of the program must have read the counter before one writes it.
        tl.debug_barrier()
        tl.store(row_step + row, now)
        factor = lr / _one_minus_exp(now.to(tl.float32) * log1)
        root_scale = 1.0 / tl.sqrt(_one_minus_exp(now.to(tl.float32) * log2))
        for start in range(0, depth, WIDTH):
            column = start + tl.arange(0, WIDTH)
            inside = column < depth
            at = gradient + place * gradient_row + column * gradient_step
            value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            state = row * depth + column
            mean = kept1 * tl.load(first + state, mask=inside, other=0.0) + new1 * value
            square = kept2 * tl.load(second + state, mask=inside, other=0.0) + new2 * value * value
            tl.store(first + state, mean, mask=inside)
            tl.store(second + state, square, mask=inside)
            way = factor * mean / (tl.sqrt(square) * root_scale + eps)
            there = weight + row * weight_row + column
            old = tl.load(there, mask=inside, other=0.0).to(tl.float32)
            tl.store(there, (kept * old - way).to(weight.dtype.element_ty), mask=inside)


@triton.jit
def _one_minus_exp(x):
    """1 − e^x for x < 0; by its series near 0, where the difference would cancel."""
    series = 1.0 + x / 6.0 * (1.0 + x / 7.0 * (1.0 + x / 8.0 * (1.0 + x / 9.0)))
    series = 1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0 * series)))
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


def group(entries: Tensor, n_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Same as the reference; needs a host sync, which ``slots_`` avoids."""
    ranked, order = sort_ids(torch.where(entries < 0, n_classes, entries))
    known, counts = torch.unique_consecutive(ranked[ranked < n_classes], return_counts=True)
    return order, torch.nn.functional.pad(counts.cumsum(0), (1, 0)), known
