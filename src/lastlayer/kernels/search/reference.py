"""The best leaves of a tree in plain torch, by a sort of all: defines the truth."""

import torch
from torch import Tensor
from torch.nn.functional import linear, logsigmoid


def best_leaves(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, child_start: Tensor, row_start: Tensor,
    child: Tensor, levels: int, k: int, most: int,  # noqa: ARG001 - nothing is given up here
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Log-probabilities and classes ``(n, k)``, and how many nodes were opened ``(n,)``.

    The most probable leaf comes first, of equal ones the lower class. A row may be given up: then
    it has opened -1 nodes, and its values are NaN and its classes -1.

    Args:
        hidden: ``(n, d)``, float32 or float64, in which all is computed.
        weight: ``(n_rows, d)``, of any floating dtype.
        bias: ``(n_rows,)``, or None.
        child_start: the first edge of each node, ``(n_inner + 1,)``, int64.
        row_start: the first row of each node, ``(n_inner + 1,)``, int64.
        child: what each edge leads to, int32: a node, or ``~c`` for class c, which has one leaf.
        levels: how many levels have inner nodes.
        k: from 1 to the number of classes.
        most: rows of the weight that may be read for a row before it is given up.
    """
    n, n_inner = hidden.shape[0], len(child_start) - 1
    scores = linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden))
    log_prob = _edge_log_probs(scores, child_start, row_start)
    child = child.long()
    reached = hidden.new_zeros(n, n_inner)
    node = torch.arange(n_inner, device=child.device).repeat_interleave(child_start.diff())
    first, last = 0, 1
    for _ in range(levels):
        edges = slice(int(child_start[first]), int(child_start[last]))
        log_prob[:, edges] += reached[:, node[edges]]
        inner = child[edges] >= 0
        reached[:, child[edges][inner]] = log_prob[:, edges][:, inner]
        first, last = last, last + int(inner.sum())
    leaf = child < 0
    by_class = hidden.new_empty(n, int(leaf.sum()))
    by_class[:, ~child[leaf]] = log_prob[:, leaf]
    best = by_class.sort(dim=-1, descending=True, stable=True)
    opened = torch.full((n,), n_inner, dtype=torch.int64, device=hidden.device)
    return best.values[:, :k].clone(), best.indices[:, :k].clone(), opened


def _edge_log_probs(scores: Tensor, child_start: Tensor, row_start: Tensor) -> Tensor:
    """Of each edge given its node, ``(n, n_edges)``."""
    arity = child_start.diff()
    made = scores.new_empty(scores.shape[0], int(child_start[-1]))
    for each in arity.unique().tolist():
        nodes = (arity == each).nonzero()
        of_node = torch.arange(each, device=nodes.device)
        if each == 2:
            decided = scores[:, row_start[nodes]]
            log_prob = logsigmoid(torch.cat([-decided, decided], -1))
        else:
            log_prob = torch.log_softmax(scores[:, row_start[nodes] + of_node], -1)
        made[:, child_start[nodes] + of_node] = log_prob
    return made
