"""The loss of an adaptive softmax: the top on all rows, each cluster on the rows that are in it.

One operation for all of them. It sorts the rows by cluster, so that each small softmax has its
rows together; makes each of them with its gradients; and carries the gradient of a narrow row on
through the projection.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype, gradient_sum_dtype
from lastlayer.fused._products import set_weight_gradient
from lastlayer.fused.engine import Result, Wanted
from lastlayer.heads._group_loss import GroupProblem, group_loss, group_operation
from lastlayer.heads._shares import Share, share_out
from lastlayer.heads._small_softmax import shared_memory, softmax_rows


def adaptive_loss(
    hidden: Tensor,
    place: Tensor,
    counts: Tensor | None,
    top: tuple[Tensor, Tensor | None],
    clusters: Sequence[tuple[Tensor, Tensor]],
    *,
    chunk_rows: int | str,
    reduction: str,
    factor: float,
) -> Tensor:
    """``factor`` times minus the log-probability of the targets.

    Args:
        hidden: ``(n, d)``.
        place: of each target, ``(n,)``; -1 for a row that does not count.
        counts: which rows count, ``(n,)``; None for all of them.
        top: the weight of the top, one row a class and then one a cluster; and its biases.
        clusters: of each cluster the projection ``(width, d)`` and the weight ``(size, width)``.
        chunk_rows: as in :func:`lastlayer.fused.linear_cross_entropy`.
        reduction: "mean" over the rows that count, "sum" or "none".
        factor: of every loss.
    """
    starts = [top[0].shape[0] - len(clusters)]
    starts += [vectors.shape[0] for _, vectors in clusters]
    starts = list(accumulate(starts))[:-1]
    weights = [top[0], *(weight for pair in clusters for weight in pair)]
    problem = GroupProblem(
        "adaptive_loss", hidden, top[1], place, weights, (starts, str(chunk_rows))
    )  # fmt: skip
    return group_loss(problem, counts, reduction, factor)


@group_operation
def _adaptive_loss(
    hidden: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor | None,
    weights: Sequence[Tensor],
    starts: Sequence[int],
    chunk_rows: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Losses, and the gradients of hidden, bias and each weight (empty if not wanted).

    ``target`` has the place of each target; ``weights`` that of the top, and then a projection and
    the class vectors of each cluster.
    """
    # Dtypes are settled by now; autocast would still round the float32 sums on the way.
    with torch.autocast(hidden.device.type, enabled=False):
        return _losses(hidden, bias, target, row_scale, weights, starts, chunk_rows, wanted)


def _losses(
    hidden: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor | None,
    weights: Sequence[Tensor],
    starts: Sequence[int],
    chunk_rows: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    shares = share_out(hidden, target, row_scale, starts)
    rows: int | str = int(chunk_rows) if chunk_rows.isdecimal() else chunk_rows
    of_hidden, of_bias, of_top, *of_clusters = wanted
    n_rows = [len(shares.column), *(len(share.target) for share in shares.tails)]
    vectors_of_each = [weights[0], *weights[2::2]]
    memory = shared_memory(hidden, list(zip(n_rows, vectors_of_each, strict=True)), rows)
    top = softmax_rows(
        shares.hidden, weights[0], bias, shares.column, shares.row_scale,
        Wanted(of_hidden, of_top, of_bias), rows, memory, in_order=shares.rows is not None,
    )  # fmt: skip
    made = [top.bias, top.weight]
    pairs = zip(
        shares.tails, weights[1::2], weights[2::2], of_clusters[::2], of_clusters[1::2], strict=True
    )
    for share, projection, vectors, of_projection, of_vectors in pairs:
        made += _add_cluster(
            top, shares.hidden, share, projection, vectors, of_projection, of_vectors, rows, memory
        )
    losses, of_rows = top.loss, top.hidden
    if shares.rows is not None:
        losses = _back(losses, shares.rows, hidden.shape[0])
        of_rows = None if of_rows is None else _back(of_rows, shares.rows, hidden.shape[0])
    if made[0] is not None and bias is not None:
        made[0] = made[0].to(gradient_sum_dtype(bias.dtype))
    return [losses, *(hidden.new_empty(0) if each is None else each for each in (of_rows, *made))]


def _add_cluster(
    top: Result,
    hidden: Tensor,
    share: Share,
    projection: Tensor,
    vectors: Tensor,
    of_projection: bool,
    of_vectors: bool,
    chunk_rows: int | str,
    memory: Tensor | None,
) -> list[Tensor | None]:
    """Adds a cluster to the losses and to the gradient of hidden; its own two gradients."""
    rows, narrow_projection = hidden[share.part], projection.to(hidden.dtype)
    narrow = torch.mm(rows, narrow_projection.t())
    wanted = Wanted(top.hidden is not None or of_projection, of_vectors)
    below = softmax_rows(
        narrow, vectors, None, share.target, share.row_scale, wanted, chunk_rows, memory,
        in_order=share.inside is None,
    )  # fmt: skip
    loss = below.loss if share.inside is None else torch.where(share.inside, below.loss, 0.0)
    top.loss[share.part].add_(loss)
    if top.hidden is not None and below.hidden is not None:
        some = top.hidden[share.part]
        torch.addmm(some, below.hidden, narrow_projection, out=some)
    made = None
    if of_projection and below.hidden is not None:
        dtype = gradient_sum_dtype(projection.dtype)
        # No product of two half-precision matrices gives the other half precision.
        product = dtype if dtype == rows.dtype else accumulation_dtype(rows.dtype)
        made = torch.empty_like(projection, dtype=product)
        set_weight_gradient(made, below.hidden, rows)
        made = made.to(dtype)
    return [made, below.weight]


def _back(some: Tensor, rows: Tensor, n: int) -> Tensor:
    """From sorted rows to those of the batch, 0 where one does not count."""
    everything = some.new_zeros if len(rows) < n else some.new_empty
    return everything(n, *some.shape[1:]).index_copy_(0, rows, some)
