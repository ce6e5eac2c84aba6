"""Means over seeds, their confidence intervals, and significance tests between heads.

A mean over n seeds has a 95% t-interval; with one seed there is none. Perplexities and costs are
averaged as logarithms, which gives the geometric mean and an asymmetric interval. Heads are
compared seed by seed, since runs with the same seed see the same batches in the same order: a
paired t-test with the variance pooled over all pairs of heads, and Holm's correction for the number
of pairs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import stats

LEVEL = 0.05


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its 95% confidence interval."""

    mean: float
    n: int  # number of seeds
    low: float | None = None  # None with one seed
    high: float | None = None


def estimate(values: Sequence[float], *, log: bool = False) -> Estimate | None:
    """Mean and interval of the finite values, with ``log`` of their logarithms; None without any.

    Example:
        >>> round(estimate([4.0, 9.0], log=True).mean, 9)
        6.0
        >>> estimate([4.0]).low is None
        True
    """
    usable = [v for v in values if math.isfinite(v) and (v > 0.0 or not log)]
    if not usable:
        return None
    if len(usable) == 1:
        return Estimate(usable[0], 1)
    made = np.log(usable) if log else np.asarray(usable)
    mean, half = float(made.mean()), 0.0
    if np.ptp(made) > 0:
        half = float(stats.t.ppf(1 - LEVEL / 2, len(made) - 1) * stats.sem(made))
    ends = mean, mean - half, mean + half
    mean, low, high = map(exp, ends) if log else ends
    return Estimate(mean, len(usable), low, high)


def p_values(heads: Sequence[Mapping[int, float]], *, log: bool) -> dict[tuple[int, int], float]:
    """P-values of paired t-tests over seeds for equality, for each pair of heads.

    ``heads`` are values by seed. With few seeds, the variance of the differences of one pair is
    uncertain, so the variance pooled over all pairs is used unless the pair's own is larger; it has
    (heads - 1) · (seeds - 1) degrees of freedom. For two heads it is the usual paired t-test.
    Pairs with fewer than two common seeds have p = 1.
    """
    gaps = {}
    for i, j in combinations(range(len(heads)), 2):
        shared = sorted(heads[i].keys() & heads[j].keys())
        one, other = (np.array([heads[k][seed] for seed in shared]) for k in (i, j))
        gaps[i, j] = np.log(other / one) if log else other - one
    variances = {pair: float(gap.var(ddof=1)) for pair, gap in gaps.items() if len(gap) > 1}
    pooled = float(np.mean([*variances.values()])) if variances else 0.0
    found = dict.fromkeys(gaps, 1.0)
    for pair, own in variances.items():
        mean, n = float(gaps[pair].mean()), len(gaps[pair])
        error = math.sqrt(max(own, pooled) / n)
        freedom = (len(heads) - 1) * (n - 1)
        if error > 0:
            found[pair] = float(2 * stats.t.sf(abs(mean) / error, freedom))
        elif mean != 0:
            found[pair] = 0.0
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values after Holm's correction, in the same order.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    n, highest = len(p_values), 0.0
    made = [1.0] * n
    for place, i in enumerate(sorted(range(n), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (n - place) * p_values[i]))
        made[i] = round(highest, 12)
    return made


def exp(value: float) -> float:
    """The exponential, or infinity instead of an overflow."""
    return math.exp(value) if value < 709.0 else math.inf
