"""ZLPR by rows: every implementation against sums in float64 that are written out."""

import math
from typing import NamedTuple

import pytest
import torch
from implementations import DTYPES, ROUNDING, error, every_implementation, place, three_threads

from lastlayer._labels import positive_lists
from lastlayer.kernels import zlpr

KINDS = ("hard", "soft", "lists", "values")


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
        lists = positive_lists(
            listed, n_rows=n_rows, n_classes=n, values=values, label_smoothing=smoothing
        )
        labels = (lists.classes, lists.rows, lists.starts, lists.values)
        dense = torch.full((n_rows, n), smoothing, dtype=torch.float64)
        for row, entries in enumerate(listed.tolist()):
            for at in reversed(range(9)):
                if entries[at] >= 0:
                    dense[row, entries[at]] = 1.0 if values is None else values[row, at].double()
    moved = [None if each is None else each.to(device) for each in (scores, shown, grad, *labels)]
    return Problem(moved[0], tuple(moved[3:]), moved[1], smoothing, dense, moved[2])


def run(impl, case):
    if len(case.labels) == 1:
        arguments = (case.scores, *case.labels, case.mask)
        losses, stats, counts = zlpr.forward(impl, *arguments)
        return losses, counts, zlpr.backward(impl, *arguments, stats, case.grad)
    arguments = (case.scores, *case.labels, case.mask, case.smoothing)
    losses, stats, counts = zlpr.forward_listed(impl, *arguments)
    return losses, counts, zlpr.backward_listed(impl, *arguments, stats, case.grad)


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
    assert torch.equal(counts.cpu(), some.cpu())


@every_implementation
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [None, "each", "shared"])
def test_losses_and_gradients_are_those_of_float64(impl, kind, mask):
    check(impl, problem(kind, 4, 70, device=place(impl), mask=mask))


@every_implementation
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(impl, kind, dtype):
    check(impl, problem(kind, 3, 40, dtype, place(impl, dtype), mask="each"))


@every_implementation
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-3, 30.0, 3e3])
def test_scores_of_any_size(impl, kind, size):
    """Beyond 60 the CUDA kernel reads a row again; float64 has no such bound."""
    check(impl, problem(kind, 5, 50, device=place(impl), size=size, mask="each"))


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
    labels = (case.labels[0][:, :0],) if len(case.labels) == 1 else (empty, empty, none, None)
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
