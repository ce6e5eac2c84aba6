"""Softmax over the k largest scores of a row, its logarithm, and its Fenchel-Young loss.

The backward of the map is that of entmax at alpha = 1. On a CPU the loss is computed from the
probabilities, see ``entmax_rows``.
"""

from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import like_first, operation


def _loss(scores: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    losses = scores.new_empty(scores.shape[0], dtype=accumulation_dtype(scores.dtype))
    return losses, like_first(scores)


forward = operation("topk_softmax.forward", "topk_softmax", like_first)
logs_into = operation("topk_softmax.logs_into", "topk_log_softmax_into", writes=("out",))
loss = operation("topk_softmax.loss", "topk_softmax_loss", _loss, has_cpu=False)
