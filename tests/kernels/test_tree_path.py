"""The loss along paths of binary trees: each implementation against the reference in float64."""

import random
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from implementations import DTYPES, ROUNDING, error, every_implementation, place, three_threads
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lastlayer import trees
from lastlayer.fused.paths import TreeTables
from lastlayer.kernels import tree_path
from lastlayer.kernels.tree_path import reference

sys.path.append(str(Path(__file__).parents[1] / "trees"))
from random_trees import grown

# Of a sum in float32, or float64, relative to the size of its terms.
SUM = {torch.float64: 1e-13}


def random_tree(n: int, seed: int) -> trees.Tree:
    leaves = list(range(n))
    chance = random.Random(seed)
    chance.shuffle(leaves)
    codes = sorted(grown(leaves, 2, chance))
    return trees.from_codes([[code] for _, code in codes])


def chain(depth: int) -> trees.Tree:
    """As skewed as can be: a leaf on every level."""
    codes = [[[1] * k + [0]] for k in range(depth)]
    return trees.from_codes([*codes, [[1] * depth]])


class Case(NamedTuple):
    tables: TreeTables
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    ignore_index: int | None = -100

    def double(self) -> "Case":
        wide = [None if each is None else each.double() for each in self[1:4]]
        return self._replace(hidden=wide[0], weight=wide[1], bias=wide[2])

    def loss(self, impl, to_nodes=True, to_hidden=True, mean=False):
        t = self.tables
        return tree_path.loss(
            impl, *self[1:5], t.leaf_rank, t.path_start, t.path_edge, self.ignore_index, t.longest,
            to_nodes, to_hidden, mean,
        )  # fmt: skip

    def summed(self, slopes, factor, order):
        paths = self.tables.path_start, self.tables.path_edge, self.ignore_index
        return slopes, factor, self.hidden, self.target, order, *paths

    def touched(self, impl, slopes, factor, order, *wanted, gradient=None):
        """Nodes found, gradients and scaled gradient of hidden; Triton pads, and so do others."""
        *summed, ignore_index = self.summed(slopes, factor, order)
        most = self.tables.most_touched(len(self.target))
        given = *summed, self.tables.level_start, ignore_index, *wanted, most, gradient
        nodes, *sums, scaled = tree_path.to_touched_nodes(impl, *given)
        assert nodes.shape == (1, most)
        found = nodes[0] > 0
        found[:1] = self.known().any()
        for each in sums:
            assert len(each) in (0, most)
            assert not len(each) or not each[~found].any()
        return nodes[0][found], *(each[found] if len(each) else each for each in sums), scaled

    def known(self) -> Tensor:
        inside = (self.target >= 0) & (self.target < self.tables.n_classes)
        return inside if self.ignore_index is None else inside & (self.target != self.ignore_index)


def case(tree, n, d, dtype=torch.float32, device="cpu", biased=True, **options) -> Case:
    made = [torch.randn(n, d), 2 * torch.randn(tree.n_inner, d) * d**-0.5]
    hidden, weight = (each.to(device, dtype) for each in made)
    bias = torch.randn(tree.n_inner).to(device, dtype) if biased else None
    # Not all classes alike: frequent ones make long runs.
    target = torch.minimum(*torch.randint(tree.n_classes, (2, n), device=device))
    return Case(TreeTables(tree, device), hidden, weight, bias, target, **options)


