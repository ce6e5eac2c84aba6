"""Binary cross entropy and the asymmetric loss, and their gradients, against float64."""

import math
from typing import NamedTuple

import pytest
import torch
from implementations import (
    DTYPES,
    ROUNDING,
    error,
    every_implementation,
    place,
    three_threads,
)
from torch.nn.functional import logsigmoid

from lastlayer.kernels import label_loss

KINDS = {
    "plain": (0.0, 0.0, 0.0),
    "asymmetric": (4.0, 1.0, 0.05),
    "no margin": (2.0, 3.0, 0.0),
    "powers": (2.5, 0.5, 0.1),
    "margin": (0.0, 0.0, 0.2),
}
with_each_kind = pytest.mark.parametrize("kind", KINDS)
with_each_label = pytest.mark.parametrize("labels", ["bool", "int", "float", "soft"])


class Problem(NamedTuple):
    scores: torch.Tensor
    target: torch.Tensor
    mask: torch.Tensor | None
    grad: torch.Tensor


def problem(labels, n_rows, n, dtype=torch.float32, device="cpu", mask=None, size=3.0):
    scores = (size * torch.randn(n_rows, n)).to(dtype)
    hard = torch.rand(n_rows, n) < 0.3
    target = {
        "bool": hard,
        "int": hard.long(),
        "float": hard.float(),
        "soft": torch.where(torch.rand(n_rows, n) < 0.4, hard.float(), torch.rand(n_rows, n)),
    }[labels]
    shown = None
    if mask == "each":
        shown = torch.rand(n_rows, n) < 0.7
        shown[-1] = False
    elif mask == "shared":
        shown = (torch.rand(n) < 0.7).expand(n_rows, n)
    grad = torch.randn(n_rows, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    moved = [None if each is None else each.to(device) for each in (scores, target, shown, grad)]
    return Problem(*moved)


def run(impl, case, kind, focus=True):
    losses, counts = label_loss.forward(impl, *case[:3], *KINDS[kind])
    return losses, counts, label_loss.backward(impl, *case[:3], *KINDS[kind], focus, case.grad)


def truth(case, kind, focus):
    """The definition in float64, differentiated by autograd."""
    negative, positive, margin = KINDS[kind]
    scores = case.scores.cpu().double().requires_grad_()
    target = case.target.cpu().double()
    p = torch.sigmoid(scores)
    q = (p - margin).clamp(min=0)
    powers = torch.sigmoid(-scores) ** positive, torch.where(q > 0, q, 1.0) ** negative
    of_positive, of_negative = powers if focus else (each.detach() for each in powers)
    log_p, log_rest = logsigmoid(scores), logsigmoid(-scores)
    if margin:
        log_rest = torch.log(torch.sigmoid(-scores) + margin)
    each = -target * of_positive * log_p
    each = each - (1 - target) * torch.where(q > 0, of_negative * log_rest, 0.0)
    if case.mask is not None:
        each = torch.where(case.mask.cpu(), each, 0.0)
    losses = each.sum(-1)
    (slope,) = torch.autograd.grad((losses * case.grad.cpu().double()).sum(), scores)
    return losses.detach(), slope


def check(impl, case, kind, focus=True):
    losses, counts, gradient = run(impl, case, kind, focus)
    expected, slope = truth(case, kind, focus)
    wide = torch.float64 if case.scores.dtype == torch.float64 else torch.float32
    assert losses.dtype == wide
    assert gradient.dtype == case.scores.dtype
    tolerance = 1e-12 if wide == torch.float64 else 3e-6
    assert error(losses, expected, 1.0 + expected.abs()) <= tolerance
    unit = tolerance + (ROUNDING[case.scores.dtype] if wide == torch.float32 else 0.0)
    assert error(gradient, slope, slope.abs().amax(-1, keepdim=True) + 1.0) <= unit
    some = torch.ones(0, dtype=torch.bool) if case.mask is None else case.mask.any(-1)
    assert torch.equal(counts.cpu(), some.cpu())


@pytest.mark.thin(3)
@every_implementation
@with_each_kind
@with_each_label
def test_losses_and_gradients_are_those_of_float64(impl, kind, labels):
    device = place(impl)
    for mask in (None, "each", "shared"):
        check(impl, problem(labels, 4, 70, device=device, mask=mask), kind)


@pytest.mark.thin(3)
@every_implementation
@with_each_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(impl, kind, dtype):
    for labels in ("bool", "soft"):
        check(impl, problem(labels, 3, 40, dtype, place(impl, dtype), mask="each"), kind)


@every_implementation
@pytest.mark.parametrize("kind", ["asymmetric", "powers"])
@pytest.mark.parametrize("labels", ["int", "soft"])
def test_powers_that_are_given(impl, kind, labels):
    check(impl, problem(labels, 3, 40, device=place(impl)), kind, focus=False)


@every_implementation
@with_each_kind
@pytest.mark.parametrize("size", [1e-3, 15.0, 100.0])
def test_scores_of_any_size(impl, kind, size):
    for labels in ("bool", "soft"):
        check(impl, problem(labels, 3, 50, device=place(impl), size=size), kind)


@every_implementation
@pytest.mark.parametrize("kind", ["plain", "asymmetric"])
@pytest.mark.parametrize(
    ("n_rows", "n"), [(1, 1), (5, 2), (3, 63), (2, 65), (150, 3), (2, 2049), (1, 20_003)]
)
def test_rows_of_any_width(impl, kind, n_rows, n):
    """Several rows per program, a row in one step, in several, and in several programs."""
    mask = "each" if n in (3, 20_003) else None
    for labels in ("bool", "soft"):
        check(impl, problem(labels, n_rows, n, device=place(impl), mask=mask), kind)


@every_implementation
@with_each_kind
def test_infinite_scores(impl, kind):
    """Right ones cost nothing; wrong ones cost +inf, unless a margin bounds the cost."""
    device = place(impl)
    scores = torch.tensor([[math.inf, -math.inf, 0.0], [-math.inf, -1.0, -1.0]], device=device)
    scores = torch.cat([scores, torch.tensor([[math.inf, -1.0, -1.0]], device=device)])
    target = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 0, 0]], device=device)
    zeros, ones = torch.zeros(1, 1, device=device), torch.ones(3, device=device)
    for labels in (target, target.bool(), target.float()):
        losses, _, gradient = run(impl, Problem(scores, labels, None, ones), kind)
        alone = run(impl, Problem(zeros, torch.zeros_like(zeros), None, ones[:1]), kind)
        assert torch.allclose(losses[0], alone[0][0])
        assert gradient[0, :2].tolist() == [0.0, 0.0]
        assert losses[1].item() == math.inf
        assert losses[2].isfinite().item() == (KINDS[kind][2] > 0)
        assert gradient.isfinite().all()


