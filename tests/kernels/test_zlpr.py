"""ZLPR and its gradient, of rows and of slabs, against autograd in float64."""

import math
from typing import NamedTuple

import numpy as np
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
from torch.nn.functional import logsigmoid

from lastlayer.fused.label_lists import sorted_lists
from lastlayer.kernels import label_loss, zlpr

KINDS = ("hard", "soft", "lists", "padded", "offsets", "values")


class Problem(NamedTuple):
    scores: torch.Tensor
    labels: tuple
    mask: torch.Tensor | None
    smoothing: float
    target: torch.Tensor  # dense, float64
    grad: torch.Tensor


def problem(kind, n_rows, n, dtype=torch.float32, device="cpu", mask=None, size=3.0):
    scores = (size * torch.randn(n_rows, n)).to(dtype)
    grad = torch.randn(n_rows, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    shown = None
    if mask == "each":
        shown = torch.rand(n_rows, n) < 0.7
        shown[-1] = False
    elif mask == "shared":
        shown = (torch.rand(n) < 0.7).expand(n_rows, n)
    smoothing = 0.0
    if kind in ("hard", "soft"):
        hard = torch.rand(n_rows, n) < 0.2
        between = torch.where(torch.rand(n_rows, n) < 0.5, hard.float(), torch.rand(n_rows, n))
        target = hard if kind == "hard" else between
        labels, dense = (target,), target.double()
    else:
        listed = torch.randint(-2, n, (n_rows, 9))
        listed[listed < 0] = -100
        listed[0] = -100
        values = torch.rand(n_rows, 9) if kind == "values" else None
        smoothing = 0.03 if kind == "values" else 0.0
        labels = sorted_lists(listed, None, values, n_rows, n, -100, smoothing).flat()
        if kind == "padded":
            labels = (listed, None)
        elif kind == "offsets":
            starts = torch.nn.functional.pad((listed >= 0).sum(-1).cumsum(0), (1, 0))
            labels = (listed[listed >= 0], starts, None)
        dense = torch.full((n_rows, n), smoothing, dtype=torch.float64)
        for row, entries in enumerate(listed.tolist()):
            for at in reversed(range(9)):
                if entries[at] >= 0:
                    dense[row, entries[at]] = 1.0 if values is None else values[row, at].double()
    moved = [None if each is None else each.to(device) for each in (scores, shown, grad, *labels)]
    return Problem(moved[0], tuple(moved[3:]), moved[1], smoothing, dense, moved[2])


def run(impl, case):
    dense = len(case.labels) == 1
    labels = (*case.labels, [], None) if dense else (None, list(case.labels[:-1]), case.labels[-1])
    arguments = (case.scores, *labels, case.mask, case.smoothing)
    losses, stats, counts = zlpr.forward(impl, *arguments)
    return losses, counts, zlpr.backward(impl, *arguments, stats, case.grad)


def truth(case):
    """Loss and gradient of each row from the columns that count alone."""
    losses, gradient = [], torch.zeros(case.scores.shape, dtype=torch.float64)
    pairs = zip(case.scores.cpu().double(), case.target, strict=True)
    for row, (scores, target) in enumerate(pairs):
        every = torch.ones(len(scores), dtype=torch.bool)
        keep = every if case.mask is None else case.mask[row].cpu()
        zero = torch.zeros(1, dtype=torch.float64)
        loss = 0.0
        for sign, weight in ((1.0, 1.0 - target), (-1.0, target)):
            here = keep & (weight > 0)
            terms = torch.cat([zero, sign * scores[here] + weight[here].log()])
            loss = loss + torch.logsumexp(terms, 0)
            gradient[row, here] += sign * torch.softmax(terms, 0)[1:]
        losses.append(loss)
    return torch.stack(losses), gradient * case.grad.cpu().double().unsqueeze(-1)


def check(impl, case):
    losses, counts, gradient = run(impl, case)
    expected, slope = truth(case)
    tolerance = 1e-12 if losses.dtype == torch.float64 else 2e-6
    assert losses.dtype == (torch.float64 if case.scores.dtype == torch.float64 else torch.float32)
    assert error(losses, expected, 1.0 + expected.abs()) <= tolerance
    assert gradient.dtype == case.scores.dtype
    allowed = 2e-6 + ROUNDING[case.scores.dtype] if tolerance > 1e-9 else tolerance
    assert error(gradient, slope, case.grad.abs().max().cpu().double() + 1.0) <= allowed
    some = torch.ones(len(losses), dtype=torch.bool) if case.mask is None else case.mask.any(-1)
    assert torch.equal(counts.cpu(), some.cpu()[: len(losses) if case.mask is not None else 0])


@pytest.mark.thin(3)
@every_implementation
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [None, "each", "shared"])
def test_losses_and_gradients_are_those_of_float64(impl, kind, mask):
    check(impl, problem(kind, 4, 70, device=place(impl), mask=mask))


