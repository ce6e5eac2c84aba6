"""Numbers that describe how often classes occur."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
# Counts below this are too coarse for a slope: many ranks share one.
_FEWEST = 5
# Places of a fit, evenly spaced in the logarithm of the rank.
_PLACES = 200


@dataclass(frozen=True)
class ZipfFit:
    """count(rank) ≈ scale · rank^−slope."""

    slope: float
    r_squared: float
    """1 where the law holds exactly."""
    ranks: int
    """How many ranks it was fitted over."""


def zipf_fit(counts: Counts) -> ZipfFit | None:
    """The line through log count against log rank, by least squares.

    At places that are evenly spaced in the logarithm of the rank, so that the many rare classes
    weigh no more than the few frequent ones; over ranks whose count is at least 5. None where
    fewer than 10 have so many.

    Example:
        >>> fit = zipf_fit((1e7 / np.arange(1, 2001) ** 1.2).astype(np.int64))
        >>> round(fit.slope, 2), fit.ranks
        (1.2, 2000)
    """
    falling = np.sort(counts)[::-1]
    n = int(np.count_nonzero(falling >= _FEWEST))
    if n < 10:
        return None
    places = np.unique(np.geomspace(1, n, _PLACES).round().astype(np.int64))
    x, y = np.log(places), np.log(falling[places - 1])
    dx, dy = x - x.mean(), y - y.mean()
    slope = float(dx @ dy / (dx @ dx))
    spread = float(dy @ dy)
    residual = float(((dy - slope * dx) ** 2).sum())
    # All alike: the line is level and exact.
    return ZipfFit(-slope, 1.0 - residual / spread if spread > 0 else 1.0, n)


def entropy_bits(counts: Counts) -> float:
    """Of the class of a target that is drawn by the counts: no code is shorter on average."""
    share = counts[counts > 0] / counts.sum()
    return max(0.0, float(-(share * np.log2(share)).sum()))


def tail_mass(counts: Counts, top: int) -> float:
    """The share of targets outside the ``top`` most frequent classes."""
    falling = np.sort(counts)[::-1]
    return float(falling[top:].sum() / falling.sum())


def classes_for(counts: Counts, share: float) -> int:
    """How many of the most frequent classes have this share of all targets."""
    reached = np.cumsum(np.sort(counts)[::-1]) >= share * counts.sum()
    return int(reached.argmax()) + 1


def unigram_nll(counts: Counts, ids: NDArray[Any]) -> float:
    """What a model that knows nothing but the counts, each one higher, loses on other targets."""
    log_prob = np.log(counts + 1.0) - np.log(counts.sum() + len(counts))
    seen = np.bincount(ids, minlength=len(counts))
    return float(-(seen @ log_prob) / len(ids))
