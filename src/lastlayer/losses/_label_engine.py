"""Base class of the engines of multi-label losses on scores."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lastlayer import kernels
from lastlayer._labels import rows_of_mask
from lastlayer._torch import accumulation_dtype
from lastlayer.fused.function import Call, Engine, Grads, Operands, Result


class LabelEngine(Engine):
    """A multi-label loss. The first operand is the scores, the last the mask or None.

    Forward keeps at most a few numbers per row; backward reads scores and labels again.
    """

    recomputes_unreduced = False
    statistics_per_row = 0

    def losses(self, call: Call) -> tuple[Tensor, Tensor | None, Tensor]:
        """The loss of each row, statistics for backward, and which rows count under a mask."""
        raise NotImplementedError

    def gradient(self, call: Call, pieces: Sequence[Any], factor: Tensor) -> Tensor:
        """The gradient of the scores, ``(rows, n)``, times one factor or one factor per row."""
        raise NotImplementedError

    def slope(self, call: Call) -> Tensor:
        """The derivative of each row's loss, ``(rows, n)``; differentiable."""
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
        del reusable  # the gradient is a new tensor
        scores = call.operands[0]
        if factor is None or not call.wanted[0]:
            return [None]
        gradient = self.gradient(call, pieces, factor)
        return [gradient if scores.dim() == 2 else gradient.view(scores.shape)]

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
    """Scores, target and mask as ``(rows, n)``, and the other operands unchanged."""
    scores, target, *others, mask = operands
    n_rows, n = scores.shape[:-1].numel(), scores.shape[-1]
    rows_mask = rows_of_mask(mask, scores, n_rows)
    if scores.dim() != 2:
        scores = scores.reshape(n_rows, n)
        target = None if target is None else target.reshape(n_rows, n)
    return scores, target, *others, rows_mask
