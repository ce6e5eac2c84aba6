"""The best leaves of a tree, found without opening all of it; and random ones."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer.heads._node_scores import Nodes, child_log_prob
from lastlayer.heads._sampling import draw_classes

# Nodes that the first sweep follows, unless more are asked for.
_NARROWEST_BEAM = 8
# A row that has more open nodes than this, and than this part of all, is sorted as a whole.
_MOST_OPEN, _MOST_OPEN_PART = 64, 1 / 16
# Numbers held at a time where walks choose a child.
_NUMBERS = 2_000_000

Dense = Callable[[Tensor], tuple[Tensor, Tensor]]


class Found(NamedTuple):
    """The best classes of each row, and what it took."""

    values: Tensor
    classes: Tensor
    # How many nodes were opened for each row, ``(n,)``; all of them in a row that was sorted.
    opened: Tensor


def beam_search(nodes: Nodes, rows: Tensor, k: int, width: int) -> Found:
    """The best k leaves among those below the ``width`` best nodes of each level.

    A leaf that is not found has the value -inf and class -1.
    """
    tables, n = nodes.tables, rows.shape[0]
    values = rows.new_full((n, k), -torch.inf)
    classes = torch.full((n, k), -1, device=rows.device)
    opened = classes.new_zeros(n)
    node = classes.new_zeros(n, 1)
    reached = rows.new_zeros(n, 1)
    live = torch.ones_like(node, dtype=torch.bool)
    for _ in range(len(tables.levels)):
        of_row, at = live.nonzero(as_tuple=True)
        if not len(of_row):
            break
        opened.add_(live.sum(-1))
        asked = node[of_row, at]
        below = child_log_prob(nodes, rows, of_row, asked) + reached[of_row, at].unsqueeze(-1)
        shape = (*node.shape, below.shape[1])
        log_prob = rows.new_full(shape, -torch.inf)
        log_prob[of_row, at] = below
        child = classes.new_full(shape, -1)
        child[of_row, at] = _children(nodes, asked, below.shape[1])
        log_prob, child = log_prob.flatten(1), child.flatten(1)
        leaf = torch.where(child < 0, log_prob, -torch.inf)
        values, kept = torch.cat([values, leaf], -1).topk(k)
        # What is no leaf of the tree has the value -inf, and no class.
        ends = torch.where(leaf > -torch.inf, ~child, -1)
        classes = torch.cat([classes, ends], -1).gather(-1, kept)
        useful = (child >= 0) & (log_prob >= values[:, -1:])
        reached, best = torch.where(useful, log_prob, -torch.inf).topk(min(width, child.shape[1]))
        node, live = child.gather(-1, best), reached > -torch.inf
    order = classes.argsort(-1)
    values, classes = values.gather(-1, order), classes.gather(-1, order)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return Found(values, classes.gather(-1, order), opened)


def exact_search(nodes: Nodes, rows: Tensor, k: int, dense: Dense) -> Found:
    """The best k leaves of each row, the lower class first where two are equal.

    Two sweeps from the root down. The first follows the best few nodes of each level and finds k
    leaves; the worst of them is a bound. The second opens every node that is not below the bound.

    It misses none of the best k: a child is at most as probable as its parent, so every node on
    the way to a leaf is at least as probable as the leaf. The bound is the k-th best of k leaves,
    so at most the k-th best of all; hence a leaf among the best k is not below it, nor is any node
    on its way, and the second sweep opens them all. What it leaves closed holds no leaf that is as
    probable as the bound. Rounding keeps the order: a log-probability of at most 0 is added.

    Rows in which little is ruled out, as where all classes are alike, go to ``dense``.

    Args:
        nodes: the tree's; without overlap.
        rows: ``(n, d)``, float32 or float64.
        k: how many.
        dense: values and classes of the best k by sorting all, for some rows.
    """
    n = rows.shape[0]
    first = beam_search(nodes, rows, k, max(k, _NARROWEST_BEAM))
    bound = _with_room(first.values[:, -1])
    swept = _sweep(nodes, rows, bound)
    values = rows.new_full((n, k), -torch.inf)
    classes = torch.full((n, k), -1, device=rows.device)
    order, rank = _sorted_by_row(swept, n)
    kept, rank = order[rank < k], rank[rank < k]
    at = swept.of_row[kept], rank
    values[at], classes[at] = swept.log_prob[kept], swept.leaf[kept]
    opened = first.opened + swept.opened
    rest = (swept.given_up | (classes[:, -1] < 0)).nonzero().squeeze(-1)
    if len(rest):
        values[rest], classes[rest] = dense(rest)
        opened[rest] = nodes.tables.n_inner
    return Found(values, classes, opened)


class _Leaves:
    """Leaves that the second sweep has reached, of all rows in one list."""

    def __init__(self, rows: Tensor) -> None:
        ids = torch.empty(0, dtype=torch.int64, device=rows.device)
        self.of_row, self.leaf, self.log_prob = ids, ids, rows.new_empty(0)
        self.opened = ids.new_zeros(rows.shape[0])
        self.given_up = self.opened > 0

    def add(self, of_row: Tensor, leaf: Tensor, log_prob: Tensor) -> None:
        self.of_row = torch.cat([self.of_row, of_row])
        self.leaf = torch.cat([self.leaf, leaf])
        self.log_prob = torch.cat([self.log_prob, log_prob])


def _sweep(nodes: Nodes, rows: Tensor, bound: Tensor) -> _Leaves:
    found = _Leaves(rows)
    most = max(_MOST_OPEN, int(nodes.tables.n_inner * _MOST_OPEN_PART))
    of_row = torch.arange(rows.shape[0], device=rows.device)
    node, reached = torch.zeros_like(of_row), rows.new_zeros(len(of_row))
    while len(node):
        sizes = torch.bincount(of_row, minlength=rows.shape[0])
        found.given_up |= sizes > most
        going = (~found.given_up[of_row]).nonzero().squeeze(-1)
        if len(going) < len(node):
            of_row, node, reached = of_row[going], node[going], reached[going]
        found.opened.index_add_(0, of_row, torch.ones_like(of_row))
        below = child_log_prob(nodes, rows, of_row, node) + reached.unsqueeze(-1)
        child = _children(nodes, node, below.shape[1])
        # A row of NaN finds nothing, and is then sorted as a whole.
        wanted = (below > -torch.inf) & (below >= bound[of_row].unsqueeze(-1))
        entry, at = wanted.nonzero(as_tuple=True)
        entry_row, child, below = of_row[entry], child[entry, at], below[entry, at]
        leaf = child < 0
        found.add(entry_row[leaf], ~child[leaf], below[leaf])
        of_row, node, reached = entry_row[~leaf], child[~leaf], below[~leaf]
    return found


def _sorted_by_row(found: _Leaves, n: int) -> tuple[Tensor, Tensor]:
    """An order by row, then by falling value, then by class; the place of each in its row."""
    order = found.leaf.argsort(stable=True)
    order = order[found.log_prob[order].argsort(descending=True, stable=True)]
    order = order[found.of_row[order].argsort(stable=True)]
    sizes = torch.bincount(found.of_row, minlength=n)
    first = sizes.cumsum(0) - sizes
    return order, torch.arange(len(order), device=order.device) - first[found.of_row[order]]


def _children(nodes: Nodes, node: Tensor, width: int) -> Tensor:
    """What each node's edges lead to, ``(m, width)``; beyond the last one anything."""
    first = nodes.tables.child_start[node].unsqueeze(-1)
    places = first + torch.arange(width, device=node.device)
    return nodes.tables.child[places.clamp(max=nodes.tables.n_edges - 1)].long()


