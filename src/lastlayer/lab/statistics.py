"""Means over seeds, how far they can be trusted, and which heads they tell apart.

A mean over n seeds comes with its 95% t-interval; one seed gives no interval. What is positive and
multiplies, such as a perplexity, is averaged as its logarithm: the mean is geometric, and the
interval is not symmetric about it. Heads are compared seed by seed, since runs of one seed see the
same batches in the same order: a paired t-test, whose p-values Holm's method corrects for how many
pairs of heads there are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.05


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its 95% interval."""

    mean: float
    n: int  # seeds that it was made from
    low: float | None = None  # none with one seed, which says nothing of how seeds differ
    high: float | None = None


def estimate(values: Sequence[float], *, log: bool = False) -> Estimate | None:
    """Mean and interval of what is finite; None where nothing is.

    Args:
        values: one per seed.
        log: average the logarithms; values must be positive.

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
    mean, low, high = map(_exp, ends) if log else ends
    return Estimate(mean, len(usable), low, high)


def p_value(ours: Mapping[int, float], theirs: Mapping[int, float], *, log: bool) -> float:
    """Of the paired t-test that both are the same, by seed; 1 where fewer than two have both."""
    shared = sorted(ours.keys() & theirs.keys())
    one, other = (np.array([side[seed] for seed in shared]) for side in (ours, theirs))
    gaps = np.log(other / one) if log else other - one
    if len(gaps) < 2:
        return 1.0
    if np.ptp(gaps) == 0:
        return 1.0 if gaps[0] == 0 else 0.0
    return float(stats.ttest_1samp(gaps, 0.0).pvalue)


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


def _exp(value: float) -> float:
    """Two seeds that differ much have an interval beyond what a float holds."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
