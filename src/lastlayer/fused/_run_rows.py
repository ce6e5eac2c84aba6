"""The rows of a loss on a linear layer, by the way that suits them: tiles, slabs or chunks."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype, gradient_sum_dtype, host_sync_allowed
from lastlayer.fused import engine
from lastlayer.fused._chunks import rows_at_a_time
from lastlayer.fused._cross_entropy_rows import cross_entropy_rows
from lastlayer.fused._entmax_rows import entmax_rows
from lastlayer.fused._slabs import run_slabs, slabs_suit
from lastlayer.fused._tiles import run_tiles, tiles_suit
from lastlayer.fused._topk_rows import topk_rows
from lastlayer.fused.engine import Result, RowLoss, Wanted

STATISTICS = "+statistics"
ROW_LOSSES: dict[str, Callable[..., RowLoss]] = {
    "cross_entropy": cross_entropy_rows,
    "cross_entropy" + STATISTICS: partial(cross_entropy_rows, statistics=True),
    "entmax": entmax_rows,
    "topk_softmax": topk_rows,
}


def run_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor | None,
    class_weight: Tensor | None,
    loss: str,
    options: Sequence[float],
    copies: float,
    ignore_index: int | None,
    chunk_rows: int | str,
    wanted: Wanted,
) -> Result:
    """All rows by the way that suits them, ignored ones left out."""
    kept, ignored = kept_rows(target, ignore_index), None
    if ignore_index is not None and not host_sync_allowed(target):
        ignored = target == ignore_index
        target = torch.where(ignored, 0, target)
    n = hidden.shape[0]
    weight_dtype = gradient_sum_dtype(weight.dtype)
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    if kept is not None:
        hidden, target = hidden[kept], target[kept]
        row_scale = None if row_scale is None else row_scale[kept]
    if class_weight is not None:
        dtype = accumulation_dtype(hidden.dtype)
        class_weight = class_weight.to(dtype)
    copies *= engine.PRECISE_COPIES if wanted.precise(hidden) else 1.0
    rows = rows_at_a_time(chunk_rows, hidden, weight.shape[0], copies)
    problem = hidden, weight, bias, target, row_scale
    plain = loss == "cross_entropy"
    # Dtypes are settled by now; autocast would still round the float32 sums on the way.
    with torch.autocast(hidden.device.type, enabled=False):
        if plain and tiles_suit(hidden, options, chunk_rows, wanted):
            result = run_tiles(*problem, class_weight, wanted, options, weight_dtype)
        elif (
            plain
            and row_scale is not None
            and slabs_suit(hidden, options, chunk_rows, rows, wanted)
        ):
            result = run_slabs(
                hidden, weight, bias, target, row_scale, class_weight, wanted, options,
                weight_dtype, str(chunk_rows),
            )  # fmt: skip
        else:
            row_loss = ROW_LOSSES[loss](class_weight, *options)
            result = engine.run(row_loss, *problem, wanted, rows, weight_dtype)
    if ignored is not None:
        cleared = tuple(each.masked_fill(ignored, 0) for each in result.statistics)
        result = result._replace(statistics=cleared)
    return result if kept is None else _spread(result, kept, n)


def kept_rows(target: Tensor, ignore_index: int | None) -> Tensor | None:
    """The rows that count, or None for all of them.

    The host has to know how many there are, and waits for it once. While a CUDA graph is captured
    it cannot: ignored rows are then computed with a factor of 0.
    """
    if ignore_index is None or not host_sync_allowed(target):
        return None
    kept = (target != ignore_index).nonzero().squeeze(-1)
    return None if kept.shape[0] == target.shape[0] else kept


def _spread(result: Result, kept: Tensor, n: int) -> Result:
    """A result for the rows that were kept as one for all rows, 0 elsewhere."""

    def all_rows(some: Tensor) -> Tensor:
        everything = some.new_zeros(n, *some.shape[1:])
        return everything.index_copy_(0, kept, some)

    return result._replace(
        loss=all_rows(result.loss),
        statistics=tuple(all_rows(each) for each in result.statistics),
        hidden=None if result.hidden is None else all_rows(result.hidden),
    )
