"""A tree from the codes of its classes."""

from array import array
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from lastlayer._checks import as_array
from lastlayer.trees._arrays import MOST_IDS, Integers, Offsets, offsets
from lastlayer.trees.tree import Tree

# uint8 if all positions are below 256.
Positions: TypeAlias = NDArray[np.uint8] | Integers

_EXPECTED = "for each class a list of positions, a str of digits, or a list of such codes"

# Types with a length that can be iterated over, but that are not codes.
_UNORDERED = (bytes, Mapping, AbstractSet)


def from_codes(codes: Any, *, labels: Sequence[str] | None = None) -> Tree:
    """A tree from the code of each class: the child taken at each node on the path to it.

    Args:
        codes: for each class a list of child positions, root first, or a str of digits. A class
            with several paths has a list of such codes. Or an integer array
            ``(n_classes, longest)`` whose rows are padded with -1.
        labels: one name per class.

    Example:
        >>> tree = from_codes(["0", "10", "11"])
        >>> tree == from_codes([[0], [1, 0], [1, 1]])
        True
        >>> from_codes([["00", "10"], "01", "11"]).codes(0)  # an overlapping tree
        [[0, 0], [1, 0]]
    """
    if isinstance(codes, (np.ndarray, torch.Tensor)):
        start, flat, path_class = _from_rows(as_array("codes", codes, "integers"))
    else:
        start, flat, path_class = _from_lists(codes)
    if not len(path_class):
        raise ValueError("codes: expected at least one class, got none")
    if len(flat) and int(flat.min()) < 0:
        place = int((flat < 0).argmax())
        path = int(np.searchsorted(start, place, side="right")) - 1
        raise ValueError(
            f"codes: expected positions of at least 0, got {flat[place]} for class "
            f"{path_class[path]} at position {place - start[path]}"
        )
    several = len(path_class) > path_class[-1] + 1
    return Tree(*_grown(start, flat, path_class), labels, overlap=bool(several))


def _from_rows(rows: Any) -> tuple[Offsets, Positions, Integers]:
    """The start of each path, the positions of all paths concatenated, the class of each path."""
    if rows.ndim != 2 or rows.dtype.kind not in "iu":
        raise ValueError(
            f"codes: expected an integer array (n_classes, longest), padded with -1, got "
            f"{rows.dtype} of shape {rows.shape}"
        )
    used = rows != -1
    sizes = used.sum(1)
    wrong = (used != (np.arange(rows.shape[1]) < sizes[:, None])).any(1)
    if wrong.any():
        raise ValueError(
            f"codes: expected -1 only after the end of a code, got -1 before it for class "
            f"{int(wrong.argmax())}"
        )
    return offsets(sizes), rows[used].astype(np.int64), np.arange(len(rows))


def _from_lists(codes: Any) -> tuple[Offsets, Positions, Integers]:
    if isinstance(codes, (str, bytes)) or not isinstance(codes, Sequence):
        raise TypeError(f"codes: expected {_EXPECTED}, got {type(codes).__name__}")
    classes = np.arange(len(codes))
    if any(map(_is_several, codes)):
        lists = [each if _is_several(each) else [each] for each in codes]
        classes = np.repeat(classes, [len(each) for each in lists])
        codes = list(chain.from_iterable(lists))
    try:
        if any(issubclass(kind, _UNORDERED) for kind in {*map(type, codes)}):
            raise TypeError("codes: expected lists")
        sizes = np.fromiter(map(len, codes), np.int64, len(codes))
        return offsets(sizes), _positions(codes), classes
    except (TypeError, ValueError, OverflowError):
        for c, code in zip(classes, codes, strict=True):
            _check_code(code, int(c))
        raise


def _is_several(code: Any) -> bool:
    if not isinstance(code, (list, tuple)) or not code:
        return False
    return isinstance(code[0], (str, list, tuple))


def _positions(codes: Sequence[Any]) -> Positions:
    texts = [isinstance(code, str) for code in codes]
    if texts and all(texts):
        digits = np.frombuffer("".join(codes).encode("ascii"), np.uint8) - np.uint8(ord("0"))
        if (digits > 9).any():
            raise ValueError("codes: expected digits")
        return digits
    if any(texts):
        codes = [[*map(int, code)] if isinstance(code, str) else code for code in codes]
    # Both are faster than NumPy, and reject 0.5 where NumPy would truncate it to 0.
    try:
        return np.frombuffer(bytes(chain.from_iterable(codes)), np.uint8)
    except ValueError:
        return np.frombuffer(array("q", chain.from_iterable(codes)), np.int64)


