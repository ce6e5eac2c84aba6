"""What draws classes: called, and verified by how often each should come."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer import samplers
from lastlayer.bench import memory
from lastlayer.bench.cases import OURS, Method
from lastlayer.bench.heads.problem import SEED, zipf
from lastlayer.bench.heads.verdict import HeadVerdict

Probabilities = NDArray[np.float64]
# Ids, and their log-probabilities where they are told.
Drawn = tuple[Tensor, Tensor | None]
Draw = Callable[[int], Drawn]

# Draws of a call, and those that a verification takes, in groups of classes as probable as another.
DRAWN, VERIFIED, GROUPS = 8192, 1 << 18, 50
# Of 49 degrees of freedom: chance exceeds it once in 10^12 verifications.
_MOST_CHI_SQUARE = 170.0
ALIAS, MULTINOMIAL = "unigram by alias", "multinomial"


@dataclass
class Draws:
    """Draws with replacement from a distribution that was made ready before."""

    draw: Draw
    probs: Probabilities

    def __call__(self, _counts: Tensor) -> Drawn:
        """The classes of a step, with their log-probabilities where they are told."""
        return self.draw(DRAWN)

    captured = __call__

    def verify(self, inputs: tuple[Tensor, ...]) -> HeadVerdict:
        """Groups must come as often as they should, and log-probabilities be those of the ids."""
        (counts,) = inputs
        self(counts)
        _, peak = memory.with_peak(lambda: self(counts), counts.device)
        ids, log_prob = self.draw(VERIFIED)
        found = ids.cpu().numpy()
        reason = None
        if found.min() < 0 or found.max() >= len(self.probs):
            reason = f"classes from {found.min()} to {found.max()}"
        else:
            chi_square = _chi_square(found, self.probs)
            if not chi_square <= _MOST_CHI_SQUARE:
                reason = f"chi-square of {chi_square:.0f} in {GROUPS} groups"
        error = None
        if reason is None and log_prob is not None:
            told = log_prob.double().cpu().numpy()
            error = float(np.abs(told - np.log(self.probs[found])).max())
            if not error <= 1e-4:
                reason = f"log-probability off by {error:.1e}"
        return HeadVerdict(reason=reason, peak_bytes=peak, value_error=error)


def _chi_square(found: NDArray[np.int64], probs: Probabilities) -> float:
    group = np.minimum((np.cumsum(probs) * GROUPS).astype(np.int64), GROUPS - 1)
    expected = np.bincount(group, probs, GROUPS) * len(found)
    counted = np.bincount(group[found], minlength=GROUPS)
    some = expected > 0
    return float(((counted - expected)[some] ** 2 / expected[some]).sum())


def _multinomial(classes: int, device: torch.device) -> Draws:
    probs = _zipf(classes)
    weight = torch.from_numpy(probs).to(device)
    return Draws(lambda n: (torch.multinomial(weight, n, replacement=True), None), probs)


def _of(sampler: samplers.Sampler, device: torch.device, probs: Probabilities) -> Draws:
    there = sampler.to(device)
    return Draws(there.sample_with_log_prob, probs)


def _alias(classes: int, device: torch.device) -> Draws:
    probs = _zipf(classes)
    return _of(samplers.Unigram(probs), device, probs)


def _log_uniform(classes: int, device: torch.device) -> Draws:
    probs = np.log1p(1.0 / np.arange(1.0, classes + 1.0)) / np.log1p(classes)
    return _of(samplers.LogUniform(classes), device, probs)


def _uniform(classes: int, device: torch.device) -> Draws:
    return _of(samplers.Uniform(classes), device, np.full(classes, 1.0 / classes))


def _zipf(classes: int) -> Probabilities:
    """In random order."""
    probs: Probabilities = np.random.default_rng(SEED).permutation(zipf(classes))
    probs /= probs.sum()
    return probs


def methods(classes: int, device: torch.device) -> list[Method]:
    """torch's way first, then ours."""
    makers = {ALIAS: _alias, "log-uniform": _log_uniform, "uniform": _uniform}

    def method(name: str, source: str, make: Callable[[int, torch.device], Draws]) -> Method:
        return Method(name, source, f"draws, {name}", lambda: make(classes, device))

    ours = [method(name, OURS, make) for name, make in makers.items()]
    return [method(MULTINOMIAL, "torch", _multinomial), *ours]
