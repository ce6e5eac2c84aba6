"""The arrays that a tree is made of: their types, small operations on them, and their checks."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lastlayer._checks import as_counts, check_int

# Nodes, classes and positions: half the memory of int64, and there are never 2³¹ of them.
Ids: TypeAlias = NDArray[np.int32]
# Places in other arrays, of which a deep tree may have more.
Offsets: TypeAlias = NDArray[np.int64]
Integers: TypeAlias = NDArray[np.int64]
Reals: TypeAlias = NDArray[np.float64]

MOST_IDS = int(np.iinfo(np.int32).max)


def offsets(sizes: NDArray[Any]) -> Offsets:
    """Where each of consecutive parts starts, and where the last one ends."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def ranges(starts: NDArray[Any], sizes: NDArray[Any]) -> Integers:
    """``starts[i], starts[i] + 1, …``, ``sizes[i]`` of them, for each i in turn."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    shift: Integers = np.repeat(np.asarray(starts, np.int64) - (ends - sizes), sizes)
    return shift + np.arange(total)


def frozen(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """A contiguous copy that cannot be written to."""
    copy = np.array(array, dtype=dtype, order="C")
    copy.flags.writeable = False
    return copy


def check_count(name: str, value: Any, *, least: int) -> int:
    """An int of at least ``least`` that an id can be."""
    return check_int(name, value, least=least, most=MOST_IDS)


def as_shares(counts: Any, n_classes: int) -> Reals:
    """Counts divided by their sum; all classes alike where there are none."""
    if counts is None:
        return np.full(n_classes, 1.0 / n_classes)
    shares = as_counts(counts, n_classes)
    shares /= shares.sum()
    return shares


def as_labels(labels: Any, n: int, *, name: str = "labels") -> tuple[str, ...] | None:
    """One unique name per class, or None."""
    if labels is None:
        return None
    result = as_strings(labels, n, name, "class")
    if "" in result:
        c = result.index("")
        raise ValueError(f"{name}: expected a name for each class, got '' for class {c}")
    check_unique(result, name)
    return result


def check_unique(labels: Sequence[str], name: str) -> None:
    """No two classes have the same name."""
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
    """``n`` strings, one for each ``of``."""
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


def check_children(start: Integers, child: Integers) -> None:
    """Offsets fit, every node has two children or more, and nodes are numbered level by level."""
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
            f"child_start: expected two children or more for each inner node, got "
            f"{start[v + 1] - start[v]} for node {v}; trees.from_parents contracts such nodes"
        )
    inner = np.flatnonzero(child >= 0)
    nodes = child[inner]
    expected = np.arange(1, len(start) - 1)
    remedy = "trees.from_parents takes nodes in any order"
    if len(nodes) != len(expected):
        raise ValueError(
            f"child: expected the {len(expected)} inner nodes below the root, each once, got "
            f"{len(nodes)}; {remedy}"
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
    """Every class has a leaf, and only one unless the tree may overlap; the number of classes."""
    n_classes = max(1, -int(child.min(initial=-1)))
    if not len(child):
        return n_classes
    classes = ~child[child < 0]
    if n_classes > len(classes):
        # Before `bincount`, so that a wild class id does not ask for as much memory.
        present = np.unique(classes)
        missing = int((np.append(present, -1) != np.arange(len(present) + 1)).argmax())
    else:
        leaves = np.bincount(classes, minlength=n_classes)
        missing = -1 if leaves.all() else int(leaves.argmin())
    if missing >= 0:
        raise ValueError(
            f"child: expected a leaf for each class from 0 to {n_classes - 1}, class {missing} is "
            "missing"
        )
    if not overlap and (leaves > 1).any():
        c = int(leaves.argmax())
        first, second = np.flatnonzero(child == ~c)[:2]
        raise ValueError(
            f"child: expected one leaf per class, got class {c} at positions {first} and {second}; "
            "give overlap=True where classes may have several"
        )
    return n_classes
