"""The head whose normaliser learns to be 1, on all rows and on a share of them."""

import math

import pytest
import torch

from lastlayer.heads.self_normalized import SelfNormalized
from lastlayer.testing import check_head

D, V = 6, 20


def make(dtype=torch.float64, **options):
    head = SelfNormalized(D, V, dtype=dtype, **options)
    torch.nn.init.normal_(head.weight)
    return head


def batch(n=12, dtype=torch.float64):
    return torch.randn(n, D, dtype=dtype, requires_grad=True), torch.randint(V, (n,))


def terms(head, hidden, target):
    """Scores of the targets, and log Z."""
    scores = torch.nn.functional.linear(hidden, head.weight, head.bias)
    present = target.clamp(min=0).unsqueeze(-1)
    return scores.gather(-1, present).squeeze(-1), torch.logsumexp(scores, -1)


def same(head, hidden, loss, expected):
    leaves = [hidden, *head.parameters()]
    torch.testing.assert_close(loss, expected)
    upstream = torch.randn_like(expected)
    made = torch.autograd.grad(loss, leaves, upstream)
    for ours, theirs in zip(made, torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("z_loss", [0.1, 1.0])
def test_on_all_rows_it_is_the_cross_entropy_with_a_penalty(z_loss):
    head = make(z_loss=z_loss)
    hidden, target = batch()
    at_target, log_z = terms(head, hidden, target)
    same(head, hidden, head(hidden, target), (log_z - at_target + z_loss * log_z**2).mean())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_on_some_rows_it_is_the_formula(reduction, weighted, bias):
    class_weight = torch.rand(V).double() if weighted else None
    options = dict(fraction=0.25, bias=bias, reduction=reduction, class_weight=class_weight)
    head = make(z_loss=0.3, **options)
    hidden, target = batch()
    target[[2, 7]] = -100
    chosen = head._chosen(target)
    head.rng_counter[1] -= 1
    assert len(chosen) == 3
    at_target, log_z = terms(head, hidden, target)
    inside = torch.zeros(12).double().index_fill(0, chosen, 12 / 3)
    weight = (target != -100).double()
    if weighted:
        weight = weight * class_weight[target.clamp(min=0)]
    losses = weight * (inside * (log_z + 0.3 * log_z**2) - at_target)
    expected = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / weight.sum()}
    same(head, hidden, head(hidden, target), expected[reduction])


def test_on_average_some_rows_are_as_good_as_all():
    hidden, target = batch(6)
    full = make(z_loss=0.3)
    head = make(z_loss=0.3, fraction=1 / 3)
    head.load_state_dict(full.state_dict())
    losses = {}
    for _ in range(60):
        before = head.rng_counter.clone()
        rows = tuple(head._chosen(target).tolist())
        head.rng_counter.copy_(before)
        loss = head(hidden, target)
        losses[rows] = loss.detach(), *torch.autograd.grad(loss, [hidden, head.weight])
    # Each of them is equally probable.
    assert sorted(losses) == [(0, 3), (1, 4), (2, 5)]
    exact = full(hidden, target)
    exact = exact.detach(), *torch.autograd.grad(exact, [hidden, full.weight])
    for together, expected in zip(zip(*losses.values(), strict=True), exact, strict=True):
        torch.testing.assert_close(torch.stack(together).mean(0), expected)


@pytest.mark.parametrize(("n", "fraction", "size"), [(10, 0.31, 4), (7, 0.001, 1), (1, 0.5, 1)])
def test_every_row_is_drawn_equally_often(n, fraction, size):
    head = make(fraction=fraction)
    counts = torch.zeros(n)
    for _ in range(2000):
        chosen = head._chosen(torch.zeros(n))
        assert len(chosen) == len(set(chosen.tolist())) == size
        counts[chosen] += 1
    share, expected = counts / 2000, size / n
    assert (share - expected).abs().max() < 6 * math.sqrt(expected * (1 - expected) / 2000) + 1e-9


