"""Vectors of nodes from vectors of classes, and the other way round.

The score of a subtree would be the log of the sum of its classes' exponentials, which is not
linear in the hidden state h. For any weights q that sum to 1,

    log Σ exp(v_c·h + b_c)  ≥  (Σ q_c v_c)·h + Σ q_c b_c + H(q),    H the entropy,

with equality where q are the probabilities at h. The right side is linear: it is what a node gets.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lastlayer.heads._tree_levels import (
    down_to_leaves,
    edge_log_probs,
    in_edge_order,
    over_paths,
    rows_by_arity,
)
from lastlayer.heads._tree_tables import TreeTables
from lastlayer._checks import as_counts

# How much lighter than the heaviest a class may be, in float64; lighter ones count as if they had
# this weight.
_LIGHTEST = math.log(1e-280)
# Numbers of a vector that are summed at a time: float64 takes twice the memory.
_NUMBERS = 32


def vectors_of_layer(linear: Any, n_classes: int) -> tuple[Tensor, Tensor]:
    """Class vectors and biases of a flat layer, in float32, or in float64 from float64."""
    if not isinstance(linear, (torch.nn.Linear, torch.nn.Embedding)):
        raise TypeError(
            f"linear: expected an nn.Linear or nn.Embedding, got {type(linear).__name__}"
        )
    vectors = wide(linear.weight.detach())
    if len(vectors) != n_classes:
        raise ValueError(
            f"linear: expected {n_classes} classes, as the tree has, got {len(vectors)} in a "
            f"weight of shape {tuple(vectors.shape)}"
        )
    bias = getattr(linear, "bias", None)
    return vectors, vectors.new_zeros(n_classes) if bias is None else wide(bias.detach())


@torch.no_grad()
def start_nodes(
    tables: TreeTables,
    weight: Tensor,
    bias: Tensor | None,
    vectors: Tensor,
    biases: Tensor,
    counts: Any,
) -> None:
    """Write into weight and bias what class vectors and biases give.

    ``counts`` are the weights of the means; None for the probabilities that the biases give.
    """
    log_weights = biases
    if counts is not None:
        log_weights = torch.from_numpy(as_counts(counts, tables.n_classes)).log().to(vectors)
    made, offset = node_vectors(tables, vectors, biases, log_weights)
    weight.copy_(made)
    if bias is not None:
        bias.copy_(offset)


def wide(values: Tensor) -> Tensor:
    """In float32, or in float64 from float64."""
    return values if values.dtype == torch.float64 else values.float()


def node_vectors(
    tables: TreeTables, vectors: Tensor, biases: Tensor, log_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows ``(n_rows, d)`` and their biases ``(n_rows,)``, as averages over subtrees.

    Args:
        tables: of the tree.
        vectors: of the classes, ``(n_classes, d)``.
        biases: of the classes, ``(n_classes,)``.
        log_weights: q of each class, up to a factor, ``(n_classes,)``.
    """
    if not tables.n_inner:
        return vectors[:0], biases[:0]
    log_weights = log_weights.double()
    log_weights = (log_weights - log_weights.max()).clamp(min=_LIGHTEST)
    classes = tables.path_class
    # A class with several paths has its part of the weight on each.
    shares = torch.bincount(classes).double().log()
    paths = (log_weights - shares)[classes]
    weights = paths.exp().unsqueeze(-1)
    ends = tables.path_end.long()
    mass = _up_to_root(tables, ends, weights)
    rows = [
        _as_rows(tables, _up_to_root(tables, ends, weights * some[classes].double()) / mass)
        for some in vectors.split(_NUMBERS, 1)
    ]
    # Of the biases and the entropy together; a class is shared out over its paths here as well.
    own = ((biases.double() - shares)[classes] - paths).unsqueeze(-1)
    offset = _as_rows(tables, _up_to_root(tables, ends, weights * own) / mass + mass.log())
    made = torch.cat([each.to(vectors.dtype) for each in rows], 1)
    return made, offset.squeeze(-1).to(vectors.dtype)


def class_vectors(tables: TreeTables, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Vectors ``(n_classes, d)`` and biases ``(n_classes,)`` of a flat layer that is close.

    The tangent at h = 0 of the log-probabilities, as :func:`node_vectors` is, with the
    probabilities at h = 0 for weights: from one tree to the same tree nothing changes.
    """
    if not tables.n_inner:
        return weight.new_zeros(1, weight.shape[1]), weight.new_zeros(1)
    at_zero = weight.new_zeros(len(weight)) if bias is None else bias
    edges = edge_log_probs(tables, at_zero.unsqueeze(-1))
    probs = rows_by_arity(tables, edge_rows(tables, edges.exp()))
    slopes = []
    for (arity, mine), (_, p) in zip(rows_by_arity(tables, weight), probs, strict=True):
        if arity == 2:
            # p is that of the second child.
            slopes.append(torch.cat([-p * mine, (1.0 - p) * mine], 1))
        else:
            slopes.append(mine - (p * mine).sum(1, keepdim=True))
    leaves = down_to_leaves(tables, edges)
    vectors = down_to_leaves(tables, in_edge_order(tables, slopes))
    if not tables.overlaps:
        return vectors, leaves.squeeze(-1)
    total = over_paths(tables, leaves)
    shares = (leaves - total[tables.path_class]).exp()
    mixed = vectors.new_zeros(tables.n_classes, vectors.shape[1])
    return mixed.index_add(0, tables.path_class, shares * vectors), total.squeeze(-1)


def edge_rows(tables: TreeTables, edges: Tensor) -> Tensor:
    """What edges ``(n_edges, n)`` have, as rows have it: a binary node's is that of its second."""
    first, last = tables.child_start[:-1], tables.child_start[1:]
    # Without the first child of binary nodes.
    kept = torch.ones(len(edges), dtype=torch.bool, device=edges.device)
    kept[first[last - first == 2]] = False
    return edges[kept]


def _as_rows(tables: TreeTables, edges: Tensor) -> Tensor:
    rows = edge_rows(tables, edges)
    first, last = tables.child_start[:-1], tables.child_start[1:]
    binary = last - first == 2
    rows[tables.row_start[:-1][binary]] -= edges[first[binary]]
    return rows


def _up_to_root(tables: TreeTables, ends: Tensor, leaves: Tensor) -> Tensor:
    """Sums of ``(n_paths, n)`` over the leaves below each edge, ``(n_edges, n)``."""
    edges = leaves.new_zeros(tables.n_edges, leaves.shape[1])
    edges[ends] = leaves
    for (above, start), (first, last) in zip(
        reversed(tables.levels[:-1]), reversed(tables.levels[1:]), strict=True
    ):
        edges[above:start].index_add_(0, tables.edge_above[first:last], edges[first:last])
    return edges
