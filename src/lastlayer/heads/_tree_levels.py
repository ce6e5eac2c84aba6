"""Log-probabilities of all classes: those of all edges, added down the tree level by level."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lastlayer._torch import accumulation_dtype
from lastlayer.heads._node_scores import Nodes
from lastlayer.heads._rows import row_chunks
from lastlayer.heads._scores import wide_scores
from lastlayer.heads._tree_tables import TreeTables

# Numbers held for each class and row: scores, edges by arity and in order, sums, classes.
_COPIES = 9.0


def all_classes_log_prob(
    nodes: Nodes, rows: Tensor, chunk_rows: int | str, recording: bool
) -> Tensor:
    """``(n, n_classes)`` for rows ``(n, d)``, a chunk at a time unless a gradient is recorded."""
    tables = nodes.tables
    weight = nodes.weight.to(rows.dtype)
    bias = None if nodes.bias is None else nodes.bias.to(rows.dtype)
    if recording:
        return all_log_prob(tables, wide_scores(rows, weight, bias))
    dtype = accumulation_dtype(rows.dtype)
    made = rows.new_empty(rows.shape[0], tables.n_classes, dtype=dtype)
    for part in row_chunks(rows, tables.n_edges // 2, chunk_rows, _COPIES):
        made[part] = all_log_prob(tables, wide_scores(rows[part], weight, bias))
    return made


def all_log_prob(tables: TreeTables, scores: Tensor) -> Tensor:
    """``(n, n_classes)`` from scores ``(n, n_rows)``; differentiable."""
    if not tables.n_inner:
        return scores.sum(-1, keepdim=True)
    # One row a score: what is gathered is then contiguous.
    leaves = down_to_leaves(tables, edge_log_probs(tables, scores.t().contiguous()))
    return over_paths(tables, leaves).t() if tables.overlaps else leaves.t()


def edge_log_probs(tables: TreeTables, scores: Tensor) -> Tensor:
    """``(n_edges, n)``, each given its node, from scores ``(n_rows, n)``."""
    parts = []
    for arity, mine in rows_by_arity(tables, scores):
        if arity == 2:
            parts.append(logsigmoid(torch.cat([-mine, mine], 1)))
        else:
            parts.append(torch.log_softmax(mine, 1))
    return in_edge_order(tables, parts)


def rows_by_arity(tables: TreeTables, values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each arity, and what its nodes have of ``(n_rows, n)``: ``(nodes, rows of a node, n)``."""
    for arity in tables.arities:
        mine = values
        if len(tables.arities) > 1:
            mine = values.index_select(0, tables.rows_of_arity(arity))
        yield arity, mine.unflatten(0, (-1, 1 if arity == 2 else arity))


def in_edge_order(tables: TreeTables, parts: list[Tensor]) -> Tensor:
    """``(n_edges, n)`` from ``(nodes, arity, n)`` of each arity."""
    flat = [part.flatten(0, 1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat).index_select(0, tables.edge_slot)


def down_to_leaves(tables: TreeTables, edges: Tensor) -> Tensor:
    """Sums of ``(n_edges, n)`` along each path, ``(n_paths, n)``."""
    sums = [edges[slice(*tables.levels[0])]]
    for first, last in tables.levels[1:]:
        above = sums[-1].index_select(0, tables.edge_above[first:last])
        sums.append(edges[first:last] + above)
    return torch.cat(sums).index_select(0, tables.path_end)


def over_paths(tables: TreeTables, leaves: Tensor) -> Tensor:
    """Log of the sum over the paths of each class, ``(n_classes, n)``."""
    shape = tables.n_classes, leaves.shape[1]
    known, classes = leaves.detach(), tables.path_class
    top = known.new_full(shape, -torch.inf).scatter_reduce(
        0, classes.unsqueeze(-1).expand_as(known), known, "amax"
    )
    top = torch.where(top == -torch.inf, 0.0, top)
    shares = (leaves - top.index_select(0, classes)).exp()
    return leaves.new_zeros(shape).index_add(0, classes, shares).log() + top
