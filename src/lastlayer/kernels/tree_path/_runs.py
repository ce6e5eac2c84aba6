"""Rows in the order of the tree, and the run of rows that each node has, for the CPU."""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def rows_in_order(classes, rank, ignores, ignored):
    """Rows by the rank of their class, those without one last; equal ones in their order."""
    n = len(classes)
    keys = np.empty(n, np.int64)
    for row in range(n):
        c = classes[row]
        known = 0 <= c < len(rank) and not (ignores and c == ignored)
        keys[row] = ((rank[c] if known else len(rank)) << 32) | row
    keys.sort()
    for at in range(n):
        keys[at] &= 0xFFFFFFFF
    return keys


@njit(nogil=True, cache=True)
def paths_in_order(order, classes, path_start, path_edge, ignores, ignored):
    """The edges of all rows, ordered, and where those of each start, ``(n + 1,)``."""
    n, n_classes = len(order), len(path_start) - 1
    starts = np.zeros(n + 1, np.int64)
    for at in range(n):
        c = classes[order[at]]
        known = 0 <= c < n_classes and not (ignores and c == ignored)
        starts[at + 1] = starts[at] + (path_start[c + 1] - path_start[c] if known else 0)
    edges = np.empty(starts[n], path_edge.dtype)
    for at in range(n):
        first = path_start[classes[order[at]]] if starts[at] < starts[at + 1] else 0
        for place in range(starts[at], starts[at + 1]):
            edges[place] = path_edge[first + place - starts[at]]
    return starts, edges


@njit(nogil=True, cache=True)
def runs_of_nodes(starts, edges, longest):
    """Every node on the paths, ascending: itself, its level, its first row, and its rows' number.

    The number is added up, ``(m + 1,)``. Nodes are numbered level by level and from left to
    right, and rows come from left to right: sorted by level, then by first row, is ascending.
    """
    n = len(starts) - 1
    shared = np.zeros(n + 1, np.int64)
    following = np.zeros(longest + 1, np.int64)
    for at in range(n):
        length = starts[at + 1] - starts[at]
        if at > 0:
            before = starts[at - 1]
            most = min(length, starts[at] - before)
            while (
                shared[at] < most
                and edges[starts[at] + shared[at]] >> 1 == edges[before + shared[at]] >> 1
            ):
                shared[at] += 1
        for level in range(shared[at], length):
            following[level + 1] += 1
    for level in range(longest):
        following[level + 1] += following[level]
    m = following[longest]
    node, level_of, first = np.empty(m, np.int64), np.empty(m, np.int64), np.empty(m, np.int64)
    since = np.zeros(m + 1, np.int64)
    latest = np.empty(longest, np.int64)
    for at in range(n):
        length = starts[at + 1] - starts[at]
        for level in range(shared[at], length):
            run = following[level]
            following[level] += 1
            node[run] = edges[starts[at] + level] >> 1
            level_of[run], first[run] = level, at
            latest[level] = run
        for level in range(shared[at + 1], length):
            since[latest[level] + 1] = at + 1 - first[latest[level]]
    for run in range(m):
        since[run + 1] += since[run]
    return node, level_of, first, since


@njit(nogil=True, cache=True)
def edges_by_place(starts, edges, level, first, since):
    """The same edges, with nodes numbered by their place among those of :func:`runs_of_nodes`."""
    placed = np.empty_like(edges)
    for run in range(len(level)):
        for at in range(first[run], first[run] + since[run + 1] - since[run]):
            place = starts[at] + level[run]
            placed[place] = (run << 1) | (edges[place] & 1)
    return placed
