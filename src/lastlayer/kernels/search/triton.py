"""The best leaves of a binary tree on CUDA, random and given leaves, and blocks of classes.

The search has one program per row, in one launch. The nodes of a level are in memory of the row. A
first sweep is a beam search for k leaves; a second sweep opens all nodes at least as probable as
the k-th leaf; README.md has the proof. A walk to a random or given leaf is one program, which reads
the vectors of the nodes on its path. For blocks of classes a program computes the scores of one
block, and stores their peak and level.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import (
    cdiv,
    dot_rows,
    in_rows,
    load_rows,
    log1p,
    next_power_of_2,
    tile_width,
)
from lastlayer.kernels.search import MOST_ON_CUDA, NOWHERE

# Most nodes per level, most listed leaves, and most opened nodes of a row. A row that needs more is
# given up.
NODES, LEAVES, MOST_OPENED = 512, 512, 8192
# Smallest beam of the first sweep, and nodes that the second sweep opens in one step.
NARROWEST, GROUP = 8, 16
# Numbers of node vectors that a program holds in one step, and its warps.
TILE, WARPS = 4096, 8
# Numbers of node vectors that a walk holds in one step.
WALKED = 4096
_NOWHERE = tl.constexpr(NOWHERE)


def best_leaves(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, child_start: Tensor, row_start: Tensor,
    child: Tensor, levels: int, k: int, most: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Same as the reference, but rows that need too much work, or have NaN, are given up."""
    if len(child) != 2 * (len(child_start) - 1):
        raise ValueError(
            "child: expected two edges for each node with impl='triton', got "
            f"{len(child)} for {len(child_start) - 1}; use impl='reference' for wider nodes"
        )
    if k > MOST_ON_CUDA:
        raise ValueError(f"k: expected at most {MOST_ON_CUDA} with impl='triton', got {k}")
    n, depth = hidden.shape
    values = torch.empty(n, k, device=hidden.device, dtype=torch.float32)
    classes = torch.empty(n, k, device=hidden.device, dtype=torch.int64)
    opened = torch.empty(n, device=hidden.device, dtype=torch.int64)
    if n:
        width = next_power_of_2(max(k, NARROWEST))
        widest = max(16, next_power_of_2(depth))
        room = 2 * NODES + LEAVES
        _search[(n,)](
            hidden.float().contiguous(), weight, None if bias is None else bias.contiguous(),
            child.contiguous(), values, classes, opened,
            torch.empty(n, room, device=hidden.device, dtype=torch.int32),
            torch.empty(n, room, device=hidden.device, dtype=torch.float32), depth,
            weight.stride(0), weight.stride(1), levels, k, min(most, MOST_OPENED), WIDTH=width,
            GROUP=GROUP, BEAM_DEPTH=min(widest, TILE // width), DEPTH=min(widest, TILE // GROUP),
            NODES=NODES, LEAVES=LEAVES, BIASED=bias is not None, num_warps=WARPS,
        )  # fmt: skip
    return values, classes, opened


@kernel
def _search(
    hidden, weight, bias, child, values, classes, opened, ids, numbers, depth, weight_row,
    weight_step, levels, k, most, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    BEAM_DEPTH: tl.constexpr, DEPTH: tl.constexpr, NODES: tl.constexpr, LEAVES: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    hidden += row * depth
    ids += row * (2 * NODES + LEAVES)
    numbers += row * (2 * NODES + LEAVES)
    bound, beam_opened = _bound_by_a_beam(
        hidden, weight, bias, child, ids, numbers, depth, weight_row, weight_step, levels, k,
        WIDTH, BEAM_DEPTH, BIASED,
    )  # fmt: skip
    # Lowered by about a thousand rounding errors, since the second sweep rounds scores differently.
    bound -= 1.2e-4 * (1.0 + tl.abs(bound))
    n_leaves, n_opened = _all_down_to(
        bound, hidden, weight, bias, child, ids, numbers, depth, weight_row, weight_step, levels,
        most, GROUP, DEPTH, NODES, LEAVES, BIASED,
    )  # fmt: skip
    done = (n_leaves >= k) & (n_leaves <= LEAVES)
    tl.store(opened + row, tl.where(done, beam_opened + n_opened, -1))
    values += row * k
    classes += row * k
    if done:
        _store_best(ids + 2 * NODES, numbers + 2 * NODES, n_leaves, values, classes, k, LEAVES)
    else:
        place = tl.arange(0, WIDTH)
        tl.store(values + place, tl.full((WIDTH,), float("nan"), tl.float32), mask=place < k)
        tl.store(classes + place, tl.full((WIDTH,), -1, tl.int64), mask=place < k)


@triton.jit
def _bound_by_a_beam(
    hidden, weight, bias, child, ids, numbers, depth, weight_row, weight_step, levels, k,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """The log-probability of the k-th best leaf of a beam search, and how many nodes it opened."""
    lane = tl.arange(0, WIDTH)
    pair = tl.arange(0, 2 * WIDTH)
    node = tl.zeros((WIDTH,), tl.int32)
    reached = tl.where(lane == 0, 0.0, -float("inf"))
    # Log-probabilities of the best leaves so far, sorted.
    best = tl.full((WIDTH,), -float("inf"), tl.float32)
    bound = -float("inf")
    n_live = 1
    n_opened = 0
    for _ in range(levels):
        if n_live > 0:
            n_opened += n_live
            live = lane < n_live
            log_prob, below = _open(
                node, reached, live, hidden, weight, bias, child, depth, weight_row, weight_step,
                WIDTH, DEPTH, BIASED,
            )  # fmt: skip
            # NaN has no place in the order; the second sweep gives a row with NaN up.
            log_prob = tl.where(log_prob == log_prob, log_prob, -float("inf"))
            leaf = below < 0
            # Ranks among the new children of the same kind, and among the best leaves.
            ahead = (log_prob[None, :] > log_prob[:, None]) | (
                (log_prob[None, :] == log_prob[:, None]) & (pair[None, :] < pair[:, None])
            )
            ahead = ahead & (leaf[None, :] == leaf[:, None])
            place = tl.sum(ahead.to(tl.int32), 1)
            worse = best[None, :] >= log_prob[:, None]
            leaf_place = place + tl.sum(worse.to(tl.int32), 1)
            better = (log_prob[None, :] > best[:, None]) & leaf[None, :]
            best_place = lane + tl.sum(better.to(tl.int32), 1)
            tl.store(ids + place, below, mask=~leaf & (place < WIDTH))
            tl.store(numbers + place, log_prob, mask=~leaf & (place < WIDTH))
            leaves = numbers + WIDTH
            tl.store(leaves + leaf_place, log_prob, mask=leaf & (leaf_place < WIDTH))
            tl.store(leaves + best_place, best, mask=best_place < WIDTH)
            n_inner = tl.minimum(tl.sum((~leaf).to(tl.int32), 0), WIDTH)
            tl.debug_barrier()
            best = tl.load(leaves + lane)
            bound = tl.load(leaves + k - 1)
            node = tl.load(ids + lane, mask=lane < n_inner, other=0)
            reached = tl.load(numbers + lane, mask=lane < n_inner, other=-float("inf"))
            # Nodes are sorted, so the live ones come first.
            n_live = tl.sum(((reached >= bound) & (reached > -float("inf"))).to(tl.int32), 0)
            tl.debug_barrier()
    return bound, n_opened


@triton.jit
def _all_down_to(
    bound, hidden, weight, bias, child, ids, numbers, depth, weight_row, weight_step, levels, most,
    GROUP: tl.constexpr, DEPTH: tl.constexpr, NODES: tl.constexpr, LEAVES: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """Lists the leaves that reach the bound; returns their number and that of opened nodes.

    More than LEAVES leaves mean that the row is given up.
    """
    lane = tl.arange(0, GROUP)
    tl.store(ids + lane, tl.zeros((GROUP,), tl.int32), mask=lane == 0)
    tl.store(numbers + lane, tl.zeros((GROUP,), tl.float32), mask=lane == 0)
    tl.debug_barrier()
    n_leaves = 0
    n_opened = 0
    n_live = 1
    source = 0
    for _ in range(levels):
        if n_live > 0:
            n_opened += n_live
            target = NODES - source
            n_next = 0
            for first in range(0, n_live, GROUP):
                live = first + lane < n_live
                node = tl.load(ids + source + first + lane, mask=live, other=0)
                reached = tl.load(numbers + source + first + lane, mask=live, other=-float("inf"))
                log_prob, below = _open(
                    node, reached, live, hidden, weight, bias, child, depth, weight_row,
                    weight_step, GROUP, DEPTH, BIASED,
                )  # fmt: skip
                # A NaN makes the list too long, so that the row is given up.
                n_leaves += (LEAVES + 1) * tl.max((log_prob != log_prob).to(tl.int32), 0)
                wanted = (log_prob >= bound) & (log_prob > -float("inf"))
                leaf = (wanted & (below < 0)).to(tl.int32)
                place = n_leaves + tl.cumsum(leaf, 0) - 1
                kept = (leaf > 0) & (place < LEAVES)
                tl.store(ids + 2 * NODES + place, below, mask=kept)
                tl.store(numbers + 2 * NODES + place, log_prob, mask=kept)
                n_leaves += tl.sum(leaf, 0)
                inner = (wanted & (below >= 0)).to(tl.int32)
                place = n_next + tl.cumsum(inner, 0) - 1
                kept = (inner > 0) & (place < NODES)
                tl.store(ids + target + place, below, mask=kept)
                tl.store(numbers + target + place, log_prob, mask=kept)
                n_next += tl.sum(inner, 0)
            if (n_next > NODES) | (n_opened + n_next > most):
                n_leaves = LEAVES + 1
            n_live = tl.where(n_leaves > LEAVES, 0, n_next)
            source = target
            tl.debug_barrier()
    return n_leaves, n_opened


@triton.jit
def _open(
    node, reached, live, hidden, weight, bias, child, depth, weight_row, weight_step,
    GROUP: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Log-probabilities and ids of the two children of each node; -inf for inactive nodes."""
    at = node.to(tl.int64)
    score = dot_rows(hidden, 1, weight, at, weight_row, weight_step, live, depth, GROUP, DEPTH)
    left = tl.load(child + 2 * at, mask=live, other=-1)
    right = tl.load(child + 2 * at + 1, mask=live, other=-1)
    if BIASED:
        score += tl.load(bias + node, mask=live, other=0.0).to(tl.float32)
    rest = log1p(tl.exp(-tl.abs(score)))
    on_left = reached + (tl.minimum(-score, 0.0) - rest)
    on_right = reached + (tl.minimum(score, 0.0) - rest)
    return tl.interleave(on_left, on_right), tl.interleave(left, right)


@triton.jit
def _store_best(ids, numbers, n_leaves, values, classes, k, LEAVES: tl.constexpr):
    """Writes the k best leaves of the list in order, one by one since k is small."""
    place = tl.arange(0, LEAVES)
    there = place < n_leaves
    # Log-probabilities are at most 0, so the bits of their magnitude decrease as they increase.
    size = -tl.load(numbers + place, mask=there, other=0.0)
    bits = (size + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    # The list has ~c, which is larger for lower classes.
    key = ((-bits) << 32) + (tl.load(ids + place, mask=there, other=0).to(tl.int64) + 0x80000000)
    key = tl.where(there, key, -0x7FFFFFFFFFFFFFFF)
    for i in range(k):
        best = tl.max(key, 0)
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)
        found = (best & 0xFFFFFFFF) - 0x80000000
        bits_found = (-(best >> 32)).to(tl.int32)
        tl.store(values + i, -bits_found.to(tl.float32, bitcast=True) + 0.0)
        tl.store(classes + i, -1 - found)


def random_leaves(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, child_start: Tensor, row_start: Tensor,
    child: Tensor, widest: int, uniform: Tensor,
) -> Tensor:  # fmt: skip
    made = torch.empty(uniform.shape, device=hidden.device, dtype=torch.int64)
    if made.numel():
        # The scores of the current node of each walk.
        scores = torch.empty(made.numel(), widest, device=hidden.device, dtype=torch.float32)
        tables = child_start, row_start, child, uniform.contiguous(), scores
        block = min(1024, next_power_of_2(widest))
        _walk(_draw_leaves, hidden, weight, bias, tables, made, widest, widest, BLOCK=block)
    return made


def leaf_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, child_start: Tensor, row_start: Tensor,
    edge_node: Tensor, path_start: Tensor, path_edge: Tensor, widest: int, classes: Tensor,
) -> Tensor:  # fmt: skip
    made = torch.empty(classes.shape, device=hidden.device, dtype=torch.float32)
    if made.numel():
        tables = child_start, row_start, edge_node, path_start, path_edge, classes.contiguous()
        _walk(_follow_paths, hidden, weight, bias, tables, made, len(path_start) - 1, widest)
    return made


def _walk(
    run: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tables: tuple[Tensor, ...],
    made: Tensor, size: int, widest: int, **constants: int,
) -> None:  # fmt: skip
    """Launches one program per element of the output ``made``, ``(n, m)``."""
    hidden, weight, depth = in_rows(hidden), in_rows(weight), hidden.shape[1]
    steps = tile_width(depth, WALKED)
    # A binary node has one row of the weight.
    children = 1 if widest == 2 else min(WALKED // steps, next_power_of_2(widest))
    run[(made.numel(),)](
        hidden, weight, bias, *tables, made, size, depth, made.shape[1], hidden.stride(0),
        weight.stride(0), **constants, CHILDREN=children, DEPTH=steps, BIASED=bias is not None,
        num_warps=max(1, min(4, children * steps // 512)),
    )  # fmt: skip


@triton.jit
def _child_scores(
    hidden, weight, bias, row, width, first, depth, weight_row, CHILDREN: tl.constexpr,
    DEPTH: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Scores of some children of a node, whose weights begin at ``row``; -inf beyond the last."""
    child = first + tl.arange(0, CHILDREN)
    there = child < width
    score = dot_rows(hidden, 1, weight, row + child, weight_row, 1, there, depth, CHILDREN, DEPTH)
    if BIASED:
        score += tl.load(bias + row + child, mask=there, other=0.0).to(tl.float32)
    return child, tl.where(there, score, -float("inf"))


@kernel
def _draw_leaves(
    hidden, weight, bias, child_start, row_start, child, uniform, scores, classes, widest, depth,
    m, hidden_row, weight_row, BLOCK: tl.constexpr, CHILDREN: tl.constexpr, DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """One walk down from the root, as in the reference."""
    walk = tl.program_id(0).to(tl.int64)
    hidden += walk // m * hidden_row
    scores += walk * widest
    left = tl.load(uniform + walk)
    node = walk * 0
    lane = tl.arange(0, BLOCK)
    while node >= 0:
        row = tl.load(row_start + node)
        width = (tl.load(row_start + node + 1) - row).to(tl.int32)
        # A single row decides between two children; the first has score 0.
        binary = width == 1
        shift = binary.to(tl.int32)
        peak = tl.where(binary, 0.0, -float("inf"))
        tl.store(scores, 0.0, mask=binary)
        for first in range(0, width, CHILDREN):
            at, score = _child_scores(
                hidden, weight, bias, row, width, first, depth, weight_row, CHILDREN, DEPTH, BIASED
            )
            # If the second child has probability 1, avoid inf - inf.
            score = tl.where(binary & (score == float("inf")), 3.0e38, score)
            tl.store(scores + shift + at, score, mask=at < width)
            peak = tl.maximum(peak, tl.max(score, 0))
        # Other threads of this program read the scores next.
        tl.debug_barrier()
        arity = width + shift
        # In float64, so that many small probabilities are not lost.
        origin = tl.where(peak == -float("inf"), 0.0, peak).to(tl.float64)
        total = left * 0.0
        for first in range(0, arity, BLOCK):
            score = tl.load(scores + first + lane, mask=first + lane < arity, other=-float("inf"))
            total += tl.sum(tl.exp(score.to(tl.float64) - origin), 0)
        limit = left * total
        before = left * 0.0
        inside = left * 0.0 + 1.0
        chosen = shift * 0
        going = shift * 0 + 1
        for first in range(0, arity, BLOCK):
            score = tl.load(scores + first + lane, mask=first + lane < arity, other=-float("inf"))
            share = tl.exp(score.to(tl.float64) - origin)
            reached = before + tl.cumsum(share, 0)
            there = share > 0.0
            at = tl.min(tl.where(there & (reached > limit), lane, BLOCK), 0)
            # The last child with a share, if the product was rounded up to the total.
            last = tl.max(tl.where(there, first + lane, chosen), 0)
            own = tl.sum(tl.where(lane == at, share, 0.0), 0)
            upto = tl.sum(tl.where(lane == at, reached, 0.0), 0)
            hit = (at < BLOCK) & (going == 1)
            inside = tl.where(hit, (limit - (upto - own)) / own, inside)
            chosen = tl.where(hit, first + at, tl.where(going == 1, last, chosen))
            going = tl.where(hit, 0, going)
            before += tl.sum(share, 0)
        left = tl.minimum(tl.maximum(inside, 0.0), 1.0)
        below = tl.load(child + tl.load(child_start + node) + chosen).to(tl.int64)
        # The walk ends if the sum is 0 or NaN.
        node = tl.where(total > 0.0, below, _NOWHERE)
        tl.debug_barrier()
    tl.store(classes + walk, tl.where(node == _NOWHERE, -1, -1 - node))


@kernel
def _follow_paths(
    hidden, weight, bias, child_start, row_start, edge_node, path_start, path_edge, classes, made,
    n_classes, depth, m, hidden_row, weight_row, CHILDREN: tl.constexpr, DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """The log-probability of one class; NaN for an invalid id."""
    walk = tl.program_id(0).to(tl.int64)
    hidden += walk // m * hidden_row
    chosen = tl.load(classes + walk)
    known = (chosen >= 0) & (chosen < n_classes)
    log_prob = tl.where(known, 0.0, float("nan"))
    start = tl.load(path_start + chosen, mask=known, other=0)
    stop = tl.load(path_start + chosen + 1, mask=known, other=0)
    for place in range(start, stop):
        edge = tl.load(path_edge + place)
        node = tl.load(edge_node + edge)
        row = tl.load(row_start + node)
        width = (tl.load(row_start + node + 1) - row).to(tl.int32)
        position = edge - tl.load(child_start + node).to(tl.int32)
        column = tl.where(width == 1, 0, position)
        peak = tl.full((CHILDREN,), -float("inf"), tl.float32)
        total = tl.zeros((CHILDREN,), tl.float32)
        taken = 0.0
        for first in range(0, width, CHILDREN):
            at, score = _child_scores(
                hidden, weight, bias, row, width, first, depth, weight_row, CHILDREN, DEPTH, BIASED
            )
            taken += tl.sum(tl.where(at == column, score, 0.0), 0)
            # One maximum and sum per lane. NaN makes the sum NaN.
            grown = tl.maximum(peak, score)
            origin = tl.where(grown == -float("inf"), 0.0, grown)
            total = total * tl.exp(peak - origin) + tl.exp(score - origin)
            peak = grown
        top = tl.max(peak, 0)
        origin = tl.where(top == -float("inf"), 0.0, top)
        summed = tl.sum(total * tl.exp(peak - origin), 0)
        wide = (taken - origin) - tl.log(summed)
        signed = tl.where(position == 1, taken, -taken)
        given = tl.where(width == 1, tl.minimum(signed, 0.0) - log1p(tl.exp(-tl.abs(taken))), wide)
        log_prob += given
    tl.store(made + walk, log_prob)


# Classes per block, a power of 2.
CLASSES = 128
_ROWS, _DEPTH = 64, 64
# Numbers of a row among which one program selects the largest.
WIDEST = 8192
_LOWEST = tl.constexpr(-(2**63))


def peaks_and_levels_(hidden: Tensor, weight: Tensor, peaks: Tensor, levels: Tensor) -> None:
    """Writes the largest score and the logsumexp of the scores of each row and block.

    Block b has the classes from ``CLASSES * b`` on. Both outputs are float32, ``(n, blocks)`` or
    wider; only the first columns are written. NaN if the block has a NaN.
    """
    (n, depth), n_classes = hidden.shape, weight.shape[0]
    hidden, weight = in_rows(hidden), in_rows(weight)
    if n and n_classes:
        wide = hidden.dtype == torch.float32 or hidden.dtype != weight.dtype
        _peaks_and_levels[(cdiv(n_classes, CLASSES), cdiv(n, _ROWS))](
            hidden, weight, peaks, levels, n, n_classes, depth, peaks.stride(0), hidden.stride(0),
            weight.stride(0), ROWS=_ROWS, CLASSES=CLASSES, DEPTH=tile_width(depth, _DEPTH),
            WIDE=wide, num_warps=4, num_stages=3,
        )  # fmt: skip


def largest(values: Tensor, ids: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The k largest numbers of each row, float32, and their ids; ties by ascending id.

    NaN comes first, as in torch. Ids are int64, from 0 up to 2^32; None means column indices.
    """
    while True:
        n, m = values.shape
        width = tile_width(m, WIDEST)
        parts = cdiv(m, width)
        # If a part has fewer than k numbers, the rest is -inf, which sorts last.
        best = torch.empty(n, parts * k, device=values.device, dtype=torch.float32)
        found = torch.empty(n, parts * k, device=values.device, dtype=torch.int64)
        _largest[(n, parts)](
            values.contiguous(), None if ids is None else ids.contiguous(), best, found, m, k,
            WIDTH=width, COLUMNS=ids is None, num_warps=max(1, min(8, width // 256)),
        )  # fmt: skip
        if parts == 1:
            return best, found
        values, ids = best, found


@kernel
def _peaks_and_levels(
    hidden, weight, peaks, levels, n, n_classes, depth, line, hidden_row, weight_row,
    ROWS: tl.constexpr, CLASSES: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * CLASSES + tl.arange(0, CLASSES)
    live = column < n_classes
    scores = tl.zeros((ROWS, CLASSES), dtype=tl.float32)
    for first in range(0, depth, DEPTH):
        step = first + tl.arange(0, DEPTH)
        inside = step < depth
        states = load_rows(hidden, row, hidden_row, step, 1, row < n, inside)
        vectors = load_rows(weight, column, weight_row, step, 1, live, inside)
        if WIDE:
            states = states.to(tl.float32)
            vectors = vectors.to(tl.float32)
        scores = tl.dot(states, tl.trans(vectors), scores, input_precision="ieee")
    scores = tl.where(live[None, :], scores, -float("inf"))
    peak = tl.max(scores, 1)
    total = tl.sum(tl.exp(scores - peak[:, None]), 1)
    # A maximum may ignore NaN; a sum does not.
    peak = tl.where(total == total, peak, total)
    place = row * line + tl.program_id(0)
    tl.store(peaks + place, peak, mask=row < n)
    tl.store(levels + place, peak + tl.log(total), mask=row < n)


@kernel
def _largest(
    values, ids, best, found, m, k, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = column < m
    value = tl.load(values + row * m + column, mask=live, other=-float("inf"))
    if COLUMNS:
        mine = column.to(tl.int64)
    else:
        mine = tl.load(ids + row * m + column, mask=live, other=0xFFFFFFFF)
    # Upper half: integers of the same order as the values; lower half: the complement of the id.
    # NaN of either sign sorts first; + 0.0 makes -0.0 equal to 0.0.
    ordered = tl.where(value == value, value, float("inf")) + 0.0
    bits = ordered.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (bits.to(tl.int64) << 32) + (0xFFFFFFFF - mine)
    keys = tl.where(live, keys, _LOWEST)
    into = (row * tl.num_programs(1) + tl.program_id(1)) * k
    for i in range(k):
        top = tl.max(keys, 0)
        here = keys == top
        # Zeros elsewhere, so that a NaN of another column does not enter the sum.
        number = tl.sum(tl.where(here, value, 0.0), 0)
        there = top != _LOWEST
        tl.store(best + into + i, tl.where(there, number, -float("inf")))
        tl.store(found + into + i, tl.where(there, 0xFFFFFFFF - (top & 0xFFFFFFFF), 0xFFFFFFFF))
        keys = tl.where(here, _LOWEST, keys)
