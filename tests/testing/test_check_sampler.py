"""check_sampler finds what is wrong with samplers that are in use elsewhere."""

import math

import pytest
import torch

from lastlayer import samplers
from lastlayer.kernels import rng
from lastlayer.samplers.counters import fractions
from lastlayer.testing import check_sampler
from lastlayer.testing.suite import LEAST_EXPECTED, pooled


class Rounded(samplers.LogUniform):
    """Draws ⌊(n+1)^u + 1/2⌋ − 1 and records the log-uniform probabilities."""

    def _draw(self, n, counter, context):
        uniform = fractions(rng.words("auto", counter, n))
        drawn = (uniform * math.log(self.n_classes)).exp().round().long() - 1
        return drawn.clamp(0, self.n_classes - 1)


class Truncated(samplers.LogUniform):
    """Draws twice as many, and keeps the lowest of the different ones: large ids are never seen."""

    def unique(self, n, *, method="fixed", generator=None, rng_counter=None):
        ids = self.sample(4 * n, rng_counter=rng_counter).unique()[:n]
        return samplers.Drawn(ids, self.log_expected(ids, n))


class Halved(samplers.Uniform):
    """log(1 + p) where log(1 − p) is meant."""

    def log_complement(self, target, context=None, *, dtype=torch.float32):
        return torch.log1p(self.log_prob(target, dtype=torch.float64).exp()).to(dtype)


class Clipped(samplers.LogUniform):
    """Probabilities below a bound are recorded as that bound."""

    def _log_prob(self, ids, context):
        return super()._log_prob(ids, context).clamp_min(math.log(1e-3))


class Stuck(samplers.Uniform):
    """Looks at the seed alone."""

    def _draw(self, n, counter, context):
        return super()._draw(n, counter * torch.tensor([1, 0]), context)


class Restless(samplers.Uniform):
    """Looks at no counter."""

    def _draw(self, n, counter, context):
        return torch.randint(self.n_classes, (n,))


class Even(samplers.Uniform):
    """Goes round: as frequent as it should be, and not independent."""

    def _draw(self, n, counter, context):
        return (super()._draw(1, counter, context) + torch.arange(n)) % self.n_classes


class Shifted(samplers.Unigram):
    """The table of other classes."""

    def _log_prob(self, ids, context):
        return super()._log_prob((ids + 1) % self.n_classes, context)


class Floating(samplers.Uniform):
    """Keeps its probabilities in a dtype that a model changes."""

    def __init__(self, n_classes):
        super().__init__(n_classes)
        self.register_buffer("share", torch.full((n_classes,), 1.0 / n_classes))

    def _log_prob(self, ids, context):
        return self.share[ids].log().double()


class Forgotten(samplers.Uniform):
    """Has state that is not saved."""

    def __init__(self, n_classes):
        super().__init__(n_classes)
        self.shift = int(torch.randint(1, n_classes, ()))

    def _draw(self, n, counter, context):
        return (super()._draw(n, counter, context) + self.shift) % self.n_classes


ZIPF = 1.0 / torch.arange(1, 101)
BROKEN = {
    "draws follow log_prob": [
        lambda: Rounded(1000),
        lambda: Shifted(ZIPF),
        lambda: Even(50),
    ],
    "exponentiates to 1": [lambda: Clipped(1000)],
    "without target": [lambda: Halved(40)],
    "steps draw independently": [lambda: Stuck(50)],
    "the same counter gives the same draws|steps draw independently": [lambda: Restless(50)],
    "in a model in .* does not change": [lambda: Floating(51)],
    "unique.*probabilities of log_expected|unique.* draws": [lambda: Truncated(300)],
    r"cls\(\*\*sampler.config\(\)\) draws the same": [lambda: Forgotten(97)],
}


@pytest.mark.parametrize(
    ("rule", "make"), [(rule, make) for rule, makes in BROKEN.items() for make in makes]
)
def test_what_is_broken_is_found(rule, make):
    with pytest.raises(AssertionError, match=rule):
        check_sampler(make())


def test_the_message_says_how_to_repeat_it():
    with pytest.raises(AssertionError, match=r"classes 0 to 0 expected .* draws, got") as first:
        check_sampler(Rounded(1000), seed=3)
    assert "repeat with: seed=3" in str(first.value)
    with pytest.raises(AssertionError) as second:
        check_sampler(Rounded(1000), seed=3)
    assert str(second.value) == str(first.value)


def test_a_wrong_probability_of_one_class_in_the_tail_is_found():
    class Off(samplers.Unigram):
        def _log_prob(self, ids, context):
            log_prob = super()._log_prob(ids, context)
            shift = math.log(1.2) * (ids == 60) + math.log(0.8) * (ids == 61)
            return log_prob + shift

    with pytest.raises(AssertionError, match="draws follow log_prob"):
        check_sampler(Off(torch.ones(100)))


def test_bins_hold_enough_and_lose_nothing():
    for _ in range(20):
        size = int(torch.randint(1, 300, ()))
        expected = (torch.rand(size, dtype=torch.float64) ** 6 * 100).numpy()
        counts = torch.randint(9, (size,)).double().numpy()
        sums, found, first = pooled(expected, counts)
        assert sums.sum() == pytest.approx(expected.sum())
        assert found.sum() == counts.sum()
        assert first[0] == 0
        assert len(sums) == 1 or sums.min() >= LEAST_EXPECTED
