"""Normalisers of rows and columns from a few rows of products.

A program of the first kernel owns a tile of rows and walks over a part of the columns. What it
leaves of rows and of columns is folded by a second, small one, in an order that does not change.
"""

import triton
import triton.language as tl

from lastlayer.kernels.info_nce._powers_triton import LARGEST, LN2, LOG2E, common_origin


@triton.jit(do_not_specialize=["own"])
def _statistics(
    scores, scale, query_groups, key_groups, row_parts, column_parts, own, n, m, splits, tiles,
    stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, COLUMNS: tl.constexpr,
    BOUNDED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    # Powers of 2 from here on: exp2 is what the hardware has.
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
        _bounded(
            scores, factor, query_groups, key_groups, row_out, column_out, row, mine, first, last,
            n, m, splits, tiles, stride, ROWS, WIDTH, COLUMNS, GROUPS,
        )  # fmt: skip
    else:
        # Narrower tiles, or this path would take the registers that the other one could do without.
        _of_any_size(
            scores, factor, query_groups, key_groups, row_out, column_out, row, mine, first, last,
            n, m, splits, tiles, stride, ROWS, WIDTH // 2, COLUMNS, GROUPS,
        )  # fmt: skip


@triton.jit
def _bounded(
    scores, factor, query_groups, key_groups, row_out, column_out, row, mine, first, last, n, m,
    splits, tiles, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Sums of powers with one origin for all."""
    origin = common_origin(factor)
    # What a thread reads at once it adds up by itself, and over tiles; threads meet at the end.
    totals = tl.zeros((ROWS, WIDTH // 8), dtype=tl.float32)
    pulled = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(first, last, WIDTH):
        column = start + tl.arange(0, WIDTH)
        values, hits = _tile(
            scores, factor, query_groups, key_groups, row, column, mine, n, m, stride, GROUPS
        )
        powers = tl.exp2(values - origin)
        totals += tl.sum(tl.reshape(powers, (ROWS, WIDTH // 8, 8)), 2)
        if COLUMNS:
            out = column_out + column
            tl.store(out, origin + tl.log2(tl.sum(powers, 0)), mask=column < m)
        if GROUPS == 2:
            pulled += tl.sum(hits, 1)
            if COLUMNS:
                tl.store(out + tiles * m, tl.sum(hits, 0), mask=column < m)
    tl.store(row_out, origin + tl.log2(tl.sum(totals, 1)), mask=row < n)
    if GROUPS == 2:
        tl.store(row_out + splits * n, pulled, mask=row < n)


@triton.jit
def _of_any_size(
    scores, factor, query_groups, key_groups, row_out, column_out, row, mine, first, last, n, m,
    splits, tiles, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Sums of powers whose origin is the largest of the row so far, and of the column."""
    peak = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    pulled = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(first, last, WIDTH):
        column = start + tl.arange(0, WIDTH)
        values, hits = _tile(
            scores, factor, query_groups, key_groups, row, column, mine, n, m, stride, GROUPS
        )
        grown = tl.maximum(peak, tl.max(values, 1))
        # Nothing but -inf so far: nothing to scale, and no difference of infinities.
        origin = tl.where(grown == -float("inf"), 0.0, grown)
        total = total * tl.exp2(peak - origin) + tl.sum(tl.exp2(values - origin[:, None]), 1)
        peak = grown
        if COLUMNS:
            top = tl.max(values, 0)
            origin = tl.where(top == -float("inf"), 0.0, top)
            summed = tl.sum(tl.exp2(values - origin[None, :]), 0)
            out = column_out + column
            tl.store(out, origin + tl.log2(summed), mask=column < m)
        if GROUPS == 2:
            pulled += tl.sum(hits, 1)
            if COLUMNS:
                tl.store(out + tiles * m, tl.sum(hits, 0), mask=column < m)
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    tl.store(row_out, origin + tl.log2(total), mask=row < n)
    if GROUPS == 2:
        tl.store(row_out + splits * n, pulled, mask=row < n)


@triton.jit
def _tile(
    scores, factor, query_groups, key_groups, row, column, mine, n, m, stride, GROUPS: tl.constexpr
):
    """Similarities, -inf for those that do not count; of groups that are positive their hits."""
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


@triton.jit
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
    """The natural logarithm of the sum of powers of 2."""
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
