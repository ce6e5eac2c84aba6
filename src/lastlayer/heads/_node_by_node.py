"""Log-probabilities of children by one product a node, with all rows that ask for it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from lastlayer.heads._tree_tables import TreeTables


def log_prob_by_node(
    tables: TreeTables,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    of_row: Tensor,
    node: Tensor,
    position: Tensor,
    sparse: bool,
) -> Tensor:
    """Of one child an entry, ``(m,)``; differentiable once.

    Args:
        tables: the tree's.
        weight: the vectors of all nodes.
        bias: their biases, or None.
        rows: ``(n, d)``, float32 or float64.
        of_row: the row of each entry, ``(m,)``.
        node: the node of each entry, ``(m,)``.
        position: which of its children, ``(m,)``.
        sparse: whether gradients of parameters are row-sparse.
    """
    made: Tensor = _ByNode.apply(rows, weight, bias, of_row, node, position, tables, sparse)
    return made


def block_scores(weight: Tensor, bias: Tensor | None, rows: Tensor, block: slice) -> Tensor:
    """Of some rows of the weight, next to each other, for all rows."""
    of_block = None if bias is None else bias[block].to(rows.dtype)
    return linear(rows, weight[block].to(rows.dtype), of_block)


def by_node(tables: TreeTables, node: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows of the weight of each node, and the entries that ask for it."""
    ordered, order = node.sort()
    asked, sizes = torch.unique_consecutive(ordered, return_counts=True)
    bounds = torch.stack([tables.row_start[asked], tables.row_start[asked + 1]]).tolist()
    for first, last, entries in zip(*bounds, order.split(sizes.tolist()), strict=True):
        yield slice(first, last), entries


def refuse_second_derivatives() -> None:
    """Called where a backward pass of wide nodes begins."""
    # Where an upstream gradient is a constant, `once_differentiable` would let it pass.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "backward: paths through wide nodes have no second derivatives, and create_graph=True "
            "asks for them; use head.log_prob(hidden), of all classes, which has them"
        )


class _ByNode(torch.autograd.Function):
    """Log-probability of one child an entry; backward makes the scores of each node again."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        of_row: Tensor,
        node: Tensor,
        position: Tensor,
        tables: TreeTables,
        sparse: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, bias, of_row, node, position)
        ctx.tables, ctx.sparse = tables, sparse
        made = rows.new_empty(len(node))
        for block, entries in by_node(tables, node):
            scores = block_scores(weight, bias, rows[of_row[entries]], block)
            chosen = position[entries].unsqueeze(-1)
            made[entries] = torch.log_softmax(scores, -1).gather(-1, chosen).squeeze(-1)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        with torch.autocast(grad.device.type, enabled=False):
            return _ByNode._gradients(ctx, grad)

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, of_row, node, position = ctx.saved_tensors
        rows_grad = torch.zeros_like(rows)
        picked, vectors, biases = [], [], []
        for block, entries in by_node(ctx.tables, node):
            mine = of_row[entries]
            hidden = rows[mine]
            upstream = grad[entries].unsqueeze(-1)
            scores = torch.softmax(block_scores(weight, bias, hidden, block), -1).mul_(-upstream)
            scores.scatter_add_(-1, position[entries].unsqueeze(-1), upstream)
            rows_grad.index_add_(0, mine, scores @ weight[block].to(rows.dtype))
            picked.append(torch.arange(block.start, block.stop, device=grad.device))
            vectors.append((scores.t() @ hidden).to(weight.dtype))
            biases.append(scores.sum(0).to(weight.dtype))
        weight_grad = _spread(picked, vectors, weight, ctx.sparse)
        bias_grad = None if bias is None else _spread(picked, biases, bias, ctx.sparse)
        return rows_grad, weight_grad, bias_grad, *(None,) * 5


def _spread(picked: list[Tensor], parts: list[Tensor], like: Tensor, sparse: bool) -> Tensor:
    """Parts at rows that are picked, each at most once, of a tensor that is 0 elsewhere."""
    at = torch.cat([*picked, torch.empty(0, dtype=torch.int64, device=like.device)])
    values = torch.cat([*parts, like.new_empty(0, *like.shape[1:])])
    if sparse:
        return torch.sparse_coo_tensor(
            at.unsqueeze(0), values, like.shape, is_coalesced=True, check_invariants=False
        )
    return torch.zeros_like(like).index_copy_(0, at, values)
