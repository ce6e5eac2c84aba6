"""Inputs that break kernels, and comparisons with the reference in float64."""

import math

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._torch import accumulation_dtype
from lastlayer.kernels.entmax import reference as entmax_reference
from lastlayer.kernels.topk_softmax import reference as topk_reference

ALPHAS = (1.0, 1.05, 1.3, 1.5, 2.0, 3.0)
PROBABILITY = {torch.float64: 1e-10, torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
GRADIENT = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 3e-3}


def rows(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Random rows, flat to spread, and then the nasty ones; each of ``n`` scores."""
    largest = torch.finfo(dtype).max
    plain = [scale * torch.randn(n, dtype=torch.float64) for scale in (0.01, 1.0, 3.0, 100.0)]
    ties = torch.randint(3, (n,)).double()
    masked = torch.where(torch.rand(n) < 0.7, -math.inf, torch.randn(n).double())
    one_huge = torch.randn(n).double()
    one_huge[n // 2] = min(1e20, largest / 4)
    both_ends = torch.randn(n).double().sign() * min(3e38, largest)
    with_nan, with_infinity, lowest = (torch.randn(n).double() for _ in range(3))
    with_nan[n // 3] = math.nan
    with_infinity[n - 1] = math.inf
    lowest[0] = -largest
    nasty = [
        ties,
        torch.full((n,), 7.25, dtype=torch.float64),
        torch.zeros(n, dtype=torch.float64),
        masked,
        torch.full((n,), -math.inf, dtype=torch.float64),
        one_huge,
        one_huge * min(1e18, largest / 8) / one_huge.abs().max(),
        both_ends,
        with_nan,
        with_infinity,
        lowest,
        (torch.randn(n) - min(1e6, largest / 64)).double(),
    ]
    return torch.stack(plain + nasty).to(device, dtype)


def check_entmax(impl: str, scores: Tensor, alpha: float, row_alpha: Tensor | None = None) -> None:
    """Forward equals the reference in float64, NaN for NaN, and its rows sum to 1."""
    probs = kernels.entmax.forward(impl, scores, alpha, row_alpha)
    expected = entmax_reference.forward(scores.double(), alpha, _double(row_alpha))
    assert probs.dtype == scores.dtype
    steepest = alpha if row_alpha is None else float(row_alpha.max())
    tolerance = PROBABILITY[scores.dtype]
    if steepest > 2:  # an infinite slope at the edge of the support
        tolerance = max(tolerance, 2e-3)
    assert_same(probs, expected, tolerance)
    totals = probs.double().sum(-1)
    solved = totals.isfinite() & (scores > -math.inf).any(-1)
    within = {torch.float64: 1e-10, torch.float32: 1e-6}.get(scores.dtype, 4e-3)
    if impl == "triton" and scores.device.type == "cpu":
        # The interpreter cuts off what does not fit into bfloat16; hardware rounds to nearest.
        within *= 2
    assert (totals[solved] - 1).abs().max() <= within


def check_entmax_backward(
    impl: str, scores: Tensor, alpha: float, row_alpha: Tensor | None = None
) -> None:
    """Backward equals the reference in float64 on the same probabilities."""
    probs = entmax_reference.forward(scores.double(), alpha, _double(row_alpha)).to(scores.dtype)
    grad = torch.randn(scores.shape, device=scores.device).to(scores.dtype)
    product = kernels.entmax.backward(impl, probs, grad, alpha, row_alpha)
    expected = entmax_reference.backward(probs.double(), grad.double(), alpha, _double(row_alpha))
    assert product.dtype == grad.dtype
    size = expected.nan_to_num().abs().amax(-1, keepdim=True).clamp(min=1.0)
    assert_same(product.double() / size, expected / size, GRADIENT[scores.dtype])
    assert (product[probs == 0] == 0).all()


def check_entmax_support(
    impl: str, scores: Tensor, alpha: float, row_alpha: Tensor | None = None
) -> None:
    """The compact result is the dense one, in order and padded; a narrow one is its beginning."""
    n = scores.shape[-1]
    room = n + 3
    values, indices, size = kernels.entmax.support(impl, scores, alpha, row_alpha, room)
    expected = entmax_reference.forward(scores.double(), alpha, _double(row_alpha))
    steepest = alpha if row_alpha is None else float(row_alpha.max())
    tolerance = max(PROBABILITY[scores.dtype], 2e-3 if steepest > 2 else 0)
    assert ((indices >= 0) & (indices < n)).all()
    dense = values.new_zeros(scores.shape).scatter_add(-1, indices, values)
    assert_same(dense, expected, tolerance)
    padding = torch.arange(room, device=scores.device) >= size[:, None]
    assert (values[padding] == 0).all()
    assert (indices[padding] == 0).all()
    assert ((indices.diff(dim=-1) > 0) | padding[:, 1:]).all()
    assert (values[~padding] != 0).all()
    narrow = kernels.entmax.support(impl, scores, alpha, row_alpha, 2)
    assert torch.equal(narrow[2], size)
    assert_same(narrow[0], values[:, :2].double(), 0.0)
    assert torch.equal(narrow[1], indices[:, :2])


def check_topk(impl: str, scores: Tensor, k: int) -> None:
    """Top-k softmax equals the reference in float64, with the same classes kept."""
    probs = kernels.topk_softmax.forward(impl, scores, k)
    expected = topk_reference.forward(scores.double(), k)
    assert probs.dtype == scores.dtype
    assert_same(probs, expected, PROBABILITY[scores.dtype])
    # What is kept but too small for the dtype is 0 in both.
    assert (probs[expected == 0] == 0).all()
    check_topk_logs(impl, scores.to(accumulation_dtype(scores.dtype)), k)


def check_topk_logs(impl: str, scores: Tensor, k: int) -> None:
    """So do log-probabilities, with and without biases."""
    for bias in (None, torch.randn(scores.shape[-1], device=scores.device, dtype=scores.dtype)):
        logs, expected = (torch.full_like(scores, math.nan) for _ in range(2))
        kernels.topk_softmax.logs_into(impl, logs, scores, bias, k)
        topk_reference.logs_into(expected, scores, bias, k)
        assert torch.equal(logs == -math.inf, expected == -math.inf)
        assert torch.equal(logs.isnan(), expected.isnan())
        torch.testing.assert_close(logs, expected, rtol=2e-6, atol=2e-6, equal_nan=True)


def assert_same(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    actual = actual.double()
    assert torch.equal(actual.isnan(), expected.isnan()), "NaN in other places"
    error = (actual - expected).nan_to_num().abs()
    worst = error.flatten().argmax()
    row = int(worst) // expected.shape[-1] if expected.dim() else 0
    assert error.max() <= tolerance, f"off by {error.max():.3g} in row {row}"


def _double(row_alpha: Tensor | None) -> Tensor | None:
    return None if row_alpha is None else row_alpha.double()
