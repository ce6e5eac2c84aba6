"""Wide nodes made binary."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lastlayer.trees._arrays import Integers, Offsets, Reals, offsets, ranges
from lastlayer.trees._grow import Growth, grow
from lastlayer.trees._loops import breadth_first
from lastlayer.trees.huffman import merge


def make_binary(
    start: Offsets, child: Integers, mass: Reals, vectors: NDArray[np.float32] | None, seed: int
) -> tuple[Offsets, Integers, Integers]:
    """A small tree over the children of each node that has more than two.

    Args:
        start: where the children of each node start; the root is node 0.
        child: all children.
        mass: of each child, one or more entries above 0 or none at all.
        vectors: of each child, for trees by clustering; None for Huffman's.
        seed: for clustering.

    Returns:
        The new ``start`` and ``child``, level by level, and for each new node which one it was: -1
        for a node that was not there before.
    """
    wide = np.flatnonzero(np.diff(start) > 2)
    sizes = start[wide + 1] - start[wide]
    edges = ranges(start[wide], sizes)
    if vectors is None:
        forest, roots = _huffman_of_each(mass[edges], offsets(sizes))
    else:
        levels = 3 * int(sizes.max(initial=2)).bit_length()
        how = Growth(False, 0.0, len(edges), levels, seed)
        _, forest = grow(vectors[edges], mass[edges], offsets(sizes), how, lambda _: None)
        roots = np.arange(len(wide))
    n = len(start) - 1
    # Each wide node gets the root of its small tree as a single child, and is contracted with it.
    forest = np.where(forest >= 0, forest + n, child[edges[~np.minimum(forest, -1)]])
    narrow = np.diff(start) <= 2
    below = np.where(narrow, np.diff(start), 1)
    new_child = np.empty(int(below.sum()), np.int64)
    new_start = offsets(np.concatenate([below, np.full(len(forest) // 2, 2)]))
    new_child[ranges(new_start[:n][narrow], below[narrow])] = child[
        ranges(start[:-1][narrow], below[narrow])
    ]
    new_child[new_start[:n][~narrow]] = roots + n
    was = np.concatenate([np.arange(n), np.full(len(forest) // 2, -1)])
    was[n + roots] = wide
    start, child, origin, _ = breadth_first(new_start, np.concatenate([new_child, forest]), 0)
    return start, child, was[origin]


def _huffman_trees(mass: Reals, group_start: Offsets) -> tuple[Integers, Integers]:
    """Huffman's tree over each group: two children a node, and where the roots are."""
    n_groups = len(group_start) - 1
    child = np.empty(2 * (len(mass) - n_groups), np.int64)
    roots = np.empty(n_groups, np.int64)
    base = 0
    for group in range(n_groups):
        first, end = group_start[group], group_start[group + 1]
        order = np.argsort(mass[first:end], kind="mergesort")
        _, merged = merge(mass[first:end][order], 2)
        for place in range(len(merged)):
            node = merged[place]
            child[2 * base + place] = node + base if node >= 0 else ~(first + order[~node])
        base += end - first - 1
        roots[group] = base - 1
    return child, roots


_huffman_of_each = njit(nogil=True, cache=True)(_huffman_trees)