def test_a_nan_in_an_ignored_row_reaches_nothing():
    head = make(fraction=0.5)
    hidden, target = batch()
    target[::2] = -100
    with torch.no_grad():
        hidden[::2] = math.nan
    for _ in range(3):
        loss = head(hidden, target)
        made = torch.autograd.grad(loss, [hidden, head.weight, head.bias])
        assert all(each.isfinite().all() for each in made)
        assert (made[0][::2] == 0).all()


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_training_brings_log_z_to_zero(fraction):
    head = SelfNormalized(D, V, z_loss=1.0, fraction=fraction)
    hidden = torch.randn(256, D)
    target = (hidden @ torch.randn(D, V)).argmax(-1)
    before = head.drift(hidden)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        head(hidden, target).backward()
        optimizer.step()
    after = head.drift(hidden)
    assert before.mean > 2.0
    assert abs(after.mean) < 0.2
    classes = target.unsqueeze(-1)
    error = head.unnormalized_log_prob(hidden, classes) - head.log_prob(hidden, classes)
    torch.testing.assert_close(error.abs().max().item(), after.largest, atol=1e-4, rtol=0)


def test_in_eval_mode_it_is_the_cross_entropy():
    head = make(fraction=0.5).eval()
    hidden, target = batch()
    at_target, log_z = terms(head, hidden, target)
    torch.testing.assert_close(head(hidden, target), (log_z - at_target).mean())
    assert head.rng_counter.tolist() == [0, 0]


def test_a_resumed_run_normalises_the_same_rows():
    head = make(fraction=0.25, seed=3)
    hidden, target = batch()
    head(hidden, target)
    other = make(fraction=0.25)
    other.load_state_dict(head.state_dict())
    for _ in range(4):
        assert torch.equal(head(hidden, target), other(hidden, target))


def test_half_precision_keeps_to_float64():
    head = make(torch.bfloat16, fraction=0.5)
    exact = make(fraction=0.5)
    exact.load_state_dict(head.state_dict())
    hidden, target = batch(dtype=torch.bfloat16)
    wide = hidden.detach().double().requires_grad_()
    loss, expected = head(hidden, target), exact(wide, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=2e-2, atol=2e-2)
    made = torch.autograd.grad(loss, [hidden, head.weight])
    truth = torch.autograd.grad(expected, [wide, exact.weight])
    for ours, theirs in zip(made, truth, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).norm() < 2e-2 * theirs.norm()


@pytest.mark.parametrize("options", [{}, {"fraction": 0.999}], ids=str)
def test_it_keeps_the_contract(options, seed):
    # Of a few rows a share of 0.999 is all of them, by the way of a share.
    check_head(lambda: SelfNormalized(8, 30, **options), loss_is_nll=False, seed=seed)


def test_a_layer_can_be_taken_over():
    linear = torch.nn.Linear(D, V)
    head = SelfNormalized.from_linear(linear, fraction=0.5, z_loss=0.2)
    head(torch.randn(4, D), torch.arange(4)).backward()
    assert linear.weight.grad is not None


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="z_loss: expected a finite number above 0, got 0"):
        SelfNormalized(D, V, z_loss=0.0)
    with pytest.raises(
        ValueError, match="fraction: expected a share of the rows, above 0 and at most 1"
    ):
        SelfNormalized(D, V, fraction=1.5)
    with pytest.raises(ValueError, match="fraction: expected a share of the rows"):
        SelfNormalized(D, V, fraction=0.0)
    with pytest.raises(TypeError, match="seed: expected an int, got float"):
        SelfNormalized(D, V, seed=0.5)
    hidden, target = batch()
    target[3] = V
    with pytest.raises(ValueError, match="target: expected class ids"):
        make(fraction=0.5)(hidden, target)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_weights_count_in_all_of_a_self_normalised_loss(reduction):
    options = dict(z_loss=0.2, class_weight=torch.rand(9) + 0.1, reduction=reduction)
    whole = SelfNormalized(4, 9, dtype=torch.float64, **options)
    nearly = SelfNormalized(4, 9, dtype=torch.float64, fraction=1 - 1e-12, **options)
    nearly.load_state_dict(whole.state_dict())
    hidden, target = torch.randn(6, 4, dtype=torch.float64), torch.randint(9, (6,))
    target[2] = -100
    torch.testing.assert_close(whole(hidden, target), nearly(hidden, target))
    scores = hidden @ whole.weight.T + whole.bias
    log_z = scores.logsumexp(-1)
    weight = torch.where(target < 0, 0.0, whole.class_weight.double()[target.clamp(min=0)])
    right = scores.gather(-1, target.clamp(min=0)[:, None]).squeeze(-1)
    losses = weight * (log_z - right + 0.2 * log_z.square())
    total = {"mean": losses.sum() / weight.sum(), "sum": losses.sum(), "none": losses}[reduction]
    torch.testing.assert_close(whole(hidden, target), total)
