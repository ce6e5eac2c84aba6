"""Smoothed and mixed labels."""

import pytest
import torch

from lastlayer.losses.multilabel import bce_loss, mixup, mixup_from_indices, smooth_labels
from lastlayer.losses.zlpr import zlpr_loss, zlpr_loss_from_indices


def dense(lists, values, n):
    target = torch.zeros(len(lists), n)
    for row, (named, labels) in enumerate(zip(lists.tolist(), values.tolist(), strict=True)):
        for entry, label in zip(named, labels, strict=True):
            if entry >= 0:
                target[row, entry] = label
    return target


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_smoothing_from_indices_is_that_of_labels(dtype):
    scores, positives = torch.randn(4, 9), torch.stack([torch.randperm(9)[:3] for _ in range(4)])
    target = torch.zeros(4, 9).scatter_(1, positives, 1.0).to(dtype)
    smoothed = smooth_labels(target, 0.1)
    assert torch.allclose(smoothed[target == 1], torch.tensor(0.9))
    assert torch.allclose(smoothed[target == 0], torch.tensor(0.1))
    loss = zlpr_loss_from_indices(scores, positives, label_smoothing=0.1)
    assert torch.allclose(loss, zlpr_loss(scores, smoothed))


def test_mixed_rows_lie_between_two():
    inputs, target = torch.randn(6, 2, 3), torch.rand(6, 5).round().long()
    mixed = mixup(inputs, target)
    assert sorted(mixed.partner.tolist()) == list(range(6))
    assert ((mixed.weight >= 0) & (mixed.weight <= 1)).all()
    for row, (share, partner) in enumerate(zip(mixed.weight, mixed.partner, strict=True)):
        expected = share * inputs[row] + (1 - share) * inputs[partner]
        assert torch.allclose(mixed.inputs[row], expected)
        expected = share * target[row] + (1 - share) * target[partner]
        assert torch.allclose(mixed.target[row], expected)
    for loss in (zlpr_loss, bce_loss):
        assert torch.isfinite(loss(torch.randn(6, 5), mixed.target))


def test_mixed_lists_are_mixed_labels():
    n, inputs = 7, torch.randn(5, 3)
    positives = torch.randint(-3, n, (5, 4))
    positives[positives < 0] = -100
    target = dense(positives, torch.ones(5, 4), n)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    lists = mixup_from_indices(inputs, positives, generator=generators[0])
    labels = mixup(inputs, target, generator=generators[1])
    assert torch.equal(lists.weight, labels.weight)
    assert torch.equal(lists.inputs, labels.inputs)
    assert lists.target.shape == lists.values.shape == (5, 8)
    scores = torch.randn(5, n)
    loss = zlpr_loss_from_indices(scores, lists.target, values=lists.values)
    assert torch.allclose(loss, zlpr_loss(scores, labels.target), atol=1e-6)


def test_a_generator_repeats_a_mixture():
    draws = [
        mixup(torch.eye(4), torch.eye(4), generator=torch.Generator().manual_seed(5))
        for _ in range(2)
    ]
    assert torch.equal(draws[0].inputs, draws[1].inputs)
    assert torch.equal(draws[0].partner, draws[1].partner)


def test_weights_are_those_of_a_beta():
    weight = mixup(torch.zeros(20_000, 1), torch.zeros(20_000, 1), alpha=0.5).weight.double()
    assert abs(weight.mean() - 0.5) < 0.02
    assert abs(weight.var() - 0.125) < 0.01  # 1 / (4 (2 alpha + 1))
    tiny = mixup(torch.zeros(100, 1), torch.zeros(100, 1), alpha=1e-4).weight
    assert torch.isfinite(tiny).all()


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (TypeError, "target: expected a torch.Tensor", lambda: smooth_labels([0], 0.1)),
        (ValueError, r"target: .*\[0, 1\], got 2", lambda: smooth_labels(2.0 * torch.eye(2), 0.1)),
        (ValueError, "target: .*0 or 1, got 3", lambda: mixup(torch.eye(1), torch.tensor([3]))),
        (ValueError, "smoothing: .*got 0.7", lambda: smooth_labels(torch.ones(2), 0.7)),
        (ValueError, "alpha: .*got 0", lambda: mixup(torch.eye(2), torch.eye(2), alpha=0)),
        (TypeError, "alpha: .*got str", lambda: mixup(torch.eye(2), torch.eye(2), alpha="1")),
        (TypeError, "inputs: .*int64", lambda: mixup(torch.ones(2, 2).long(), torch.eye(2))),
        (ValueError, "target: expected 2 rows", lambda: mixup(torch.eye(2), torch.eye(3))),
        (
            ValueError,
            "positives: .*integer",
            lambda: mixup_from_indices(torch.eye(2), torch.eye(2)),
        ),
    ],
)
def test_bad_arguments(kind, message, call):
    with pytest.raises(kind, match=message):
        call()
