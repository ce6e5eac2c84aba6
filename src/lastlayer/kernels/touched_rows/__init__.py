"""Gradients of the classes that a sampled loss touched: entries of the same class added up.

Entries are numbered: first the vectors of ``columns`` (c, d), each a gradient by itself; then
those of ``slopes`` (n, q), a row of hidden times a number each. ``order`` has the entries by class,
and those of group g stand from ``starts[g]`` up to ``starts[g + 1]``. Sums are multiplied by
``factor``, a number on the device.

Where the host must not wait for the number of groups, ``slots_`` takes the classes themselves in
the order of the entries, ``keys``, and there is a slot for each entry: the sum of a class is in the
first of its slots, and 0 in the others. ``known`` gets the keys in int64, as sparse tensors want
them; with ``scattered`` sums go to the rows of their classes instead.
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


def _fake_nothing(*_: object) -> None:
    return None


forward = Operation(
    "touched_rows",
    "(Tensor columns, Tensor column_biases, Tensor slopes, Tensor hidden, Tensor order, "
    "Tensor starts, Tensor factor, bool to_weight, bool to_bias) -> (Tensor, Tensor)",
    __name__,
    "forward",
    _fake,
)
slots_ = Operation(
    "touched_slots_",
    "(Tensor slopes, Tensor hidden, Tensor columns, Tensor column_biases, Tensor order, "
    "Tensor keys, Tensor factor, Tensor(a!) weight, Tensor(b!) bias, Tensor(c!)? known, "
    "bool scattered) -> ()",
    __name__,
    "slots_",
    _fake_nothing,
)
