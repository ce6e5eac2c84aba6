"""Rows to the Fenchel-Young loss of entmax and its gradient, from what is known of each row.

* ``forward_``: from probabilities, which become the gradient in place. The target has class ids, or
  but for ``triton.py`` distributions; nor has that an alpha per row.
* ``listed``: from the scores of a few listed classes. A class of -1 is padding, whose score does
  not count.
* ``flat_``, in ``triton.py`` alone: from scores with wide supports, which become the gradient in
  place; elsewhere probabilities are made first.

``alpha`` 1 takes Shannon's entropy, as softmax over all, the k largest or the listed scores does.
"""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import operation


def _losses(probs: Tensor, _scores: Tensor, target: Tensor, *_: object) -> Tensor:
    return probs.new_empty(target.shape[0], dtype=accumulation_dtype(probs.dtype))


def _listed_losses(
    scores: Tensor, classes: Tensor, target: Tensor, _scores: Tensor, row_scale: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n, k = classes.shape
    shape = (n, k + 1) if row_scale is not None else (0,)
    loss = torch.empty_like(target, dtype=scores.dtype)
    return loss, scores.new_empty(shape), classes.new_empty(shape)


forward_ = operation("entmax_rows.forward_", "entmax_rows_", _losses, ("probs", "slopes"))
listed = operation("entmax_rows.listed", "list_rows", _listed_losses)
