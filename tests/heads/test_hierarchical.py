"""The hierarchical softmax, against a dense formula written from the codes of the classes."""

import copy
import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastlayer import trees
from lastlayer.heads import Head, _tree_nodes
from lastlayer.heads.hierarchical import HierarchicalSoftmax
from lastlayer.testing import check_head
from waits import no_waits

sys.path.append(str(Path(__file__).parents[1] / "trees"))
from random_trees import random_trees

ZIPF = 1e4 / np.arange(1, 31)


def overlapping():
    return trees.from_codes([[[0, 0], [1, 1, 0]], [[0, 1]], [[1, 0]], [[1, 1, 1], [0, 2]]])


def shapes():
    return {
        "balanced": trees.balanced(29),
        "huffman": trees.huffman(ZIPF),
        "huffman of four": trees.huffman(ZIPF, arity=4),
        "two levels": trees.two_level(np.ones(40)),
        "collapsed": trees.huffman(ZIPF).collapse(8),
        "wide and binary": trees.balanced(90).collapse(45),
        "overlapping": overlapping(),
        "overlapping, binary": trees.from_codes(
            [["00", "1100", "1110"], ["01"], ["10", "1111"], ["1101"]]
        ),
    }


TREES = shapes()
each_tree = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)


def dense_log_prob(head, hidden, weight=None, bias=None):
    """By the definition: every class on its own, node by node along each of its codes."""
    tree = head.tree
    weight = head.weight if weight is None else weight
    bias = head.bias if bias is None else bias
    widths = [1 if a == 2 else a for a in tree.arity.tolist()]
    first = np.concatenate([[0], np.cumsum(widths)])

    def along(code):
        total, node = hidden.new_zeros(hidden.shape[:-1]), 0
        for position in code:
            rows = slice(first[node], first[node + 1])
            scores = hidden @ weight[rows].T
            scores = scores if bias is None else scores + bias[rows]
            if tree.arity[node] == 2:
                scores = torch.cat([torch.zeros_like(scores), scores], -1)
            total = total + torch.log_softmax(scores, -1)[..., position]
            node = int(tree.child[tree.child_start[node] + position])
        return total

    classes = [
        torch.logsumexp(torch.stack([along(code) for code in tree.codes(c)]), 0)
        for c in range(tree.n_classes)
    ]
    return torch.stack(classes, -1)


@each_tree
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_it_is_a_head(tree, sparse, seed):
    torch.manual_seed(seed)
    check_head(
        lambda: HierarchicalSoftmax(7, tree, sparse=sparse), draws=4000, compile=False, seed=seed
    )


@pytest.mark.parametrize("name", ["huffman", "wide and binary", "overlapping"])
@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces
def test_it_compiles(name):
    head = HierarchicalSoftmax(5, TREES[name], dtype=torch.float64)
    hidden = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    target = torch.randint(head.n_classes, (6,))
    target[2] = -100
    torch.compiler.reset()
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    leaves = [hidden, *head.parameters()]
    loss, plain = compiled(hidden, target), head(hidden, target)
    torch.testing.assert_close(loss, plain)
    for got, expected in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(plain, leaves), strict=True
    ):
        torch.testing.assert_close(got, expected)


