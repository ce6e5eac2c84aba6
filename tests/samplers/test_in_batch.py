"""In-batch negatives: draws from the batch, probabilities from what was seen."""

import numpy as np
import pytest
import torch

from lastlayer.samplers import InBatch


def test_probabilities_come_from_counts():
    sampler = InBatch(3, counts=[5, 0, 2], prior=1.0)
    told = sampler.log_prob(torch.tensor([0, 1, 2, 2])).exp()
    assert torch.allclose(told, torch.tensor([6.0, 1.0, 3.0, 3.0]) / 10)


def test_targets_are_counted():
    sampler = InBatch(1000, prior=0.5)
    counts = np.zeros(1000)
    for _ in range(20):
        target = (torch.rand(4, 32) ** 3 * 1000).long()
        sampler.update(target)
        counts += np.bincount(target.flatten().numpy(), minlength=1000)
    told = sampler.log_prob(torch.arange(1000), dtype=torch.float64).exp().numpy()
    assert np.allclose(told, (counts + 0.5) / (counts.sum() + 500), rtol=1e-12)


def test_older_targets_fade():
    sampler = InBatch(2, prior=1e-9, decay=0.9)
    for _ in range(300):
        sampler.update(torch.zeros(8, dtype=torch.int64))
    assert sampler.log_prob(torch.tensor([1])).item() < -20
    for _ in range(300):
        sampler.update(torch.ones(8, dtype=torch.int64))
    told = sampler.log_prob(torch.arange(2)).exp()
    assert told[1].item() == pytest.approx(1.0, abs=1e-6)
    assert told.sum().item() == pytest.approx(1.0, abs=1e-6)


def test_a_stream_is_followed():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampler = InBatch(4, decay=0.999)
    for _ in range(2000):
        sampler.update(torch.multinomial(probs, 64, replacement=True))
    assert torch.allclose(sampler.log_prob(torch.arange(4)).exp(), probs, atol=0.02)


def test_draws_come_from_the_batch():
    sampler, batch = InBatch(100), torch.tensor([7, 7, 7, 50])
    ids = sampler.sample(40_000, context=batch, rng_counter=(1, 2))
    assert set(ids.tolist()) == {7, 50}
    assert (ids == 7).double().mean().item() == pytest.approx(0.75, abs=0.015)
    assert torch.equal(ids, sampler.sample(40_000, context=batch, rng_counter=(1, 2)))


def test_the_dtype_of_a_model_changes_nothing():
    sampler = InBatch(5, counts=[1, 2, 3, 4, 10**9 + 1])
    told = sampler.log_prob(torch.arange(5), dtype=torch.float64)
    sampler.to(torch.bfloat16).update(torch.tensor([4]))
    after = sampler.log_prob(torch.arange(5), dtype=torch.float64)
    assert not torch.equal(after, told)
    assert torch.allclose(after, told, atol=1e-8)


def test_state_and_config_hold_everything():
    sampler = InBatch(6, prior=0.25, decay=0.5)
    sampler.update(torch.tensor([1, 1, 5]))
    other = InBatch.from_config(sampler.config())
    other.load_state_dict(sampler.state_dict())
    for each in (sampler, other):
        each.update(torch.tensor([0]))
    assert torch.equal(sampler.log_prob(torch.arange(6)), other.log_prob(torch.arange(6)))
    assert repr(other) == repr(sampler)


def test_bad_input_is_refused():
    sampler = InBatch(4)
    with pytest.raises(ValueError, match=r"context: expected the targets of the batch.*got None"):
        sampler.sample(3)
    with pytest.raises(ValueError, match=r"context: .* shape \(rows,\)"):
        sampler.sample(3, context=torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"target: expected class ids from 0 to 3, got 4 at position \(1,\)"
    ):
        sampler.update(torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="unique: expected a sampler without context"):
        sampler.unique(2)
    with pytest.raises(ValueError, match=r"decay: expected a number from 0 to 1, got 1\.5"):
        InBatch(4, decay=1.5)
    with pytest.raises(ValueError, match="prior: expected a finite number above 0"):
        InBatch(4, prior=0.0)
    with pytest.raises(ValueError, match=r"counts: expected shape \(4,\), .*got \(2,\)"):
        InBatch(4, counts=[1, 2])
