"""Checks of what trees are built from. Errors name the argument, and the class or position."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from lastlayer._checks import as_array
from lastlayer._checks import as_counts as counts_of_classes
from lastlayer.trees._arrays import MOST_IDS, Integers, Reals


def check_number(name: str, value: Any, *, least: int) -> int:
    """A whole number of at least ``least``."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected an int, got bool")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    if number >= MOST_IDS:
        raise ValueError(f"{name}: expected less than {MOST_IDS}, got {number}")
    return number


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """One of a few words."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {tuple(choices)}, got {value!r}")


def as_counts(counts: Any, n_classes: int | None = None, *, name: str = "counts") -> Reals:
    """One count a class: not negative, not all zero, and with a sum that is a number."""
    result = counts_of_classes(counts, n_classes, name=name)
    with np.errstate(over="ignore"):
        total = float(result.sum())
    if not np.isfinite(total):
        raise ValueError(f"{name}: expected a finite sum, got {total}; divide by the largest")
    return result


def as_shares(counts: Any, n_classes: int) -> Reals:
    """Counts divided by their sum; without counts all are alike."""
    if counts is None:
        return np.full(n_classes, 1.0 / n_classes)
    shares = as_counts(counts, n_classes)
    shares /= shares.sum()
    return shares


def as_integers(name: str, values: Any, expected: str) -> Integers:
    """A list of whole numbers."""
    array = as_array(name, values, expected)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected {expected}, one dimension, got shape {array.shape}")
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name}: expected {expected}, got an array of {array.dtype}")
    return array.astype(np.int64)


def as_permutation(name: str, values: Any, n: int) -> Integers:
    """Every class once, in an order of the caller's."""
    array = as_integers(name, values, f"all class ids from 0 to {n - 1}")
    if len(array) != n:
        raise ValueError(f"{name}: expected all {n} classes, got {len(array)}")
    check_each_class_once(name, array, n)
    return array


def check_each_class_once(name: str, classes: Integers, n: int) -> None:
    """Ids from 0 to n - 1 without one missing or doubled."""
    wrong = (classes < 0) | (classes >= n)
    if wrong.any():
        place = int(wrong.argmax())
        raise ValueError(
            f"{name}: expected class ids from 0 to {n - 1}, got {classes[place]} at position "
            f"{place}"
        )
    times = np.bincount(classes, minlength=n)
    if (times == 1).all():
        return
    twice = times > 1
    if twice.any():
        c = int(twice.argmax())
        first, second = np.flatnonzero(classes == c)[:2]
        raise ValueError(
            f"{name}: expected each class once, got class {c} at positions {first} and {second}"
        )
    raise ValueError(f"{name}: expected each class once, class {int(times.argmin())} is missing")


def as_labels(labels: Any, n: int, *, name: str = "labels") -> tuple[str, ...] | None:
    """One name a class, no two the same."""
    if labels is None:
        return None
    result = _strings(labels, n, name, "class")
    if "" in result:
        c = result.index("")
        raise ValueError(f"{name}: expected a name for each class, got '' for class {c}")
    check_no_label_twice(result, name)
    return result


def check_no_label_twice(labels: Sequence[str], name: str) -> None:
    """Labels tell classes apart."""
    if len({*labels}) == len(labels):
        return
    first: dict[str, int] = {}
    for c, label in enumerate(labels):
        if first.setdefault(label, c) != c:
            raise ValueError(
                f"{name}: expected another name for each class, got {label!r} for classes "
                f"{first[label]} and {c}"
            )


def as_node_labels(labels: Any, n: int) -> tuple[str, ...] | None:
    """One name an inner node, which may be empty."""
    return None if labels is None else _strings(labels, n, "node_labels", "inner node")


def _strings(labels: Any, n: int, name: str, of: str) -> tuple[str, ...]:
    if isinstance(labels, (str, bytes)) or not hasattr(labels, "__len__"):
        raise TypeError(f"{name}: expected a list of str, got {type(labels).__name__}")
    if len(labels) != n:
        raise ValueError(f"{name}: expected {n}, one for each {of}, got {len(labels)}")
    kinds = {*map(type, labels)}
    if not all(issubclass(kind, str) for kind in kinds):
        place = next(i for i, label in enumerate(labels) if not isinstance(label, str))
        raise TypeError(
            f"{name}: expected a list of str, got {type(labels[place]).__name__} for {of} {place}"
        )
    return tuple(labels) if kinds <= {str} else tuple(map(str, labels))