@settings(max_examples=25)
@given(st.booleans().flatmap(lambda overlap: random_trees(overlap, least=2)), st.booleans())
def test_random_trees_keep_to_the_definition(tree, bias):
    head = HierarchicalSoftmax(4, tree, bias=bias, reduction="none", dtype=torch.float64)
    hidden = torch.randn(5, 4, dtype=torch.float64)
    target = torch.randint(tree.n_classes, (5,))
    everything = head.log_prob(hidden)
    expected = dense_log_prob(head, hidden)
    torch.testing.assert_close(everything, expected)
    torch.testing.assert_close(everything.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    by_paths = _tree_nodes.path_log_prob(head._nodes, hidden, target.unsqueeze(-1), once=False)
    torch.testing.assert_close(by_paths, expected.gather(-1, target.unsqueeze(-1)))
    torch.testing.assert_close(head(hidden, target), -by_paths.squeeze(-1))


@each_tree
@pytest.mark.parametrize(("bias", "by_node"), [(True, False), (False, False), (True, True)])
def test_gradients_are_those_of_the_dense_formula(tree, bias, by_node, monkeypatch):
    if by_node:
        # As if there were many rows for each node.
        monkeypatch.setattr(_tree_nodes, "_NUMBERS_PER_NODE", 0)
    heads = [
        HierarchicalSoftmax(6, tree, bias=bias, sparse=sparse, dtype=torch.float64)
        for sparse in (False, True)
    ]
    heads[1].load_state_dict(heads[0].state_dict())
    hidden = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    target = torch.randint(tree.n_classes, (9,))
    target[[1, 5]] = -100
    counted = target >= 0
    chosen = dense_log_prob(heads[0], hidden)[counted].gather(-1, target[counted].unsqueeze(-1))
    expected = torch.autograd.grad(-chosen.mean(), [hidden, *heads[0].parameters()])
    for head in heads:
        made = torch.autograd.grad(head(hidden, target), [hidden, *head.parameters()])
        assert [each.is_sparse for each in made[1:]] == [head.sparse] * len(made[1:])
        for got, wanted in zip(made, expected, strict=True):
            torch.testing.assert_close(got.to_dense(), wanted)


@pytest.mark.parametrize("name", ["huffman", "collapsed", "wide and binary"])
def test_only_rows_on_the_paths_have_a_gradient(name):
    tree = TREES[name]
    head = HierarchicalSoftmax(6, tree, sparse=True)
    target = torch.tensor([3, 11, 3])
    head(torch.randn(3, 6), target).backward()
    touched = set(head.weight.grad.coalesce().indices()[0].tolist())
    tables = head._tables
    expected = set()
    for c in (3, 11):
        node = 0
        for position in tree.code(c):
            expected.update(range(int(tables.row_start[node]), int(tables.row_start[node + 1])))
            node = int(tree.child[tree.child_start[node] + position])
    assert expected <= touched <= expected | {0}
    dense = head.weight.grad.to_dense()
    assert (dense.abs().sum(-1) > 0).nonzero().flatten().tolist() == sorted(expected)


def test_sparse_gradients_train():
    torch.manual_seed(0)
    head = HierarchicalSoftmax(8, trees.huffman(ZIPF), sparse=True)
    optimiser = torch.optim.SparseAdam(head.parameters(), lr=0.05)
    hidden, target = torch.randn(30, 8), torch.arange(30)
    first = head(hidden, target).item()
    for _ in range(60):
        optimiser.zero_grad()
        head(hidden, target).backward()
        optimiser.step()
    assert head(hidden, target).item() < 0.3 * first


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["huffman", "wide and binary"])
def test_the_root_sums_its_gradient_in_float32(name, sparse):
    """It has a part from every row: in half precision most of them would be rounded away."""
    dtype = torch.bfloat16
    head = HierarchicalSoftmax(4, TREES[name], sparse=sparse, dtype=dtype)
    hidden = torch.rand(3000, 4).to(dtype)
    target = torch.zeros(3000, dtype=torch.int64)
    exact = copy.deepcopy(head).double()
    head(hidden, target).backward()
    exact(hidden.double(), target).backward()
    for got, wanted in zip(head.parameters(), exact.parameters(), strict=True):
        grad, expected = got.grad.to_dense().double(), wanted.grad.to_dense()
        assert got.grad.dtype == dtype
        assert (grad - expected).norm() <= 2e-2 * expected.norm()


PLAIN = ["balanced", "huffman"]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_backward_can_be_repeated_but_not_differentiated(name, reduction):
    head = HierarchicalSoftmax(4, TREES[name], sparse=True, reduction=reduction)
    hidden = torch.randn(6, 4, requires_grad=True)
    target = torch.tensor([1, 2, -100, 2, 4, 0])
    loss, leaves = head(hidden, target), [hidden, *head.parameters()]
    upstream = torch.rand(loss.shape)
    made = [torch.autograd.grad(loss, leaves, upstream, retain_graph=True) for _ in range(2)]
    for first, second in zip(*made, strict=True):
        assert torch.equal(first.to_dense(), second.to_dense())
    with pytest.raises(RuntimeError, match=r"create_graph=True; use head.log_prob"):
        torch.autograd.grad(loss, leaves, upstream, create_graph=True)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("sparse", [False, True])