@pytest.mark.thin(3)
@every_implementation
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(impl, kind, dtype):
    check(impl, problem(kind, 3, 40, dtype, place(impl, dtype), mask="each"))


@pytest.mark.thin(3)
@every_implementation
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-3, 30.0, 3e3])
def test_scores_of_any_size(impl, kind, size):
    """Beyond 60 the CUDA kernel reads a row again; float64 has no such bound."""
    check(impl, problem(kind, 5, 50, device=place(impl), size=size, mask="each"))


@pytest.mark.thin(3)
@every_implementation
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n_rows", "n"), [(1, 1), (5, 3), (2, 2049), (1, 20_000)])
def test_rows_of_any_width(impl, kind, n_rows, n):
    """A row in one step, in several, and in several programs."""
    check(impl, problem(kind, n_rows, n, device=place(impl), mask="each" if n == 20_000 else None))


@every_implementation
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_many_narrow_rows(impl, kind):
    """Several rows a program; one of them with large scores."""
    case = problem(kind, 150, 3, device=place(impl), mask="each")
    case.scores[131] *= 100.0
    check(impl, case)


@every_implementation
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_row_with_large_scores_in_parts(impl, kind):
    check(impl, problem(kind, 2, 18_000, device=place(impl), size=200.0))


@every_implementation
def test_infinite_scores(impl):
    """Right ones cost nothing, wrong ones are the whole of a row, in equal shares."""
    device = place(impl)
    scores = torch.tensor([[math.inf, -math.inf, 0.0], [-math.inf, math.inf, -math.inf]])
    target = torch.tensor([[True, False, False], [True, False, True]])
    case = Problem(
        scores.to(device), (target.to(device),), None, 0.0, target, torch.ones(2, device=device)
    )
    for labels in (target, target.float()):
        losses, _, gradient = run(impl, case._replace(labels=(labels.to(device),)))
        assert torch.allclose(losses.cpu(), torch.tensor([math.log(2.0), math.inf]))
        expected = torch.tensor([[0.0, 0.0, 0.5], [-0.5, 1.0, -0.5]])
        assert torch.allclose(gradient.cpu(), expected)


@every_implementation
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_stays_in_its_row(impl, kind):
    case = problem(kind, 4, 30, device=place(impl), mask="each")
    clean = run(impl, case)
    case.mask[1, 5] = True
    case.mask[2, 5] = False
    case.scores[1, 5] = case.scores[2, 5] = math.nan
    losses, _, gradient = run(impl, case)
    assert losses[1].isnan()
    assert (gradient[1][~case.mask[1]] == 0).all()
    assert torch.isfinite(losses[[0, 2, 3]]).all()
    assert torch.isfinite(gradient[[0, 2, 3]]).all()
    assert torch.equal(losses[[0, 3]], clean[0][[0, 3]])


