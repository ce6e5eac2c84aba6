"""Cross entropy over bands of classes, each of which sees its own slice of a row.

All bands share one normaliser. For each chunk of rows, one product a band fills its columns of the
scores; the row loss of the cross entropy turns these into their gradient in place; two products a
band carry it on. As in :mod:`lastlayer.fused.engine`, a chunk of scores is all that is stored.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._torch import accumulation_dtype, gradient_sum_dtype, host_sync_allowed
from lastlayer.fused import engine
from lastlayer.fused._chunks import rows_at_a_time
from lastlayer.fused._products import scores_into
from lastlayer.fused._run_rows import kept_rows
from lastlayer.heads._group_loss import GroupProblem, group_loss, group_operation


def band_loss(
    hidden: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    target: Tensor,
    *,
    ignore_index: int | None,
    chunk_rows: int | str,
    smoothing: float,
    reduction: str,
) -> Tensor:
    """The loss of all rows together, or of each row; 0 for ignored ones.

    Args:
        hidden: the slices of all bands side by side, ``(n, widths)``.
        weights: of each band, ``(classes, width)``.
        bias: of all classes, or None.
        target: ``(n,)``.
        ignore_index: rows with this target count for nothing; None where every target counts.
        chunk_rows: rows of scores held at a time, "auto" or "low".
        smoothing: how much of the target is spread evenly over all classes.
        reduction: "mean" over the rows that count, "sum" or "none".
    """
    options = smoothing, ignore_index, str(chunk_rows)
    problem = GroupProblem("band_loss", hidden, bias, target, weights, options)
    counts = None if ignore_index is None else target != ignore_index
    return group_loss(problem, counts, reduction)


@group_operation
def _band_loss(
    hidden: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor | None,
    weights: Sequence[Tensor],
    smoothing: float,
    ignore_index: int | None,
    chunk_rows: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Losses, and the gradients of hidden, bias and each weight (empty if not wanted)."""
    n, dtype = hidden.shape[0], hidden.dtype
    kept = kept_rows(target, ignore_index)
    if kept is not None:
        hidden, target = hidden[kept], target[kept]
        row_scale = None if row_scale is None else row_scale[kept]
    if ignore_index is not None and not host_sync_allowed(target):
        target = torch.where(target == ignore_index, 0, target)
    bands = _Bands(
        hidden,
        [weight.to(dtype) for weight in weights],
        None if bias is None else bias.to(dtype),
        [gradient_sum_dtype(weight.dtype) for weight in weights],
        int(chunk_rows) if chunk_rows.isdecimal() else chunk_rows,
    )
    # Dtypes are settled by now; autocast would still round the float32 sums on the way.
    with torch.autocast(hidden.device.type, enabled=False):
        losses, *made = bands.run(target, row_scale, smoothing, wanted)
    if bias is not None and wanted[1]:
        made[1] = made[1].to(gradient_sum_dtype(bias.dtype))
    if kept is not None:
        losses = losses.new_zeros(n).index_copy_(0, kept, losses)
        if wanted[0]:
            made[0] = made[0].new_zeros(n, made[0].shape[1]).index_copy_(0, kept, made[0])
    return [losses, *made]


class _Bands:
    """Rows and the vectors of all bands, in the dtype of the products."""

    def __init__(
        self,
        hidden: Tensor,
        weights: Sequence[Tensor],
        bias: Tensor | None,
        weight_dtypes: Sequence[torch.dtype],
        chunk_rows: int | str,
    ) -> None:
        self._hidden, self._weights, self._bias = hidden, weights, bias
        self._weight_dtypes = weight_dtypes
        self._classes = [slice(a, b) for a, b in pairwise(_ends(w.shape[0] for w in weights))]
        self._numbers = [slice(a, b) for a, b in pairwise(_ends(w.shape[1] for w in weights))]
        self._n_classes = self._classes[-1].stop
        self._chunk_rows = rows_at_a_time(chunk_rows, hidden, self._n_classes)

    def run(
        self, target: Tensor, row_scale: Tensor | None, smoothing: float, wanted: Sequence[bool]
    ) -> list[Tensor]:
        """Losses, and the gradients of hidden, bias and each weight (empty if not wanted)."""
        hidden, n = self._hidden, self._hidden.shape[0]
        if not any(wanted):
            row_scale = None
        gradients = self._gradients(wanted)
        memory = hidden.new_empty(min(n, self._chunk_rows), self._n_classes)
        losses = []
        for first in range(0, max(1, n), self._chunk_rows):
            part = slice(first, min(n, first + self._chunk_rows))
            scores = memory[: part.stop - part.start]
            self._scores_into(scores, hidden[part])
            loss, *_ = kernels.softmax_rows.forward_(
                "auto", scores, target[part], self._at(target[part], hidden[part], scores),
                None if row_scale is None else row_scale[part], None, smoothing, 0.0, 0.0, 1.0,
                False,
            )  # fmt: skip
            losses.append(loss)
            if row_scale is not None:
                for columns, gradient in zip(self._classes, gradients, strict=True):
                    gradient.add(part, scores[:, columns])
        finished = [gradient.finished() for gradient in gradients]
        of_hidden, of_weight, of_bias = zip(*finished, strict=True)
        empty = hidden.new_empty(0)
        return [
            torch.cat(losses),
            torch.cat(of_hidden, -1) if wanted[0] else empty,
            torch.cat(of_bias) if wanted[1] else empty.clone(),
            *(empty.clone() if each is None else each for each in of_weight),
        ]

    def _gradients(self, wanted: Sequence[bool]) -> list[Any]:
        of_hidden, of_bias, *of_weights = wanted
        return [
            engine.Gradients(
                rows, weight, engine.Wanted(of_hidden, of_weight, of_bias), self._chunk_rows, dtype
            )
            for (rows, weight, _), of_weight, dtype in zip(
                self._each(self._hidden), of_weights, self._weight_dtypes, strict=True
            )
        ]

    def _each(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """The slice of the rows, the vectors and the biases of each band."""
        for weight, numbers, columns in zip(
            self._weights, self._numbers, self._classes, strict=True
        ):
            yield rows[:, numbers], weight, None if self._bias is None else self._bias[columns]

    def _scores_into(self, scores: Tensor, rows: Tensor) -> None:
        for columns, band in zip(self._classes, self._each(rows), strict=True):
            scores_into(scores[:, columns], *band)

    def _at(self, target: Tensor, rows: Tensor, scores: Tensor) -> Tensor:
        """The scores of the targets in full precision, each from the band it is in."""
        if rows.device.type == "cpu" and rows.dtype == accumulation_dtype(rows.dtype):
            # Nothing is rounded there; a GPU may take TF32.
            return scores.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        total = rows.new_zeros((), dtype=torch.float32)
        for columns, band in zip(self._classes, self._each(rows), strict=True):
            inside = (target >= columns.start) & (target < columns.stop)
            local = torch.where(inside, target - columns.start, -1).unsqueeze(-1)
            total = total + kernels.products.scores("auto", *band, local).squeeze(-1)
        return total


def _ends(sizes: Iterator[int]) -> list[int]:
    return [0, *accumulate(sizes)]
