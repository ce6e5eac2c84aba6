"""Numbers that tell trees apart."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lastlayer.trees._arrays import Integers, Reals
from lastlayer.trees._checks import as_shares, check_number
from lastlayer.trees._loops import add_down, add_up, cost_of_several_paths

if TYPE_CHECKING:
    from lastlayer.trees.tree import Tree


class EntropyBound(NamedTuple):
    """A lower bound of the expected depth."""

    bits: float
    """For binary trees."""
    steps: float
    """For trees of the arity of the one that was asked."""


def expected_depth(tree: "Tree", counts: Any) -> float:
    """The mean depth of classes drawn by their counts."""
    return float(as_shares(counts, tree.n_classes) @ tree.class_depth)


def entropy_bound(tree: "Tree", counts: Any) -> EntropyBound:
    """Shannon's bound for codes of any kind."""
    shares = as_shares(counts, tree.n_classes)
    some = shares[shares > 0]
    bits = max(0.0, float(-(some * np.log2(some)).sum()))
    return EntropyBound(bits, bits / np.log2(max(2, tree.max_arity)).item())


def step_cost(tree: "Tree", counts: Any, in_features: int) -> float:
    """Expected multiply-adds for one row."""
    check_number("in_features", in_features, least=1)
    return float(as_shares(counts, tree.n_classes) @ vectors_met(tree)) * in_features


def vectors_met(tree: "Tree") -> Integers:
    """How many vectors are scored on the way to each class."""
    vectors = np.where(tree.arity == 2, 1, tree.arity).astype(np.int64)
    if not tree.n_inner:
        return np.zeros(1, np.int64)
    if tree.overlaps:
        paths = tree.class_start, tree.path_start, tree.path_node
        several: Integers = cost_of_several_paths(*paths, vectors)
        return several
    add_down(tree.parent, vectors)
    leaves = np.flatnonzero(tree.child < 0)
    result = np.empty(tree.n_classes, np.int64)
    result[~tree.child[leaves]] = np.repeat(vectors, tree.arity)[leaves]
    return result


def sums_below(tree: "Tree", per_leaf: Reals) -> Reals:
    """For each inner node the sum over the leaves below it, of one number a class."""
    leaf = tree.child < 0
    owner = np.repeat(np.arange(tree.n_inner), tree.arity)[leaf]
    total = np.bincount(owner, per_leaf[~tree.child[leaf]], tree.n_inner).astype(np.float64)
    add_up(tree.parent, total)
    return total
