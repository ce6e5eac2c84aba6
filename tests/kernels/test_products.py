"""Products with chosen classes, with few non-zeros and with a number, against float64."""

import math

import pytest
import torch
from implementations import (
    DTYPES,
    ROUNDING,
    SMALLEST,
    error,
    every_implementation,
    place,
    three_threads,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lastlayer import kernels
from lastlayer.kernels import products

# Rows, classes, width, chosen classes a row.
SHAPES = [(1, 1, 1, 1), (5, 7, 3, 1), (3, 50, 33, 20), (2, 9, 1100, 17), (0, 4, 5, 2), (3, 4, 5, 0)]


def problem(n, n_classes, depth, k, dtype, device):
    hidden = torch.randn(n, depth).to(device, dtype)
    weight = torch.randn(n_classes, depth).to(device, dtype)
    bias = torch.randn(n_classes).to(device, dtype)
    return hidden, weight, bias, torch.randint(n_classes, (n, k), device=device)


def check(impl, hidden, weight, bias, classes):
    scores = kernels.products.scores(impl, hidden, weight, bias, classes)
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    assert scores.dtype == wide
    every_score = hidden.cpu().double() @ weight.cpu().double().t()
    size = hidden.cpu().double().abs() @ weight.cpu().double().abs().t() + 1
    if bias is not None:
        every_score = every_score + bias.cpu().double()
        size = size + bias.cpu().double().abs()
    chosen = classes.cpu().clamp(min=0)
    expected = torch.where(classes.cpu() < 0, 0.0, every_score.gather(-1, chosen))
    unit = 4 * torch.finfo(wide).eps
    assert error(scores, expected, unit * size.gather(-1, chosen)) <= 1


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_shapes_and_dtypes(impl, dtype, biased):
    for shape in SHAPES:
        hidden, weight, bias, classes = problem(*shape, dtype, place(impl, dtype))
        check(impl, hidden, weight, bias if biased else None, classes)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_padding_has_no_score(impl, dtype, biased):
    hidden, weight, bias, classes = problem(6, 9, 20, 5, dtype, place(impl, dtype))
    classes[torch.rand(classes.shape, device=classes.device) < 0.4] = -1
    classes[0], classes[1, 0] = -1, -1
    weight[-1] = float("nan")  # what -1 would be from behind
    check(impl, hidden, weight, bias if biased else None, classes.where(classes != 8, 0))


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts(impl, dtype):
    hidden, weight, bias, classes = problem(4, 30, 40, 3, dtype, place(impl, dtype))
    for rows in (hidden, hidden.t().contiguous().t(), hidden.repeat(1, 2)[:, :40]):
        for vectors in (weight, weight.t().contiguous().t(), weight.repeat(2, 2)[::2, :40]):
            check(impl, rows, vectors, bias, classes)
    check(impl, hidden, weight, bias.repeat(2)[::2], classes.t().contiguous().t())


def test_half_precision_is_gathered_in_pieces(monkeypatch):
    place("cpu")
    from lastlayer.kernels.products import cpu

    monkeypatch.setattr(cpu, "WIDENED", 100)
    check("cpu", *problem(23, 30, 16, 3, torch.bfloat16, "cpu"))


def test_threads_share_the_rows():
    place("cpu")
    arguments = problem(300, 50, 128, 4, torch.float32, "cpu")
    alone = kernels.products.scores("cpu", *arguments)
    with three_threads():
        assert torch.equal(kernels.products.scores("cpu", *arguments), alone)


# Rows, classes, width, entries a row: more classes than entries, and the other way round.
SPARSE_SHAPES = [
    (1, 1, 1, 1),
    (4, 90, 20, 3),
    (6, 3, 7, 18),
    (2, 5, 530, 2),
    (0, 4, 5, 2),
    (3, 4, 5, 0),
]


def problem_sparse(n, n_classes, depth, k, dtype, device):
    """Values with padding, and classes that repeat in a row where there are few."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = torch.randn(n, k, dtype=wide)
    values[torch.rand(n, k) < 0.3] = 0
    classes = torch.randint(n_classes, (n, k))
    weight, hidden = torch.randn(n_classes, depth), torch.randn(n, depth)
    return values.to(device), classes.to(device), weight.to(device, dtype), hidden.to(device, dtype)


def dense(values: Tensor, classes: Tensor, n_classes: int) -> Tensor:
    result = torch.zeros(values.shape[0], n_classes, dtype=torch.float64)
    for row in range(values.shape[0]):
        for value, chosen in zip(values[row].tolist(), classes[row].tolist(), strict=True):
            result[row, chosen] += value
    return result


def check_to_hidden(impl, values, classes, weight):
    result = products.to_hidden(impl, values, classes, weight)
    assert result.dtype == weight.dtype
    expected = dense(values, classes, weight.shape[0]) @ weight.cpu().double()
    size = dense(values.abs(), classes, weight.shape[0]) @ weight.cpu().double().abs()
    assert error(result, expected, slack(size, expected, weight.dtype, weight.dtype)) <= 1


def check_to_weight(impl, values, classes, hidden, before):
    total = before.clone(memory_format=torch.preserve_format)
    products.add_to_weight_(impl, values, classes, hidden, total)
    n_classes = before.shape[0]
    product = dense(values, classes, n_classes).t() @ hidden.cpu().double()
    expected = before.cpu().double() + product
    size = dense(values.abs(), classes, n_classes).t() @ hidden.cpu().double().abs()
    size = size + before.cpu().double().abs()
    assert error(total, expected, slack(size, expected, hidden.dtype, before.dtype)) <= 1
    untouched = dense((values != 0).double(), classes, n_classes).sum(0) == 0
    assert torch.equal(total.cpu()[untouched], before.cpu()[untouched])


def slack(size: Tensor, expected: Tensor, computed: torch.dtype, stored: torch.dtype) -> Tensor:
    """What rounding may do to a sum whose terms have that size together."""
    wide = 2.0**-52 if computed == torch.float64 else 2.0**-23
    return 4 * wide * size + ROUNDING[stored] * expected.abs() + SMALLEST[stored] + 1e-300


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
def test_to_hidden(impl, dtype):
    for shape in SPARSE_SHAPES:
        values, classes, weight, _ = problem_sparse(*shape, dtype, place(impl, dtype))
        check_to_hidden(impl, values, classes, weight)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_to_weight(impl, dtype, wide):
    """Into memory of the same dtype, or of float32 from half precision."""
    for shape in SPARSE_SHAPES:
        values, classes, weight, hidden = problem_sparse(*shape, dtype, place(impl, dtype))
        before = weight.float() if wide and dtype.itemsize < 4 else weight
        check_to_weight(impl, values, classes, hidden, before)


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_sparse(impl, dtype):
    values, classes, weight, hidden = problem_sparse(5, 30, 24, 4, dtype, place(impl, dtype))
    turned = [each.t().contiguous().t() for each in (values, classes, weight, hidden)]
    check_to_hidden(impl, turned[0], turned[1], weight)
    check_to_weight(impl, turned[0], turned[1], hidden, weight)
    for vectors in (turned[2], weight.repeat(2, 2)[::2, :24]):
        check_to_hidden(impl, values, classes, vectors)
        check_to_weight(impl, values, classes, hidden, vectors)
    check_to_weight(impl, values, classes, turned[3], weight)


@every_implementation
def test_padding_is_never_looked_at(impl):
    """Neither its class vector nor the gradient of its class: both may hold anything."""
    values, classes, weight, hidden = problem_sparse(4, 60, 8, 5, torch.float32, place(impl))
    classes = classes.clamp(min=1)
    values[:, 0] = 0
    classes[:, 0] = 0
    before = weight.clone()
    before[0] = 1e30
    check_to_weight(impl, values, classes, hidden, before)
    check_to_hidden(impl, values, classes, weight)


@every_implementation
def test_the_order_of_sums_is_fixed(impl):
    values, classes, weight, hidden = problem_sparse(40, 5, 12, 6, torch.float32, place(impl))
    results = []
    for _ in range(2):
        total = weight.clone()
        products.add_to_weight_(impl, values, classes, hidden, total)
        results.append((total, products.to_hidden(impl, values, classes, weight)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_classes", [1, 3, 400])
def test_threads_and_pieces_change_nothing(dtype, n_classes, monkeypatch):
    """However the entries of a class are spread, one thread adds them up, in one order."""
    place("cpu")
    from lastlayer.kernels.products import cpu

    values, classes, weight, hidden = problem_sparse(300, n_classes, 48, 9, dtype, "cpu")
    classes = torch.minimum(classes, torch.randint(n_classes, classes.shape))

    def both():
        total = weight.clone()
        products.add_to_weight_("cpu", values, classes, hidden, total)
        return total, products.to_hidden("cpu", values, classes, weight)

    alone = both()
    check_to_weight("cpu", values, classes, hidden, weight)
    monkeypatch.setattr(cpu, "WIDENED", 150 * 48)
    with three_threads():
        together = both()
    assert torch.equal(alone[0], together[0])
    assert torch.equal(alone[1], together[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_needs_no_memory_for_classes_without_entries(dtype):
    """The gradient of a weight can be most of what a machine holds: there is no copy of it."""
    place("cpu")
    from lastlayer.kernels.products import cpu

    values, classes, weight, hidden = problem_sparse(5, 5000, 16, 4, dtype, "cpu")
    with LargestResult(weight) as watch:
        cpu.add_to_weight_(values, classes, hidden, weight)
        cpu.to_hidden(values, classes, weight)
    assert 0 < watch.numbers <= 5 * 4 * 16


class LargestResult(TorchDispatchMode):
    """The most numbers that an operation of torch gave memory to."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.numbers, self._known = 0, known.untyped_storage().data_ptr()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() != self._known:
                self.numbers = max(self.numbers, each.numel())
        return result


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (4099,), (0, 4)])
def test_every_number_is_multiplied(impl, dtype, shape):
    device = place(impl, dtype)
    for factor in (-1.7, 0.0, 1e-3):
        before = torch.randn(shape).to(device, dtype)
        values = before.clone()
        products.scale_(impl, values, [], torch.tensor(factor, device=device))
        expected = before.cpu().double() * torch.tensor(factor).double()
        slack = 2 * ROUNDING[dtype] * expected.abs() + SMALLEST[dtype] + 1e-300
        assert error(values, expected, slack) <= 1


