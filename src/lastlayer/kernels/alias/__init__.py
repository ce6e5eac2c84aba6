"""Draws from an alias table of integers: the probability of a class is its weight, to the bit."""

import torch
from torch import Tensor

from lastlayer.kernels.philox import IntegerOperation


def _fake(table: Tensor, _weight: Tensor, _counter: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return table.new_empty(n), table.new_empty(n, dtype=torch.float32)


draw = IntegerOperation(
    "alias_draw",
    "(Tensor table, Tensor weight, Tensor counter, SymInt n) -> (Tensor, Tensor)",
    __name__,
    "draw",
    _fake,
)