@every_implementation
@pytest.mark.parametrize("kind", KINDS)
def test_nothing(impl, kind):
    device = place(impl)
    case = problem(kind, 3, 8, device=device)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    none = torch.zeros(4, dtype=torch.int64, device=device)
    labels = (empty, empty, none, None)
    if len(case.labels) < 3:
        labels = (case.labels[0][:, :0], *case.labels[1:])
    losses, counts, gradient = run(impl, case._replace(scores=case.scores[:, :0], labels=labels))
    assert torch.equal(losses.cpu(), torch.zeros(3))
    assert not counts.any()
    assert gradient.shape == (3, 0)


@every_implementation
def test_no_upstream_gradient_no_gradient(impl):
    case = problem("hard", 2, 9, device=place(impl))
    case.scores[0] = math.nan
    case.grad[0] = 0.0
    assert (run(impl, case)[2][0] == 0).all()


@every_implementation
def test_integer_and_transposed_targets(impl):
    case = problem("hard", 3, 40, device=place(impl))
    expected = run(impl, case)
    for target in (
        case.labels[0].to(torch.int64),
        case.labels[0].to(torch.int8),
        case.labels[0].t().contiguous().t(),
    ):
        assert_same(run(impl, case._replace(labels=(target,))), expected)
    assert_same(run(impl, case._replace(scores=case.scores.t().contiguous().t())), expected)


