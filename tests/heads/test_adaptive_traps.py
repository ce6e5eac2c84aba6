"""What goes wrong with ``torch.nn.AdaptiveLogSoftmaxWithLoss``: none of these holds for it."""

import warnings

import pytest
import torch

from lastlayer.heads import AdaptiveSoftmax, Head
from lastlayer.heads.layout import tail_widths
from waits import counted_waits

N_CLASSES = 40


def make(**options):
    return AdaptiveSoftmax(12, **{"cutoffs": [6, 15], "n_classes": N_CLASSES, **options})


def test_no_projection_has_width_zero():
    """There the last cluster has vectors of no numbers, and is uniform for ever."""
    head = AdaptiveSoftmax(32, cutoffs=[10, 100, 1000], n_classes=5000)
    assert [tail.shape[1] for tail in head.tails] == [8, 8, 8]
    assert tail_widths(32, 3, 4.0, 1) == [8, 2, 1]
    assert tail_widths(4, 2, 4.0, 8) == [4, 4]
    loss = head(torch.randn(4, 32), torch.full((4,), 4999))
    loss.backward()
    assert head.tails[2].grad.abs().sum() > 0
    inside = head.log_prob(torch.randn(1, 32))[0, 1000:]
    assert inside.std() > 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_empty_batch_has_a_loss_of_zero_and_gradients_of_zeros(reduction, smoothing):
    """There the loss is NaN."""
    head = make(reduction=reduction, label_smoothing=smoothing)
    hidden = torch.zeros(0, 12, requires_grad=True)
    loss = head(hidden, torch.zeros(0, dtype=torch.int64))
    assert loss.sum() == 0
    assert loss.shape == ((0,) if reduction == "none" else ())
    loss.sum().backward()
    assert hidden.grad.shape == (0, 12)
    assert all(each.grad is not None and not each.grad.any() for each in head.parameters())


def test_ignored_targets_count_for_nothing():
    """There -100 is an error."""
    head, hidden = make(), torch.randn(6, 12)
    target = torch.randint(N_CLASSES, (6,))
    target[3:] = -100
    torch.testing.assert_close(head(hidden, target), head(hidden[:3], target[:3]))
    assert head(hidden, torch.full((6,), -100)) == 0


def test_hidden_states_may_have_any_number_of_dimensions():
    """There three are an error."""
    head = make()
    hidden, target = torch.randn(2, 3, 12), torch.randint(N_CLASSES, (2, 3))
    expected = head(hidden.flatten(0, 1), target.flatten())
    torch.testing.assert_close(head(hidden, target), expected)
    torch.testing.assert_close(head(hidden[0, 0], target[0, 0]), head(hidden[:1, 0], target[:1, 0]))
    assert head.log_prob(hidden).shape == (2, 3, N_CLASSES)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_keeps_the_loss_in_float32(half, reduction):
    """There it is in half precision, or an error where a cluster has rows."""
    head, target = make(reduction=reduction), torch.randint(N_CLASSES, (9,))
    hidden = torch.randn(9, 12)
    with torch.autocast("cpu", half):
        loss = head(hidden, target)
        log_prob = head.log_prob(hidden)
    assert loss.dtype == log_prob.dtype == torch.float32
    torch.testing.assert_close(loss, head(hidden, target), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_step_is_one_graph_for_the_compiler(reduction):
    """There the number of rows of a cluster breaks it."""
    head = make(reduction=reduction)
    hidden = torch.randn(9, 12, requires_grad=True)
    target = torch.randint(N_CLASSES, (9,))
    target[2] = -100
    leaves = [hidden, *head.parameters()]
    loss = head(hidden, target)
    expected = torch.autograd.grad(loss.sum(), leaves)
    with warnings.catch_warnings(action="ignore"):  # torch's own, while it traces
        compiled = torch.compile(head, fullgraph=True, backend="aot_eager")(hidden, target)
    torch.testing.assert_close(compiled, loss)
    for got, wanted in zip(torch.autograd.grad(compiled.sum(), leaves), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_cutoffs_and_order_are_part_of_the_state(tmp_path):
    """There the state does not have them."""
    head = make(order=torch.randperm(N_CLASSES), head_bias=True)
    assert head.state_dict()["cutoffs"].tolist() == [6, 15]
    other = make(order=torch.randperm(N_CLASSES), head_bias=True)
    other.load_state_dict(head.state_dict())
    hidden = torch.randn(5, 12)
    assert torch.equal(other.log_prob(hidden), head.log_prob(hidden))
    elsewhere = make(cutoffs=[7, 15], order=torch.randperm(N_CLASSES), head_bias=True)
    with pytest.raises(RuntimeError, match="size mismatch"):
        elsewhere.load_state_dict(head.state_dict())
    head.save(tmp_path)
    loaded = Head.load(tmp_path)
    assert repr(loaded) == repr(head)
    assert torch.equal(loaded.order, head.order)
    assert torch.equal(loaded.topk(hidden, 9).classes, head.topk(hidden, 9).classes)


def test_every_parameter_has_a_gradient_in_every_step():
    """There a cluster without rows has none, and DDP waits for it in vain."""
    head = make()
    head(torch.randn(4, 12), torch.zeros(4, dtype=torch.int64)).backward()
    assert all(each.grad is not None for each in head.parameters())
    assert not head.tails[1].grad.any()


@pytest.mark.gpu
@pytest.mark.parametrize("ignore_index", [-100, None])
def test_the_host_waits_once_a_step(ignore_index):
    """There it waits for each cluster."""
    head = make(ignore_index=ignore_index, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(64, 12, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(N_CLASSES, (64,), device="cuda")
    head(hidden, target).backward()
    with counted_waits() as waits:
        head(hidden, target).backward()
    assert len(waits) <= 1, waits
