"""Chance from a counter: the same (seed, step) gives the same bits and ids on every device."""

from typing import Any

import torch
from torch import Tensor

from lastlayer.kernels._registry import Operation, selected


class IntegerOperation(Operation):
    """An operation on integers, which every implementation has in full: only the device decides."""

    def _run_selected(self, *args: Any) -> Any:
        return self._implementation(selected(self.name, args[0].device.type))(*args)

    def _check_can_run(self, impl: str, tensor: Tensor) -> None:
        super()._check_can_run(impl, tensor.new_empty(0, dtype=torch.float32))


def _fake_words(counter: Tensor, n: int) -> Tensor:
    return counter.new_empty(n, 2)


def _fake_log_uniform(counter: Tensor, n: int, _n_classes: int) -> Tensor:
    return counter.new_empty(n)


words = IntegerOperation(
    "philox_words", "(Tensor counter, SymInt n) -> Tensor", __name__, "words", _fake_words
)
log_uniform = IntegerOperation(
    "philox_log_uniform",
    "(Tensor counter, SymInt n, SymInt n_classes) -> Tensor",
    __name__,
    "log_uniform",
    _fake_log_uniform,
)
