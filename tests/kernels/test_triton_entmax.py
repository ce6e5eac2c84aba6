"""The Triton kernels of entmax, by every path, equal the reference in float64.

On a machine without a GPU they run in Triton's interpreter.
"""

import pytest
import torch
from compare import check_entmax, check_entmax_backward, check_entmax_support, rows
from implementations import few

from lastlayer import entmax, entmax_support, kernels
from waits import no_waits

pytest.importorskip("triton")

from lastlayer.kernels import _triton
from lastlayer.kernels.entmax import triton as kernel

if kernels.available()["triton"] is not None:
    pytest.skip(kernels.available()["triton"], allow_module_level=True)

CHECKS = (check_entmax, check_entmax_backward, check_entmax_support)
PATHS = ("registers", "one program", "two kernels", "many candidates")


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Sends rows of any width down one path; the last keeps few scores on chip."""
    if request.param != "registers":
        monkeypatch.setattr(kernel, "WIDEST_IN_REGISTERS", 0)
        monkeypatch.setattr(kernel, "WIDEST_BACKWARD", 0)
    if request.param in ("two kernels", "many candidates"):
        monkeypatch.setattr(kernel, "WIDEST_IN_ONE_PROGRAM", 0)
    if request.param == "many candidates":
        few = lambda _, width: dict(GROUP=max(1, 64 // width), num_warps=1)  # noqa: E731
        monkeypatch.setattr(kernel, "group_and_warps", few)
    return request.param


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("alpha", few([1.0, 1.25, 1.3, 1.5, 2.0, 3.0], 1.25, 1.3, 2.0))
def test_every_path(path, check, alpha, device):
    for n in few([1, 130], 130):
        check("triton", rows(n, device=device), alpha)


@pytest.mark.parametrize("check", CHECKS)
def test_one_alpha_a_row(path, check, device):
    scores = rows(130, device=device)
    check("triton", scores, float("nan"), 1 + 1.5 * torch.rand(len(scores), device=device))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("dtype", few([torch.float16, torch.bfloat16], torch.bfloat16))
def test_half_precision(path, check, dtype, device):
    check("triton", rows(100, dtype, device), 1.5)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("alpha", few([1.5, 2.0], 1.5))
@pytest.mark.parametrize("n", few([2, 63, 1000, 1025, 2049], 63, 1025))
def test_odd_widths_by_the_path_they_take(check, alpha, n, device):
    check("triton", rows(n, device=device), alpha)


@pytest.mark.parametrize("check", CHECKS)
def test_any_alpha_on_a_wide_row(check, device):
    check("triton", rows(2049, device=device)[1:9], 1.3)


def test_wide_blocks(path, monkeypatch, device):
    """Rows so wide that a block is wider than the smallest."""
    monkeypatch.setattr(_triton, "MAX_PEAKS", 4)
    scores = rows(few([600], 200)[0], device=device)
    check_entmax("triton", scores, 1.5)
    check_entmax_backward("triton", scores, 2.0)
    check_entmax_support("triton", scores, 2.0)


def test_layouts(path, device):
    base = torch.randn(2, 2, 60, device=device)
    for scores in (
        base[..., ::2],
        base.transpose(0, 2),
        base[:, :, 3:50],
        base[:1].expand(3, 2, 60),
    ):
        expected = entmax(scores, 1.5, impl="reference")
        assert (entmax(scores, 1.5, impl="triton") - expected).abs().max() < 2e-6


@pytest.mark.parametrize("alpha", [1.3, 2.0])
def test_gradients_through_the_map_and_its_support(path, alpha, device):
    scores = 2 * torch.randn(4, 90, device=device)
    weights = torch.randn(4, 90, device=device)

    def gradient(impl, dtype):
        leaf = scores.detach().to(dtype, copy=True).requires_grad_()
        (entmax(leaf, alpha, impl=impl) * weights).sum().backward()
        return leaf.grad.double()

    expected = gradient("reference", torch.float64)
    assert (gradient("triton", torch.float32) - expected).abs().max() < 1e-4
    leaf = scores.clone().requires_grad_()
    support = entmax_support(leaf, alpha, 90, impl="triton")
    (support.values * weights.gather(-1, support.indices)).sum().backward()
    assert (leaf.grad.double() - expected).abs().max() < 1e-4


def test_the_gradient_for_alpha(device):
    scores = torch.randn(3, 40, device=device)
    slopes = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        alpha = torch.full((3, 1), 1.4, device=device, dtype=dtype, requires_grad=True)
        entmax(scores.to(dtype), alpha, impl=impl).square().sum().backward()
        slopes.append(alpha.grad.double())
    assert (slopes[0] - slopes[1]).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 70)])
def test_empty_inputs(shape, device):
    scores = torch.zeros(shape, device=device)
    assert entmax(scores, impl="triton").shape == shape
    assert entmax_support(scores, 1.5, 4, impl="triton").values.shape == (*shape[:-1], 4)


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("n", [16384, 16385, 131072, 1_000_003])
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_wide_rows_on_a_gpu(check, n, alpha):
    check("triton", rows(n, device="cuda"), alpha)


@pytest.mark.gpu
def test_the_hot_path_never_waits_for_the_device():
    scores = torch.randn(8, 5000, device="cuda", requires_grad=True)
    entmax(scores).sum().backward()
    upstream = torch.ones_like(scores)
    with no_waits():
        entmax(scores).backward(upstream)
        entmax_support(scores, 1.5, 64)
