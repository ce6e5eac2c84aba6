"""What a verification finds, and how far a result may be from its float64 truth.

Nothing of ours is timed before it passes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Largest accepted |loss − truth| / |truth|.
LOSS_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 1e-3,
}
# Largest accepted ‖gradient − truth‖ / ‖truth‖.
GRADIENT_TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a verification found; families add what they measure.

    Attributes:
        reason: None where the result is right, else what is wrong.
    """

    reason: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the result is right."""
        return self.reason is None


def poison(like: Tensor) -> None:
    """Leave NaN in memory that the next result is likely to get: unwritten entries then show."""
    if like.is_cuda:
        torch.full_like(like, float("nan"))


def relative_error(got: Tensor, truth: Tensor) -> float:
    """‖got − truth‖ / ‖truth‖ in float64, with a small copy at a time.

    Args:
        got: a matrix, or one number, in any floating dtype.
        truth: what it should be, in float64.
    """
    got, truth = torch.atleast_1d(got, truth)
    wrong, right = truth.new_zeros(()), truth.new_zeros(())
    rows = max(1, _COPIED // max(1, truth.shape[-1]))
    for some, exact in zip(got.split(rows), truth.split(rows), strict=True):
        wrong += (some.double() - exact).square().sum()
        right += exact.square().sum()
    return float((wrong / right.clamp_min(1e-300)).sqrt())


# Numbers that are compared at a time.
_COPIED = 1 << 26
