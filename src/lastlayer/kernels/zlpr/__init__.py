"""Rows of scores and labels to ZLPR and its gradient, and slabs of scores.

Scores are ``(rows, n)``. Labels are ``target`` of that shape, bool, integers 0 and 1 or floating in
[0, 1]; or it is None, and ``lists`` has the classes of padded lists ``(rows, m)``; or classes
``(k,)`` and where each row starts; or classes, rows and starts in the form of ``Lists.flat``.
Listed classes have the label in ``values`` (1 where it is None) and all others ``smoothing``. Ids
that are negative do not count. Where labels are 0 and 1 lists need no order, and a class may come
twice.
``mask``, bool of the shape of the scores, says which classes count. Forward gives the loss of each
row, four numbers per row from which backward goes on (peak and sum of the negatives, peak and sum
of the positives), and with a mask whether anything counts in the row. Backward takes one upstream
number per row, or one for all.

A slab has the scores of some of the labels, where all labels of a row are never held together. A
score of -inf counts for nothing there and has the gradient 0: so are the listed labels left out.
"""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import like_first, operation


def _losses(
    scores: Tensor, _target: Tensor | None, _lists: object, _values: object, mask: Tensor | None,
    _smoothing: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    loss = _row_losses(scores)
    n_rows = loss.shape[0]
    counts = loss.new_empty(0 if mask is None else n_rows, dtype=torch.bool)
    return loss, loss.new_empty((4, n_rows)), counts


def _row_losses(scores: Tensor) -> Tensor:
    return scores.new_empty(scores.shape[0], dtype=accumulation_dtype(scores.dtype))


def _slab_sums(scores: Tensor, negated: bool) -> tuple[Tensor, Tensor]:
    above = _row_losses(scores)
    return above, above.new_empty(above.shape[0] if negated else 0)


forward = operation("zlpr.forward", "zlpr", _losses)
backward = operation("zlpr.backward", "zlpr_backward", like_first)
slab_sums = operation("zlpr.slab_sums", "zlpr_slab_sums", _slab_sums)
slab_gradient_ = operation("zlpr.slab_gradient_", "zlpr_slab_gradient_", writes=("scores",))
