"""Kernels that make a plan from entries sorted by node, and entries from the targets of a loss."""

import triton
import triton.language as tl


@triton.jit
def entries_of_targets(
    target, path_start, path_edge, edge_node, child_start, node, position, n, path, n_classes,
    n_inner, ignored, IGNORES: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The nodes on the path of each target, and the child that is taken at each."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    step = tl.program_id(1) * LEVELS + tl.arange(0, LEVELS)
    known, chosen = _known(target, row, row < n, n_classes, ignored, IGNORES)
    first = tl.load(path_start + chosen, mask=known, other=0)
    stop = tl.load(path_start + chosen + 1, mask=known, other=0)
    place = first[:, None] + step[None, :]
    inside = place < stop[:, None]
    edge = tl.load(path_edge + place, mask=inside, other=0)
    at = tl.load(edge_node + edge, mask=inside, other=n_inner)
    start = tl.load(child_start + at, mask=inside, other=0).to(tl.int32)
    to = row[:, None] * path + step[None, :]
    live = (row < n)[:, None] & (step < path)[None, :]
    tl.store(node + to, at, mask=live)
    tl.store(position + to, edge - start, mask=live)


@triton.jit
def losses_of_targets(
    target, log_prob, losses, n, path, n_classes, ignored, IGNORES: tl.constexpr,
    ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Minus the sum of each row; 0 where it is ignored, and NaN where its target is no class."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    known, chosen = _known(target, row, row < n, n_classes, ignored, IGNORES)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(0, path, LEVELS):
        step = first + tl.arange(0, LEVELS)
        inside = (row < n)[:, None] & (step < path)[None, :]
        found = tl.load(log_prob + row[:, None] * path + step[None, :], mask=inside, other=0.0)
        total += tl.sum(found, 1)
    lost = tl.where(known, -total, float("nan"))
    if IGNORES:
        lost = tl.where(chosen == ignored, 0.0, lost)
    tl.store(losses + row, lost, mask=row < n)


@triton.jit
def _known(target, row, live, n_classes, ignored, IGNORES: tl.constexpr):
    chosen = tl.load(target + row, mask=live, other=-1)
    known = live & (chosen >= 0) & (chosen < n_classes)
    if IGNORES:
        known = known & (chosen != ignored)
    return known, chosen


@triton.jit
def mark_first(by_node, fresh, m, BLOCK: tl.constexpr):
    """1 where a group starts, else 0."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < m
    here = tl.load(by_node + place, mask=live, other=0)
    before = tl.load(by_node + place - 1, mask=live & (place > 0), other=-1)
    tl.store(fresh + place, (here != before).to(tl.int32), mask=live)


@triton.jit
def start_groups(group, start, m, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < m
    here = tl.load(group + place, mask=live, other=1)
    before = tl.load(group + place - 1, mask=live & (place > 0), other=0)
    tl.store(start + here - 1, place.to(tl.int32), mask=live & (here != before))


@triton.jit
def measure_groups(
    by_node, group, start, row_start, groups, amounts, m, n_groups, n_inner, ROWS: tl.constexpr,
    CHILDREN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a plan says of each group, and how much work it is; 0 beyond the last one."""
    this = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    last = tl.load(group + m - 1) - 1
    there = this <= last
    first = tl.load(start + this, mask=there, other=0)
    size = tl.load(start + this + 1, mask=this < last, other=m) - first
    size = tl.where(there, size, 0).to(tl.int64)
    node = tl.load(by_node + first, mask=there, other=n_inner)
    asked = node < n_inner
    first_row = tl.load(row_start + node, mask=asked, other=0)
    width = tl.load(row_start + node + 1, mask=asked, other=0) - first_row
    # Lines of scores start where a vector load can.
    line = (width + 3) // 4 * 4
    row_tiles = tl.where(asked, (size + ROWS - 1) // ROWS, 0)
    child_tiles = (width + CHILDREN - 1) // CHILDREN
    inside = this < n_groups
    tl.store(groups + this, first.to(tl.int64), mask=inside)
    tl.store(groups + n_groups + this, size, mask=inside)
    tl.store(groups + 2 * n_groups + this, first_row, mask=inside)
    tl.store(groups + 3 * n_groups + this, width, mask=inside)
    tl.store(groups + 4 * n_groups + this, line, mask=inside)
    tl.store(amounts + this, row_tiles * child_tiles, mask=inside)
    tl.store(amounts + n_groups + this, row_tiles, mask=inside)
    tl.store(amounts + 2 * n_groups + this, child_tiles, mask=inside)
    tl.store(amounts + 3 * n_groups + this, size * line, mask=inside)
    tl.store(amounts + 4 * n_groups + this, width, mask=inside)


@triton.jit
def list_tiles(
    ends, tiles, n_groups, n_scores, n_rows, n_children, SEARCH: tl.constexpr, BLOCK: tl.constexpr
):
    """The group of each tile, in one of three lists; ``n_groups`` beyond the last tile."""
    kind = tl.program_id(1)
    length = tl.where(kind == 0, n_scores, tl.where(kind == 1, n_rows, n_children))
    into = tl.where(kind == 0, 0, n_scores) + tl.where(kind == 2, n_rows, 0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), dtype=tl.int32)
    high = low + n_groups
    for _ in range(SEARCH):
        middle = (low + high) // 2
        narrowing = low < high
        end = tl.load(ends + kind * n_groups + middle, mask=narrowing, other=0)
        before = narrowing & (end <= tile)
        low = tl.where(before, middle + 1, low)
        high = tl.where(narrowing & (end > tile), middle, high)
    tl.store(tiles + into + tile, low, mask=tile < length)
