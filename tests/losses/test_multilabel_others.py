"""Binary cross entropy, the asymmetric loss and multi-label sparsemax against their definitions."""

import math
from functools import partial

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from lastlayer.losses.entmax import sparsemax_loss
from lastlayer.losses.multilabel import (
    asymmetric_loss,
    bce_loss,
    multilabel_sparsemax_loss,
    multilabel_sparsemax_predict,
)
from lastlayer.losses.zlpr import zlpr_loss
from lastlayer.maps.sparsemax import sparsemax


def test_binary_cross_entropy_is_torchs():
    scores, target = 4 * torch.randn(5, 7), torch.rand(5, 7)
    expected = binary_cross_entropy_with_logits(scores, target, reduction="none").sum(-1)
    assert torch.allclose(bce_loss(scores, target, reduction="none"), expected)
    assert torch.allclose(bce_loss(scores, target), expected.mean())


def test_right_infinities_cost_nothing():
    scores = torch.tensor([[math.inf, -math.inf]], requires_grad=True)
    for loss in (bce_loss, asymmetric_loss):
        value = loss(scores, torch.tensor([[1, 0]]))
        assert value.item() == 0.0
        assert torch.equal(torch.autograd.grad(value, scores)[0], torch.zeros(1, 2))


def test_one_class_of_zlpr_is_binary_cross_entropy():
    scores, target = 3 * torch.randn(9, 1).double(), torch.rand(9, 1).round()
    assert torch.allclose(zlpr_loss(scores, target), bce_loss(scores, target))


@pytest.mark.parametrize("margin", [0.0, 0.05])
@pytest.mark.parametrize("gammas", [(4.0, 1.0), (0.0, 0.0), (2.0, 0.5)])
def test_the_asymmetric_loss_is_its_formula(margin, gammas):
    scores, target = 2 * torch.randn(6, 9).double(), torch.rand(6, 9).round().double()
    negative, positive = gammas
    p = torch.sigmoid(scores)
    q = (p - margin).clamp(min=0)
    right = target * (1 - p) ** positive * p.log()
    wrong = (1 - target) * q**negative * (1 - q).log()
    options = dict(gamma_negative=negative, gamma_positive=positive, margin=margin)
    losses = asymmetric_loss(scores, target, **options, reduction="none")
    assert torch.allclose(losses, -(right + wrong).sum(-1))


def test_the_asymmetric_loss_without_its_options_is_binary_cross_entropy():
    scores, target = 5 * torch.randn(4, 6), torch.rand(4, 6).round()
    loss = asymmetric_loss(scores, target, gamma_negative=0, gamma_positive=0, margin=0)
    assert torch.allclose(loss, bce_loss(scores, target))


def test_weights_may_be_taken_as_given():
    scores = torch.randn(3, 5).double().requires_grad_()
    target = torch.rand(3, 5).round()
    p = torch.sigmoid(scores)
    q = (p - 0.05).clamp(min=0)
    weight = torch.where(target > 0, 1 - p, q**4).detach()
    expected = -(weight * torch.where(target > 0, p.log(), (1 - q).log())).sum()
    loss = asymmetric_loss(scores, target, focus_gradient=False, reduction="sum")
    assert torch.allclose(loss, expected)
    slope, right = (torch.autograd.grad(each, scores)[0] for each in (loss, expected))
    assert torch.allclose(slope, right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("margin", [0.0, 0.05])
def test_confident_classes_in_half_precision(dtype, margin):
    """At -20 a sigmoid is 0 in float16, and so is 1e-8: a NaN lurks in 0 · log 0."""
    scores = torch.tensor([[-20.0, 20.0, -1000.0]], dtype=dtype, requires_grad=True)
    target = torch.tensor([[0, 1, 0]])
    loss = asymmetric_loss(scores, target, margin=margin)
    assert 0.0 <= loss.item() < 1e-8
    loss.backward()
    assert torch.isfinite(scores.grad).all()


@pytest.mark.parametrize("focus_gradient", [False, True])
def test_the_grad_mode_stays_as_it_is(focus_gradient):
    scores = torch.zeros(1, 2, requires_grad=True)
    with torch.no_grad():
        loss = asymmetric_loss(scores, torch.ones(1, 2), focus_gradient=focus_gradient)
        assert not torch.is_grad_enabled()
        assert not loss.requires_grad
    asymmetric_loss(scores, torch.ones(1, 2), focus_gradient=focus_gradient)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (ValueError, "gamma_negative: .*at least 0, got -1", {"gamma_negative": -1}),
        (TypeError, "gamma_positive: expected a number, got str", {"gamma_positive": "1"}),
        (ValueError, "margin: .*below 1, got 1", {"margin": 1.0}),
        (ValueError, "margin: .*got nan", {"margin": math.nan}),
    ],
)
def test_bad_options(kind, message, options):
    with pytest.raises(kind, match=message):
        asymmetric_loss(torch.zeros(1, 2), torch.zeros(1, 2), **options)


