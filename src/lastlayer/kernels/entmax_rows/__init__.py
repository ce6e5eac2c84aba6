"""The Fenchel-Young loss of entmax and its gradient, for rows of probabilities or scores.

* ``forward_``: from probabilities, which become the gradient in place. The target has class ids or
  distributions. ``triton.py`` supports neither distributions nor one alpha per row.
* ``listed``: from the scores of a few listed classes. A class of -1 is padding, whose score is
  ignored.
* ``flat_``, only in ``triton.py``: from scores with wide supports, which become the gradient in
  place. Without it, probabilities are computed first.

``alpha`` 1 means the Shannon entropy, for softmax over all, the k largest or the listed scores.
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
