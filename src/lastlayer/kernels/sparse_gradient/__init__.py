"""Products with a score gradient that has few non-zeros a row, given as values and classes.

``values`` and ``classes`` are (n, k); a value of 0 is padding, whatever its class; a class may
come more than once in a row, its values then add up.
"""

from torch import Tensor

from lastlayer.kernels._registry import Operation


def _fake_rows(values: Tensor, _classes: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(values.shape[0], weight.shape[1])


def _fake_nothing(*_: object) -> None:
    return None


to_hidden = Operation(
    "sparse_gradient_to_hidden",
    "(Tensor values, Tensor classes, Tensor weight) -> Tensor",
    __name__,
    "to_hidden",
    _fake_rows,
)
add_to_weight_ = Operation(
    "sparse_gradient_add_to_weight_",
    "(Tensor values, Tensor classes, Tensor hidden, Tensor(a!) weight_gradient) -> ()",
    __name__,
    "add_to_weight_",
    _fake_nothing,
)
