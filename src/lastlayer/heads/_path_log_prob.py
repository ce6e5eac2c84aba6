"""Log-probabilities of chosen classes in any tree: those of the edges on their paths, added up."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lastlayer.heads._grouped_nodes import grouped_losses, losses_suit
from lastlayer.heads._node_scores import Nodes, edge_log_prob
from lastlayer.heads._rows import row_chunks
from lastlayer.heads._tree_tables import TreeTables

# Numbers held for each gathered one, itself included.
_COPIES = 3.0


def any_tree_loss(
    nodes: Nodes, rows: Tensor, target: Tensor, ignore_index: int | None, reduction: str
) -> Tensor:
    """Minus the log-probability of targets ``(n,)``, reduced.

    Rows are ``(n, d)``, float32 or float64, or of any dtype where ``groups_suit``.
    """
    counted = None if ignore_index is None else target != ignore_index
    if losses_suit(nodes.tables, rows):
        losses = grouped_losses(
            nodes.tables, nodes.weight, nodes.bias, rows, target, ignore_index, nodes.sparse
        )
    else:
        losses = _losses(nodes, rows, target, counted)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    return total / (max(1, len(losses)) if counted is None else counted.sum().clamp(min=1))


def _losses(nodes: Nodes, rows: Tensor, target: Tensor, counted: Tensor | None) -> Tensor:
    if counted is not None:
        target = torch.where(counted, target, 0)
        # A NaN in a row that does not count would reach the gradient of the root.
        rows = torch.where(counted.unsqueeze(-1), rows, 0.0)
    return -path_log_prob(nodes, rows, target.unsqueeze(-1), counted, once=True).squeeze(-1)


def chosen_log_prob(
    nodes: Nodes, rows: Tensor, chosen: Tensor, chunk_rows: int | str, recording: bool
) -> Tensor:
    """Of classes ``(n, k)``, a chunk of rows at a time, whose vectors backward gathers again."""
    gathered = most_rows(nodes.tables, chosen) * rows.shape[1]
    made = []
    for part in row_chunks(rows, gathered, chunk_rows, _COPIES):
        if recording:
            made.append(checkpoint(
                path_log_prob, nodes, rows[part], chosen[part],
                use_reentrant=False, preserve_rng_state=False,
            ))  # fmt: skip
        else:
            made.append(path_log_prob(nodes, rows[part], chosen[part]))
    return torch.cat(made)


def most_rows(tables: TreeTables, chosen: Tensor) -> int:
    """The most rows of the weight that classes ``(n, k)`` take for one row of hidden states."""
    wide = tables.widest if tables.has_wide else 1
    return int(chosen.shape[-1]) * tables.most_paths * tables.longest * wide


def path_log_prob(
    nodes: Nodes,
    rows: Tensor,
    classes: Tensor,
    counted: Tensor | None = None,
    *,
    once: bool = False,
) -> Tensor:
    """Of classes ``(n, k)``; 0 in rows that do not count.

    ``once`` says that nobody will ask for second derivatives.
    """
    tables = nodes.tables
    if not tables.n_inner:
        return rows[:, :0].sum(-1, keepdim=True).expand(classes.shape)
    paths, there = tables.paths_of(classes)
    asked = None if counted is None else counted[:, None, None].expand_as(paths)
    if there is not None:
        asked = there if asked is None else asked & there
    edges, inside = tables.edges_of(paths, asked)
    n_paths = edges.shape[1] * edges.shape[2]
    made = edge_log_prob(nodes, rows, edges.flatten(1), inside.flatten(1), n_paths, once)
    sums = made.unflatten(1, tuple(edges.shape[1:])).sum(-1)
    if there is None:
        alone: Tensor = sums.squeeze(-1)
        return alone
    total = torch.logsumexp(torch.where(there, sums, -torch.inf), -1)
    return total if counted is None else torch.where(counted.unsqueeze(-1), total, 0.0)
