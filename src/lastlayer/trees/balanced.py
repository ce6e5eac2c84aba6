"""Trees of equal depth."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lastlayer._checks import as_permutation
from lastlayer.trees._arrays import Integers, Offsets, check_count, offsets, ranges
from lastlayer.trees.tree import Tree


def balanced(
    n: int, arity: int = 2, *, order: Any = None, labels: Sequence[str] | None = None
) -> Tree:
    """A tree whose classes are all as deep as each other, or one deeper.

    Every node divides its classes over ``arity`` children as evenly as possible, larger parts
    first; a node with fewer classes has a leaf for each.

    Args:
        n: number of classes.
        arity: number of children of a node.
        order: the classes from left to right, each once; by default as they are numbered. A
            random one, ``torch.randperm(n)``, makes the tree that Mnih and Hinton start from.
        labels: one name per class.

    Example:
        >>> balanced(8).code(6)
        [1, 1, 0]
        >>> balanced(1000, arity=10)
        Tree(n_classes=1000, n_inner=111, max_arity=10, max_depth=3)
    """
    n = check_count("n", n, least=1)
    arity = check_count("arity", arity, least=2)
    start, child = _even_split(n, arity)
    if order is not None:
        permutation = as_permutation("order", order, n)
        leaves = child < 0
        child[leaves] = ~permutation[~child[leaves]]
    return Tree(start, child, labels)


def _even_split(n: int, arity: int) -> tuple[Offsets, Integers]:
    """The children of all nodes, for classes from left to right."""
    sizes = np.array([n] if n > 1 else [], np.int64)
    first = np.zeros_like(sizes)
    wide, children, n_nodes = [sizes[:0]], [sizes[:0]], 1
    while len(sizes):
        parts = np.minimum(sizes, arity)
        place = ranges(np.zeros_like(parts), parts)
        low, more = (np.repeat(each, parts) for each in (sizes // parts, sizes % parts))
        first = np.repeat(first, parts) + place * low + np.minimum(place, more)
        sizes = low + (place < more)
        inner = sizes > 1
        children.append(np.where(inner, n_nodes + np.cumsum(inner) - 1, ~first))
        wide.append(parts)
        n_nodes += int(inner.sum())
        sizes, first = sizes[inner], first[inner]
    return offsets(np.concatenate(wide)), np.concatenate(children)
