"""Softmax over the k largest scores of a row. Its backward is that of entmax at alpha = 1."""

import torch
from torch import Tensor

from lastlayer.kernels._registry import Operation


def _like_scores(scores: Tensor, _k: int) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


forward = Operation(
    "topk_softmax", "(Tensor scores, int k) -> Tensor", __name__, "forward", _like_scores
)
