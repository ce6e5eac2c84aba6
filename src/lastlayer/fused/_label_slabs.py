"""Multi-label losses of all rows at once, walking over slabs of labels.

With all rows in a slab, a row of the weight's gradient is one product: it is added up in float32
and rounded once, and no float32 copy of it is needed. The first walk over the labels finds what
the rows need of all of them; the second makes the scores again, all but the last slab's, and turns
them into the gradient. Where labels do not depend on each other one walk is all.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.fused._label_rows import LabelLoss
from lastlayer.fused._listed import GivenLists, Listed
from lastlayer.fused._products import add_weight_gradient_, scores_into, set_weight_gradient
from lastlayer.fused.engine import Result, Wanted

# Bytes of scores that are held.
_BYTES = {"cuda": 900_000_000, "cpu": 8_000_000}
_LOW_BYTES = {"cuda": 250_000_000, "cpu": 2_000_000}
# Labels, and numbers between two rows, that suit the tiles of a matrix unit.
_STEP = {"cuda": 128, "cpu": 16}
# Numbers that are held in float32 where the weight's gradient has a dtype that no product gives.
_WIDENED = 1 << 24


def classes_at_a_time(chunk_classes: int | str, hidden: Tensor, n_classes: int) -> int:
    """Labels of a slab."""
    if isinstance(chunk_classes, int):
        return min(n_classes, chunk_classes)
    kind = "cpu" if hidden.device.type == "cpu" else "cuda"
    budget = (_BYTES if chunk_classes == "auto" else _LOW_BYTES)[kind]
    fitting = budget // (max(1, hidden.shape[0]) * hidden.itemsize)
    return min(n_classes, max(1, fitting // _STEP[kind]) * _STEP[kind])


def run_labels(
    loss: LabelLoss,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    given: GivenLists,
    row_scale: Tensor | None,
    wanted: Wanted,
    classes: int,
    weight_dtype: torch.dtype,
) -> Result:
    """Losses and gradients of all rows; the statistics are the normalisers of the loss, if any.

    Args:
        loss: with its normalisers, where they are known and only gradients are wanted.
        hidden: ``(n, d)``.
        weight: ``(v, d)``, in the dtype of hidden.
        bias: ``(v,)`` or None.
        given: the labels of each row that are listed.
        row_scale: ``(n,)``, what the gradient of each row's loss is multiplied by, or None.
        wanted: which gradients.
        classes: labels of a slab.
        weight_dtype: of the weight's gradient.
    """
    slabs = _Slabs(hidden, weight, bias, classes)
    looks = loss.separable or loss.normalisers is None
    # A GPU has this to do while the host gets the rest ready.
    slabs.score(slabs.all[0 if looks else -1])
    listed = given.listed(hidden.shape[0], weight.shape[0])
    slabs.leave_out(listed)
    scale = row_scale if wanted.any else None
    gradients = _Gradients(hidden, weight, wanted, weight_dtype)

    def walk(turn: Callable[[Tensor, Tensor], None], order: Iterable[slice], scale: Tensor) -> None:
        """Turns each slab into its gradient, and adds that up."""
        own = loss.gradient_of_listed(listed, at_listed, scale).to(hidden.dtype).flatten()
        for slab in order:
            scores = slabs.marked(slab)
            turn(scores, scale)
            slabs.put(slab, own)
            gradients.add(slab, scores)

    if loss.separable and scale is not None:
        at_listed = listed.scores(hidden, weight, bias)
        walk(loss.look_, slabs.all, scale)
        losses = loss.finish(listed, at_listed)
    else:
        for slab in slabs.all if looks else ():
            loss.look_(slabs.marked(slab), None)
        at_listed = listed.scores(hidden, weight, bias)
        losses = loss.finish(listed, at_listed)
        if scale is not None:
            walk(loss.turn_, reversed(slabs.all), scale)
    statistics = () if loss.normalisers is None else (loss.normalisers,)
    return Result(losses, statistics, *gradients.finished())


class _Slabs:
    """Scores of some labels at a time, all in the same memory."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: int) -> None:
        self._hidden, self._weight, self._bias, self._classes = hidden, weight, bias, classes
        n_classes = weight.shape[0]
        self.all = [slice(a, min(n_classes, a + classes)) for a in range(0, n_classes, classes)]
        # The last one that is visited, which need not be made again, is a full one.
        if len(self.all) > 1 and n_classes % classes:
            self.all[-2:] = self.all[:-3:-1]
        step = 1 if hidden.device.type == "cpu" else _STEP["cuda"]
        self._stride = -(-classes // step) * step
        # One number more, for what is put into another slab.
        self._memory = hidden.new_empty(hidden.shape[0] * self._stride + 1)
        self._held: slice | None = None
        self._is_marked = False

    def score(self, slab: slice) -> None:
        """Makes the scores of a slab."""
        bias = None if self._bias is None else self._bias[slab]
        scores_into(self._scores(slab), self._hidden, self._weight[slab], bias)
        self._held, self._is_marked = slab, False

    def leave_out(self, listed: Listed) -> None:
        """From now on these labels are marked."""
        classes = listed.classes
        # -1, which does not count, is in slab -1: none.
        self._slab_of = classes.div(self._classes, rounding_mode="floor").flatten()
        column = classes.remainder(self._classes)
        self._place = (column + listed.row_starts(self._stride)).flatten()

    def marked(self, slab: slice) -> Tensor:
        """Scores ``(n, labels of the slab)``, -inf where a label is listed."""
        if self._held != slab:
            self.score(slab)
        if not self._is_marked:
            self.put(slab, -torch.inf)
            self._is_marked = True
        return self._scores(slab)

    def put(self, slab: slice, values: Tensor | float) -> None:
        """Writes one value for each listed label of the slab."""
        inside = self._slab_of == slab.start // self._classes
        place = torch.where(inside, self._place, self._memory.shape[0] - 1)
        self._memory.scatter_(0, place, values)

    def _scores(self, slab: slice) -> Tensor:
        every = self._memory[:-1].view(self._hidden.shape[0], self._stride)
        return every[:, : slab.stop - slab.start]


class _Gradients:
    """The gradients of hidden, weight and bias as slabs come in."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, wanted: Wanted, weight_dtype: torch.dtype
    ) -> None:
        self._rows, self._vectors = hidden, weight
        wide = accumulation_dtype(weight.dtype)
        self._wide = wide
        self._hidden = torch.zeros_like(hidden, dtype=wide) if wanted.hidden else None
        self._weight = torch.empty_like(weight, dtype=weight_dtype) if wanted.weight else None
        self._bias = weight.new_empty(weight.shape[0], dtype=wide) if wanted.bias else None

    def add(self, slab: slice, gradient: Tensor) -> None:
        if self._bias is not None:
            torch.sum(gradient, 0, dtype=self._wide, out=self._bias[slab])
        if self._weight is not None:
            self._set_weight(self._weight[slab], gradient)
        if self._hidden is not None:
            add_weight_gradient_(self._hidden, gradient.t(), self._vectors[slab])

    def _set_weight(self, out: Tensor, gradient: Tensor) -> None:
        if out.dtype in (gradient.dtype, self._wide):
            set_weight_gradient(out, gradient, self._rows)
            return
        step = max(1, _WIDENED // max(1, out.shape[1]))
        for first in range(0, out.shape[0], step):
            some = gradient[:, first : first + step]
            wide = out.new_empty(some.shape[1], out.shape[1], dtype=self._wide)
            set_weight_gradient(wide, some, self._rows)
            out[first : first + step] = wide

    def finished(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        hidden = None if self._hidden is None else self._hidden.to(self._rows.dtype)
        return hidden, self._weight, self._bias
