"""The loss along paths of a binary tree on CUDA, without atomics: results are deterministic.

* ``_losses_of_rows``: a program handles one row, with its hidden state in registers, and gathers
  the vectors of a few nodes per step. The same pass computes the gradient of hidden.
* Rows are sorted by the position of their class in the tree, so that the rows of a node are one
  run: a few rows by ``_place_rows``, which counts the rows before each, others by torch. Runs are
  cut every ``tile`` rows: ``_sum_tiles`` sums the pieces, and writes those that are complete runs;
  ``_sum_pieces`` sums the pieces of the others, from left to right.

README.md has the derivation.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import (
    MOST_COMPARED,
    cdiv,
    in_rows,
    load_rows,
    log1p,
    next_power_of_2,
    tile_width,
)

# Rows between two cuts; more if the pieces of long runs would take too much memory.
TILE, WIDEST_TILE, PIECE_NUMBERS = 64, 1024, 1 << 25
# Levels of a row per program, and rows per step of it; pieces per step of the second kernel; and
# the largest width of a tile of vectors.
LEVELS, ROWS, PIECES, WIDEST = 4, 4, 16, 512


def loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rank: Tensor,
    path_start: Tensor, path_edge: Tensor, ignore_index: int | None, longest: int, to_nodes: bool,
    to_hidden: bool, mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (n, depth), n_classes = hidden.shape, rank.shape[0]
    hidden, weight, target = in_rows(hidden), in_rows(weight), target.contiguous()
    wide: dict[str, Any] = {"device": hidden.device, "dtype": torch.float32}
    losses = torch.empty(n, **wide)
    slopes = torch.empty((n if to_nodes else 0, longest), **wide)
    gradient = torch.empty((n if to_hidden else 0, depth), **wide)
    ignored, ignores = ignore_index or 0, ignore_index is not None
    if not n:
        return losses, target.new_empty(0), slopes, gradient
    # The number of rows that count is known in advance if no target is ignored.
    counts = mean and ignores
    order = share = None
    if counts:
        share = torch.empty((), **wide)
    if to_nodes and n <= MOST_COMPARED:
        order = torch.empty(n, device=hidden.device, dtype=torch.int64)
        _place_rows[(cdiv(n, 32),)](
            target, rank, order, share, n, n_classes, ignored, IGNORES=ignores, ROWS=32,
            OTHERS=256, num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip
    elif to_nodes or counts:
        keys = torch.empty(n, device=hidden.device, dtype=torch.int32)
        _sort_keys[(cdiv(n, 1024) + 1,)](
            target, rank, keys, share, n, n_classes, ignored, IGNORES=ignores, ROWS=1024,
            enable_fp_fusion=True,
        )  # fmt: skip
        order = keys.sort(stable=True).indices if to_nodes else None
    width = max(16, next_power_of_2(depth))
    # One or two warps: a row is little work, and many rows in parallel hide the latency of gathers.
    nodes = max(1, min(16, 1024 // width, next_power_of_2(longest)))
    _losses_of_rows[(n,)](
        hidden, weight, bias, target, order, path_start, path_edge, losses, slopes, gradient, share,
        1.0 / n if mean else 1.0, depth, longest, n_classes, hidden.stride(0), weight.stride(0),
        ignored, IGNORES=ignores, NODES=nodes, WIDTH=width, BIASED=bias is not None,
        ORDERED=order is not None, TO_NODES=to_nodes, TO_HIDDEN=to_hidden,
        num_warps=max(1, nodes * width // 1024), enable_fp_fusion=True,
    )  # fmt: skip
    return losses, target.new_empty(0) if order is None else order, slopes, gradient


def to_nodes(
    slopes: Tensor, factor: Tensor, hidden: Tensor, target: Tensor, order: Tensor,
    path_start: Tensor, path_edge: Tensor, ignore_index: int | None, n_nodes: int,
    dtype: torch.dtype, to_weight: bool, to_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Same as the reference, without a host sync."""
    weight = torch.empty(
        n_nodes if to_weight else 0, hidden.shape[1], dtype=dtype, device=slopes.device
    )
    bias = torch.empty(n_nodes if to_bias else 0, dtype=dtype, device=slopes.device)
    paths = target, order, path_start, path_edge, None, ignore_index
    _add_up(slopes, factor, hidden, *paths, n_nodes, weight, bias, None, None, None)
    return weight, bias


