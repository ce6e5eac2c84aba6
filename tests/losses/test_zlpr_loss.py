"""ZLPR against what is published of it, against its limits, and against where others fail."""

import math
import warnings

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from lastlayer.losses.zlpr import ZLPRLoss, zlpr_loss, zlpr_loss_from_indices, zlpr_probability


def plain(scores, positive):
    """The loss of one row in float64, from its positives and its negatives."""
    scores = scores.double()
    zero = scores.new_zeros(1)
    negatives = torch.cat([zero, scores[~positive]])
    return negatives.logsumexp(0) + torch.cat([zero, -scores[positive]]).logsumexp(0)


def dense(positives, shape):
    target = torch.zeros(shape[0], shape[1] + 1)
    target.scatter_(1, torch.where(positives < 0, shape[1], positives), 1.0)
    return target[:, : shape[1]]


def test_hard_labels_are_two_sums():
    scores, positive = 3 * torch.randn(5, 20), torch.rand(5, 20) < 0.3
    expected = torch.stack([plain(*row) for row in zip(scores, positive, strict=True)])
    losses = zlpr_loss(scores, positive, reduction="none")
    assert torch.allclose(losses.double(), expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_one_class_is_the_binary_cross_entropy(kind):
    scores = 4 * torch.randn(50, 1, dtype=torch.float64)
    target = torch.rand(50, 1, dtype=torch.float64)
    target = target.round() if kind == "hard" else target
    expected = binary_cross_entropy_with_logits(scores, target)
    if kind == "hard":
        assert torch.allclose(zlpr_loss(scores, target), expected)
    else:  # log(1 + (1-t)e^s) + log(1 + t e^-s) is another function between 0 and 1
        assert not torch.allclose(zlpr_loss(scores, target), expected)


@pytest.mark.parametrize("value", [-1e4, -1e7, -1e12, -math.inf, math.nan])
@pytest.mark.parametrize("label", [0.0, 1.0, 0.1])
def test_masked_classes_leave_both_sums(value, label):
    """A clipped label of 1e-7 would give such a class the whole sum of positives."""
    scores, target = torch.randn(2, 8), torch.rand(2, 8).round()
    target[:, 0] = 1.0
    scores[:, 5:], target[:, 5:] = value, label
    mask = torch.arange(8) < 5
    leaf = scores.clone().requires_grad_()
    loss = zlpr_loss(leaf, target, mask=mask)
    short = scores[:, :5].clone().requires_grad_()
    expected = zlpr_loss(short, target[:, :5])
    assert torch.allclose(loss, expected)
    loss.backward()
    expected.backward()
    assert torch.allclose(leaf.grad[:, :5], short.grad)
    assert (leaf.grad[:, 0] < 0).all()
    assert (leaf.grad[:, 5:] == 0).all()


@pytest.mark.parametrize("value", [-1e4, -1e12, -math.inf])
def test_a_mask_by_scores_is_right_where_labels_are_0(value):
    scores, target = torch.randn(2, 8), torch.rand(2, 8).round()
    scores[:, 5:], target[:, 5:] = value, 0.0
    assert torch.allclose(zlpr_loss(scores, target), zlpr_loss(scores[:, :5], target[:, :5]))


@pytest.mark.parametrize("label", [0, 1])
def test_masks_in_float16(label):
    """1e12 is infinite in float16; a positive on a masked class must not make that a NaN."""
    scores = torch.randn(3, 6).half()
    target = torch.randint(2, (3, 6))
    scores[:, 4:], target[:, 4:] = torch.tensor(-1e12).half(), label
    mask = torch.arange(6) < 4
    leaf = scores.clone().requires_grad_()
    loss = zlpr_loss(leaf, target, mask=mask)
    expected = zlpr_loss(scores[:, :4].float(), target[:, :4])
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, expected)
    loss.backward()
    assert torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize(
    ("n", "clipped", "right"), [(100, 0.98, 6.1e-4), (10_000, 5.18, 0.0596), (10**6, 11.67, 1.97)]
)
def test_no_label_is_clipped(n, clipped, right):
    """Labels that are clipped at 1e-7 are smoothed: n of them cost what is in the second column."""
    scores, target = torch.full((1, n), -12.0), torch.zeros(1, n, dtype=torch.bool)
    scores[0, 0], target[0, 0] = 12.0, True
    assert zlpr_loss(scores, target).item() == pytest.approx(right, rel=0.02)
    soft = target.float().clamp(1e-7, 1 - 1e-7)
    assert zlpr_loss(scores, soft).item() == pytest.approx(clipped, rel=0.02)


def test_a_right_negative_is_pushed_down_where_a_clip_pulls_it_up():
    scores = torch.full((1, 10**6), -12.0, requires_grad=True)
    zlpr_loss(scores, torch.zeros(1, 10**6, dtype=torch.bool)).backward()
    assert scores.grad[0, 0].item() == pytest.approx(8.6e-7, rel=0.02)
    soft = scores.detach().clone().requires_grad_()
    zlpr_loss(soft, torch.full((1, 10**6), 1e-7)).backward()
    assert soft.grad[0, 0].item() == pytest.approx(-1.4e-7, rel=0.05)


