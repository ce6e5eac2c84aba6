"""Types, small operations and checks for the arrays of a tree."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lastlayer._checks import as_counts, check_int

# Nodes, classes and positions: at most 2³¹ - 1, and int32 takes half the memory of int64.
Ids: TypeAlias = NDArray[np.int32]
# Indices into other arrays, which in a deep tree may have more than 2³¹ entries.
Offsets: TypeAlias = NDArray[np.int64]
Integers: TypeAlias = NDArray[np.int64]
Reals: TypeAlias = NDArray[np.float64]

MOST_IDS = int(np.iinfo(np.int32).max)


def offsets(sizes: NDArray[Any]) -> Offsets:
    """The start of each of consecutive parts, then the end of the last: ``(len(sizes) + 1,)``."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def ranges(starts: NDArray[Any], sizes: NDArray[Any]) -> Integers:
    """The ranges ``starts[i], …, starts[i] + sizes[i] - 1`` for all i, concatenated."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    shift: Integers = np.repeat(np.asarray(starts, np.int64) - (ends - sizes), sizes)
    return shift + np.arange(total)


def frozen(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """A contiguous read-only copy."""
    copy = np.array(array, dtype=dtype, order="C")
    copy.flags.writeable = False
    return copy


def check_count(name: str, value: Any, *, least: int) -> int:
    """Check an int from ``least`` to the largest id."""
    return check_int(name, value, least=least, most=MOST_IDS)


def as_shares(counts: Any, n_classes: int) -> Reals:
    """Counts divided by their sum; equal shares if ``counts`` is None."""
    if counts is None:
        return np.full(n_classes, 1.0 / n_classes)
    shares = as_counts(counts, n_classes)
    shares /= shares.sum()
    return shares


def as_labels(labels: Any, n: int, *, name: str = "labels") -> tuple[str, ...] | None:
    """Check that there is one unique, non-empty name per class; None stays None."""
    if labels is None:
        return None
    result = as_strings(labels, n, name, "class")
    if "" in result:
        c = result.index("")
        raise ValueError(f"{name}: expected a name for each class, got '' for class {c}")
    check_unique(result, name)
    return result


def check_unique(labels: Sequence[str], name: str) -> None:
    """Check that no two classes have the same name."""
    if len({*labels}) == len(labels):
        return
    first: dict[str, int] = {}
    for c, label in enumerate(labels):
        if first.setdefault(label, c) != c:
            raise ValueError(
                f"{name}: expected unique class names, got {label!r} for classes {first[label]} "
                f"and {c}"
            )


def as_strings(labels: Any, n: int, name: str, of: str) -> tuple[str, ...]:
    """Check a sequence of ``n`` strings; ``of`` is what each of them names, for errors."""
    if isinstance(labels, (str, bytes)) or not hasattr(labels, "__len__"):
        raise TypeError(f"{name}: expected a list of str, got {type(labels).__name__}")
    if len(labels) != n:
        raise ValueError(f"{name}: expected one name per {of} ({n}), got {len(labels)}")
    kinds = {*map(type, labels)}
    if not all(issubclass(kind, str) for kind in kinds):
        place = next(i for i, label in enumerate(labels) if not isinstance(label, str))
        raise TypeError(
            f"{name}: expected a list of str, got {type(labels[place]).__name__} for {of} {place}"
        )
    return tuple(labels) if kinds <= {str} else tuple(map(str, labels))


def check_children(start: Integers, child: Integers) -> None:
    """Check offsets, that nodes have at least two children, and are numbered level by level."""
    if not len(start) or start[0] != 0 or start[-1] != len(child):
        raise ValueError(
            f"child_start: expected offsets from 0 to len(child) = {len(child)}, got "
            f"{'none' if not len(start) else f'{start[0]} to {start[-1]}'}"
        )
    if max(len(start), len(child)) > MOST_IDS:
        raise ValueError(f"child: expected at most {MOST_IDS} children, got {len(child)}")
    few = np.diff(start) < 2
    if few.any():
        v = int(few.argmax())
        raise ValueError(
            f"child_start: expected at least two children per inner node, got "
            f"{start[v + 1] - start[v]} for node {v}; trees.from_parents contracts such nodes"
        )
    inner = np.flatnonzero(child >= 0)
    nodes = child[inner]
    expected = np.arange(1, len(start) - 1)
    remedy = "trees.from_parents takes nodes in any order"
    if len(nodes) != len(expected):
        raise ValueError(
            f"child: expected each of the {len(expected)} inner nodes below the root once, got "
            f"{len(nodes)} inner nodes; {remedy}"
        )
    if not np.array_equal(nodes, expected):
        wrong = int((nodes != expected).argmax())
        raise ValueError(
            f"child: expected inner nodes numbered level by level, {expected[wrong]} at position "
            f"{inner[wrong]}, got {nodes[wrong]}; {remedy}"
        )
    owner = np.searchsorted(start, inner, side="right") - 1
    early = owner >= nodes
    if early.any():
        wrong = int(early.argmax())
        raise ValueError(
            f"child: expected parents before their children, got node {nodes[wrong]} below node "
            f"{owner[wrong]}, a cycle; {remedy}"
        )


def check_leaves(child: Integers, overlap: bool) -> int:
    """Check that each class has one leaf, or several if ``overlap``; returns ``n_classes``."""
    n_classes = max(1, -int(child.min(initial=-1)))
    if not len(child):
        return n_classes
    classes = ~child[child < 0]
    if n_classes > len(classes):
        # Checked before `bincount`, so that an absurd class id does not allocate memory.
        present = np.unique(classes)
        missing = int((np.append(present, -1) != np.arange(len(present) + 1)).argmax())
    else:
        leaves = np.bincount(classes, minlength=n_classes)
        missing = -1 if leaves.all() else int(leaves.argmin())
    if missing >= 0:
        raise ValueError(
            f"child: expected a leaf for each class from 0 to {n_classes - 1}, got none for class "
            f"{missing}"
        )
    if not overlap and (leaves > 1).any():
        c = int(leaves.argmax())
        first, second = np.flatnonzero(child == ~c)[:2]
        raise ValueError(
            f"child: expected one leaf per class, got class {c} at positions {first} and {second}; "
            "pass overlap=True if classes may have several leaves"
        )
    return n_classes
