"""Log-probabilities of children, given their node, for chosen nodes of each row.

What is asked for are *entries*: a row of hidden states and a node. Binary nodes take a gathered
vector each. Wider ones have a block of vectors, which is gathered where it is small; else entries
are sorted by node, and each node has one product with the rows that ask for it, see
:mod:`lastlayer.heads._node_by_node`: on CUDA all nodes in one launch, see
:mod:`lastlayer.heads._grouped_nodes`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lastlayer._torch import host_sync_allowed
from lastlayer.heads._gathered_rows import gathered
from lastlayer.heads._grouped_nodes import grouped_log_prob, groups_suit
from lastlayer.heads._node_by_node import block_scores, by_node, log_prob_by_node
from lastlayer.heads._tree_tables import TreeTables

# Blocks of more vectors than this are not gathered.
_WIDEST_GATHERED = 32
# Numbers to gather that take as long as the product of a node takes to be called (on a CPU).
_NUMBERS_A_NODE = 30_000
# Rows of the weight that a search scores at once.
_TOP_ROWS = 2048
# Numbers gathered at a time where no gradient is recorded.
_GATHERED_NUMBERS = 4_000_000


class Nodes(NamedTuple):
    """The vectors and biases of all nodes, and whose they are."""

    tables: TreeTables
    weight: Tensor
    bias: Tensor | None
    sparse: bool = False
    # Scores of all hidden states for the first rows of the weight, where they are known.
    top: Tensor | None = None

    def with_top(self, rows: Tensor) -> "Nodes":
        """The same, with one product for the nodes near the root, which most rows will open."""
        first = slice(0, min(_TOP_ROWS, self.weight.shape[0]))
        return self._replace(top=block_scores(self.weight, self.bias, rows, first))


def edge_log_prob(
    nodes: Nodes, rows: Tensor, edges: Tensor, inside: Tensor, paths: int, once: bool
) -> Tensor:
    """Log-probability of each edge given its node, ``(n, m)``; differentiable.

    Args:
        nodes: the tree's.
        rows: ``(n, d)``, float32 or float64; half precision where ``groups_suit``, and ``once``.
        edges: ``(n, m)``.
        inside: ``(n, m)``; elsewhere the result is 0, and so is the gradient.
        paths: how many paths the edges of a row are of.
        once: whether nobody will ask for second derivatives.
    """
    tables = nodes.tables
    node, position = tables.node_and_position(edges)
    if (once or tables.widest > _WIDEST_GATHERED) and groups_suit(tables, rows) and edges.numel():
        node = torch.where(inside, node, tables.n_inner)
        return grouped_log_prob(
            tables, nodes.weight, nodes.bias, rows, node, position, paths, nodes.sparse
        )
    if not tables.has_wide:
        # Padded, as a batched product takes it: paths of a batch are of about the same length.
        scores = _scores(nodes, rows, torch.where(inside, node, 0))
        decided = logsigmoid(torch.where(position == 1, scores, -scores))
        return torch.where(inside, decided, 0.0)
    binary = tables.child_start[node + 1] - tables.child_start[node] == 2
    wide = partial(_wide_log_prob, once)
    made = _listed(wide, nodes, rows, node, position, inside & ~binary)
    if tables.has_binary:
        made = made + _listed(_binary_log_prob, nodes, rows, node, position, inside & binary)
    return made


def child_log_prob(nodes: Nodes, rows: Tensor, of_row: Tensor, node: Tensor) -> Tensor:
    """Of all children of each entry's node, ``(m, width)``; -inf beyond the last child.

    No gradient is recorded.

    Args:
        nodes: the tree's.
        rows: ``(n, d)``, float32 or float64.
        of_row: the row of each entry, ``(m,)``.
        node: the node of each entry, ``(m,)``.
    """
    tables = nodes.tables
    if not tables.has_wide:
        return _two_log_probs(nodes, rows, of_row, node)
    arity = tables.child_start[node + 1] - tables.child_start[node]
    width = int(arity.max()) if arity.numel() else 2
    made = rows.new_full((len(node), width), -torch.inf)
    for binary in (True, False):
        some = ((arity == 2) == binary).nonzero().squeeze(-1)
        if not len(some):
            continue
        if binary:
            made[some, :2] = _two_log_probs(nodes, rows, of_row[some], node[some])
        else:
            made[some] = _block_log_probs(nodes, rows, of_row[some], node[some], width)
    return made


def _two_log_probs(nodes: Nodes, rows: Tensor, of_row: Tensor, node: Tensor) -> Tensor:
    picked = nodes.tables.first_row(node)
    scores = rows.new_empty(len(node), 1)
    far: Tensor | slice = slice(None)
    if nodes.top is not None:
        near = picked < nodes.top.shape[1]
        known = near.nonzero().squeeze(-1)
        scores[known, 0] = nodes.top[of_row[known], picked[known]]
        far = (~near).nonzero().squeeze(-1)
        of_row, picked = of_row[far], picked[far]
    by_parts = [
        _scores(nodes, rows[of_row[part]], picked[part].unsqueeze(-1))
        for part in _parts(len(picked), rows.shape[1])
    ]
    scores[far] = torch.cat([rows.new_empty(0, 1), *by_parts])
    return logsigmoid(torch.cat([-scores, scores], -1))


def _block_log_probs(
    nodes: Nodes, rows: Tensor, of_row: Tensor, node: Tensor, width: int
) -> Tensor:
    if width <= _WIDEST_GATHERED:
        parts = _parts(len(node), rows.shape[1] * width)
        made = [_gathered_block(nodes, rows[of_row[part]], node[part], width) for part in parts]
        return torch.cat(made)
    made_all = rows.new_full((len(node), width), -torch.inf)
    for block, entries in by_node(nodes.tables, node):
        scores = block_scores(nodes.weight, nodes.bias, rows[of_row[entries]], block)
        made_all[entries, : scores.shape[1]] = torch.log_softmax(scores, -1)
    return made_all


def _listed(
    log_prob: Callable[[Nodes, Tensor, Tensor, Tensor, Tensor], Tensor],
    nodes: Nodes,
    rows: Tensor,
    node: Tensor,
    position: Tensor,
    asked: Tensor,
) -> Tensor:
    """``log_prob`` of those nodes ``(n, m)`` that are asked for, 0 elsewhere.

    They are made a list, in which no work is done for the others; unless their number has to be
    known before, as for torch.compile.
    """
    if _host_knows(node):
        of_row, at = asked.nonzero(as_tuple=True)
        made = log_prob(nodes, rows, of_row, node[of_row, at], position[of_row, at])
        return rows.new_zeros(node.shape).index_put((of_row, at), made)
    of_row = torch.arange(len(rows), device=rows.device).repeat_interleave(node.shape[1])
    some = torch.where(asked, node, 0).reshape(-1)
    made = log_prob(nodes, rows, of_row, some, torch.where(asked, position, 0).reshape(-1))
    return torch.where(asked, made.reshape(node.shape), 0.0)


def _binary_log_prob(
    nodes: Nodes, rows: Tensor, of_row: Tensor, node: Tensor, position: Tensor
) -> Tensor:
    scores = _scores(nodes, rows[of_row], nodes.tables.first_row(node).unsqueeze(-1)).squeeze(-1)
    return logsigmoid(torch.where(position == 1, scores, -scores))


def _wide_log_prob(
    once: bool, nodes: Nodes, rows: Tensor, of_row: Tensor, node: Tensor, position: Tensor
) -> Tensor:
    widest, n_inner = nodes.tables.widest, nodes.tables.n_inner
    crowded = once and len(node) * widest * rows.shape[1] > _NUMBERS_A_NODE * n_inner
    if (widest > _WIDEST_GATHERED or crowded) and _host_knows(node):
        return log_prob_by_node(
            nodes.tables, nodes.weight, nodes.bias, rows, of_row, node, position, nodes.sparse
        )
    log_probs = _gathered_block(nodes, rows[of_row], node, nodes.tables.widest)
    return log_probs.gather(-1, position.unsqueeze(-1)).squeeze(-1)


def _host_knows(tensor: Tensor) -> bool:
    return not torch.compiler.is_compiling() and host_sync_allowed(tensor)


def _scores(nodes: Nodes, rows: Tensor, picked: Tensor) -> Tensor:
    """Of the rows of the weight that are picked for each row, ``(n, m)``."""
    vectors = gathered(nodes.weight, picked, rows.dtype, nodes.sparse)
    scores = torch.bmm(vectors, rows.unsqueeze(-1)).squeeze(-1)
    if nodes.bias is None:
        return scores
    return scores + gathered(nodes.bias, picked, rows.dtype, nodes.sparse)


def _gathered_block(nodes: Nodes, rows: Tensor, node: Tensor, width: int) -> Tensor:
    """Log-softmax of the whole block of one node a row, ``(n, width)``; -inf beyond its end."""
    first = nodes.tables.row_start[node]
    steps = torch.arange(width, device=node.device)
    there = steps < (nodes.tables.row_start[node + 1] - first).unsqueeze(-1)
    picked = torch.where(there, first.unsqueeze(-1) + steps, 0)
    # -inf and no number: padding takes no probability from the children.
    return torch.log_softmax(torch.where(there, _scores(nodes, rows, picked), -torch.inf), -1)


def _parts(n: int, numbers: int) -> Iterator[slice]:
    step = max(1, _GATHERED_NUMBERS // max(1, numbers))
    for first in range(0, n, step):
        yield slice(first, min(n, first + step))
