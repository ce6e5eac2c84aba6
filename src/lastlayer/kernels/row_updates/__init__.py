"""Steps of optimisers on the rows that a gradient has, and on no other.

``ids`` are rows of ``weight``, which is ``(v, d)`` with rows that lie together in memory;
``gradient`` is ``(k, d)``. Where a row comes several times, all of these follow each other, and the
first alone counts: it has the whole gradient of the row. Where ``ids`` is None, which the reference
alone takes, the gradient has the shape of the weight, whatever that is. Sums and moments are
float32, or float64 from float64.
"""

from lastlayer.kernels._registry import Operation


def _fake(*_: object) -> None:
    return None


adagrad_ = Operation(
    "row_adagrad_",
    "(Tensor(a!) weight, Tensor(b!) total, Tensor? ids, Tensor gradient, float lr, "
    "float weight_decay, float eps) -> ()",
    __name__,
    "adagrad_",
    _fake,
)
adam_ = Operation(
    "row_adam_",
    "(Tensor(a!) weight, Tensor(b!) first, Tensor(c!) second, Tensor(d!) row_step, Tensor step, "
    "Tensor? ids, Tensor gradient, float lr, float weight_decay, float beta1, float beta2, "
    "float eps, bool decays) -> ()",
    __name__,
    "adam_",
    _fake,
)