def _check_code(code: Any, c: int) -> None:
    if isinstance(code, _UNORDERED) or not hasattr(code, "__len__"):
        raise TypeError(f"codes: expected {_EXPECTED}, got {type(code).__name__} for class {c}")
    for place, position in enumerate(code):
        if isinstance(code, str):
            right = position in "0123456789"
        else:
            right = hasattr(position, "__index__") and position < 2**31
        if not right:
            raise ValueError(
                f"codes: expected {_EXPECTED}, got {position!r} for class {c} at position {place}"
            )


def _grown(start: Offsets, flat: Positions, path_class: Integers) -> tuple[Offsets, Integers]:
    """The children of all nodes, level by level.

    On each level a path is at one node and takes one of its slots. A slot where a path ends is a
    leaf; any other slot is an inner node of the next level.
    """
    sizes = np.diff(start)
    wide, children = [sizes[:0]], [sizes[:0]]
    path, node = np.flatnonzero(sizes), np.zeros(np.count_nonzero(sizes), np.int64)
    if len(path) < len(sizes) and len(sizes) > 1:
        c = path_class[sizes.argmin()]
        raise ValueError(f"codes: expected at least one position per class, got none for class {c}")
    n_nodes, level = 1, 0
    while len(path):
        position = np.minimum(flat[start[path] + level], MOST_IDS, dtype=np.int64)
        slots = np.zeros(int(node.max()) + 1, np.int64)
        np.maximum.at(slots, node, position + 1)
        # With more slots than paths some are empty: checked first, so that an absurd position does
        # not allocate memory.
        full = int(slots.sum()) <= len(path)
        slot = offsets(slots)[node] + position
        used = np.bincount(slot, minlength=int(slots.sum())) if full else slot[:0]
        ends = sizes[path] == level + 1
        if not full or not used.all() or (slots == 1).any() or (used[slot[ends]] > 1).any():
            raise ValueError(_trouble(start, flat, path_class, path[np.argsort(node)], level))
        inner = np.ones(len(used), bool)
        inner[slot[ends]] = False
        below = np.cumsum(inner) - 1
        children.append(np.where(inner, n_nodes + below, 0))
        children[-1][slot[ends]] = ~path_class[path[ends]]
        wide.append(slots)
        n_nodes += int(inner.sum())
        path, node, level = path[~ends], below[slot[~ends]], level + 1
    return offsets(np.concatenate(wide)), np.concatenate(children)


def _trouble(
    start: Offsets, flat: Positions, path_class: Integers, paths: Integers, level: int
) -> str:
    """The error message for a node of this level that is wrong; all levels above are correct."""
    nodes: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for path in paths.tolist():
        code = flat[start[path] : start[path + 1]].tolist()
        nodes.setdefault(tuple(code[:level]), {}).setdefault(code[level], []).append(path)
    found = (_trouble_at(each, nodes[each], start, path_class) for each in nodes)
    return "codes: expected " + next(filter(None, found), "the codes of a tree")


def _trouble_at(
    prefix: tuple[int, ...], taken: dict[int, list[int]], start: Offsets, path_class: Integers
) -> str:
    """What is wrong with the children of a node, "" if nothing; ``taken`` has the paths of each."""
    for position, paths in taken.items():
        code = [*prefix, position]
        ended = [path for path in paths if start[path + 1] - start[path] == len(code)]
        if ended and len(paths) > 1:
            other = next(path for path in paths if path != ended[0])
            one, two = path_class[ended[0]], path_class[other]
            if other in ended:
                return f"unique codes, got {code} for classes {one} and {two}"
            return (
                f"no code that is a prefix of another, got {code} of class {one}, a prefix of the "
                f"code of class {two}"
            )
    where = f"{[*prefix]}" if prefix else "the root"
    c = path_class[min(min(paths) for paths in taken.values())]
    if len(taken) == 1:
        return (
            f"at least two children per node, got only position {next(iter(taken))} below {where}, "
            f"on the path to class {c}"
        )
    gap = next((place for place in range(len(taken)) if place not in taken), None)
    if gap is None:
        return ""
    return (
        f"positions without a gap, got no {gap} but {max(taken)} below {where}, on the path to "
        f"class {path_class[min(taken[max(taken)])]}"
    )
