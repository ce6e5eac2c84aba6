"""Choices at many nodes of any arity, in groups, against float64.

There are Triton kernels only; on a machine without a GPU they run in Triton's interpreter.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lastlayer import kernels, trees

pytest.importorskip("triton")
if kernels.available()["triton"] is not None:
    pytest.skip(kernels.available()["triton"], allow_module_level=True)

from lastlayer.fused import paths
from lastlayer.fused.paths import TreeTables
from lastlayer.heads._tree_nodes import Nodes, path_log_prob, tree_loss
from lastlayer.kernels import node_groups as bounds
from lastlayer.kernels.node_groups import reference
from lastlayer.kernels.node_groups import triton as node_groups
from lastlayer.kernels.node_groups.triton import _make_plan as make_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies the bits of bfloat16; float32 shows there that nothing else is lost.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float32
WITHIN = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
TREES = {
    "two levels": trees.two_level(50),
    "of two and three": trees.huffman(1 / np.arange(1.0, 23), arity=3),
    "collapsed": trees.huffman(1 / np.arange(1.0, 60)).collapse(8),
    "one wide node": trees.from_parents([-1] + [0] * 150),
    "overlap": trees.from_codes([["00", "1"], ["01", "20"], ["02"], ["21"], ["3"]]),
}


ALL_TREES = TREES | {
    "huffman": trees.huffman(1 / np.arange(1.0, 90)),
    "balanced": trees.balanced(64),
    "chain": trees.from_codes([[[1] * n + [0]] for n in range(9)] + [[[1] * 9]]),
}


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch):
    """float64 has no kernel, and is the truth."""
    chosen = {torch.float64: "reference"}
    monkeypatch.setattr(paths, "selected", lambda _op, _device, dtype: chosen.get(dtype, "triton"))


class Case(NamedTuple):
    tables: TreeTables
    leaves: list[Tensor]
    classes: Tensor
    counted: Tensor
    upstream: Tensor


def case_of(name, dtype, *, bias=True, depth=20, n=16) -> Case:
    tree = TREES[name]
    tables = TreeTables(tree, DEVICE)
    weight = (2 * depth**-0.5 * torch.randn(tables.n_rows, depth, device=DEVICE)).to(dtype)
    leaves = [torch.randn(n, depth, device=DEVICE).to(dtype), weight]
    if bias:
        leaves.append(torch.randn(tables.n_rows, device=DEVICE).to(dtype))
    # Half of the rows have few classes, so that some groups are of several tiles.
    classes = torch.randint(tree.n_classes, (n, 1), device=DEVICE)
    classes[: n // 2] %= 3
    counted = torch.arange(n, device=DEVICE) != 1
    return Case(tables, leaves, classes, counted, torch.rand(n, 1, device=DEVICE) / 1e4)


def run(case: Case, dtype=None, sparse=False) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Log-probabilities, and gradients of rows, weight and bias."""
    leaves = [leaf.detach().to(dtype or leaf.dtype).requires_grad_() for leaf in case.leaves]
    rows, weight, *bias = leaves
    nodes = Nodes(case.tables, weight, bias[0] if bias else None, sparse)
    made = path_log_prob(nodes, rows, case.classes, case.counted, once=True)
    return made.detach(), torch.autograd.grad(made, leaves, case.upstream.to(made.dtype))


def check(case: Case, sparse=False) -> None:
    dtype = case.leaves[0].dtype
    right, right_gradients = run(case, torch.float64)
    made, gradients = run(case, sparse=sparse)
    assert made.dtype == torch.float32
    assert off(made, right) < WITHIN[torch.float32]
    assert not made[1].any()
    for got, true in zip(gradients, right_gradients, strict=True):
        assert got.dtype == dtype
        assert off(got, true) < WITHIN[dtype]
    assert [got.is_sparse for got in gradients[1:]] == [sparse] * len(gradients[1:])


def off(actual: Tensor, right: Tensor) -> float:
    actual = actual.to_dense() if actual.is_sparse else actual
    assert actual.shape == right.shape
    return float((actual.double() - right).norm() / right.norm())


@pytest.mark.parametrize("name", TREES)
def test_as_in_float64(name):
    # At the root of two levels there are more rows than are added up at a time.
    check(case_of(name, HALF, n=40 if name == "two levels" else 12))


@pytest.mark.parametrize("name", ["of two and three", "collapsed"])
def test_the_reference_says_the_same(name):
    case = case_of(name, torch.float64)
    rows, weight, bias = case.leaves
    edges, inside, _ = case.tables.edges_of(case.classes, case.counted)
    edges, inside = edges.flatten(1), inside.flatten(1)
    node, position = case.tables.node_and_position(edges)
    node = torch.where(inside, node, len(case.tables.row_start) - 1)
    made = reference.log_probs(rows, weight, bias, node, position, case.tables.row_start)
    torch.testing.assert_close(made.sum(-1, keepdim=True), run(case, torch.float64)[0])


def test_small_factors_from_upstream_do_not_vanish_in_float16():
    check(case_of("two levels", torch.float16, n=8))


def test_sparse_gradients_have_the_rows_of_the_nodes_on_the_paths():
    case = case_of("of two and three", HALF, n=6)
    check(case, sparse=True)
    _, (_, weight, bias) = run(case, sparse=True)
    assert weight.is_coalesced()
    assert bias.is_coalesced()
    tables = case.tables
    edges, inside, _ = tables.edges_of(case.classes, case.counted)
    nodes, _ = tables.node_and_position(edges[inside].unique())
    rows = [torch.arange(*tables.row_start[v : v + 2].tolist()) for v in nodes.unique().tolist()]
    assert torch.equal(weight.indices()[0].cpu(), torch.cat(rows))


