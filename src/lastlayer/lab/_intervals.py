"""Means over seeds, and how far they can be trusted.

A mean over n seeds comes with its 95% t-interval, mean ± t · s/√n, where t is the 97.5% quantile of
Student's distribution with n − 1 degrees of freedom. One seed gives no interval. What is positive
and multiplies, such as a perplexity, is averaged as its logarithm: the mean is geometric, and the
interval is not symmetric about it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NORMAL_QUANTILE = 1.959963984540054
# 97.5% quantiles for 1 to 10 degrees of freedom; beyond, the expansion below has five digits.
_T_QUANTILES = (
    12.70620474,
    4.30265273,
    3.18244631,
    2.77644511,
    2.57058184,
    2.44691185,
    2.36462425,
    2.30600414,
    2.26215716,
    2.22813885,
)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its 95% interval."""

    mean: float
    n: int
    """Seeds that it was made from."""
    low: float | None = None
    """None with one seed, which says nothing of how seeds differ."""
    high: float | None = None

    @property
    def has_interval(self) -> bool:
        """Whether there were seeds enough for an interval."""
        return self.low is not None and self.high is not None


def t_quantile(degrees: int) -> float:
    """The 97.5% quantile of Student's t.

    Example:
        >>> round(t_quantile(2), 3), round(t_quantile(1000), 3)
        (4.303, 1.962)
    """
    if degrees < 1:
        raise ValueError(f"degrees: expected at least 1, got {degrees}")
    if degrees <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees - 1]
    z = _NORMAL_QUANTILE
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))


def estimate(values: Sequence[float], *, log: bool = False) -> Estimate | None:
    """Mean and interval of what is finite; None where nothing is.

    Args:
        values: one per seed.
        log: average the logarithms; values must be positive.

    Example:
        >>> round(estimate([4.0, 9.0], log=True).mean, 9)
        6.0
        >>> estimate([4.0]).has_interval
        False
    """
    usable = [v for v in values if math.isfinite(v) and (v > 0.0 or not log)]
    if not usable:
        return None
    n = len(usable)
    if n == 1:
        return Estimate(usable[0], 1)
    mean, half = _mean_and_half([math.log(v) for v in usable] if log else usable)
    if log:
        return Estimate(_exp(mean), n, _exp(mean - half), _exp(mean + half))
    return Estimate(mean, n, mean - half, mean + half)


def difference(
    ours: Mapping[int, float], theirs: Mapping[int, float], *, log: bool
) -> Estimate | None:
    """Theirs less ours, seed by seed, or the logarithm of theirs over ours.

    Runs of one seed see the same data in the same order, so that their difference varies less than
    either. Only seeds that both have are used.
    """
    shared = sorted(ours.keys() & theirs.keys())
    if log:
        return estimate([math.log(theirs[s] / ours[s]) for s in shared])
    return estimate([theirs[s] - ours[s] for s in shared])


def _mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    n = len(values)
    mean = math.fsum(values) / n
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, t_quantile(n - 1) * spread / math.sqrt(n)


def _exp(value: float) -> float:
    """Two seeds that differ much have an interval beyond what a float holds."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