def assert_same(results, expected):
    for one, other in zip(results, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_threads_share_the_rows():
    """The same to the last bit on three threads."""
    place("cpu")
    case = problem("hard", 20, 3000, mask="each")
    alone = run("cpu", case)
    with three_threads():
        together = run("cpu", case)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


with_each_dtype = pytest.mark.parametrize("dtype", DTYPES)
SIZES = [(3, 1), (4, 37), (2, 5000), (1, 33_000)]
with_each_size = pytest.mark.parametrize(("n", "labels"), SIZES, ids=str)


@pytest.fixture(autouse=True)
def log_of_zero():
    """Triton's interpreter computes with NumPy, which warns of the log of an empty sum."""
    with np.errstate(divide="ignore"):
        yield


def slab(n, labels, dtype, device, scale=4.0):
    """Scores in rows that lie apart, some of them -inf, with their exact values."""
    memory = (scale * torch.randn(n, labels + 3)).to(device, dtype)
    scores = memory[:, :labels]
    scores[torch.rand(n, labels, device=device) < 0.1] = -math.inf
    return scores, scores.cpu().double().clone()


def numbers(n, device, dtype, low, high):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return low + (high - low) * torch.rand(n, dtype=wide, device=device)


def negated(exact):
    return torch.where(exact == -math.inf, exact, -exact)


@every_implementation
@with_each_dtype
@with_each_size
def test_sums(impl, dtype, n, labels):
    scores, exact = slab(n, labels, dtype, place(impl, dtype))
    above, below = zlpr.slab_sums(impl, scores, True)
    slack = 20 * ROUNDING[torch.float64 if dtype == torch.float64 else torch.float32]
    slack *= 1 + exact[exact.isfinite()].abs().amax()
    assert error(above, exact.logsumexp(-1), slack) <= 1
    assert error(below, negated(exact).logsumexp(-1), slack) <= 1
    again, nothing = zlpr.slab_sums(impl, scores, False)
    assert torch.equal(again, above)
    assert nothing.shape == (0,)


@pytest.mark.thin(3)
@every_implementation
@with_each_dtype
@with_each_size
@pytest.mark.parametrize("smooth", [False, True])
def test_gradient(impl, dtype, n, labels, smooth):
    device = place(impl, dtype)
    scores, exact = slab(n, labels, dtype, device)
    scale, above, below = (
        numbers(n, device, dtype, a, b) for a, b in ((-1, 1), (12, 16), (12, 16))
    )
    zlpr.slab_gradient_(impl, scores, scale, above, below if smooth else None)
    up = torch.exp(exact - above.cpu().double().unsqueeze(-1))
    down = torch.exp(negated(exact) - below.cpu().double().unsqueeze(-1))
    factor = scale.cpu().double().unsqueeze(-1)
    expected = factor * (up - down if smooth else up)
    slack = 4 * ROUNDING[dtype] * factor.abs() * (up + down) + SMALLEST[dtype] + 1e-30
    slack += 1e-5 * factor.abs() * (up + down) * (dtype != torch.float64)
    assert error(scores, expected, slack) <= 1


def logistic(impl, scores, scale, smoothing):
    return label_loss.slab_(impl, scores, 0.0, 0.0, 0.0, True, smoothing, scale)


@pytest.mark.thin(3)
@every_implementation
@with_each_dtype
@with_each_size
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("gradient", [False, True])
def test_logistic(impl, dtype, n, labels, smoothing, gradient):
    device = place(impl, dtype)
    scores, exact = slab(n, labels, dtype, device)
    before = scores.clone()
    scale = numbers(n, device, dtype, -1, 1)
    losses = logistic(impl, scores, scale if gradient else None, smoothing)
    known = exact != -math.inf
    each = torch.where(known, -logsigmoid(-exact) - smoothing * exact, 0.0)
    rounding = ROUNDING[torch.float64 if dtype == torch.float64 else torch.float32]
    assert error(losses, each.sum(-1), 30 * rounding * (1 + each.abs().sum(-1))) <= 1
    if not gradient:
        assert torch.equal(scores, before)
        return
    factor = scale.cpu().double().unsqueeze(-1)
    expected = torch.where(known, factor * (torch.sigmoid(exact) - smoothing), 0.0)
    slack = 4 * max(ROUNDING[dtype], rounding) * factor.abs() + SMALLEST[dtype]
    assert error(scores, expected, slack) <= 1


@every_implementation
def test_rows_without_a_label(impl):
    device = place(impl)
    scores = torch.full((2, 40), -math.inf, device=device)
    above, below = zlpr.slab_sums(impl, scores, True)
    assert above.tolist() == below.tolist() == [-math.inf] * 2
    ones = torch.ones(2, device=device)
    assert logistic(impl, scores.clone(), ones, 0.1).tolist() == [0.0, 0.0]
    zlpr.slab_gradient_(impl, scores, ones, ones, ones)
    assert not scores.any()


@every_implementation
@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing_slab(impl, shape):
    device = place(impl)
    scores, ones = torch.empty(shape, device=device), torch.ones(shape[0], device=device)
    above, _ = zlpr.slab_sums(impl, scores, False)
    assert above.tolist() == [-math.inf] * shape[0]
    zlpr.slab_gradient_(impl, scores, ones, ones, None)
    assert logistic(impl, scores, ones, 0.0).tolist() == [0.0] * shape[0]


@every_implementation
def test_a_nan_stays_in_its_row_slab(impl):
    device = place(impl)
    scores = torch.randn(3, 50, device=device)
    scores[1, 7] = math.nan
    above, below = zlpr.slab_sums(impl, scores, True)
    losses = logistic(impl, scores, None, 0.0)
    for each in (above, below, losses):
        assert each.isnan().tolist() == [False, True, False]


@every_implementation
def test_large_scores_and_small_losses(impl):
    device = place(impl)
    scores = torch.tensor([[1e4, 9e3, -1e4]], device=device)
    above, below = zlpr.slab_sums(impl, scores, True)
    assert above.item() == below.item() == 1e4
    right = torch.full((1, 1000), -18.0, device=device)
    loss = logistic(impl, right, None, 0.0)
    assert loss.item() == pytest.approx(1000 * math.log1p(math.exp(-18)), rel=1e-5)


@every_implementation
@pytest.mark.parametrize("positive", [False, True])
def test_a_nan_makes_the_gradient_of_its_whole_row(impl, positive):
    scores = torch.randn(3, 40, device=place(impl))
    target = torch.rand(3, 40, device=scores.device) < 0.3
    scores[1, 5], target[1, 5] = math.nan, positive
    _, stats, _ = zlpr.forward(impl, scores, target, [], None, None, 0.0)
    ones = torch.ones(3, device=scores.device)
    made = zlpr.backward(impl, scores, target, [], None, None, 0.0, stats, ones)
    assert made[1].isnan().all()
    assert made[::2].isfinite().all()
