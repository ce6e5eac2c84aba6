"""Rows of scores and labels to binary cross entropies, plain or asymmetric, and their gradient.

Scores are ``(rows, n)``, labels of that shape bool, integers 0 and 1 or floating in [0, 1].
``mask``, bool of that shape, says which classes count. With both gammas and the margin at 0 it is
the plain cross entropy. Forward gives the loss of each row, and with a mask whether anything counts
in it; nothing else is kept for backward, which takes one upstream number per row, or one for all.
``slab_`` makes both at once, in place, for labels that are all ``smoothing``.
"""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import like_first, operation


def _losses(
    scores: Tensor, _target: Tensor, mask: Tensor | None, *_: object
) -> tuple[Tensor, Tensor]:
    n_rows = scores.shape[0]
    losses = scores.new_empty(n_rows, dtype=accumulation_dtype(scores.dtype))
    return losses, losses.new_empty(0 if mask is None else n_rows, dtype=torch.bool)


forward = operation("label_loss.forward", "label_loss", _losses)
backward = operation("label_loss.backward", "label_loss_backward", like_first)
slab_ = operation(
    "label_loss.slab_",
    "label_loss_slab_",
    lambda scores, *_: scores.new_empty(len(scores), dtype=accumulation_dtype(scores.dtype)),
    ("scores",),
)
