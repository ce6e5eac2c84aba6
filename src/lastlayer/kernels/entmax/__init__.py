"""Operations of the entmax family along the last dimension; README.md has the derivation.

``row_alpha`` has one alpha per row; if it is None, ``alpha`` applies to all rows. ``support``
returns float32 values for half-precision scores if ``wide``, and multiplies scores by ``shrink``:
below 1, the support also includes classes that narrowly miss it. ``log_`` overwrites contiguous
float32 or float64 scores with log-probabilities.
"""

import math

import torch
from torch import Tensor

from lastlayer.kernels._registry import like_first, operation

# Below this |x|, (exp(x) - 1 - x) / x^2 cancels, and the series is exact to float64 precision.
_SMALL = 0.3
_SERIES = tuple(1.0 / math.factorial(k + 2) for k in range(14))


def exp_remainder(x: Tensor) -> Tensor:
    """``(exp(x) - 1 - x) / x**2``, which is 1/2 at 0, by torch operations."""
    small = x.abs() < _SMALL
    safe = torch.where(small, 1.0, x)
    # A large x would overflow in the series and make its gradient NaN, although it is not selected.
    near, series = x.clamp(-_SMALL, _SMALL), torch.zeros_like(x)
    for coefficient in reversed(_SERIES):
        series = series * near + coefficient
    return torch.where(small, series, (torch.expm1(safe) - safe) / safe.square())


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
log_ = operation("entmax.log_", "entmax_log_", writes=("scores",))
support = operation("entmax.support", "entmax_support", _support)
gradients = operation(
    "entmax.gradients",
    "entmax_gradients",
    lambda probs, grad, row_alpha: (like_first(grad), row_alpha.new_empty(probs.shape[:-1])),
)
