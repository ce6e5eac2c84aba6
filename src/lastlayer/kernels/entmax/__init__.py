"""The operations of the entmax family. Rows are the last dimension; see README.md for the why.

``alpha`` counts where ``row_alpha`` is None; else ``row_alpha`` has one alpha per row. ``wide``
asks for values in float32 from half-precision scores; ``shrink`` multiplies the scores: below 1
the support takes in classes that just miss it.
"""

import torch
from torch import Tensor

from lastlayer.kernels._registry import like_first, operation


def _support(
    scores: Tensor, _alpha: float, _row_alpha: Tensor | None, max_support: int, wide: bool = False,
    _shrink: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch = scores.shape[:-1]
    dtype = torch.float32 if wide and scores.itemsize < 4 else scores.dtype
    return (
        scores.new_empty(*batch, max_support, dtype=dtype),
        scores.new_empty(*batch, max_support, dtype=torch.int64),
        scores.new_empty(batch, dtype=torch.int64),
    )


forward = operation("entmax.forward", "entmax", like_first)
backward = operation(
    "entmax.backward", "entmax_backward", lambda _probs, grad, *_: like_first(grad)
)
support = operation("entmax.support", "entmax_support", _support)
alpha_gradient = operation(
    "entmax.alpha_gradient",
    "entmax_alpha_gradient",
    lambda probs, _grad, row_alpha: row_alpha.new_empty(probs.shape[:-1]),
)
