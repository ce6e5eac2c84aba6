"""Gradients of the classes that a sampled loss touched: entries of the same class added up.

Entries are numbered: first the vectors of ``columns`` (c, d), each a gradient by itself; then
those of ``slopes`` (n, q), a row of hidden times a number each. ``order`` has the entries by class,
and those of group g stand from ``starts[g]`` up to ``starts[g + 1]``. Sums are multiplied by
``factor``, a number on the device.
"""

from torch import Tensor

from lastlayer.kernels._registry import Operation


def _fake(
    _columns: Tensor, _column_biases: Tensor, slopes: Tensor, hidden: Tensor, _order: Tensor,
    starts: Tensor, _factor: Tensor, to_weight: bool, to_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    groups = starts.shape[0] - 1
    return (
        slopes.new_empty((groups, hidden.shape[1]) if to_weight else (0,)),
        slopes.new_empty(groups if to_bias else 0),
    )


forward = Operation(
    "touched_rows",
    "(Tensor columns, Tensor column_biases, Tensor slopes, Tensor hidden, Tensor order, "
    "Tensor starts, Tensor factor, bool to_weight, bool to_bias) -> (Tensor, Tensor)",
    __name__,
    "forward",
    _fake,
)
