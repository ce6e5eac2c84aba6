"""Binary cross entropy and the asymmetric loss of rows of scores with dense labels.

Scores are ``(rows, n)``. Labels have the same shape: bool, integers 0 and 1, or floats in [0, 1].
``mask``, bool of that shape, is True for classes that are kept. If both gammas and the margin are
0, the loss is the binary cross entropy. ``forward`` returns the loss of each row, and with a mask
whether any class of the row is kept. ``backward`` computes the gradient from scores and labels, and
takes an upstream gradient per row, or one for all. ``slab_`` computes loss and gradient together,
in place, if all labels are ``smoothing``.
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
