"""One pass over chunks of rows that turns hidden states into losses and gradients.

For each chunk: one product makes the scores, a row loss turns them into losses and, in the same
memory, into the gradient of the scores, and two products carry that on to hidden and weight. The
scores of a chunk are all that is ever stored. A row loss is one small function, see
:class:`RowLoss`; everything else is here, once.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._torch import accumulation_dtype
from lastlayer.fused._products import add_weight_gradient_, scores_into, set_weight_gradient
from lastlayer.kernels import empty

# Beyond this many additions in half precision a gradient of the weight is no longer within
# 4e-3 of the exact one.
MOST_ROUNDED_ADDITIONS = 8
# What a chunk takes where scores are float32 and their gradient is held in two halves as well.
PRECISE_COPIES = 4.0


class Chunk(NamedTuple):
    """What a row loss is given with the scores of a few rows.

    ``target_scores`` are those of the target in full precision, and ``exact_scores`` gives those
    of other classes, (rows, k), where the scores of the chunk are rounded. ``row_scale`` is what
    the loss of each row is multiplied by in the end; it is None where no gradient is wanted.
    """

    target: Tensor
    target_scores: Tensor
    exact_scores: Callable[[Tensor], Tensor]
    row_scale: Tensor | None


class Sparse(NamedTuple):
    """A score gradient with few non-zeros: values (rows, k) and their classes; 0 is padding."""

    values: Tensor
    classes: Tensor


class RowResult(NamedTuple):
    """What a row loss makes of a chunk: ``gradient`` is the scores' own memory, or sparse."""

    loss: Tensor
    gradient: Tensor | Sparse | None
    statistics: tuple[Tensor, ...] = ()


class RowLoss(Protocol):
    """A loss on rows of scores, which it may overwrite."""

    def __call__(self, scores: Tensor, chunk: Chunk) -> RowResult: ...


