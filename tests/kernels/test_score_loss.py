"""Losses on rows of scores that leave a few numbers for backward, against float64."""

import pytest
import torch
from implementations import DTYPES, ROUNDING, error, few, place

from lastlayer import kernels

IMPLEMENTATIONS = pytest.mark.parametrize("impl", ["reference", "triton"])
# One above and below a multiple of 64; 1, 2 and 3 classes; beyond what one program finds peaks of.
SIZES = [1, 2, 3, 63, 64, 65, 600, 17_001]


def problem(n_rows, n, dtype, device, kind):
    """Scores and a target: class ids with an ignored one, distributions, or labels."""
    scores = (3 * torch.randn(n_rows, n)).to(device, dtype)
    if kind == "ids":
        target = torch.randint(n, (n_rows,), device=device)
        target[-1] = -100
    elif kind == "distributions":
        target = torch.softmax(3 * torch.randn(n_rows, n), -1).to(device, dtype)
        target[0] = torch.eye(n)[0]
    else:
        target = torch.rand(n_rows, n, device=device) < 0.3
        target[-1] = False
    return scores, target


def check(impl, scores, target, class_weight, alpha, labels=False, per_row=True):
    """Losses, weights and the gradient beside the reference in float64."""
    ignore = -100 if target.dim() == 1 else None
    alpha, row_alpha = (alpha, None) if isinstance(alpha, float) else (float("nan"), alpha)
    given = target, class_weight, ignore, alpha, row_alpha, labels
    exact = [x.cpu().double() if torch.is_tensor(x) and x.is_floating_point() else x for x in given]
    exact = [x.cpu() if torch.is_tensor(x) else x for x in exact]
    mean = not per_row
    losses, *left = kernels.score_loss.forward(impl, scores, *given, mean)
    wide, n = scores.cpu().double(), len(scores)
    true_losses, *true_left = kernels.score_loss.forward("reference", wide, *exact, mean)
    unit = 2e-5 * (1 + true_losses.nan_to_num(posinf=0.0).abs())
    assert error(losses, true_losses, unit) <= 1
    for part in (slice(n), slice(-1, None)):
        assert error(left[0][part], true_left[0][part], 1e-5) <= 1
    if row_alpha is not None:
        slopes = slice(n, 2 * n)
        assert error(left[0][slopes], true_left[0][slopes], 2e-5) <= 1

    factor = torch.randn(n) if per_row else torch.tensor(0.7)
    made = kernels.score_loss.backward(
        impl, scores, target, *left, factor.to(scores.device), alpha, row_alpha, labels
    )
    true = kernels.score_loss.backward(
        "reference", wide, exact[0], *true_left, factor.double(), *exact[3:]
    )
    if per_row:
        # The upstream gradient of a sum is one number that is expanded.
        same = factor[:1].to(scores.device)
        expanded, plain = (
            kernels.score_loss.backward(impl, scores, target, *left, each, alpha, row_alpha, labels)
            for each in (same.expand(len(scores)), same.repeat(len(scores)))
        )
        assert error(expanded, plain) == 0
    assert made.dtype == scores.dtype
    rounding = ROUNDING[scores.dtype] * true.nan_to_num().abs()
    assert error(made, true, 2e-5 + rounding) <= 1
    return losses, made


@IMPLEMENTATIONS
@pytest.mark.parametrize("kind", ["ids", "distributions", "labels"])
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 1.25, 1.3, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.thin(6)
def test_sizes_and_dtypes(impl, kind, alpha, dtype):
    device = place(impl, dtype)
    for n in few(SIZES, 1, 3, 65, 600):
        scores, target = problem(4, n, dtype, device, kind)
        check(impl, scores, target, None, alpha, kind == "labels")
        weight = torch.rand(n, device=device)
        if kind != "labels":
            check(impl, scores, target, weight, alpha, per_row=False)


@IMPLEMENTATIONS
def test_rows_wider_than_one_program(impl):
    for kind in ("ids", "distributions"):
        scores, target = problem(2, 17_001, torch.float32, place(impl), kind)
        check(impl, scores, target, None, 1.5)


