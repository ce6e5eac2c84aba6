"""What the engines of multi-label losses on scores share: rows, the reduction, and its factor."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lastlayer import kernels
from lastlayer._labels import rows_of_mask
from lastlayer._torch import accumulation_dtype
from lastlayer.fused.function import Call, Engine, Grads, Operands, Result


class LabelEngine(Engine):
    """A loss of scores, the first operand, with labels, and a mask, the last.

    Forward leaves a few numbers per row at most; backward reads scores and labels again.
    """

    recomputes_unreduced = False
    statistics_per_row = 0

    def losses(self, call: Call) -> tuple[Tensor, Tensor | None, Tensor]:
        """The loss of each row, what backward needs of it, and which rows count under a mask."""
        raise NotImplementedError

    def gradient(self, call: Call, pieces: Sequence[Any], factor: Tensor) -> Tensor:
        """The gradient of the scores, ``(rows, n)``; one factor for all rows, or one for each."""
        raise NotImplementedError

    def slope(self, call: Call) -> Tensor:
        """The derivative of each row's loss, ``(rows, n)``, which can be differentiated further."""
        raise NotImplementedError

    def compute(self, call: Call) -> Result:
        scores, reduction = call.operands[0], call.reduction
        losses, stats, counts = self.losses(call)
        pieces = (stats if call.wanted[0] else None,) if self.statistics_per_row else ()
        if reduction == "none":
            return Result(losses if scores.dim() == 2 else losses.view(scores.shape[:-1]), pieces)
        if reduction == "sum":
            return Result(losses.sum(), pieces)
        weights = None if call.operands[-1] is None else counts
        loss, share = kernels.products.weighted_mean("auto", losses, weights)
        return Result(loss, pieces, (), share)

    def fake(self, call: Call) -> Result:
        scores, reduction = call.operands[0], call.reduction
        batch, dtype = scores.shape[:-1], accumulation_dtype(scores.dtype)
        loss = scores.new_empty(batch if reduction == "none" else (), dtype=dtype)
        pieces: tuple[Tensor | None, ...] = ()
        if self.statistics_per_row:
            shape = self.statistics_per_row, batch.numel()
            pieces = (scores.new_empty(shape, dtype=dtype) if call.wanted[0] else None,)
        share = scores.new_empty((), dtype=dtype) if reduction == "mean" else None
        return Result(loss, pieces, (), share)

    def finish(
        self, call: Call, pieces: Sequence[Any], factor: Tensor | None, reusable: bool
    ) -> Grads:
        del reusable  # what is kept stays
        scores = call.operands[0]
        if factor is None or not call.wanted[0]:
            return [None]
        made = self.gradient(call, pieces, factor)
        return [made if scores.dim() == 2 else made.view(scores.shape)]

    def differentiable(self, call: Call, grad: Tensor) -> Grads:
        scores, mask = call.operands[0], call.operands[-1]
        n_rows = scores.shape[:-1].numel()
        if call.reduction == "mean":
            rows = rows_of_mask(mask, scores, n_rows)
            grad = grad / (max(1, n_rows) if rows is None else rows.any(-1).sum().clamp(min=1))
        row = grad.reshape(-1, 1) if grad.dim() else grad.expand(n_rows, 1)
        slope = self.slope(call) * row
        return [slope.masked_fill(row == 0, 0.0).reshape(scores.shape)]


def as_rows(operands: Operands) -> tuple[Any, ...]:
    """Scores and target as ``(rows, n)``, what comes behind them, and the mask as rows."""
    scores, target, *others, mask = operands
    n_rows, n = scores.shape[:-1].numel(), scores.shape[-1]
    rows_mask = rows_of_mask(mask, scores, n_rows)
    if scores.dim() != 2:
        scores = scores.reshape(n_rows, n)
        target = None if target is None else target.reshape(n_rows, n)
    return scores, target, *others, rows_mask
