"""Losses on scores whose backward starts from a few numbers per row, as on CUDA."""

import pytest
import torch

import lastlayer
from lastlayer.losses import entmax as module


def value_and_gradient(loss, scores, *args, **options):
    scores = scores.clone().requires_grad_()
    made = loss(scores, *args, **options)
    made.sum().backward()
    return made.detach(), scores.grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("batch", [(5,), (2, 3), ()])
@pytest.mark.parametrize("kind", ["ids", "weighted", "distributions", "labels"])
def test_it_is_the_same_loss(monkeypatch, kind, batch, reduction):
    scores = 2 * torch.randn(*batch, 7, dtype=torch.float64)
    options = {"reduction": reduction}
    loss, args = lastlayer.entmax_loss, (torch.randint(7, batch),)
    if kind == "weighted":
        options["class_weight"] = torch.rand(7, dtype=torch.float64)
        if batch:
            args[0].view(-1)[0] = -100
    elif kind == "distributions":
        args = (torch.softmax(torch.randn(*batch, 7, dtype=torch.float64), -1),)
    elif kind == "labels":
        loss, args = lastlayer.multilabel_sparsemax_loss, (torch.rand(*batch, 7) < 0.5,)
    expected = value_and_gradient(loss, scores, *args, **options)
    monkeypatch.setattr(module, "_leaves_statistics", lambda scores, k: not k)
    made = value_and_gradient(loss, scores, *args, **options)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("soft", [False, True])
def test_a_learned_alpha_has_the_same_gradient(monkeypatch, soft, reduction):
    scores = 2 * torch.randn(2, 3, 7, dtype=torch.float64)
    target = torch.softmax(scores.flip(-1), -1) if soft else torch.randint(7, (2, 3))
    if not soft:
        target[0, 1], scores[0, 1, 2] = -100, torch.nan
    start = torch.tensor([1.2, 1.5, 2.3], dtype=torch.float64).view(3, 1)

    def made():
        alpha = start.clone().requires_grad_()

        def loss(x):
            return lastlayer.entmax_loss(x, target, alpha, reduction=reduction)

        return *value_and_gradient(loss, scores), alpha.grad

    expected = made()
    monkeypatch.setattr(module, "_leaves_statistics", lambda scores, k: not k)
    for one, other in zip(made(), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
        assert one.isfinite().all()


def test_a_graph_that_is_kept_gives_the_gradient_again(monkeypatch):
    monkeypatch.setattr(module, "_leaves_statistics", lambda scores, k: not k)
    scores = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    loss = lastlayer.sparsemax_loss(scores, torch.arange(4))
    (first,) = torch.autograd.grad(loss, scores, retain_graph=True)
    (second,) = torch.autograd.grad(2 * loss, scores, retain_graph=True)
    torch.testing.assert_close(second, 2 * first)
    slope = torch.autograd.grad(loss, scores, create_graph=True)[0]
    torch.testing.assert_close(slope, first)
    torch.autograd.grad(slope.square().sum(), scores)
