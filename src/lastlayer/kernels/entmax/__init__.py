"""The operations of the entmax family. Rows are the last dimension; see README.md for the why.

``alpha`` counts where ``row_alpha`` is None; else ``row_alpha`` has one alpha per row. ``wide``
asks for values in float32 from half-precision scores; ``shrink`` multiplies the scores: below 1
the support takes in classes that just miss it. ``log_`` overwrites scores, in float32 or float64
and contiguous, with log-probabilities.
"""

import math

import torch
from torch import Tensor

from lastlayer.kernels._registry import like_first, operation

# Below this size (exp(x) - 1 - x) / x^2 cancels; up to it the series reaches float64.
_SMALL = 0.3
_SERIES = tuple(1.0 / math.factorial(k + 2) for k in range(14))


def exp_remainder(x: Tensor) -> Tensor:
    """``(exp(x) - 1 - x) / x**2``, 1/2 at 0, by torch operations."""
    small = x.abs() < _SMALL
    safe = torch.where(small, 1.0, x)
    # Large x would overflow in the branch that is not taken, and poison its gradient.
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
