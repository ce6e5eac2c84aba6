"""The best leaves of a tree, without opening all of its nodes; and random leaves by walks down it.

To *open* a node is to compute the log-probabilities of its children. Kernels do all of this on a
CPU, and on CUDA the walks and the exact search in binary trees. Otherwise a beam is followed with
torch operations, level by level for all rows at once, and exact results need a sort of all classes.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lastlayer.fused.paths import block_scores, groups_of
from lastlayer.fused.scores import row_chunks
from lastlayer.heads._tree_nodes import WIDEST_GATHERED, Nodes, gathered_block, gathered_scores
from lastlayer.kernels import selected
from lastlayer.kernels.search import MOST_ON_CUDA, best_leaves, random_leaves

# If more weight rows than this, and than this part of all, would be read one by one for a row, the
# row is sorted as a whole.
_MOST_READ, _MOST_READ_PART = 1024, 1 / 16
# On a CPU, this many rows or more are sorted as a whole if there are at most this many vectors.
_MANY_ROWS, _FEW_VECTORS = 16, 1024
# Weight rows near the root whose scores are one product for all rows.
_TOP_ROWS = 2048
# Elements gathered at a time; and copies per edge and row if walks have no kernel.
_GATHERED_NUMBERS, _DRAWN_COPIES = 4_000_000, 8.0


class Found(NamedTuple):
    """The best classes of each row, and the number of nodes opened for it, ``(n,)``."""

    values: Tensor
    classes: Tensor
    opened: Tensor


def search_suits(nodes: Nodes, rows: Tensor, k: int) -> bool:
    """Whether there is a kernel for the exact search, and it may be faster than sorting all."""
    tables, device = nodes.tables, rows.device.type
    chosen = selected("tree_search", device, rows.dtype)
    if chosen == "triton":
        return not tables.has_wide and k <= MOST_ON_CUDA
    return chosen == "cpu" and (len(rows) < _MANY_ROWS or tables.n_rows > _FEW_VECTORS)


def search(nodes: Nodes, rows: Tensor, k: int, beam: int | None = None) -> Found:
    """The best k leaves of each row; ties are broken by class id, lower first.

    See :meth:`HierarchicalSoftmax.topk`. Without a beam it requires :func:`search_suits`. Rounding
    keeps a child at most as probable as its parent, since a log-probability of at most 0 is added.
    On a CPU no exact search opens fewer nodes: an unopened node as probable as the k-th leaf could
    contain a better one. On CUDA both sweeps are one launch.

    The search of a row is given up if little can be excluded, for example if all classes are
    similar, if fewer than k classes have nonzero probability, or at a NaN. Its ``opened`` is then
    -1, and its values and classes are undefined.

    With a ``beam``, it returns the best leaves below this many best nodes of each level, and gives
    up no row: a leaf that is not found has value -inf and class -1; a row with a NaN has NaN and
    -1 throughout.
    """
    tables = nodes.tables
    if beam is None:
        most = max(_MOST_READ, int(tables.n_rows * _MOST_READ_PART))
        given = *_given(nodes, rows), len(tables.levels), k, most
        return Found(*best_leaves("auto", *given))
    if selected("tree_search", rows.device.type, rows.dtype) != "cpu":
        return beam_by_levels(nodes, rows, k, beam)
    # Imported on first use, since it needs Numba.
    from lastlayer.kernels.search.cpu import beam_leaves

    # No level has more nodes than the tree.
    return Found(*beam_leaves(*_given(nodes, rows), k, min(beam, tables.n_inner)))


def draw_leaves(nodes: Nodes, rows: Tensor, uniform: Tensor, chunk_rows: int | str) -> Tensor:
    """Class ids for uniform numbers ``(n, m)`` in [0, 1), by walks from the root; -1 at NaN."""
    tables = nodes.tables
    if selected("tree_draw", rows.device.type, rows.dtype) != "reference":
        drawn: Tensor = random_leaves("auto", *_given(nodes, rows), tables.widest, uniform)
        return drawn
    chunks = row_chunks(rows, tables.n_edges, chunk_rows, _DRAWN_COPIES)
    return torch.cat([
        random_leaves("reference", *_given(nodes, rows[part]), tables.widest, uniform[part])
        for part in chunks
    ])  # fmt: skip


def _given(
    nodes: Nodes, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """The first arguments of all kernels."""
    tables, weight, bias, _ = nodes
    return rows, weight, bias, tables.child_start, tables.row_start, tables.child


class _Opener:
    """Opens nodes for some rows, without a gradient.

    Scores of nodes near the root, which most rows will open, are computed at once.
    """

    def __init__(self, nodes: Nodes, rows: Tensor) -> None:
        self.nodes, self.rows = nodes, rows
        self.top = block_scores(nodes.weight, nodes.bias, rows, slice(0, _TOP_ROWS))

    def open(self, of_row: Tensor, node: Tensor) -> Tensor:
        """Log-probabilities of the children of each entry's node, ``(m, width)``; padded with -inf.

        Entries are rows ``(m,)`` and nodes ``(m,)``.
        """
        tables, rows = self.nodes.tables, self.rows
        if not tables.has_wide:
            return self._two(of_row, node)
        arity = tables.child_start[node + 1] - tables.child_start[node]
        width = int(arity.max()) if arity.numel() else 2
        made = rows.new_full((len(node), width), -torch.inf)
        some = (arity == 2).nonzero().squeeze(-1)
        made[some, :2] = self._two(of_row[some], node[some])
        some = (arity != 2).nonzero().squeeze(-1)
        if width <= WIDEST_GATHERED:
            for part in _parts(len(some), rows.shape[1] * width):
                at = some[part]
                made[at] = gathered_block(self.nodes, rows[of_row[at]], node[at], width)
        else:
            for block, entries in groups_of(tables.row_start, node[some]).blocks():
                at = some[entries]
                scores = block_scores(self.nodes.weight, self.nodes.bias, rows[of_row[at]], block)
                made[at, : scores.shape[1]] = torch.log_softmax(scores, -1)
        return made

    def children(self, node: Tensor, width: int) -> Tensor:
        """Children of each node, ``(m, width)``; arbitrary beyond the last child."""
        tables = self.nodes.tables
        places = tables.child_start[node].unsqueeze(-1) + torch.arange(width, device=node.device)
        return tables.child[places.clamp(max=tables.n_edges - 1)].long()

    def _two(self, of_row: Tensor, node: Tensor) -> Tensor:
        rows, picked = self.rows, self.nodes.first_row(node)
        scores = rows.new_empty(len(node), 1)
        near = picked < self.top.shape[1]
        known, far = near.nonzero().squeeze(-1), (~near).nonzero().squeeze(-1)
        scores[known, 0] = self.top[of_row[known], picked[known]]
        for part in _parts(len(far), rows.shape[1]):
            at = far[part]
            scores[at] = gathered_scores(self.nodes, rows[of_row[at]], picked[at].unsqueeze(-1))
        return logsigmoid(torch.cat([-scores, scores], -1))


def _parts(n: int, numbers: int) -> Iterator[slice]:
    step = max(1, _GATHERED_NUMBERS // max(1, numbers))
    for first in range(0, n, step):
        yield slice(first, min(n, first + step))


def beam_by_levels(nodes: Nodes, rows: Tensor, k: int, width: int) -> Found:
    """:func:`search` with a beam, with torch operations."""
    opener, n = _Opener(nodes, rows), rows.shape[0]
    values = rows.new_full((n, k), -torch.inf)
    classes = torch.full((n, k), -1, device=rows.device)
    opened = classes.new_zeros(n)
    node = classes.new_zeros(n, 1)
    reached = rows.new_zeros(n, 1)
    broken = opened > 0
    for _ in range(len(nodes.tables.levels)):
        live = reached > -torch.inf
        of_row, at = live.nonzero(as_tuple=True)
        if not len(of_row):
            break
        opened += live.sum(-1)
        asked = node[of_row, at]
        below = opener.open(of_row, asked) + reached[of_row, at].unsqueeze(-1)
        broken[of_row[below.isnan().any(-1)]] = True
        shape = (*node.shape, below.shape[1])
        log_prob = rows.new_full(shape, -torch.inf)
        log_prob[of_row, at] = below
        child = classes.new_full(shape, -1)
        child[of_row, at] = opener.children(asked, below.shape[1])
        log_prob, child = log_prob.flatten(1), child.flatten(1)
        leaf = torch.where(child < 0, log_prob, -torch.inf)
        values, kept = torch.cat([values, leaf], -1).topk(k)
        # Entries that are no leaf have the value -inf and class -1.
        ends = torch.where(leaf > -torch.inf, ~child, -1)
        classes = torch.cat([classes, ends], -1).gather(-1, kept)
        useful = (child >= 0) & (log_prob >= values[:, -1:])
        reached, best = torch.where(useful, log_prob, -torch.inf).topk(min(width, child.shape[1]))
        node = child.gather(-1, best)
    order = classes.argsort(-1)
    values, classes = values.gather(-1, order), classes.gather(-1, order)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    classes = classes.gather(-1, order)
    values[broken], classes[broken] = torch.nan, -1
    return Found(values, classes, opened)
