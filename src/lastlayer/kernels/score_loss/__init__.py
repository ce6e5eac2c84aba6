"""Rows of scores to the Fenchel-Young loss of entmax, and later to its gradient.

``forward`` reads the scores and leaves a few numbers per row, from which ``backward`` makes the
probabilities again: nothing of the size of the scores is held in between. ``target`` has class ids
``(rows,)``, distributions ``(rows, n)``, or with ``labels`` what distributions are in proportion
to. On a CPU the gradient is made with the loss instead, see ``entmax_rows``.
"""

from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import like_first, operation

# Numbers of a row that forward leaves, one kind after the other: its weight, then what is up to the
# implementation. Behind all of them stands what the gradient of a mean is multiplied by.
NUMBERS = 7


def _forward(scores: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    n, dtype = scores.shape[0], accumulation_dtype(scores.dtype)
    loss = scores.new_empty(() if options[-1] else n, dtype=dtype)
    return loss, scores.new_empty(NUMBERS * n + 1, dtype=dtype)


forward = operation("score_loss.forward", "score_loss_forward", _forward, has_cpu=False)
backward = operation("score_loss.backward", "score_loss_backward", like_first, has_cpu=False)
