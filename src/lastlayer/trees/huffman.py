"""Huffman trees, which have the least expected depth."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lastlayer._checks import as_counts
from lastlayer.trees._arrays import check_count
from lastlayer.trees.tree import Tree


def huffman(counts: Any, arity: int = 2, *, labels: Sequence[str] | None = None) -> Tree:
    """Huffman's tree: the least expected depth of all trees with up to ``arity`` children per node.

    All nodes have ``arity`` children, except that one of the deepest may have fewer. Children are
    sorted by frequency, the most frequent first; equally frequent classes by their ids. A class is
    merged before an inner node of the same count, which makes the deepest class as shallow as
    possible for an optimal tree.

    Args:
        counts: one number per class, at least 0, not all 0.
        arity: number of children of a node.
        labels: one name per class.

    Reference:
        David Huffman, A method for the construction of minimum-redundancy codes, 1952. Sorted
        counts are merged with two queues, since inner nodes are created in ascending order.

    Example:
        >>> tree = huffman([64, 20, 10, 6])
        >>> [tree.code(c) for c in range(4)]
        [[0], [1, 0], [1, 1, 0], [1, 1, 1]]
        >>> tree.expected_depth([64, 20, 10, 6]), round(tree.entropy_bound([64, 20, 10, 6]).bits, 2)
        (1.52, 1.45)
    """
    from lastlayer.trees import _loops

    weights = as_counts(counts)
    arity = check_count("arity", arity, least=2)
    # Ids descend among equal counts: nodes are filled from the end, so lower ids are first there.
    rare_first = np.argsort(-weights, kind="stable")[::-1]
    start, child = _loops.huffman_merge(weights[rare_first], arity)
    leaves = child < 0
    child[leaves] = ~rare_first[~child[leaves]]
    start, child, _, _ = _loops.breadth_first(start, child, len(start) - 2)
    return Tree(start, child, labels)
