"""The engines of losses along paths through a tree of classes.

If every class is one path of binary nodes, :func:`path_loss` uses a dedicated kernel: forward saves
the score gradient of every node on a path, σ(score) - taken, and the gradient of hidden. Backward
only scales both by the upstream gradient, and reads no node vectors.

At wider nodes a row is scored against all children of each node on its path. Rows at the same node
form a group with one matrix product. CUDA computes all groups in one launch. On a CPU one kernel
computes all small groups, and the others follow one by one.
"""

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from lastlayer._torch import (
    accumulation_dtype,
    as_numpy,
    host_sync_allowed,
    is_eager,
    is_functorch_wrapped,
    without_autocast,
)
from lastlayer.fused.function import Call, Engine, Grads, Result, fused_loss
from lastlayer.fused.recompute import in_chunks
from lastlayer.kernels import selected, touched_rows, tree_path
from lastlayer.kernels.node_groups import (
    WIDTHS,
    LeafTables,
    Plan,
    TreeSizes,
    leaf_launches,
    most_groups,
    most_scores,
    most_tiles,
)
from lastlayer.trees import Tree

# On CUDA up to this many scores are kept until backward; with more, backward recomputes them in
# chunks of rows.
_HELD_SCORES = 1 << 28
# On a CPU, groups with fewer multiplications than this go to the kernel for small groups: calling
# torch's product would take longer than the product itself.
_KERNEL_MULTIPLICATIONS = 500_000


