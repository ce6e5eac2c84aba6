"""What surrounds the rows of drawn classes where each row has one target; README.md."""

import torch
from torch import Tensor

from lastlayer.kernels._registry import Operation


def _fake_scale(hidden: Tensor, target: Tensor, _mean: bool) -> Tensor:
    return hidden.new_empty(target.shape[:1], dtype=torch.float32)


def _fake_start(
    hidden: Tensor, _weight: Tensor, _bias: Tensor | None, _target: Tensor, ids: Tensor,
    *_: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    (n, d), m = hidden.shape, ids.shape[0]
    return (
        hidden.new_empty(n, d),
        hidden.new_empty(m, d),
        hidden.new_empty(n, dtype=torch.float32),
        hidden.new_empty(m, dtype=torch.float32),
        ids.new_empty(m + n, dtype=torch.int32),
    )


def _fake_finish(first: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(first), torch.empty_like(first)


row_scale = Operation(
    "sampled_row_scale",
    "(Tensor hidden, Tensor target, bool mean) -> Tensor",
    __name__,
    "row_scale",
    _fake_scale,
)
start = Operation(
    "sampled_start",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor ids, Tensor log_expected, "
    "Tensor? target_log_expected, Tensor? row_shift, float factor) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    __name__,
    "start",
    _fake_start,
)
finish_ = Operation(
    "sampled_finish_",
    "(Tensor first, Tensor logits, Tensor scale, Tensor? row_scale, Tensor classes, "
    "Tensor weight, Tensor(a!) of_hidden, float factor, bool logistic, bool with_target) "
    "-> (Tensor, Tensor)",
    __name__,
    "finish_",
    _fake_finish,
)
