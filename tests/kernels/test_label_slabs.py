"""Scores of some labels: the sums and gradients of multi-label losses."""

import math

import numpy as np
import pytest
import torch
from implementations import DTYPES, ROUNDING, SMALLEST, error, every_implementation, place
from torch.nn.functional import logsigmoid

from lastlayer.kernels import zlpr

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
    losses = zlpr.logistic_slab_(impl, scores, scale if gradient else None, smoothing)
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
    assert zlpr.logistic_slab_(impl, scores.clone(), ones, 0.1).tolist() == [0.0, 0.0]
    zlpr.slab_gradient_(impl, scores, ones, ones, ones)
    assert not scores.any()


@every_implementation
@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing(impl, shape):
    device = place(impl)
    scores, ones = torch.empty(shape, device=device), torch.ones(shape[0], device=device)
    above, _ = zlpr.slab_sums(impl, scores, False)
    assert above.tolist() == [-math.inf] * shape[0]
    zlpr.slab_gradient_(impl, scores, ones, ones, None)
    assert zlpr.logistic_slab_(impl, scores, ones, 0.0).tolist() == [0.0] * shape[0]


@every_implementation
def test_a_nan_stays_in_its_row(impl):
    device = place(impl)
    scores = torch.randn(3, 50, device=device)
    scores[1, 7] = math.nan
    above, below = zlpr.slab_sums(impl, scores, True)
    losses = zlpr.logistic_slab_(impl, scores, None, 0.0)
    for each in (above, below, losses):
        assert each.isnan().tolist() == [False, True, False]


@every_implementation
def test_large_scores_and_small_losses(impl):
    device = place(impl)
    scores = torch.tensor([[1e4, 9e3, -1e4]], device=device)
    above, below = zlpr.slab_sums(impl, scores, True)
    assert above.item() == below.item() == 1e4
    right = torch.full((1, 1000), -18.0, device=device)
    loss = zlpr.logistic_slab_(impl, right, None, 0.0)
    assert loss.item() == pytest.approx(1000 * math.log1p(math.exp(-18)), rel=1e-5)
