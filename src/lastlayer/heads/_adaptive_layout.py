"""The layout of an adaptive softmax: its classes, their order, and where clusters begin."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from lastlayer._checks import as_counts
from lastlayer.heads._checks import check_count
from lastlayer.heads._cutoffs import cutoffs_from_counts


def adaptive_layout(
    in_features: int,
    counts: Any,
    cutoffs: Sequence[int] | None,
    n_classes: int | None,
    order: Any,
    div_value: float,
    min_width: int,
    cost: str,
) -> tuple[int, list[int], Any]:
    """The number of classes, the cutoffs and the order, from what of it was given.

    ``cost`` is by which :func:`cutoffs_from_counts` chooses: "cpu" or "cuda".
    """
    if counts is None:
        if n_classes is None:
            raise ValueError(
                "n_classes: expected how many classes there are, got None; give n_classes with "
                "cutoffs, or counts, one number a class"
            )
        if cutoffs is None:
            raise ValueError(
                "cutoffs: expected where each cluster begins, got None; give cutoffs such as "
                "[2000, 10000], or counts to choose them from"
            )
        check_count("n_classes", n_classes)
        return n_classes, check_cutoffs(cutoffs, n_classes), order
    weights = as_counts(counts, n_classes)
    if order is None:
        order = np.argsort(-weights, kind="stable")
    if cutoffs is None:
        cutoffs = cutoffs_from_counts(
            weights, in_features, div_value=div_value, min_width=min_width, cost=cost
        )
    return len(weights), check_cutoffs(cutoffs, len(weights)), order


def check_cutoffs(cutoffs: Any, n_classes: int) -> list[int]:
    """Rising places from 1 to n_classes - 1."""
    expected = f"rising places from 1 to {n_classes - 1}, below n_classes"
    if isinstance(cutoffs, (str, bytes)) or not hasattr(cutoffs, "__iter__"):
        raise TypeError(f"cutoffs: expected a list of {expected}, got {type(cutoffs).__name__}")
    before, places = 0, []
    for position, each in enumerate(cutoffs):
        try:
            place = operator.index(each)
            if isinstance(each, bool):
                raise TypeError
        except TypeError:
            raise TypeError(
                f"cutoffs: expected whole numbers, got {type(each).__name__} at position {position}"
            ) from None
        if not 1 <= place < n_classes:
            raise ValueError(f"cutoffs: expected {expected}, got {place} at position {position}")
        if place <= before:
            raise ValueError(
                f"cutoffs: expected {expected}, got {place} at position {position} after {before}"
            )
        places.append(place)
        before = place
    return places
