"""alpha as a tensor: shapes, gradients of both orders, and learning it."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from lastlayer import Entmax, entmax
from lastlayer.testing.suite import Suite


def settled(seed, alpha, rows, n):
    """Scores whose support stays the same under small steps."""
    suite = Suite(seed, torch.device("cpu"), (torch.float64,))
    return suite.settled(lambda x: entmax(x, alpha), rows, n)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (2, 1, 1), (2, 3, 1)])
def test_alpha_broadcasts_over_rows(shape):
    scores = 2 * torch.randn(2, 3, 7, dtype=torch.float64)
    alpha = 1.1 + torch.rand(shape, dtype=torch.float64)
    probs = entmax(scores, alpha)
    per_row = alpha.expand(2, 3, 1)
    for i in range(2):
        for j in range(3):
            alone = entmax(scores[i, j], per_row[i, j].item())
            assert (probs[i, j] - alone).abs().max() < 1e-9


def test_alpha_per_head_with_another_dim():
    scores = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    alpha = torch.tensor([1.1, 1.5, 1.8, 2.0], dtype=torch.float64).reshape(4, 1, 1)
    turned = entmax(scores.transpose(-1, -2), alpha, dim=-2).transpose(-1, -2)
    assert (turned - entmax(scores, alpha)).abs().max() < 1e-12


@pytest.mark.parametrize("start", [1.001, 1.05, 1.25, 1.5, 1.75, 2.0, 3.0])
def test_gradients_of_scores_and_alpha(start, seed):
    scores = settled(seed, start, 3, 5).requires_grad_()
    alpha = torch.full((3, 1), start, dtype=torch.float64, requires_grad=True)
    assert gradcheck(entmax, (scores, alpha))
    assert gradgradcheck(entmax, (scores, alpha))


def test_the_gradient_of_a_shared_alpha_sums_over_rows(seed):
    scores = settled(seed, 1.4, 4, 6)
    shared = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    each = torch.full((4, 1), 1.4, dtype=torch.float64, requires_grad=True)
    (of_shared,) = torch.autograd.grad(entmax(scores, shared).square().sum(), shared)
    (of_each,) = torch.autograd.grad(entmax(scores, each).square().sum(), each)
    assert abs(of_shared - of_each.sum()) < 1e-12
    assert gradcheck(lambda a: entmax(scores, a), (shared,))


def test_the_gradient_for_alpha_has_a_limit_at_one():
    """At 1 itself it is the limit, computed without cancelling."""
    scores = torch.randn(6, dtype=torch.float64)
    weights = torch.randn(6, dtype=torch.float64)

    def slope(alpha):
        alpha = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(entmax(scores, alpha) @ weights, alpha)[0]

    at_one = slope(1.0)
    for excess in (1e-9, 1e-6, 1e-4):
        assert abs(slope(1.0 + excess) - at_one) < 1e-10 + 100 * excess
    step = 1e-5
    by_difference = (entmax(scores, 1 + step) - entmax(scores, 1.0)) @ weights / step
    assert abs(at_one - by_difference) < 1e-3


def test_alpha_has_no_gradient_where_nothing_is_allowed():
    scores = torch.full((2, 4), -torch.inf, dtype=torch.float64)
    scores[1] = torch.randn(4)
    alpha = torch.full((2, 1), 1.5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(entmax(scores, alpha)[:, 0].sum(), alpha)
    assert gradient[0] == 0
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_alpha_and_scores_may_differ_in_dtype(dtype):
    scores = torch.randn(3, 9).to(dtype).requires_grad_()
    alpha = torch.full((3, 1), 1.4, requires_grad=True)
    probs = entmax(scores, alpha)
    assert probs.dtype == dtype
    of_scores, of_alpha = torch.autograd.grad(probs.float().square().sum(), (scores, alpha))
    assert (of_scores.dtype, of_alpha.dtype) == (dtype, torch.float32)
    exact = scores.detach().double().requires_grad_()
    alpha64 = alpha.detach().double().requires_grad_()
    expected = torch.autograd.grad(entmax(exact, alpha64).square().sum(), (exact, alpha64))
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert (of_scores.double() - expected[0]).abs().max() < tolerance
    assert (of_alpha.double() - expected[1]).abs().max() < tolerance


@pytest.mark.parametrize("gradient", [1e6, -1e6])
def test_a_learned_alpha_stays_above_one(gradient):
    module = Entmax(1.5, learn_alpha=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        module.log_excess.grad = torch.tensor(gradient).clamp(-80, 80)
        optimizer.step()
        assert module.alpha >= 1.0
        if module.alpha.isfinite():
            probs = module(torch.randn(4, 10))
            assert (probs.sum(-1) - 1).abs().max() < 1e-5


def test_alpha_is_learned_towards_the_sparsity_of_the_target():
    torch.manual_seed(0)
    scores = torch.randn(64, 10)
    target = entmax(scores, 1.9)
    module = Entmax(1.2, learn_alpha=True)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        (module(scores) - target).square().sum().backward()
        optimizer.step()
    assert abs(module.alpha.item() - 1.9) < 0.02


def test_vmap_over_alpha():
    scores = torch.randn(3, 6, dtype=torch.float64)
    alphas = torch.tensor([1.2, 1.5, 2.0, 2.5], dtype=torch.float64)
    mapped = torch.func.vmap(lambda a: entmax(scores, a))(alphas)
    loop = torch.stack([entmax(scores, a) for a in alphas])
    assert (mapped - loop).abs().max() < 1e-12
    each = torch.func.vmap(entmax)(scores, alphas[:3])
    loop = torch.stack([entmax(s, a) for s, a in zip(scores, alphas, strict=False)])
    assert (each - loop).abs().max() < 1e-12
    slopes = torch.func.vmap(torch.func.grad(lambda a: entmax(scores, a).square().sum()))(alphas)
    assert slopes.isfinite().all()
