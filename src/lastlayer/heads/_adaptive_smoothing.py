"""Label smoothing of an adaptive softmax: the part of the loss in which every class is a target."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from lastlayer._torch import accumulation_dtype
from lastlayer.fused import linear_cross_entropy
from lastlayer.heads._group_loss import row_scale
from lastlayer.heads._ranked import IGNORED


def spread_loss(
    hidden: Tensor,
    counts: Tensor | None,
    top: tuple[Tensor, Tensor | None],
    clusters: Sequence[tuple[Tensor, Tensor]],
    *,
    chunk_rows: int | str,
    reduction: str,
    factor: float,
) -> Tensor:
    """``factor`` times minus the mean log-probability of all classes: all clusters on all rows.

    Arguments are those of :func:`lastlayer.heads._adaptive_loss.adaptive_loss`; ``counts`` says
    which rows do, None for all.
    """
    sizes = [vectors.shape[0] for _, vectors in clusters]
    n_columns = top[0].shape[0]
    n_classes = n_columns - len(sizes) + sum(sizes)
    # The column of a cluster counts once for each of its classes.
    times = hidden.new_ones(n_columns, dtype=accumulation_dtype(hidden.dtype))
    for column, size in enumerate(sizes, n_columns - len(sizes)):
        times[column] = size
    target = torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    if counts is not None:
        target = torch.where(counts, target, IGNORED)
        # A NaN in a row that does not count would reach the gradient of a projection.
        hidden = torch.where(counts.unsqueeze(-1), hidden, 0.0)
    weight = row_scale(hidden, counts, reduction, factor / n_classes)

    def spread(rows: Tensor, vectors: Tensor, bias: Tensor | None, n: int, **more: Any) -> Tensor:
        return linear_cross_entropy(
            rows,
            vectors,
            target,
            bias,
            ignore_index=None if counts is None else IGNORED,
            reduction="none" if reduction == "none" else "sum",
            label_smoothing=1.0,
            row_weight=weight * n,
            chunk_rows=chunk_rows,
            **more,
        )

    total = spread(hidden, *top, n_columns, class_weight=times)
    for (projection, vectors), size in zip(clusters, sizes, strict=True):
        total = total + spread(linear(hidden, projection), vectors, None, size)
    return total