@every_implementation
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_others_are_multiplied_alike(impl, count):
    device = place(impl)
    shapes = [(4099,), (3, 5), (0,), (9000,), (), (7,), (2, 2)]
    before = [torch.randn(shape, device=device) for shape in shapes[: count + 1]]
    values = [each.clone() for each in before]
    products.scale_(impl, values[0], values[1:], torch.tensor(0.5, device=device))
    assert all(torch.equal(made, 0.5 * each) for made, each in zip(values, before, strict=True))


@every_implementation
def test_one_changes_nothing(impl):
    device = place(impl)
    before = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45, 3e38], device=device)
    values = before.clone()
    products.scale_(impl, values, [], torch.ones((), device=device))
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))


@every_implementation
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_factor_that_is_no_number(impl, factor):
    device = place(impl)
    values = torch.tensor([2.0, 0.0, -1.0], device=device)
    products.scale_(impl, values, [], torch.tensor(factor, device=device))
    expected = torch.tensor([2.0, 0.0, -1.0]) * factor
    assert error(values, expected) == 0


@every_implementation
def test_the_factor_may_be_wider_or_narrower(impl):
    device = place(impl)
    for factor in (torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.5).bfloat16()):
        values = torch.ones(3, device=device)
        products.scale_(impl, values, [], factor.to(device))
        assert error(values, torch.full((3,), float(factor))) <= 1e-7


