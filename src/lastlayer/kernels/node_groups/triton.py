"""Log-probabilities of children at the nodes of a tree, and their gradients, on CUDA.

An *entry* is a row of hidden states at a node. Entries are sorted by node; the entries of one node
are a group, whose scores are one small product. A list of tiles makes all groups one launch.

* A *plan* has the entries and tiles of each group, computed without a host sync. Its sizes are
  known only on the device, so memory and programs are allocated for an upper bound that follows
  from the tree; programs beyond the end return at once.
* ``_scores_of_tiles`` computes and stores the scores of all groups. Gathered vectors would take
  ``in_features`` times as much memory.
* ``_log_probs_of_entries`` has one program per entry.
* ``_gradient_of_rows`` and ``_gradient_of_children`` convert scores to slopes when they load them.

The scores of all leaves come from one product: ``_normalise_nodes`` computes the logsumexp of wide
nodes, and ``_reach_edges`` sums log-probabilities level by level.

Every number is written by one program, which sums in a fixed order. Offsets inside a tile are
32-bit, relative to a 64-bit base: most registers of a program hold addresses, and 64-bit offsets
would not fit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import (
    cdiv,
    in_rows,
    load_rows,
    log1p,
    next_power_of_2,
    sort_ids,
)
from lastlayer.kernels.node_groups import (
    CHILDREN,
    MANY_EDGES,
    ROWS,
    LeafTables,
    Plan,
    TreeSizes,
    most_groups,
    most_scores,
    most_tiles,
)

# Features per step of a dot product, and features of a gradient per program.
SUMMED, HELD = 128, 256
# Entries or groups per program of the kernels that compute the plan.
_BLOCK = 256
# Rows of a large group per step.
MANY = 32
# Maximum size of the buffer for the gradients of all entries, unless HELD features are larger.
MOST_PARTS = 1 << 26
# Scores per step of the kernels for all leaves, and rows per program.
LEAVES_AT_A_TIME, LEAF_ROWS = 2048, 4


class Paths(NamedTuple):
    """Tables of a tree in which every class has one path."""

    start: Tensor
    edge: Tensor
    edge_node: Tensor
    child_start: Tensor


class Kept(NamedTuple):
    """What the forward pass saves for backward."""

    plan: Plan
    scores: Tensor
    lse: Tensor


def entries_of(
    target: Tensor, paths: Paths, longest: int, n_inner: int, ignore_index: int | None
) -> tuple[Tensor, Tensor]:
    """The nodes on the path of each target and the children taken, ``(n, longest)``, int32.

    Nodes are ``n_inner`` beyond the end of a path, and in rows that are ignored or whose target is
    not a class.
    """
    n = target.shape[0]
    node, position = torch.empty(2, n, longest, device=target.device, dtype=torch.int32).unbind()
    levels = min(32, next_power_of_2(longest))
    _entries_of_targets[(cdiv(n, 32), cdiv(longest, levels))](
        target, *paths, node, position, n, longest, len(paths.start) - 1, n_inner,
        ignore_index or 0, IGNORES=ignore_index is not None, ROWS=32, LEVELS=levels,
    )  # fmt: skip
    return node, position


def losses_of(
    target: Tensor, log_probs: Tensor, n_classes: int, ignore_index: int | None
) -> Tensor:
    """Minus the sum of log-probabilities ``(n, path)``; 0 if ignored, NaN for an invalid target."""
    n, path = log_probs.shape
    losses = torch.empty(n, device=target.device, dtype=torch.float32)
    _losses_of_targets[(cdiv(n, 64),)](
        target, log_probs, losses, n, path, n_classes, ignore_index or 0,
        IGNORES=ignore_index is not None, ROWS=64, LEVELS=min(32, next_power_of_2(path)),
    )  # fmt: skip
    return losses


def log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, node: Tensor, position: Tensor,
    row_start: Tensor, sizes: TreeSizes,
) -> tuple[Tensor, Kept]:  # fmt: skip
    """As the reference, from int32 nodes and positions; also returns what backward needs."""
    (n, path), depth = node.shape, hidden.shape[1]
    plan = _make_plan(node.reshape(-1), row_start, sizes, n)
    n_groups = plan.groups.shape[1]
    hidden, weight = in_rows(hidden), in_rows(weight)
    scores = torch.empty(most_scores(n, sizes), device=hidden.device, dtype=torch.float32)
    made = torch.empty(n, path, device=hidden.device, dtype=torch.float32)
    lse = torch.empty(n * path, device=hidden.device, dtype=torch.float32)
    _scores_of_tiles[(len(plan.score_tiles),)](
        hidden, weight, bias, plan.entry, plan.groups, plan.ends, plan.score_tiles, scores,
        n_groups, path, depth, hidden.stride(0), weight.stride(0), ROWS=ROWS, CHILDREN=CHILDREN,
        DEPTH=SUMMED, BIASED=bias is not None, WIDE=_wide(hidden, weight), num_warps=4,
        num_stages=3,
    )  # fmt: skip
    block = min(1024, max(16, next_power_of_2(sizes.widest)))
    _log_probs_of_entries[(n * path,)](
        scores, position.reshape(-1), plan.entry, plan.group, plan.groups, plan.ends, made, lse,
        n_groups, BLOCK=block, num_warps=1 if block <= 256 else 4,
    )  # fmt: skip
    return made, Kept(plan, scores, lse)


def to_hidden(hidden: Tensor, weight: Tensor, position: Tensor, grad: Tensor, kept: Kept) -> Tensor:
    """The gradient of hidden ``(n, d)``.

    ``grad`` is the upstream gradient: ``(n, path)``, or ``(n,)`` if equal for all entries of a row.
    """
    (n, path), depth = position.shape, hidden.shape[1]
    plan, n_groups = kept.plan, kept.plan.groups.shape[1]
    weight, grad = in_rows(weight), grad.contiguous()
    made = torch.empty_like(hidden)
    # The entries of a row are in different groups, so each entry has its own gradient.
    step = max(HELD, MOST_PARTS // max(1, n * path) // HELD * HELD)
    for first in range(0, depth, step):
        last = min(depth, first + step)
        parts = grad.new_zeros(n, path, last - first, dtype=torch.float32)
        _gradient_of_rows[(len(plan.row_tiles), cdiv(last - first, HELD))](
            weight, kept.scores, position.reshape(-1), plan.entry, kept.lse, grad, plan.groups,
            plan.ends, plan.row_tiles, parts, n_groups, _shared(grad, path), first, last - first,
            last, weight.stride(0), ROWS=ROWS, CHILDREN=CHILDREN, DEPTH=HELD,
            WIDE=_wide(hidden, weight), num_warps=4, num_stages=2,
        )  # fmt: skip
        made[:, first:last] = parts.sum(1)
    return made


def to_children(
    hidden: Tensor, weight: Tensor, position: Tensor, grad: Tensor, kept: Kept, sparse: bool,
    to_weight: bool, to_bias: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """The rows of the gradients of weight and bias, and these gradients; empty if not wanted.

    The rows are None for all rows. With ``sparse`` they are the touched rows, ascending, whose
    number takes a host sync.
    """
    path, depth = position.shape[1], hidden.shape[1]
    plan, n_groups = kept.plan, kept.plan.groups.shape[1]
    hidden, grad = in_rows(hidden), grad.contiguous()
    rows = int(plan.ends[4, -1]) if sparse else weight.shape[0]
    new = weight.new_empty if sparse else weight.new_zeros
    weight_gradient = new(rows if to_weight else 0, depth)
    bias_gradient = new(rows if to_bias else 0)
    touched = torch.empty(rows, dtype=torch.int64, device=grad.device) if sparse else None
    # Row factors such as 1/n would underflow in float16, so they are scaled to 1, and back later.
    scale = grad.abs().amax().clamp_min(1e-30) if hidden.dtype == torch.float16 else None
    wide = _wide(hidden, weight)
    # float32 operands take twice the registers.
    held = HELD // 2 if wide else HELD
    blocks = cdiv(depth, held) if to_weight else 1
    _gradient_of_children[(len(plan.child_tiles), blocks)](
        hidden, kept.scores, position.reshape(-1), plan.entry, kept.lse, grad, plan.groups,
        plan.ends, plan.child_tiles, weight_gradient, bias_gradient, touched, scale, n_groups, path,
        _shared(grad, path), depth, hidden.stride(0), ROWS=ROWS, MANY=MANY, CHILDREN=CHILDREN,
        DEPTH=held, PACKED=sparse, TO_WEIGHT=to_weight, TO_BIAS=to_bias, SCALED=scale is not None,
        WIDE=wide, num_warps=4, num_stages=2,
    )  # fmt: skip
    return touched, weight_gradient, bias_gradient


def leaves(scores: Tensor, bias: Tensor | None, tree: LeafTables, made: Tensor) -> None:
    """As the reference, but writes to ``made``, from scores without bias; rows are contiguous.

    If classes have several paths, their probabilities are summed.
    """
    n, n_inner, classes = scores.shape[0], len(tree.row_start) - 1, made
    if not n:
        return
    biased, wide, ends = bias is not None, len(tree.wide_nodes) > 0, tree.class_start
    if ends is not None:
        n_paths = len(tree.child) - n_inner + 1
        made = torch.empty(n, n_paths, device=scores.device, dtype=torch.float32)
    reached = torch.empty(1 + wide, n, n_inner, device=scores.device, dtype=torch.float32)
    lse = reached[-1]
    for width, nodes in tree.wide_nodes:
        group = max(1, LEAVES_AT_A_TIME // width)
        _normalise_nodes[(n, cdiv(len(nodes), group))](
            scores, bias, nodes, tree.row_start, lse, len(nodes), scores.stride(0), n_inner,
            NODES=group, WIDTH=width, BIASED=biased, num_warps=4,
        )  # fmt: skip
    block = LEAVES_AT_A_TIME // LEAF_ROWS
    for first, last in tree.launches:
        low, high = tree.levels[first]
        # Programs of the same rows are adjacent, so that their scattered writes meet in the cache.
        parts = cdiv(high - low, block) if high - low >= MANY_EDGES else 1
        _reach_edges[(cdiv(n, LEAF_ROWS) * parts,)](
            scores, bias, tree.edge_node, tree.edge_row, tree.child, tree.level_start, reached, lse,
            made, n, scores.stride(0), n_inner, made.stride(0), first, last, parts, ROWS=LEAF_ROWS,
            BLOCK=block, WIDE=wide, BIASED=biased, num_warps=4,
        )  # fmt: skip
    if ends is not None:
        # The paths of a class are adjacent, like the children of a node.
        n_classes, group = classes.shape[1], LEAVES_AT_A_TIME // 16
        each = torch.arange(n_classes, device=scores.device, dtype=torch.int32)
        _normalise_nodes[(n, cdiv(n_classes, group))](
            made, None, each, ends, classes, n_classes, made.stride(0), classes.stride(0),
            NODES=group, WIDTH=16, BIASED=False, num_warps=4,
        )  # fmt: skip


def _shared(grad: Tensor, path: int) -> int:
    """Number of consecutive entries that share one upstream gradient."""
    return path if grad.dim() == 1 else 1


def _wide(hidden: Tensor, weight: Tensor) -> bool:
    """Whether products are in float32; they are not if both have the same half precision."""
    return hidden.dtype != weight.dtype or hidden.dtype == torch.float32


def _make_plan(node: Tensor, row_start: Tensor, sizes: TreeSizes, n: int) -> Plan:
    """The plan for the node of each entry, ``(m,)``, int32, ``n_inner`` for unused entries.

    ``row_start`` has the first row of the weight of each node, and the end; n is the number of rows
    of hidden states.
    """
    m, n_groups = node.shape[0], most_groups(node.shape[0], sizes)
    by_node, entry = sort_ids(node)
    fresh = torch.empty_like(by_node)
    _mark_first[(cdiv(m, _BLOCK),)](by_node, fresh, m, BLOCK=_BLOCK)
    group = torch.cumsum(fresh, 0, dtype=torch.int32)
    start = torch.empty(n_groups, dtype=torch.int32, device=node.device)
    _start_groups[(cdiv(m, _BLOCK),)](group, start, m, BLOCK=_BLOCK)
    groups, amounts = torch.empty(
        2, 5, n_groups, dtype=torch.int64, device=node.device
    ).unbind()  # fmt: skip
    _measure_groups[(cdiv(n_groups, _BLOCK),)](
        by_node, group, start, row_start, groups, amounts, m, n_groups, sizes.n_inner, ROWS=ROWS,
        CHILDREN=CHILDREN, BLOCK=_BLOCK,
    )  # fmt: skip
    ends = amounts.cumsum(1)
    most = most_tiles(m, n, sizes)
    tiles = torch.empty(sum(most), dtype=torch.int32, device=node.device)
    _list_tiles[(cdiv(max(most), _BLOCK), 3)](
        ends, tiles, n_groups, most[0], most[1], most[2], SEARCH=n_groups.bit_length(),
        BLOCK=_BLOCK,
    )  # fmt: skip
    return Plan(entry, group, groups, ends, *tiles.split(most))


@kernel
def _entries_of_targets(
    target, path_start, path_edge, edge_node, child_start, node, position, n, path, n_classes,
    n_inner, ignored, IGNORES: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Writes the nodes on the path of each target, and the child that is taken at each."""
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


