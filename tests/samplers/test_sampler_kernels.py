"""Random words and alias draws: the same from every implementation."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from lastlayer import kernels
from lastlayer.kernels import _cpu, _registry, rng
from lastlayer.kernels.rng import SERIES
from lastlayer.kernels.rng.reference import philox as rounds
from lastlayer.kernels.rng.table import alias_table, column_bits, integer_weights

COUNTERS = [(0, 0), (1, 2), (-1, -1), (-(2**63), 2**63 - 1), (2**40 + 3, -(2**35))]


def place(impl):
    reason = kernels.available()[impl]
    if reason is not None:
        pytest.skip(reason)
    return "cuda" if impl != "cpu" and torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # The vectors that its authors publish.
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_is_the_published_one(counter, key, words):
    def parse(text):
        return tuple(torch.tensor(int(word, 16)) for word in text.split())

    assert rounds(parse(counter), parse(key)) == parse(words)


@pytest.mark.parametrize("impl", ["triton", "cpu"])
@pytest.mark.parametrize("n", [0, 1, 2, 255, 600])
def test_words_are_the_same_everywhere(impl, n):
    device = place(impl)
    for counter in COUNTERS:
        given = torch.tensor(counter)
        expected = rng.words("reference", given, n)
        made = rng.words(impl, given.to(device), n).cpu()
        assert made.shape == (n, 2)
        assert torch.equal(made, expected)


@pytest.mark.parametrize("impl", ["triton", "cpu"])
@pytest.mark.parametrize("n_classes", [1, 2, 1000, 10**8, 2**31])
def test_log_uniform_draws_are_the_same_everywhere(impl, n_classes):
    device = place(impl)
    order = torch.randperm(n_classes) if n_classes == 1000 else None
    there = None if order is None else order.to(device)
    for n, counter in zip([0, 1, 2, 257, 900], COUNTERS, strict=True):
        given = torch.tensor(counter)
        ids, log_prob = rng.log_uniform("reference", given, order, n, n_classes)
        made = rng.log_uniform(impl, given.to(device), there, n, n_classes)
        assert torch.equal(made[0].cpu(), ids)
        assert made[1].dtype == torch.float32
        assert torch.allclose(made[1].cpu(), log_prob, rtol=2e-7, atol=0)


@pytest.mark.parametrize("impl", ["triton", "cpu"])
@pytest.mark.parametrize("below", [1, 2, 1000, 2**31 - 1, 2**31])
def test_integers_are_the_same_everywhere(impl, below):
    device = place(impl)
    for n, counter in zip([0, 1, 2, 257, 900], COUNTERS, strict=True):
        given = torch.tensor(counter)
        expected = rng.integers("reference", given, n, below)
        assert torch.equal(rng.integers(impl, given.to(device), n, below).cpu(), expected)
        # ⌊below · r / 2^64⌋ in integers without a bound.
        words = rng.words("reference", given, n).tolist()
        assert expected.tolist() == [((a << 32 | b) * below) >> 64 for a, b in words]


def test_the_polynomial_is_a_power_of_two():
    place = np.linspace(-0.5, 0.5, 10_001)
    assert np.abs(np.polyval(SERIES, place) / 2.0**place - 1).max() < 1e-15


def test_blocks_beyond_32_bits_differ():
    # The number of a block has two words of the counter: the second is used from 2^32 on.
    seed = torch.tensor(7)
    low, high = torch.tensor([3]), torch.tensor([3 + 2**32])
    zero = torch.zeros_like(low)
    first = rounds((low, zero, zero, zero), (seed, seed))
    second = rounds((high & 0xFFFFFFFF, high >> 32, zero, zero), (seed, seed))
    assert not torch.equal(torch.stack(first), torch.stack(second))


def test_words_look_random():
    made = rng.words("cpu", torch.tensor([5, 6]), 50_000)
    assert int(made.min()) >= 0
    assert int(made.max()) < 2**32
    bits = (made.flatten()[:, None] >> torch.arange(32)) & 1
    share = bits.double().mean(0)
    assert (share - 0.5).abs().max() < 6 * 0.5 / len(made.flatten()) ** 0.5
    # Words of a draw and of neighbouring draws are not correlated.
    numbers = made.flatten().double() / 2**32 - 0.5
    for lag in (1, 2, 3, 4):
        product = (numbers[lag:] * numbers[:-lag]).mean()
        assert abs(product) < 6 / 12 / len(numbers) ** 0.5


def table_of(n, seed):
    bits = column_bits(n)
    weight = integer_weights(np.random.default_rng(seed).random(n) ** 4 + 1e-9, bits)
    return torch.from_numpy(alias_table(weight, bits)), torch.from_numpy(weight)


@pytest.mark.parametrize("impl", ["triton", "cpu"])
@pytest.mark.parametrize("n_classes", [1, 2, 3, 64, 1000])
def test_alias_draws_are_the_same_everywhere(impl, n_classes, seed):
    device = place(impl)
    table, weight = table_of(n_classes, seed)
    for n, counter in zip([0, 1, 2, 129, 500], COUNTERS, strict=True):
        given = torch.tensor(counter)
        ids, log_prob = rng.draw("reference", table, weight, given, n)
        made = rng.draw(impl, *(each.to(device) for each in (table, weight, given)), n)
        assert torch.equal(made[0].cpu(), ids)
        assert made[1].dtype == torch.float32
        assert torch.allclose(made[1].cpu(), log_prob, rtol=0, atol=4e-6)


@pytest.mark.parametrize("impl", kernels.IMPLEMENTATIONS)
@pytest.mark.parametrize("bits", [44, 52, 63])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # of Triton's interpreter
def test_the_log_complement_is_exact_at_both_ends(impl, bits, wide):
    device = place(impl)
    whole = 1 << bits
    weights = [1, 1000, whole // 3, whole - 2, min(whole, 2**63 - 1)]
    target = torch.tensor([[0, 1, 2], [3, 4, -1]])
    made = rng.log_complement(impl, torch.tensor(weights).to(device), target.to(device), bits, wide)
    assert made.dtype == (torch.float64 if wide else torch.float32)
    exact = [float(Fraction(whole - each, whole)) for each in weights] + [1.0]
    expected = torch.tensor(exact, dtype=torch.float64).log().view(2, 3)
    # Near 0 the logarithm of a sum and that of the total cancel, to what float64 keeps of them.
    torch.testing.assert_close(
        made.cpu().double(), expected, rtol=1e-13 if wide else 1e-7, atol=1e-14 if wide else 1e-7
    )
    assert made[1, 2] == 0.0


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("complement", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_shares_of_log_uniform_targets(impl, complement, wide, seed):
    device = place(impl)
    for n_classes in (2, 1000, 2**31):
        target = torch.tensor([[0, 1, -1], [n_classes // 2, n_classes - 1, 0]])
        rank = None
        if n_classes == 1000:
            rank = torch.randperm(n_classes, generator=torch.Generator().manual_seed(seed))
        made = rng.log_uniform_share(
            impl, target.to(device), None if rank is None else rank.to(device), n_classes,
            complement, wide,
        ).cpu()  # fmt: skip
        assert made.dtype == (torch.float64 if wide else torch.float32)
        known = target.clamp(min=0)
        known = known if rank is None else rank[known]
        for place_, (k, given) in enumerate(
            zip(known.flatten().tolist(), target.flatten().tolist(), strict=True)
        ):
            share = math.log1p(1.0 / (k + 1.0)) / math.log1p(n_classes)
            exact = math.log1p(-share) if complement else math.log(share)
            assert made.flatten()[place_].item() == pytest.approx(
                0.0 if given < 0 else exact, rel=1e-13 if wide else 1e-6, abs=1e-30
            )


def test_threads_share_the_draws(seed, monkeypatch):
    table, weight = table_of(500, seed)
    counter = torch.tensor([1, 2])
    alone = rng.draw("cpu", table, weight, counter, 20_001)
    before = torch.get_num_threads()
    monkeypatch.setattr(_cpu, "_ENTRIES_A_THREAD", 1024)
    torch.set_num_threads(3)
    try:
        together = rng.draw("cpu", table, weight, counter, 20_001)
        words = rng.words("cpu", counter, 50_001)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1], alone[1])
    assert torch.equal(words, rng.words("cpu", counter, 50_001))


def test_a_forced_implementation_that_cannot_run_says_so():
    counter = torch.zeros(2, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="impl: 'cpu' cannot run philox_words here"):
        rng.words("cpu", counter, 3)


def test_integers_are_no_reason_to_take_the_reference(monkeypatch):
    monkeypatch.setattr(_registry, "available", lambda: dict.fromkeys(kernels.IMPLEMENTATIONS))
    assert kernels.selected("philox_words", "cuda", torch.int64) == "triton"
    assert kernels.selected("alias_draw", "cuda", torch.int64) == "triton"
    assert kernels.selected("touched_rows", "cuda", torch.int64) == "reference"
