"""One softmax of several: by the engine of the fused losses, or without it where it is small."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lastlayer import kernels
from lastlayer._torch import accumulation_dtype, gradient_sum_dtype
from lastlayer.fused import engine
from lastlayer.fused._chunks import rows_at_a_time
from lastlayer.fused._products import scores_into
from lastlayer.fused._run_rows import run_rows
from lastlayer.fused._tiles import run_tiles, tiles_suit
from lastlayer.fused.engine import Result, Wanted

# On CUDA there are a multiple of so many classes: the matrix unit reads 16 bytes at a time, and one
# column for each cluster makes their number an odd one.
_ALIGNED = 8
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
    in_order: bool = False,
) -> Result:
    """Cross entropy and gradients of all rows; none of these where ``row_scale`` is None.

    ``memory`` is what :func:`shared_memory` gave; ``in_order`` says that rows are sorted by their
    targets.
    """
    wanted = Wanted() if row_scale is None else wanted
    n_scores = hidden.shape[0] * weight.shape[0]
    if memory is not None and n_scores <= len(memory) and weight.dtype == memory.dtype:
        scores = memory[:n_scores].view(hidden.shape[0], weight.shape[0])
        row_scale = row_scale if wanted.any else None
        return _plain(scores, hidden, weight, bias, target, row_scale, wanted)
    if tiles_suit(hidden, _PLAIN, chunk_rows, wanted):
        dtype, narrow = gradient_sum_dtype(weight.dtype), weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
        return run_tiles(
            hidden, narrow, bias, target, row_scale, None, wanted, _PLAIN, dtype, in_order
        )
    if weight.shape[0] % _ALIGNED and hidden.device.type == "cuda":
        return aligned_rows(hidden, weight, bias, target, row_scale, wanted, chunk_rows)
    return run_rows(
        hidden, weight, bias, target, row_scale, None, "cross_entropy", _PLAIN, 1.0, None,
        chunk_rows, wanted,
    )  # fmt: skip


def aligned_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor | None,
    wanted: Wanted,
    chunk_rows: int | str,
) -> Result:
    """As :func:`lastlayer.fused.engine.run`, with a few more classes, whose vectors are 0.

    No row counts them: their scores are 0, and stay so where those of the others become slopes.
    """
    (n, dtype), n_classes = (hidden.shape[0], hidden.dtype), weight.shape[0]
    gradient_dtype, more = gradient_sum_dtype(weight.dtype), -n_classes % _ALIGNED
    weight = pad(weight.to(dtype), (0, 0, 0, more))
    bias = None if bias is None else pad(bias.to(dtype), (0, more))
    step = rows_at_a_time(chunk_rows, hidden, len(weight))
    gradients = engine.Gradients(hidden, weight, wanted, step, gradient_dtype)
    memory = hidden.new_empty(min(n, step), len(weight))
    losses = []
    for first in range(0, max(1, n), step):
        part = slice(first, min(n, first + step))
        scores = scores_into(memory, hidden[part], weight, bias)
        place = target[part].unsqueeze(-1)
        exact = kernels.products.scores("auto", hidden[part], weight, bias, place)
        scale = row_scale[part] if wanted.any and row_scale is not None else None
        loss, *_ = kernels.softmax_rows.forward_(
            "auto", scores[:, :n_classes], target[part], exact.squeeze(-1), scale, None, *_PLAIN,
            False,
        )  # fmt: skip
        losses.append(loss)
        if scale is not None:
            gradients.add(part, scores)
    loss = losses[0] if len(losses) == 1 else torch.cat(losses)
    of_hidden, of_weight, of_bias = gradients.finished()
    return Result(
        loss,
        (),
        of_hidden,
        None if of_weight is None else of_weight[:n_classes],
        None if of_bias is None else of_bias[:n_classes],
    )


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
    if hidden.device.type != "cpu" or hidden.dtype != accumulation_dtype(hidden.dtype):
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
