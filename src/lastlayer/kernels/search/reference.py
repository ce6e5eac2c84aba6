"""The best leaves of a tree, and blocks of classes, in plain torch, by a sort of all: the truth."""

import torch
from torch import Tensor
from torch.nn.functional import linear, logsigmoid


def best_leaves(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    child_start: Tensor,
    row_start: Tensor,
    child: Tensor,
    levels: int,
    k: int,
    most: int,  # noqa: ARG001 — nothing is given up here
) -> tuple[Tensor, Tensor, Tensor]:
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


def peaks_and_levels_(
    hidden: Tensor, weight: Tensor, peaks: Tensor, levels: Tensor, classes: int
) -> None:
    """For each row and block the largest score, and the log of the sum of their exponentials.

    A block has ``classes`` classes, the last one what is left; NaN where the row has a NaN.
    """
    scores = (hidden.double() @ weight.double().t()).split(classes, -1)
    for block, some in enumerate(scores):
        peaks[:, block] = some.amax(-1)
        levels[:, block] = torch.logsumexp(some, -1)


def largest(values: Tensor, ids: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The k largest numbers of each row and their ids; NaN first, the lower id where equal."""
    if ids is None:
        ids = torch.arange(values.shape[1], device=values.device).expand(values.shape)
    by_id = ids.sort(dim=-1, stable=True)
    values = values.gather(-1, by_id.indices)
    # Of a NaN, +inf and -0 there is one kind each, so that ids decide.
    keys = (values + 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = keys.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return values.gather(-1, best), by_id.values.gather(-1, best)