def test_a_program_takes_several_blocks(monkeypatch):
    kernel = pytest.importorskip("lastlayer.kernels.products.triton")
    monkeypatch.setattr(kernel, "MOST_PROGRAMS", 2)
    device = place("triton")
    before = torch.randn(5 * 4096 + 3, device=device)
    values = before.clone()
    products.scale_("triton", values, [], torch.tensor(0.5, device=device))
    assert torch.equal(values, 0.5 * before)


def mean_of(losses, weights):
    """In float64, from what counts alone."""
    weights = torch.ones_like(losses) if weights is None else weights
    losses, weights = losses.cpu().double(), weights.cpu().double()
    some = weights != 0
    share = 1.0 / weights.sum() if some.any() else torch.zeros((), dtype=torch.float64)
    return (losses[some] * weights[some]).sum() * share, share


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [0, 1, 3, 130, 9001])
@pytest.mark.parametrize("kind", [None, torch.bool, torch.float32, torch.bfloat16])
def test_the_mean_of_losses(impl, dtype, n, kind):
    device = place(impl, dtype)
    losses = torch.randn(n, dtype=dtype, device=device)
    weights = None if kind is None else (3 * torch.rand(n, device=device) - 1).clamp(min=0).to(kind)
    loss, share = products.weighted_mean(impl, losses, weights)
    assert loss.dtype == share.dtype == dtype
    assert loss.shape == share.shape == ()
    expected, part = mean_of(losses, weights)
    assert error(loss, expected) <= 1e-6
    assert error(share, part, part.clamp(min=1e-9)) <= 1e-6


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_losses_that_do_not_count_are_left_out(impl, monkeypatch):
    device = place(impl)
    losses = torch.tensor([math.nan, 2.0, math.inf, 4.0], device=device)
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0], device=device)

    def check():
        made = products.weighted_mean(impl, losses, weights)
        assert [each.item() for each in made] == [3.5, 0.25]
        nothing = products.weighted_mean(impl, losses, torch.zeros(4, device=device))
        assert [each.item() for each in nothing] == [0.0, 0.0]
        assert products.weighted_mean(impl, losses, weights > 3)[0].item() == 0.0
        assert products.weighted_mean(impl, losses, None)[0].isnan()
        assert products.weighted_mean(impl, losses, None)[1].item() == 0.25

    check()
    if impl == "triton":
        kernel = pytest.importorskip("lastlayer.kernels.products.triton")
        monkeypatch.setattr(kernel, "MOST_LOSSES", 2)
        check()


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_row_factors_leave_ignored_rows_out(impl, mean, weighted):
    device = place(impl)
    for n in (0, 1, 5, 130, 9000):
        target = torch.randint(7, (n,), device=device)
        target[::3] = -100
        given = torch.rand(n, device=device) if weighted else None
        hidden = torch.randn(n, 13, device=device)
        hidden[target == -100] = torch.nan
        clean, states, weight, factor = products.row_factors(
            impl, target, hidden, given, -100, mean
        )
        counts = target.cpu() != -100
        assert torch.equal(states.cpu(), torch.where(counts[:, None], hidden.cpu(), 0.0))
        expected = counts.double() * (given.cpu().double() if weighted else 1.0)
        assert torch.equal(clean.cpu(), torch.where(counts, target.cpu(), 0))
        assert error(weight, expected) == 0
        total = float(expected.sum()) if mean else 1.0
        assert error(factor, expected / (total or 1.0), 1e-6) <= 1
