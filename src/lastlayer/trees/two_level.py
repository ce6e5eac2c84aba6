"""Trees of two levels: groups, and classes in a group."""

from collections.abc import Sequence
from math import isqrt
from typing import Any

import numpy as np
from numba import njit

from lastlayer.trees._arrays import Integers, Offsets, Reals, offsets
from lastlayer.trees._checks import as_counts, check_number
from lastlayer.trees.tree import Tree


def two_level(counts: Any, *, labels: Sequence[str] | None = None) -> Tree:
    """Groups below the root, and the classes of each group below it.

    From a number of classes: √n groups of equal size, give or take one, of consecutive classes.

    From counts: the groups that score the fewest vectors for a row on average. A row scores one
    vector for each group, and one for each class in the group of its own class. Frequent classes
    get small groups, the most frequent ones none: they are children of the root. Classes are sorted
    by their counts, and all ways to cut that list into groups are searched. Classes that never
    occur cost nothing in that sum: they end up in one group.

    Args:
        counts: one number a class, at least 0, not all 0; or how many classes there are.
        labels: one name a class.

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
        n = check_number("counts", counts, least=1)
        groups = isqrt(n - 1) + 1
        sizes = np.full(groups, n // groups) + (np.arange(groups) < n % groups)
        return _of_groups(sizes, np.arange(n), labels)
    weights = as_counts(counts)
    order = np.argsort(-weights, kind="stable")
    ends = _best_ends(_sums_of_shares(weights[order]))
    return _of_groups(np.diff(ends), order, labels)


def _sums_of_shares(weights: Reals) -> Reals:
    """Sums of the first 0, 1, … shares."""
    return np.concatenate([np.zeros(1), np.cumsum(weights / weights.sum())])


def _of_groups(sizes: Integers, order: Integers, labels: Sequence[str] | None) -> Tree:
    first = offsets(sizes)
    alone = sizes == 1
    if alone.all():
        # Groups of one class are classes: the root alone is left.
        flat = len(sizes) > 1
        return Tree([0, len(order)] if flat else [0], ~order if flat else [], labels)
    inner = np.cumsum(~alone)
    top = np.where(alone, ~order[first[:-1]], inner)
    below = ~order[np.repeat(~alone, sizes)]
    start = offsets(np.concatenate([[len(sizes)], sizes[~alone]]))
    return Tree(start, np.concatenate([top, below]), labels)


def _cost(share: Reals, first: int, end: int) -> float:
    """Of a group: one vector, and all of its classes as often as one of them occurs."""
    if end - first == 1:
        return 1.0
    return float(1.0 + (share[end] - share[first]) * (end - first))


def _ends_of_groups(share: Reals) -> Offsets:
    """The cuts of least cost, from left to right.

    The best first class of a group moves right as its end does: with more classes to take in, an
    earlier first class only gets dearer. So each first class is best for one stretch of ends, and
    the stretches are kept in a queue.
    """
    n = len(share) - 1
    best = np.zeros(n + 1)
    came_from = np.zeros(n + 1, np.int64)
    first = np.zeros(n + 1, np.int64)
    since = np.ones(n + 1, np.int64)
    head = 0
    tail = 1
    for end in range(1, n + 1):
        while head + 1 < tail and since[head + 1] <= end:
            head += 1
        came_from[end] = first[head]
        best[end] = best[first[head]] + _cost_of(share, first[head], end)
        if end == n:
            break
        while since[tail - 1] > end:
            rival = best[first[tail - 1]] + _cost_of(share, first[tail - 1], since[tail - 1])
            if best[end] + _cost_of(share, end, since[tail - 1]) > rival:
                break
            tail -= 1
        last = first[tail - 1]
        low, high = max(end, since[tail - 1]), n + 1
        while high - low > 1:
            middle = (low + high) // 2
            rival = best[last] + _cost_of(share, last, middle)
            if best[end] + _cost_of(share, end, middle) <= rival:
                high = middle
            else:
                low = middle
        if high <= n:
            first[tail] = end
            since[tail] = high
            tail += 1
    ends = np.empty(n + 1, np.int64)
    place = n
    end = n
    while end > 0:
        ends[place] = end
        end = came_from[end]
        place -= 1
    ends[place] = 0
    return ends[place:]


_cost_of = njit(nogil=True, cache=True)(_cost)
_best_ends = njit(nogil=True, cache=True)(_ends_of_groups)
