"""Leaves of a tree in plain torch, from the scores of all nodes: the reference."""

import torch
from torch import Tensor
from torch.nn.functional import linear, logsigmoid

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels.search import NOWHERE


def best_leaves(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, child_start: Tensor, row_start: Tensor,
    child: Tensor, levels: int, k: int, most: int,  # noqa: ARG001 - nothing is given up here
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Log-probabilities and classes ``(n, k)``, and how many nodes were opened ``(n,)``.

    Leaves are in descending order, ties by ascending class. Kernels may give a row up: the number
    of opened nodes is then -1, its values are NaN and its classes -1.

    Args:
        hidden: ``(n, d)``, float32 or float64, the dtype of the computation.
        weight: ``(n_rows, d)``, of any floating dtype.
        bias: ``(n_rows,)``, or None.
        child_start: first edge of each node, ``(n_inner + 1,)``, int64.
        row_start: first row of the weight of each node, ``(n_inner + 1,)``, int64.
        child: target of each edge, int32: a node, or ``~c`` for the leaf of class c.
        levels: number of levels that have inner nodes.
        k: from 1 to the number of classes.
        most: rows of the weight that may be read per row of hidden before it is given up.
    """
    n, n_inner = hidden.shape[0], len(child_start) - 1
    log_prob = _edge_log_probs(hidden, weight, bias, child_start, row_start)
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


def random_leaves(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, child_start: Tensor, row_start: Tensor,
    child: Tensor, widest: int, uniform: Tensor,  # noqa: ARG001 - for CUDA
) -> Tensor:  # fmt: skip
    """Class ids ``(n, m)`` of leaves drawn by walks from the root; -1 after a NaN.

    One number in [0, 1) decides a whole walk: it falls into the interval of one child of the root,
    and its position in that interval decides among the children of that child. So the result is the
    leaf whose interval it falls into, if the probabilities of all leaves are laid out as intervals
    from left to right.

    ``widest`` is the largest number of children of a node. ``uniform`` has numbers in [0, 1),
    ``(n, m)``, float64. The other arguments are those of :func:`best_leaves`, with hidden of any
    floating dtype.
    """
    log_prob = _edge_log_probs(hidden, weight, bias, child_start, row_start)
    share = log_prob.double().exp()
    # A leading 0, so that no walk takes an edge of probability 0.
    reached = torch.nn.functional.pad(share.nan_to_num(0.0).cumsum(-1), (1, 0))
    at, left = torch.zeros_like(uniform, dtype=torch.int64), uniform
    for _ in range(len(child_start)):
        node = at.clamp(min=0)
        first, last = child_start[node], child_start[node + 1]
        before, after = reached.gather(-1, first), reached.gather(-1, last)
        limit = before + left * (after - before)
        limit = torch.minimum(limit, torch.nextafter(after, before))
        edge = torch.searchsorted(reached, limit, right=True) - 1
        edge = torch.minimum(torch.maximum(edge, first), last - 1)
        to = torch.where(share.gather(-1, first).isnan(), NOWHERE, child[edge].long())
        inside = (limit - reached.gather(-1, edge)) / share.gather(-1, edge)
        left = torch.where(at < 0, left, inside.clamp(0.0, 1.0))
        at = torch.where(at < 0, at, to)
        if bool((at < 0).all()):
            break
    return torch.where(at == NOWHERE, -1, ~at)


def leaf_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, child_start: Tensor, row_start: Tensor,
    edge_node: Tensor, path_start: Tensor, path_edge: Tensor, widest: int,  # noqa: ARG001
    classes: Tensor,
) -> Tensor:  # fmt: skip
    """Log-probabilities of classes ``(n, m)``, in the accumulation dtype; NaN for invalid ids.

    ``edge_node`` has the node of each edge. ``path_edge``, int32, has the edges of the paths of all
    classes from the root on; ``path_start`` has where each path starts. The other arguments are
    those of :func:`random_leaves`.
    """
    log_prob = _edge_log_probs(hidden, weight, bias, child_start, row_start)
    total = log_prob.new_zeros(classes.shape)
    for row, at in enumerate(classes.tolist()):
        for i, each in enumerate(at):
            known = 0 <= each < len(path_start) - 1
            path = path_edge[path_start[each] : path_start[each + 1]].long() if known else None
            total[row, i] = torch.nan if path is None else log_prob[row, path].sum()
    return total


def _edge_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, child_start: Tensor, row_start: Tensor
) -> Tensor:
    """The log-probability of each edge given its node, ``(n, n_edges)``."""
    hidden = hidden.to(accumulation_dtype(hidden.dtype))
    scores = linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden))
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
