"""Identities of the losses: closed forms, cross entropy, weights, targets of all kinds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

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

LOSSES = {
    "sparsemax": (sparsemax_loss, sparsemax),
    "entmax": (entmax_loss, entmax),
    "entmax 1": (lambda s, y, **o: entmax_loss(s, y, 1.0, **o), lambda s: entmax(s, 1.0)),
    "entmax 1.25": (lambda s, y, **o: entmax_loss(s, y, 1.25, **o), lambda s: entmax(s, 1.25)),
    "topk": (lambda s, y, **o: topk_softmax_loss(s, y, 3, **o), lambda s: topk_softmax(s, 3)),
}


@given(st.floats(-20, 20))
def test_sparsemax_loss_of_two_classes_is_the_huber_classification_loss(margin):
    """Martins and Astudillo 2016: 0 above a margin of 1, -t below -1, (1 - t)²/4 between."""
    loss = sparsemax_loss(
        torch.tensor([[margin, 0.0]], dtype=torch.float64), torch.tensor([0])
    ).item()
    huber = 0.0 if margin >= 1 else -margin if margin <= -1 else (margin - 1) ** 2 / 4
    assert loss == pytest.approx(huber, abs=1e-12)


def test_sparsemax_loss_is_a_difference_of_squared_distances():
    scores = 2 * torch.randn(9, 6, dtype=torch.float64)
    target = torch.softmax(torch.randn(9, 6, dtype=torch.float64), -1)
    loss = sparsemax_loss(scores, target, reduction="none")
    squared = ((scores - target) ** 2).sum(-1) - ((scores - sparsemax(scores)) ** 2).sum(-1)
    assert (loss - squared / 2).abs().max() < 1e-12


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_alpha_one_is_cross_entropy(reduction, weighted):
    scores = 3 * torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    target = torch.randint(5, (8,))
    target[3] = -100
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    ours = entmax_loss(scores, target, 1.0, class_weight=weight, reduction=reduction)
    torchs = functional.cross_entropy(scores, target, weight=weight, reduction=reduction)
    assert (ours - torchs).abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(ours.sum(), scores)
    (expected,) = torch.autograd.grad(torchs.sum(), scores)
    assert (gradient - expected).abs().max() < 1e-12


def test_alpha_one_is_cross_entropy_of_distributions_less_their_entropy():
    scores = 3 * torch.randn(8, 5, dtype=torch.float64)
    target = torch.softmax(torch.randn(8, 5, dtype=torch.float64), -1)
    ours = entmax_loss(scores, target, 1.0, reduction="none")
    torchs = functional.cross_entropy(scores, target, reduction="none")
    assert (ours - (torchs - torch.special.entr(target).sum(-1))).abs().max() < 1e-12


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_weights_mean_what_they_do_in_cross_entropy(name, reduction):
    loss, _ = LOSSES[name]
    scores = torch.randn(9, 5, dtype=torch.float64)
    target = torch.randint(5, (9,))
    target[2] = -100
    weight = torch.rand(5, dtype=torch.float64) + 0.1
    plain = loss(scores, target, reduction="none")
    per_row = weight[target.clamp(min=0)] * (target != -100)
    expected = plain * per_row
    if reduction == "sum":
        expected = expected.sum()
    elif reduction == "mean":
        expected = expected.sum() / per_row.sum()
    ours = loss(scores, target, class_weight=weight, reduction=reduction)
    assert (ours - expected).abs().max() < 1e-12


def test_weights_of_distributions_are_mean_weights():
    scores = torch.randn(4, 5, dtype=torch.float64)
    target = torch.softmax(torch.randn(4, 5, dtype=torch.float64), -1)
    weight = torch.rand(5, dtype=torch.float64)
    plain = sparsemax_loss(scores, target, reduction="none")
    weighted = sparsemax_loss(scores, target, class_weight=weight, reduction="none")
    assert (weighted - plain * (target @ weight)).abs().max() < 1e-12


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_is_map_minus_target_bit_for_bit(name, dtype):
    loss, function = LOSSES[name]
    scores = 2 * torch.randn(6, 9, dtype=dtype)
    leaf = scores.clone().requires_grad_()
    target = torch.randint(9, (6,))
    soft = torch.softmax(torch.randn(6, 9, dtype=dtype), -1)
    (by_ids,) = torch.autograd.grad(loss(leaf, target, reduction="sum"), leaf)
    assert torch.equal(by_ids, function(scores) - functional.one_hot(target, 9).to(dtype))
    (by_soft,) = torch.autograd.grad(loss(leaf, soft, reduction="sum"), leaf)
    assert torch.equal(by_soft, function(scores) - soft)


def test_multi_label_is_the_uniform_distribution_over_the_positives():
    scores = torch.randn(5, 8, dtype=torch.float64)
    positives = torch.rand(5, 8) > 0.6
    positives[:, 0] = True
    target = positives.double() / positives.sum(-1, keepdim=True)
    loss = sparsemax_loss(scores, target, reduction="none")
    assert (loss >= 0).all()
    ahead = torch.where(positives, 5.0, 0.0).double()
    assert sparsemax_loss(ahead, target).abs() < 1e-12


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_label_smoothing_is_a_distribution(smoothing):
    scores, ids = torch.randn(6, 4, dtype=torch.float64), torch.randint(4, (6,))
    target = (1 - smoothing) * functional.one_hot(ids, 4).double() + smoothing / 4
    ours = entmax_loss(scores, target, 1.0) + torch.special.entr(target).sum(-1).mean()
    assert abs(ours - functional.cross_entropy(scores, ids, label_smoothing=smoothing)) < 1e-12


def test_fenchel_young_loss_with_softmax_and_shannon_is_cross_entropy():
    scores, target = torch.randn(6, 4, dtype=torch.float64), torch.randint(4, (6,))
    loss = fenchel_young_loss(
        scores,
        target,
        lambda s: torch.softmax(s, -1),
        lambda p: torch.special.entr(p).sum(-1),
    )
    assert abs(loss - functional.cross_entropy(scores, target)) < 1e-12


@pytest.mark.parametrize("k", [1, 3, 8, 20])
def test_topk_softmax_loss_closed_form(k):
    scores = 2 * torch.randn(7, 8, dtype=torch.float64)
    target = torch.randint(8, (7,))
    loss = topk_softmax_loss(scores, target, k, reduction="none")
    top = scores.topk(min(k, 8)).values
    expected = top.logsumexp(-1) - scores.gather(-1, target[:, None]).squeeze(-1)
    assert (loss - expected).abs().max() < 1e-12


def test_a_lead_of_the_margin_costs_nothing():
    for alpha in (1.25, 1.5, 2.0, 3.0):
        lead = 1 / (alpha - 1)
        scores = torch.tensor([[lead + 1e-3, 0.0, 0.0], [lead - 1e-1, 0.0, -9.0]])
        loss = entmax_loss(scores, torch.tensor([0, 0]), alpha, reduction="none")
        assert loss[0] == 0
        assert loss[1] > 0


def test_a_masked_distribution():
    scores = torch.tensor([[0.3, -math.inf, -0.2], [0.3, -math.inf, -0.2]], dtype=torch.float64)
    target = torch.tensor([[0.5, 0.0, 0.5], [0.5, 0.25, 0.25]], dtype=torch.float64)
    loss = sparsemax_loss(scores, target, reduction="none")
    short = sparsemax_loss(scores[:1, [0, 2]], target[:1, [0, 2]])
    assert abs(loss[0] - short) < 1e-12
    assert loss[1] == math.inf


def test_nothing_allowed():
    """Its loss is 0 where its target is ignored, and +inf where it is not."""
    scores = torch.full((2, 4), -math.inf, requires_grad=True)
    loss = sparsemax_loss(scores, torch.tensor([-100, 1]), reduction="none")
    assert loss.tolist() == [0.0, math.inf]
    soft = torch.full((2, 4), 0.25)
    assert entmax_loss(scores, soft, reduction="none").tolist() == [math.inf, math.inf]
    (gradient,) = torch.autograd.grad(loss[0], scores)
    assert (gradient == 0).all()


def test_no_classes_at_all():
    for loss in (sparsemax_loss, entmax_loss):
        rows = loss(torch.zeros(3, 0), torch.full((3,), -100), reduction="none")
        assert rows.tolist() == [0.0, 0.0, 0.0]
        assert loss(torch.zeros(0, 0), torch.zeros(0, dtype=torch.int64)) == 0


def test_another_ignore_index():
    scores, target = torch.randn(4, 5), torch.tensor([0, 2, 0, 4])
    loss = sparsemax_loss(scores, target, ignore_index=0)
    assert loss == sparsemax_loss(scores[[1, 3]], target[[1, 3]])


@pytest.mark.parametrize("name", LOSSES)
def test_every_target_counts_where_ignore_index_is_none(name):
    loss, _ = LOSSES[name]
    scores, target = torch.randn(4, 5), torch.tensor([0, 2, 0, 4])
    for reduction in ("mean", "sum", "none"):
        found = loss(scores, target, ignore_index=None, reduction=reduction)
        assert torch.equal(found, loss(scores, target, reduction=reduction))
    soft = torch.softmax(torch.randn(4, 5), -1)
    assert torch.equal(loss(scores, soft, ignore_index=None), loss(scores, soft))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.uint16, torch.uint64, torch.int8, torch.int16, torch.int32]
)
def test_class_ids_of_any_integer_dtype(name, dtype):
    loss, _ = LOSSES[name]
    scores, target = torch.randn(4, 5), torch.tensor([0, 2, 0, 4])
    assert torch.equal(loss(scores, target.to(dtype)), loss(scores, target))
    if dtype.is_signed:
        target[1] = -100
        assert torch.equal(loss(scores, target.to(dtype)), loss(scores, target))


def test_many_batch_dimensions():
    scores, target = torch.randn(2, 3, 4, 5), torch.randint(5, (2, 3, 4))
    loss = entmax_loss(scores, target, reduction="none")
    assert loss.shape == (2, 3, 4)
    assert entmax_loss(scores[0, 0, 0], target[0, 0, 0]) == loss[0, 0, 0]


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_the_gradient_for_a_soft_target(alpha):
    """A target that is itself learned, as in distillation: it moves on the simplex."""
    scores = torch.randn(3, 5, dtype=torch.float64)
    teacher = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def loss(x):
        return entmax_loss(scores, torch.softmax(x, -1), alpha)

    assert torch.autograd.gradcheck(loss, (teacher,))
    assert torch.autograd.gradgradcheck(loss, (teacher,))


def test_modules_hold_their_options():
    scores, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    weight = torch.tensor([1.0, 2.0, 3.0])
    options = {"class_weight": weight, "ignore_index": 2, "reduction": "sum"}
    pairs = [
        (SparsemaxLoss(**options), sparsemax_loss(scores, target, **options)),
        (EntmaxLoss(1.25, **options), entmax_loss(scores, target, 1.25, **options)),
        (TopKSoftmaxLoss(2, **options), topk_softmax_loss(scores, target, 2, **options)),
    ]
    for module, expected in pairs:
        assert torch.equal(module(scores, target), expected)
        assert torch.equal(module.state_dict()["class_weight"], weight)
        assert "ignore_index=2, reduction='sum'" in repr(module)
    assert repr(EntmaxLoss(1.25)).startswith("EntmaxLoss(alpha=1.25, ")
    assert repr(TopKSoftmaxLoss(2)).startswith("TopKSoftmaxLoss(k=2, ")