def check(impl: str, made: Case, factor: Tensor | None = None) -> None:
    """Losses, slopes and all gradients, within what rounding may do."""
    exact = made.double()
    n, dtype = len(made.target), made.hidden.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if factor is None:
        factor = torch.rand(n, device=made.hidden.device) + 0.5
    losses, order, slopes, rows = made.loss(impl)
    expected = exact.loss("reference")
    within = SUM.get(dtype, 2e-6)
    assert losses.dtype == slopes.dtype == rows.dtype == wide
    assert torch.equal(order, expected[1])
    longest = max(1, made.tables.longest)
    size = expected[0].nan_to_num(posinf=0.0).abs().max().item() if n else 0.0
    assert error(losses, expected[0]) <= within * longest * (4 + size)
    assert error(slopes, expected[2]) <= 8 * within
    assert error(rows, expected[3]) <= within * longest * float(made.weight.abs().max() + 1)
    counted = n if made.ignore_index is None else int((made.target != made.ignore_index).sum())
    divided, _, *parts = made.loss(impl, mean=True)
    for whole, part in zip((losses, slopes, rows), (divided, *parts), strict=True):
        torch.testing.assert_close(part * max(1, counted), whole, equal_nan=True)
    summed = made.summed(slopes, factor.to(wide), order)
    n_nodes, wanted = made.tables.n_inner, (dtype, True, made.bias is not None)
    weight, bias = tree_path.to_nodes(impl, *summed, n_nodes, *wanted)
    truth = reference.to_nodes(
        *exact.summed(expected[2], factor.double(), order), n_nodes, torch.float64, *wanted[1:]
    )
    room = (within * 4 * max(1, n), 2 * ROUNDING[dtype])
    for got, right in zip((weight, bias), truth, strict=True):
        assert got.dtype == dtype
        finite = right.nan_to_num().abs().max().item() if right.numel() else 0.0
        assert error(got, right) <= room[0] * (1 + finite) + room[1] * finite
    given = slopes, factor.to(wide), order
    touched, *some, scaled = made.touched(impl, *given, *wanted, gradient=rows)
    assert scaled.dtype == dtype
    whole = rows.double() * factor.double().reshape(-1, 1)
    torch.testing.assert_close(
        scaled.double(), whole, rtol=4 * ROUNDING[dtype], atol=1e-7, equal_nan=True
    )
    nodes = {
        int(edge) >> 1
        for c in made.target[made.known()].tolist()
        for edge in made.tables.path_edge[slice(*made.tables.path_start[c : c + 2].tolist())]
    }
    assert touched.tolist() == sorted(nodes)
    for got, whole in zip(some, (weight, bias), strict=True):
        if whole.numel():
            torch.testing.assert_close(got, whole[touched], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_without_a_bound_there_is_no_padding(impl):
    made = case(random_tree(9, 0), 6, 3, device=place(impl))
    _, order, slopes, _ = made.loss(impl)
    given, wanted = (slopes, torch.tensor(0.5), order), (torch.float32, True, True)
    right = made.touched(impl, *given, *wanted)
    *summed, ignore_index = made.summed(*given)
    whole = tree_path.to_touched_nodes(
        impl, *summed, made.tables.level_start, ignore_index, *wanted
    )
    for got, known in zip((whole[0][0], *whole[1:]), right, strict=True):
        assert torch.equal(got, known)


@every_implementation
def test_more_room_than_nodes(impl):
    """Padding is zeros for node 0."""
    made = case(random_tree(9, 0), 6, 3, device=place(impl))
    _, order, slopes, _ = made.loss(impl)
    given, wanted = (
        (slopes, torch.tensor(0.5, device=place(impl)), order),
        (torch.float32, True, True),
    )
    *summed, ignore_index = made.summed(*given)
    nodes, *sums, _ = tree_path.to_touched_nodes(
        impl, *summed, made.tables.level_start, ignore_index, *wanted, 11
    )
    touched, *right, _ = made.touched(impl, *given, *wanted)
    assert nodes.shape == (1, 11)
    assert nodes.unique().tolist() == touched.tolist()
    for got, few in zip(sums, right, strict=True):
        whole = torch.zeros(8, *few.shape[1:], device=few.device)
        expected = whole.index_copy(0, touched, few)
        assert torch.equal(whole.index_add_(0, nodes[0], got), expected)


@every_implementation
def test_an_upstream_gradient_that_is_expanded(impl):
    made = case(random_tree(9, 0), 6, 3, device=place(impl))
    _, order, slopes, rows = made.loss(impl)
    one = torch.tensor(0.5, device=place(impl))
    wanted = torch.float32, True, True
    for whole, expanded in zip(
        made.touched(impl, slopes, one, order, *wanted, gradient=rows),
        made.touched(impl, slopes, one.expand(6), order, *wanted, gradient=rows),
        strict=True,
    ):
        assert torch.equal(whole, expanded)


def test_many_rows_are_sorted_by_torch(monkeypatch):
    device = place("triton")
    triton = pytest.importorskip("lastlayer.kernels.tree_path.triton")
    for n in (1, 70, 600):
        made = case(random_tree(40, 0), n, 3, device=device)
        made.target[::5] = -100
        made.target[1:3] = 99
        monkeypatch.setattr(triton, "MOST_COMPARED", 1000)
        compared = made.loss("triton", mean=True)
        monkeypatch.setattr(triton, "MOST_COMPARED", 0)
        for one, other in zip(compared, made.loss("triton", mean=True), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(autouse=True)
def _short_tiles(monkeypatch):
    """Runs are cut often, so that few rows show what many would."""
    if torch.cuda.is_available():
        return
    triton = pytest.importorskip("lastlayer.kernels.tree_path.triton")
    monkeypatch.setattr(triton, "TILE", 4)
    monkeypatch.setattr(triton, "PIECES", 2)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_trees(impl, dtype, seed):
    device = place(impl, dtype)
    sizes = [(2, 7, 5, True), (37, 1, 1, False), (23, 26, 40, True), (200, 21, 6, True)]
    for classes, n, d, biased in sizes:
        tree = random_tree(classes, seed + classes)
        check(impl, case(tree, n, d, dtype, device, biased))


@every_implementation
def test_deep_and_skewed_trees(impl):
    device = place(impl)
    for tree in (chain(70), trees.huffman(1.5 ** np.arange(64))):
        made = case(tree, 9, 6, device=device)
        made.target[:2] = made.tables.path_start.diff().argmax()
        check(impl, made)


@every_implementation
def test_a_vector_of_many_numbers(impl):
    check(impl, case(random_tree(6, 0), 5, 700, device=place(impl)))


@every_implementation
def test_rows_of_one_class_are_one_run(impl):
    made = case(random_tree(9, 0), 22, 3, device=place(impl))
    made.target.fill_(4)
    check(impl, made, torch.tensor(0.25, device=made.target.device))


@every_implementation
def test_rows_that_do_not_count(impl):
    """NaN in one reaches nothing; a target that is no class shows as NaN, and in nothing else."""
    made = case(random_tree(9, 0), 11, 3, device=place(impl))
    made.target[[2, 7]] = -100
    made.target[5] = 9
    made.hidden[[2, 7, 5]] = torch.nan
    check(impl, made)
    losses, order, _, rows = made.loss(impl)
    assert losses[[2, 7]].tolist() == [0, 0]
    assert losses.isnan().nonzero().flatten().tolist() == [5]
    assert not rows[[2, 7, 5]].any()
    assert sorted(order[-3:].tolist()) == [2, 5, 7]
    check(impl, made._replace(ignore_index=None))
    for target in (made.target[:0], torch.full_like(made.target, -100)):
        check(impl, made._replace(target=target, hidden=made.hidden[: len(target)]))


@every_implementation
def test_nasty_values(impl):
    """Scores of ±1e4, biases of -inf, and a row of NaN or infinity, which others do not see."""
    made = case(random_tree(30, 0), 14, 4, device=place(impl))
    huge = made._replace(weight=made.weight * 1e4)
    losses, _, slopes, _ = huge.loss(impl)
    assert losses.isfinite().all()
    assert losses.max() > 1e3
    assert (slopes.nan_to_num().abs().amax(1) > 0.99).any()
    assert error(losses, huge.double().loss("reference")[0], losses.max().item()) <= 1e-5
    made.bias[::3] = -torch.inf
    check(impl, made)
    before = made.loss(impl)
    for value in (torch.nan, torch.inf):
        made.hidden[3] = value
        after = made.loss(impl)
        others = torch.arange(14, device=made.target.device) != 3
        for one, other in zip(before, after, strict=True):
            if one.is_floating_point():
                torch.testing.assert_close(one[others], other[others], equal_nan=True)
        check(impl, made)


@every_implementation
def test_a_certain_node_keeps_its_small_loss_and_its_gradient(impl):
    """exp(-25) is lost where it is added to 1; a node that is certain and wrong has slope 1."""
    made = case(random_tree(2, 0), 2, 1, device=place(impl), biased=False)
    made.weight.fill_(25.0)
    made.hidden.fill_(1.0)
    second = int(made.tables.path_edge[0]) & 1
    made.target.copy_(torch.tensor([1 - second, second]))
    losses, _, slopes, _ = made.loss(impl)
    assert abs(losses[0].item() / np.exp(-25.0) - 1) < 1e-5
    assert abs(losses[1].item() - 25.0) < 1e-5
    assert abs(abs(slopes[1, 0].item()) - 1.0) < 1e-6
    assert slopes[0, 0].item() * slopes[1, 0].item() < 0


@every_implementation
def test_what_is_not_asked_for_is_empty(impl):
    made = case(random_tree(9, 0), 6, 3, device=place(impl))
    whole = made.loss(impl)
    for to_nodes, to_hidden in ((False, False), (True, False), (False, True)):
        losses, order, slopes, rows = made.loss(impl, to_nodes, to_hidden)
        assert torch.equal(losses, whole[0])
        assert len(order) == len(slopes) == 6 * to_nodes
        assert len(rows) == 6 * to_hidden
    given = whole[2], torch.ones(6, device=place(impl)), whole[1]
    summed = made.summed(*given)
    both = tree_path.to_nodes(impl, *summed, 8, torch.float32, True, True)
    for wanted in ((True, False), (False, True)):
        some = tree_path.to_nodes(impl, *summed, 8, torch.float32, *wanted)
        *rows, scaled = made.touched(impl, *given, torch.float32, *wanted)[1:]
        assert not len(scaled)
        for asked, got, few, right in zip(wanted, some, rows, both, strict=True):
            assert torch.equal(got, right if asked else right[:0])
            assert (len(few) > 0) == asked


@every_implementation
def test_layouts(impl):
    made = case(random_tree(12, 0), 8, 6, device=place(impl))
    turned = made._replace(
        hidden=made.hidden.t().contiguous().t(),
        weight=made.weight.repeat(1, 2)[:, :6],
        target=made.target.repeat_interleave(2)[::2],
    )
    check(impl, turned)
    check(impl, turned._replace(weight=made.weight.t().contiguous().t()))


@every_implementation
def test_the_order_of_sums_is_fixed(impl):
    made = case(random_tree(9, 0), 30, 5, device=place(impl))
    results = []
    for _ in range(2):
        losses, order, slopes, rows = made.loss(impl)
        summed = made.summed(slopes, torch.ones(30, device=rows.device), order)
        sums = tree_path.to_nodes(impl, *summed, 8, torch.float32, True, True)
        results.append((losses, rows, *sums))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_nothing(dtype):
    place("cpu")
    made = case(random_tree(50, 0), 400, 90, dtype)

    def run():
        losses, order, slopes, rows = made.loss("cpu")
        return losses, rows, *made.touched("cpu", slopes, torch.ones(400), order, dtype, True, True)

    alone = run()
    with three_threads():
        together = run()
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_copies_no_vectors_of_paths(dtype):
    """No buffer of rows × path × width, and none of all nodes, in either pass."""
    place("cpu")
    from lastlayer.kernels.tree_path import cpu

    made = case(trees.balanced(4096), 100, 64, dtype)
    made.target.remainder_(64)
    t = made.tables
    paths = t.path_start, t.path_edge, -100
    with LargestResult() as watch:
        _, order, slopes, _ = cpu.loss(*made[1:5], t.leaf_rank, *paths, t.longest, True, True, True)
        *summed, ignore_index = made.summed(slopes, torch.ones(100), order)
        cpu.to_touched_nodes(*summed, t.level_start, ignore_index, dtype, True, True)
    assert 0 < watch.numbers <= 100 * 64


class LargestResult(TorchDispatchMode):
    """The most numbers that an operation of torch gave memory to."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not function.is_view:
            self.numbers = max(self.numbers, result.numel())
        return result


def test_the_reference_is_what_autograd_makes_of_the_definition(seed):
    made = case(random_tree(20, seed), 9, 4, torch.float64)
    hidden, weight, bias = (each.requires_grad_() for each in made[1:4])
    scores, start = hidden @ weight.t() + bias, made.tables.path_start
    total = []
    for row, c in enumerate(made.target.tolist()):
        edges = made.tables.path_edge[start[c] : start[c + 1]].long()
        chosen = torch.stack([-scores[row, edges >> 1], scores[row, edges >> 1]], -1)
        chosen = chosen.gather(-1, (edges & 1).unsqueeze(-1))
        total.append(-torch.nn.functional.logsigmoid(chosen).sum())
    total, factor = torch.stack(total), torch.rand(9, dtype=torch.float64)
    expected = torch.autograd.grad((total * factor).sum(), (hidden, weight, bias))
    made = made._replace(hidden=hidden.detach(), weight=weight.detach(), bias=bias.detach())
    losses, order, slopes, rows = made.loss("reference")
    wanted = torch.float64, True, True
    sums = tree_path.to_nodes("reference", *made.summed(slopes, factor, order), 19, *wanted)
    torch.testing.assert_close(losses, total.detach())
    for got, right in zip((rows * factor.unsqueeze(-1), *sums), expected, strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_accepts_the_operations():
    made = case(random_tree(9, 0), 6, 3)
    t = made.tables
    paths = t.path_start, t.path_edge, -100
    ops = torch.ops.lastlayer
    for wanted in ((True, True), (False, False)):
        given = (*made[1:5], t.leaf_rank, *paths, t.longest, *wanted, wanted[0])
        torch.library.opcheck(ops.tree_path_loss.default, given)
    _, order, slopes, rows = made.loss("auto")
    summed = made.summed(slopes, torch.tensor(1.0), order)
    for wanted in ((torch.float32, True, True), (torch.bfloat16, True, False)):
        torch.library.opcheck(ops.tree_path_to_nodes.default, (*summed, 8, *wanted))
        given = *summed[:-1], t.level_start, summed[-1], *wanted
        for more in ((), (9,), (9, rows)):
            torch.library.opcheck(ops.tree_path_to_touched_nodes.default, (*given, *more))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [64, 1024])
def test_many_rows_on_a_gpu(dtype, tile, monkeypatch):
    from lastlayer.kernels.tree_path import triton

    monkeypatch.setattr(triton, "TILE", tile)
    tree = trees.huffman(1e7 / np.arange(1, 50_001))
    made = case(tree, 5000, 520, dtype, "cuda")
    shares = torch.tensor(1.0 / np.arange(1, 50_001), device="cuda")
    made.target.copy_(torch.multinomial(shares, 5000, replacement=True))
    made.target[::7] = -100
    check("triton", made)
