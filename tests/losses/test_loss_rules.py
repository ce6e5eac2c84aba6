"""Every loss passes the public conformance suite, with its map."""

from functools import partial

import pytest
import torch

from lastlayer import (
    EntmaxLoss,
    SparsemaxLoss,
    TopKSoftmaxLoss,
    entmax,
    entmax_loss,
    fenchel_young_loss,
    sparsemax,
    sparsemax_loss,
    topk_softmax,
    topk_softmax_loss,
)
from lastlayer.testing import check_loss


def test_sparsemax_loss(seed):
    check_loss(sparsemax_loss, sparsemax, seed=seed)


@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.25, 1.5, 1.75, 2.0, 3.0])
def test_entmax_loss(alpha, seed):
    check_loss(partial(entmax_loss, alpha=alpha), partial(entmax, alpha=alpha), seed=seed)


@pytest.mark.parametrize("alpha", [1.0, 1.3, 2.0])
def test_entmax_loss_with_alpha_as_a_tensor(alpha, seed):
    alpha = torch.tensor(alpha, dtype=torch.float64)
    check_loss(partial(entmax_loss, alpha=alpha), partial(entmax, alpha=alpha), seed=seed)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_topk_softmax_loss(k, seed):
    check_loss(
        partial(topk_softmax_loss, k=k), partial(topk_softmax, k=k), reachable=False, seed=seed
    )


def test_topk_softmax_loss_over_all_classes_reaches_every_target(seed):
    check_loss(partial(topk_softmax_loss, k=50), partial(topk_softmax, k=50), seed=seed)


def test_fenchel_young_loss_of_a_map_of_ones_own(seed):
    softmax = partial(torch.softmax, dim=-1)
    shannon = partial(fenchel_young_loss, predict=softmax, entropy=_shannon)
    # torch.softmax has NaN where nothing is allowed, so such rows are not asked for.
    check_loss(shannon, softmax, masks=False, ignore_index=None, seed=seed)


def test_gradients_in_half_precision_are_rounded_once():
    scores = 3 * torch.randn(5, 700).to(torch.bfloat16)
    target = torch.randint(700, (5,))
    # Nearly right: of p - 1 nothing would be left.
    scores[0, target[0]] = 20.0
    softmax, wide = partial(torch.softmax, dim=-1), scores.double().requires_grad_()
    fenchel_young_loss(wide, target, softmax, _shannon).backward()
    narrow = scores.requires_grad_()
    fenchel_young_loss(narrow, target, softmax, _shannon).backward()
    assert narrow.grad.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.grad.double(), wide.grad, rtol=2**-8, atol=1e-8)


@pytest.mark.parametrize(
    "module", [SparsemaxLoss(), EntmaxLoss(1.25), TopKSoftmaxLoss(2)], ids=repr
)
def test_modules_without_their_map(module, seed):
    check_loss(module, reachable=not isinstance(module, TopKSoftmaxLoss), seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize(("loss", "function"), [(sparsemax_loss, sparsemax), (entmax_loss, entmax)])
def test_on_a_gpu(loss, function, seed):
    check_loss(loss, function, device="cuda", seed=seed)


def _shannon(probs):
    return torch.special.entr(probs).sum(-1)
