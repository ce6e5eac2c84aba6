"""Similarities of all pairs are never there at once, and are not kept for long."""

import pytest
import torch

from benchmarks import timing
from lastlayer.losses.contrastive import info_nce

PAIRS = 4096


@pytest.mark.skipif(not timing.reset_peak(), reason="this system does not reset its peaks")
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_peak_is_far_below_all_similarities(symmetric):
    query, key = (torch.randn(PAIRS, 16, requires_grad=True) for _ in range(2))

    def call():
        return torch.autograd.grad(info_nce(query, key, symmetric=symmetric), (query, key))

    call()
    _, peak = timing.with_peak(call, torch.device("cpu"))
    assert peak < PAIRS * PAIRS * 4 / 2, "half of one float32 copy"


def kept_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """The products that the steps of a loss hold: matrices that are no vectors of pairs."""
    seen, steps = set(), [loss.grad_fn]
    while steps:
        step = steps.pop()
        if step is not None and step not in seen:
            seen.add(step)
            steps += [other for other, _ in step.next_functions]
    held = [each for step in seen for each in getattr(step, "saved_tensors", ())]
    return [
        each for each in held if each is not None and each.shape[-1:] == (23,) and each.dim() == 2
    ]


def test_the_last_products_are_kept_once():
    query, key = (torch.randn(23, 6, requires_grad=True) for _ in range(2))
    loss = info_nce(query, key, symmetric=True, chunk_rows=8)
    (kept,) = kept_of(loss)
    assert kept.shape == (8, 23)
    before = kept.clone()
    first = torch.autograd.grad(loss, (query, key), retain_graph=True)
    assert torch.equal(kept, before), "they are needed again"
    again = torch.autograd.grad(loss, (query, key))
    assert not torch.equal(kept, before), "their memory takes the gradient"
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not kept_of(info_nce(query, key, symmetric=True, chunk_rows="low"))
