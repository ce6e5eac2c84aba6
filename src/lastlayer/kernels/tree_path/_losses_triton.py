"""Kernels of the forward pass: the keys of a sort, and losses with all that one gather gives."""

import triton
import triton.language as tl


@triton.jit
def path_of(target, path_start, row, live, n_classes, ignored, IGNORES: tl.constexpr):
    """Where the path of each row starts and stops; 0 and 0 for a target that is no class."""
    chosen = tl.load(target + row, mask=live, other=-1)
    known = live & (chosen >= 0) & (chosen < n_classes)
    if IGNORES:
        known = known & (chosen != ignored)
    first = tl.load(path_start + chosen, mask=known, other=0)
    return first, tl.load(path_start + chosen + 1, mask=known, other=0), chosen


@triton.jit
def sort_keys(target, rank, keys, n, n_classes, ignored, IGNORES: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    chosen = tl.load(target + row, mask=row < n, other=-1)
    known = (chosen >= 0) & (chosen < n_classes)
    if IGNORES:
        known = known & (chosen != ignored)
    tl.store(keys + row, tl.load(rank + chosen, mask=known, other=n_classes), mask=row < n)


@triton.jit
def losses_of_rows(
    hidden, weight, bias, target, order, path_start, path_edge, losses, slopes, gradient, depth,
    longest, n_classes, hidden_row, weight_row, ignored, IGNORES: tl.constexpr,
    NODES: tl.constexpr, WIDTH: tl.constexpr, BIASED: tl.constexpr, ORDERED: tl.constexpr,
    TO_NODES: tl.constexpr, TO_HIDDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if ORDERED:
        # Neighbours share most of their paths, and find their vectors in the cache.
        row = tl.load(order + row)
    first, stop, chosen = path_of(target, path_start, row, row >= 0, n_classes, ignored, IGNORES)
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
        vectors = tl.load(
            weight + node[:, None] * weight_row + step[None, :],
            mask=live[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        score = tl.sum(vectors * state[None, :], 1)
        if BIASED:
            score += tl.load(bias + node, mask=live, other=0.0).to(tl.float32)
        second = (edge & 1) == 1
        wrong = tl.where(second, -score, score)
        small = tl.exp(-tl.abs(wrong))
        total += tl.where(live, tl.maximum(wrong, 0.0) + _log1p(small), 0.0)
        slope = tl.where(wrong < 0.0, small, 1.0) / (1.0 + small)
        slope = tl.where(live, tl.where(second, -slope, slope), 0.0)
        if TO_NODES:
            tl.store(slopes + row * longest + (place - first), slope, mask=live)
        if TO_HIDDEN:
            summed += tl.sum(vectors * slope[:, None], 0)
    if TO_HIDDEN:
        tl.store(gradient + row * depth + step, summed, mask=inside)
    lost = tl.sum(total, 0)
    if first == stop:
        # Ignored, or no class at all.
        lost = float("nan")
        if IGNORES:
            if chosen == ignored:
                lost = 0.0
    tl.store(losses + row, lost)


@triton.jit
def _log1p(x):
    """Of x from 0 to 1; what 1 + x rounds away is put back as a factor."""
    grown = 1.0 + x
    return tl.where(grown == 1.0, x, tl.log(grown) * (x / tl.where(grown == 1.0, 1.0, grown - 1.0)))
