"""A tree as tables of indices that move with a head from device to device.

An *edge* is an entry of ``tree.child``: a node and one of its children. Edges are numbered level
by level, as nodes are, so that a level is a range of edges.
"""

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer.trees import Tree
from lastlayer.trees._loops import add_down, add_up


class TreeTables(torch.nn.Module):
    """Buffers that are made from the tree, and so are no part of the state.

    A binary node has one row of the weight, whose score decides for its second child; a wider
    node has one row for each child.
    """

    # Of each path: where its edges start in path_edge, (n_paths + 1,), and they themselves.
    path_start: Tensor
    path_edge: Tensor
    # Of each class: its first path, (n_classes + 1,).
    class_start: Tensor
    # Of each node: its first edge, (n_inner + 1,), and its first row, (n_inner + 1,).
    child_start: Tensor
    row_start: Tensor
    # Of each edge: its node, what it leads to, and the edge above it, counted from the first one
    # of that level.
    edge_node: Tensor
    child: Tensor
    edge_above: Tensor
    # Of each path: its last edge and its class.
    path_end: Tensor
    path_class: Tensor
    # Where each edge is among the log-probabilities by arity; empty where that is its number.
    edge_slot: Tensor
    # Of each class: its place among the leaves from left to right; empty unless it is one path of
    # binary nodes.
    rank: Tensor

    def __init__(self, tree: Tree, device: torch.device | str | None = None) -> None:
        super().__init__()
        n_inner, start = tree.n_inner, tree.child_start
        arity = np.diff(start)
        owner = np.repeat(np.arange(n_inner), arity)
        row_start = np.concatenate([[0], np.cumsum(np.where(arity == 2, 1, arity))])
        edge_of_node = _edges_to_nodes(tree)
        self.n_classes, self.n_paths, self.n_inner = tree.n_classes, tree.n_paths, n_inner
        self.n_edges, self.n_rows = len(tree.child), int(row_start[-1])
        self.overlaps, self.widest = tree.overlaps, tree.max_arity
        self.has_binary = bool((arity == 2).any())
        self.has_wide = bool((arity > 2).any())
        # Whether every class is one path of binary nodes.
        self.is_plain = tree.is_binary and not tree.overlaps and n_inner > 0
        self.longest = int(np.diff(tree.path_start).max())
        # The most rows of the weight on one path, those of each node rounded up to 4.
        self.most_scores = _most_scores(tree) if self.has_wide else 0
        self.most_paths = int(np.diff(tree.class_start).max())
        # First and last edge of each level; the edges of a level have a range of nodes.
        first_nodes = np.flatnonzero(np.diff(tree.node_depth, prepend=-1))
        bounds = [*start[first_nodes].tolist(), self.n_edges]
        # How many nodes each level has.
        self.level_sizes = np.diff(first_nodes, append=n_inner)
        self.levels = list(pairwise(bounds))

        level_of_edge = tree.node_depth[owner]
        level_start = np.asarray(bounds[:-1], np.int64)
        above = edge_of_node[owner]
        above -= np.where(above >= 0, level_start[np.maximum(level_of_edge - 1, 0)], 0)
        path_edge = start[tree.path_node] + tree.path_position
        ends = path_edge[tree.path_start[1:] - 1] if n_inner else np.zeros(0, np.int64)
        slots = self._split_by_arity(arity, start, row_start)

        def keep(name: str, values: NDArray[np.generic], dtype: torch.dtype) -> None:
            tensor = torch.tensor(np.ascontiguousarray(values), dtype=dtype, device=device)
            self.register_buffer(name, tensor, persistent=False)

        keep("path_start", tree.path_start, torch.int64)
        keep("path_edge", path_edge, torch.int32)
        keep("class_start", tree.class_start, torch.int64)
        keep("child_start", start, torch.int64)
        keep("row_start", row_start, torch.int64)
        keep("edge_node", owner, torch.int32)
        keep("child", tree.child, torch.int32)
        keep("edge_above", above, torch.int32)
        keep("path_end", ends, torch.int32)
        keep("path_class", tree.path_class, torch.int64)
        keep("edge_slot", slots, torch.int32)
        keep("rank", _leaf_ranks(tree) if self.is_plain else slots[:0], torch.int32)
        for arity_here, rows in self._rows_by_arity:
            keep(f"rows_of_{arity_here}", rows, torch.int32)
        self.arities = [each for each, _ in self._rows_by_arity]
        del self._rows_by_arity

    def _split_by_arity(
        self, arity: NDArray[np.int64], start: NDArray[np.int64], row_start: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Rows of the nodes of each arity together, and where their edges end up by that."""
        found, slots, n = [], np.empty(int(start[-1]), np.int64), 0
        for each in np.unique(arity).tolist():
            nodes = np.flatnonzero(arity == each)
            width = 1 if each == 2 else each
            found.append((each, (row_start[nodes][:, None] + np.arange(width)).ravel()))
            edges = start[nodes][:, None] + np.arange(each)
            slots[edges.ravel()] = n + np.arange(edges.size)
            n += edges.size
        self._rows_by_arity = found
        in_order = len(found) <= 1
        return slots[:0] if in_order else slots

    def rows_of_arity(self, arity: int) -> Tensor:
        """The rows of all nodes with so many children, node by node."""
        rows: Tensor = self.get_buffer(f"rows_of_{arity}")
        return rows

    def paths_of(self, classes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Paths ``(*shape, m)`` of classes ``(*shape)``, and which of them there are.

        None where a class has one path, which then has its number.
        """
        if not self.overlaps:
            return classes.unsqueeze(-1), None
        first = self.class_start[classes]
        n = self.class_start[classes + 1] - first
        steps = torch.arange(_most(n, self.most_paths), device=classes.device)
        there = steps < n.unsqueeze(-1)
        return torch.where(there, first.unsqueeze(-1) + steps, 0), there

    def edges_of(self, paths: Tensor, there: Tensor | None) -> tuple[Tensor, Tensor]:
        """Edges ``(*shape, length)`` of paths ``(*shape)``, and which of them there are.

        Padding is edge 0. A path that is not there has none.
        """
        first = self.path_start[paths]
        n = self.path_start[paths + 1] - first
        if there is not None:
            n = torch.where(there, n, 0)
        steps = torch.arange(_most(n, self.longest), device=paths.device)
        inside = steps < n.unsqueeze(-1)
        place = torch.where(inside, first.unsqueeze(-1) + steps, 0)
        return self.path_edge[place].long(), inside

    def node_and_position(self, edges: Tensor) -> tuple[Tensor, Tensor]:
        """Which node each edge is of, and which of its children it leads to."""
        if not self.has_wide:
            return edges >> 1, edges & 1
        node = self.edge_node[edges].long()
        return node, edges - self.child_start[node]

    def first_row(self, node: Tensor) -> Tensor:
        """The row of a binary node, the first one of a wider node."""
        return self.row_start[node] if self.has_wide else node


def _edges_to_nodes(tree: Tree) -> NDArray[np.int64]:
    """The edge that leads to each inner node; -1 for the root."""
    edges = np.full(tree.n_inner, -1, np.int64)
    edges[1:] = tree.child_start[tree.parent[1:]] + tree.position[1:]
    return edges


def _most_scores(tree: Tree) -> int:
    widths = np.where(tree.arity == 2, 1, tree.arity)
    return int(np.add.reduceat((-(-widths // 4) * 4)[tree.path_node], tree.path_start[:-1]).max())


def _leaf_ranks(tree: Tree) -> NDArray[np.int64]:
    """The place of each class among the leaves from left to right, in a tree without overlap."""
    inner = tree.child >= 0
    leaves = np.bincount(tree._owner[~inner], minlength=tree.n_inner)
    add_up(tree.parent, leaves)
    size = np.ones(len(tree.child), np.int64)
    size[inner] = leaves[tree.child[inner]]
    # Leaves to the left of each edge that are below the same node; then those further up.
    left = np.cumsum(size) - size
    left -= left[tree.child_start[tree._owner]]
    before = np.zeros(tree.n_inner, np.int64)
    before[tree.child[inner]] = left[inner]
    add_down(tree.parent, before)
    rank = np.empty(tree.n_classes, np.int64)
    rank[~tree.child[~inner]] = (before[tree._owner] + left)[~inner]
    return rank


def _most(n: Tensor, bound: int) -> int:
    """The largest of the numbers, or what bounds them where the host would have to wait."""
    if n.device.type != "cpu" or torch.compiler.is_compiling():
        return bound
    return int(n.max()) if n.numel() else 0
