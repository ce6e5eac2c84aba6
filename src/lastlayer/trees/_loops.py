"""Walks over trees, compiled by Numba: a tree may be as deep as it has classes.

In all of them ``start`` and ``child`` list the children of inner nodes: those of node v are
``child[start[v]:start[v + 1]]``, an inner node where not negative, else the class ``~child``.
"""

import numpy as np
from numba import njit

from lastlayer.trees._arrays import Ids, Integers, Offsets, Reals


def _children_of(parent: Integers) -> tuple[Offsets, Integers]:
    """Children of each node in the order of their numbers; roots have parent -1."""
    n = len(parent)
    start = np.zeros(n + 2, np.int64)
    for v in range(n):
        start[parent[v] + 2] += 1
    for v in range(n):
        start[v + 2] += start[v + 1]
    # Shifted by one, so that filling leaves every start in its place.
    child = np.empty(n, np.int64)
    for v in range(n):
        child[start[parent[v] + 1]] = v
        start[parent[v] + 1] += 1
    n_roots = start[0]
    return start[:-1] - n_roots, child[n_roots:]


def _breadth_first(
    start: Offsets, child: Integers, root: int
) -> tuple[Offsets, Integers, Integers, int]:
    """The tree below ``root``, numbered level by level; nodes with a single child are contracted.

    Returns:
        ``start`` and ``child`` in the new numbers, the old number of each inner node, and how many
        nodes were met, contracted ones and leaves as well.
    """
    met = 1
    while root >= 0 and start[root + 1] - start[root] == 1:
        root = child[start[root]]
        met += 1
    n_old = len(start) - 1
    origin = np.empty(max(n_old, 1), np.int64)
    new_start = np.zeros(n_old + 1, np.int64)
    new_child = np.empty(len(child), np.int64)
    n = 0
    if root >= 0:
        origin[0] = root
        n = 1
    filled = 0
    v = 0
    while v < n:
        old = origin[v]
        for edge in range(start[old], start[old + 1]):
            below = child[edge]
            met += 1
            while below >= 0 and start[below + 1] - start[below] == 1:
                below = child[start[below]]
                met += 1
            if below >= 0:
                origin[n] = below
                below = n
                n += 1
            new_child[filled] = below
            filled += 1
        v += 1
        new_start[v] = filled
    return new_start[: n + 1], new_child[:filled], origin[:n], met


def _add_up(parent: Ids, values: Reals) -> None:
    """Adds to every node what is below it, in place."""
    for v in range(len(parent) - 1, 0, -1):
        values[parent[v]] += values[v]


def _add_down(parent: Ids, values: Integers) -> None:
    """Adds to every node what is above it, in place."""
    for v in range(1, len(parent)):
        values[v] += values[parent[v]]


def _fill_paths(
    leaf_edge: Integers,
    owner: Ids,
    start: Offsets,
    parent: Ids,
    position: Ids,
    path_start: Offsets,
    path_node: Ids,
    path_position: Ids,
) -> None:
    """Nodes and positions of each path, from its end to the root."""
    for path in range(len(leaf_edge)):
        node = owner[leaf_edge[path]]
        taken = np.int32(leaf_edge[path] - start[node])
        for place in range(path_start[path + 1] - 1, path_start[path] - 1, -1):
            path_node[place] = node
            path_position[place] = taken
            taken = position[node]
            node = parent[node]


def _cost_of_several_paths(
    class_start: Offsets, path_start: Offsets, path_node: Ids, node_cost: Integers
) -> Integers:
    """For each class the cost of all nodes on its paths, each of them once."""
    n_classes = len(class_start) - 1
    seen_by = np.full(len(node_cost), -1, np.int64)
    cost = np.zeros(n_classes, np.int64)
    for c in range(n_classes):
        for place in range(path_start[class_start[c]], path_start[class_start[c + 1]]):
            node = path_node[place]
            if seen_by[node] != c:
                seen_by[node] = c
                cost[c] += node_cost[node]
    return cost


children_of = njit(nogil=True, cache=True)(_children_of)
breadth_first = njit(nogil=True, cache=True)(_breadth_first)
add_up = njit(nogil=True, cache=True)(_add_up)
add_down = njit(nogil=True, cache=True)(_add_down)
fill_paths = njit(nogil=True, cache=True)(_fill_paths)
cost_of_several_paths = njit(nogil=True, cache=True)(_cost_of_several_paths)
