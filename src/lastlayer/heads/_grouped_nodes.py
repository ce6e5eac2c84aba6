"""Log-probabilities of children at many nodes on CUDA: the rows that are at one node together.

Operations of :mod:`torch.library` around :mod:`lastlayer.kernels.node_groups`, so that
torch.compile sees one node. Nothing waits for the device, but row-sparse gradients for their size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lastlayer._torch import host_sync_allowed, is_eager
from lastlayer.heads._node_by_node import refuse_second_derivatives
from lastlayer.heads._tree_tables import TreeTables
from lastlayer.kernels import selected
from lastlayer.kernels.node_groups import (
    Plan,
    TreeSizes,
    most_groups,
    most_scores,
    most_tiles,
)

# Scores that are held; where there would be more, backward makes those of each part again.
_HELD_SCORES = 1 << 28


def groups_suit(tables: TreeTables, rows: Tensor) -> bool:
    """Whether there is a kernel for these rows: on CUDA, but not for float64."""
    return tables.has_wide and selected("tree_path_loss", rows.device.type, rows.dtype) == "triton"


def grouped_log_prob(
    tables: TreeTables,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    node: Tensor,
    position: Tensor,
    paths: int,
    sparse: bool,
) -> Tensor:
    """Of the children at ``position`` of ``node``, both ``(n, m)``; once differentiable.

    Args:
        tables: of the tree.
        weight: ``(n_rows, d)``.
        bias: ``(n_rows,)``, or None.
        rows: ``(n, d)``, at least one.
        node: ``n_inner`` where nothing is asked for: the result is 0 there.
        position: the place of each child among those of its node.
        paths: how many paths the nodes of a row are of.
        sparse: whether gradients of weight and bias have only the rows that are touched.
    """
    sizes = _sizes(tables, paths)
    given = weight, bias, tables.row_start, sizes, sparse
    n = rows.shape[0]
    step = max(1, _HELD_SCORES // most_scores(1, sizes))
    if n <= step:
        made: Tensor = _GroupedLogProb.apply(rows, node, position, *given)
        return made
    return torch.cat([
        checkpoint(
            _GroupedLogProb.apply, rows[first : first + step], node[first : first + step],
            position[first : first + step], *given, use_reentrant=False, preserve_rng_state=False,
        )
        for first in range(0, n, step)
    ])  # fmt: skip


def losses_suit(tables: TreeTables, rows: Tensor) -> bool:
    """Whether :func:`grouped_losses` can be taken: its paths need no list of torch's making."""
    if not groups_suit(tables, rows) or tables.overlaps or not is_eager(rows):
        return False
    return 0 < len(rows) * most_scores(1, _sizes(tables, 1)) <= _HELD_SCORES


def grouped_losses(
    tables: TreeTables,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    target: Tensor,
    ignore_index: int | None,
    sparse: bool,
) -> Tensor:
    """Minus the log-probability of targets ``(n,)``, where :func:`losses_suit`."""
    made: Tensor = _GroupedLosses.apply(rows, target, weight, bias, tables, ignore_index, sparse)
    return made


def _sizes(tables: TreeTables, paths: int) -> TreeSizes:
    return TreeSizes(tables.n_inner, tables.n_rows, tables.widest, tables.most_scores, paths)


class _GroupedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        target: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tables: TreeTables,
        ignore_index: int | None,
        sparse: bool,
    ) -> Tensor:
        from lastlayer.kernels.node_groups import triton as kernel

        paths = kernel.Paths(
            tables.path_start, tables.path_edge, tables.edge_node, tables.child_start
        )
        target = target.contiguous()
        node, position = kernel.entries_of(
            target, paths, tables.longest, tables.n_inner, ignore_index
        )
        made, *kept = log_probs(
            rows, weight, bias, node, position, tables.row_start, _sizes(tables, 1)
        )
        ctx.save_for_backward(rows, weight, bias, position, *kept)
        ctx.sparse = sparse
        return kernel.losses_of(target, made, tables.n_classes, ignore_index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        of_rows, of_weight, of_bias = _all_gradients(ctx, -grad, needed[0], needed[2], needed[3])
        return of_rows, None, of_weight, of_bias, None, None, None


class _GroupedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        node: Tensor,
        position: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        row_start: Tensor,
        sizes: TreeSizes,
        sparse: bool,
    ) -> Tensor:
        position = position.to(torch.int32)
        run = log_probs if is_eager(rows) else _log_probs
        made, *kept = run(rows, weight, bias, node.to(torch.int32), position, row_start, sizes)
        ctx.save_for_backward(rows, weight, bias, position, *kept)
        ctx.sparse = sparse
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        of_rows, of_weight, of_bias = _all_gradients(ctx, grad, needed[0], needed[3], needed[4])
        return of_rows, None, None, of_weight, of_bias, None, None, None


