"""Bands of classes under a budget of parameters."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lastlayer._checks import as_counts
from lastlayer.heads._checks import check_count

VARIANTS = ("slices", "projections")
_MOST_BANDS = 4
# Widths are multiples of one part of so many; bands end at so many places.
_PARTS, _PLACES = 16, 40

Integers = NDArray[np.int64]


def bands_from_counts(
    counts: Any, in_features: int, n_parameters: int, *, variant: str = "slices"
) -> list[tuple[int, int]]:
    r"""Bands whose vectors have at most so many parameters, for classes by falling frequency.

    The rule: of all layouts that fit, the one in which the mean log of the width, over
    occurrences, is largest: :math:`\sum_b p_b \log d_b`. Twice the width is then worth the same to
    a class of any width, so that a number goes where it is the larger part. Looked at are one to
    four bands, each narrower than the one before or as wide, that end at about 40 places on a
    geometric scale. In "slices" widths are multiples of a sixteenth of in_features and add up to
    it; in "projections" they are in_features, half of it, a quarter, and so on down to 8.

    Args:
        counts: how often each class occurs, in any order.
        in_features: how many numbers a hidden state has.
        n_parameters: the most numbers that the class vectors may have, with the projections and
            without biases.
        variant: of :class:`DifferentiatedSoftmax`.

    Returns:
        ``[(classes, width), …]``. They belong to the classes in the order of falling counts: give
        ``order=counts.argsort(descending=True)`` to the head unless they are sorted already.

    Example:
        >>> zipf = [1 / rank for rank in range(1, 10_001)]
        >>> bands = bands_from_counts(zipf, 128, 10_000 * 32)
        >>> sum(width for _, width in bands), sum(classes for classes, _ in bands)
        (128, 10000)
        >>> sum(classes * width for classes, width in bands) <= 10_000 * 32
        True
    """
    weights = as_counts(counts)
    check_count("in_features", in_features)
    check_count("n_parameters", n_parameters)
    if variant not in VARIANTS:
        raise ValueError(f"variant: expected one of {VARIANTS}, got {variant!r}")
    n = len(weights)
    share = np.concatenate([[0.0], np.cumsum(np.sort(weights)[::-1])]) / weights.sum()
    best: tuple[float, int, list[tuple[int, int]]] | None = None
    fewest = math.inf
    for bands in range(1, min(_MOST_BANDS, n) + 1):
        ends = _ends(n, bands)
        sizes, shares = np.diff(ends, axis=1), np.diff(share[ends], axis=1)
        for widths in _widths(in_features, bands, variant):
            projections = in_features * sum(widths) if variant == "projections" else 0
            parameters = sizes @ np.array(widths) + projections
            fewest = min(fewest, int(parameters.min()))
            worth = np.where(parameters <= n_parameters, shares @ np.log(widths), -np.inf)
            i = int(worth.argmax())
            if worth[i] > -np.inf and (best is None or worth[i] > best[0]):
                layout = list(zip(sizes[i].tolist(), widths, strict=True))
                best = float(worth[i]), int(parameters[i]), layout
    if best is None:
        raise ValueError(
            f"n_parameters: expected at least {fewest} for {n} classes and "
            f"in_features={in_features}, got {n_parameters}"
        )
    return best[2]


def _ends(n: int, bands: int) -> Integers:
    """All layouts ``(layouts, bands + 1)``: where bands end, from 0 to n."""
    inner = np.unique(np.geomspace(1, n, _PLACES).astype(np.int64))
    inner = inner[inner < n]
    choices = list(combinations(inner.tolist(), bands - 1))
    cuts = np.array(choices, dtype=np.int64).reshape(len(choices), bands - 1)
    return np.concatenate(
        [np.zeros((len(cuts), 1), np.int64), cuts, np.full((len(cuts), 1), n)], axis=1
    )


def _widths(in_features: int, bands: int, variant: str) -> Iterator[Sequence[int]]:
    """Falling widths of so many bands."""
    if variant == "projections":
        halves = [in_features]
        while halves[-1] // 2 >= 8:
            halves.append(halves[-1] // 2)
        yield from combinations(halves, bands)
        return
    unit = max(1, in_features // _PARTS)
    for parts in _partitions(in_features // unit, bands, in_features // unit):
        # What does not divide goes to the most frequent.
        yield [parts[0] * unit + in_features % unit, *(part * unit for part in parts[1:])]


def _partitions(total: int, parts: int, most: int) -> Iterator[list[int]]:
    """Falling numbers of at least 1, at most ``most``, that add up."""
    if parts == 1:
        if 1 <= total <= most:
            yield [total]
        return
    for first in range(min(most, total - parts + 1), 0, -1):
        for rest in _partitions(total - first, parts - 1, first):
            yield [first, *rest]
