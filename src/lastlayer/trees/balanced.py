"""Balanced trees: all classes are about equally deep."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lastlayer._checks import as_permutation
from lastlayer.trees._arrays import Integers, Offsets, check_count, offsets, ranges
from lastlayer.trees.tree import Tree


def balanced(
    n: int, arity: int = 2, *, order: Any = None, labels: Sequence[str] | None = None
) -> Tree:
    """A balanced tree: the depths of any two classes differ by at most one.

    Every node divides its classes among ``arity`` children as evenly as possible, larger parts
    first; a node with at most ``arity`` classes has one leaf per class.

    Args:
        n: number of classes.
        arity: number of children of a node.
        order: the classes from left to right, a permutation; by default 0, 1, …. A random one,
            ``torch.randperm(n)``, gives the initial tree of Mnih and Hinton.
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
    """``child_start`` and ``child``, with classes numbered from left to right."""
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