@pytest.mark.thin(3)
@every_implementation
@with_each_kind
@with_each_label
def test_a_nan_stays_in_its_row(impl, kind, labels):
    case = problem(labels, 4, 30, device=place(impl), mask="each")
    clean = run(impl, case, kind)
    case.mask[1, 5] = True
    case.mask[2, 5] = False
    case.scores[1, 5] = case.scores[2, 5] = math.nan
    losses, _, gradient = run(impl, case, kind)
    assert losses.isnan().tolist() == [False, True, False, False]
    assert gradient[1, 5].isnan()
    assert (gradient[1][~case.mask[1]] == 0).all()
    assert torch.isfinite(gradient[[0, 2, 3]]).all()
    assert torch.equal(losses[[0, 3]], clean[0][[0, 3]])


@every_implementation
@pytest.mark.parametrize("kind", ["plain", "asymmetric"])
def test_what_does_not_count_may_be_anything(impl, kind):
    case = problem("soft", 3, 20, device=place(impl), mask="each")
    expected = run(impl, case, kind)
    hidden = ~case.mask
    for score, label in ((math.nan, 7.0), (math.inf, math.nan), (-math.inf, 1.0)):
        case.scores[hidden], case.target[hidden] = score, label
        found = run(impl, case, kind)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.thin(3)
