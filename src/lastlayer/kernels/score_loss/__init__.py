"""Rows of scores to the Fenchel-Young loss of entmax, and later to its gradient.

``forward`` reads the scores and leaves seven numbers per row, and which blocks may have
probability; ``backward`` makes the probabilities again from these: nothing of the size of the
scores is held in between. ``target`` has class ids ``(rows,)``, distributions ``(rows, n)``, or
with ``labels`` what distributions are in proportion to. ``alpha`` counts where ``row_alpha`` is
None; its gradient is the last of the numbers. On a CPU gradients are made with the loss instead,
see ``entmax_rows``.
"""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import like_first, operation


def left(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Empty, what is left for ``backward``: numbers, and as many blocks as there may be."""
    n_rows, n = scores.shape
    most = min(-(-n // 16), max(128, min(2048, -(-n // 64))))
    stats = scores.new_empty(n_rows, 7, dtype=accumulation_dtype(scores.dtype))
    return stats, scores.new_empty(n_rows, most, dtype=torch.int16)


def _forward(scores: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stats, chosen = left(scores)
    return stats.new_empty(len(stats)), stats.new_empty(len(stats)), stats, chosen


forward = operation("score_loss.forward", "score_loss_forward", _forward, has_cpu=False)
backward = operation("score_loss.backward", "score_loss_backward", like_first, has_cpu=False)
