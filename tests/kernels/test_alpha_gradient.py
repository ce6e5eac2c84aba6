"""The gradient of a learned alpha, one number per row, against float64."""

import pytest
import torch
from implementations import DTYPES, every_implementation, few, place, three_threads

import lastlayer
from lastlayer import kernels
from lastlayer.maps.tsallis import alpha_slope

WITHIN = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-5, torch.float16: 2e-5}
SIZES = few((1, 2, 3, 63, 64, 65, 511, 1000, 5000, 9001), 1, 3, 65, 9001)


def alpha_gradient(impl, probs, grad, alpha):
    """Made with that of the scores, which is the same as by itself."""
    scores, made = kernels.entmax.gradients(impl, probs, grad, alpha)
    alone = kernels.entmax.backward(impl, probs, grad, float("nan"), alpha)
    torch.testing.assert_close(scores, alone, rtol=0, atol=0, equal_nan=True)
    return made


def rows(n, dtype, scale, device, count=24):
    """Probabilities of that dtype, which need not sum to 1 to the last bit, and what comes back."""
    alpha = torch.linspace(1.0, 2.6, count)
    scores = scale * torch.randn(count, n).double()
    probs = lastlayer.entmax(scores, alpha.double().unsqueeze(-1)).to(dtype)
    return probs.to(device), torch.randn(count, n).to(dtype).to(device), alpha.to(device)


@pytest.mark.thin(3)
@every_implementation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
def test_each_row_has_the_slope_times_what_comes_back(impl, dtype, n, scale):
    probs, grad, alpha = rows(n, dtype, scale, place(impl, dtype))
    with three_threads():
        made = alpha_gradient(impl, probs, grad, alpha.to(dtype))
    assert made.shape == alpha.shape
    assert made.dtype == dtype
    alpha = alpha if dtype == torch.float32 else alpha.double()
    made = alpha_gradient(impl, probs, grad, alpha).double()
    p, g = probs.double(), grad.double()
    terms = alpha_slope(p, alpha.double()) * (g - (p * g).sum(-1, keepdim=True))
    truth, size = terms.sum(-1), terms.abs().sum(-1)
    if dtype.itemsize < 4:
        # Rounded probabilities do not sum to 1, and the two formulas differ by as much.
        truth = alpha_gradient("reference", p, g, alpha)
    assert bool(((made - truth).abs() <= WITHIN[dtype] * (size + 0.1)).all())


@every_implementation
def test_rows_without_a_result(impl):
    probs, grad, alpha = rows(70, torch.float32, 1.0, place(impl))
    expected = alpha_gradient(impl, probs, grad, alpha)
    probs[3], probs[5] = 0.0, torch.nan
    grad[7] = torch.where(probs[7] == 0, torch.inf, grad[7])
    made = alpha_gradient(impl, probs, grad, alpha)
    assert made[3] == 0.0
    assert bool(made[5].isnan())
    others = [i for i in range(len(alpha)) if i not in (3, 5)]
    torch.testing.assert_close(made[others], expected[others])


@every_implementation
def test_any_number_of_dimensions_and_none_at_all(impl):
    device = place(impl)
    probs = torch.softmax(torch.randn(2, 3, 5, device=device), -1)
    alpha = torch.full((2, 3), 1.2, device=device)
    made = alpha_gradient(impl, probs, torch.randn(2, 3, 5, device=device), alpha)
    assert made.shape == (2, 3)
    none = alpha_gradient(impl, probs[:0], probs[:0], alpha[:0])
    assert none.shape == (0, 3)


def test_the_kernel_and_the_differentiable_way_agree():
    scores = torch.randn(6, 40, dtype=torch.float64, requires_grad=True)
    alpha = torch.linspace(1.1, 2.4, 6, dtype=torch.float64).unsqueeze(-1).requires_grad_()
    grad = torch.randn(6, 40, dtype=torch.float64)
    probs = lastlayer.entmax(scores, alpha)
    (once,) = torch.autograd.grad(probs, alpha, grad, retain_graph=True)
    (again,) = torch.autograd.grad(probs, alpha, grad, create_graph=True)
    torch.testing.assert_close(once, again)
    assert again.requires_grad