def test_what_is_frozen_costs_nothing(frozen, sparse):
    head = HierarchicalSoftmax(4, TREES["huffman"], sparse=sparse)
    hidden, target = torch.randn(6, 4, requires_grad=True), torch.randint(30, (6,))
    leaves = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    made = torch.autograd.grad(head(hidden, target), list(leaves.values()))
    expected = dict(zip(leaves, made, strict=True))
    leaves[frozen].requires_grad_(False)
    head(hidden, target).backward()
    assert leaves[frozen].grad is None
    for name in set(leaves) - {frozen}:
        assert torch.equal(leaves[name].grad.to_dense(), expected[name].to_dense())
    with torch.no_grad():
        assert not head(hidden, target).requires_grad


def test_sparse_gradients_are_sorted_and_add_up():
    """Rows ascend and none comes twice: torch adds such tensors without sorting them again."""
    head = HierarchicalSoftmax(4, TREES["huffman"], sparse=True, dtype=torch.float64)
    total = torch.zeros_like(head.weight)
    for _ in range(2):
        hidden, target = torch.randn(6, 4).double(), torch.randint(30, (6,))
        loss = head(hidden, target)
        (grad,) = torch.autograd.grad(loss, head.weight, retain_graph=True)
        assert grad.is_coalesced()
        assert (grad.indices()[0].diff() > 0).all()
        total += grad.to_dense()
        loss.backward()
    torch.testing.assert_close(head.weight.grad.to_dense(), total)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32,) * 2])
