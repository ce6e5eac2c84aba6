"""Deep trees made shallow: nodes take in the nodes below them."""

import heapq
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from lastlayer.trees._arrays import Ids, Integers, Offsets, Reals
from lastlayer.trees._checks import as_shares, check_number
from lastlayer.trees._loops import breadth_first
from lastlayer.trees._measure import sums_below

if TYPE_CHECKING:
    from lastlayer.trees.tree import Tree


def collapse(tree: "Tree", arity: int, counts: Any) -> tuple[Offsets, Integers, Integers]:
    """Children of the nodes that are left, and which nodes they were."""
    arity = check_number("arity", arity, least=2)
    if arity < tree.max_arity:
        raise ValueError(
            f"arity: expected at least {tree.max_arity}, the most children in the tree, got {arity}"
        )
    if counts is None:
        rank = tree.node_depth.astype(np.float64)
    else:
        shares = as_shares(counts, tree.n_classes)
        rank = -sums_below(tree, shares / np.diff(tree.class_start))
    below = tree.child.astype(np.int64)
    merged = _take_in(tree.child_start, below, rank, arity)
    start, child = _listed(tree.child_start, below, merged)
    start, child, origin, _ = breadth_first(start, child, 0 if tree.n_inner else -1)
    return start, child, origin


def _take_in_nodes(start: Offsets, child: Integers, rank: Reals, arity: int) -> Ids:
    """For each node whether its parent takes it in; of those that fit the lowest rank is first."""
    n = len(start) - 1
    merged = np.zeros(n, np.int32)
    for node in range(n):
        # Parents come first: by now it is known whether this node is left.
        if merged[node]:
            continue
        wide = start[node + 1] - start[node]
        waiting: list[tuple[float, int]] = [(0.0, 0)]
        waiting.pop()
        for edge in range(start[node], start[node + 1]):
            if child[edge] >= 0:
                heapq.heappush(waiting, (rank[child[edge]], int(child[edge])))
        while len(waiting) > 0:
            best = heapq.heappop(waiting)[1]
            more = start[best + 1] - start[best] - 1
            if wide + more > arity:
                continue
            wide += more
            merged[best] = 1
            for edge in range(start[best], start[best + 1]):
                if child[edge] >= 0:
                    heapq.heappush(waiting, (rank[child[edge]], int(child[edge])))
    return merged


def _list_children(start: Offsets, child: Integers, merged: Ids) -> tuple[Offsets, Integers]:
    """Children of the nodes that are left, from left to right; those taken in have none."""
    n = len(start) - 1
    new_start = np.zeros(n + 1, np.int64)
    new_child = np.empty(len(child), np.int64)
    filled = 0
    stack = np.empty(len(child) + 1, np.int64)
    for node in range(n):
        if not merged[node]:
            top = 0
            for edge in range(start[node + 1] - 1, start[node] - 1, -1):
                stack[top] = child[edge]
                top += 1
            while top > 0:
                top -= 1
                below = stack[top]
                if below >= 0 and merged[below]:
                    for edge in range(start[below + 1] - 1, start[below] - 1, -1):
                        stack[top] = child[edge]
                        top += 1
                else:
                    new_child[filled] = below
                    filled += 1
        new_start[node + 1] = filled
    return new_start, new_child[:filled]


_take_in = njit(nogil=True, cache=True)(_take_in_nodes)
_listed = njit(nogil=True, cache=True)(_list_children)
