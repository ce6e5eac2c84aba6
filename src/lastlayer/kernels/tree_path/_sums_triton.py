"""Kernels of the backward pass: runs of rows, and their sums in a fixed order."""

import triton
import triton.language as tl

from lastlayer.kernels.tree_path._losses_triton import path_of


@triton.jit
def compare_paths(
    target, order, path_start, path_edge, starts, lengths, shared, new, n, n_classes, longest,
    ignored, IGNORES: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
    PLACED: tl.constexpr,
):  # fmt: skip
    """How many nodes each row shares with the one before it, and which come up first in it."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = at < n
    row = tl.load(order + at, mask=live, other=0)
    first, stop, _ = path_of(target, path_start, row, live, n_classes, ignored, IGNORES)
    behind = live & (at > 0)
    row = tl.load(order + at - 1, mask=behind, other=0)
    first_before, stop_before, _ = path_of(
        target, path_start, row, behind, n_classes, ignored, IGNORES
    )
    length = (stop - first).to(tl.int32)
    length_before = (stop_before - first_before).to(tl.int32)
    common = tl.zeros((ROWS,), dtype=tl.int32)
    for level in range(0, tl.max(length, 0), LEVELS):
        step = level + tl.arange(0, LEVELS)
        both = step[None, :] < tl.minimum(length, length_before)[:, None]
        mine = tl.load(path_edge + first[:, None] + step[None, :], mask=both, other=0)
        theirs = tl.load(path_edge + first_before[:, None] + step[None, :], mask=both, other=0)
        # A node is on one level, and has one path above it: nothing is equal below a difference.
        common += tl.sum((both & ((mine >> 1) == (theirs >> 1))).to(tl.int32), 1)
    tl.store(starts + at, first, mask=live)
    tl.store(lengths + at, length, mask=live)
    tl.store(shared + at, common, mask=live)
    if PLACED:
        for level in range(0, longest, LEVELS):
            step = level + tl.arange(0, LEVELS)
            fresh = (step[:, None] >= common[None, :]) & (step[:, None] < length[None, :])
            tl.store(
                new + step[:, None].to(tl.int64) * n + at[None, :],
                fresh.to(tl.int32),
                mask=(step < longest)[:, None] & live[None, :],
            )


@triton.jit
def sum_tiles(
    slopes, factor, hidden, order, lengths, starts, shared, place, path_edge, touched, weight,
    bias, pieces, bias_pieces, through, n, depth, longest, hidden_row, factor_step,
    TILE: tl.constexpr, LEVELS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    PLACED: tl.constexpr, TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr,
):  # fmt: skip
    """The runs that start at one row, and those cut there, each up to the end of the tile.

    A program has some levels of one row: their runs start together, and share what is read.
    """
    at = tl.program_id(0)
    tile = at // TILE
    own = tl.load(shared + at)
    # At a cut, runs that came in are taken as well.
    low = tl.where(at % TILE == 0, 0, own)
    length = tl.load(lengths + at)
    first_level = tl.program_id(1) * LEVELS
    if (first_level < length) & (first_level + LEVELS > low):
        level = first_level + tl.arange(0, LEVELS)
        taken = (level >= low) & (level < length)
        last = tl.minimum(tile * TILE + TILE, n)
        later = at + 1 + tl.arange(0, TILE)
        common = tl.load(shared + later, mask=later < last, other=longest)
        ends = (later < last)[None, :] & (common[None, :] <= level[:, None])
        end = tl.min(tl.where(ends, later[None, :], last), 1)
        step = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
        inside = step < depth
        summed = tl.zeros((LEVELS, WIDTH), dtype=tl.float32)
        counted = tl.zeros((LEVELS,), dtype=tl.float32)
        stop = tl.max(tl.where(taken, end, 0), 0)
        for first in range(at, stop, GROUP):
            for one in tl.static_range(GROUP):
                live = first + one < stop
                row = tl.load(order + first + one, mask=live, other=0)
                mine = taken & (first + one < end)
                slope = tl.load(slopes + row * longest + level, mask=mine, other=0.0)
                slope *= tl.load(factor + row * factor_step).to(tl.float32)
                # A NaN of a row that is not in the run does not reach it.
                counted += tl.where(mine, slope, 0.0)
                if TO_WEIGHT:
                    read = step < tl.where(live, depth, 0)
                    state = tl.load(hidden + row * hidden_row + step, mask=read, other=0.0)
                    product = slope[:, None] * state.to(tl.float32)[None, :]
                    summed += tl.where(mine[:, None], product, 0.0)
        goes_on = (end == last) & (tl.load(shared + last, mask=last < n, other=0) > level)
        came_in = level < own
        whole = taken & ~goes_on & ~came_in
        _write(
            summed, counted, at, level, whole, step, inside, starts, place, path_edge, touched,
            weight, bias, n, depth, PLACED, TO_WEIGHT, TO_BIAS,
        )  # fmt: skip
        part = taken & (goes_on | came_in)
        piece = (tl.where(came_in, tl.cdiv(n, TILE), 0) + tile).to(tl.int64) * longest + level
        if TO_WEIGHT:
            tl.store(
                pieces + piece[:, None] * depth + step[None, :],
                summed,
                mask=part[:, None] & inside[None, :],
            )
        if TO_BIAS:
            tl.store(bias_pieces + piece, counted, mask=part)
        tl.store(through + tile * longest + level, goes_on.to(tl.int32), mask=taken & came_in)


@triton.jit
def sum_pieces(
    starts, shared, place, path_edge, touched, weight, bias, pieces, bias_pieces, through, n,
    tiles, depth, longest, TILE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    PLACED: tl.constexpr, TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr,
):  # fmt: skip
    """A run that starts in the tile before this one and goes on: its pieces, left to right."""
    tile = tl.program_id(0) + 1
    at = tile * TILE
    this = tl.program_id(1)
    if tl.load(shared + at) > this:
        before = tl.load(shared + at - TILE + tl.arange(0, TILE))
        if tl.min(before, 0) <= this:
            # One level, as a block of one.
            level = this + tl.arange(0, 1)
            step = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
            inside = step < depth
            head = (tile - 1).to(tl.int64) * longest + level
            vector = tl.zeros((1, WIDTH), dtype=tl.float32)
            if TO_WEIGHT:
                vector += tl.load(
                    pieces + head[:, None] * depth + step[None, :], mask=inside[None, :], other=0.0
                )
            number = tl.zeros((1,), dtype=tl.float32)
            if TO_BIAS:
                number += tl.load(bias_pieces + head)
            going = 1
            for first in range(tile, tiles, GROUP):
                if going == 1:
                    some = first + tl.arange(0, GROUP)
                    on = tl.load(through + some * longest + this, mask=some < tiles, other=0)
                    # The first that does not go on is the last piece.
                    last = tl.min(tl.where(on == 0, some, tiles), 0)
                    live = (some <= last) & (some < tiles)
                    piece = (tiles + some).to(tl.int64) * longest + this
                    if TO_WEIGHT:
                        more = tl.load(
                            pieces + piece[:, None] * depth + step[None, :],
                            mask=live[:, None] & inside[None, :],
                            other=0.0,
                        )
                        vector += tl.sum(more, 0)[None, :]
                    if TO_BIAS:
                        number += tl.sum(tl.load(bias_pieces + piece, mask=live, other=0.0), 0)
                    going = (last == tiles).to(tl.int32)
            _write(
                vector, number, at, level, level >= 0, step, inside, starts, place, path_edge,
                touched, weight, bias, n, depth, PLACED, TO_WEIGHT, TO_BIAS,
            )  # fmt: skip


@triton.jit
def _write(
    vectors, numbers, at, level, whole, step, inside, starts, place, path_edge, touched, weight,
    bias, n, depth, PLACED: tl.constexpr, TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr,
):  # fmt: skip
    """The sums of runs that have row ``at`` on some levels, to where they belong."""
    edge = tl.load(path_edge + tl.load(starts + at) + level, mask=whole, other=0)
    to = (edge >> 1).to(tl.int64)
    if PLACED:
        node = to
        # No other node of the level comes up first between the start of the run and this row.
        to = tl.load(place + level.to(tl.int64) * n + at, mask=whole, other=1).to(tl.int64) - 1
        tl.store(touched + to, node, mask=whole)
    if TO_WEIGHT:
        tl.store(
            weight + to[:, None] * depth + step[None, :],
            vectors.to(weight.dtype.element_ty),
            mask=whole[:, None] & inside[None, :],
        )
    if TO_BIAS:
        tl.store(bias + to, numbers.to(bias.dtype.element_ty), mask=whole)
