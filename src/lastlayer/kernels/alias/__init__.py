"""Draws from an alias table of integers: the probability of a class is its weight, to the bit."""

import torch
from torch import Tensor

from lastlayer.kernels._registry import Operation


def _fake(table: Tensor, _weight: Tensor, _counter: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return table.new_empty(n), table.new_empty(n, dtype=torch.float32)


def _fake_complement(_weight: Tensor, target: Tensor, _bits: int, wide: bool) -> Tensor:
    return target.new_empty(target.shape, dtype=torch.float64 if wide else torch.float32)


draw = Operation(
    "alias_draw",
    "(Tensor table, Tensor weight, Tensor counter, SymInt n) -> (Tensor, Tensor)",
    __name__,
    "draw",
    _fake,
    integers=True,
)
log_complement = Operation(
    "alias_log_complement",
    "(Tensor weight, Tensor target, int bits, bool wide) -> Tensor",
    __name__,
    "log_complement",
    _fake_complement,
    integers=True,
)
