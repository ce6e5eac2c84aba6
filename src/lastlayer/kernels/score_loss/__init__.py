"""The Fenchel-Young loss of entmax on rows of scores, and its gradient.

``forward`` reads the scores and returns a few numbers per row, and which blocks may have
probability. ``backward`` recomputes the probabilities from these, so that nothing of the size of
the scores is stored in between. ``target`` has class ids ``(rows,)`` or distributions
``(rows, n)``; with ``labels`` its rows are first divided by their sums. ``alpha`` is used if
``row_alpha`` is None. On a CPU gradients are computed together with the loss instead, see
``entmax_rows``.
"""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import like_first, operation

# Numbers per row that forward stores for backward, as arrays of length rows: the weight, the
# derivative by alpha, then those of the implementation. After them comes one more number, the
# factor of the gradient of a mean.
NUMBERS = 9


def left(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Empty tensors for what ``backward`` needs: numbers, and lists of blocks."""
    n_rows, n = scores.shape
    most = min(-(-n // 16), max(128, min(2048, -(-n // 64))))
    stats = scores.new_empty(NUMBERS * n_rows + 1, dtype=accumulation_dtype(scores.dtype))
    return stats, scores.new_empty(n_rows, most, dtype=torch.int16)


def _forward(scores: Tensor, *options: object) -> tuple[Tensor, Tensor, Tensor]:
    stats, chosen = left(scores)
    return stats.new_empty(() if options[-1] else scores.shape[0]), stats, chosen


forward = operation("score_loss.forward", "score_loss_forward", _forward, has_cpu=False)
backward = operation("score_loss.backward", "score_loss_backward", like_first, has_cpu=False)