def test_without_a_bias():
    check(case_of("collapsed", HALF, bias=False, n=5, depth=7))


def test_what_the_gradients_of_all_entries_take_is_bounded(monkeypatch):
    """A few numbers of the vectors at a time."""
    monkeypatch.setattr(node_groups, "MOST_PARTS", 1)
    check(case_of("two levels", HALF, depth=300, n=5))


def test_what_the_scores_take_is_bounded(monkeypatch):
    """A few rows at a time, whose scores backward makes again."""
    case = case_of("two levels", HALF, n=7)
    made = []
    for reduction in ("mean", "none"):
        for held in (paths._HELD_SCORES, 90):
            monkeypatch.setattr(paths, "_HELD_SCORES", held)
            leaves = [leaf.clone().requires_grad_() for leaf in case.leaves]
            nodes, target = Nodes(case.tables, *leaves[1:]), case.classes[:, 0]
            loss = tree_loss(nodes, leaves[0], target, 1, reduction).sum()
            made.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
        for whole, parts in zip(*made[-2:], strict=True):
            assert off(parts, whole.double()) < WITHIN[HALF]


def test_a_nan_stays_in_its_row():
    case = case_of("two levels", HALF, n=12)
    case.leaves[0][8] = torch.nan
    made, (rows, *_) = run(case)
    others = torch.arange(12, device=DEVICE) != 8
    assert made[8].isnan().all()
    assert made[others].isfinite().all()
    assert rows[others].isfinite().all()


def test_the_same_each_time():
    case = case_of("collapsed", HALF, n=8 if DEVICE == "cpu" else 800)
    _, first = run(case)
    _, second = run(case)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_plan_has_every_score_once():
    case = case_of("collapsed", HALF, n=70)
    tables = case.tables
    edges, inside, _ = tables.edges_of(case.classes, case.counted)
    node, _ = tables.node_and_position(edges.flatten(1))
    node = torch.where(inside.flatten(1), node, tables.n_inner).reshape(-1)
    sizes = bounds.TreeSizes(tables.n_inner, tables.n_rows, tables.widest, tables.most_scores, 1)
    made = make_plan(node.int(), tables.row_start, sizes, 70)
    asked = node[node < tables.n_inner]
    found, counts = asked.unique(return_counts=True)
    first, size, row, width, line = made.groups[:, : len(found)]
    assert torch.equal(row, tables.row_start[found])
    assert torch.equal(size, counts)
    assert torch.equal(width, tables.row_start[found + 1] - row)
    assert torch.equal(first, counts.cumsum(0) - counts)
    assert torch.equal((size * line).cumsum(0), made.ends[3, : len(found)])
    assert made.ends[3, -1] <= bounds.most_scores(70, sizes)
    assert not made.groups[3, len(found) :].any()
    for tiles, ends in zip(made[4:], made.ends, strict=False):
        assert ends[-1] <= len(tiles)
        places = torch.arange(len(tiles), device=DEVICE)
        assert torch.equal(tiles.long(), torch.searchsorted(ends, places, right=True))
    assert torch.equal(node[made.entry], node.sort().values)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", [*ALL_TREES])
def test_all_leaves(name, bias, monkeypatch):
    """Wide nodes and levels in launches of their own too."""
    for module in (bounds, node_groups):
        monkeypatch.setattr(module, "MANY_EDGES", 30)
    monkeypatch.setattr(paths, "WIDTHS", (16, 32))
    tables = TreeTables(ALL_TREES[name], DEVICE)
    scores = 5 * torch.randn(6, tables.n_rows + 3, device=DEVICE)[:, : tables.n_rows]
    biases = torch.randn(tables.n_rows, device=DEVICE).to(HALF) if bias else None
    scores[3] = torch.nan
    scores[2, -1] = -torch.inf
    made = torch.full((6, tables.n_classes), torch.nan, device=DEVICE)
    node_groups.leaves(scores, biases, tables.for_leaves(), made)
    right = scores.double() if biases is None else scores.double() + biases.double()
    tree = tables.child_start, tables.row_start, tables.child, tables.path_end
    truth = reference.leaves(right, *tree)
    parts = truth.split(tables.class_start.diff().tolist(), 1)
    truth = torch.stack([part.logsumexp(1) for part in parts], 1)
    torch.testing.assert_close(made.double(), truth, rtol=0, atol=3e-5, equal_nan=True)


def test_a_loss_takes_its_entries_from_the_targets():
    """And gives what log-probabilities give; a target that is no class has a loss of NaN."""
    case = case_of("of two and three", HALF, n=12)
    rows, weight, bias = leaves = [leaf.clone().requires_grad_() for leaf in case.leaves]
    target = case.classes.squeeze(-1).clone()
    target[1], target[2] = -100, case.tables.n_classes
    with torch.no_grad():
        rows[1] = torch.nan
    losses = tree_loss(Nodes(case.tables, weight, bias), rows, target, -100, "none")
    assert losses[1] == 0.0
    assert losses[2].isnan()
    fine = torch.arange(12, device=DEVICE) != 2
    made = torch.autograd.grad(losses[fine].sum(), leaves)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with torch.no_grad():
        wide[0][1] = 0.0
    target[2] = -100
    right = tree_loss(Nodes(case.tables, *wide[1:]), wide[0], target, -100, "none")
    assert off(losses[fine].detach(), right[fine].detach()) < WITHIN[torch.float32]
    for got, true in zip(made, torch.autograd.grad(right.sum(), wide), strict=True):
        assert off(got, true) < WITHIN[HALF]