def test_autocast_rounds_nothing(dtypes):
    """What is gathered is multiplied as it is."""
    head = HierarchicalSoftmax(8, TREES["huffman"], dtype=dtypes[1])
    hidden = torch.randn(5, 8).to(dtypes[0]).requires_grad_()
    target = torch.randint(30, (5,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(hidden, target)
    loss.backward()
    assert loss.dtype == torch.float32
    assert hidden.grad.dtype == dtypes[0]
    assert head.weight.grad.dtype == dtypes[1]
    torch.testing.assert_close(loss, head(hidden.float(), target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces
def test_compiled_gradients_are_dense(dtype):
    head = HierarchicalSoftmax(5, TREES["huffman"], sparse=True, dtype=dtype)
    hidden = torch.randn(6, 5).to(dtype).requires_grad_()
    target = torch.tensor([3, -100, 3, 29, 0, 7])
    torch.compiler.reset()
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    leaves = [hidden, *head.parameters()]
    made = torch.autograd.grad(compiled(hidden, target), leaves)
    expected = torch.autograd.grad(head(hidden, target), leaves)
    for got, right in zip(made, expected, strict=True):
        assert not got.is_sparse
        torch.testing.assert_close(got, right.to_dense())


@pytest.mark.gpu
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_in_a_cuda_graph(sparse):
    head = HierarchicalSoftmax(32, TREES["huffman"], device="cuda")
    hidden = torch.randn(200, 32, device="cuda", requires_grad=True)
    target = torch.randint(30, (200,), device="cuda")
    leaves = [hidden, *head.parameters()]
    expected = torch.autograd.grad(head(hidden, target), leaves)
    head.sparse = sparse
    with no_waits():
        torch.autograd.grad(head(hidden, target), leaves)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = torch.autograd.grad(head(hidden, target), leaves)
    graph.replay()
    assert [got.is_sparse for got in made] == [False, sparse, sparse]
    for got, right in zip(made, expected, strict=True):
        assert torch.equal(got.to_dense() if sparse else got, right)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sparse", [False, True])
def test_wide_nodes_on_a_gpu(dtype, sparse):
    counts = 1.0 / np.arange(1.0, 2001.0)
    tree = trees.huffman(counts).collapse(30)
    head = HierarchicalSoftmax(64, tree, sparse=sparse, device="cuda", dtype=dtype)
    exact = HierarchicalSoftmax(64, tree, device="cuda", dtype=torch.float64)
    exact.load_state_dict(head.state_dict())
    hidden = torch.randn(500, 64, device="cuda", dtype=dtype, requires_grad=True)
    target = torch.randint(2000, (500,), device="cuda") % torch.randint(1, 2000, (500,)).cuda()
    target[::7] = -100
    twin = hidden.detach().double().requires_grad_()
    # As a loss scale has it: float16 has no smaller numbers than 6e-8, and gradients are in it.
    up = torch.tensor(1000.0, device="cuda")
    made = torch.autograd.grad(head(hidden, target), [hidden, *head.parameters()], up)
    right = torch.autograd.grad(exact(twin, target), [twin, *exact.parameters()], up.double())
    within = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    for got, true in zip(made, right, strict=True):
        whole = got.to_dense() if got.is_sparse else got
        assert (whole.double() - true).norm() <= within * true.norm()


@pytest.mark.parametrize("name", ["huffman of four", "two levels", "collapsed", "overlapping"])
def test_many_arities_at_once(name):
    """As a GPU does it, with the same gradients as one arity after the other."""
    tables = HierarchicalSoftmax(1, TREES[name])._tables
    scores = torch.randn(tables.n_rows, 3, dtype=torch.float64)
    scores[1, 1] = -math.inf
    scores.requires_grad_()
    upstream = torch.randn(tables.n_edges, 3, dtype=torch.float64)
    made = []
    for function in (_tree_nodes._edge_log_probs, _tree_nodes._normalised_edges):
        edges = function(tables, scores)
        (gradient,) = torch.autograd.grad(edges, scores, upstream)
        made.append((edges.detach(), gradient))
    torch.testing.assert_close(*made)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_tree
def test_predictions_on_a_gpu(tree, dtype):
    for made in (tree, trees.huffman(1 / np.arange(1.0, 3001)).collapse(tree.max_arity)):
        head = HierarchicalSoftmax(33, made, device="cuda", dtype=dtype)
        exact = HierarchicalSoftmax(33, made, device="cuda", dtype=torch.float64)
        exact.load_state_dict(head.state_dict())
        hidden = torch.randn(70, 33, device="cuda", dtype=dtype)
        hidden[5] = math.nan
        target = torch.randint(made.n_classes, (70,), device="cuda")
        lists = torch.randint(made.n_classes, (70, 40), device="cuda")
        close = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True, "check_dtype": False}
        with torch.no_grad():
            truth = exact.log_prob(hidden.double())
            head.sample(hidden)
            with no_waits():
                found = [head.log_prob(hidden, each) for each in (None, target, lists)]
                drawn = head.sample(hidden, 2)
        torch.testing.assert_close(found[0], truth, **close)
        torch.testing.assert_close(found[1], truth.gather(1, target[:, None])[:, 0], **close)
        torch.testing.assert_close(found[2], truth.gather(1, lists), **close)
        assert (drawn[5] == -1).all()
        assert (drawn[6:] >= 0).all()
        assert (truth.exp()[6:].gather(1, drawn[6:]) > 0).all()


def test_padding_takes_no_probability():
    """Codes of 1 and 9 choices, nodes of 2 and 7 children: what pads them is not a class."""
    codes = [[0], *([1] * n + [0] for n in range(1, 9)), [1] * 9]
    chain = trees.from_codes([[code] for code in codes])
    mixed = trees.from_codes([[[0]], *([[1, n]] for n in range(7))])
    for tree in (chain, mixed):
        head = HierarchicalSoftmax(3, tree, reduction="none", dtype=torch.float64)
        rows = torch.randn(1, 3, dtype=torch.float64).expand(tree.n_classes, 3)
        losses = head(rows, torch.arange(tree.n_classes))
        assert math.isclose(losses.neg().exp().sum().item(), 1.0, rel_tol=1e-12)


@pytest.mark.parametrize("name", ["balanced", "collapsed"])
def test_a_node_that_is_confidently_wrong_keeps_its_gradient(name):
    head = HierarchicalSoftmax(1, TREES[name], bias=False)
    with torch.no_grad():
        head.weight.fill_(0.0)
        head.weight[0] = 60.0
    wrong = next(c for c in range(head.n_classes) if head.tree.code(c)[0] == (name == "collapsed"))
    loss = head(torch.ones(1, 1), torch.tensor([wrong]))
    loss.backward()
    assert loss.item() > 60.0
    assert abs(head.weight.grad[0, 0].item() - 1.0) < 1e-6


def test_one_class_is_certain(tmp_path):
    head = HierarchicalSoftmax(3, trees.balanced(1))
    hidden, target = torch.randn(2, 4, 3, requires_grad=True), torch.zeros(2, 4, dtype=torch.int64)
    loss = head(hidden, target)
    loss.backward()
    assert loss.item() == 0.0
    assert not hidden.grad.any()
    head(hidden.detach(), target).backward()
    assert head.log_prob(hidden).tolist() == torch.zeros(2, 4, 1).tolist()
    assert head.log_prob(hidden, target.unsqueeze(-1)).tolist() == torch.zeros(2, 4, 1).tolist()
    values, classes = head.topk(hidden, 1)
    assert values.shape == (2, 4, 1)
    assert not values.any()
    assert not classes.any()
    assert not head.sample(hidden, 5).any()
    head.save(tmp_path)
    assert Head.load(tmp_path).tree == head.tree
    assert head.relearn(trees.balanced(1)).weight.shape == (0, 3)


@pytest.mark.parametrize("name", ["huffman", "overlapping"])
def test_the_tree_is_saved_beside_the_state(name, tmp_path):
    tree = TREES[name]
    labels = [f"class {c}" for c in range(tree.n_classes)]
    tree = trees.Tree(tree.child_start, tree.child, labels, overlap=tree.overlaps)
    head = HierarchicalSoftmax(5, tree, bias=False, sparse=True, ignore_index=None)
    head.save(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "model.safetensors", "tree.safetensors"]
    assert "tree" not in json.loads((tmp_path / "config.json").read_text())["arguments"]
    loaded = Head.load(tmp_path)
    assert loaded.tree == tree
    assert loaded.tree.labels == tree.labels
    assert repr(loaded) == repr(head)
    hidden = torch.randn(4, 5)
    assert torch.equal(loaded.log_prob(hidden), head.log_prob(hidden))
    (tmp_path / "tree.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"tree\.safetensors"):
        Head.load(tmp_path)


def test_the_state_of_another_tree_is_refused():
    state = HierarchicalSoftmax(5, trees.huffman(ZIPF)).state_dict()
    other = torch.nn.Sequential(HierarchicalSoftmax(5, trees.balanced(30)))
    with pytest.raises(ValueError, match=r"state_dict: expected .* the same tree"):
        other.load_state_dict({f"0.{name}": value for name, value in state.items()})


def flat_layer(n=60, d=8):
    layer = torch.nn.Linear(d, n)
    with torch.no_grad():
        centres = 1.5 * torch.randn(6, d)
        layer.weight.copy_(centres[torch.arange(n) % 6] + 0.3 * torch.randn(n, d))
        layer.bias.copy_(torch.randn(n))
    hidden = torch.randn(400, d)
    target = torch.distributions.Categorical(logits=layer(hidden)).sample()
    return layer, hidden, target


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("arity", [2, 8])
def test_a_start_from_a_flat_layer_beats_chance(arity, counted):
    layer, hidden, target = flat_layer()
    tree = trees.cluster(layer.weight, progress=False).collapse(arity)
    counts = torch.bincount(target, minlength=60) if counted else None
    head = HierarchicalSoftmax.init_from_linear(layer, tree, counts=counts)
    started = head(hidden, target).item()
    fresh = HierarchicalSoftmax(8, tree)(hidden, target).item()
    flat = torch.nn.functional.cross_entropy(layer(hidden), target).item()
    assert started < fresh - 0.5 * (fresh - flat)
    assert head.weight.dtype == layer.weight.dtype


def test_a_start_from_equal_vectors_is_the_same_function():
    """Below each node of the first level all vectors are alike, so that nothing is approximate."""
    layer = torch.nn.Linear(5, 12).double()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(3, 5)[torch.arange(12) // 4])
    tree = trees.from_codes([[[c // 4, c % 4]] for c in range(12)])
    head = HierarchicalSoftmax.init_from_linear(layer, tree)
    hidden = torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(head.log_prob(hidden), torch.log_softmax(layer(hidden), -1))


def test_at_zero_a_start_is_exact():
    layer, _, _ = flat_layer()
    for tree in (trees.balanced(60), trees.huffman(np.ones(60)).collapse(9)):
        head = HierarchicalSoftmax.init_from_linear(layer, tree)
        expected = torch.log_softmax(layer.bias, -1)
        torch.testing.assert_close(head.log_prob(torch.zeros(8)), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=15)
@given(random_trees(least=2))
def test_relearning_the_same_tree_changes_nothing(tree):
    head = HierarchicalSoftmax(4, tree, dtype=torch.float64, reduction="sum").eval()
    again = head.relearn(tree)
    hidden = torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close(again.log_prob(hidden), head.log_prob(hidden))
    assert again.reduction == "sum"
    assert not again.training
    assert again.weight is not head.weight


def test_a_head_that_is_relearned_starts_better_than_chance():
    layer, hidden, target = flat_layer()
    old = HierarchicalSoftmax.init_from_linear(layer, trees.cluster(layer.weight, progress=False))
    tree = trees.cluster(layer.weight, kind="adaptive", overlap=0.2, seed=1, progress=False)
    for new_tree in (tree, trees.cluster(layer.weight, seed=2, progress=False).collapse(6)):
        new = old.relearn(new_tree, counts=torch.bincount(target, minlength=60))
        fresh = HierarchicalSoftmax(8, new_tree)(hidden, target).item()
        before = old(hidden, target).item()
        assert new(hidden, target).item() < fresh - 0.4 * (fresh - before)
        back = new.relearn(trees.balanced(60))
        assert back.log_prob(hidden).isfinite().all()


def test_bad_arguments_are_named():
    tree = trees.balanced(6)
    layer = torch.nn.Linear(4, 6)
    head = HierarchicalSoftmax(4, tree)
    cases = [
        (TypeError, "tree: expected a lastlayer.trees.Tree", lambda: HierarchicalSoftmax(4, 6)),
        (ValueError, "in_features: expected at least 1", lambda: HierarchicalSoftmax(0, tree)),
        (TypeError, "linear: expected an nn.Linear",
         lambda: HierarchicalSoftmax.init_from_linear(layer.weight, tree)),
        (ValueError, "linear: expected 7 classes",
         lambda: HierarchicalSoftmax.init_from_linear(layer, trees.balanced(7))),
        (ValueError, "counts: expected shape",
         lambda: HierarchicalSoftmax.init_from_linear(layer, tree, counts=[1, 2])),
        (ValueError, "tree: expected the 6 classes", lambda: head.relearn(trees.balanced(5))),
        (TypeError, "tree: expected", lambda: head.relearn(None)),
        (ValueError, "beam: expected at least 3", lambda: head.topk(torch.ones(4), 3, beam=2)),
        (TypeError, "beam: expected an int", lambda: head.topk(torch.ones(4), 3, beam=4.0)),
        (ValueError, "beam: expected None for a tree with overlap",
         lambda: HierarchicalSoftmax(4, overlapping()).topk(torch.ones(4), 1, beam=2)),
        (ValueError, "reduction: expected",
         lambda: HierarchicalSoftmax(4, tree, reduction="median")),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


def test_a_head_from_the_meta_device_is_whole_after_a_reset():
    head = HierarchicalSoftmax(5, TREES["collapsed"], device="meta").to_empty(device="cpu")
    head.reset_parameters()
    log_prob = head.log_prob(torch.randn(3, 5))
    torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones(3))
    HierarchicalSoftmax(5, TREES["collapsed"]).load_state_dict(head.state_dict())


def test_it_says_what_it_is():
    head = HierarchicalSoftmax(5, trees.balanced(6), sparse=True)
    shown = "in_features=5, tree=Tree(n_classes=6, n_inner=5, max_arity=2, max_depth=3)"
    assert repr(head) == f"HierarchicalSoftmax({shown}, sparse=True)"


def test_chunks_change_nothing():
    head = HierarchicalSoftmax(5, TREES["collapsed"])
    hidden = torch.randn(7, 5)
    each = torch.randint(head.n_classes, (7, 2))
    shared = torch.tensor([4, 9]).expand(7, 2)
    whole = [head.log_prob(hidden, classes) for classes in (None, each, shared)]
    head.chunk_rows = 2
    with torch.no_grad():
        parts = [head.log_prob(hidden, classes) for classes in (None, each, shared)]
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)


def test_a_random_order_of_targets_does_not_matter():
    head = HierarchicalSoftmax(5, TREES["wide and binary"], reduction="none")
    hidden, target = torch.randn(40, 5), torch.randint(90, (40,))
    order = random.Random(1).sample(range(40), 40)
    torch.testing.assert_close(head(hidden, target)[order], head(hidden[order], target[order]))


WIDE = [lambda: trees.two_level(2500), lambda: trees.balanced(40, 40)]


@pytest.mark.parametrize("make", WIDE)
def test_wide_nodes_refuse_second_derivatives(make):
    head = HierarchicalSoftmax(4, make(), dtype=torch.float64)
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    classes = torch.randint(40, (3,))
    for made in (head(hidden, classes), head.log_prob(hidden, classes.unsqueeze(-1)).sum()):
        with pytest.raises(RuntimeError, match=r"use head\.log_prob\(hidden\)"):
            torch.autograd.grad(made, hidden, create_graph=True)
    (slope,) = torch.autograd.grad(head.log_prob(hidden)[:, 0].sum(), hidden, create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), hidden)
    assert second.abs().max() > 0


def test_backward_inside_autocast():
    head = HierarchicalSoftmax(8, trees.balanced(40, 40))
    hidden = torch.randn(6, 8, requires_grad=True)
    target = torch.randint(40, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        head(hidden, target).backward()
    found, head.weight.grad = head.weight.grad, None
    head(hidden, target).backward()
    torch.testing.assert_close(found, head.weight.grad, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("spread", [0.0, 3.0, 8.0])
def test_relearned_on_the_same_tree_nothing_changes(spread):
    for tree in (trees.balanced(256), trees.huffman([1.4**-i for i in range(60)])):
        head = HierarchicalSoftmax(4, tree, dtype=torch.float64)
        torch.nn.init.normal_(head.bias, std=spread)
        hidden = torch.randn(5, 4, dtype=torch.float64)
        torch.testing.assert_close(
            head.relearn(tree).log_prob(hidden), head.log_prob(hidden), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("overlap", [0.3, 0.45])
def test_a_tree_that_overlaps_starts_with_the_probabilities_of_the_layer(overlap):
    linear = torch.nn.Linear(4, 30, dtype=torch.float64)
    tree = trees.cluster(linear.weight.detach(), kind="adaptive", overlap=overlap)
    assert tree.overlaps
    head = HierarchicalSoftmax.init_from_linear(linear, tree)
    hidden = torch.zeros(1, 4, dtype=torch.float64)
    torch.testing.assert_close(head.log_prob(hidden), linear(hidden).log_softmax(-1))
    slope = torch.func.jacrev(lambda h: linear(h).log_softmax(-1))(hidden[0])
    made = torch.autograd.functional.jacobian(lambda h: head.log_prob(h)[0], hidden)
    torch.testing.assert_close(made[:, 0], slope)


def test_a_tree_of_one_class_finds_all_parameters():
    head = HierarchicalSoftmax(3, trees.balanced(1))
    head(torch.randn(2, 3), torch.zeros(2, dtype=torch.int64)).backward()
    assert all(each.grad is not None for each in head.parameters())


@each_tree
def test_biases_from_counts_start_at_the_frequencies(tree):
    head = HierarchicalSoftmax(4, tree, dtype=torch.float64)
    counts = np.random.default_rng(1).integers(0, 50, tree.n_classes)
    counts[0] = 0
    head.init_bias_from_counts(counts)
    known = torch.from_numpy(counts).double().clamp(min=0.5)
    at_zero = head.log_prob(torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(at_zero, (known / known.sum()).log())
    assert head.bias.isfinite().all()
    # Biases of the children of a wide node are their log shares.
    first = 0
    for arity in tree.arity.tolist():
        if arity > 2:
            assert math.isclose(head.bias[first : first + arity].exp().sum().item(), 1.0)
        first += 1 if arity == 2 else arity


def test_biases_from_counts_are_refused_where_there_are_none():
    with pytest.raises(ValueError, match=r"init_bias_from_counts: .* bias=False"):
        HierarchicalSoftmax(4, TREES["huffman"], bias=False).init_bias_from_counts([1] * 30)
    head = HierarchicalSoftmax(4, TREES["huffman"])
    with pytest.raises(ValueError, match=r"counts: expected shape \(30,\)"):
        head.init_bias_from_counts([1, 2])
    single = HierarchicalSoftmax(4, trees.balanced(1))
    single.init_bias_from_counts([3])
    assert single.log_prob(torch.ones(4)).tolist() == [0.0]


@each_tree
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_log_prob_of_one_class_of_lists_and_of_shared_lists(tree, dtype):
    head = HierarchicalSoftmax(4, tree, dtype=torch.float64)
    hidden = torch.randn(2, 3, 4, dtype=torch.float64)
    everything = head.log_prob(hidden)
    n = tree.n_classes
    each = torch.randint(n, (2, 3))
    lists = torch.randint(n, (2, 3, 2))
    shared = torch.randint(n, (2,))
    for classes, wanted in (
        (each, everything.gather(-1, each.unsqueeze(-1)).squeeze(-1)),
        (lists, everything.gather(-1, lists)),
        (shared.expand(2, 3, 2), everything[..., shared]),
        (shared[0].expand(2, 3), everything[..., shared[0]]),
    ):
        torch.testing.assert_close(head.log_prob(hidden, classes.to(dtype)), wanted)
    with pytest.raises(ValueError, match=r"classes\.expand\(\*batch, k\)"):
        head.log_prob(hidden, shared)


@each_tree
@pytest.mark.parametrize("sparse", [False, True])
def test_a_shared_list_has_the_gradients_of_lists(tree, sparse, monkeypatch):
    """And each vector is scored once, for which its strides are looked at."""
    head = HierarchicalSoftmax(4, tree, sparse=sparse, dtype=torch.float64)
    # However small the tree is: by paths.
    head._tables.n_rows = 10**6
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    shared = torch.randint(tree.n_classes, (3,)).expand(5, 3)
    leaves, upstream = [hidden, *head.parameters()], torch.rand(5, 3).double()
    calls = []
    real = _tree_nodes.shared_log_prob
    monkeypatch.setattr(
        "lastlayer.heads.hierarchical.shared_log_prob",
        lambda *args: calls.append(len(args[1])) or real(*args),
    )
    made = []
    for classes, chunk in ((shared, "auto"), (shared, 2), (shared.clone(), "auto")):
        head.chunk_rows = chunk
        log_prob = head.log_prob(hidden, classes)
        made.append([log_prob, *torch.autograd.grad(log_prob, leaves, upstream)])
    # Forward and backward, whole and by chunks.
    assert calls == [5, 5, 2, 2, 1, 2, 2, 1]
    for one, parts, lists in zip(*made, strict=True):
        torch.testing.assert_close(one.to_dense(), lists.to_dense())
        torch.testing.assert_close(parts.to_dense(), lists.to_dense())


@each_tree
def test_parameters_changed_before_backward_are_told(tree):
    head = HierarchicalSoftmax(4, tree)
    hidden = torch.randn(5, 4, requires_grad=True)
    lists = torch.randint(tree.n_classes, (5, 1))
    for n_rows in (head._tables.n_rows, 10**6):
        head._tables.n_rows = n_rows
        for classes in (None, lists, lists[:1].expand(5, 1)):
            for parameter in (head.weight, head.bias):
                made = head.log_prob(hidden, classes).sum()
                with torch.no_grad():
                    parameter.add_(1.0)
                if parameter is head.bias and classes is None:
                    continue  # Biases are only added: their gradient is that of the scores.
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    made.backward()


@pytest.mark.parametrize("name", ["huffman", "collapsed"])
def test_second_derivatives_of_chosen_classes(name):
    head = HierarchicalSoftmax(3, TREES[name], dtype=torch.float64)
    head._tables.n_rows = 10**6
    lists = torch.randint(30, (2, 2))
    for classes in (lists, lists[:1].expand(2, 2)):

        def log_prob(hidden, weight, bias, classes=classes):
            given = {"weight": weight, "bias": bias}
            return torch.func.functional_call(head, given, (hidden, classes))

        head.forward = head.log_prob
        hidden = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(log_prob, (hidden, head.weight, head.bias))


@pytest.mark.parametrize("name", ["huffman", "overlapping"])
def test_its_config_makes_the_same_head(name):
    head = HierarchicalSoftmax(5, TREES[name], bias=False, sparse=True, ignore_index=None)
    again = HierarchicalSoftmax(**head.config())
    assert again.config() == head.config()
    assert again.config()["tree"] is head.tree
    assert repr(again) == repr(head)
    again.load_state_dict(head.state_dict())


def test_files_that_were_cut_or_altered_are_refused_by_name(tmp_path):
    head = HierarchicalSoftmax(5, TREES["huffman"])
    head.save(tmp_path)
    for name in ("tree.safetensors", "model.safetensors"):
        path = tmp_path / name
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match=name):
            Head.load(tmp_path)
        path.write_bytes(data)
    # Another tree of the same size: the state says which one it was trained with.
    trees.balanced(30).save(tmp_path / "tree.safetensors")
    with pytest.raises(ValueError, match="the same tree"):
        Head.load(tmp_path)
