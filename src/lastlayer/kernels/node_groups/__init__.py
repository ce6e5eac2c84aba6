"""Softmax over the children of many nodes; the rows at one node are a group.

On CUDA all groups are one launch; on a CPU all small groups are one call. README.md has the
derivation. This module defines the contents of a plan on CUDA, and bounds on its size, which the
host computes.
"""

from typing import NamedTuple

from torch import Tensor

# Entries and children per tile.
ROWS, CHILDREN = 16, 64
# For all leaves: nodes are normalised in groups by their number of children, up to these numbers
# (the last one has no limit); and a level of at least MANY_EDGES edges is a separate launch.
WIDTHS, MANY_EDGES = (16, 64, 256, 1024), 4096


class TreeSizes(NamedTuple):
    """Properties of a tree that bound the work, known to the host."""

    n_inner: int
    n_rows: int
    widest: int
    # Maximum number of rows of the weight on one path; the rows of each node are rounded up to 4.
    most_scores: int
    # Maximum number of paths per row of hidden states.
    paths: int


class LeafTables(NamedTuple):
    """Tables of a tree for the CUDA kernels that compute all leaves from scores."""

    row_start: Tensor
    edge_node: Tensor
    # For each edge four times its row of the weight, plus 1 or 2 for the children of a binary node.
    edge_row: Tensor
    # The child of each edge: a node, or ~p at the end of path p.
    child: Tensor
    # The first path of each class, and the end; None if every class has one path.
    class_start: Tensor | None
    level_start: Tensor
    # First edge and end of each level; and ranges of levels that are one launch.
    levels: list[tuple[int, int]]
    launches: list[tuple[int, int]]
    # For each limit of WIDTHS, the limit and the nodes with more than two children up to it.
    wide_nodes: list[tuple[int, Tensor]]


class Plan(NamedTuple):
    """Entries sorted by node, and their groups; unused entries (padding of paths) are last.

    The group of unused entries, and groups beyond the last one, have no rows of the weight. There
    are tiles of scores, of rows, and of children; the lists have the group of each tile.
    """

    entry: Tensor
    # The group of each entry, counted from 1.
    group: Tensor
    # (5, groups): index of the first entry, number of entries, first row of the weight, number of
    # rows of the weight, stride between rows of scores.
    groups: Tensor
    # (5, groups), cumulative sums over groups: tiles of scores, of rows and of children; scores;
    # and rows of the weight.
    ends: Tensor
    score_tiles: Tensor
    row_tiles: Tensor
    child_tiles: Tensor


def leaf_launches(levels: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of levels that are one launch: a large level, or consecutive small levels."""
    made: list[tuple[int, int]] = []
    together = False
    for level, (first, last) in enumerate(levels):
        few = last - first < MANY_EDGES
        if few and together:
            made[-1] = made[-1][0], level + 1
        else:
            made.append((level, level + 1))
        together = few
    return made


def most_groups(m: int, sizes: TreeSizes) -> int:
    """Maximum number of groups of m entries, including that of unused entries."""
    return min(m, sizes.n_inner) + 1


def most_scores(n: int, sizes: TreeSizes) -> int:
    """Maximum number of scores of n rows, including padding."""
    return n * sizes.paths * sizes.most_scores


def most_tiles(m: int, n: int, sizes: TreeSizes) -> tuple[int, int, int]:
    """Maximum numbers of tiles of scores, of rows and of children for m entries of n rows."""
    n_groups = min(m, sizes.n_inner)
    across = -(-sizes.widest // CHILDREN)
    rows = (m + n_groups * (ROWS - 1)) // ROWS
    children = min(n_groups * across, sizes.n_rows // CHILDREN + n_groups)
    # A bound on the sum of (a + 1)(b + 1), since tiles at the edges are incomplete.
    both = most_scores(n, sizes) // (ROWS * CHILDREN) + m // ROWS + children
    return min(rows * across, both + 1), rows, children
