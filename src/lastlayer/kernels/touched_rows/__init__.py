"""Rows of a weight that a step touched: the sums of their gradients, and steps of optimisers.

``forward`` adds up entries of the same class. Entries are numbered: first the vectors of
``columns`` (c, d), each a gradient by itself; then those of ``slopes`` (n, q), a row of hidden
times a number each. ``order`` has the entries by class, and those of group g stand from
``starts[g]`` up to ``starts[g + 1]``. Sums are multiplied by ``factor``, a number on the device.
``group`` makes both from the class of each entry, on a CPU; elsewhere it waits for their number.

Where the host must not wait for the number of groups, ``slots_`` takes the classes themselves in
the order of the entries, ``keys``, and one number per entry, ``numbers``: of a column what its bias
gets, and of a row its slope. There is a slot for each entry: the sum of a class is in the first of
its slots, and 0 in the others. ``known`` gets the keys in int64, as sparse tensors want them; with
``scattered`` sums go to the rows of their classes instead. It has no CPU implementation: there
nobody waits, and ``forward`` serves.

``adagrad_`` and ``adam_`` move the rows ``ids`` of ``weight`` (v, d), whose rows lie together in
memory, by ``gradient`` (k, d). Where a row comes several times, all of these follow each other, and
the first alone counts: it has the whole gradient of the row. Where ``ids`` is None, which the
reference alone takes, the gradient has the shape of the weight, whatever that is. Sums and moments
are float32, or float64 from float64.
"""

import torch
from torch import Tensor

from lastlayer.kernels._registry import operation


def _sums(
    _columns: Tensor, _column_biases: Tensor, slopes: Tensor, hidden: Tensor, _order: Tensor,
    starts: Tensor, _factor: Tensor, to_weight: bool, to_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    groups = starts.shape[0] - 1
    return (
        slopes.new_empty((groups, hidden.shape[1]) if to_weight else (0,)),
        slopes.new_empty(groups if to_bias else 0),
    )


def _grouped(entries: Tensor, _n_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return torch.empty_like(entries), entries.new_empty(count + 1), entries.new_empty(count)


forward = operation("touched_rows.forward", "touched_rows", _sums)
group = operation("touched_rows.group", "touched_group", _grouped, integers=True)
slots_ = operation(
    "touched_rows.slots_", "touched_slots_", writes=("weight", "bias", "known"), has_cpu=False
)
adagrad_ = operation("touched_rows.adagrad_", "row_adagrad_", writes=("weight", "total"))
adam_ = operation(
    "touched_rows.adam_", "row_adam_", writes=("weight", "first", "second", "row_step")
)
