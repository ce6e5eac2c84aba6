"""The loss of a binary tree as one differentiable operation on the paths of the targets.

The forward pass leaves the slope of every node on a path, σ(score) - taken, and the gradient of
hidden, which needs the vectors that are at hand then. Both only have to be scaled by the upstream
gradient, so backward reads no vector, and can be repeated.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lastlayer.heads._tree_tables import TreeTables
from lastlayer.kernels import tree_path

# Room for as many nodes as are touched, which a CPU counts without a wait.
_COUNTED = -1


def path_loss(
    tables: TreeTables,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    ignore_index: int | None,
    reduction: str,
    sparse: bool,
) -> Tensor:
    """Minus the log-probability of the targets, reduced.

    Args:
        tables: of a tree in which every class is one path of binary nodes.
        hidden: ``(n, d)``.
        weight: ``(n_nodes, d)``.
        bias: ``(n_nodes,)``, or None.
        target: ``(n,)``.
        ignore_index: the target of rows that do not count, or None.
        reduction: "mean", "sum" or "none".
        sparse: whether the gradients of weight and bias have only the rows that are touched. On a
            GPU they have room for the most that there can be, and are not coalesced.
    """
    recording = torch.is_grad_enabled()
    wanted = (
        recording and hidden.requires_grad,
        recording and weight.requires_grad,
        recording and bias is not None and bias.requires_grad,
    )
    made: Tensor = _PathLoss.apply(
        hidden, weight, bias, target, tables.rank, tables.path_start, tables.path_edge,
        tables.longest, ignore_index, reduction, _room(tables, hidden) if sparse else None, wanted,
    )  # fmt: skip
    return made


class _PathLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        rank: Tensor,
        path_start: Tensor,
        path_edge: Tensor,
        longest: int,
        ignore_index: int | None,
        reduction: str,
        room: int | None,
        wanted: tuple[bool, bool, bool],
    ) -> Tensor:
        to_hidden, to_weight, to_bias = wanted
        losses, order, slopes, rows = tree_path.loss(
            "auto", hidden, weight, bias, target, rank, path_start, path_edge, ignore_index,
            longest, to_weight or to_bias, to_hidden,
        )  # fmt: skip
        counted = None
        if reduction == "mean":
            if ignore_index is None:
                counted = losses.new_full((), max(1, losses.shape[0]))
            else:
                counted = (target != ignore_index).sum().clamp(min=1)
        ctx.rest = ignore_index, reduction, room, wanted
        ctx.like = hidden.dtype, weight.dtype, weight.shape
        ctx.save_for_backward(target, counted, rows, hidden, slopes, order, path_start, path_edge)
        made: Tensor = losses if reduction == "none" else losses.sum()
        return made if counted is None else made / counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # Where an upstream gradient is a constant, `once_differentiable` would let this pass.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "backward: the loss of a binary tree has no second derivatives, and "
                "create_graph=True asks for them; use head.log_prob(hidden, classes)"
            )
        target, counted, rows, *_ = ctx.saved_tensors
        ignore_index, reduction, _, (to_hidden, to_weight, to_bias) = ctx.rest
        factor = grad if counted is None else grad / counted
        if reduction == "none" and ignore_index is not None:
            factor = torch.where(target == ignore_index, 0.0, factor)
        of_hidden = None
        if to_hidden:
            of_hidden = rows.new_empty(rows.shape, dtype=ctx.like[0])
            torch.mul(rows, factor.reshape(-1, 1), out=of_hidden)
        of_nodes = _node_gradients(ctx, factor) if to_weight or to_bias else (None, None)
        return of_hidden, *of_nodes, *(None,) * 9


def _node_gradients(ctx: Any, factor: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Of weight and bias."""
    target, _, _, hidden, slopes, order, path_start, path_edge = ctx.saved_tensors
    ignore_index, _, room, (_, to_weight, to_bias) = ctx.rest
    _, dtype, shape = ctx.like
    summed = slopes, factor, hidden, target, order, path_start, path_edge, ignore_index
    wanted = dtype, to_weight, to_bias
    if room is not None and not torch.compiler.is_compiling():
        most = None if room == _COUNTED else room
        touched, weight, bias = tree_path.to_touched_nodes("auto", *summed, *wanted, most)
        touched, once = touched.unsqueeze(0), most is None
        weight = _row_sparse(touched, weight, shape, once) if to_weight else None
        bias = _row_sparse(touched, bias, shape[:1], once) if to_bias else None
    else:
        weight, bias = tree_path.to_nodes("auto", *summed, shape[0], *wanted)
    return weight if to_weight else None, bias if to_bias else None


def _room(tables: TreeTables, hidden: Tensor) -> int:
    """How many nodes the rows may touch: of each level all of them, or one a row."""
    if hidden.device.type == "cpu":
        return _COUNTED
    return int(np.minimum(tables.level_sizes, len(hidden)).sum())


def _row_sparse(touched: Tensor, values: Tensor, shape: torch.Size, once: bool) -> Tensor:
    return torch.sparse_coo_tensor(
        touched, values, shape, is_coalesced=once, check_invariants=False
    )
