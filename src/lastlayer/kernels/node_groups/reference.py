"""Softmax over the children of nodes in plain torch, node by node: the reference for tests."""

import torch
from torch import Tensor


def log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, node: Tensor, position: Tensor,
    row_start: Tensor,
) -> Tensor:  # fmt: skip
    """Log-probabilities of the children at ``position``, ``(n, path)``; differentiable.

    Args:
        hidden: ``(n, d)``.
        weight: ``(n_rows, d)``: one row per child; a binary node has only one row, the logit of its
            second child.
        bias: ``(n_rows,)``, or None.
        node: ``(n, path)``; the number of nodes for an unused entry, whose result is 0.
        position: index of the child among those of its node, ``(n, path)``.
        row_start: the first row of each node, and the end.
    """
    made = hidden.new_zeros(node.shape)
    for some in node.unique().tolist():
        if some + 1 >= len(row_start):
            continue
        rows, level = (node == some).nonzero().unbind(1)
        own = slice(*row_start[some : some + 2].tolist())
        scores = hidden[rows] @ weight[own].t()
        if bias is not None:
            scores = scores + bias[own]
        if scores.shape[1] == 1:
            scores = torch.cat([torch.zeros_like(scores), scores], 1)
        taken = position[rows, level].long().unsqueeze(1)
        chosen = scores.log_softmax(1).gather(1, taken).squeeze(1)
        made = made.index_put((rows, level), chosen)
    return made


def leaves(
    scores: Tensor, child_start: Tensor, row_start: Tensor, child: Tensor, end: Tensor
) -> Tensor:
    """Log-probabilities of all leaves, ``(n, leaves)``, from the scores of all rows of the weight.

    Args:
        scores: ``(n, n_rows)``; columns beyond the last row of the weight are not read.
        child_start: the first edge of each node, and the end.
        row_start: the first row of the weight of each node, and the end.
        child: the child of each edge: a node, or ~c for a leaf.
        end: the last edge on the path to each leaf.
    """
    edges = scores.new_zeros(scores.shape[0], len(child))
    reached = {0: scores.new_zeros(scores.shape[0], 1)}
    for node in range(len(child_start) - 1):
        own = slice(*child_start[node : node + 2].tolist())
        some = scores[:, slice(*row_start[node : node + 2].tolist())]
        if some.shape[1] == 1:
            some = torch.cat([torch.zeros_like(some), some], 1)
        edges[:, own] = reached[node] + some.log_softmax(1)
        for edge in range(own.start, own.stop):
            if child[edge] >= 0:
                reached[int(child[edge])] = edges[:, edge : edge + 1]
    return edges[:, end.long()]