@every_implementation
@with_each_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slab_of_labels_that_are_0(impl, kind, dtype):
    case = problem("bool", 5, 300, dtype, place(impl, dtype))
    case.scores[1, 3], case.scores[2, 4], case.grad[3] = -math.inf, math.nan, 0.0
    case.target.fill_(False)
    losses, _, gradient = run(impl, case, kind, False)
    wide = torch.zeros(5, 310, dtype=dtype, device=case.scores.device)
    for scale in (None, case.grad):
        wide[:, :300] = case.scores
        made = label_loss.slab_(impl, wide[:, :300], *KINDS[kind], False, 0.0, scale)
        torch.testing.assert_close(made, losses, equal_nan=True)
        expected = case.scores if scale is None else gradient
        torch.testing.assert_close(wide[:, :300], expected, equal_nan=True)
    assert not wide[:, 300:].any()


@every_implementation
def test_upstream_gradients(impl):
    """One for all rows, one for each, expanded; 0 leaves no gradient, and a NaN none in a mask."""
    case = problem("bool", 3, 40, device=place(impl), mask="each")
    one = torch.tensor(0.5, device=case.scores.device)
    expected = run(impl, case._replace(grad=one.expand(3).contiguous()), "asymmetric")[2]
    for grad in (one, one.reshape(1), one.expand(3)):
        assert torch.equal(run(impl, case._replace(grad=grad), "asymmetric")[2], expected)
    case.scores[0], case.grad[0], case.grad[1] = math.nan, 0.0, math.nan
    for kind in ("plain", "asymmetric"):
        gradient = run(impl, case, kind)[2]
        assert (gradient[0] == 0).all()
        assert (gradient[1][~case.mask[1]] == 0).all()
        assert gradient[1][case.mask[1]].isnan().any()


@every_implementation
@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing(impl, shape):
    device = place(impl)
    for mask in (None, torch.zeros(shape, dtype=torch.bool, device=device)):
        scores = torch.zeros(shape, device=device)
        case = Problem(scores, scores > 0, mask, torch.ones(shape[0], device=device))
        losses, counts, gradient = run(impl, case, "asymmetric")
        assert losses.tolist() == [0.0] * shape[0]
        assert not counts.any()
        assert gradient.shape == shape


@every_implementation
def test_layouts_and_label_dtypes(impl):
    case = problem("bool", 3, 40, device=place(impl))
    expected = run(impl, case, "asymmetric")
    targets = [case.target.to(dtype) for dtype in (torch.int8, torch.uint8, torch.int32)]
    targets += [case.target.bfloat16(), case.target.double(), case.target.t().contiguous().t()]
    for target in targets:
        assert_same(run(impl, case._replace(target=target), "asymmetric"), expected)
    for scores in (case.scores.t().contiguous().t(), case.scores.repeat(1, 2)[:, :40]):
        assert_same(run(impl, case._replace(scores=scores), "asymmetric"), expected)


def assert_same(results, expected):
    for one, other in zip(results, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@every_implementation
def test_small_losses_have_their_digits(impl):
    """1 + exp(-18) rounds to 1: a thousand labels that are right would count for nothing."""
    scores = torch.full((1, 1000), -18.0, device=place(impl))
    loss, _ = label_loss.forward(impl, scores, scores > 0, None, 0.0, 0.0, 0.0)
    assert loss.item() == pytest.approx(1000 * math.log1p(math.exp(-18)), rel=1e-5)


def test_threads_share_the_rows():
    """The same to the last bit on three threads."""
    place("cpu")
    case = problem("soft", 20, 3000, mask="each")
    alone = run("cpu", case, "asymmetric")
    with three_threads():
        together = run("cpu", case, "asymmetric")
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


def test_half_precision_is_widened_in_parts(monkeypatch):
    place("cpu")
    from lastlayer.kernels import _cpu_labels

    case = problem("soft", 7, 40, torch.bfloat16, mask="each")
    expected = run("cpu", case, "asymmetric")
    monkeypatch.setattr(_cpu_labels, "WIDENED", 80)
    for one, other in zip(run("cpu", case, "asymmetric"), expected, strict=True):
        assert torch.equal(one, other)
