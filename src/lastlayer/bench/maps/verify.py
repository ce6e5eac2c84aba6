"""Comparison of a map's result with its float64 truth."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lastlayer.bench.verify import GRADIENT_TOLERANCE, Verdict, poison, relative_error

# Largest accepted |row sum − 1|, which is also the largest accepted error of one probability.
SUM_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 4e-3,
}


@dataclass(frozen=True, kw_only=True)
class MapVerdict(Verdict):
    """What a verification found.

    Attributes:
        error: the largest error of an entry; in the direction forward+backward, the relative error
            of the gradient.
        row_sum_error: the largest |row sum − 1| over all rows.
    """

    error: float
    row_sum_error: float


def sample_rows(scores: Tensor) -> Tensor:
    """Which rows are compared with the reference: the first, the last and random ones between."""
    (rows, n), device = scores.shape, scores.device
    # float64 references of wide rows are slow on a CPU; row sums are checked on all rows anyway.
    most = 64 if device.type == "cuda" else max(4, min(64, 2**19 // max(n, 1)))
    if rows <= most:
        return torch.arange(rows, device=device)
    chosen = torch.randint(rows, (most,), device=device)
    chosen[0], chosen[-1] = 0, rows - 1
    return chosen


def largest(errors: Tensor) -> float:
    """The largest absolute value; NaN if any is NaN, 0 if there is none."""
    return float(errors.abs().max()) if errors.numel() else 0.0


def row_sum_error(probabilities: Tensor) -> float:
    """The largest |row sum − 1|, summed in float64."""
    return largest(probabilities.sum(-1, dtype=torch.float64) - 1)


def judge(error: float, sum_error: float, dtype: torch.dtype, *, gradient: bool) -> MapVerdict:
    """Hold both errors against the tolerances of a dtype; NaN never passes."""
    tolerance = (GRADIENT_TOLERANCE if gradient else SUM_TOLERANCE)[dtype]
    reason = None
    if not sum_error <= SUM_TOLERANCE[dtype]:
        reason = f"row sums off by {sum_error:.1e}"
    elif not error <= tolerance:
        reason = f"{'gradient' if gradient else 'entries'} off by {error:.1e}"
    return MapVerdict(error=error, row_sum_error=sum_error, reason=reason)


def verify_probabilities(
    call: Callable[[Tensor], Tensor],
    expected: Callable[[Tensor, Tensor], Tensor],
    scores: Tensor,
) -> MapVerdict:
    """Verify a map from scores to probabilities over the last dimension.

    Args:
        call: the map.
        expected: gives the float64 truth from float64 scores and the float64 result; the result
            is only looked at where several answers are right, such as ties.
        scores: a matrix of scores.
    """
    poison(scores)
    result = call(scores)
    rows = sample_rows(scores)
    got = result[rows].double()
    error = largest(got - expected(scores[rows].double(), got))
    return judge(error, row_sum_error(result), scores.dtype, gradient=False)


def verify_gradient(
    call: Callable[[Tensor], Tensor],
    truth: Callable[[Tensor], Tensor],
    scores: Tensor,
    cotangent: Tensor,
) -> MapVerdict:
    """Verify a map's gradient against autograd through the float64 truth, and its row sums."""
    poison(scores)
    leaf = scores.detach().requires_grad_()
    result = call(leaf)
    (gradient,) = torch.autograd.grad(result, leaf, cotangent)
    rows = sample_rows(scores)
    exact_leaf = scores[rows].double().requires_grad_()
    exact = truth(exact_leaf)
    (exact_gradient,) = torch.autograd.grad(exact, exact_leaf, cotangent[rows].double())
    # The gradient jumps where a score enters the support, so rows in which rounding moved such a
    # score across the edge have two right answers.
    same_support = ((result[rows] > 0) == (exact > 0)).all(-1)
    error = relative_error(gradient[rows][same_support], exact_gradient[same_support])
    sum_error = row_sum_error(result.detach())
    if 2 * int(same_support.sum()) < len(rows):
        return MapVerdict(
            error=error,
            row_sum_error=sum_error,
            reason="the support differs from the truth in most rows",
        )
    return judge(error, sum_error, scores.dtype, gradient=True)
