"""Rows of scores to the Fenchel-Young loss of entmax, and later to its gradient.

``forward`` reads the scores and leaves a few numbers per row, and which blocks may have
probability; ``backward`` makes the probabilities again from these: nothing of the size of the
scores is held in between. ``target`` has class ids ``(rows,)``, distributions ``(rows, n)``, or
with ``labels`` what distributions are in proportion to. ``alpha`` counts where ``row_alpha`` is
None. On a CPU gradients are made with the loss instead, see ``entmax_rows``.
"""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import like_first, operation

# Numbers of a row that forward leaves, one kind after the other: its weight, the derivative by its
# alpha, then what is up to the implementation. Behind all of them stands what the gradient of a
# mean is multiplied by.
NUMBERS = 9


def left(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Empty, what is left for ``backward``: numbers, and as many blocks as there may be."""
    n_rows, n = scores.shape
    most = min(-(-n // 16), max(128, min(2048, -(-n // 64))))
    stats = scores.new_empty(NUMBERS * n_rows + 1, dtype=accumulation_dtype(scores.dtype))
    return stats, scores.new_empty(n_rows, most, dtype=torch.int16)


def _forward(scores: Tensor, *options: object) -> tuple[Tensor, Tensor, Tensor]:
    stats, chosen = left(scores)
    return stats.new_empty(() if options[-1] else scores.shape[0]), stats, chosen


forward = operation("score_loss.forward", "score_loss_forward", _forward, has_cpu=False)
backward = operation("score_loss.backward", "score_loss_backward", like_first, has_cpu=False)
