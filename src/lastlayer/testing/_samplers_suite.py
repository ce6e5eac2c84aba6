"""What the rules of a sampler stand on: copies of it, its probabilities, and a χ² test."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer.testing._suite import Suite

Reals = NDArray[np.float64]

# Standard deviations of chance that are let pass: one run in 10^9 exceeds them.
MOST_DEVIATIONS = 6.0
# Neighbouring classes are pooled until this many draws are expected.
LEAST_EXPECTED = 10.0
# Classes whose probabilities are asked for at a time.
_CHUNK = 1 << 20


@dataclass
class SamplerSuite(Suite):
    """A sampler, which is only ever copied, and the contexts it is asked with."""

    # Any: what is checked is whether it is a sampler at all.
    given: Any
    context: Tensor | None

    def sampler(self) -> Any:
        """A copy of its own."""
        return copy.deepcopy(self.given).to(self.device)

    @property
    def n_classes(self) -> int:
        """How many there are."""
        return int(self.given.n_classes)

    def contexts(self) -> list[Tensor | None]:
        """One row at a time; None for a sampler that looks at none."""
        if self.context is None:
            return [None]
        return list(self.context.to(self.device).split(1))

    def drawn(self, sampler: Any, n: int, context: Tensor | None, step: int = 0) -> Tensor:
        """``(n,)`` ids for one context."""
        ids: Tensor = sampler.sample(n, context=context, counter=(self.seed, step))
        return ids.reshape(-1)

    def log_prob(self, sampler: Any, ids: Tensor, context: Tensor | None) -> Tensor:
        """``(n,)`` log-probabilities for one context."""
        asked = ids if context is None else ids[None]
        found: Tensor = sampler.log_prob(asked, context)
        return found.reshape(-1)

    def probs(self, sampler: Any, context: Tensor | None) -> Reals:
        """Of every class, in float64."""
        found = []
        for first in range(0, self.n_classes, _CHUNK):
            ids = torch.arange(first, min(first + _CHUNK, self.n_classes), device=self.device)
            found.append(self.log_prob(sampler, ids, context).double().exp().cpu())
        return torch.cat(found).numpy()

    def demand(self, rule: str, holds: bool, detail: str) -> None:
        """Fails unless it holds."""
        if not holds:
            raise self.failure(rule, detail)

    def equal(self, rule: str, actual: Tensor, expected: Tensor) -> None:
        """Fails unless two tensors are equal to the last bit."""
        if not torch.equal(actual, expected):
            self.demand(rule, actual.shape == expected.shape, f"got shape {tuple(actual.shape)}")
            apart = int((actual != expected).sum())
            raise self.failure(rule, f"{apart} of {actual.numel()} differ")

    def follows(self, rule: str, ids: Tensor, probs: Reals) -> None:
        """Fails unless draws are as frequent as they are probable, and no more even than that."""
        counts = np.bincount(ids.cpu().numpy(), minlength=len(probs)).astype(np.float64)
        never = (probs == 0) & (counts > 0)
        if never.any():
            worst = int(never.argmax())
            raise self.failure(rule, f"class {worst} was drawn and has probability 0")
        expected, found, first = pooled(probs * len(ids), counts)
        deviations = chi_square_deviations(found, expected)
        if abs(deviations) <= MOST_DEVIATIONS:
            return
        worst = int((np.abs(found - expected) / np.sqrt(expected)).argmax())
        last = first[worst + 1] - 1 if worst + 1 < len(first) else len(probs) - 1
        raise self.failure(
            rule,
            f"{len(ids)} draws are {deviations:.1f} standard deviations of χ² from what log_prob "
            f"says; of classes {first[worst]} to {last} {expected[worst]:.1f} draws are expected, "
            f"and {found[worst]:.0f} were made",
        )


def pooled(
    expected: Reals, counts: Reals, least: float = LEAST_EXPECTED
) -> tuple[Reals, Reals, NDArray[np.int64]]:
    """Bins of neighbouring classes: expected draws, draws, and the first class of each."""
    before = np.concatenate([[0.0], np.cumsum(expected)[:-1]])
    starts = np.flatnonzero(np.diff(np.floor(before / least), prepend=-1.0))
    sums, found = (np.add.reduceat(each, starts) for each in (expected, counts))
    kept, total = [], math.inf
    for place, each in enumerate(sums):
        if total >= least:
            kept.append(place)
            total = 0.0
        total += each
    if total < least and len(kept) > 1:
        kept.pop()
    sums, found = (np.add.reduceat(each, kept) for each in (sums, found))
    return sums, found, starts[kept]


def chi_square_deviations(found: Reals, expected: Reals) -> float:
    """Pearson's statistic in standard deviations, by the cube root of Wilson and Hilferty."""
    degrees = len(expected) - 1
    if degrees == 0:
        return 0.0
    statistic = float(((found - expected) ** 2 / expected).sum())
    spread = 2.0 / (9.0 * degrees)
    return (math.cbrt(statistic / degrees) - (1.0 - spread)) / math.sqrt(spread)
