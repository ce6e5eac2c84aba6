"""Rows of scores of drawn classes to a softmax or logistic loss, and to its gradient; README.md."""

import torch
from torch import Tensor

from lastlayer.kernels._registry import Operation


def _fake(scores: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    made = scores.new_empty(scores.shape[:1], dtype=dtype)
    return made, torch.empty_like(made)


forward_ = Operation(
    "sampled_rows_",
    "(Tensor(a!) scores, Tensor(b!) gradient, Tensor offset, Tensor ids, Tensor target, "
    "Tensor? shift, Tensor? exact, Tensor? row_scale, float factor, int n_exact, bool logistic, "
    "bool drop_hits, bool average) -> (Tensor, Tensor)",
    __name__,
    "forward_",
    _fake,
)
