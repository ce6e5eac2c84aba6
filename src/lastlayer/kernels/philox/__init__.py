"""Chance from a counter: the same (seed, step) gives the same bits and ids on every device."""

import torch
from torch import Tensor

from lastlayer.kernels._registry import Operation


def _fake_words(counter: Tensor, n: int) -> Tensor:
    return counter.new_empty(n, 2)


def _fake_integers(counter: Tensor, n: int, _below: int) -> Tensor:
    return counter.new_empty(n)


def _fake_log_uniform(
    counter: Tensor, _order: Tensor | None, n: int, _n_classes: int
) -> tuple[Tensor, Tensor]:
    return counter.new_empty(n), counter.new_empty(n, dtype=torch.float32)


words = Operation(
    "philox_words",
    "(Tensor counter, SymInt n) -> Tensor",
    __name__,
    "words",
    _fake_words,
    integers=True,
)
integers = Operation(
    "philox_integers",
    "(Tensor counter, SymInt n, SymInt below) -> Tensor",
    __name__,
    "integers",
    _fake_integers,
    integers=True,
)
log_uniform = Operation(
    "philox_log_uniform",
    "(Tensor counter, Tensor? order, SymInt n, SymInt n_classes) -> (Tensor, Tensor)",
    __name__,
    "log_uniform",
    _fake_log_uniform,
    integers=True,
)
