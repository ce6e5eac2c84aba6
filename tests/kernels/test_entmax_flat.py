"""Rows of scores straight to the entmax loss and its gradient, against float64.

There is a Triton kernel only; on a machine without a GPU it runs in Triton's interpreter.
"""

import math

import pytest
import torch
from implementations import few
from torch import Tensor

from lastlayer import kernels

pytest.importorskip("triton")
if kernels.available()["triton"] is not None:
    pytest.skip(kernels.available()["triton"], allow_module_level=True)

from lastlayer.kernels.entmax_rows import triton as kernel

ON_A_GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [(1, 1), (3, 2), (5, 33), (2, 1000), (3, 9001)]
with_each_alpha = pytest.mark.parametrize("alpha", [1.5, 2.0, 1.25, 1.2])


def truth(scores: Tensor, target: Tensor, row_scale: Tensor, alpha: float):
    """Loss and gradient by bisection of the threshold."""
    values = scores.double()
    excess = alpha - 1.0
    low = (excess * values).amax(-1, keepdim=True) - 1.0
    high = low + 1.0
    for _ in range(80):
        middle = (low + high) / 2
        total = (excess * values - middle).clamp(min=0).pow(1 / excess).sum(-1, keepdim=True)
        low, high = torch.where(total >= 1, middle, low), torch.where(total >= 1, high, middle)
    probs = (excess * values - low).clamp(min=0).pow(1 / excess)
    place = target.unsqueeze(-1)
    lead = torch.where(probs > 0, values - values.gather(-1, place), 0.0)
    loss = (probs * lead + (probs - probs.pow(alpha)) / (alpha * excess)).sum(-1)
    gradient = probs.scatter_add(-1, place, -torch.ones_like(place, dtype=torch.float64))
    return loss, gradient * row_scale.double().unsqueeze(-1)


def problem(n_rows, n, scale, dtype, device):
    scores = (scale * torch.randn(n_rows, n, device=device)).to(dtype)
    target = torch.randint(n, (n_rows,), device=device)
    return scores, target, torch.rand(n_rows, device=device) + 0.1


def check(function, scores, target, row_scale, alpha, within):
    loss, gradient = truth(scores, target, row_scale, alpha)
    kept = scores.clone()
    alone = function(kept, target, None, alpha)
    assert torch.equal(kept, scores), "no gradient was asked for"
    made = function(kept, target, row_scale, alpha)
    assert torch.equal(made, alone)
    size = 1 + scores.double().abs().max().item()
    assert (made.double() - loss).abs().max() <= 2e-6 * size
    assert (kept.double() - gradient).abs().max() <= within * 1.2


@pytest.mark.thin(3)
@with_each_alpha
@pytest.mark.parametrize("dtype", few(DTYPES, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("scale", few([0.0, 0.01, 1.0, 100.0], 0.01, 100.0))
@pytest.mark.parametrize("shape", few(SHAPES, (1, 1), (5, 33), (2, 9001)))
def test_kernel(shape, scale, dtype, alpha, device):
    inputs = problem(*shape, scale, dtype, device)
    check(kernel.flat_, *inputs, alpha, ROUNDING[dtype])


@with_each_alpha
def test_offsets_cost_no_accuracy(alpha, device):
    scores, target, row_scale = problem(4, 300, 1.0, torch.float32, device)
    scores = (scores * 8).round() / 8
    moved = scores + 2.0**18
    assert torch.equal(
        kernel.flat_(scores, target, row_scale, alpha),
        kernel.flat_(moved, target, row_scale, alpha),
    )
    assert torch.equal(scores, moved)


@with_each_alpha
def test_masked_classes_and_rows_without_a_result(alpha, device):
    scores, target, row_scale = problem(6, 100, 1.0, torch.float32, device)
    target[:] = 3
    scores[:, 50:] = -math.inf
    scores[1, :] = -math.inf
    scores[2, 7] = math.nan
    scores[3, 7] = math.inf
    scores[4, 3] = -math.inf
    rows = torch.tensor([0, 5], device=device)
    loss, gradient = truth(scores[rows], target[rows], row_scale[rows], alpha)
    made = kernel.flat_(scores, target, row_scale, alpha)
    torch.testing.assert_close(made[rows].double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scores[rows].double(), gradient, rtol=1e-5, atol=1e-6)
    assert made[1] == math.inf
    assert made[4] == math.inf
    assert made[2].isnan()
    assert made[3].isnan()
    assert scores[2].isnan().all()
    assert scores[3].isnan().all()
    assert (scores[0, 50:] == 0).all()
    assert (scores[1] == 0).all(), "nothing to move"


@with_each_alpha
def test_a_million_equal_scores(alpha, device):
    n = 1_000_003
    loss = kernel.flat_(
        torch.zeros(1, n, device=device), torch.tensor([5], device=device), None, alpha
    )
    exact = (1 - n ** (1 - alpha)) / (alpha * (alpha - 1))
    assert abs(loss.item() - exact) <= 2.5e-7 * exact


def test_no_rows(device):
    loss = kernel.flat_(torch.empty(0, 5, device=device), torch.empty(0), None, 1.5)
    assert loss.shape == (0,)


@pytest.mark.gpu
@with_each_alpha
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 0.01, 0.3, 2.0])
def test_wide_rows_on_a_gpu(scale, dtype, alpha):
    for n in (32000, 128256, 1_000_003):
        inputs = problem(40, n, scale, dtype, "cuda")
        check(kernel.flat_, *inputs, alpha, ROUNDING[dtype])