def test_no_positives_is_log_one():
    scores = torch.randn(3, 6)
    expected = torch.log1p(scores.exp().sum(-1))
    losses = zlpr_loss(scores, torch.zeros(3, 6), reduction="none")
    assert torch.allclose(losses, expected)
    empty = torch.full((3, 2), -100)
    assert torch.allclose(zlpr_loss_from_indices(scores, empty, reduction="none"), expected)


@pytest.mark.parametrize("c", [1.0, 12.0, 16.0, 40.0, 1e3])
def test_positives_are_left_out_and_not_subtracted(c):
    """A subtraction is negative at c = 12, and from 16 on pushes right positives down."""
    scores = torch.full((1, 1000), -c)
    scores[0, [3, 700]] = c
    scores.requires_grad_()
    loss = zlpr_loss_from_indices(scores, torch.tensor([[700, 3]]))
    expected = math.log1p(998 * math.exp(-c)) + math.log1p(2 * math.exp(-c))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert loss.item() >= 0
    loss.backward()
    slope = -math.exp(-c) / (1 + 2 * math.exp(-c))
    assert scores.grad[0, 3].item() == pytest.approx(slope, rel=1e-4, abs=1e-37)


def test_duplicates_count_once_and_no_class_is_padding():
    scores = torch.randn(1, 10)
    once = zlpr_loss_from_indices(scores, torch.tensor([[3]]))
    assert torch.equal(zlpr_loss_from_indices(scores, torch.tensor([[3, 3, 3]])), once)
    assert torch.equal(zlpr_loss_from_indices(scores, torch.tensor([[3, -100, -100]])), once)
    with_first = zlpr_loss_from_indices(scores, torch.tensor([[3, 0]]))
    expected = zlpr_loss(scores, torch.eye(10)[0] + torch.eye(10)[3:4])
    assert torch.allclose(with_first, expected)
    assert not torch.allclose(with_first, once)
    padded = zlpr_loss_from_indices(scores, torch.tensor([[3, -1]]), ignore_index=-1)
    assert torch.equal(padded, once)


@pytest.mark.parametrize("form", ["padded", "csr"])
@pytest.mark.parametrize("soft", [False, True])
def test_indices_are_dense(form, soft):
    n = 23
    padded = torch.stack([torch.randperm(n)[:5] for _ in range(6)])
    padded[torch.rand(6, 5) < 0.4] = -100
    values, smoothing = (torch.rand(6, 5), 0.02) if soft else (None, 0.0)
    labels = torch.ones(6, 5) if values is None else values
    target = torch.full((6, n + 1), smoothing)
    target.scatter_(1, torch.where(padded < 0, n, padded), labels)
    target = target[:, :n]
    mask = torch.rand(6, n) < 0.8
    lists = (padded,)
    if form == "csr":
        kept = padded >= 0
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), kept.sum(-1).cumsum(0)])
        lists = (padded[kept], offsets)
        values = None if values is None else values[kept]
    scores = (2 * torch.randn(6, n)).requires_grad_()
    options = dict(values=values, label_smoothing=smoothing, mask=mask)
    for reduction in ("mean", "sum"):
        loss = zlpr_loss_from_indices(scores, *lists, **options, reduction=reduction)
        expected = zlpr_loss(scores, target, mask=mask, reduction=reduction)
        assert torch.allclose(loss, expected, rtol=1e-5)
        (slope,) = torch.autograd.grad(loss, scores)
        assert torch.allclose(slope, torch.autograd.grad(expected, scores)[0], atol=1e-6)


def test_indices_with_batch_dimensions():
    scores, positives = torch.randn(2, 3, 8), torch.randint(8, (2, 3, 2))
    losses = zlpr_loss_from_indices(scores, positives, reduction="none")
    flat = zlpr_loss_from_indices(scores.reshape(6, 8), positives.reshape(6, 2), reduction="none")
    assert torch.equal(losses, flat.reshape(2, 3))
    offsets = torch.arange(7) * 2
    in_csr = zlpr_loss_from_indices(scores, positives.reshape(-1), offsets, reduction="none")
    assert torch.equal(losses, in_csr)


def test_derivatives_from_indices():
    scores = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    positives = torch.tensor([[0, 2], [-100, -100], [5, 5]])
    values = (torch.rand(3, 2, dtype=torch.float64) * 0.9 + 0.05).requires_grad_()

    def loss(scores, values):
        return zlpr_loss_from_indices(scores, positives, values=values, label_smoothing=0.1)

    def with_given(scores):
        return loss(scores, values.detach())

    assert torch.autograd.gradcheck(with_given, (scores,))
    assert torch.autograd.gradgradcheck(with_given, (scores,))
    assert torch.autograd.gradcheck(loss, (scores, values))


