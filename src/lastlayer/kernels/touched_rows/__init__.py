"""Rows of a weight that a step touches: sums of their gradients, and steps of optimisers.

``forward`` sums entries of the same class. Entries are numbered: first the vectors of ``columns``
(c, d), each a gradient; then those of ``slopes`` (n, q), each a slope times a row of hidden.
``order`` has the entries sorted by class; those of group g are ``starts[g]`` to ``starts[g + 1]``.
Sums are multiplied by ``factor``, a tensor with one number. ``group`` computes ``order`` and
``starts`` from the class of each entry; on a GPU it needs a host sync.

``slots_`` needs no host sync. It takes the sorted classes of the entries, ``keys``, and one number
per entry, ``numbers``: the bias gradient of a column, or the slope of a row. It has one slot per
entry: the sum of a class is in its first slot, and its other slots are 0. ``known`` gets the keys
as int64, the index dtype of sparse tensors. With ``scattered`` the sums go to the rows of their
classes instead. It has no CPU kernel, since there ``forward`` needs no sync either. ``sort_ids``
sorts the classes of entries.

``adagrad_`` and ``adam_`` update the rows ``ids`` of ``weight`` (v, d), whose rows must be
contiguous, with ``gradient`` (k, d). If an id occurs several times, its occurrences must be
adjacent, and only the first counts: it has the whole gradient of the row. If ``ids`` is None
(reference only), the gradient has the shape of the weight, which may be any. Sums and moments are
float32, or float64 for float64.
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


def _sorted(ids: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids), torch.empty_like(ids, dtype=torch.int64)


forward = operation("touched_rows.forward", "touched_rows", _sums)
group = operation("touched_rows.group", "touched_group", _grouped, integers=True)
sort_ids = operation("touched_rows.sort_ids", "sort_ids", _sorted, integers=True, has_cpu=False)
slots_ = operation(
    "touched_rows.slots_", "touched_slots_", writes=("weight", "bias", "known"), has_cpu=False
)
adagrad_ = operation("touched_rows.adagrad_", "row_adagrad_", writes=("weight", "total"))
adam_ = operation(
    "touched_rows.adam_", "row_adam_", writes=("weight", "first", "second", "row_step")
)
