"""A tree from a taxonomy: the parent of each node."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lastlayer._checks import as_integers
from lastlayer.trees._arrays import Integers, Offsets, check_unique, offsets
from lastlayer.trees.tree import Tree

# An error message lists at most this many nodes of a cycle.
_NAMED = 6


def from_parents(
    parents: Mapping[str, str | None] | Any,
    classes: Sequence[str] | Any = None,
    *,
    labels: Sequence[str] | None = None,
) -> Tree:
    """A tree from the parent of each node.

    Nodes without children are the classes. A node with a single child is contracted, since it
    decides nothing. Siblings keep the order in which they are listed.

    Args:
        parents: either names, ``{node: parent}``, where the root has the parent None or is not
            listed itself; or integers, the parents of node 0, 1, …, where the root has -1.
        classes: the nodes of class 0, class 1 and so on, by name or number; all nodes without
            children. By default classes are numbered in the order in which their nodes are listed.
        labels: one name per class, if nodes are integers; names are the labels otherwise.

    Example:
        >>> tree = from_parents(
        ...     {"cat": "mammal", "dog": "mammal", "trout": "animal", "mammal": "animal"}
        ... )
        >>> tree.labels
        ('cat', 'dog', 'trout')
        >>> tree.code("dog")
        [1, 1]
        >>> from_parents([-1, 0, 0, 1, 1]).n_classes
        3
    """
    if isinstance(parents, Mapping):
        return _from_names(parents, classes, labels)
    numbers = as_integers("parents", parents, "the number of each node's parent, -1 for the root")
    if classes is not None:
        classes = as_integers("classes", classes, "the node of each class")
    start, child, _, _ = arranged(numbers, classes, str)
    return Tree(start, child, labels)


def _from_names(
    parents: Mapping[str, str | None], classes: Sequence[str] | None, labels: Sequence[str] | None
) -> Tree:
    if labels is not None:
        raise ValueError(
            "labels: expected None if parents are names, got labels; the names are the labels"
        )
    _check_names(parents)
    names = list(parents)
    number: dict[str | None, int] = {name: v for v, name in enumerate(names)}
    number[None] = -1
    # The root may be listed only as a parent.
    for name in dict.fromkeys(p for p in parents.values() if p not in number):
        number[name] = len(names)
        names.append(str(name))
    numbers = np.full(len(names), -1, np.int64)
    numbers[: len(parents)] = [number[p] for p in parents.values()]
    chosen = None if classes is None else _numbers_of(classes, number)
    start, child, origin, leaves = arranged(numbers, chosen, lambda v: repr(names[v]))
    return Tree(start, child, [names[v] for v in leaves], [names[v] for v in origin])


def _check_names(parents: Mapping[Any, Any]) -> None:
    kinds = {*map(type, parents)}, {*map(type, parents.values())} - {type(None)}
    if all(kind <= {str} for kind in kinds) and "" not in parents and "" not in parents.values():
        return
    for name, parent in parents.items():
        for each in (name, parent):
            pair = f"{{{name!r}: {parent!r}}}"
            if not isinstance(each, str | None) or name is None:
                raise TypeError(
                    "parents: expected names as str, or None for the parent of the root, got "
                    f"{type(each).__name__} in {pair}"
                )
            if each == "":
                raise ValueError(f"parents: expected names, got '' in {pair}")


def _numbers_of(classes: Any, number: Mapping[str | None, int]) -> Integers:
    if isinstance(classes, (str, bytes)) or not hasattr(classes, "__len__"):
        raise TypeError(f"classes: expected a list of names, got {type(classes).__name__}")
    for c, name in enumerate(classes):
        if not isinstance(name, str) or name not in number:
            raise ValueError(f"classes: expected names in parents, got {name!r} for class {c}")
    check_unique(classes, "classes")
    return np.array([number[name] for name in classes], np.int64)


def arranged(
    parents: Integers, classes: Integers | None, called: Callable[[int], str]
) -> tuple[Offsets, Integers, Integers, Integers]:
    """Children as in a Tree, the old number of each inner node, and the node of each class.

    Siblings are in the order of their numbers, and so are the classes if ``classes`` is None.
    ``called`` returns the name of a node for errors.
    """
    from lastlayer.trees import _loops

    n = len(parents)
    if not n:
        raise ValueError("parents: expected at least one node, got none")
    wrong = (parents < -1) | (parents >= n)
    if wrong.any():
        v = int(wrong.argmax())
        raise ValueError(
            f"parents: expected nodes from 0 to {n - 1}, or -1 for the root, got {parents[v]} for "
            f"node {v}"
        )
    roots = np.flatnonzero(parents == -1)
    if len(roots) > 1:
        raise ValueError(
            f"parents: expected one root, got {len(roots)}, including {called(int(roots[0]))} and "
            f"{called(int(roots[1]))}; give them a common parent"
        )
    # Children of the same parent stay in the order of their numbers; roots are first.
    start = offsets(np.bincount(parents + 1, minlength=n + 1)[1:])
    child = np.argsort(parents, kind="stable")[len(roots) :]
    leaf = np.diff(start) == 0
    classes = np.flatnonzero(leaf) if classes is None else classes
    if len(roots):
        _check_classes(classes, leaf, called)
        class_of = np.full(n, -1)
        class_of[classes] = np.arange(len(classes))
        below = np.where(leaf[child], ~class_of[child], child)
        root = int(roots[0])
        start, below, origin, met = _loops.breadth_first(start, below, ~0 if leaf[root] else root)
        if met == n:
            return start, below, origin, classes
    raise ValueError(f"parents: expected a tree, got a cycle: {_cycle(parents, called)}")


def _check_classes(classes: Integers, leaf: Any, called: Callable[[int], str]) -> None:
    n = len(leaf)
    wrong = (classes < 0) | (classes >= n)
    if wrong.any():
        c = int(wrong.argmax())
        raise ValueError(
            f"classes: expected nodes from 0 to {n - 1}, got {classes[c]} for class {c}"
        )
    inner = ~leaf[classes]
    if inner.any():
        c = int(inner.argmax())
        raise ValueError(
            f"classes: expected nodes without children, got node {called(int(classes[c]))} for "
            f"class {c}, which has children; add a leaf for the class below that node"
        )
    times = np.bincount(classes, minlength=n)
    if (times > 1).any():
        first, second = np.flatnonzero(classes == times.argmax())[:2]
        raise ValueError(
            f"classes: expected unique nodes, got node {called(int(times.argmax()))} for classes "
            f"{first} and {second}"
        )
    missing = leaf & (times == 0)
    if missing.any():
        raise ValueError(
            "classes: expected all nodes without children, got none for node "
            f"{called(int(missing.argmax()))}"
        )


def _cycle(parents: Integers, called: Callable[[int], str]) -> str:
    """The names of nodes in a cycle, joined by arrows."""
    # Following parents for long enough ends in a cycle or above the root.
    place = np.arange(len(parents))
    up = np.append(parents, -1)
    for _ in range(len(parents).bit_length()):
        place, up = up[place], up[up]
    node = int(place[place >= 0].min())
    around = [node]
    while int(parents[around[-1]]) != node and len(around) < _NAMED:
        around.append(int(parents[around[-1]]))
    closed = int(parents[around[-1]]) == node
    return " → ".join([*map(called, around), called(node) if closed else "…"])
