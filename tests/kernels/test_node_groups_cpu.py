"""Choices at nodes with few rows, and all leaves of a tree, by the CPU kernels, against float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from lastlayer import kernels, trees
from lastlayer.fused.paths import TreeTables, groups_of
from lastlayer.heads import HierarchicalSoftmax
from lastlayer.kernels.node_groups import reference

if kernels.available()["cpu"] is not None:
    pytest.skip(kernels.available()["cpu"], allow_module_level=True)

from lastlayer.kernels.node_groups import cpu

WITHIN = {torch.float32: 3e-5, torch.float64: 1e-12}
TREES = {
    "two levels": trees.two_level(50),
    "of two and three": trees.huffman(1 / np.arange(1.0, 23), arity=3),
    "binary": trees.huffman(1 / np.arange(1.0, 40)),
    "collapsed": trees.huffman(1 / np.arange(1.0, 60)).collapse(8),
    "one wide node": trees.from_parents([-1] + [0] * 150),
    "64 children": trees.balanced(300, 64),
}
by_tree = pytest.mark.parametrize("name", TREES)
by_dtype = pytest.mark.parametrize("dtype", WITHIN, ids=str)


def problem(name, dtype, bias=True, depth=19, n=23):
    """Hidden states, weight and bias; the nodes of random entries, some of none; their children."""
    tables = TreeTables(TREES[name])
    hidden = torch.randn(n, depth, dtype=dtype)
    weight = torch.randn(tables.n_rows, depth, dtype=dtype)
    biases = torch.randn(tables.n_rows, dtype=dtype) if bias else None
    node = torch.randint(tables.n_inner + 1, (n, 3))
    start = torch.cat([tables.child_start, tables.child_start[-1:] + 1])
    position = (torch.rand(n, 3) * (start[node + 1] - start[node])).long()
    return tables, hidden, weight, biases, node, position


@by_tree
@by_dtype
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_chosen_children_and_their_gradients(name, dtype, bias):
    tables, hidden, weight, biases, node, position = problem(name, dtype, bias)
    sources = [hidden, weight, biases] if bias else [hidden, weight]
    wide = [each.double().requires_grad_() for each in sources]
    truth = reference.log_probs(
        wide[0], wide[1], wide[2] if bias else None, node, position, tables.row_start
    )
    upstream = torch.randn(node.shape, dtype=dtype)
    expected = torch.autograd.grad(truth, wide, upstream.double())

    groups = groups_of(tables.row_start, node.flatten())
    made = torch.zeros(node.shape, dtype=dtype)
    cpu.choose(hidden, weight, biases, *groups, position.flatten(), made)
    torch.testing.assert_close(made.double(), truth, rtol=0, atol=WITHIN[dtype])

    # Vectors that no entry asks for are left alone, as are entries that ask for nothing.
    entries = torch.zeros(*node.shape, hidden.shape[1], dtype=dtype)
    of_weight, of_bias = torch.zeros_like(weight), torch.zeros_like(weight[:, 0])
    again = torch.zeros_like(made)
    cpu.gradients(
        hidden, weight, biases, *groups, position.flatten(), again, upstream.flatten(), groups.row,
        entries, of_weight, of_bias,
    )  # fmt: skip
    torch.testing.assert_close(again, made)
    found = [entries.sum(1), of_weight, of_bias][: len(sources)]
    for each, right in zip(found, expected, strict=True):
        torch.testing.assert_close(each.double(), right, rtol=0, atol=10 * WITHIN[dtype])


@by_tree
@by_dtype
def test_all_leaves(name, dtype):
    tables = TreeTables(TREES[name])
    tree = tables.child_start, tables.row_start, tables.child, tables.path_end
    # More columns than there are rows of the weight: the rest is not read.
    scores = 5 * torch.randn(9, tables.n_rows + 3, dtype=dtype)
    scores[:, tables.n_rows :] = torch.nan
    made = torch.empty(9, tables.n_classes, dtype=dtype)
    cpu.leaves(scores, *tree, made)
    truth = reference.leaves(scores.double(), *tree)
    torch.testing.assert_close(made.double(), truth, rtol=1e-6, atol=WITHIN[dtype])
    torch.testing.assert_close(
        made.double().exp().sum(1), torch.ones(9).double(), rtol=0, atol=WITHIN[dtype]
    )


@by_tree
def test_extreme_scores_are_as_torch_has_them(name):
    tables = TreeTables(TREES[name])
    tree = tables.child_start, tables.row_start, tables.child, tables.path_end
    scores = torch.randn(7, tables.n_rows)
    scores[1, 0], scores[2, -1], scores[3, 0], scores[4] = torch.nan, torch.nan, -torch.inf, 200.0
    scores[5, ::2] = -200.0
    made = torch.empty(7, tables.n_classes)
    cpu.leaves(scores, *tree, made)
    torch.testing.assert_close(made, reference.leaves(scores, *tree), equal_nan=True)


@by_tree
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_a_head_trains_as_its_log_probabilities_say(name, sparse):
    tree = TREES[name]
    head = HierarchicalSoftmax(12, tree, sparse=sparse, dtype=torch.float64)
    hidden = torch.randn(40, 12, dtype=torch.float64, requires_grad=True)
    target = torch.randint(tree.n_classes, (40,))
    target[3] = -100
    sources = [hidden, head.weight, head.bias]
    found = torch.autograd.grad(head(hidden, target), sources)
    kept = target != -100
    truth = -head.log_prob(hidden).gather(1, target.clamp(min=0).unsqueeze(1))[kept].mean()
    for each, right in zip(found, torch.autograd.grad(truth, sources), strict=True):
        dense = each.to_dense() if each.is_sparse else each
        torch.testing.assert_close(dense, right, rtol=1e-9, atol=1e-12)
        if each.is_sparse:
            places = each.indices()[0]
            assert bool((places[1:] > places[:-1]).all())


def test_many_rows_at_a_node_take_a_product(monkeypatch):
    """Both ways at once, and each alone, give the same."""
    head = HierarchicalSoftmax(16, trees.two_level(120), dtype=torch.float64)
    hidden, target = torch.randn(300, 16, dtype=torch.float64), torch.randint(120, (300,))
    made = []
    for few in (0, 3000, 1 << 40):
        monkeypatch.setattr("lastlayer.fused.paths._KERNEL_MULTIPLICATIONS", few)
        made.append(torch.autograd.grad(head(hidden, target), [head.weight, head.bias]))
    for one, other in pairwise(made):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