class TreeTables:
    """A tree as index tensors. They are derived from the tree, so the state dict omits them.

    An *edge* is an entry of ``tree.child``: a node and one of its children. Edges are numbered
    level by level, as nodes are, so that a level is a range of edges. A binary node has one *row*
    of the weight, the logit of its second child; a wider node has one row per child.
    """

    # Per path: where its edges start in path_edge, (n_paths + 1,); all these edges; its last edge,
    # its class, and its leaf's place from left to right.
    path_start: Tensor
    path_edge: Tensor
    path_end: Tensor
    path_class: Tensor
    leaf_rank: Tensor
    # Per class: its first path, (n_classes + 1,).
    class_start: Tensor
    # Per node: its first edge, (n_inner + 1,), and its first row, (n_inner + 1,).
    child_start: Tensor
    row_start: Tensor
    # Nodes by their number of children; and per level its first edge, (levels + 1,).
    nodes_by_width: Tensor
    level_start: Tensor
    # Per edge: its node; four times its row, and 1 or 2 for a child of a binary node, empty if all
    # nodes are binary; what it leads to; the same with ~p at the end of path p, empty if the same;
    # the edge above it, counted from the first one of that level; and its place where edges are
    # sorted by the arity of their node, empty if the same.
    edge_node: Tensor
    edge_row: Tensor
    child: Tensor
    path_child: Tensor
    edge_above: Tensor
    edge_slot: Tensor

    def __init__(self, tree: Tree, device: torch.device | str | None = None) -> None:
        n_inner, start, arity = tree.n_inner, tree.child_start, np.diff(tree.child_start)
        owner = np.repeat(np.arange(n_inner), arity)
        widths = np.where(arity == 2, 1, arity)
        row_start = np.concatenate([[0], np.cumsum(widths)])
        self.n_classes, self.n_inner, self.n_edges = tree.n_classes, n_inner, len(tree.child)
        self.n_rows, self.widest, self.overlaps = int(row_start[-1]), tree.max_arity, tree.overlaps
        self.has_binary, self.has_wide = bool((arity == 2).any()), bool((arity > 2).any())
        # Whether every class is one path of binary nodes, for which there is a kernel.
        self.binary_paths = tree.is_binary and not tree.overlaps and n_inner > 0
        self.longest = int(np.diff(tree.path_start).max())
        self.most_paths = int(np.diff(tree.class_start).max())
        # The most rows on one path, those of each node rounded up to 4.
        self.most_scores = 0
        if self.has_wide:
            padded = (-(-widths // 4) * 4)[tree.path_node]
            self.most_scores = int(np.add.reduceat(padded, tree.path_start[:-1]).max())
        # First and last edge of each level, and how many nodes it has.
        first_nodes = np.flatnonzero(np.diff(tree.node_depth, prepend=-1))
        bounds = [*start[first_nodes].tolist(), self.n_edges]
        self.levels, self.level_sizes = list(pairwise(bounds)), np.diff(first_nodes, append=n_inner)
        self._most_touched = 0, 0

        above = np.full(n_inner, -1, np.int64)
        above[1:] = start[tree.parent[1:]] + tree.position[1:]
        above[1:] -= np.asarray(bounds[:-1], np.int64)[tree.node_depth[1:] - 1]
        path_edge = start[tree.path_node] + tree.path_position
        ends = path_edge[tree.path_start[1:] - 1] if n_inner else np.zeros(0, np.int64)

        def keep(name: str, values: NDArray[np.generic], dtype: torch.dtype) -> None:
            tensor = torch.tensor(np.ascontiguousarray(values), dtype=dtype, device=device)
            setattr(self, name, tensor)

        keep("path_start", tree.path_start, torch.int64)
        keep("path_edge", path_edge, torch.int32)
        keep("path_end", ends, torch.int32)
        keep("path_class", tree.path_class, torch.int64)
        keep("leaf_rank", tree.leaf_rank, torch.int32)
        keep("class_start", tree.class_start, torch.int64)
        keep("child_start", start, torch.int64)
        keep("row_start", row_start, torch.int64)
        by_width = np.argsort(arity, kind="stable")
        cuts = np.searchsorted(arity[by_width], (2, *WIDTHS[:-1], self.widest), "right").tolist()
        for i, wider in enumerate(WIDTHS[1:]):
            # A few narrow nodes are padded to the next width: that is cheaper than another launch.
            if cuts[i + 1] < cuts[i + 2] and (cuts[i + 1] - cuts[i]) * wider <= self.n_rows:
                cuts[i + 1] = cuts[i]
        self._width_cuts, self._launches = cuts, leaf_launches(self.levels)
        keep("nodes_by_width", by_width, torch.int32)
        keep("level_start", np.asarray(bounds), torch.int32)
        keep("edge_node", owner, torch.int32)
        position = np.arange(self.n_edges) - start[owner]
        edge_row = 4 * row_start[owner]
        edge_row += np.where(arity[owner] == 2, 1 + position, 4 * position)
        keep("edge_row", edge_row if self.has_wide else edge_row[:0], torch.int32)
        keep("child", tree.child, torch.int32)
        to_path = tree.child.copy()
        to_path[ends] = ~np.arange(len(ends))
        keep("path_child", to_path if self.overlaps else to_path[:0], torch.int32)
        keep("edge_above", above[owner], torch.int32)
        self.arities, slots, n = np.unique(arity).tolist(), np.empty(self.n_edges, np.int64), 0
        for each in self.arities:
            nodes = np.flatnonzero(arity == each)
            rows = row_start[nodes][:, None] + np.arange(1 if each == 2 else each)
            keep(f"rows_of_{each}", rows.ravel(), torch.int32)
            edges = (start[nodes][:, None] + np.arange(each)).ravel()
            slots[edges] = n + np.arange(edges.size)
            n += edges.size
        keep("edge_slot", slots if len(self.arities) > 1 else slots[:0], torch.int32)

    def part(self, first: int, last: int) -> "TreeTables":
        """The tables of nodes ``first`` to ``last - 1``, with paths cut to these nodes; for losses.

        Nodes, edges and rows are numbered from the start of the part. In a tree with overlap, where
        a class has several paths, the classes of the part are these paths.
        """
        made = copy.copy(self)
        start, rows = (as_numpy(each.cpu()) for each in (self.child_start, self.row_start))
        edges, device = slice(int(start[first]), int(start[last])), self.path_start.device
        widths = np.diff(start[first : last + 1])
        taken, path_start = (as_numpy(each.cpu()) for each in (self.path_edge, self.path_start))
        inside = (taken >= edges.start) & (taken < edges.stop)
        before = np.concatenate([[0], np.cumsum(inside)])[path_start]
        lengths = np.diff(before)
        made.n_inner, made.n_edges = last - first, edges.stop - edges.start
        made.n_rows = int(rows[last] - rows[first])
        made.widest = int(widths.max(initial=0))
        made.longest = max(1, int(lengths.max(initial=0)))
        made.has_binary, made.has_wide = bool((widths == 2).any()), bool((widths > 2).any())
        made._most_touched = 0, 0
        made.path_start = torch.from_numpy(before).to(device)
        made.path_edge = torch.from_numpy(taken[inside] - edges.start).int().to(device)
        made.child_start = self.child_start[first : last + 1] - edges.start
        made.row_start = self.row_start[first : last + 1] - rows[first].item()
        made.edge_node = self.edge_node[edges] - first
        made.binary_paths = not self.has_wide and made.n_inner > 0
        if not made.has_wide:
            # All nodes are binary: the node is the edge number divided by two.
            made.edge_row = self.edge_row[:0]
        if self.overlaps:
            made.overlaps, made.most_paths, made.n_classes = False, 1, len(self.path_class)
            made.path_class = torch.arange(made.n_classes, device=device)
            made.class_start = torch.arange(made.n_classes + 1, device=device)
            made.path_child = self.path_child[:0]
        return made

    def rows_of_arity(self, arity: int) -> Tensor:
        """The rows of all nodes with so many children, node by node."""
        rows: Tensor = getattr(self, f"rows_of_{arity}")
        return rows

    def edges_of(
        self, classes: Tensor, counted: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Edges on the paths of ``classes`` ``(n, k)``, and a mask that is False for padding.

        Both are ``(n, k, paths, length)``; padding is edge 0. The third result is the mask of
        existing paths, ``(n, k, paths)``; None if every class has one path. Rows with
        ``counted`` ``(n,)`` False have no edges.
        """
        paths, there = classes.unsqueeze(-1), None
        if self.overlaps:
            first = self.class_start[classes].unsqueeze(-1)
            n = self.class_start[classes + 1].unsqueeze(-1) - first
            steps = torch.arange(_max_or_bound(n, self.most_paths), device=classes.device)
            there = steps < n
            paths = torch.where(there, first + steps, 0)
        asked = None if counted is None else counted[:, None, None]
        if there is not None:
            asked = there if asked is None else asked & there
        first = self.path_start[paths].unsqueeze(-1)
        n = self.path_start[paths + 1].unsqueeze(-1) - first
        if asked is not None:
            n = torch.where(asked.unsqueeze(-1), n, 0)
        steps = torch.arange(_max_or_bound(n, self.longest), device=paths.device)
        inside = steps < n
        return self.path_edge[torch.where(inside, first + steps, 0)].long(), inside, there

    def node_and_position(self, edges: Tensor) -> tuple[Tensor, Tensor]:
        """The node of each edge, and which of its children the edge leads to."""
        if not self.has_wide:
            return edges >> 1, edges & 1
        node = self.edge_node[edges].long()
        return node, edges - self.child_start[node]

    @property
    def path_rows(self) -> int:
        """An upper bound for the rows of the weight on one path."""
        return self.most_scores if self.has_wide else self.longest

    def for_leaves(self) -> LeafTables:
        """The tables for the CUDA kernels that compute leaf probabilities from scores."""
        wide = [
            (width, self.nodes_by_width[first:last])
            for width, (first, last) in zip(WIDTHS, pairwise(self._width_cuts), strict=True)
            if first < last
        ]
        child, class_start = self.child, None
        if self.overlaps:
            child, class_start = self.path_child, self.class_start
        return LeafTables(
            self.row_start, self.edge_node, self.edge_row, child, class_start, self.level_start,
            self.levels, self._launches, wide,
        )  # fmt: skip

    def most_touched(self, n: int) -> int:
        """The maximum number of distinct nodes on the paths of ``n`` rows."""
        known = self._most_touched
        if known[0] != n:
            known = self._most_touched = n, int(np.minimum(self.level_sizes, n).sum())
        return known[1]

    def sizes(self, paths: int) -> TreeSizes:
        """Bounds for the workspace of the group kernel, with ``paths`` paths per row."""
        return TreeSizes(self.n_inner, self.n_rows, self.widest, self.most_scores, paths)


def _max_or_bound(n: Tensor, bound: int) -> int:
    """The largest element of ``n``, or ``bound`` if reading it would need a host sync."""
    if n.device.type != "cpu" or torch.compiler.is_compiling() or is_functorch_wrapped(n):
        return bound
    return int(n.max()) if n.numel() else 0


def reduced(
    losses: Tensor, target: Tensor, ignore_index: int | None, reduction: str
) -> tuple[Tensor, Tensor | None]:
    """The reduced loss, given losses of 0 for ignored rows, and the divisor of a mean."""
    if reduction == "none":
        return losses, None
    total = losses.sum()
    if reduction == "sum":
        return total, None
    if ignore_index is None:
        counted = losses.new_full((), max(1, losses.shape[0]))
    elif target.device.type == "cpu" and is_eager(target):
        counted = losses.new_full((), max(1, _count(target, ignore_index)))
    else:
        counted = (target != ignore_index).sum(dtype=losses.dtype).clamp(min=1.0)
    return total / counted, counted


def _count(target: Tensor, ignore_index: int | None) -> int:
    """The number of targets on a CPU that are not ignored.

    By numpy, which takes less host time than three torch operations.
    """
    if ignore_index is None:
        return target.shape[0]
    return int((as_numpy(target) != ignore_index).sum())


class _PathEngine(Engine):
    """Operands: hidden, weight, bias; target, leaf_rank, path_start, path_edge, level_start.

    ``dtype`` and ``n_nodes`` are those of the weight. ``room`` asks for row-sparse gradients: it is
    the number of rows to allocate, or -1 to allocate exactly the rows that have a gradient.
    ``level_start`` may be None without ``room``.
    """

    name = "path_loss"
    schema = "int? ignore_index, int longest, ScalarType dtype, int n_nodes, int? room"
    n_constants = 5
    kept = (0, 3, 5, 6, 7)
    recomputes_unreduced = False
    what = "the loss of a binary tree"
    instead = "head.log_prob(hidden, classes), which has them"

    def compute(self, call: Call) -> Result:
        operands, (ignore_index, longest, *_), reduction, wanted, _ = call
        to_nodes, mean = wanted[1] or wanted[2], reduction == "mean"
        with without_autocast(operands[0]):
            losses, order, slopes, rows = tree_path.loss(
                "auto", *operands[:7], ignore_index, longest, to_nodes, wanted[0], mean
            )
            loss = losses if reduction == "none" else losses.sum()
        return Result(loss, (rows, slopes, order))

    def fake(self, call: Call) -> Result:
        (hidden, _, _, target, *_), options, reduction, wanted, _ = call
        dtype, (n, d) = accumulation_dtype(hidden.dtype), hidden.shape
        m = n if wanted[1] or wanted[2] else 0
        loss = hidden.new_empty((n,) if reduction == "none" else (), dtype=dtype)
        rows = hidden.new_empty(n if wanted[0] else 0, d, dtype=dtype)
        slopes = hidden.new_empty(m, options[1], dtype=dtype)
        return Result(loss, (rows, slopes, target.new_empty(m)))

    def finish(self, call: Call, pieces: Sequence[Any], factor: Any, reusable: bool) -> Grads:
        hidden, _, _, target, _, path_start, path_edge, level_start = call.operands
        ignore_index, _, dtype, n_nodes, room = call.options
        to_hidden, to_weight, to_bias = call.wanted
        rows, slopes, order = pieces
        by_row = factor.dim() > 0
        if by_row and ignore_index is not None:
            factor = torch.where(target == ignore_index, 0.0, factor)
        of_hidden = weight = bias = None
        sparse = (to_weight or to_bias) and room is not None and not torch.compiler.is_compiling()
        # On a GPU the kernel for sparse gradients scales the gradient of hidden, too.
        scales = to_hidden and sparse and room >= 0
        if to_hidden and not scales:
            scale = factor.unsqueeze(-1) if by_row else factor
            if rows.dtype != hidden.dtype:
                of_hidden = torch.empty(rows.shape, dtype=hidden.dtype, device=rows.device)
                torch.mul(rows, scale, out=of_hidden)
            else:
                of_hidden = rows.mul_(scale) if reusable else rows * scale
        summed = slopes, factor, hidden, target, order, path_start, path_edge
        gradients = dtype, to_weight, to_bias
        if sparse:
            most = None if room < 0 else room
            touched, weight, bias, scaled = tree_path.to_touched_nodes(
                "auto", *summed, level_start, ignore_index, *gradients, most,
                rows if scales else None,
            )  # fmt: skip
            shape, once = (n_nodes, hidden.shape[1]), most is None
            weight = _row_sparse(touched, weight, shape, once) if to_weight else None
            bias = _row_sparse(touched, bias, shape[:1], once) if to_bias else None
            of_hidden = scaled if scales else of_hidden
        elif to_weight or to_bias:
            weight, bias = tree_path.to_nodes("auto", *summed, ignore_index, n_nodes, *gradients)
        return [of_hidden, weight if to_weight else None, bias if to_bias else None]


_PATHS = _PathEngine()


def path_loss(
    tables: TreeTables,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    ignore_index: int | None,
    reduction: str,
    sparse: bool,
) -> Tensor:
    """The negative log-likelihood of checked targets ``(n,)``; requires ``tables.binary_paths``.

    ``hidden`` is ``(n, d)``, ``weight`` ``(n_nodes, d)``. With ``sparse`` the gradients of weight
    and bias contain only the nodes on the targets' paths. On a GPU they are allocated for the
    maximum number of nodes, and are not coalesced.
    """
    room = None
    if sparse:
        # On a GPU an upper bound: for each level its number of nodes, or the number of rows.
        room = -1 if hidden.device.type == "cpu" else tables.most_touched(hidden.shape[0])
    options = ignore_index, tables.longest, weight.dtype, tables.n_inner, room
    levels = tables.level_start if sparse else None
    tree = tables.leaf_rank, tables.path_start, tables.path_edge, levels
    return fused_loss(_PATHS, (hidden, weight, bias, target, *tree), options, reduction)[0]


class _GroupEngine(Engine):
    """Child log-probabilities at nodes of any arity on CUDA, grouped by node.

    Operands: rows, weight, bias; node, position, row_start; target, path_start, path_edge,
    edge_node, child_start. If ``node`` and ``position`` are given, ``(n, m)``, the result is
    log-probabilities ``(n, m)``; a node of ``n_inner`` is padding. If ``target`` is given, the
    result is the reduced loss of its paths in a tree without overlap.
    """

    name = "node_groups"
    schema = "int[] sizes, int longest, int n_classes, int? ignore_index, bool sparse"
    n_constants = 8
    kept = (0, 1)
    recomputes_unreduced = False
    what = "a path through wide nodes"
    instead = "head.log_prob(hidden), of all classes, which has them"

    def compute(self, call: Call) -> Result:
        from lastlayer.kernels.node_groups import triton as kernel

        rows, weight, bias, node, position, row_start, target, *paths = call.operands
        sizes, longest, n_classes, ignore_index, _ = call.options
        if target is not None:
            target, tree = target.contiguous(), kernel.Paths(*paths)
            node, position = kernel.entries_of(target, tree, longest, sizes[0], ignore_index)
        node, position = node.to(torch.int32), position.to(torch.int32)
        made, kept = kernel.log_probs(
            rows, weight, bias, node, position, row_start, TreeSizes(*sizes)
        )
        counted = None
        if target is not None:
            losses = kernel.losses_of(target, made, n_classes, ignore_index)
            made, counted = reduced(losses, target, ignore_index, call.reduction)
        return Result(made, (counted, position, kept.scores, kept.lse, *kept.plan))

    def fake(self, call: Call) -> Result:
        rows, _, _, node, _, row_start, target, *_ = call.operands
        (sizes, longest, *_), reduction = call.options, call.reduction
        n, path = rows.shape[0], longest if node is None else node.shape[1]
        shape = (n, path) if target is None else (n,) if reduction == "none" else ()
        made, m, bounds = rows.new_empty(shape, dtype=torch.float32), n * path, TreeSizes(*sizes)
        mean = target is not None and reduction == "mean"
        groups, small = row_start.new_empty(5, most_groups(m, bounds)), torch.int32
        return Result(made, (
            made.new_empty(()) if mean else None,
            row_start.new_empty(n, path, dtype=small),
            made.new_empty(most_scores(n, bounds)),
            made.new_empty(m),
            row_start.new_empty(m),
            row_start.new_empty(m, dtype=small),
            groups,
            groups.clone(),
            *(row_start.new_empty(most, dtype=small) for most in most_tiles(m, n, bounds)),
        ))  # fmt: skip

    def finish(self, call: Call, pieces: Sequence[Any], factor: Any, reusable: bool) -> Grads:
        del reusable
        (rows, weight), (counted, *kept), needed = call.operands[:2], pieces, call.wanted
        sparse = call.options[-1] and not torch.compiler.is_compiling() and host_sync_allowed(rows)
        factor = _per_loss(factor, counted)
        if factor.dim() < 2:
            # Losses are negative log-probabilities.
            factor = (-factor).expand(rows.shape[0])
        run = _group_gradients if is_eager(rows) else _group_gradients_operation
        *made, touched = run(rows, weight, factor, kept, sparse, needed)
        return _as_needed(made, touched if sparse else None, weight.shape, needed)


def _group_gradients(
    rows: Tensor,
    weight: Tensor,
    grad: Tensor,
    kept: Sequence[Tensor],
    sparse: bool,
    needed: Sequence[bool],
) -> list[Tensor]:
    """Gradients of rows, weight and bias, and row ids if ``sparse``; empty if not needed."""
    from lastlayer.kernels.node_groups import triton as kernel

    position, scores, lse, *plan = kept
    given = position, grad, kernel.Kept(Plan(*plan), scores, lse)
    empty = rows.new_empty(0)
    of_rows, touched, of_weight, of_bias = empty, None, empty.clone(), empty.clone()
    if needed[0]:
        of_rows = kernel.to_hidden(rows, weight, *given)
    if needed[1] or needed[2]:
        touched, of_weight, of_bias = kernel.to_children(rows, weight, *given, sparse, *needed[1:])
    return [of_rows, of_weight, of_bias, empty.clone() if touched is None else touched]


# A registered operation, so that the backward graph of torch.compile has one node, too.
_group_gradients_operation = torch.library.custom_op(
    "lastlayer::node_groups_gradients", mutates_args=()
)(_group_gradients)


@_group_gradients_operation.register_fake
def _(rows: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    needed = rest[-1]
    return [
        rows.new_empty(rows.shape if needed[0] else 0),
        weight.new_empty(weight.shape if needed[1] else 0),
        weight.new_empty(weight.shape[0] if needed[2] else 0),
        rows.new_empty(0),
    ]


class _OneByOneEngine(_GroupEngine):
    """The same with one product per node; on a CPU one kernel computes all small groups.

    Without that kernel, nodes must have more than two children. Losses of targets need it.
    """

    name = "nodes_one_by_one"
    kept = (0, 1)
    recomputes_unreduced = True

    def compute(self, call: Call) -> Result:
        (rows, weight, bias, node, position, row_start), options = call.operands[:6], call.options
        (n_inner, *_), _, _, ignore_index, sparse = options
        target, *paths = call.operands[6:]
        upstream, scale = call.upstream, 1.0
        if target is not None:
            node, position = _entries_of(target, paths, n_inner, ignore_index)
            if call.reduction == "mean":
                scale = 1.0 / max(1, _count(target, ignore_index))
            if upstream is None and call.makes_gradients:
                upstream = rows.new_full((), -scale).expand(node.shape)
            elif upstream is not None:
                upstream = -upstream.unsqueeze(-1).expand(node.shape)
        groups, position = groups_of(row_start, node.reshape(-1)), position.reshape(-1)
        with without_autocast(rows):
            made, pieces = _one_by_one(
                rows, weight, bias, groups, position, node.shape, upstream, call.wanted, sparse
            )
        if target is not None:
            made = made.sum(-1).neg_()
            made = made if call.reduction == "none" else made.sum() * scale
        return Result(made, pieces)

    def fake(self, call: Call) -> Result:
        made = call.operands[0].new_empty(call.operands[3].shape)
        if call.upstream is None:
            return Result(made)
        pairs = zip(call.operands[:3], call.wanted, strict=True)
        of_each = [torch.empty_like(each) if needed else None for each, needed in pairs]
        return Result(made, (*of_each, None))

    def finish(
        self, call: Call, pieces: Sequence[Any], factor: Tensor | None, reusable: bool
    ) -> Grads:
        *made, touched = pieces
        if factor is not None:
            made = Engine.finish(self, call, made, factor, reusable)
        sparse = call.options[-1]
        return _as_needed(made, touched if sparse else None, call.operands[1].shape, call.wanted)


def _entries_of(
    target: Tensor, paths: Sequence[Tensor], n_inner: int, ignore_index: int | None
) -> tuple[Tensor, Tensor]:
    """The nodes on the path of each target and the children taken, ``(n, longest path)``, on a CPU.

    ``paths`` are the tables path_start, path_edge, edge_node and child_start. Nodes are ``n_inner``
    beyond the end of a path, and in ignored rows. By numpy, which for few rows takes a third of
    torch's host time.
    """
    known, (start, path_edge, edge_node, child_start) = as_numpy(target), map(as_numpy, paths)
    counted = None if ignore_index is None else known != ignore_index
    known = known if counted is None else np.where(counted, known, 0)
    first = start[known]
    lengths = start[known + 1] - first
    if counted is not None:
        lengths *= counted
    steps = np.arange(lengths.max(initial=0))
    inside = steps < lengths[:, None]
    edge = path_edge[np.where(inside, first[:, None] + steps, 0)]
    node = edge_node[edge].astype(np.int64)
    position = edge - child_start[node]
    node[~inside] = n_inner
    return torch.from_numpy(node), torch.from_numpy(position)


def _one_by_one(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: "Groups",
    position: Tensor,
    shape: torch.Size,
    upstream: Tensor | None,
    wanted: Sequence[bool],
    sparse: bool,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Log-probabilities of the given shape, 0 for entries in no group.

    If ``upstream``, of that shape, is given, also the gradients of rows, weight and bias for it,
    and the rows of the latter two if they are ``sparse``.
    """
    m, d = shape[1], rows.shape[1]
    few = groups.entries() * groups.width * d < _KERNEL_MULTIPLICATIONS
    few = few | (groups.width == 1) if kernel_suits(rows, weight) else few & False
    small, large = groups.some(few), [*groups.some(~few).blocks()]
    made = rows.new_zeros(shape)
    if upstream is None:
        if len(small.row):
            from lastlayer.kernels.node_groups import cpu as kernel

            kernel.choose(rows, weight, bias, *small, position, made)
        for block, entries in large:
            scores = block_scores(weight, bias, rows[entries // m], block)
            chosen = position[entries].unsqueeze(-1)
            made.view(-1)[entries] = torch.log_softmax(scores, -1).gather(-1, chosen).squeeze(-1)
        return made, ()
    upstream, place, at = upstream.reshape(-1), groups.row, None
    if sparse:
        place = np.cumsum(groups.width) - groups.width
        steps = np.repeat(groups.row - place, groups.width)
        at = torch.from_numpy(steps + np.arange(len(steps))).to(rows.device)
    of_weight, of_bias = (
        None if not need or each is None else torch.zeros_like(each) if at is None
        else each.new_empty(len(at), *each.shape[1:])
        for each, need in zip((weight, bias), wanted[1:], strict=True)
    )  # fmt: skip
    of_rows = torch.zeros_like(rows) if wanted[0] else None
    if len(small.row):
        from lastlayer.kernels.node_groups import cpu as kernel

        # The entries of a row are in different groups, so each writes to its own buffer.
        parts = rows.new_zeros(*shape, d) if wanted[0] else None
        kernel.gradients(
            rows, weight, bias, *small, position, made, upstream, place[few], parts, of_weight,
            of_bias,
        )  # fmt: skip
        of_rows = None if parts is None else parts.sum(1)
    for (block, entries), first in zip(large, place[~few].tolist(), strict=True):
        mine, chosen = entries // m, position[entries].unsqueeze(-1)
        hidden, factor = rows[mine], upstream[entries].unsqueeze(-1)
        log_probs = torch.log_softmax(block_scores(weight, bias, hidden, block), -1)
        made.view(-1)[entries] = log_probs.gather(-1, chosen).squeeze(-1)
        slopes = log_probs.exp_().mul_(-factor).scatter_add_(-1, chosen, factor)
        if of_rows is not None:
            of_rows.index_add_(0, mine, slopes @ weight[block].to(rows.dtype))
        here = slice(first, first + slopes.shape[1])
        if of_weight is not None:
            of_weight[here] = slopes.t() @ hidden
        if of_bias is not None:
            of_bias[here] = slopes.sum(0)
    return made, (of_rows, of_weight, of_bias, at)


_GROUPS, _ONE_BY_ONE = _GroupEngine(), _OneByOneEngine()


def kernel_suits(rows: Tensor, weight: Tensor) -> bool:
    """Whether the CPU kernel for small groups supports these tensors: float32 or float64."""
    known = rows.device.type == "cpu" and rows.dtype == weight.dtype and is_eager(rows)
    return known and selected("tree_path_loss", "cpu", rows.dtype) == "cpu"


def groups_suit(tables: TreeTables, rows: Tensor) -> bool:
    """Whether the CUDA kernel for wide nodes supports these tensors; it has no float64."""
    return tables.has_wide and selected("tree_path_loss", rows.device.type, rows.dtype) == "triton"


def node_log_probs(
    tables: TreeTables,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    node: Tensor,
    position: Tensor,
    *,
    paths: int,
    sparse: bool,
) -> Tensor:
    """Log-probabilities of the children ``position`` of ``node``; differentiable once.

    Both are ``(n, m)``; a node of ``n_inner`` is padding, with a result of 0. ``rows``, at least
    one, are float32 or float64, or of any dtype if :func:`groups_suit`. Nodes have more than two
    children, or any number if :func:`groups_suit` or :func:`kernel_suits`. The nodes of each row
    are on ``paths`` paths.
    """
    engine = _GROUPS if groups_suit(tables, rows) else _ONE_BY_ONE
    operands = rows, weight, bias, node, position, tables.row_start, *(None,) * 5
    options = list(tables.sizes(paths)), node.shape[1], tables.n_classes, None, sparse
    return fused_loss(engine, operands, options, "none")[0]


def group_loss(
    tables: TreeTables,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    ignore_index: int | None,
    reduction: str,
    sparse: bool,
) -> Tensor:
    """:func:`path_loss` for wide nodes; needs a row and no overlap.

    ``rows`` are as :func:`groups_suit` or :func:`kernel_suits` requires.
    """
    grouped = groups_suit(tables, rows)
    engine = _GROUPS if grouped else _ONE_BY_ONE
    tree = tables.path_start, tables.path_edge, tables.edge_node, tables.child_start
    sizes = tables.sizes(1)

    def loss(
        rows: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None, reduction: str = "none"
    ) -> Tensor:
        operands = rows, weight, bias, None, None, tables.row_start, target, *tree
        options = list(sizes), tables.longest, tables.n_classes, ignore_index, sparse
        return fused_loss(engine, operands, options, reduction)[0]

    n, step = rows.shape[0], max(1, _HELD_SCORES // most_scores(1, sizes))
    if n <= step or not grouped:
        return loss(rows, target, weight, bias, reduction)
    chunks = [slice(first, min(n, first + step)) for first in range(0, n, step)]
    losses = in_chunks(loss, rows, [target], [weight, bias], chunks)
    return reduced(losses, target, ignore_index, reduction)[0]


class Groups(NamedTuple):
    """Entries grouped by node: group i has the entries ``order[first[i]:last[i]]``.

    Its vectors are the ``width`` rows of the weight that start at ``row``.
    """

    order: Tensor
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    row: NDArray[np.int64]
    width: NDArray[np.int64]

    def entries(self) -> NDArray[np.int64]:
        """Number of entries per group."""
        return self.last - self.first

    def some(self, chosen: NDArray[np.bool_]) -> "Groups":
        """The groups for which ``chosen`` is True."""
        return Groups(self.order, *(each[chosen] for each in self[1:]))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows of the weight of each group, and its entries."""
        first, last, row, width = (each.tolist() for each in self[1:])
        for a, b, start, size in zip(first, last, row, width, strict=True):
            yield slice(start, start + size), self.order[a:b]


def groups_of(row_start: Tensor, node: Tensor) -> Groups:
    """Groups entries by node; those with node ``n_inner`` are padding. Needs a host sync."""
    if node.is_cpu:
        return _groups_by_numpy(as_numpy(row_start), as_numpy(node))
    ordered, order = touched_rows.sort_ids("auto", node)
    asked, sizes = torch.unique_consecutive(ordered, return_counts=True)
    bounds = row_start[torch.stack([asked, asked + 1]).clamp_(max=len(row_start) - 1)]
    row, end = as_numpy(bounds.cpu())
    last = as_numpy(sizes.cumsum(0).cpu())
    first = last - as_numpy(sizes.cpu())
    there = row < end
    return Groups(order, first[there], last[there], row[there], (end - row)[there])


def _groups_by_numpy(row_start: NDArray[Any], node: NDArray[Any]) -> Groups:
    """:func:`groups_of` in numpy, which for few entries takes a fifth of torch's host time."""
    order = node.argsort(kind="stable")
    ordered = node[order]
    # Padding is sorted to the end.
    ordered = ordered[: ordered.searchsorted(len(row_start) - 1)]
    new = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    first = new.nonzero()[0]
    last = np.append(first[1:], len(ordered))[: len(first)]
    asked = ordered[first]
    row, width = row_start[asked], row_start[asked + 1] - row_start[asked]
    there = width > 0
    return Groups(torch.from_numpy(order), first[there], last[there], row[there], width[there])


def block_scores(weight: Tensor, bias: Tensor | None, rows: Tensor, block: slice) -> Tensor:
    """Scores of all rows against a contiguous block of the weight."""
    of_block = None if bias is None else bias[block].to(rows.dtype)
    return linear(rows, weight[block].to(rows.dtype), of_block)


def _per_loss(factor: Tensor, counted: Tensor | None) -> Tensor:
    # A registered operation returns an empty tensor for None.
    return factor if counted is None or not counted.numel() else factor / counted


def _row_sparse(rows: Tensor, values: Tensor, shape: tuple[int, ...], once: bool) -> Tensor:
    """A row-sparse tensor; ``rows`` is ``(1, m)``, ``once`` says they are sorted and unique."""
    return torch.sparse_coo_tensor(rows, values, shape, is_coalesced=once, check_invariants=False)


def _as_needed(
    made: Sequence[Any], touched: Tensor | None, shape: tuple[int, ...], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of rows, weight and bias; the last two row-sparse if ``touched`` is given."""
    if touched is not None:
        touched = touched.unsqueeze(0)
        made = [
            made[0],
            _row_sparse(touched, made[1], shape, True) if needed[1] else None,
            _row_sparse(touched, made[2], shape[:1], True) if needed[2] else None,
        ]
    return [each if need else None for each, need in zip(made, needed, strict=True)]
