"""Trees with two levels: groups, and the classes of each group."""

from collections.abc import Sequence
from math import isqrt
from typing import Any

import numpy as np

from lastlayer._checks import as_counts
from lastlayer.trees._arrays import Integers, check_count, offsets
from lastlayer.trees.tree import Tree


def two_level(counts: Any, *, labels: Sequence[str] | None = None) -> Tree:
    """A tree with two levels: groups below the root, and classes below their group.

    From a number of classes: √n groups of consecutive classes, whose sizes differ by at most one.

    From counts: the groups with the lowest expected cost. The cost of a row is one vector per group
    and one per class in the group of its target. Frequent classes get small groups; the most
    frequent ones are children of the root. Classes are sorted by count, and the optimal partition
    of the sorted list into groups is found by dynamic programming. Classes with a count of 0 add no
    cost, so they end up in one group.

    Args:
        counts: one number per class, at least 0, not all 0; or the number of classes.
        labels: one name per class.

    Reference:
        Geoffrey Zweig and Konstantin Makarychev, Speed regularization and optimality in word
        classing, 2013, for groups by dynamic programming.

    Example:
        >>> two_level(10_000)
        Tree(n_classes=10000, n_inner=101, max_arity=100, max_depth=2)
        >>> zipf = [1 / rank for rank in range(1, 10_001)]
        >>> round(two_level(10_000).step_cost(zipf, 1)), round(two_level(zipf).step_cost(zipf, 1))
        (200, 127)
    """
    if hasattr(counts, "__index__") and not hasattr(counts, "__len__"):
        n = check_count("counts", counts, least=1)
        groups = isqrt(n - 1) + 1
        sizes = np.full(groups, n // groups) + (np.arange(groups) < n % groups)
        return _of_groups(sizes, np.arange(n), labels)
    from lastlayer.trees import _loops

    weights = as_counts(counts)
    order = np.argsort(-weights, kind="stable")
    shares = weights[order] / weights.sum()
    ends = _loops.best_groups(np.concatenate([np.zeros(1), np.cumsum(shares)]))
    return _of_groups(np.diff(ends), order, labels)


def _of_groups(sizes: Integers, order: Integers, labels: Sequence[str] | None) -> Tree:
    first = offsets(sizes)
    alone = sizes == 1
    if alone.all():
        # Groups of one class are replaced by the class, so only the root is left.
        flat = len(sizes) > 1
        return Tree([0, len(order)] if flat else [0], ~order if flat else [], labels)
    inner = np.cumsum(~alone)
    top = np.where(alone, ~order[first[:-1]], inner)
    below = ~order[np.repeat(~alone, sizes)]
    start = offsets(np.concatenate([[len(sizes)], sizes[~alone]]))
    return Tree(start, np.concatenate([top, below]), labels)
