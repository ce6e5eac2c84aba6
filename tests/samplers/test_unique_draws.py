"""Draws without replacement: different classes, with the inclusion probability that is recorded."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lastlayer import samplers
from lastlayer.samplers.unique import UNIT, Inclusion

COUNTS = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=60)


@given(counts=COUNTS, data=st.data())
def test_the_table_expects_n_classes_and_none_twice(counts, data):
    probs = torch.tensor(counts, dtype=torch.float64)
    probs /= probs.sum()
    n = data.draw(st.integers(1, len(counts)))
    table = Inclusion(probs, n)
    assert int(table.width.sum()) == n * UNIT
    assert int(table.width.min()) >= 1
    assert int(table.width.max()) <= UNIT
    for step in range(5):
        ids = table.draw("fixed", torch.tensor([1, step]))
        assert len(ids) == n
        assert len(ids.unique()) == n
    # min(1, c·q): the same c for all that are not certain.
    free = (table.width > 1000) & (table.width < UNIT - 1000)
    if bool(free.any()):
        scale = table.width[free].double() / probs[free]
        assert torch.allclose(scale, scale[0], rtol=1e-2)


def test_all_classes_are_drawn_where_all_are_asked_for():
    drawn = samplers.Unigram([5, 0.1, 3, 1e-6]).unique(4)
    assert drawn.ids.tolist() == [0, 1, 2, 3]
    assert torch.equal(drawn.log_expected, torch.zeros(4))


def test_a_class_that_is_too_frequent_is_certain():
    sampler = samplers.Unigram([100, 1, 1, 1, 1])
    told = sampler.log_expected(torch.arange(5), 2).exp()
    assert torch.allclose(told, torch.tensor([1.0, 0.25, 0.25, 0.25, 0.25]))
    for step in range(50):
        assert 0 in sampler.unique(2, rng_counter=(0, step)).ids


@pytest.mark.parametrize("method", ["fixed", "poisson"])
def test_a_sum_over_all_classes_is_estimated_without_bias(method):
    n_classes, n, repeats = 400, 60, 1500
    sampler = samplers.LogUniform(n_classes)
    values = torch.rand(n_classes, dtype=torch.float64)
    found = []
    for step in range(repeats):
        ids, log_expected = sampler.unique(n, method=method, rng_counter=(2, step))
        found.append((values[ids] / log_expected.double().exp()).sum().item())
    error = np.std(found) / repeats**0.5
    assert abs(np.mean(found) - values.sum().item()) < 6 * error


def test_classes_of_different_stretches_are_drawn_independently():
    """A fixed step through the classes would draw few pairs, and those always."""
    sampler = samplers.Uniform(40)
    together = np.zeros((40, 40))
    for step in range(4000):
        ids = sampler.unique(10, rng_counter=(3, step)).ids.numpy()
        together[np.ix_(ids, ids)] += 1
    stretch = np.arange(40) // 4
    apart = stretch[:, None] != stretch
    expected = 4000 / 16
    assert np.abs(together[apart] - expected).max() < 6 * expected**0.5
    assert (together[~apart & ~np.eye(40, dtype=bool)] == 0).all()


def test_one_draw_is_a_draw():
    sampler = samplers.Unigram([4, 3, 2, 1])
    told = sampler.log_expected(torch.arange(4), 1)
    assert torch.allclose(told, sampler.log_prob(torch.arange(4)), atol=1e-6)


def test_classes_without_a_probability_are_never_drawn():
    table = Inclusion(torch.tensor([0.5, 0.0, 0.25, 0.25, 0.0], dtype=torch.float64), 3)
    assert table.draw("fixed", torch.tensor([0, 0])).tolist() == [0, 2, 3]
    with pytest.raises(ValueError, match="n: expected at most 3, the classes with"):
        Inclusion(torch.tensor([0.5, 0.0, 0.25, 0.25, 0.0], dtype=torch.float64), 4)


def test_the_table_is_made_anew_for_another_state():
    sampler, other = samplers.Unigram([1, 1, 100, 1]), samplers.Unigram([100, 1, 1, 1])
    before = sampler.log_expected(torch.arange(4), 2)
    sampler.load_state_dict(other.state_dict())
    after = sampler.log_expected(torch.arange(4), 2)
    assert not torch.equal(after, before)
    assert torch.equal(after, other.log_expected(torch.arange(4), 2))


def test_different_draws_with_replacement_are_no_unique_draws():
    """Duplicates count as draws: their expected number is n·q, not a probability."""
    sampler, n = samplers.Unigram([8, 1, 1]), 30
    ids = sampler.sample(n * 2000, rng_counter=(1, 1)).view(2000, n)
    mean = (ids == 0).double().sum(1).mean().item()
    assert mean == pytest.approx(n * 0.8, rel=0.02)
    assert sampler.log_expected(torch.tensor([0]), 2).exp().item() == pytest.approx(1.0)
