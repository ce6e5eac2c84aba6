"""Rows of scores to the Fenchel-Young loss of entmax, and later to its gradient.

``forward`` reads the scores and leaves five numbers per row, from which ``backward`` makes the
probabilities again: nothing of the size of the scores is held in between. ``target`` has class ids
``(rows,)``, distributions ``(rows, n)``, or with ``labels`` what distributions are in proportion
to. On a CPU the gradient is made with the loss instead, see ``entmax_rows``.
"""

from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import like_first, operation


def _forward(scores: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    n, dtype = scores.shape[0], accumulation_dtype(scores.dtype)
    made = scores.new_empty(n, dtype=dtype)
    return made, made.new_empty(n), scores.new_empty(n, 5, dtype=dtype)


forward = operation("score_loss.forward", "score_loss_forward", _forward, has_cpu=False)
backward = operation("score_loss.backward", "score_loss_backward", like_first, has_cpu=False)
