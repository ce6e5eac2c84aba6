"""The rows of a sparse gradient, each with all that belongs to it."""

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.kernels import touched_rows

# Sorting half as many bytes takes half the time.
_MOST_NARROW = 2**31 - 1


class Slots:
    """Gradients of one step as the kernels take them; a weight and its bias are sorted once."""

    def __init__(self) -> None:
        self._sorted: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def of(self, gradient: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Row ids, where those of the same row follow each other; the first has its whole gradient.

        On a GPU there is a slot for each entry, so that nothing waits for how many rows there are.

        Args:
            gradient: row-sparse, coalesced or not.
            rows: the parameter, ``(v, d)``.

        Returns:
            Ids ``(k,)`` and gradients ``(k, d)``.
        """
        slotted = kernels.selected("touched_slots_", rows.device.type, rows.dtype) == "triton"
        if gradient.is_coalesced() or not slotted:
            gradient = gradient.coalesce()
            ids = gradient.indices()[0]
            return ids, gradient.values().reshape(ids.shape[0], rows.shape[1])
        entries = gradient._indices()[0]
        values = gradient._values().reshape(entries.shape[0], rows.shape[1])
        keys, order = self._order(entries, rows.shape[0])
        sums = values.new_empty(values.shape, dtype=torch.float32)
        nothing = sums.new_empty(0)
        touched_rows.slots_(
            "auto", sums.new_empty(0, 1), values[:0], values, nothing, order, keys,
            sums.new_ones(()), sums, nothing, None, False,
        )  # fmt: skip
        return keys, sums

    def _order(self, entries: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
        # All gradients are there until the step is over: the same memory is the same ids.
        known = entries.data_ptr(), entries.shape[0]
        if known not in self._sorted:
            narrow = entries.int() if n_rows <= _MOST_NARROW else entries
            self._sorted[known] = torch.sort(narrow, stable=True)
        return self._sorted[known]