def _all_gradients(
    ctx: Any, grad: Tensor, to_rows: bool, to_weight: bool, to_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of rows, weight and bias, from that of each entry, or of each row."""
    refuse_second_derivatives()
    rows, weight, bias, position, *kept = ctx.saved_tensors
    wanted = to_rows, to_weight, bias is not None and to_bias
    sparse = ctx.sparse and not torch.compiler.is_compiling() and host_sync_allowed(rows)
    run = gradients if is_eager(rows) else _gradients
    of_rows, of_weight, of_bias, touched = run(rows, weight, position, grad, kept, sparse, wanted)
    if sparse:
        of_weight = _row_sparse(touched, of_weight, weight.shape)
        of_bias = _row_sparse(touched, of_bias, weight.shape[:1])
    return (
        of_rows if wanted[0] else None,
        of_weight if wanted[1] else None,
        of_bias if wanted[2] else None,
    )


def log_probs(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    node: Tensor,
    position: Tensor,
    row_start: Tensor,
    sizes: Sequence[int],
) -> list[Tensor]:
    """``(n, m)``, and what :func:`gradients` needs."""
    from lastlayer.kernels.node_groups import triton as kernel

    made, kept = kernel.log_probs(rows, weight, bias, node, position, row_start, TreeSizes(*sizes))
    return [made, kept.scores, kept.lse, *kept.plan]


def gradients(
    rows: Tensor,
    weight: Tensor,
    position: Tensor,
    grad: Tensor,
    kept: Sequence[Tensor],
    sparse: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Of rows, weight and bias, and the rows of the weight if ``sparse``; empty if not wanted."""
    from lastlayer.kernels.node_groups import triton as kernel

    scores, lse, *plan = kept
    all_kept = kernel.Kept(Plan(*plan), scores, lse)
    empty = rows.new_empty(0)
    of_rows, touched, of_weight, of_bias = empty, None, empty.clone(), empty.clone()
    if wanted[0]:
        of_rows = kernel.to_hidden(rows, weight, position, grad, all_kept)
    if wanted[1] or wanted[2]:
        touched, of_weight, of_bias = kernel.to_children(
            rows, weight, position, grad, all_kept, sparse, wanted[1], wanted[2]
        )
    return [of_rows, of_weight, of_bias, empty.clone() if touched is None else touched]


_log_probs = torch.library.custom_op("lastlayer::node_groups", mutates_args=())(log_probs)
_gradients = torch.library.custom_op("lastlayer::node_groups_gradients", mutates_args=())(gradients)


@_log_probs.register_fake
def _(
    rows: Tensor,
    _weight: Tensor,
    _bias: Tensor | None,
    node: Tensor,
    _position: Tensor,
    _row_start: Tensor,
    sizes: Sequence[int],
) -> list[Tensor]:
    bounds, (n, path) = TreeSizes(*sizes), node.shape
    m = n * path
    n_groups = most_groups(m, bounds)
    ids = node.new_empty
    return [
        rows.new_empty(n, path, dtype=torch.float32),
        rows.new_empty(most_scores(n, bounds), dtype=torch.float32),
        rows.new_empty(m, dtype=torch.float32),
        ids(m, dtype=torch.int64),
        ids(m),
        ids(5, n_groups, dtype=torch.int64),
        ids(5, n_groups, dtype=torch.int64),
        *(ids(most) for most in most_tiles(m, n, bounds)),
    ]


@_gradients.register_fake
def _(
    rows: Tensor,
    weight: Tensor,
    _position: Tensor,
    _grad: Tensor,
    _kept: Sequence[Tensor],
    _sparse: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:
    return [
        rows.new_empty(rows.shape if wanted[0] else 0),
        weight.new_empty(weight.shape if wanted[1] else 0),
        weight.new_empty(weight.shape[0] if wanted[2] else 0),
        rows.new_empty(0),
    ]


def _row_sparse(touched: Tensor, values: Tensor, shape: torch.Size) -> Tensor | None:
    if not values.numel() and touched.numel():
        return None
    return torch.sparse_coo_tensor(
        touched.unsqueeze(0), values, shape, is_coalesced=True, check_invariants=False
    )