def test_a_soft_target_gets_a_gradient():
    scores = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    target = (torch.rand(2, 5, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(zlpr_loss, (scores, target))
    assert torch.autograd.gradgradcheck(zlpr_loss, (scores, target))


def test_indices_compile_and_vmap():
    scores = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    positives = torch.tensor([[0, 2], [-100, 3], [5, 5], [-100, -100]])
    expected = zlpr_loss_from_indices(scores, positives, label_smoothing=0.05)
    (slope,) = torch.autograd.grad(expected, scores)
    compiled = torch.compile(
        lambda s, p: zlpr_loss_from_indices(s, p, label_smoothing=0.05),
        fullgraph=True,
        backend="aot_eager",
    )
    with warnings.catch_warnings(action="ignore"):  # torch's own, while it traces
        loss = compiled(scores, positives)
    assert torch.allclose(loss, expected)
    assert torch.allclose(torch.autograd.grad(loss, scores)[0], slope)
    mapped = torch.func.vmap(lambda s, p: zlpr_loss_from_indices(s, p, label_smoothing=0.05))
    assert torch.allclose(mapped(scores, positives).mean(), expected)


def test_the_optimum_of_soft_labels():
    """sigma(2s) = t, found by an optimiser and not by the formula."""
    target = torch.rand(4, 12, dtype=torch.float64) * 0.96 + 0.02
    scores = torch.zeros(4, 12, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [scores],
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimizer.zero_grad()
        loss = zlpr_loss(scores, target, reduction="sum")
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.allclose(zlpr_probability(scores.detach()), target, atol=1e-4)


def test_hard_labels_have_no_such_optimum():
    """Exactly one of four is right: sigma(2s) is not its probability at the minimum."""
    chance = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    scores = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [scores],
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimizer.zero_grad()
        losses = zlpr_loss(scores.expand(4, 4), torch.eye(4), reduction="none")
        loss = (chance * losses).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    found = zlpr_probability(scores.detach())
    expected = torch.tensor([0.606, 0.262, 0.085, 0.012], dtype=torch.float64)
    assert torch.allclose(found, expected, atol=1e-3)


def test_the_probability_keeps_its_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        scores = torch.tensor([-6e4, 0.0, 6e4], dtype=dtype)
        assert torch.equal(zlpr_probability(scores), torch.tensor([0, 0.5, 1], dtype=dtype))
    with pytest.raises(TypeError, match="scores: expected a floating dtype"):
        zlpr_probability(torch.tensor([1]))


def test_the_module_is_the_function():
    scores, target, mask = torch.randn(3, 4), torch.eye(4)[:3], torch.rand(3, 4) < 0.7
    for reduction in ("mean", "sum", "none"):
        module = ZLPRLoss(reduction=reduction)
        expected = zlpr_loss(scores, target, mask=mask, reduction=reduction)
        assert torch.equal(module(scores, target, mask), expected)
        assert repr(reduction) in repr(module)
    with pytest.raises(ValueError, match="reduction: expected one of"):
        ZLPRLoss(reduction="some")


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("kind", "message", "change"),
    [
        (ValueError, r"target: expected labels in \[0, 1\], got 1.5", {"target": 1.5 * ONES}),
        (ValueError, "target: expected labels 0 or 1, got 2", {"target": 2 * ONES.int()}),
        (ValueError, r"target: .*shape \(2, 3\), got \(2,\)", {"target": torch.ones(2)}),
        (TypeError, "target: expected a torch.Tensor, got list", {"target": [1]}),
        (TypeError, "target: .*complex", {"target": torch.ones(2, 3).cfloat()}),
        (ValueError, r"mask: .*\(2, 3\), got \(4,\)", {"mask": torch.ones(4).bool()}),
        (TypeError, "mask: expected dtype torch.bool", {"mask": torch.ones(3)}),
        (TypeError, "scores: expected a floating dtype", {"scores": torch.ones(2, 3).int()}),
        (ValueError, "reduction: expected one of", {"reduction": "max"}),
    ],
)
def test_bad_input(kind, message, change):
    arguments = {"scores": torch.zeros(2, 3), "target": torch.zeros(2, 3)} | change
    with pytest.raises(kind, match=message):
        zlpr_loss(**arguments)


def test_a_masked_label_may_be_anything():
    scores, target = torch.randn(2, 3), torch.tensor([[1, 0, -100], [0, 1, -100]])
    mask = target >= 0
    expected = zlpr_loss(scores[:, :2], target[:, :2])
    assert torch.allclose(zlpr_loss(scores, target, mask=mask), expected)


def test_bad_lists_are_named():
    with pytest.raises(ValueError, match=r"positives: expected class ids from 0 to 2, .* got 3"):
        zlpr_loss_from_indices(torch.zeros(2, 3), torch.tensor([[0], [3]]))
    with pytest.raises(ValueError, match=r"positives: expected shape \(2, m\)"):
        zlpr_loss_from_indices(torch.zeros(2, 3), torch.tensor([0, 1]))
