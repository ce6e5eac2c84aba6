"""The engines of losses along paths: what torch.compile sees of them, and their one frame."""

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from lastlayer import kernels, trees
from lastlayer.fused import paths
from lastlayer.heads import HierarchicalSoftmax

ZIPF = 1e4 / np.arange(1, 31)
BINARY, WIDE = trees.huffman(ZIPF), trees.balanced(90).collapse(45)
OVERLAPPING = trees.from_codes([["00", "110"], "01", "10", ["111", "02"]])
each_tree = pytest.mark.parametrize(
    "tree", [BINARY, WIDE, OVERLAPPING], ids=["binary", "wide", "overlapping"]
)


class Watched(TorchDispatchMode):
    """Any mode makes engines go through their registered operation."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def problem(tree, dtype=torch.float64, n=7, device="cpu"):
    tables = paths.TreeTables(tree, device)
    leaves = [torch.randn(n, 5), torch.randn(tables.n_rows, 5), torch.randn(tables.n_rows)]
    target = torch.randint(tree.n_classes, (n,))
    target[2] = -100
    return tables, [leaf.to(dtype).requires_grad_() for leaf in leaves], target


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, None])
def test_the_operation_of_binary_paths(reduction, ignore_index):
    tables, leaves, target = problem(BINARY)
    target = target.clamp(min=0) if ignore_index is None else target
    given = [*leaves, target, tables.leaf_rank, tables.path_start, tables.path_edge, None]
    for wanted in ([True] * 3, [False, True, False], [True, False, False], [False] * 3):
        options = ignore_index, tables.longest, torch.float64, tables.n_inner, None
        arguments = (
            [None if each is None else each.detach() for each in given],
            None,
            *options,
            reduction,
            wanted,
        )
        torch.library.opcheck(
            torch.ops.lastlayer.path_loss.default, arguments,
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_gradients_with_a_bound(reduction, dtype):
    """As on a GPU: padded, and the gradient of hidden is scaled by the same operation."""
    tables, leaves, target = problem(BINARY, dtype)
    tree = tables.leaf_rank, tables.path_start, tables.path_edge, tables.level_start
    made = []
    for room in (None, -1, tables.most_touched(7)):
        options = -100, tables.longest, dtype, tables.n_inner, room
        (loss,) = paths.fused_loss(paths._PATHS, (*leaves, target, *tree), options, reduction)
        upstream = torch.linspace(0.5, 2.0, 7)[: loss.numel()].reshape(loss.shape)
        made.append([each.to_dense() for each in torch.autograd.grad(loss, leaves, upstream)])
    for dense, exact, padded in zip(*made, strict=True):
        torch.testing.assert_close(exact, dense)
        torch.testing.assert_close(padded, dense)


def test_the_operation_of_nodes_one_by_one():
    tables, leaves, _ = problem(WIDE)
    node = torch.tensor([[0, 1, tables.n_inner]] * 7)
    node[:, 1] = tables.n_inner
    given = [each.detach() for each in (*leaves, node, torch.zeros_like(node), tables.row_start)]
    given += [None] * 5
    options = list(tables.sizes(1)), 3, tables.n_classes, None, False
    for upstream, wanted in ((None, [True] * 3), (torch.rand(7, 3).double(), [True, True, False])):
        torch.library.opcheck(
            torch.ops.lastlayer.nodes_one_by_one.default,
            (given, upstream, *options, "none", wanted),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.skipif(kernels.available()["triton"] is not None, reason="no Triton")
@pytest.mark.parametrize("targets", [False, True])
def test_the_operation_of_groups(targets, monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(paths, "selected", lambda *_: "triton")
    tables, leaves, target = problem(WIDE, torch.float32, device=device)
    target = target.to(device)
    leaves = [leaf.detach().to(device).requires_grad_() for leaf in leaves]
    node = torch.tensor([[0, 3, tables.n_inner]] * 7, device=device)

    def run():
        if targets:
            how = dict(ignore_index=-100, reduction="mean", sparse=False)
            made = paths.group_loss(tables, *leaves, target, **how)
        else:
            made = paths.node_log_probs(
                tables, *leaves, node, torch.ones_like(node), paths=1, sparse=False
            )
        return made, *torch.autograd.grad(made.sum(), leaves)

    plain = run()
    with Watched():
        registered = run()
    for one, other in zip(plain, registered, strict=True):
        torch.testing.assert_close(one, other)
    tree = tables.path_start, tables.path_edge, tables.edge_node, tables.child_start
    entries = (None, None) if targets else (node, torch.ones_like(node))
    last = (target, *tree) if targets else (None,) * 5
    given = [*(leaf.detach() for leaf in leaves), *entries, tables.row_start, *last]
    options = list(tables.sizes(1)), tables.longest, tables.n_classes, -100, False
    arguments = given, None, *options, "mean", [True] * 3
    real = torch.ops.lastlayer.node_groups.default(*arguments)
    with FakeTensorMode() as mode:
        arguments = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        fake = torch.ops.lastlayer.node_groups.default(*arguments)
    for one, other in zip(fake, real, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()


@each_tree
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_registered_operation_says_the_same(tree, sparse, reduction):
    head = HierarchicalSoftmax(5, tree, sparse=sparse, reduction=reduction, dtype=torch.float64)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    target = torch.randint(tree.n_classes, (7,))
    target[3] = -100
    leaves = [hidden, *head.parameters()]
    plain = head(hidden, target)
    expected = plain, *torch.autograd.grad(plain.sum(), leaves)
    with Watched():
        loss = head(hidden, target)
        made = loss, *torch.autograd.grad(loss.sum(), leaves)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one.to_dense(), other.to_dense())


@each_tree
@pytest.mark.parametrize("n", [0, 1, 6])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_retain_graph_and_no_rows(tree, reduction, n):
    head = HierarchicalSoftmax(5, tree, reduction=reduction)
    hidden = torch.randn(n, 5, requires_grad=True)
    target = torch.randint(tree.n_classes, (n,))
    leaves = [hidden, *head.parameters()]
    loss = head(hidden, target)
    upstream = torch.rand(loss.shape)
    first = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
    first = [each.clone() for each in first]
    second = torch.autograd.grad(loss, leaves, upstream)
    for one, other, leaf in zip(first, second, leaves, strict=True):
        assert torch.equal(one, other)
        assert one.shape == leaf.shape


@each_tree
@pytest.mark.parametrize("sparse", [False, True])
def test_inside_a_checkpoint_that_unpacks_once(tree, sparse):
    """Non-reentrant checkpoints let a saved tensor be unpacked once, then forget it."""
    head = HierarchicalSoftmax(5, tree, sparse=sparse)
    hidden = torch.randn(6, 5, requires_grad=True)
    target = torch.randint(tree.n_classes, (6,))
    leaves = [hidden, *head.parameters()]
    expected = torch.autograd.grad(head(hidden, target), leaves)
    loss = checkpoint(head, hidden, target, use_reentrant=False)
    for one, other in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        torch.testing.assert_close(one.to_dense(), other.to_dense())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_saved_tensors_are_unpacked_once(reduction):
    head = HierarchicalSoftmax(5, BINARY, reduction=reduction)
    hidden, target = torch.randn(6, 5, requires_grad=True), torch.randint(30, (6,))
    unpacked = []

    def unpack(packed):
        unpacked.append(packed[0])
        return packed[1]

    count = iter(range(10**6))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (next(count), x), unpack):
        loss = head(hidden, target)
        loss = loss if reduction == "mean" else loss.sum()
    loss.backward()
    assert len(unpacked) == len(set(unpacked))


def test_few_operations_are_dispatched():
    head = HierarchicalSoftmax(16, trees.huffman(torch.arange(100, 0, -1)))
    hidden, target = torch.randn(32, 16, requires_grad=True), torch.randint(100, (32,))
    found = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(str(func))
            return func(*args, **(kwargs or {}))

    head(hidden, target).backward()
    with Counted():
        head(hidden, target).backward()
    assert len(found) <= 12, found