class Result(NamedTuple):
    """Losses of all rows, what else was asked for, and the gradients that were wanted."""

    loss: Tensor
    statistics: tuple[Tensor, ...]
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Wanted(NamedTuple):
    """Which gradients are wanted, and what the weight's is added to: None makes one."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    weight_into: Tensor | None = None

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias

    def precise(self, hidden: Tensor) -> bool:
        """Whether half-precision rows meet a float32 sum: nothing is rounded on the way then."""
        return self.weight_into is not None and self.weight_into.itemsize > hidden.itemsize


def run(
    row_loss: RowLoss,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor | None,
    wanted: Wanted,
    chunk_rows: int,
    weight_dtype: torch.dtype | None = None,
) -> Result:
    """Losses and gradients of all rows.

    Args:
        row_loss: the loss.
        hidden: ``(n, d)``.
        weight: ``(v, d)``, in the dtype of hidden.
        bias: ``(v,)`` or None.
        target: ``(n,)``, all of them class ids.
        row_scale: ``(n,)``, what the gradient of each row's loss is multiplied by.
        wanted: which gradients.
        chunk_rows: rows at a time.
        weight_dtype: of the weight's gradient, where it is not that of the weight.
    """
    n, n_classes = hidden.shape[0], weight.shape[0]
    gradients = Gradients(hidden, weight, wanted, chunk_rows, weight_dtype or weight.dtype)
    dtype = torch.float32 if wanted.precise(hidden) else hidden.dtype
    memory = empty((min(n, chunk_rows), n_classes), dtype, hidden.device)
    losses: list[Tensor] = []
    statistics: list[tuple[Tensor, ...]] = []
    # At least once: without rows there are still results, empty ones.
    for first in range(0, max(1, n), chunk_rows):
        part = slice(first, min(n, first + chunk_rows))
        rows = hidden[part]
        scores = scores_into(memory, rows, weight, bias)
        exact = partial(kernels.products.scores, "auto", rows, weight, bias)
        at_target = exact(target[part].unsqueeze(-1)).squeeze(-1)
        scale = row_scale[part] if wanted.any and row_scale is not None else None
        result = row_loss(scores, Chunk(target[part], at_target, exact, scale))
        losses.append(result.loss)
        statistics.append(result.statistics)
        if result.gradient is not None:
            gradients.add(part, result.gradient)
    together = tuple(torch.cat(each) for each in zip(*statistics, strict=True))
    return Result(torch.cat(losses), together, *gradients.finished())


class Gradients:
    """The gradients of hidden, weight and bias as chunks come in."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        wanted: Wanted,
        chunk_rows: int,
        weight_dtype: torch.dtype,
    ) -> None:
        self._hidden, self._weight, self._wanted = hidden, weight, wanted
        self._weight_dtype = weight_dtype
        self.hidden = hidden.new_empty(hidden.shape) if wanted.hidden else None
        wide = accumulation_dtype(weight.dtype)
        many = hidden.shape[0] > MOST_ROUNDED_ADDITIONS * chunk_rows
        # No product of two half-precision matrices gives the other half precision, or float64.
        foreign = weight_dtype not in (weight.dtype, wide)
        self._sum_dtype = wide if many or foreign else weight_dtype
        into = wanted.weight_into
        straight = into is not None and into.dtype in (wide, self._sum_dtype)
        self._weight_sum: Tensor | None = into if straight else None
        self.bias = weight.new_zeros(weight.shape[0], dtype=wide) if wanted.bias else None
        self._sparse: list[tuple[slice, Sparse]] = []

    def add(self, part: slice, gradient: Tensor | Sparse) -> None:
        if isinstance(gradient, Sparse):
            self._add_sparse(part, gradient)
            return
        if self.bias is not None:
            self.bias += gradient.sum(0, dtype=self.bias.dtype)
        rounded = gradient.to(self._weight.dtype)
        if self.hidden is not None:
            torch.mm(rounded, self._weight, out=self.hidden[part])
        if self._wanted.weight:
            self._add_to_weight(rounded, self._hidden[part])
            if rounded is not gradient:
                self._add_to_weight((gradient - rounded).to(rounded.dtype), self._hidden[part])

    def _add_to_weight(self, gradient: Tensor, rows: Tensor) -> None:
        if self._weight_sum is None:
            self._weight_sum = self._room_for_weight()
            set_weight_gradient(self._weight_sum, gradient, rows)
        else:
            add_weight_gradient_(self._weight_sum, gradient, rows)

    def _room_for_weight(self) -> Tensor:
        return empty(self._weight.shape, self._sum_dtype, self._weight.device)

    def _add_sparse(self, part: slice, gradient: Sparse) -> None:
        if self.hidden is not None:
            self.hidden[part] = kernels.products.to_hidden(
                "auto", gradient.values, gradient.classes, self._weight
            )
        if self._wanted.weight:
            # One sort for all chunks: classes are then visited once.
            self._sparse.append((part, gradient))
        if self.bias is not None:
            values = gradient.values.to(self.bias.dtype).flatten()
            self.bias.index_add_(0, gradient.classes.flatten(), values)

    def finished(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        total = self._weight_sum
        if self._wanted.weight and total is None:
            total = self._room_for_weight().zero_()
        if self._sparse and total is not None:
            self._add_lists(total)
        into = self._wanted.weight_into
        if total is not None and into is not None:
            if total is not into:
                into.add_(total)
            total = into
        elif total is not None:
            total = total.to(self._weight_dtype)
        return self.hidden, total, self.bias

    def _add_lists(self, total: Tensor) -> None:
        rows = torch.cat([self._hidden[part] for part, _ in self._sparse])
        width = max(each.values.shape[1] for _, each in self._sparse)
        values = torch.cat([_padded(each.values, width) for _, each in self._sparse])
        classes = torch.cat([_padded(each.classes, width) for _, each in self._sparse])
        kernels.products.add_to_weight_("auto", values, classes, rows, total)


def _padded(entries: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(entries, (0, width - entries.shape[1]))
