"""ZLPR of rows of scores and labels, its gradient, and both on slabs of scores.

Scores are ``(rows, n)``. Labels are ``target`` of that shape: bool, integers 0 and 1, or floating
in [0, 1]. If it is None, ``lists`` has the classes of padded lists ``(rows, m)``; or classes
``(k,)`` and where each row starts; or classes, rows and starts in the form of ``Lists.flat``.
Listed classes have the label in ``values`` (1 if it is None) and all others ``smoothing``. Negative
ids are padding. If labels are 0 and 1, lists need no order, and a class may occur twice.

``mask``, bool of the shape of the scores, is True for classes that count. Forward returns the loss
of each row, four numbers per row for backward (peak and sum of the negatives, peak and sum of the
positives), and with a mask whether any class of the row counts. Backward takes one upstream
gradient per row, or one for all.

A slab has the scores of some of the labels, if the scores of all are never stored at once. A score
of -inf adds nothing there and has gradient 0; this is how listed labels are excluded.
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
