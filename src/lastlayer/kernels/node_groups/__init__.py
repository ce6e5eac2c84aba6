"""Choices among the children of many nodes: rows that are at one node are a group.

On CUDA all groups are one launch, on a CPU the small ones one call; README.md has the derivation.
Here is what a plan on CUDA holds, and how much room it needs: numbers that the host has.
"""

from typing import NamedTuple

from torch import Tensor

# Entries and children of a tile.
ROWS, CHILDREN = 16, 64


class TreeSizes(NamedTuple):
    """What bounds the work: numbers of a tree, which the host has."""

    n_inner: int
    n_rows: int
    widest: int
    # The most rows of the weight on one path, those of each node rounded up to 4.
    most_scores: int
    # How many paths a row of hidden states asks for at most.
    paths: int


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