@kernel
def _losses_of_targets(
    target, log_prob, losses, n, path, n_classes, ignored, IGNORES: tl.constexpr,
    ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Writes minus the sum of each row; 0 if it is ignored, NaN for an invalid target."""
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


@kernel
def _mark_first(by_node, fresh, m, BLOCK: tl.constexpr):
    """Writes 1 at the first entry of each group, 0 elsewhere."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < m
    here = tl.load(by_node + place, mask=live, other=0)
    before = tl.load(by_node + place - 1, mask=live & (place > 0), other=-1)
    tl.store(fresh + place, (here != before).to(tl.int32), mask=live)


@kernel
def _start_groups(group, start, m, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < m
    here = tl.load(group + place, mask=live, other=1)
    before = tl.load(group + place - 1, mask=live & (place > 0), other=0)
    tl.store(start + here - 1, place.to(tl.int32), mask=live & (here != before))


@kernel
def _measure_groups(
    by_node, group, start, row_start, groups, amounts, m, n_groups, n_inner, ROWS: tl.constexpr,
    CHILDREN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the fields of each group, and its amounts of work; 0 beyond the last group."""
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
    # Rows of scores are padded, so that they are aligned for vector loads.
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


@kernel
def _list_tiles(
    ends, tiles, n_groups, n_scores, n_rows, n_children, SEARCH: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the group of each tile to one of three lists; ``n_groups`` beyond the last tile."""
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


@triton.jit
def _fields(groups, group, n_groups):
    """The fields of a group in the plan."""
    start = tl.load(groups + group)
    size = tl.load(groups + n_groups + group)
    first_row = tl.load(groups + 2 * n_groups + group)
    width = tl.load(groups + 3 * n_groups + group)
    return start, size, first_row, width, tl.load(groups + 4 * n_groups + group)


@triton.jit
def _scores_of(groups, ends, group, n_groups):
    """The index of the first score of a group."""
    _, size, _, _, line = _fields(groups, group, n_groups)
    return tl.load(ends + 3 * n_groups + group) - size * line


@kernel
def _scores_of_tiles(
    hidden, weight, bias, entries, groups, ends, tiles, scores, n_groups, path, depth, hidden_row,
    weight_row, ROWS: tl.constexpr, CHILDREN: tl.constexpr, DEPTH: tl.constexpr,
    BIASED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Computes the scores of some rows of a group for some children of its node."""
    tile = tl.program_id(0)
    group = tl.load(tiles + tile)
    if group >= n_groups:
        return
    start, size, first_row, width, line = _fields(groups, group, n_groups)
    across = (width + CHILDREN - 1) // CHILDREN
    down = (size + ROWS - 1) // ROWS
    number = tile - (tl.load(ends + group) - across * down)
    first_member = number % down * ROWS
    first_child = number // down * CHILDREN
    member = tl.arange(0, ROWS)
    child = tl.arange(0, CHILDREN)
    asked = member < size - first_member
    there = child < width - first_child
    entry = tl.load(entries + start + first_member + member, mask=asked, other=0).to(tl.int32)
    states_of = hidden + (entry // path).to(tl.int64) * hidden_row
    vectors_of = weight + (first_row + first_child) * weight_row + child * weight_row
    total = tl.zeros((ROWS, CHILDREN), dtype=tl.float32)
    for first in range(0, depth, DEPTH):
        step = first + tl.arange(0, DEPTH)
        inside = step < depth
        states = tl.load(
            states_of[:, None] + step[None, :], mask=asked[:, None] & inside[None, :], other=0.0
        )
        vectors = tl.load(
            vectors_of[:, None] + step[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        if WIDE:
            states = states.to(tl.float32)
            vectors = vectors.to(tl.float32)
        total = tl.dot(states, tl.trans(vectors), total, input_precision="ieee")
    if BIASED:
        of_children = tl.load(bias + first_row + first_child + child, mask=there, other=0.0)
        total += of_children.to(tl.float32)[None, :]
    into = _scores_of(groups, ends, group, n_groups) + first_member * line + first_child
    tl.store(
        scores + into + member[:, None] * line.to(tl.int32) + child[None, :],
        total,
        mask=asked[:, None] & there[None, :],
    )


@kernel
def _log_probs_of_entries(
    scores, positions, entries, group_of, groups, ends, log_prob, lse, n_groups,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Log-probability of the child that each entry takes, and logsumexp of its node."""
    place = tl.program_id(0).to(tl.int64)
    group = tl.load(group_of + place) - 1
    entry = tl.load(entries + place)
    start, _, _, width, line = _fields(groups, group, n_groups)
    scores += _scores_of(groups, ends, group, n_groups) + (place - start) * line
    if width == 0:
        tl.store(log_prob + entry, 0.0)
        return
    # A binary node has one row of the weight, for its second child; the first has score 0.
    binary = width == 1
    column = tl.load(positions + entry).to(tl.int64) - binary.to(tl.int64)
    peak = tl.where(binary, 0.0, -float("inf"))
    for first in range(0, width, BLOCK):
        child = first + tl.arange(0, BLOCK)
        score = tl.load(scores + child, mask=child < width, other=-float("inf"))
        peak = tl.maximum(peak, tl.max(score, 0))
    # If all children are masked by a bias of -inf, 0 avoids a difference of infinities.
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        child = first + tl.arange(0, BLOCK)
        score = tl.load(scores + child, mask=child < width, other=-float("inf"))
        total += tl.exp(score - peak)
    rest = tl.log(tl.sum(total, 0) + tl.where(binary, tl.exp(-peak), 0.0))
    chosen = tl.load(scores + column, mask=column >= 0, other=0.0)
    tl.store(log_prob + entry, (chosen - peak) - rest)
    tl.store(lse + place, peak + rest)


@kernel
def _normalise_nodes(
    scores, bias, nodes, row_start, lse, n_nodes, stride, n_inner, NODES: tl.constexpr,
    WIDTH: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """The logsumexp of one row at some nodes; nodes wider than ``WIDTH`` take several steps."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * NODES + tl.arange(0, NODES)
    asked = place < n_nodes
    node = tl.load(nodes + place, mask=asked, other=0)
    start = tl.load(row_start + node, mask=asked, other=0)
    size = (tl.load(row_start + node + 1, mask=asked, other=0) - start).to(tl.int32)
    scores += row * stride
    peak = tl.full((NODES, WIDTH), -float("inf"), tl.float32)
    total = tl.zeros((NODES, WIDTH), tl.float32)
    for first in range(0, tl.max(size, 0), WIDTH):
        child = first + tl.arange(0, WIDTH)
        live = child[None, :] < size[:, None]
        column = start[:, None] + child[None, :]
        score = tl.load(scores + column, mask=live, other=-float("inf"))
        if BIASED:
            score += tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
        # One maximum and sum per lane; NaN and +inf reach the sum as NaN.
        grown = tl.maximum(peak, score)
        origin = tl.where(grown == -float("inf"), 0.0, grown)
        total = total * tl.exp(peak - origin) + tl.exp(score - origin)
        peak = grown
    top = tl.max(peak, 1)
    origin = tl.where(top == -float("inf"), 0.0, top)
    summed = tl.sum(total * tl.exp(peak - origin[:, None]), 1)
    tl.store(lse + row * n_inner + node, origin + tl.log(summed), mask=asked)


@kernel
def _reach_edges(
    scores, bias, edge_node, edge_row, child, level_start, reached, lse, made, n, stride, n_inner,
    line, first_level, last_level, parts, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Log-probabilities of the children of all edges of some levels, level by level."""
    row = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    own = (row < n)[:, None]
    scores += (row * stride)[:, None]
    reached += (row * n_inner)[:, None]
    lse += (row * n_inner)[:, None]
    made += (row * line)[:, None]
    for level in range(first_level, last_level):
        low = tl.load(level_start + level)
        high = tl.load(level_start + level + 1)
        for start in range(low + tl.program_id(0) % parts * BLOCK, high, parts * BLOCK):
            edge = start + tl.arange(0, BLOCK)
            there = edge < high
            if WIDE:
                node = tl.load(edge_node + edge, mask=there, other=0)
                # Four times the row of the weight, plus 1 or 2 for the children of a binary node.
                known = tl.load(edge_row + edge, mask=there, other=0)
                column = known >> 2
                kind = known & 3
            else:
                node = edge >> 1
                column = node
                kind = 1 + (edge & 1)
            live = own & there[None, :]
            score = tl.load(scores + column[None, :], mask=live, other=0.0)
            if BIASED:
                more = tl.load(bias + column, mask=there, other=0.0)
                score += more.to(tl.float32)[None, :]
            # The root has log-probability 0.
            above = tl.load(reached + node[None, :], mask=live & (node > 0)[None, :], other=0.0)
            signed = tl.where((kind == 1)[None, :], -score, score)
            given = tl.minimum(signed, 0.0) - log1p(tl.exp(-tl.abs(score)))
            if WIDE:
                wide = (kind == 0)[None, :]
                level_of = tl.load(lse + node[None, :], mask=live & wide, other=0.0)
                given = tl.where(wide, score - level_of, given)
            below = tl.load(child + edge, mask=there, other=0)
            inner = (below >= 0)[None, :]
            tl.store(made + (-1 - below)[None, :], above + given, mask=live & ~inner)
            tl.store(reached + below[None, :], above + given, mask=live & inner)
        # Other threads of this program read these results at the next level.
        tl.debug_barrier()


@triton.jit
def _slopes(scores, column, level, line, member, asked, child, first_child, there):
    """[child is taken] - its probability, (rows, children); 0 beyond rows and children."""
    score = tl.load(
        scores + member[:, None] * line + child[None, :],
        mask=asked[:, None] & there[None, :],
        other=-float("inf"),
    )
    taken = (child[None, :] == (column - first_child)[:, None]) & asked[:, None]
    return tl.where(taken, 1.0, 0.0) - tl.exp(score - level[:, None])


@triton.jit
def _columns(positions, entry, width, asked):
    """The row of the node's weight that each entry takes; negative for none."""
    binary = (width == 1).to(tl.int32)
    return tl.load(positions + entry, mask=asked, other=-1) - binary


@kernel
def _gradient_of_rows(
    weight, scores, positions, entries, lse, grad, groups, ends, tiles, parts, n_groups, shared,
    first_step, depth, last_step, weight_row, ROWS: tl.constexpr, CHILDREN: tl.constexpr,
    DEPTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of the hidden state of each entry, for some features, over all children."""
    tile = tl.program_id(0)
    group = tl.load(tiles + tile)
    if group >= n_groups:
        return
    start, size, first_row, width, line = _fields(groups, group, n_groups)
    width = width.to(tl.int32)
    number = tile - (tl.load(ends + n_groups + group) - (size + ROWS - 1) // ROWS)
    first_member = number * ROWS
    scores += _scores_of(groups, ends, group, n_groups) + first_member * line
    member = tl.arange(0, ROWS)
    asked = member < size - first_member
    place = start + first_member + member
    entry = tl.load(entries + place, mask=asked, other=0).to(tl.int32)
    column = _columns(positions, entry, width, asked)
    level = tl.load(lse + place, mask=asked, other=0.0)
    step = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    inside = first_step + step < last_step
    child = tl.arange(0, CHILDREN)
    weight += first_row * weight_row + first_step
    total = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
    for first in range(0, width, CHILDREN):
        there = child < width - first
        slope = _slopes(
            scores + first, column, level, line.to(tl.int32), member, asked, child, first, there
        )
        vectors = load_rows(weight, child, weight_row, step, 1, there, inside)
        if WIDE:
            vectors = vectors.to(tl.float32)
        weight += CHILDREN * weight_row
        total = tl.dot(slope.to(vectors.dtype), vectors, total, input_precision="ieee")
    # The upstream gradient is often too small for half precision, so it is multiplied here.
    total *= tl.load(grad + entry // shared, mask=asked, other=0.0).to(tl.float32)[:, None]
    tl.store(
        parts + (entry.to(tl.int64) * depth)[:, None] + step[None, :],
        total,
        mask=asked[:, None] & inside[None, :],
    )


@triton.jit
def _add_rows(
    total, summed, hidden, scores, positions, entries, lse, grad, first, size, start, line, width,
    child, first_child, there, step, inside, back, path, shared, hidden_row, ROWS: tl.constexpr,
    TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of some rows of a group to the gradient of some children."""
    member = tl.arange(0, ROWS)
    asked = member < size - first
    place = start + first + member
    entry = tl.load(entries + place, mask=asked, other=0).to(tl.int32)
    column = _columns(positions, entry, width, asked)
    level = tl.load(lse + place, mask=asked, other=0.0)
    slope = _slopes(
        scores + first * line + first_child, column, level, line.to(tl.int32), member, asked,
        child, first_child, there,
    )  # fmt: skip
    slope *= tl.load(grad + entry // shared, mask=asked, other=0.0).to(tl.float32)[:, None] / back
    if TO_BIAS:
        summed += tl.sum(slope, 0)
    if TO_WEIGHT:
        states_of = hidden + (entry // path).to(tl.int64) * hidden_row
        states = tl.load(
            states_of[:, None] + step[None, :], mask=asked[:, None] & inside[None, :], other=0.0
        )
        if WIDE:
            states = states.to(tl.float32)
        flipped = tl.trans(slope.to(states.dtype))
        total = tl.dot(flipped, states, total, input_precision="ieee")
    return total, summed


@kernel
def _gradient_of_children(
    hidden, scores, positions, entries, lse, grad, groups, ends, tiles, weight_gradient,
    bias_gradient, touched, scale, n_groups, path, shared, depth, hidden_row, ROWS: tl.constexpr,
    MANY: tl.constexpr, CHILDREN: tl.constexpr, DEPTH: tl.constexpr, PACKED: tl.constexpr,
    TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr, SCALED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of the vectors of some children, for some features, over all rows of a group.

    It processes ``MANY`` rows per step, and the remaining ones in steps of ``ROWS``. The root has
    thousands of rows, but most groups have fewer than ``MANY``.
    """
    tile = tl.program_id(0)
    group = tl.load(tiles + tile)
    if group >= n_groups:
        return
    start, size, first_row, width, line = _fields(groups, group, n_groups)
    scores += _scores_of(groups, ends, group, n_groups)
    across = (width + CHILDREN - 1) // CHILDREN
    number = tile - (tl.load(ends + 2 * n_groups + group) - across)
    first_child = (number * CHILDREN).to(tl.int32)
    child = tl.arange(0, CHILDREN)
    there = child < width - first_child
    step = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    inside = step < depth
    back = 1.0
    if SCALED:
        back = tl.load(scale)
    total = tl.zeros((CHILDREN, DEPTH), dtype=tl.float32)
    summed = tl.zeros((CHILDREN,), dtype=tl.float32)
    whole = size // MANY * MANY
    for first in range(0, whole, MANY):
        total, summed = _add_rows(
            total, summed, hidden, scores, positions, entries, lse, grad, first, size, start,
            line, width, child, first_child, there, step, inside, back, path, shared, hidden_row,
            MANY, TO_WEIGHT, TO_BIAS, WIDE,
        )  # fmt: skip
    for first in range(whole, size, ROWS):
        total, summed = _add_rows(
            total, summed, hidden, scores, positions, entries, lse, grad, first, size, start,
            line, width, child, first_child, there, step, inside, back, path, shared, hidden_row,
            ROWS, TO_WEIGHT, TO_BIAS, WIDE,
        )  # fmt: skip
    into = first_row + first_child
    if PACKED:
        into = tl.load(ends + 4 * n_groups + group) - width + first_child
    if TO_WEIGHT:
        tl.store(
            weight_gradient + into * depth + child[:, None] * depth + step[None, :],
            (total * back).to(weight_gradient.dtype.element_ty),
            mask=there[:, None] & inside[None, :],
        )
    if tl.program_id(1) == 0:
        if PACKED:
            tl.store(touched + into + child, first_row + first_child + child, mask=there)
        if TO_BIAS:
            tl.store(
                bias_gradient + into + child,
                (summed * back).to(bias_gradient.dtype.element_ty),
                mask=there,
            )
