"""The operations of the entmax family. Rows are the last dimension; see README.md for the why.

``alpha`` counts where ``row_alpha`` is None; else ``row_alpha`` has one alpha a row. ``wide``
asks for values in float32 from half-precision scores; ``shrink`` multiplies the scores: below 1
the support takes in classes that just miss it.
"""

import torch
from torch import Tensor

from lastlayer.kernels._registry import Operation


def _like_first(first: Tensor, *_: object) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


def _like_second(_first: Tensor, second: Tensor, *_: object) -> Tensor:
    return torch.empty_like(second, memory_format=torch.contiguous_format)


def _compact(
    scores: Tensor,
    _alpha: float,
    _row_alpha: Tensor | None,
    max_support: int,
    wide: bool = False,
    _shrink: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    batch = scores.shape[:-1]
    dtype = torch.float32 if wide and scores.itemsize < 4 else scores.dtype
    return (
        scores.new_empty(*batch, max_support, dtype=dtype),
        scores.new_empty(*batch, max_support, dtype=torch.int64),
        scores.new_empty(batch, dtype=torch.int64),
    )


forward = Operation(
    "entmax",
    "(Tensor scores, float alpha, Tensor? row_alpha) -> Tensor",
    __name__,
    "forward",
    _like_first,
)
backward = Operation(
    "entmax_backward",
    "(Tensor probs, Tensor grad, float alpha, Tensor? row_alpha) -> Tensor",
    __name__,
    "backward",
    _like_second,
)
support = Operation(
    "entmax_support",
    "(Tensor scores, float alpha, Tensor? row_alpha, int max_support, "
    "bool wide=False, float shrink=1.0) -> (Tensor, Tensor, Tensor)",
    __name__,
    "support",
    _compact,
)