@IMPLEMENTATIONS
@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.25, 1.3])
def test_flat_rows_have_all_classes_in_their_support(impl, alpha):
    scores, target = problem(3, 900, torch.float32, place(impl), "ids")
    check(impl, 1e-3 * scores, target, None, alpha)


@IMPLEMENTATIONS
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 1.3])
def test_nan_and_masked_rows_stay_by_themselves(impl, alpha):
    scores, target = problem(6, 70, torch.float32, place(impl), "ids")
    scores[0, 5] = torch.nan
    scores[1] = -torch.inf
    scores[2, ::2] = -torch.inf
    target[2] = 4  # a masked class
    target[3] = -100
    scores[3] = torch.nan
    losses, gradient = check(impl, scores, target, None, alpha)
    assert losses[0].isnan()
    assert losses[1].isinf()
    assert losses[2].isinf()
    assert losses[3] == 0
    assert gradient[0].isnan().all()
    assert not gradient[1].any()
    assert not gradient[3].any()
    assert gradient[2, 1::2].isfinite().all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("kind", ["ids", "distributions"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_alpha_of_each_row_and_its_gradient(impl, kind, dtype):
    device = place(impl, dtype)
    for n in few([1, 3, 65, 600], 1, 65):
        scores, target = problem(6, n, dtype, device, kind)
        alpha = torch.tensor([1.0, 1.001, 1.3, 1.5, 2.0, 2.5], device=device)
        check(impl, scores, target, None, alpha)
        # One for all, as it is expanded.
        check(impl, scores, target, None, alpha[2:3].expand(6))


@pytest.mark.parametrize("kind", ["ids", "distributions"])
@pytest.mark.parametrize("alpha", [1.5, 1.3])
def test_few_programs_share_a_wide_row(monkeypatch, kind, alpha):
    scores, target = problem(3, 9001, torch.float32, place("triton"), kind)
    scores[0, 5] = torch.nan
    scores[1] *= 1e-3
    check("triton", scores, target, None, alpha)
    from lastlayer.kernels.score_loss import triton as module

    monkeypatch.setattr(module, "FEWEST_PROGRAMS", 1)
    check("triton", scores, target, None, alpha)


@IMPLEMENTATIONS
def test_a_fully_masked_row_against_a_distribution(impl):
    scores, target = problem(3, 70, torch.float32, place(impl), "distributions")
    scores[1] = -torch.inf
    losses, gradient = check(impl, scores, target, None, 1.5)
    assert losses[1].isinf()
    assert not gradient[1].any()


def test_an_id_that_is_no_class_gives_nan():
    device = place("triton")
    scores, target = problem(3, 70, torch.float32, device, "ids")
    target[0] = 70
    given = scores, target, None, -100, 1.5, None, False
    losses, stats, _ = kernels.score_loss.forward("triton", *given, False)
    assert losses[0].isnan()
    assert losses[1].isfinite()
    assert stats[:3].tolist() == [1.0, 1.0, 0.0]
    mean, stats, _ = kernels.score_loss.forward("triton", *given, True)
    assert mean.isnan()
    assert stats[-1] == 0.5


@pytest.mark.parametrize("most", [1 << 18, 2])
@IMPLEMENTATIONS
def test_means(monkeypatch, impl, most):
    if impl == "triton":
        monkeypatch.setattr("lastlayer.kernels.score_loss.triton.MOST_LOSSES", most)
    scores, target = problem(5, 70, torch.float32, place(impl), "ids")
    weight = torch.rand(70, device=scores.device)
    for class_weight in (None, weight):
        check(impl, scores, target, class_weight, 1.5, per_row=False)
    nothing = torch.full_like(target, -100)
    given = None, -100, 1.5, None, False, True
    loss, stats, _ = kernels.score_loss.forward(impl, scores, nothing, *given)
    assert loss == stats[-1] == 0.0
    loss, *_ = kernels.score_loss.forward(impl, scores[:0], target[:0], *given)
    assert loss == 0.0
