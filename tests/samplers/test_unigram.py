"""Alias tables of integers: what is recorded is what is drawn, to the bit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lastlayer import samplers
from lastlayer.kernels.rng.table import COLUMN, alias_table, column_bits, integer_weights

COUNTS = st.lists(
    st.one_of(st.integers(0, 10**12), st.floats(0, 1e300), st.just(0)), min_size=1, max_size=200
).filter(any)


def table_weights(table, n_classes):
    """The weights that a table shares out: what its draws really follow."""
    weight, mine = np.zeros(n_classes, np.int64), table & (COLUMN - 1)
    own = np.flatnonzero(mine)
    weight[own] += mine[own]
    np.add.at(weight, table >> 32, COLUMN - mine)
    return weight


@given(counts=COUNTS, power=st.sampled_from([0.0, 0.5, 0.75, 1.0, 2.0]))
def test_the_table_shares_out_the_weights_without_a_remainder(counts, power):
    sampler = samplers.Unigram(counts, power=power)
    weight, table = sampler.weight.numpy(), sampler.table.numpy()
    assert int(weight.sum()) == 2**sampler.bits
    assert weight.min() >= 1
    assert (table_weights(table, len(counts)) == weight).all()
    assert (table >> 32 < len(counts)).all()
    told = sampler.log_prob(torch.arange(len(counts)), dtype=torch.float64).exp()
    assert told.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert np.allclose(told.numpy(), weight / 2.0**sampler.bits, rtol=1e-13)


@given(counts=COUNTS)
def test_weights_are_within_one_of_their_share(counts):
    shares = np.asarray(counts, dtype=np.float64)
    shares = shares / shares.max()
    bits = column_bits(len(shares))
    weight = integer_weights(shares, bits)
    total = 2.0 ** (bits + 32)
    exact = shares / shares.sum() * total
    small = exact < 1
    assert (weight[small] == 1).all()
    # The floors are paid for by all others, in proportion; the heaviest takes the last remainder.
    heaviest = int(weight.argmax())
    others = ~small & (np.arange(len(shares)) != heaviest)
    away = np.abs(weight - exact * (1 - small.sum() / total))
    assert (away[others] <= 2 + exact[others] * 1e-15).all()
    assert away[heaviest] <= len(shares) + exact[heaviest] * 1e-14


@pytest.mark.parametrize("n", [1, 2, 3, 5, 1000, 4096, 4097, 10_000])
@pytest.mark.parametrize("kind", ["even", "zipf", "one", "random"])
def test_tables_of_all_kinds(n, kind):
    shares = {
        "even": np.ones(n),
        "zipf": 1.0 / np.arange(1, n + 1),
        "one": (np.arange(n) == n // 2).astype(float),
        "random": np.random.default_rng(n).random(n) ** 8 + 1e-300,
    }[kind]
    bits = column_bits(n)
    weight = integer_weights(shares, bits)
    table = alias_table(weight, bits)
    assert len(table) == 1 << bits
    assert int(weight.sum()) == COLUMN << bits
    assert (table_weights(table, n) == weight).all()


def test_seventeen_million_classes_lose_nothing():
    n = 17_000_000
    counts = np.arange(1, n + 1, dtype=np.float64) ** -0.75
    sampler = samplers.Unigram(counts)
    # In float32 a cumulative sum leaves many classes nothing.
    cumulated = np.cumsum((counts / counts.sum()).astype(np.float32), dtype=np.float32)
    assert (np.diff(cumulated) == 0).mean() > 0.1
    weight = sampler.weight.numpy()
    assert np.abs(weight / 2.0**sampler.bits * counts.sum() / counts - 1).max() < 1e-7
    assert (table_weights(sampler.table.numpy(), n) == weight).all()
    ids = sampler.sample(100_000, rng_counter=(1, 2))
    beyond = (ids >= 2**24).double().mean().item()
    expected = counts[2**24 :].sum() / counts.sum()
    assert beyond == pytest.approx(expected, abs=6 * math.sqrt(expected / 100_000))


def test_a_count_of_zero_has_a_floor():
    sampler = samplers.Unigram([7, 0, 1])
    told = sampler.log_prob(torch.arange(3), dtype=torch.float64)
    assert told[1].item() == pytest.approx(-sampler.bits * math.log(2.0))
    assert told.exp()[2].item() == pytest.approx(1 / 8, rel=1e-8)
    assert sampler.sample(100_000, rng_counter=(0, 0)).unique().tolist() == [0, 2]


def test_a_power_flattens():
    counts = torch.tensor([16.0, 1.0, 81.0])
    told = samplers.Unigram(counts, power=0.75).log_prob(torch.arange(3)).exp()
    assert torch.allclose(told, torch.tensor([8.0, 1.0, 27.0]) / 36)
    even = samplers.Unigram([5, 0, 1], power=0).log_prob(torch.arange(3)).exp()
    assert torch.allclose(even, torch.full((3,), 1 / 3))


@pytest.mark.parametrize(
    "counts",
    [
        [3, 1, 2],
        (3.0, 1.0, 2.0),
        np.array([3, 1, 2], np.uint8),
        np.array([3, 1, 2], np.float16),
        torch.tensor([3, 1, 2]),
        torch.tensor([3, 1, 2], dtype=torch.bfloat16),
    ],
)
def test_counts_come_as_they_are(counts):
    told = samplers.Unigram(counts).log_prob(torch.arange(3)).exp()
    assert torch.allclose(told, torch.tensor([3.0, 1.0, 2.0]) / 6)


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_the_scale_of_counts_does_not_matter(scale):
    told = samplers.Unigram([3 * scale, scale]).log_prob(torch.arange(2)).exp()
    assert torch.allclose(told, torch.tensor([0.75, 0.25]))
