"""Balanced trees, Huffman's and those of two levels."""

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_trees import left_to_right, zipf

from lastlayer import trees

COUNTS = st.lists(st.integers(0, 20), min_size=1, max_size=60).filter(any)
FEW = st.lists(st.integers(0, 12) | st.floats(0, 12), min_size=2, max_size=7).filter(any)


@given(st.integers(1, 400), st.integers(2, 9))
def test_balanced_trees_are_even(n, arity):
    tree = trees.balanced(n, arity)
    assert left_to_right(tree) == list(range(n))
    assert tree.max_arity <= arity
    assert tree.class_depth.max() - tree.class_depth.min() <= 1
    assert arity ** (tree.max_depth - 1) < n <= arity**tree.max_depth or n == 1


def test_balanced_in_an_order_of_ones_own():
    order = torch.randperm(37)
    assert left_to_right(trees.balanced(37, 3, order=order)) == order.tolist()


def least_depth(counts, arity):
    """The least Σ count · depth of all trees with up to ``arity`` children, by trying them all."""

    @cache
    def best(group):
        if len(group) == 1:
            return 0
        first, rest = group[0], group[1:]
        # The sum of counts once for the choice at the root, and then each child on its own.
        return sum(counts[c] for c in group) + deal(((first,),), rest)

    def deal(parts, rest):
        if not rest:
            return sum(map(best, parts)) if len(parts) > 1 else np.inf
        c, later = rest[0], rest[1:]
        options = [
            deal((*parts[:i], (*part, c), *parts[i + 1 :]), later) for i, part in enumerate(parts)
        ]
        if len(parts) < arity:
            options.append(deal((*parts, (c,)), later))
        return min(options)

    return best(tuple(range(len(counts))))


@given(FEW, st.integers(2, 4))
def test_huffman_is_optimal(counts, arity):
    tree = trees.huffman(counts, arity)
    total = sum(counts)
    assert tree.expected_depth(counts) * total == pytest.approx(least_depth(tuple(counts), arity))


@given(COUNTS)
def test_huffman_is_within_a_bit_of_the_entropy(counts):
    tree = trees.huffman(counts)
    bits = tree.entropy_bound(counts).bits
    depth = tree.expected_depth(counts)
    assert bits - 1e-9 <= depth
    # Only a class that is alone with others that never occur takes all of it.
    assert depth < bits + 1 or (np.count_nonzero(counts) == 1 and depth <= 1)


@given(COUNTS, st.integers(2, 7))
def test_huffman_fills_every_node_but_the_deepest(counts, arity):
    tree = trees.huffman(counts, arity)
    assert sorted(left_to_right(tree)) == list(range(len(counts)))
    short = np.flatnonzero(tree.arity < min(arity, len(counts)))
    assert len(short) <= 1
    assert all(tree.node_depth[v] == tree.node_depth.max() for v in short)


@given(COUNTS, st.integers(2, 7))
def test_huffman_puts_what_is_frequent_first_and_higher(counts, arity):
    tree = trees.huffman(counts, arity)
    for a, b in itertools.combinations(range(len(counts)), 2):
        if counts[a] > counts[b]:
            assert tree.depth(a) <= tree.depth(b)
    mass = np.zeros(tree.n_inner)
    for v in reversed(range(tree.n_inner)):
        children = tree.child[tree.child_start[v] : tree.child_start[v + 1]]
        below = [mass[u] if u >= 0 else counts[~u] for u in children]
        assert below == sorted(below, reverse=True)
        mass[v] = sum(below)


def test_huffman_breaks_ties_by_class():
    assert trees.huffman([1, 1, 1, 1]) == trees.balanced(4)
    assert trees.huffman([0, 0, 5, 0, 0]).max_depth == 3
    assert trees.huffman([2, 2, 2], arity=3) == trees.balanced(3, 3)


def test_huffman_of_counts_that_double_is_a_chain():
    counts = [2.0**c for c in range(50)]
    tree = trees.huffman(counts)
    assert tree.max_depth == 49
    assert tree.code(49) == [0]


@given(st.integers(1, 500))
def test_two_levels_of_equal_groups(n):
    tree = trees.two_level(n)
    assert left_to_right(tree) == list(range(n))
    assert tree.max_depth <= 2
    sizes = tree.arity[1:]
    assert n < 4 or sizes.max() - sizes.min() <= 1
    assert tree.max_arity <= np.ceil(np.sqrt(n)) or n == 1


def vectors_scored(tree, counts):
    """One for each child of the root, and for each class of the group of a class."""
    shares = np.asarray(counts) / np.sum(counts)
    group = [tree.child[tree.code(c)[0]] for c in range(tree.n_classes)]
    return tree.arity[0] + sum(
        share * tree.arity[g] for share, g in zip(shares, group, strict=True) if g >= 0
    )


def partitions(items):
    if not items:
        yield []
        return
    first, *rest = items
    for parts in partitions(rest):
        yield [[first], *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], [first, *part], *parts[i + 1 :]]


@given(FEW)
def test_two_levels_from_counts_are_the_best_groups(counts):
    shares = np.array(counts) / np.sum(counts)
    least = min(
        len(parts) + sum(shares[part].sum() * len(part) for part in parts if len(part) > 1)
        for parts in partitions(list(range(len(counts))))
        if len(parts) > 1
    )
    assert vectors_scored(trees.two_level(counts), counts) == pytest.approx(least)


def test_two_levels_from_counts_cost_less_than_equal_groups():
    counts = zipf(5000, np.random.default_rng(0))
    chosen, equal = trees.two_level(counts), trees.two_level(5000)
    assert chosen.max_depth == 2
    assert vectors_scored(chosen, counts) < 0.8 * vectors_scored(equal, counts)
    assert sorted(left_to_right(chosen)) == list(range(5000))


@pytest.mark.parametrize("n", [100_000])
def test_many_classes(n):
    counts = zipf(n, np.random.default_rng(0))
    tree = trees.huffman(counts)
    assert tree.expected_depth(counts) < tree.entropy_bound(counts).bits + 1
    # Kraft's equality: the tree is complete.
    assert np.ldexp(1.0, -tree.class_depth).sum() == 1.0
    assert (tree.path_node[tree.path_start[:-1]] == 0).all()
    rows = np.full((n, tree.max_depth), -1)
    used = np.arange(tree.max_depth) < tree.class_depth[:, None]
    rows[used] = tree.path_position
    assert trees.from_codes(rows) == tree
    assert tree.collapse(64).expected_depth(counts) < tree.expected_depth(counts) / 4
    assert trees.balanced(n).max_depth == 17
