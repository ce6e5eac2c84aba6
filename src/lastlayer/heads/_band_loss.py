"""Cross entropy over bands of classes, each of which sees its own slice of a row.

All bands share one normaliser. For each chunk of rows, one product a band fills its columns of the
scores; the row loss of the cross entropy turns these into their gradient in place; two products a
band carry it on. As in :mod:`lastlayer.fused.engine`, a chunk of scores is all that is stored;
where the upstream gradient is one number the gradients are made in the forward pass, else
backward makes the scores again.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.fused import engine
from lastlayer.fused._chunks import rows_at_a_time
from lastlayer.fused._loss import kept_rows, near_one, rounded_product, scaled_gradients, summed_in
from lastlayer.fused._products import scores_into
from lastlayer.fused._sparse_rows import can_wait


class BandProblem(NamedTuple):
    """The rows of a loss: ``hidden`` has the slices of all bands side by side."""

    hidden: Tensor
    weights: Sequence[Tensor]
    bias: Tensor | None
    target: Tensor
    # None: every target counts.
    ignore_index: int | None
    chunk_rows: int | str
    smoothing: float


def band_loss(problem: BandProblem, reduction: str) -> Tensor:
    """The loss of all rows together, or of each row; 0 for ignored ones."""
    hidden, weights, bias, target, ignore_index, chunk_rows, smoothing = problem
    scale = _row_scale(hidden, target, ignore_index, reduction)
    recording = torch.is_grad_enabled()
    wanted = (
        recording and hidden.requires_grad,
        recording and bias is not None and bias.requires_grad,
        *(recording and weight.requires_grad for weight in weights),
    )
    loss: Tensor = _BandLoss.apply(
        hidden, bias, target, scale, smoothing, ignore_index, chunk_rows, reduction != "none",
        wanted, *weights,
    )  # fmt: skip
    return loss


def _row_scale(hidden: Tensor, target: Tensor, ignore_index: int | None, reduction: str) -> Tensor:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    scale = hidden.new_ones(target.shape, dtype=dtype)
    if ignore_index is not None:
        scale = torch.where(target == ignore_index, 0.0, scale)
    return scale / scale.sum().clamp(min=1.0) if reduction == "mean" else scale


class _BandLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        bias: Tensor | None,
        target: Tensor,
        scale: Tensor,
        smoothing: float,
        ignore_index: int | None,
        chunk_rows: int | str,
        reduced: bool,
        wanted: tuple[bool, ...],
        *weights: Tensor,
    ) -> Tensor:
        at_once = any(wanted) and reduced
        factors, size = near_one(scale, hidden.dtype)
        losses, *made = _band_loss(
            hidden, weights, bias, target, factors if at_once else None, smoothing, ignore_index,
            str(chunk_rows), wanted if at_once else [False] * len(wanted),
        )  # fmt: skip
        ctx.at_once, ctx.wanted, ctx.spent = at_once, wanted, False
        ctx.rest = smoothing, ignore_index, chunk_rows
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden, bias, *weights)]
        if at_once:
            ctx.save_for_backward(size, *made)
        else:
            ctx.save_for_backward(hidden, bias, target, scale, *weights)
        counted = torch.where(scale == 0, 0.0, losses * scale)
        return counted.sum() if reduced else counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "backward: this loss has no second derivatives, and create_graph=True asks for "
                "them; use log_prob(hidden, classes), which has them"
            )
        made = scaled_gradients(ctx, grad) if ctx.at_once else _recomputed(ctx, grad)
        hidden, bias, *weights = (
            each.to(dtype) if needed else None
            for each, needed, dtype in zip(made, ctx.wanted, ctx.dtypes, strict=True)
        )
        return hidden, bias, *(None,) * 7, *weights


def _recomputed(ctx: Any, grad: Tensor) -> list[Tensor]:
    hidden, bias, target, scale, *weights = ctx.saved_tensors
    smoothing, ignore_index, chunk_rows = ctx.rest
    scale, size = near_one(scale * grad.to(scale.dtype), hidden.dtype)
    _, *made = _band_loss(
        hidden, weights, bias, target, scale, smoothing, ignore_index, str(chunk_rows), ctx.wanted
    )
    return made if size is None else [rounded_product(each, size) for each in made]


@torch.library.custom_op("lastlayer::band_loss", mutates_args=())
def _band_loss(
    hidden: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor | None,
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
    if ignore_index is not None and not can_wait(target):
        target = torch.where(target == ignore_index, 0, target)
    bands = _Bands(
        hidden,
        [weight.to(dtype) for weight in weights],
        None if bias is None else bias.to(dtype),
        [summed_in(weight.dtype) for weight in weights],
        int(chunk_rows) if chunk_rows.isdecimal() else chunk_rows,
    )
    # Dtypes are settled by now; autocast would still round the float32 sums on the way.
    with torch.autocast(hidden.device.type, enabled=False):
        losses, *made = bands.run(target, row_scale, smoothing, wanted)
    if bias is not None and wanted[1]:
        made[1] = made[1].to(summed_in(bias.dtype))
    if kept is not None:
        losses = losses.new_zeros(n).index_copy_(0, kept, losses)
        if wanted[0]:
            made[0] = made[0].new_zeros(n, made[0].shape[1]).index_copy_(0, kept, made[0])
    return [losses, *made]


@_band_loss.register_fake
def _(
    hidden: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor | None,  # noqa: ARG001
    smoothing: float,  # noqa: ARG001
    ignore_index: int | None,  # noqa: ARG001
    chunk_rows: str,  # noqa: ARG001
    wanted: Sequence[bool],
) -> list[Tensor]:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    sources: list[tuple[Tensor | None, torch.dtype]] = [
        (hidden, hidden.dtype),
        (bias, hidden.dtype if bias is None else summed_in(bias.dtype)),
        *((weight, summed_in(weight.dtype)) for weight in weights),
    ]
    return [
        hidden.new_empty(target.shape, dtype=dtype),
        *(
            hidden.new_empty(0)
            if source is None or not needed
            else source.new_empty(source.shape, dtype=dtype)
            for (source, dtype), needed in zip(sources, wanted, strict=True)
        ),
    ]


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
                "auto", scores, target[part], self._at(target[part], hidden[part]),
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

    def _at(self, target: Tensor, rows: Tensor) -> Tensor:
        """The scores of the targets in full precision, each from the band it is in."""
        total = rows.new_zeros((), dtype=torch.float32)
        for columns, band in zip(self._classes, self._each(rows), strict=True):
            inside = (target >= columns.start) & (target < columns.stop)
            local = torch.where(inside, target - columns.start, -1).unsqueeze(-1)
            total = total + kernels.class_scores.forward("auto", *band, local).squeeze(-1)
        return total


def _ends(sizes: Iterator[int]) -> list[int]:
    return [0, *accumulate(sizes)]
