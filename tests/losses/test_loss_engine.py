"""Losses of class ids and labels make few operations, and behave as those made of many."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lastlayer import (
    entmax,
    entmax_loss,
    info_nce,
    sparsemax_loss,
    topk_softmax,
    topk_softmax_loss,
    zlpr_loss,
    zlpr_loss_from_indices,
)

LOSSES = {
    "sparsemax": sparsemax_loss,
    "entmax": entmax_loss,
    "entmax 1.3": partial(entmax_loss, alpha=1.3),
    "topk": partial(topk_softmax_loss, k=3),
}
LABELS = (torch.arange(24).reshape(4, 6) % 4 == 0).double()
MULTILABEL = {
    "zlpr": lambda s, **o: zlpr_loss(s, LABELS, **o),
    "zlpr masked": lambda s, **o: zlpr_loss(s, LABELS, mask=torch.arange(6) < 5, **o),
    "zlpr listed": lambda s, **o: zlpr_loss_from_indices(
        s, torch.tensor([[0, 4], [2, 2], [-100, 1], [-100, -100]]), label_smoothing=0.1, **o
    ),
}
TARGET = torch.tensor([0, 5, -100, 2])
ALL = LOSSES | MULTILABEL
with_each = pytest.mark.parametrize("name", ALL)
with_each_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def call(name, scores, **options):
    if name in MULTILABEL:
        return MULTILABEL[name](scores, **options)
    return LOSSES[name](scores, TARGET, **options)


def drawn(dtype=torch.float64):
    return (2 * torch.randn(4, 6, dtype=torch.float64)).to(dtype).requires_grad_()


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("step", "most"),
    [
        (lambda s: entmax_loss(s, torch.arange(32)), 14),
        (lambda s: topk_softmax_loss(s, torch.arange(32), 5), 14),
        (lambda s: zlpr_loss(s, torch.eye(32, 100)), 14),
        (lambda s: info_nce(s, s.detach()), 16),
    ],
    ids=["entmax", "topk", "zlpr", "info_nce"],
)
def test_a_step_dispatches_few_operations(step, most):
    """F.cross_entropy with its backward pass dispatches 8."""
    scores = torch.randn(32, 100, requires_grad=True)
    step(scores).backward()
    with Count() as count:
        step(scores).backward()
    assert len(count.operations) <= most, count.operations


@with_each
@with_each_reduction
def test_second_derivatives(name, reduction):
    # At a distance from the edges of supports, where maps have kinks.
    scores = torch.tensor([[0.3, -0.9, 0.1, 2.2, -3.1, 1.4]], dtype=torch.float64)
    scores = torch.cat([scores.roll(i, 1) * (1 + 0.1 * i) for i in range(4)]).requires_grad_()
    options = {} if name in MULTILABEL else {"class_weight": torch.rand(6) + 0.5}
    loss = partial(call, name, reduction=reduction, **options)
    assert torch.autograd.gradcheck(loss, (scores,))
    assert torch.autograd.gradgradcheck(loss, (scores,))


@with_each
@with_each_reduction
def test_a_gradient_with_a_graph_is_the_one_without(name, reduction):
    scores = drawn()
    loss = call(name, scores, reduction=reduction)
    upstream = torch.rand_like(loss)
    (expected,) = torch.autograd.grad(loss, scores, upstream, retain_graph=True)
    (found,) = torch.autograd.grad(loss, scores, upstream, create_graph=True)
    assert torch.allclose(found, expected)
    assert found.requires_grad


@with_each
@with_each_reduction
def test_backward_again(name, reduction):
    scores = drawn(torch.float32)
    loss = call(name, scores, reduction=reduction)
    upstream = torch.rand_like(loss)
    first, again, last = (
        torch.autograd.grad(loss, scores, upstream, retain_graph=kept)[0]
        for kept in (True, True, False)
    )
    assert torch.equal(first, again)
    assert torch.allclose(first, last)


@with_each
def test_gradients_in_a_batch(name):
    scores = drawn()
    loss = call(name, scores, reduction="none")
    every = torch.eye(4, dtype=torch.float64)
    (jacobian,) = torch.autograd.grad(loss, scores, every, is_grads_batched=True, retain_graph=True)
    for row, given in zip(jacobian, every, strict=True):
        assert torch.allclose(row, torch.autograd.grad(loss, scores, given, retain_graph=True)[0])


@pytest.mark.parametrize("name", LOSSES)
def test_rows_that_do_not_count_have_no_gradient(name):
    """Even where they are NaN; and fully masked rows cost +inf without a gradient."""
    scores = drawn(torch.float32).detach()
    scores[2] = math.nan
    scores.requires_grad_()
    for reduction in ("mean", "none"):
        loss = call(name, scores, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss.sum(), scores)
        assert (gradient[2] == 0).all()
        assert gradient.isfinite().all()
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    counted = LOSSES[name](scores, torch.tensor([0, 5, 2, 1]), class_weight=weight)
    (gradient,) = torch.autograd.grad(counted, scores)
    assert counted.isfinite()
    assert (gradient[2] == 0).all()
    masked = torch.full((2, 6), -math.inf, requires_grad=True)
    for target in (torch.tensor([0, 3]), torch.full((2, 6), 1 / 6)):
        loss = LOSSES[name](masked, target, reduction="sum")
        assert loss == math.inf
        assert (torch.autograd.grad(loss, masked)[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_keeps_the_digits_of_a_target_that_is_nearly_right(name, dtype):
    """1 minus a probability that was rounded before has few of them."""
    lead = {"sparsemax": 0.99, "entmax": 1.9, "entmax 1.3": 2.9, "topk": 6.0}[name]
    scores = torch.zeros(64, 6)
    scores[:, 0] = lead - torch.rand(64) / 100
    leaf = scores.to(dtype).requires_grad_()
    exact = leaf.detach().double().requires_grad_()
    ids = torch.zeros(64, dtype=torch.int64)
    loss, expected = LOSSES[name](leaf, ids), LOSSES[name](exact, ids)
    assert loss.dtype == torch.float32
    assert torch.allclose(loss.double(), expected, atol=1e-6)
    (found,) = torch.autograd.grad(2**12 * loss, leaf)
    (wanted,) = torch.autograd.grad(2**12 * expected, exact)
    assert found.dtype == dtype
    assert (found - wanted).norm() / wanted.norm() < {torch.float16: 1e-3, torch.bfloat16: 6e-3}[
        dtype
    ]


@pytest.mark.parametrize("name", LOSSES)
def test_layouts(name):
    plain = torch.randn(6, 4)
    target = torch.tensor([[0, 1], [-100, 3]])
    for scores in (plain.T, torch.randn(4, 12)[:, ::2], torch.randn(2, 2, 6).transpose(0, 1)):
        ids = target.reshape(scores.shape[:-1])
        leaf = scores.detach().requires_grad_()
        dense = scores.contiguous().requires_grad_()
        for reduction in ("mean", "none"):
            found = LOSSES[name](leaf, ids, reduction=reduction)
            expected = LOSSES[name](dense, ids, reduction=reduction)
            assert torch.equal(found, expected)
            gradients = [
                torch.autograd.grad(each.sum(), scores_)[0]
                for each, scores_ in ((found, leaf), (expected, dense))
            ]
            assert torch.equal(*gradients)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 3e38), (torch.float64, 1.7e308)])
def test_scores_at_the_end_of_the_range_cost_infinity_and_no_nan(name, dtype, large):
    scores = torch.tensor([[large, -large, 0.0], [large, large, -large]], dtype=dtype)
    scores.requires_grad_()
    soft = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.5, 0.5]], dtype=dtype)
    for target in (torch.tensor([1, 2]), soft):
        loss = LOSSES[name](scores, target, reduction="none")
        assert (loss == math.inf).all()
        assert torch.autograd.grad(loss.sum(), scores)[0].isfinite().all()
    right = LOSSES[name](scores[:1], torch.tensor([0]))
    assert right == 0


def test_numpy_integers_are_integers():
    scores = torch.randn(4, 6)
    for integer in (np.int64, np.int16):
        ignored = {"ignore_index": integer(-100)}
        assert torch.equal(entmax_loss(scores, TARGET, **ignored), entmax_loss(scores, TARGET))
        top = topk_softmax_loss(scores, TARGET, integer(3), **ignored)
        assert torch.equal(top, topk_softmax_loss(scores, TARGET, 3))
        lists = zlpr_loss_from_indices(scores, TARGET[:, None], **ignored)
        assert torch.equal(lists, zlpr_loss_from_indices(scores, TARGET[:, None]))
        pairs = info_nce(scores, scores.flip(0), symmetric=True, chunk_rows=integer(3))
        assert torch.allclose(pairs, info_nce(scores, scores.flip(0), symmetric=True))


def test_one_score_sized_tensor_is_held():
    """The gradient; the scores are the input's own memory."""
    scores = torch.randn(50, 1000, requires_grad=True)
    held = {}

    def pack(tensor):
        held[tensor.data_ptr()] = tensor.numel()
        return tensor

    for loss in (entmax_loss, partial(topk_softmax_loss, k=3)):
        held.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss(scores, torch.arange(50))
        large = [ptr for ptr, numel in held.items() if numel >= scores.numel()]
        assert len([ptr for ptr in large if ptr != scores.data_ptr()]) == 1


def test_the_maps_are_those_of_the_losses():
    scores, target = drawn(), torch.tensor([0, 5, 1, 2])
    one_hot = torch.nn.functional.one_hot(target, 6)
    for loss, function in (
        (entmax_loss, entmax),
        (LOSSES["topk"], partial(topk_softmax, k=3)),
    ):
        for batch in ((4,), (2, 2), (1, 4, 1)):
            shaped = scores.detach().reshape(*batch, 6).requires_grad_()
            (found,) = torch.autograd.grad(
                loss(shaped, target.reshape(batch), reduction="sum"), shaped
            )
            assert torch.allclose(found, function(shaped) - one_hot.reshape(*batch, 6))
