"""On a CPU few scores are made at once, and many in chunks: both ways give the same results."""

from functools import partial

import pytest
import torch
from every_head import EVERY_HEAD, LABELS, N_CLASSES, WIDTH, batch, make

from lastlayer import heads
from lastlayer.fused import scores

NAMES = [name for name in EVERY_HEAD if name not in ("partial", "target")]
LABEL_HEADS = {
    name: partial(heads.MultiLabel, WIDTH, N_CLASSES, name, dtype=torch.float64)
    for name in ("zlpr", "bce", "asymmetric")
}


def step(head, hidden, *target):
    """The loss, and the gradients of hidden and of all parameters."""
    hidden = hidden.detach().clone().requires_grad_()
    loss = head(hidden, *target)
    wanted = [hidden, *head.parameters()]
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    return loss.detach(), *(None if each is None else each.to_dense() for each in gradients)


def predictions(head, hidden, classes, draws):
    with torch.no_grad():
        made = [head.log_prob(hidden), head.log_prob(hidden, classes), *head.topk(hidden, 4)]
        if draws:
            generator = torch.Generator().manual_seed(3)
            made.append(head.sample(hidden, 50, generator=generator))
    return made


def same_both_ways(monkeypatch, call):
    few = call()
    # No scores are few.
    monkeypatch.setattr(scores, "_ONE_PRODUCT_SCORES", -1)
    torch.testing.assert_close(few, call(), equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_predictions(monkeypatch, name):
    head, (hidden, _) = make(name).eval(), batch(name, 9)
    classes = torch.arange(18).view(9, 2) % N_CLASSES
    draws = name not in LABELS
    same_both_ways(monkeypatch, lambda: predictions(head, hidden, classes, draws))


@pytest.mark.parametrize("name", ["full", "entmax", "topk", "self_normalized", "differentiated"])
def test_rows_with_a_nan_and_masked_classes(monkeypatch, name):
    head, (hidden, _) = make(name).eval(), batch(name, 9)
    hidden = hidden.detach().clone()
    hidden[4] = torch.nan
    classes = torch.arange(9) % N_CLASSES
    torch.nn.init.constant_(head.bias[:3].data, -torch.inf)
    same_both_ways(monkeypatch, lambda: predictions(head, hidden, classes, False))
    monkeypatch.undo()
    torch.nn.init.constant_(head.bias, -torch.inf)
    same_both_ways(monkeypatch, lambda: predictions(head, hidden, classes, False))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["full", "entmax", "topk", "self_normalized", "char_cnn"])
def test_steps(monkeypatch, name, reduction):
    head, (hidden, target) = make(name, reduction=reduction), batch(name, 9)
    same_both_ways(monkeypatch, lambda: step(head, hidden, target))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LABEL_HEADS)
def test_steps_of_labels(monkeypatch, name, reduction):
    head = LABEL_HEADS[name](reduction=reduction)
    hidden = torch.randn(5, WIDTH, dtype=torch.float64)
    # Padding, a row without labels, and a label that is listed twice.
    padded = torch.tensor([[3, 0, -100], [-100] * 3, [7, 7, 2], [22, -100, -100], [1, 2, 3]])
    offsets = torch.arange(0, 16, 3)
    same_both_ways(monkeypatch, lambda: step(head, hidden, padded))
    monkeypatch.undo()
    same_both_ways(monkeypatch, lambda: step(head, hidden, padded.flatten(), offsets))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_steps_by_torch_itself(monkeypatch, smoothing):
    head, (hidden, target) = make("full"), batch("full", 9)
    head.label_smoothing = smoothing
    same_both_ways(monkeypatch, lambda: step(head, hidden, target))
    monkeypatch.undo()
    # Masked classes, and then a row without any class, for which torch's loss is NaN.
    torch.nn.init.constant_(head.bias[N_CLASSES // 2 :].data, -torch.inf)
    allowed = target % (N_CLASSES // 2)
    same_both_ways(monkeypatch, lambda: step(head, hidden, allowed))
    monkeypatch.undo()
    torch.nn.init.constant_(head.bias, -torch.inf)
    same_both_ways(monkeypatch, lambda: step(head, hidden, allowed))
    assert step(head, hidden, allowed)[0] == torch.inf
