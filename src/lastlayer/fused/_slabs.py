"""The cross entropy where even a few rows of scores are too much: blocks of rows and classes.

Many small chunks of rows would add to the weight's gradient so often that half precision loses
it, or need a float32 sum of its size. So a block has an eighth of the rows, and as many classes as
the memory holds. The first walk over the classes finds the normaliser of each row; the second
makes the scores again, all but the last slab's, and turns them into the gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.fused._chunks import budget_bytes
from lastlayer.fused._products import add_weight_gradient_, scores_into
from lastlayer.fused._shaping import shaped
from lastlayer.fused.engine import MOST_ROUNDED_ADDITIONS, Result, Wanted

# Multiples that suit the tiles of a matrix unit.
_STEP = 128


def slabs_suit(
    hidden: Tensor, options: Sequence[float], chunk_rows: int | str, rows: int, wanted: Wanted
) -> bool:
    """Whether ``rows`` at a time would add too often to a gradient in half precision.

    Only where memory was asked to be low: a float32 sum is faster than making scores again.
    """
    smoothing, *_ = options
    return (
        chunk_rows == "low"
        and hidden.itemsize < 4
        and hidden.shape[0] > rows * MOST_ROUNDED_ADDITIONS
        and wanted.weight
        and wanted.weight_into is None
        and not smoothing
    )


def run_slabs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor,
    class_weight: Tensor | None,
    wanted: Wanted,
    options: Sequence[float],
    weight_dtype: torch.dtype,
    chunk_rows: str,
) -> Result:
    """Losses and gradients of all rows; as :func:`lastlayer.fused.engine.run`."""
    n, n_classes = hidden.shape[0], weight.shape[0]
    rows = _up_to_step(-(-n // MOST_ROUNDED_ADDITIONS))
    fitting = budget_bytes(chunk_rows, hidden) // (rows * hidden.itemsize)
    classes = min(n_classes, max(_STEP, fitting // _STEP * _STEP))
    memory = hidden.new_empty(rows * classes)
    # The last slab is a full one: it need not be made again.
    short = n_classes % classes
    starts = [*([0] if short else []), *range(short, n_classes, classes)]
    slabs = [slice(a, b) for a, b in zip(starts, [*starts[1:], n_classes], strict=True)]
    weight_gradient = torch.zeros_like(weight, dtype=weight_dtype)
    hidden_gradient = torch.zeros_like(hidden) if wanted.hidden else None
    bias_gradient = hidden.new_zeros(n_classes, dtype=torch.float32) if wanted.bias else None
    losses = []
    for first in range(0, n, rows):
        part = slice(first, min(n, first + rows))
        block = _Block(memory, hidden[part], weight, bias, target[part], options)
        weights = None if class_weight is None else class_weight[target[part]]
        losses.append(block.loss(slabs, weights))
        for slab in reversed(slabs):
            gradient = block.gradient(slab, row_scale[part], weights)
            add_weight_gradient_(weight_gradient[slab], gradient, block.hidden)
            if hidden_gradient is not None:
                some = hidden_gradient[part]
                torch.addmm(some, gradient, weight[slab], out=some)
            if bias_gradient is not None:
                bias_gradient[slab] += gradient.sum(0, dtype=torch.float32)
    return Result(torch.cat(losses), (), hidden_gradient, weight_gradient, bias_gradient)


class _Block:
    """A block of rows, whose scores are made slab by slab in the same memory."""

    def __init__(
        self,
        memory: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: Sequence[float],
    ) -> None:
        self.hidden = hidden
        self._memory, self._weight, self._bias, self._target = memory, weight, bias, target
        _, self._z_loss, self._softcap, self._temperature = options
        place = target.unsqueeze(-1)
        exact = kernels.products.scores("auto", hidden, weight, bias, place)
        self._target_scores = exact.squeeze(-1)
        self._at_target, self._slope = shaped(self._target_scores, self._softcap, self._temperature)
        self._lse = torch.full_like(self._target_scores, -torch.inf)
        self._empty = torch.zeros_like(target, dtype=torch.bool)
        self._held: slice | None = None

    def loss(self, slabs: list[slice], weights: Tensor | None) -> Tensor:
        """The loss of each row, from all slabs; the scores of the last one stay."""
        for slab in slabs:
            scores = self._scores(slab)
            inside = (self._target >= slab.start) & (self._target < slab.stop)
            local = torch.where(inside, self._target - slab.start, 0)
            # A row whose target is elsewhere puts back what it has.
            exact = torch.where(inside, self._target_scores, scores[:, 0].float())
            _, lse, *_ = kernels.softmax_rows.forward_(
                "auto", scores, local, exact, None, None, 0.0, 0.0,
                self._softcap, self._temperature, False,
            )  # fmt: skip
            self._lse = torch.logaddexp(self._lse, lse)
        gap = self._lse - self._at_target
        gap = gap if weights is None else gap * weights
        losses = gap + self._z_loss * self._lse.square()
        # Where nothing can be, no target is met, and nothing is to be moved.
        self._empty = self._lse == -torch.inf
        self._lse.masked_fill_(self._empty, 0.0)
        return losses.masked_fill(self._empty, torch.inf)

    def gradient(self, slab: slice, row_scale: Tensor, weights: Tensor | None) -> Tensor:
        """The gradient of the scores of a slab, in the memory."""
        scores = self._scores(slab)
        self._held = None
        row_scale = row_scale.masked_fill(self._empty, 0.0)
        pull = row_scale if weights is None else row_scale * weights
        push = pull + row_scale * (2.0 * self._z_loss) * self._lse
        below_one = torch.expm1(self._at_target - self._lse)
        true = (push * below_one + (push - pull)) * self._slope
        inside = (self._target >= slab.start) & (self._target < slab.stop)
        local = torch.where(inside, self._target - slab.start, -1)
        kernels.softmax_rows.gradient_(
            "auto", scores, local, true, self._lse, push, self._softcap, self._temperature
        )
        return scores

    def _scores(self, slab: slice) -> Tensor:
        rows, classes = self.hidden.shape[0], slab.stop - slab.start
        scores = self._memory[: rows * classes].view(rows, classes)
        if self._held != slab:
            bias = None if self._bias is None else self._bias[slab]
            scores_into(scores, self.hidden, self._weight[slab], bias)
            self._held = slab
        return scores


def _up_to_step(count: int) -> int:
    return -(-count // _STEP) * _STEP