def _with_room(bound: Tensor) -> Tensor:
    """A little lower, as a score may be rounded otherwise among other rows."""
    return bound - 1024 * torch.finfo(bound.dtype).eps * (1.0 + bound.abs())


def draw_leaves(
    nodes: Nodes, rows: Tensor, n_samples: int, generator: torch.Generator | None
) -> Tensor:
    """Class ids ``(n, n_samples)``: a walk down from the root for each; -1 in a row of NaN."""
    n = rows.shape[0]
    classes = torch.full((n * n_samples,), -1, device=rows.device)
    walk = torch.arange(n * n_samples, device=rows.device)
    node = torch.zeros_like(walk)
    for _ in range(len(nodes.tables.levels)):
        # Chance for all, so that a walk does not depend on when the others end.
        chance = torch.rand(
            len(classes), dtype=torch.float64, device=rows.device, generator=generator
        )
        drawn = _drawn_children(nodes, rows, walk // n_samples, node, chance[walk])
        edge = nodes.tables.child_start[node] + drawn.clamp(min=0)
        child = nodes.tables.child[edge].long()
        ended = child < 0
        classes[walk[ended]] = torch.where(drawn < 0, -1, ~child)[ended]
        going = (~ended & (drawn >= 0)).nonzero().squeeze(-1)
        walk, node = walk[going], child[going]
        if not len(walk):
            break
    return classes.reshape(n, n_samples)


def _drawn_children(
    nodes: Nodes, rows: Tensor, of_row: Tensor, node: Tensor, chance: Tensor
) -> Tensor:
    """A child of each entry's node; walks of a row that are at the same node share its scores."""
    n_inner = nodes.tables.n_inner
    pairs, place = torch.unique(of_row * n_inner + node, return_inverse=True)
    log_probs = child_log_prob(nodes, rows, pairs // n_inner, pairs % n_inner)
    step = max(1, _NUMBERS // max(1, log_probs.shape[1]))
    drawn = [
        draw_classes(log_probs[at], each.unsqueeze(-1)).squeeze(-1)
        for at, each in zip(place.split(step), chance.split(step), strict=True)
    ]
    return torch.cat(drawn)
