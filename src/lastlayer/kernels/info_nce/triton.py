"""InfoNCE on CUDA: normalisers of a chunk of rows of products, and gradients in place.

If products are bounded and the scale is not too large, one power of 2 of each similarity is used
for both its row and its column. The device decides this, so that the host does not wait for the
scale. Each program of the statistics kernel processes a tile of rows and loops over a part of the
columns. A second, small kernel combines their results in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import LOG2E, cdiv, next_power_of_2

LN2 = tl.constexpr(0.6931471805599453)
# The largest S for which all powers of numbers in [-S, S] can have a common origin, see below.
LARGEST = tl.constexpr(103.0)
# The smallest power is at least 2^-DEPTH.
DEPTH = tl.constexpr(110.0)
# Rows and columns of a tile. A program of the statistics kernel loops over several tiles, and over
# fewer if there would otherwise be too few programs for all multiprocessors.
ROWS, WIDTH = 64, 128
TILES_IN_TURN, FEWER_IN_TURN, PROGRAMS = 16, 4, 1000
WEIGHT_ROWS, WEIGHT_WIDTH = 32, 256
NO_GROUPS, IGNORED, POSITIVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def statistics_(
    scores: Tensor, scale: Tensor, own: int, query_groups: Tensor | None, key_groups: Tensor | None,
    positive: bool, bounded: bool, row_lse: Tensor, row_positive: Tensor, column_lse: Tensor,
    column_positive: Tensor,
) -> None:  # fmt: skip
    n, m = scores.shape
    if not n or not m:
        row_lse.fill_(-torch.inf)
        row_positive.zero_()
        return
    columns = column_lse.shape[0] > 0
    tiles, share = cdiv(n, ROWS), WIDTH * TILES_IN_TURN
    if tiles * cdiv(m, share) < PROGRAMS:
        share = WIDTH * FEWER_IN_TURN
    splits = cdiv(m, share)
    row_parts = row_lse.new_empty(2, splits, n)
    column_parts = row_lse.new_empty(2 if column_positive.shape[0] else 1, tiles, m * columns)
    _statistics[(tiles, splits)](
        scores, scale, query_groups, key_groups, row_parts, column_parts, own, n, m, splits, tiles,
        scores.stride(0), ROWS=ROWS, WIDTH=WIDTH, SHARE=share, COLUMNS=columns, BOUNDED=bounded,
        GROUPS=_kind(query_groups, positive), num_warps=4,
    )  # fmt: skip
    block = 128
    row_blocks = cdiv(n, block)
    _fold[(row_blocks + (cdiv(m, block) if columns else 0),)](
        row_parts, row_lse, row_positive, column_parts, column_lse, column_positive, n, m, splits,
        tiles, row_blocks, BLOCK=block, GROUPED=column_positive.shape[0] > 0, num_warps=4,
    )  # fmt: skip


def weights_(
    scores: Tensor, scale: Tensor, own: int, query_groups: Tensor | None, key_groups: Tensor | None,
    positive: bool, bounded: bool, row_lse: Tensor, row_push: Tensor, row_pull: Tensor,
    column_lse: Tensor, column_push: Tensor, column_pull: Tensor, out: Tensor,
) -> None:  # fmt: skip
    n, m = scores.shape
    if not n or not m:
        return
    grid = (cdiv(n, WEIGHT_ROWS), cdiv(m, WEIGHT_WIDTH))
    _weights[grid](
        scores, scale, query_groups, key_groups, row_lse, row_push, row_pull, column_lse,
        column_push, column_pull, out, own, n, m, scores.stride(0), out.stride(0), ROWS=WEIGHT_ROWS,
        WIDTH=WEIGHT_WIDTH, COLUMNS=column_lse.shape[0] > 0, PULLED=column_pull.shape[0] > 0,
        BOUNDED=bounded and column_lse.shape[0] > 0, GROUPS=_kind(query_groups, positive),
        num_warps=4,
    )  # fmt: skip


def _kind(groups: Tensor | None, positive: bool) -> int:
    if groups is None:
        return NO_GROUPS.value
    return POSITIVE.value if positive else IGNORED.value


@kernel(do_not_specialize=["own"])
def _weights(
    scores, scale, query_groups, key_groups, row_lse, row_push, row_pull, column_lse, column_push,
    column_pull, out, own, n, m, stride, out_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, PULLED: tl.constexpr, BOUNDED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    first_row, first = tl.program_id(0) * ROWS, tl.program_id(1) * WIDTH
    row = first_row + tl.arange(0, ROWS)
    column = first + tl.arange(0, WIDTH)
    known, there = row < n, column < m
    live = known[:, None] & there[None, :]
    factor = tl.load(scale).to(tl.float32) * LOG2E
    long_row = row.to(tl.int64)[:, None]
    values = tl.load(scores + long_row * stride + column[None, :], mask=live, other=0.0)
    values = values.to(tl.float32) * factor
    lse = tl.load(row_lse + row, mask=known, other=0.0) * LOG2E
    push = tl.load(row_push + row, mask=known, other=0.0)
    if COLUMNS:
        other_lse = tl.load(column_lse + column, mask=there, other=0.0) * LOG2E
        other_push = tl.load(column_push + column, mask=there, other=0.0)
        one_power = False
        if BOUNDED:
            one_power = factor <= LARGEST
        if one_power:
            origin = _common_origin(factor)
            by_row = push * tl.exp2(origin - lse)
            by_column = other_push * tl.exp2(origin - other_lse)
            result = tl.exp2(values - origin) * (by_row[:, None] + by_column[None, :])
        else:
            result = tl.exp2(values - lse[:, None]) * push[:, None]
            result += tl.exp2(values - other_lse[None, :]) * other_push[None, :]
    else:
        result = tl.exp2(values - lse[:, None]) * push[:, None]
    crossing = (first < own + first_row + ROWS) & (first + WIDTH > own + first_row)
    if GROUPS != 0:
        mine = (row + own)[:, None] == column[None, :]
        query_group = tl.load(query_groups + row, mask=known, other=-3)
        key_group = tl.load(key_groups + column, mask=there, other=-4)
        same = query_group[:, None] == key_group[None, :]
        hit = mine
        if GROUPS == 2:
            hit = mine | same
        pull = tl.load(row_pull + row, mask=known, other=0.0)[:, None]
        if PULLED:
            pull = pull + tl.load(column_pull + column, mask=there, other=0.0)[None, :]
        result = tl.where(hit, result + pull, result)
        if GROUPS == 1:
            result = tl.where(same & (mine == 0), 0.0, result)
    elif crossing:
        mine = (row + own)[:, None] == column[None, :]
        pull = tl.load(row_pull + row, mask=known, other=0.0)[:, None]
        result = tl.where(mine, result + pull, result)
    place = out + long_row * out_stride + column[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=live)


@kernel(do_not_specialize=["own"])
def _statistics(
    scores, scale, query_groups, key_groups, row_parts, column_parts, own, n, m, splits, tiles,
    stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, COLUMNS: tl.constexpr,
    BOUNDED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    # From here on powers of 2, for which the hardware has an instruction.
    factor = tl.load(scale).to(tl.float32) * LOG2E
    first = split * SHARE
    last = tl.minimum(first + SHARE, m)
    column_out = column_parts + tile * m
    row_out = row_parts + split * n + row
    mine = own + row
    if GROUPS != 2:
        inside = (row < n) & (mine >= first) & (mine < last)
        score = tl.load(scores + row.to(tl.int64) * stride + mine, mask=inside, other=0.0)
        tl.store(row_out + splits * n, score.to(tl.float32) * factor, mask=row < n)
    one_power = False
    if BOUNDED:
        one_power = factor <= LARGEST
    if one_power:
        _sum_powers(
            scores, factor, query_groups, key_groups, row_out, column_out, row, mine, first, last,
            n, m, splits, tiles, stride, ROWS, WIDTH, COLUMNS, GROUPS, True,
        )  # fmt: skip
    else:
        # Narrower tiles, since this path would otherwise determine the registers of both paths.
        _sum_powers(
            scores, factor, query_groups, key_groups, row_out, column_out, row, mine, first, last,
            n, m, splits, tiles, stride, ROWS, WIDTH // 2, COLUMNS, GROUPS, False,
        )  # fmt: skip


@triton.jit
def _sum_powers(
    scores, factor, query_groups, key_groups, row_out, column_out, row, mine, first, last, n, m,
    splits, tiles, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr, ONE_ORIGIN: tl.constexpr,
):  # fmt: skip
    """Sums powers over rows and columns, with one common origin or the maximum of each so far."""
    if ONE_ORIGIN:
        origin = _common_origin(factor)
        # Each thread sums what it loads together, over all tiles; threads communicate at the end.
        totals = tl.zeros((ROWS, WIDTH // 8), dtype=tl.float32)
    else:
        peak = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
    pulled = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(first, last, WIDTH):
        column = start + tl.arange(0, WIDTH)
        out = column_out + column
        values, hits = _tile(
            scores, factor, query_groups, key_groups, row, column, mine, n, m, stride, GROUPS
        )
        if ONE_ORIGIN:
            powers = tl.exp2(values - origin)
            totals += tl.sum(tl.reshape(powers, (ROWS, WIDTH // 8, 8)), 2)
            if COLUMNS:
                tl.store(out, origin + tl.log2(tl.sum(powers, 0)), mask=column < m)
        else:
            grown = tl.maximum(peak, tl.max(values, 1))
            # While all scores are -inf the base is 0, so that no difference is NaN.
            base = tl.where(grown == -float("inf"), 0.0, grown)
            total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(values - base[:, None]), 1)
            peak = grown
            if COLUMNS:
                top = tl.max(values, 0)
                base = tl.where(top == -float("inf"), 0.0, top)
                summed = tl.sum(tl.exp2(values - base[None, :]), 0)
                tl.store(out, base + tl.log2(summed), mask=column < m)
        if GROUPS == 2:
            pulled += tl.sum(hits, 1)
            if COLUMNS:
                tl.store(out + tiles * m, tl.sum(hits, 0), mask=column < m)
    if ONE_ORIGIN:
        total = tl.sum(totals, 1)
    else:
        origin = tl.where(peak == -float("inf"), 0.0, peak)
    tl.store(row_out, origin + tl.log2(total), mask=row < n)
    if GROUPS == 2:
        tl.store(row_out + splits * n, pulled, mask=row < n)


@triton.jit
def _tile(
    scores, factor, query_groups, key_groups, row, column, mine, n, m, stride, GROUPS: tl.constexpr
):
    """Similarities, -inf for ignored keys; and for GROUPS 2 those of positives, 0 elsewhere."""
    live = (row < n)[:, None] & (column < m)[None, :]
    place = scores + row.to(tl.int64)[:, None] * stride + column[None, :]
    values = tl.load(place, mask=live, other=-float("inf")).to(tl.float32) * factor
    hits = values
    if GROUPS != 0:
        query_group = tl.load(query_groups + row, mask=row < n, other=-3)
        key_group = tl.load(key_groups + column, mask=column < m, other=-4)
        same = query_group[:, None] == key_group[None, :]
        own = mine[:, None] == column[None, :]
        if GROUPS == 2:
            hits = tl.where((own | same) & live, values, 0.0)
        else:
            values = tl.where(same & (own == 0), -float("inf"), values)
    return values, hits


@kernel
def _fold(
    row_parts, row_lse, row_positive, column_parts, column_lse, column_positive, n, m, splits,
    tiles, row_blocks, BLOCK: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < row_blocks:
        place = program * BLOCK + tl.arange(0, BLOCK)
        empty = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
        tl.store(row_lse + place, _folded(row_parts, empty, place, n, splits), mask=place < n)
        zero = tl.zeros((BLOCK,), dtype=tl.float32)
        total = _summed(row_parts + splits * n, zero, place, n, splits)
        tl.store(row_positive + place, total, mask=place < n)
    else:
        place = (program - row_blocks) * BLOCK + tl.arange(0, BLOCK)
        before = tl.load(column_lse + place, mask=place < m, other=0.0) * LOG2E
        tl.store(column_lse + place, _folded(column_parts, before, place, m, tiles), mask=place < m)
        if GROUPED:
            before = tl.load(column_positive + place, mask=place < m, other=0.0) * LOG2E
            total = _summed(column_parts + tiles * m, before, place, m, tiles)
            tl.store(column_positive + place, total, mask=place < m)


@triton.jit
def _folded(parts, before, place, n, count):
    """The natural logarithm of the sum of ``2**part``, including ``2**before``."""
    peak = before
    total = tl.where(before == -float("inf"), 0.0, 1.0)
    pointer = parts + place
    for _ in range(count):
        value = tl.load(pointer, mask=place < n, other=-float("inf"))
        grown = tl.maximum(peak, value)
        origin = tl.where(grown == -float("inf"), 0.0, grown)
        total = total * tl.exp2(peak - origin) + tl.exp2(value - origin)
        peak = grown
        pointer += n
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    return (origin + tl.log2(total)) * LN2


@triton.jit
def _summed(parts, before, place, n, count):
    pointer = parts + place
    for _ in range(count):
        before += tl.load(pointer, mask=place < n, other=0.0)
        pointer += n
    return before * LN2


@triton.jit
def _common_origin(largest):
    """The number that is subtracted from similarities in [-S, S] before they become powers.

    It is S, so that a perfect pair has a power of exactly 1. If the smallest power would be
    subnormal, the origin is lowered by an integer; sums of millions of powers still do not
    overflow.
    """
    return largest - tl.ceil(tl.maximum(2.0 * largest - DEPTH, 0.0))


def unit_rows_(rows: Tensor, out: Tensor, normalize: bool) -> None:
    n, depth = rows.shape
    if n and depth:
        width = max(16, next_power_of_2(depth))
        _unit_row[(n,)](
            rows, out, depth, rows.stride(0), rows.stride(1), WIDTH=width, NORMALIZE=normalize,
            num_warps=_warps(width),
        )  # fmt: skip


def row_gradients_(
    rows: Tensor, gradient: Tensor, factor: Tensor, normalize: bool, out: Tensor, along: Tensor
) -> None:
    """As the reference, but ``gradient``, ``out`` and ``along`` must be contiguous."""
    n, depth = rows.shape
    if n and depth:
        width = max(16, next_power_of_2(depth))
        _row_gradient[(n,)](
            rows, gradient, factor, out, along, depth, rows.stride(0), rows.stride(1), WIDTH=width,
            NORMALIZE=normalize, num_warps=_warps(width),
        )  # fmt: skip


def _warps(width: int) -> int:
    return min(16, max(1, width // 256))


@triton.jit
def _length(values, inside):
    """1 over the length of a row; 0 for a row of zeros. Squares do not overflow or underflow."""
    size = tl.max(tl.where(inside, tl.abs(values), 0.0), 0)
    safe = tl.where(size == 0.0, 1.0, size)
    scaled = values / safe
    length = tl.sqrt(tl.sum(scaled * scaled, 0))
    return tl.where(size == 0.0, 0.0, 1.0 / (safe * length))


@kernel
def _unit_row(
    rows, out, depth, row_stride, step_stride, WIDTH: tl.constexpr, NORMALIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, WIDTH)
    inside = step < depth
    place = rows + row * row_stride + step * step_stride
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if NORMALIZE:
        values *= _length(values, inside)
    tl.store(out + row * depth + step, values.to(out.dtype.element_ty), mask=inside)


@kernel
def _row_gradient(
    rows, gradient, factor, out, along, depth, row_stride, step_stride, WIDTH: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, WIDTH)
    inside = step < depth
    place = rows + row * row_stride + step * step_stride
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(gradient + row * depth + step, mask=inside, other=0.0).to(tl.float32)
    slope *= tl.load(factor).to(tl.float32)
    if NORMALIZE:
        inverse = _length(values, inside)
        values *= inverse
    together = tl.sum(values * slope, 0)
    tl.store(along + row, together)
    if NORMALIZE:
        slope = (slope - values * together) * inverse
    tl.store(out + row * depth + step, slope.to(out.dtype.element_ty), mask=inside)
