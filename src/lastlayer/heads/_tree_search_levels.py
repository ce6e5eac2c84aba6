"""The best leaves of a tree by operations of torch, level by level for all rows at once."""

from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer.heads._node_scores import Nodes, child_log_prob

# Nodes that the first sweep follows, unless more are asked for.
_NARROWEST_BEAM = 8
# A row that has more open nodes than this, and than this part of all, is given up.
_MOST_OPEN, _MOST_OPEN_PART = 64, 1 / 16


class Found(NamedTuple):
    """The best classes of each row, and what it took."""

    values: Tensor
    classes: Tensor
    # How many nodes were opened for each row, ``(n,)``.
    opened: Tensor


def beam_by_levels(nodes: Nodes, rows: Tensor, k: int, width: int) -> Found:
    """The best k leaves among those below the ``width`` best nodes of each level.

    A leaf that is not found has the value -inf and class -1; a row that meets a NaN has NaN.
    """
    nodes = _with_top(nodes, rows)
    tables, n = nodes.tables, rows.shape[0]
    values = rows.new_full((n, k), -torch.inf)
    classes = torch.full((n, k), -1, device=rows.device)
    opened = classes.new_zeros(n)
    node = classes.new_zeros(n, 1)
    reached = rows.new_zeros(n, 1)
    live = torch.ones_like(node, dtype=torch.bool)
    broken = opened > 0
    for _ in range(len(tables.levels)):
        of_row, at = live.nonzero(as_tuple=True)
        if not len(of_row):
            break
        opened.add_(live.sum(-1))
        asked = node[of_row, at]
        below = child_log_prob(nodes, rows, of_row, asked) + reached[of_row, at].unsqueeze(-1)
        broken[of_row[below.isnan().any(-1)]] = True
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
    classes = classes.gather(-1, order)
    values[broken], classes[broken] = torch.nan, -1
    return Found(values, classes, opened)


def search_by_levels(nodes: Nodes, rows: Tensor, k: int) -> Found:
    """The best k leaves of each row, the lower class first where two are equal.

    Two sweeps from the root down. The first follows the best few nodes of each level and finds k
    leaves; the worst of them is a bound. The second opens every node that is not below the bound,
    and so finds every leaf that is not below it. Where these are k or more, the best k of them
    are the best of all, whatever the bound.

    A row is given up where little is ruled out or fewer than k leaves are found: it has opened -1
    nodes, and its values and classes mean nothing.
    """
    nodes = _with_top(nodes, rows)
    n = rows.shape[0]
    first = beam_by_levels(nodes, rows, k, max(k, _NARROWEST_BEAM))
    swept = _sweep(nodes, rows, _with_room(first.values[:, -1]))
    values = rows.new_full((n, k), torch.nan)
    classes = torch.full((n, k), -1, device=rows.device)
    order, rank = _sorted_by_row(swept, n)
    kept, rank = order[rank < k], rank[rank < k]
    at = swept.of_row[kept], rank
    values[at], classes[at] = swept.log_prob[kept], swept.leaf[kept]
    given_up = swept.given_up | (classes[:, -1] < 0)
    return Found(values, classes, torch.where(given_up, -1, first.opened + swept.opened))


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
        found.given_up[of_row[below.isnan().any(-1)]] = True
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


def _with_top(nodes: Nodes, rows: Tensor) -> Nodes:
    """One product for the nodes near the root, unless it is made already."""
    return nodes if nodes.top is not None else nodes.with_top(rows)
