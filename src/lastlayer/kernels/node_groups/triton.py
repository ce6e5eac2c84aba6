"""Log-probabilities of chosen children and their gradients, node by node together, on CUDA.

An *entry* is a row of hidden states at a node. Entries are sorted by node; those of one node are a
group, whose scores are one small product. A list of tiles makes one launch of all groups.

* ``scores_of_tiles`` makes the scores of all groups and keeps them: as many numbers as the nodes
  of each entry have children, where the vectors would be ``in_features`` times as many.
* ``log_probs_of_entries`` has a program for each entry.
* ``gradient_of_rows`` and ``gradient_of_children`` turn scores into slopes where they load them.

Every number is written by one program, which adds up in a fixed order.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer.kernels._triton import cdiv, next_power_of_2
from lastlayer.kernels.node_groups._kernels_triton import (
    gradient_of_children,
    gradient_of_rows,
    log_probs_of_entries,
    scores_of_tiles,
)
from lastlayer.kernels.node_groups._plan_triton import entries_of_targets, losses_of_targets
from lastlayer.kernels.node_groups.plan import make_plan
from lastlayer.kernels.node_groups.sizes import CHILDREN, ROWS, Plan, TreeSizes, most_scores

# Numbers of a vector that a program has at a time: while it adds them up, and of a gradient.
SUMMED, HELD = 128, 256
# Rows of a large group that are added up at a time.
MANY = 32
# Numbers of the gradients of all entries that are held at once.
MOST_PARTS = 1 << 26


class Paths(NamedTuple):
    """Tables of a tree in which every class has one path."""

    start: Tensor
    edge: Tensor
    edge_node: Tensor
    child_start: Tensor


class Kept(NamedTuple):
    """What backward needs."""

    plan: Plan
    scores: Tensor
    lse: Tensor


def entries_of(
    target: Tensor, paths: Paths, longest: int, n_inner: int, ignore_index: int | None
) -> tuple[Tensor, Tensor]:
    """The nodes on the path of each target and the children taken, ``(n, longest)``, int32.

    Nodes are ``n_inner`` beyond the end of a path, in rows that are ignored, and in rows whose
    target is no class.
    """
    n = target.shape[0]
    node, position = torch.empty(2, n, longest, device=target.device, dtype=torch.int32).unbind()
    levels = min(32, next_power_of_2(longest))
    entries_of_targets[(cdiv(n, 32), cdiv(longest, levels))](
        target, *paths, node, position, n, longest, len(paths.start) - 1, n_inner,
        **_ignoring(ignore_index), ROWS=32, LEVELS=levels, enable_fp_fusion=True,
    )  # fmt: skip
    return node, position


def losses_of(
    target: Tensor, log_probs: Tensor, n_classes: int, ignore_index: int | None
) -> Tensor:
    """Minus the sum of log-probabilities ``(n, path)``; 0 if ignored, NaN if it is no class."""
    n, path = log_probs.shape
    losses = torch.empty(n, device=target.device, dtype=torch.float32)
    losses_of_targets[(cdiv(n, 64),)](
        target, log_probs, losses, n, path, n_classes, **_ignoring(ignore_index), ROWS=64,
        LEVELS=min(32, next_power_of_2(path)), enable_fp_fusion=True,
    )  # fmt: skip
    return losses


def _ignoring(ignore_index: int | None) -> dict[str, Any]:
    return dict(ignored=ignore_index or 0, IGNORES=ignore_index is not None)


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    node: Tensor,
    position: Tensor,
    row_start: Tensor,
    sizes: TreeSizes,
) -> tuple[Tensor, Kept]:
    """Of the children at ``position`` given their nodes, ``(n, path)``, float32.

    Args:
        hidden: ``(n, d)``.
        weight: ``(n_rows, d)``: one row for a node of two children, one a child for others.
        bias: ``(n_rows,)``, or None.
        node: ``(n, path)``, int32; ``n_inner`` where nothing is asked for, and the result is 0.
        position: ``(n, path)``, int32.
        row_start: the first row of each node, and the end, ``(n_inner + 1,)``, int64.
        sizes: of the tree.
    """
    (n, path), depth = node.shape, hidden.shape[1]
    plan = make_plan(node.reshape(-1), row_start, sizes, n)
    n_groups = plan.groups.shape[1]
    hidden, weight = _in_rows(hidden), _in_rows(weight)
    scores = torch.empty(most_scores(n, sizes), device=hidden.device, dtype=torch.float32)
    made = torch.empty(n, path, device=hidden.device, dtype=torch.float32)
    lse = torch.empty(n * path, device=hidden.device, dtype=torch.float32)
    scores_of_tiles[(len(plan.score_tiles),)](
        hidden, weight, bias, plan.entry, plan.groups, plan.ends, plan.score_tiles, scores,
        n_groups, path, depth, hidden.stride(0), weight.stride(0), ROWS=ROWS, CHILDREN=CHILDREN,
        DEPTH=SUMMED, BIASED=bias is not None, WIDE=_wide(hidden, weight), num_warps=4,
        num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    block = min(1024, max(16, next_power_of_2(sizes.widest)))
    log_probs_of_entries[(n * path,)](
        scores, position.reshape(-1), plan.entry, plan.group, plan.groups, plan.ends, made, lse,
        n_groups, BLOCK=block, num_warps=1 if block <= 256 else 4, enable_fp_fusion=True,
    )  # fmt: skip
    return made, Kept(plan, scores, lse)


def to_hidden(hidden: Tensor, weight: Tensor, position: Tensor, grad: Tensor, kept: Kept) -> Tensor:
    """The gradient of hidden ``(n, d)``, from that of the log-probabilities.

    ``grad`` is ``(n, path)``, or ``(n,)`` where all entries of a row have the same.
    """
    (n, path), depth = position.shape, hidden.shape[1]
    plan, n_groups = kept.plan, kept.plan.groups.shape[1]
    weight, grad = _in_rows(weight), grad.contiguous()
    made = torch.empty_like(hidden)
    # The entries of a row are on different groups: each has a part of its own.
    step = max(HELD, MOST_PARTS // max(1, n * path) // HELD * HELD)
    for first in range(0, depth, step):
        last = min(depth, first + step)
        parts = grad.new_zeros(n, path, last - first, dtype=torch.float32)
        gradient_of_rows[(len(plan.row_tiles), cdiv(last - first, HELD))](
            weight, kept.scores, position.reshape(-1), plan.entry, kept.lse, grad, plan.groups,
            plan.ends, plan.row_tiles, parts, n_groups, _shared(grad, path), first, last - first,
            last, weight.stride(0), ROWS=ROWS, CHILDREN=CHILDREN, DEPTH=HELD,
            WIDE=_wide(hidden, weight), num_warps=4, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
        made[:, first:last] = parts.sum(1)
    return made


def to_children(
    hidden: Tensor,
    weight: Tensor,
    position: Tensor,
    grad: Tensor,
    kept: Kept,
    sparse: bool,
    to_weight: bool,
    to_bias: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of weight and bias, empty where not asked for; and of which rows they are.

    All rows, and None, unless ``sparse``: then the rows that were touched, ascending, whose
    number the host waits for.
    """
    path, depth = position.shape[1], hidden.shape[1]
    plan, n_groups = kept.plan, kept.plan.groups.shape[1]
    hidden, grad = _in_rows(hidden), grad.contiguous()
    rows = int(plan.ends[4, -1]) if sparse else weight.shape[0]
    new = weight.new_empty if sparse else weight.new_zeros
    weight_gradient = new(rows if to_weight else 0, depth)
    bias_gradient = new(rows if to_bias else 0)
    touched = torch.empty(rows, dtype=torch.int64, device=grad.device) if sparse else None
    # Row factors such as 1/n would vanish in float16: they are brought to 1 and back.
    scale = grad.abs().amax().clamp_min(1e-30) if hidden.dtype == torch.float16 else None
    wide = _wide(hidden, weight)
    # Numbers in float32 take twice the registers.
    held = HELD // 2 if wide else HELD
    blocks = cdiv(depth, held) if to_weight else 1
    gradient_of_children[(len(plan.child_tiles), blocks)](
        hidden, kept.scores, position.reshape(-1), plan.entry, kept.lse, grad, plan.groups,
        plan.ends, plan.child_tiles, weight_gradient, bias_gradient, touched, scale, n_groups, path,
        _shared(grad, path), depth, hidden.stride(0), ROWS=ROWS, MANY=MANY, CHILDREN=CHILDREN,
        DEPTH=held, PACKED=sparse, TO_WEIGHT=to_weight, TO_BIAS=to_bias, SCALED=scale is not None,
        WIDE=wide, num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
    return touched, weight_gradient, bias_gradient


def _shared(grad: Tensor, path: int) -> int:
    """How many entries have the same number from upstream."""
    return path if grad.dim() == 1 else 1


def _wide(hidden: Tensor, weight: Tensor) -> bool:
    """Whether products are in float32: unless both are of the same half precision."""
    return hidden.dtype != weight.dtype or hidden.dtype == torch.float32


def _in_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