def to_touched_nodes(
    slopes: Tensor, factor: Tensor, hidden: Tensor, target: Tensor, order: Tensor,
    path_start: Tensor, path_edge: Tensor, level_start: Tensor, ignore_index: int | None,
    dtype: torch.dtype, to_weight: bool, to_bias: bool, most: int,
    gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Same as the reference, without a host sync; it needs ``most``."""
    depth, device = hidden.shape[1], slopes.device
    touched = torch.empty((1, most), dtype=torch.int64, device=device)
    weight = torch.empty((most if to_weight else 0, depth), dtype=dtype, device=device)
    bias = torch.empty(most if to_bias else 0, dtype=dtype, device=device)
    scaled = torch.empty(
        (0, depth) if gradient is None else gradient.shape, dtype=hidden.dtype, device=device
    )
    paths = target, order, path_start, path_edge, level_start, ignore_index
    _add_up(slopes, factor, hidden, *paths, most, weight, bias, touched, gradient, scaled)
    return touched, weight, bias, scaled


def _add_up(
    slopes: Tensor, factor: Tensor, hidden: Tensor, target: Tensor, order: Tensor,
    path_start: Tensor, path_edge: Tensor, level_start: Tensor | None, ignore_index: int | None,
    m: int, weight: Tensor, bias: Tensor, touched: Tensor | None, gradient: Tensor | None,
    scaled: Tensor | None,
) -> None:  # fmt: skip
    """Writes the ``m`` rows of weight, bias and ``touched``, and the gradient of hidden, scaled.

    ``runs`` has, for the rows in order: the start of their path (n); their number of nodes (n); how
    many of them they share with the row before (n). Then the place of the first node of each level
    in a row-sparse gradient (longest), and whether a run passes through a tile (tiles, longest).
    """
    (n, longest), depth, device = slopes.shape, hidden.shape[1], slopes.device
    hidden, tile = in_rows(hidden), TILE
    while tile < WIDEST_TILE and cdiv(n, tile) * longest * depth > PIECE_NUMBERS:
        tile *= 2
    tiles, width = cdiv(n, tile), tile_width(depth, WIDEST)
    runs = torch.empty(3 * n + (tiles + 1) * longest, device=device, dtype=torch.int64)
    sums: dict[str, Any] = dict(
        WIDTH=width, PLACED=touched is not None, TO_WEIGHT=weight.numel() > 0,
        TO_BIAS=bias.numel() > 0, enable_fp_fusion=True,
    )  # fmt: skip
    made = path_edge, level_start, runs, touched, weight, bias
    programs = cdiv(n, 32) + cdiv(m, 32)
    if programs:
        _compare_paths[(programs,)](
            target.contiguous(), order, path_start, *made, n, m, depth, path_start.shape[0] - 1,
            longest, ignore_index or 0, IGNORES=ignore_index is not None, ROWS=32, LEVELS=32,
            **sums,
        )  # fmt: skip
    if not n:
        return
    # Pieces of the run that starts in a tile and continues, and of the one from an earlier tile, at
    # each level: first all vectors, then all biases.
    biases_at = 2 * tiles * longest * depth if sums["TO_WEIGHT"] else 0
    pieces = torch.empty(biases_at + 2 * tiles * longest, device=device, dtype=torch.float32)
    given = *made, pieces, biases_at
    blocks = cdiv(depth, width)
    _sum_tiles[(n, cdiv(longest, LEVELS), blocks)](
        slopes, factor, hidden, order, gradient, scaled, *given, n, depth, longest,
        hidden.stride(0), factor.stride(0) if factor.dim() else 0, TILE=tile, LEVELS=LEVELS,
        GROUP=ROWS, TO_HIDDEN=gradient is not None, **sums,
    )  # fmt: skip
    if tiles > 1:
        _sum_pieces[(tiles - 1, longest, blocks)](
            *given, n, tiles, depth, longest, TILE=tile, GROUP=PIECES, **sums
        )


@triton.jit
def _path_of(target, path_start, row, live, n_classes, ignored, IGNORES: tl.constexpr):
    """Start and end of the path of each row; 0 and 0 if the target is not a class."""
    chosen = tl.load(target + row, mask=live, other=-1)
    known = live & (chosen >= 0) & (chosen < n_classes)
    if IGNORES:
        known = known & (chosen != ignored)
    first = tl.load(path_start + chosen, mask=known, other=0)
    return first, tl.load(path_start + chosen + 1, mask=known, other=0), chosen


@kernel
def _place_rows(
    target, rank, order, share, n, n_classes, ignored, IGNORES: tl.constexpr, ROWS: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    """Writes the ids of rows in the order of their classes' ranks: at as many as come before."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key, _ = _key_of(target, rank, row, n, n_classes, ignored, IGNORES)
    before = tl.zeros((ROWS, OTHERS), dtype=tl.int32)
    counted = tl.zeros((OTHERS,), dtype=tl.int32)
    for first in range(0, n, OTHERS):
        other = first + tl.arange(0, OTHERS)
        # Beyond the last row the key is the largest, and a larger row does not come before.
        keys, chosen = _key_of(target, rank, other, n, n_classes, ignored, IGNORES)
        tied = (other[None, :] < row[:, None]).to(tl.int32)
        before += (keys[None, :] < key[:, None] + tied).to(tl.int32)
        if share is not None:
            counted += ((other < n) & (chosen != ignored)).to(tl.int32)
    tl.store(order + tl.sum(before, 1), row.to(tl.int64), mask=row < n)
    if share is not None:
        if tl.program_id(0) == 0:
            tl.store(share, 1.0 / tl.maximum(tl.sum(counted, 0), 1).to(tl.float32))


@triton.jit
def _key_of(target, rank, row, n, n_classes, ignored, IGNORES: tl.constexpr):
    """The rank of each row's class, the number of classes if it has none; and the target."""
    chosen = tl.load(target + row, mask=row < n, other=-1)
    known = (chosen >= 0) & (chosen < n_classes)
    if IGNORES:
        known = known & (chosen != ignored)
    return tl.load(rank + chosen, mask=known, other=n_classes), chosen


@kernel
def _sort_keys(
    target, rank, keys, share, n, n_classes, ignored, IGNORES: tl.constexpr, ROWS: tl.constexpr
):
    """Writes the rank of each row's class; the last program counts rows that are not ignored."""
    if tl.program_id(0) < tl.num_programs(0) - 1:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        key, _ = _key_of(target, rank, row, n, n_classes, ignored, IGNORES)
        tl.store(keys + row, key, mask=row < n)
    elif share is not None:
        counted = tl.zeros((ROWS,), dtype=tl.int32)
        for start in range(0, n, ROWS):
            row = start + tl.arange(0, ROWS)
            chosen = tl.load(target + row, mask=row < n, other=ignored)
            counted += (chosen != ignored).to(tl.int32)
        tl.store(share, 1.0 / tl.maximum(tl.sum(counted, 0), 1).to(tl.float32))


@kernel
def _losses_of_rows(
    hidden, weight, bias, target, order, path_start, path_edge, losses, slopes, gradient, share,
    scale, depth, longest, n_classes, hidden_row, weight_row, ignored, IGNORES: tl.constexpr,
    NODES: tl.constexpr, WIDTH: tl.constexpr, BIASED: tl.constexpr, ORDERED: tl.constexpr,
    TO_NODES: tl.constexpr, TO_HIDDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if ORDERED:
        # Adjacent rows share most of their paths, so their vectors are in the cache.
        row = tl.load(order + row)
    first, stop, chosen = _path_of(target, path_start, row, row >= 0, n_classes, ignored, IGNORES)
    if share is not None:
        scale = tl.load(share)
    step = tl.arange(0, WIDTH)
    inside = step < depth
    read = step < tl.where(first < stop, depth, 0)
    state = tl.load(hidden + row * hidden_row + step, mask=read, other=0.0).to(tl.float32)
    total = tl.zeros((NODES,), dtype=tl.float32)
    summed = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(first, stop, NODES):
        place = start + tl.arange(0, NODES)
        live = place < stop
        edge = tl.load(path_edge + place, mask=live, other=0)
        node = (edge >> 1).to(tl.int64)
        vectors = load_rows(weight, node, weight_row, step, 1, live, inside).to(tl.float32)
        score = tl.sum(vectors * state[None, :], 1)
        if BIASED:
            score += tl.load(bias + node, mask=live, other=0.0).to(tl.float32)
        second = (edge & 1) == 1
        wrong = tl.where(second, -score, score)
        small = tl.exp(-tl.abs(wrong))
        total += tl.where(live, tl.maximum(wrong, 0.0) + log1p(small), 0.0)
        slope = tl.where(wrong < 0.0, small, 1.0) / (1.0 + small)
        slope = tl.where(live, tl.where(second, -slope, slope), 0.0) * scale
        if TO_NODES:
            tl.store(slopes + row * longest + (place - first), slope, mask=live)
        if TO_HIDDEN:
            summed += tl.sum(vectors * slope[:, None], 0)
    if TO_NODES:
        # Beyond the end of the path.
        for start in range(0, longest, NODES):
            place = start + tl.arange(0, NODES)
            beyond = (place >= stop - first) & (place < longest)
            tl.store(slopes + row * longest + place, tl.zeros((NODES,), tl.float32), mask=beyond)
    if TO_HIDDEN:
        tl.store(gradient + row * depth + step, summed, mask=inside)
    lost = tl.sum(total, 0) * scale
    if first == stop:
        # The target is ignored, or not a class.
        lost = float("nan")
        if IGNORES:
            if chosen == ignored:
                lost = 0.0
    tl.store(losses + row, lost)


@kernel
def _compare_paths(
    target, order, path_start, path_edge, level_start, runs, touched, weight, bias, n, m, depth,
    n_classes, longest, ignored, IGNORES: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
    WIDTH: tl.constexpr, PLACED: tl.constexpr, TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr,
):  # fmt: skip
    """Computes how many nodes each row shares with the row before it.

    The programs after these write zeros to the results, for nodes without a row.
    """
    program = tl.program_id(0)
    if program < tl.cdiv(n, ROWS):
        at = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        live = at < n
        row = tl.load(order + at, mask=live, other=0)
        first, stop, _ = _path_of(target, path_start, row, live, n_classes, ignored, IGNORES)
        behind = live & (at > 0)
        row = tl.load(order + at - 1, mask=behind, other=0)
        first_before, stop_before, _ = _path_of(
            target, path_start, row, behind, n_classes, ignored, IGNORES
        )
        length = stop - first
        shorter = tl.minimum(length, stop_before - first_before)
        common = tl.zeros((ROWS,), dtype=tl.int32)
        for level in range(0, tl.max(length, 0), LEVELS):
            step = level + tl.arange(0, LEVELS)
            both = step[None, :] < shorter[:, None]
            mine = tl.load(path_edge + first[:, None] + step[None, :], mask=both, other=0)
            theirs = tl.load(path_edge + first_before[:, None] + step[None, :], mask=both, other=0)
            # Each node has only one path from the root: below a difference no nodes are equal.
            common += tl.sum((both & ((mine >> 1) == (theirs >> 1))).to(tl.int32), 1)
        tl.store(runs + at, first, mask=live)
        tl.store(runs + n + at, length, mask=live)
        tl.store(runs + 2 * n + at, common.to(tl.int64), mask=live)
        if PLACED:
            if program == 0:
                _place_levels(level_start, runs + 3 * n, n, longest, LEVELS)
    else:
        to = (program - tl.cdiv(n, ROWS)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        _write_zeros(
            touched, weight, bias, to, to < m, depth, ROWS, WIDTH, PLACED, TO_WEIGHT, TO_BIAS
        )


@triton.jit
def _write_zeros(
    touched, weight, bias, to, live, depth, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PLACED: tl.constexpr, TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr,
):  # fmt: skip
    if PLACED:
        tl.store(touched + to, tl.zeros((ROWS,), tl.int64), mask=live)
    if TO_BIAS:
        tl.store(bias + to, tl.zeros((ROWS,), bias.dtype.element_ty), mask=live)
    if TO_WEIGHT:
        nothing = tl.zeros((ROWS, WIDTH), weight.dtype.element_ty)
        for first in range(0, depth, WIDTH):
            step = first + tl.arange(0, WIDTH)
            place = weight + to[:, None] * depth + step[None, :]
            tl.store(place, nothing, mask=live[:, None] & (step < depth)[None, :])


@triton.jit
def _place_levels(level_start, places, n, longest, LEVELS: tl.constexpr):
    """Writes the place of the first node of each level, with room for ``n`` nodes or all."""
    total = tl.full((), 0, tl.int64)
    for first in range(0, longest, LEVELS):
        level = first + tl.arange(0, LEVELS)
        _, size = _level(level_start, level, level < longest)
        room = tl.minimum(size, n).to(tl.int64)
        tl.store(places + level, total + tl.cumsum(room, 0) - room, mask=level < longest)
        total += tl.sum(room, 0)


@triton.jit
def _level(level_start, level, live):
    """The first node of some levels, and their number of nodes; 0 and 0 if not ``live``."""
    first = tl.load(level_start + level, mask=live, other=0) >> 1
    return first, (tl.load(level_start + level + 1, mask=live, other=0) >> 1) - first


@kernel
def _sum_tiles(
    slopes, factor, hidden, order, gradient, scaled, path_edge, level_start, runs, touched, weight,
    bias, pieces, biases_at, n, depth, longest, hidden_row, factor_step,
    TILE: tl.constexpr, LEVELS: tl.constexpr, GROUP: tl.constexpr, TO_HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, PLACED: tl.constexpr, TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr,
):  # fmt: skip
    """Sums the runs that start at one row, or are cut there, up to the end of the tile.

    A program handles some levels of one row: their runs start together, and share hidden states.
    That of the last levels also scales the gradient of a row of hidden states.
    """
    at = tl.program_id(0)
    tile = at // TILE
    step = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    inside = step < depth
    if TO_HIDDEN:
        if tl.program_id(1) == tl.num_programs(1) - 1:
            place = at.to(tl.int64) * depth + step
            value = tl.load(gradient + place, mask=inside, other=0.0)
            value *= tl.load(factor + at.to(tl.int64) * factor_step).to(tl.float32)
            tl.store(scaled + place, value.to(scaled.dtype.element_ty), mask=inside)
    shared = runs + 2 * n
    own = tl.load(shared + at)
    # At the first row of a tile, runs from earlier tiles are included.
    low = tl.where(at % TILE == 0, 0, own)
    length = tl.load(runs + n + at)
    first_level = tl.program_id(1) * LEVELS
    if (first_level < length) & (first_level + LEVELS > low):
        level = first_level + tl.arange(0, LEVELS)
        taken = (level >= low) & (level < length)
        last = tl.minimum(tile * TILE + TILE, n)
        later = at + 1 + tl.arange(0, TILE)
        common = tl.load(shared + later, mask=later < last, other=longest)
        ends = (later < last)[None, :] & (common[None, :] <= level[:, None])
        end = tl.min(tl.where(ends, later[None, :], last), 1)
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
                # Masked, so that a NaN of a row outside of the run does not enter its sum.
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
            summed, counted, at, level, whole, step, inside, path_edge, level_start, runs, touched,
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
            tl.store(pieces + biases_at + piece, counted, mask=part)
        through = runs + 3 * n + (tile + 1) * longest
        tl.store(through + level, goes_on.to(tl.int64), mask=taken & came_in)


@kernel
def _sum_pieces(
    path_edge, level_start, runs, touched, weight, bias, pieces, biases_at, n, tiles, depth,
    longest, TILE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    PLACED: tl.constexpr, TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr,
):  # fmt: skip
    """Sums the pieces of a run that starts in the previous tile, from left to right."""
    tile = tl.program_id(0) + 1
    at = tile * TILE
    shared = runs + 2 * n
    through = runs + 3 * n + longest
    this = tl.program_id(1)
    if tl.load(shared + at) > this:
        before = tl.load(shared + at - TILE + tl.arange(0, TILE))
        if tl.min(before, 0) <= this:
            # One level, as a block of size 1.
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
                number += tl.load(pieces + biases_at + head)
            going = 1
            for first in range(tile, tiles, GROUP):
                if going == 1:
                    some = first + tl.arange(0, GROUP)
                    on = tl.load(through + some * longest + this, mask=some < tiles, other=0)
                    # The first piece that does not continue is the last one.
                    last = tl.min(tl.where(on == 0, some, tiles), 0)
                    live = (some <= last) & (some < tiles)
                    piece = (tiles + some).to(tl.int64) * longest + this
                    if TO_WEIGHT:
                        more = load_rows(pieces, piece, depth, step, 1, live, inside)
                        vector += tl.sum(more, 0)[None, :]
                    if TO_BIAS:
                        levels = tl.load(pieces + biases_at + piece, mask=live, other=0.0)
                        number += tl.sum(levels, 0)
                    going = (last == tiles).to(tl.int32)
            _write(
                vector, number, at, level, level >= 0, step, inside, path_edge, level_start, runs,
                touched, weight, bias, n, depth, PLACED, TO_WEIGHT, TO_BIAS,
            )  # fmt: skip


@triton.jit
def _write(
    vectors, numbers, at, level, whole, step, inside, path_edge, level_start, runs, touched, weight,
    bias, n, depth, PLACED: tl.constexpr, TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr,
):  # fmt: skip
    """Writes the sums of the runs that contain row ``at`` on some levels."""
    edge = tl.load(path_edge + tl.load(runs + at) + level, mask=whole, other=0)
    to = (edge >> 1).to(tl.int64)
    if PLACED:
        node = to
        # On this level each node has a place, or each row: both are in the same order.
        first, size = _level(level_start, level, whole)
        to = tl.load(runs + 3 * n + level, mask=whole, other=0) + tl.where(
            size > n, at, node - first
        )
        tl.store(touched + to, node, mask=whole)
    if TO_WEIGHT:
        tl.store(
            weight + to[:, None] * depth + step[None, :],
            vectors.to(weight.dtype.element_ty),
            mask=whole[:, None] & inside[None, :],
        )
    if TO_BIAS:
        tl.store(bias + to, numbers.to(bias.dtype.element_ty), mask=whole)
