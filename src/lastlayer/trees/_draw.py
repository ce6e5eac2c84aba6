"""Trees as text and as pictures: the top of the tree, and the size of each part below it."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lastlayer.trees._arrays import as_shares, check_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lastlayer.trees.tree import Tree

_DOT = "●"
# Longer names are truncated.
_LONGEST = 32
_LINE, _INNER, _LEAF, _REST = "#9A9A9A", "#0072B2", "#333333", "#D55E00"
_INCHES_A_ROW = 0.21
# Drawing is recursive, and Python limits the depth of recursion.
_DEEPEST = 200


@dataclass
class _Item:
    """A node; a class, with ``node`` -1; or the children that are not drawn, with ``node`` -2."""

    text: str
    node: int
    share: float
    depth: int = 0
    ends: bool = False
    items: list["_Item"] = field(default_factory=list)
    row: float = 0.0

    def walk(self) -> Iterator["_Item"]:
        yield self
        for item in self.items:
            yield from item.walk()


def text(tree: "Tree", max_nodes: int) -> str:
    """The tree as lines for a terminal."""
    check_count("max_nodes", max_nodes, least=3)
    lines = [_summary(tree)]
    _write(_outline(tree, max_nodes, None), "", "", lines)
    return "\n".join(lines)


def _summary(tree: "Tree") -> str:
    paths = f" with {tree.n_paths:,} leaves" if tree.overlaps else ""
    return (
        f"{_number(tree.n_classes, 'class', 'classes')}{paths}, "
        f"{_number(tree.n_inner, 'inner node', 'inner nodes')}, up to {tree.max_arity:,} children, "
        f"up to {tree.max_depth:,} deep"
    )


def _number(n: int, one: str, many: str) -> str:
    return f"{n:,} {one if n == 1 else many}"


def _write(item: _Item, first: str, later: str, lines: list[str]) -> None:
    lines.append(first + item.text)
    for place, below in enumerate(item.items):
        last = place == len(item.items) - 1
        _write(below, later + ("└─ " if last else "├─ "), later + ("   " if last else "│  "), lines)


def _outline(tree: "Tree", max_nodes: int, counts: Any) -> _Item:
    """The nodes to draw: level by level up to ``max_nodes``; only the first of many children."""
    shares = as_shares(counts, tree.n_classes) / np.diff(tree.class_start)
    if not tree.n_inner:
        return _Item(_name(tree.labels, 0, "0"), -1, 1.0, ends=True)
    mass, leaves = (tree.sums_below(each) for each in (shares, np.ones(tree.n_classes)))
    kind = "leaves" if tree.overlaps else "classes"
    all_fit = tree.n_inner + tree.n_paths <= max_nodes
    wide = max_nodes if all_fit else max(4, max_nodes // 3)
    root = _Item(_name(tree.node_labels, 0, _DOT), 0, 1.0)
    waiting, drawn = deque([root]), 1
    while waiting:
        item = waiting.popleft()
        first, end = (int(tree.child_start[item.node + i]) for i in (0, 1))
        some = min(end - first, wide)
        full = drawn + some > max_nodes or item.depth >= _DEEPEST
        if full and item is not root:
            n = int(leaves[item.node])
            item.text, item.ends = f"{item.text} … {n:,} {kind}", True
            continue
        shown = first + (some if some == end - first else some - 1)
        for below in tree.child[first:shown].tolist():
            if below < 0:
                name = _name(tree.labels, ~below, str(~below))
                item.items.append(_Item(name, -1, float(shares[~below]), ends=True))
            else:
                name = _name(tree.node_labels, below, _DOT)
                item.items.append(_Item(name, below, float(mass[below])))
                waiting.append(item.items[-1])
        if shown < end:
            rest = tree.child[shown:end]
            n = int(leaves[rest[rest >= 0]].sum()) + int((rest < 0).sum())
            share = float(mass[rest[rest >= 0]].sum() + shares[~rest[rest < 0]].sum())
            more = f"… {end - shown:,} more"
            if n > end - shown:
                more += f" with {n:,} {kind}"
            item.items.append(_Item(more, -2, share, ends=True))
        for below_item in item.items:
            below_item.depth = item.depth + 1
        drawn += len(item.items)
    return root


def _name(labels: tuple[str, ...] | None, place: int, default: str) -> str:
    name = (labels[place] if labels is not None else "") or default
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def plot(tree: "Tree", ax: "Axes | None", max_nodes: int, counts: Any) -> "Axes":
    """Draws nodes as bars with their children to the right."""
    check_count("max_nodes", max_nodes, least=3)
    root = _outline(tree, max_nodes, counts)
    items = [*root.walk()]
    rows = _place(root, 0)
    ax = _axes(rows) if ax is None else ax
    from matplotlib.collections import LineCollection

    pairs = [(item, below) for item in items for below in item.items]
    lines = [
        [(item.depth, item.row), (item.depth, below.row), (below.depth, below.row)]
        for item, below in pairs
    ]
    widths = [1.0 if counts is None else 0.5 + 7.0 * below.share for _, below in pairs]
    ax.add_collection(LineCollection(lines, linewidths=widths, colors=_LINE, joinstyle="round"))
    for item in items:
        _mark(ax, item)
    deepest = max(item.depth for item in items)
    ax.set_xlim(-0.3 * max(1, deepest), 1.45 * max(1, deepest))
    ax.set_ylim(rows - 0.4, -0.6)
    ax.set_axis_off()
    ax.set_title(_summary(tree), fontsize=9, loc="left")
    return ax


def _place(item: _Item, rows: int) -> int:
    """Set the row of each item, from the top; an inner node is centred on its children."""
    if not item.items:
        item.row = rows
        return rows + 1
    for below in item.items:
        rows = _place(below, rows)
    item.row = (item.items[0].row + item.items[-1].row) / 2
    return rows


def _mark(ax: "Axes", item: _Item) -> None:
    rest = item.ends and item.node != -1
    if item.items:
        ax.plot(item.depth, item.row, "o", color=_INNER, ms=4, zorder=3)
    elif rest:
        ax.plot(item.depth, item.row, ">", color=_REST, ms=5, zorder=3)
    if item.text == _DOT:
        return
    name = item.text.removeprefix(f"{_DOT} … ") if rest else item.text
    # Names of inner nodes are drawn on the line that leads to them, where there is space.
    ax.annotate(
        name, (item.depth, item.row), (6, 0) if item.ends else (-5, 0), textcoords="offset points",
        ha="left" if item.ends else "right", va="center", fontsize=8 if item.ends else 7,
        color=_REST if rest else _LEAF if item.ends else _INNER,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8},
    )  # fmt: skip


def _axes(rows: int) -> "Axes":
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            'a plot needs matplotlib, which is not installed: pip install "lastlayer[lab]"'
        ) from error
    _, ax = plt.subplots(figsize=(7.5, 0.6 + _INCHES_A_ROW * max(rows, 6)), layout="constrained")
    return ax
