"""Choices among the children of many nodes: rows that are at one node are a group.

On CUDA all groups are one launch, on a CPU the small ones one call; README.md has the derivation.
Here is what a plan on CUDA holds, and how much room it needs: numbers that the host has.
"""

from typing import NamedTuple

from torch import Tensor

# Entries and children of a tile.
ROWS, CHILDREN = 16, 64
# For all leaves: nodes are normalised together with others of up to so many children, the last
# ones with any number; and a level of so many edges is a launch of its own.
WIDTHS, MANY_EDGES = (16, 64, 256, 1024), 4096


class TreeSizes(NamedTuple):
    """What bounds the work: numbers of a tree, which the host has."""

    n_inner: int
    n_rows: int
    widest: int
    # The most rows of the weight on one path, those of each node rounded up to 4.
    most_scores: int
    # How many paths a row of hidden states asks for at most.
    paths: int


class LeafTables(NamedTuple):
    """What the kernels that go from scores to all leaves on CUDA know of a tree."""

    row_start: Tensor
    edge_node: Tensor
    # Four times the row of the weight of each edge, and 1 or 2 for the children of a binary node.
    edge_row: Tensor
    # What each edge leads to: a node, or ~p at the end of path p.
    child: Tensor
    # The first path of each class, and the end; None where every class has one.
    class_start: Tensor | None
    level_start: Tensor
    # First and last edge of each level, and which levels are one launch.
    levels: list[tuple[int, int]]
    launches: list[tuple[int, int]]
    # Nodes of more than two children with about as many, and that number, one of WIDTHS.
    wide_nodes: list[tuple[int, Tensor]]


class Plan(NamedTuple):
    """Entries sorted by node, and their groups; entries that are not asked for come last.

    A group without rows of the weight is none: that of the entries not asked for, and those
    beyond the last. Tiles are of scores, of rows, and of children; there is the group of each, and
    ``ends`` has where the tiles of each group end.
    """

    entry: Tensor
    # The group of each of them, counted from 1.
    group: Tensor
    # (5, groups): first place, entries, first row of the weight, rows of the weight, numbers of a
    # line of scores.
    groups: Tensor
    # (5, groups): tiles of scores, of rows and of children up to the end of each group; scores;
    # and rows of the weight.
    ends: Tensor
    score_tiles: Tensor
    row_tiles: Tensor
    child_tiles: Tensor


def leaf_launches(levels: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Levels that are one launch, from the edges of each: large ones alone, others in a row."""
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
    """How many groups m entries have at most, with that of entries not asked for."""
    return min(m, sizes.n_inner) + 1


def most_scores(n: int, sizes: TreeSizes) -> int:
    """How many numbers the scores of n rows take at most."""
    return n * sizes.paths * sizes.most_scores


def most_tiles(m: int, n: int, sizes: TreeSizes) -> tuple[int, int, int]:
    """How many tiles of scores, of rows and of children m entries of n rows have at most."""
    n_groups = min(m, sizes.n_inner)
    across = -(-sizes.widest // CHILDREN)
    rows = (m + n_groups * (ROWS - 1)) // ROWS
    children = min(n_groups * across, sizes.n_rows // CHILDREN + n_groups)
    # (a + 1)(b + 1), where whole tiles are not enough.
    both = most_scores(n, sizes) // (ROWS * CHILDREN) + m // ROWS + children
    return min(rows * across, both + 1), rows, children
