"""The loss moves with a learned alpha as it should, to the second order."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from lastlayer import entmax, entmax_loss
from lastlayer.testing.suite import Suite


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("start", [1.001, 1.25, 1.5, 2.0, 2.5])
def test_gradients_of_scores_and_alpha(start, soft, seed):
    suite = Suite(seed, torch.device("cpu"), (torch.float64,))
    scores = suite.settled(lambda x: entmax(x, start), 3, 5)
    target = torch.softmax(torch.randn_like(scores), -1) if soft else suite.integers(5, 3)
    scores.requires_grad_()
    alpha = torch.full((3, 1), start, dtype=torch.float64, requires_grad=True)

    def loss(x, a):
        return entmax_loss(x, target, a, reduction="none")

    assert gradcheck(loss, (scores, alpha))
    # Also the mixed second derivatives: both inputs are differentiated together.
    assert gradgradcheck(loss, (scores, alpha))


def test_a_shared_alpha_and_a_number_agree():
    scores, target = torch.randn(4, 6, dtype=torch.float64), torch.randint(6, (4,))
    shared = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    loss = entmax_loss(scores, target, shared)
    assert abs(loss - entmax_loss(scores, target, 1.3)) < 1e-12
    (gradient,) = torch.autograd.grad(loss, shared)
    step = 1e-6
    wider, narrower = (entmax_loss(scores, target, 1.3 + s) for s in (step, -step))
    assert abs(gradient - (wider - narrower) / (2 * step)) < 1e-7


def test_ignored_rows_do_not_move_alpha():
    scores = torch.randn(3, 4)
    scores[1] = torch.nan
    alpha = torch.full((3, 1), 1.5, requires_grad=True)
    loss = entmax_loss(scores, torch.tensor([0, -100, 2]), alpha)
    (gradient,) = torch.autograd.grad(loss, alpha)
    assert gradient[1] == 0
    assert gradient.isfinite().all()
    assert (gradient[[0, 2]] != 0).all()


def test_alpha_per_head_in_a_loss():
    scores, target = torch.randn(2, 3, 7, dtype=torch.float64), torch.randint(7, (2, 3))
    alpha = torch.tensor([1.1, 1.5, 2.0], dtype=torch.float64).reshape(3, 1)
    loss = entmax_loss(scores, target, alpha, reduction="none")
    for head in range(3):
        alone = entmax_loss(scores[:, head], target[:, head], alpha[head].item(), reduction="none")
        assert (loss[:, head] - alone).abs().max() < 1e-12
