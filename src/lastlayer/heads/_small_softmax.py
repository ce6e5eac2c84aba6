"""One softmax of several: by the engine of the fused losses, or without it where it is small."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.fused._chunks import rows_at_a_time
from lastlayer.fused._loss import run_rows
from lastlayer.fused._products import scores_into
from lastlayer.fused.engine import Result, Wanted
from lastlayer.heads._ranked import wide_dtype

# No smoothing, no z loss, no soft cap, a temperature of 1.
_PLAIN = 0.0, 0.0, 0.0, 1.0


def softmax_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor | None,
    wanted: Wanted,
    chunk_rows: int | str,
    memory: Tensor | None,
) -> Result:
    """Cross entropy and gradients of all rows; none of these where ``row_scale`` is None.

    ``memory`` is what :func:`shared_memory` gave.
    """
    wanted = Wanted() if row_scale is None else wanted
    n_scores = hidden.shape[0] * weight.shape[0]
    if memory is not None and n_scores <= len(memory) and weight.dtype == memory.dtype:
        scores = memory[:n_scores].view(hidden.shape[0], weight.shape[0])
        row_scale = row_scale if wanted.any else None
        return _plain(scores, hidden, weight, bias, target, row_scale, wanted)
    return run_rows(
        hidden, weight, bias, target, row_scale, None, "cross_entropy", _PLAIN, 1.0, None,
        chunk_rows, wanted,
    )  # fmt: skip


def shared_memory(
    hidden: Tensor, softmaxes: Sequence[tuple[int, Tensor]], chunk_rows: int | str
) -> Tensor | None:
    """For the scores of several softmaxes, one after the other; None where each needs the engine.

    Small ones on a CPU, in full precision, need neither chunks, nor tiles, nor wider sums. Fresh
    memory for each of them would cost more than the product that fills it.

    Args:
        hidden: rows of the dtype and the device of all.
        softmaxes: how many rows each has, and its class vectors.
        chunk_rows: those that do not fit one chunk need the engine.
    """
    if hidden.device.type != "cpu" or hidden.dtype != wide_dtype(hidden):
        return None
    largest = 0
    for n, vectors in softmaxes:
        n_classes, width = vectors.shape
        if n <= rows_at_a_time(chunk_rows, hidden[:n, :width], n_classes):
            largest = max(largest, n * n_classes)
    return hidden.new_empty(largest)


def _plain(
    scores: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor | None,
    wanted: Wanted,
) -> Result:
    """The three products and the row loss."""
    scores_into(scores, hidden, weight, bias)
    at_target = scores.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    loss, *_ = kernels.softmax_rows.forward_(
        "auto", scores, target, at_target, row_scale, None, *_PLAIN, False
    )
    return Result(
        loss,
        (),
        torch.mm(scores, weight) if wanted.hidden else None,
        torch.mm(scores.t(), hidden) if wanted.weight else None,
        scores.sum(0) if wanted.bias else None,
    )
