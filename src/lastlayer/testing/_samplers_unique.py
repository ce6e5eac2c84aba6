"""Rules on draws without replacement."""

import math

import numpy as np
import torch

from lastlayer.testing._samplers_suite import MOST_DEVIATIONS, Reals, SamplerSuite, pooled

REPEATS = 300
# Neighbouring classes are pooled until this many draws are expected.
LEAST_EXPECTED = 200.0
# Chance exceeds what is allowed with a probability of e^-28 a bin.
EXPONENT = 28.0


def unique_draws_are_as_expected(suite: SamplerSuite) -> None:
    for n in sorted({1, max(1, suite.n_classes // 3), min(suite.n_classes, 20)}):
        for method in ("fixed", "poisson"):
            _check(suite, n, method)


def _check(suite: SamplerSuite, n: int, method: str) -> None:
    sampler = suite.sampler()
    what = f"unique({n}, method={method!r})"
    everything = torch.arange(suite.n_classes, device=suite.device)
    probs = sampler.log_expected(everything, n).double().exp().cpu().numpy()
    total, most = float(probs.sum()), float(probs.max())
    rule = f"{what} expects {n} classes, none more than once"
    fine = abs(total - n) <= 1e-5 * n and most <= 1.0 + 1e-6
    suite.demand(rule, fine, f"got {total:.9g}, and {most:.9g} of one")
    counts = np.zeros(suite.n_classes)
    for step in range(REPEATS):
        ids, log_expected = sampler.unique(n, method=method, counter=(suite.seed, step))
        far = (log_expected - sampler.log_expected(ids, n)).abs().sum()
        suite.demand(f"{what} says what log_expected says", float(far) == 0.0, f"{far} apart")
        if method == "fixed":
            suite.demand(f"{what} draws {n}", len(ids) == n, f"got {len(ids)}")
        drawn = np.bincount(ids.cpu().numpy(), minlength=suite.n_classes)
        suite.demand(f"{what} draws no class twice", drawn.max(initial=0) <= 1, f"got {ids}")
        counts += drawn
    _compare(suite, what, probs, counts)
    mean, deviation = counts.sum() / REPEATS, math.sqrt(n / REPEATS)
    rule = f"{what} draws {n} on average"
    suite.demand(rule, abs(mean - n) <= MOST_DEVIATIONS * deviation, f"got {mean}")


def _compare(suite: SamplerSuite, what: str, probs: Reals, counts: Reals) -> None:
    rule = f"{what} draws a class as often as log_expected says"
    missed = (probs == 1.0) & (counts < REPEATS)
    worst = int(missed.argmax())
    told = f"class {worst} is certain, and was drawn in {counts[worst]:.0f} of {REPEATS} times"
    suite.demand(rule, not missed.any(), told)
    expected, found, first = pooled(REPEATS * probs, counts, LEAST_EXPECTED)
    # Bernstein's bound, which holds for classes that are drawn on their own or exclude each other.
    variance = np.add.reduceat(REPEATS * probs * np.clip(1.0 - probs, 0.0, 1.0), first)
    allowed = np.sqrt(2 * EXPONENT * variance) + 2 * EXPONENT / 3
    worst = int((np.abs(found - expected) - allowed).argmax())
    told = (
        f"from class {first[worst]} on {expected[worst]:.1f} draws are expected in {REPEATS} times "
        f"and {found[worst]:.0f} were made; chance allows for {allowed[worst]:.1f} more or less"
    )
    suite.demand(rule, abs(found[worst] - expected[worst]) <= allowed[worst], told)
