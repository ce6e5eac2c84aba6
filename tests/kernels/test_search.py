"""The best leaves of a tree against a sum over each path in float64; random and chosen leaves."""

import math
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import DTYPES, every_implementation, place
from torch.nn.functional import logsigmoid

from lastlayer import trees
from lastlayer.fused.paths import TreeTables
from lastlayer.kernels import search

sys.path.append(str(Path(__file__).parents[1] / "trees"))
from random_trees import follow, random_trees, zipf

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


class Problem:
    """A tree, hidden states and node vectors; all of them in float64 too."""

    def __init__(self, tree, depth=5, n=4, scale=1.0, dtype=torch.float32, device="cpu"):
        self.tree, self.tables = tree, TreeTables(tree, device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.hidden = torch.randn(n, depth).to(device, wide)
        self.weight = (scale * torch.randn(self.tables.n_rows, depth)).to(device, dtype)
        self.bias = torch.randn(self.tables.n_rows).to(device, dtype)

    def search(self, impl, k, most=10**5):
        tables = self.tables
        return search.best_leaves(
            impl, self.hidden, self.weight, self.bias, tables.child_start, tables.row_start,
            tables.child, len(tables.levels), k, most,
        )  # fmt: skip

    def node_log_probs(self):
        """Of the children of each node, in float64."""
        tables = self.tables
        hidden, weight = self.hidden.double().cpu(), self.weight.double().cpu()
        scores = (hidden.unsqueeze(1) * weight).sum(-1)
        if self.bias is not None:
            scores += self.bias.double().cpu()
        first = tables.row_start.tolist()
        parts = [scores[:, a:b] for a, b in pairwise(first)]
        return [
            logsigmoid(torch.cat([-part, part], -1)) if part.shape[1] == 1 else part.log_softmax(-1)
            for part in parts
        ]

    def truth(self):
        """Log-probabilities of all classes ``(n, n_classes)`` and of all nodes ``(n, n_inner)``."""
        below, tree = self.node_log_probs(), self.tree
        classes = torch.zeros(len(self.hidden), tree.n_classes, dtype=torch.float64)
        nodes = torch.zeros(len(self.hidden), tree.n_inner, dtype=torch.float64)
        for c in range(tree.n_classes):
            code = tree.code(c)
            for node, position in zip(follow(tree, code)[0], code, strict=True):
                nodes[:, node] = classes[:, c]
                classes[:, c] += below[node][:, position]
        return classes, nodes


def check(problem, impl, k):
    """The values are those of a sort; each class has its value, and none comes twice."""
    values, classes, opened = problem.search(impl, k)
    truth, _ = problem.truth()
    tolerance = TOLERANCE[values.dtype]
    assert values.dtype == problem.hidden.dtype
    assert classes.dtype == opened.dtype == torch.int64
    assert ((opened > 0) & (opened <= 2 * problem.tree.n_inner)).all()
    values, classes = values.double().cpu(), classes.cpu()
    best = truth.sort(dim=-1, descending=True).values[:, :k]
    torch.testing.assert_close(values, best, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(truth.gather(-1, classes), best, atol=tolerance, rtol=tolerance)
    assert (classes.sort(-1).values.diff(dim=-1) > 0).all()
    assert (values.diff(dim=-1) <= 0).all()


@settings(max_examples=25)
@given(random_trees(least=2), st.sampled_from([0.1, 1.0, 6.0]), st.integers(0, 10**6))
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_random_trees(impl, tree, scale, seed):
    torch.manual_seed(seed)
    problem = Problem(tree, scale=scale, dtype=torch.float64)
    for k in range(1, tree.n_classes + 1):
        check(problem, impl, k)


@pytest.mark.parametrize("seed", range(4))
def test_random_binary_trees_on_cuda(seed):
    device = place("triton")
    counts = np.random.default_rng(seed).pareto(1.0, 2 + 9 * seed) + 0.01
    problem = Problem(trees.huffman(counts), depth=3, n=2, device=device)
    for k in sorted({1, (len(counts) + 1) // 2, len(counts)}):
        check(problem, "triton", k)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_classes(impl, dtype):
    device = place(impl, dtype)
    problem = Problem(trees.huffman(zipf(700)), 19, 2, 0.5, dtype, device)
    for k in (1, 9, 33) if dtype == torch.float32 else (9,):
        check(problem, impl, k)
    problem.bias = None
    check(problem, impl, 3)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_nodes(impl, dtype):
    for tree in (trees.huffman(zipf(300)).collapse(9), trees.two_level(zipf(200))):
        problem = Problem(tree, 17, dtype=dtype)
        for k in (1, 12, tree.n_classes):
            check(problem, impl, k)


@every_implementation
def test_vectors_wider_than_a_tile_and_strides(impl):
    device = place(impl)
    problem = Problem(trees.balanced(30), 700, 2, 0.05, device=device)
    check(problem, impl, 4)
    problem.weight = problem.weight.t().contiguous().t()
    problem.hidden = problem.hidden.t().contiguous().t()
    check(problem, impl, 4)


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_equal_classes_the_lower_one_comes_first(impl, dtype):
    """Scores are 0 or 100: sums are exact, and a parent can equal its child."""
    device = place(impl, dtype)
    counts = np.random.default_rng(5).integers(1, 50, 40)
    for tree in (trees.balanced(32), trees.huffman(counts)):
        problem = Problem(tree, 2, 2, 0.0, dtype, device)
        problem.bias = (torch.randint(-1, 2, problem.bias.shape) * 100.0).to(device, dtype)
        expected = problem.search("reference", tree.n_classes)
        for k in (1, 3, 11):
            values, classes, _ = problem.search(impl, k)
            assert torch.equal(classes, expected[1][:, :k])
            torch.testing.assert_close(values, expected[0][:, :k])


@every_implementation
def test_a_deep_and_skewed_tree(impl):
    device = place(impl)
    tree = trees.huffman(2.0 ** np.arange(60))
    assert len(tree.code(0)) == 59
    problem = Problem(tree, 4, 2, device=device)
    for k in (1, 6):
        check(problem, impl, k)
    problem.bias = torch.full_like(problem.bias, -9.0)  # some go down to the end
    check(problem, impl, 6)


@every_implementation
def test_no_rows(impl):
    problem = Problem(trees.balanced(8), n=0, device=place(impl))
    values, classes, opened = problem.search(impl, 3)
    assert values.shape == classes.shape == (0, 3)
    assert opened.shape == (0,)


def test_a_heap_opens_what_it_must_and_no_more():
    """Every node as probable as the k-th class, for one of its children might be too."""
    for tree in (trees.huffman(zipf(400)), trees.huffman(zipf(400)).collapse(5)):
        problem = Problem(tree, 8, 6, 0.4, torch.float64)
        classes, nodes = problem.truth()
        for k in (1, 10, 50):
            kth = classes.sort(dim=-1, descending=True).values[:, k - 1 : k]
            assert torch.equal(problem.search("cpu", k)[2], (nodes >= kth).sum(-1))


@pytest.mark.parametrize("impl", ["cpu", "triton"])
def test_a_row_that_reads_too_much_is_given_up(impl):
    device = place(impl)
    problem = Problem(trees.balanced(600), 3, 3, 0.0, device=device)
    problem.bias.zero_()
    problem.weight[:, 0] = 8.0
    problem.hidden.zero_()
    problem.hidden[1] = 1.0  # this one knows its way; in the others all classes are alike
    values, classes, opened = problem.search(impl, 2, most=100)
    assert opened.tolist()[::2] == [-1, -1]
    assert values[::2].isnan().all()
    assert (classes[::2] == -1).all()
    assert opened[1] > 0
    assert torch.equal(classes[1], problem.search("reference", 2)[1][1])
    if impl == "cpu":
        assert (problem.search("cpu", 300, most=100)[2] == -1).all()


@pytest.mark.parametrize(("name", "room"), [("NODES", 16), ("LEAVES", 32), ("MOST_OPENED", 60)])
def test_a_row_that_holds_too_much_is_given_up_on_cuda(name, room, monkeypatch):
    device = place("triton")
    from lastlayer.kernels.search import triton as kernel

    problem = Problem(trees.balanced(64), 3, 2, 1.0, device=device)
    problem.hidden[0] = 0.0
    problem.bias.zero_()  # 64 leaves are alike in the first row
    problem.hidden[1] = 3.0
    problem.weight[:] = 5.0
    assert (problem.search("triton", 2)[2] > 0).all()
    monkeypatch.setattr(kernel, name, room)
    _, classes, opened = problem.search("triton", 2)
    assert opened[0] == -1
    assert opened[1] > 0
    assert torch.equal(classes[1], problem.search("reference", 2)[1][1])


@pytest.mark.parametrize("impl", ["cpu", "triton"])
def test_nan_is_given_up_in_its_row_alone(impl):
    device = place(impl)
    problem = Problem(trees.balanced(64), n=3, device=device)
    clean = problem.search(impl, 5)
    problem.hidden[1, 2] = math.nan
    values, classes, opened = problem.search(impl, 5)
    assert opened[1] == -1
    for found, before in ((values, clean[0]), (classes, clean[1]), (opened, clean[2])):
        assert torch.equal(found[::2], before[::2])
    problem.hidden[1, 2] = 0.0
    problem.bias[1] = math.nan  # a node below the root, which every search for all opens
    assert (problem.search(impl, 64)[2] == -1).all()


@pytest.mark.parametrize("impl", ["cpu", "triton"])
def test_classes_of_no_probability_are_not_found(impl):
    device = place(impl)
    problem = Problem(trees.balanced(16), n=2, device=device)
    problem.bias[0] = -math.inf  # the second half of the classes
    check(problem, impl, 8)
    assert (problem.search(impl, 9)[2] == -1).all()
    values = problem.search("reference", 9)[0]
    assert (values[:, 8] == -math.inf).all()


def test_wide_nodes_without_probability():
    problem = Problem(trees.balanced(30).collapse(5))
    problem.bias[1:5] = -math.inf
    k = int((problem.truth()[0][0] > -math.inf).sum())
    assert k < 30
    check(problem, "cpu", k)
    problem.bias[:5] = -math.inf  # log-softmax of the root is NaN
    assert (problem.search("cpu", 1)[2] == -1).all()


def test_threads_change_nothing():
    problem = Problem(trees.huffman(zipf(900)), 32, 40)
    alone = problem.search("cpu", 12)
    torch.set_num_threads(2)
    try:
        together = problem.search("cpu", 12)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_exactly(dtype):
    from lastlayer.kernels.search import cpu as _nodes

    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    widen = _nodes._widen_bfloat16 if dtype == torch.bfloat16 else _nodes._widen_float16
    out = np.empty(len(bits), np.float32)
    widen(bits.numpy(), out)
    torch.testing.assert_close(
        torch.from_numpy(out), bits.view(dtype).float(), rtol=0.0, atol=0.0, equal_nan=True
    )


def test_what_cuda_does_not_take():
    device = place("triton")
    with pytest.raises(
        ValueError, match=r"child: expected two edges .*impl='triton', got 13 for 5"
    ):
        Problem(trees.balanced(9).collapse(3), device=device).search("triton", 2)
    with pytest.raises(ValueError, match=r"k: expected at most 64 with impl='triton', got 65"):
        Problem(trees.balanced(90), device=device).search("triton", 65)


def test_torch_accepts_the_operation():
    problem = Problem(trees.balanced(9))
    tables = problem.tables
    torch.library.opcheck(
        torch.ops.lastlayer.tree_search.default,
        (problem.hidden, problem.weight, problem.bias, tables.child_start, tables.row_start,
         tables.child, len(tables.levels), 3, 100),
    )  # fmt: skip


TREES = {
    "two levels": trees.two_level(zipf(60)),
    "binary": trees.huffman(zipf(40)),
    "of two and three": trees.huffman(zipf(23), arity=3),
    "one wide node": trees.from_parents([-1] + [0] * 70),
    "overlap": trees.from_codes([["00", "1"], ["01", "20"], ["02"], ["21"], ["3"]]),
}


def drawn(problem, impl, uniform):
    tables = problem.tables
    return search.random_leaves(
        impl, problem.hidden, problem.weight, problem.bias, tables.child_start, tables.row_start,
        tables.child, tables.widest, uniform,
    )  # fmt: skip


def from_left_to_right(problem):
    """Classes in the order of the tree's leaves, and where the share of each ends."""
    below, tables = problem.node_log_probs(), problem.tables
    child, start = tables.child.tolist(), tables.child_start.tolist()
    classes, logs = [], []

    def go(node, reached):
        for i, edge in enumerate(range(start[node], start[node + 1])):
            log_prob = reached + below[node][:, i]
            if child[edge] >= 0:
                go(child[edge], log_prob)
            else:
                classes.append(~child[edge])
                logs.append(log_prob)

    go(0, torch.zeros(len(problem.hidden), dtype=torch.float64))
    return torch.tensor(classes), torch.stack(logs, -1).exp().cumsum(-1)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TREES)
def test_a_number_decides_a_leaf(impl, dtype, name):
    device = place(impl, dtype)
    problem = Problem(TREES[name], 19, 3, 0.5, dtype, device)
    uniform = torch.rand(3, 5, dtype=torch.float64)
    made = drawn(problem, impl, uniform.to(device)).cpu()
    assert made.dtype == torch.int64
    classes, ends = from_left_to_right(problem)
    # Rounding may move the end of a share a little.
    low = torch.searchsorted(ends, uniform - 1e-5, right=True)
    high = torch.searchsorted(ends, uniform + 1e-5, right=True)
    for row, i in np.ndindex(3, 5):
        near = classes[low[row, i] : high[row, i] + 1]
        assert made[row, i] in near


@every_implementation
def test_no_walk_leads_to_a_class_without_probability(impl):
    device = place(impl)
    uniform = torch.tensor([[0.0, 0.5, 1 - 2**-53]], dtype=torch.float64, device=device)
    for name in ("binary", "of two and three", "one wide node"):
        problem = Problem(TREES[name], 3, 1, device=device)
        rows = problem.tables.row_start.tolist()
        for first, last in pairwise(rows):
            # The first, or the last but one, where a node has more than two.
            problem.bias[first if first % 2 else last - 1] = -math.inf
        made = drawn(problem, impl, uniform).cpu()
        assert (problem.truth()[0].gather(1, made) > -math.inf).all()
    problem = Problem(trees.balanced(16), 1, 1, device=device)
    problem.weight.fill_(math.inf)
    problem.hidden.fill_(1.0)
    assert (drawn(problem, impl, uniform) == 15).all()


@every_implementation
def test_a_walk_that_meets_a_nan_has_no_class(impl):
    device = place(impl)
    for name in ("two levels", "binary"):
        problem = Problem(TREES[name], n=3, device=device)
        uniform = torch.rand(3, 4, dtype=torch.float64, device=device)
        clean = drawn(problem, impl, uniform)
        problem.hidden[1, 2] = math.nan
        made = drawn(problem, impl, uniform)
        assert (made[1] == -1).all()
        assert torch.equal(made[::2], clean[::2])


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in TREES if name != "overlap"])
def test_log_probs_of_chosen_leaves(impl, dtype, name):
    device = place(impl, dtype)
    problem = Problem(TREES[name], 19, 4, 0.5, dtype, device)
    problem.bias[0] = -math.inf
    problem.hidden[2, 1] = math.nan
    tables = problem.tables
    classes = torch.randint(problem.tree.n_classes, (4, 3))
    truth = problem.truth()[0].gather(1, classes)
    classes[3, 0], classes[3, 1] = -1, problem.tree.n_classes
    truth[3, :2] = math.nan
    made = search.leaf_log_probs(
        impl, problem.hidden, problem.weight, problem.bias, tables.child_start, tables.row_start,
        tables.edge_node, tables.path_start, tables.path_edge, tables.widest, classes.to(device),
    )  # fmt: skip
    within = TOLERANCE[made.dtype]
    torch.testing.assert_close(made.double().cpu(), truth, rtol=within, atol=within, equal_nan=True)


def test_torch_accepts_walks():
    problem = Problem(trees.balanced(9).collapse(3))
    tables = problem.tables
    given = problem.hidden, problem.weight, problem.bias, tables.child_start, tables.row_start
    paths = tables.edge_node, tables.path_start, tables.path_edge, tables.widest
    for operation, rest in (
        ("tree_draw", (tables.child, tables.widest, torch.rand(4, 2, dtype=torch.float64))),
        ("tree_log_probs", (*paths, torch.randint(9, (4, 2)))),
    ):
        torch.library.opcheck(getattr(torch.ops.lastlayer, operation).default, (*given, *rest))
