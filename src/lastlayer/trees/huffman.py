"""The trees with the least expected depth."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit

from lastlayer.trees._arrays import Integers, Offsets, Reals
from lastlayer.trees._checks import as_counts, check_number
from lastlayer.trees._loops import breadth_first
from lastlayer.trees.tree import Tree


def huffman(counts: Any, arity: int = 2, *, labels: Sequence[str] | None = None) -> Tree:
    """Huffman's tree: no tree with nodes of ``arity`` children has a smaller expected depth.

    All nodes have ``arity`` children, except that a deepest one may have fewer. More frequent
    children come first, and of equally frequent classes the one with the lower id. A class is
    merged before an inner node of the same count, which keeps the deepest class as shallow as an
    optimal tree allows.

    Args:
        counts: one number a class, at least 0, not all 0.
        arity: how many children a node has.
        labels: one name a class.

    Reference:
        David Huffman, A method for the construction of minimum-redundancy codes, 1952. Counts are
        sorted, and merged with two queues: inner nodes are made in ascending order.

    Example:
        >>> tree = huffman([64, 20, 10, 6])
        >>> [tree.code(c) for c in range(4)]
        [[0], [1, 0], [1, 1, 0], [1, 1, 1]]
        >>> tree.expected_depth([64, 20, 10, 6]), round(tree.entropy_bound([64, 20, 10, 6]).bits, 2)
        (1.52, 1.45)
    """
    weights = as_counts(counts)
    arity = check_number("arity", arity, least=2)
    # Descending among equals, so that reading from the end gives lower ids first.
    rare_first = np.argsort(-weights, kind="stable")[::-1]
    start, child = merge(weights[rare_first], arity)
    leaves = child < 0
    child[leaves] = ~rare_first[~child[leaves]]
    start, child, _, _ = breadth_first(start, child, len(start) - 2)
    return Tree(start, child, labels)


def _merge(weights: Reals, arity: int) -> tuple[Offsets, Integers]:
    """Inner nodes in the order in which they are made, the root last.

    Args:
        weights: ascending.
        arity: how many are merged at a time.

    Returns:
        Where the children of each node start, and the children: an inner node where not negative,
        else ``~place`` in ``weights``. The heaviest is first.
    """
    n = len(weights)
    n_inner = (n - 2) // (arity - 1) + 1 if n > 1 else 0
    start = np.zeros(n_inner + 1, np.int64)
    child = np.empty(max(0, n + n_inner - 1), np.int64)
    mass = np.empty(n_inner)
    # The first merge takes what is left over, so that all others are full.
    size = 2 + (n - 2) % (arity - 1)
    leaf = 0
    oldest = 0
    for node in range(n_inner):
        total = 0.0
        end = start[node] + size
        for place in range(end - 1, start[node] - 1, -1):
            if leaf < n and (oldest >= node or weights[leaf] <= mass[oldest]):
                total += weights[leaf]
                child[place] = ~leaf
                leaf += 1
            else:
                total += mass[oldest]
                child[place] = oldest
                oldest += 1
        mass[node] = total
        start[node + 1] = end
        size = arity
    return start, child


merge = njit(nogil=True, cache=True)(_merge)