def test_multilabel_sparsemax_is_the_loss_of_the_uniform_distribution():
    scores, target = torch.randn(5, 8), torch.rand(5, 8).round()
    target[:, 0] = 1
    shares = target / target.sum(-1, keepdim=True)
    leaf = scores.clone().requires_grad_()
    losses = multilabel_sparsemax_loss(leaf, target, reduction="none")
    assert torch.allclose(losses, sparsemax_loss(scores, shares, reduction="none"), atol=1e-6)
    (slope,) = torch.autograd.grad(losses.sum(), leaf)
    assert torch.allclose(slope, sparsemax(scores) - shares, atol=1e-6)
    written = 0.5 * (scores - shares).square().sum(-1)
    written -= 0.5 * (scores - sparsemax(scores)).square().sum(-1)
    assert torch.allclose(losses, written, atol=1e-5)


def test_rows_without_positives_are_left_out():
    scores = torch.randn(3, 4)
    scores[1] = math.nan
    scores.requires_grad_()
    target = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
    loss = multilabel_sparsemax_loss(scores, target)
    kept = multilabel_sparsemax_loss(scores[[0, 2]].detach(), target[[0, 2]])
    assert torch.allclose(loss, kept)
    (slope,) = torch.autograd.grad(loss, scores)
    assert (slope[1] == 0).all()
    assert multilabel_sparsemax_loss(scores, torch.zeros(3, 4)).item() == 0.0


def test_the_decision_rule():
    scores = torch.tensor([[2.0, 1.9, 0.0, -3.0], [0.3, 0.2, 0.1, 0.0]])
    probs = sparsemax(scores)
    assert torch.equal(multilabel_sparsemax_predict(scores), probs > 0)
    assert torch.equal(multilabel_sparsemax_predict(scores, 0.3), probs > 0.3)
    mask = torch.tensor([False, True, True, True])
    predicted = multilabel_sparsemax_predict(scores, mask=mask)
    assert torch.equal(predicted, sparsemax(scores, mask=mask) > 0)
    assert not predicted[:, 0].any()
    for threshold, kind in ((1.0, ValueError), (-0.1, ValueError), ("a", TypeError)):
        with pytest.raises(kind, match="threshold: expected"):
            multilabel_sparsemax_predict(scores, threshold)


def test_a_perfect_fit_predicts_the_labels():
    target = torch.rand(6, 9) < 0.3
    target[:, 2] = True
    scores = torch.where(target, 1.0, 0.0)
    assert torch.allclose(multilabel_sparsemax_loss(scores, target), torch.zeros(()), atol=1e-6)
    assert torch.equal(multilabel_sparsemax_predict(scores), target)


FUSED = {
    "bce": bce_loss,
    "asymmetric": asymmetric_loss,
    "given powers": partial(asymmetric_loss, gamma_negative=2.5, focus_gradient=False),
    "zlpr": zlpr_loss,
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_a_target_with_a_gradient_takes_the_same_loss(name, reduction):
    """Torch's operations and the kernels agree, in value and in the gradient of the scores."""
    scores, target = 3 * torch.randn(2, 3, 7), torch.rand(2, 3, 7)
    mask = torch.rand(2, 3, 7) < 0.8
    results = []
    for wants in (False, True):
        leaf = scores.clone().requires_grad_()
        labels = target.clone().requires_grad_(wants)
        loss = FUSED[name](leaf, labels, mask=mask, reduction=reduction)
        loss.backward(torch.arange(1.0, 7.0).view(2, 3) if reduction == "none" else None)
        assert wants == (labels.grad is not None)
        results.append((loss.detach(), leaf.grad))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FUSED)
def test_backward_may_be_repeated(name):
    scores, target = torch.randn(4, 9, requires_grad=True), torch.rand(4, 9) < 0.3
    loss = FUSED[name](scores, target)
    (first,) = torch.autograd.grad(loss, scores, retain_graph=True)
    (second,) = torch.autograd.grad(loss, scores, torch.tensor(2.0))
    assert torch.allclose(2 * first, second)


@pytest.mark.parametrize("name", FUSED)
def test_upstream_gradients_in_a_batch(name):
    scores, target = torch.randn(3, 5, requires_grad=True), torch.rand(3, 5) < 0.4
    losses = FUSED[name](scores, target, reduction="none")
    rows = torch.eye(3)
    (together,) = torch.autograd.grad(
        losses, scores, rows, is_grads_batched=True, retain_graph=True
    )
    alone = [torch.autograd.grad(losses, scores, row, retain_graph=True)[0] for row in rows]
    assert torch.allclose(together, torch.stack(alone), atol=1e-6)


@pytest.mark.parametrize("name", ["given powers", "bce"])
def test_second_derivatives(name):
    scores = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[0.0, 1.0, 0.3, 0.7], [1.0, 0.0, 0.0, 0.5]])
    losses = [FUSED[name](scores, target.clone().requires_grad_(wants)) for wants in (False, True)]
    seconds = []
    for loss in losses:
        (slope,) = torch.autograd.grad(loss, scores, create_graph=True)
        seconds.append(torch.autograd.grad((slope**2).sum(), scores)[0])
    assert torch.allclose(*seconds)


@pytest.mark.parametrize("name", FUSED)
def test_nothing_of_the_size_of_the_scores_is_kept(name):
    scores, target = torch.randn(8, 500, requires_grad=True), torch.rand(8, 500) < 0.1
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        FUSED[name](scores, target)
    own = {scores.data_ptr(), target.data_ptr()}
    assert sum(each.numel() for each in kept if each.data_ptr() not in own) <= 4 * 8 + 1
