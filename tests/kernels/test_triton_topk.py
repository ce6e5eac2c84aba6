"""The Triton kernels of top-k softmax, by every path, equal the reference in float64."""

import pytest
import torch
from compare import check_topk, rows
from implementations import ROUNDING, error, few, triton_chosen

from lastlayer import kernels, topk_softmax, topk_softmax_loss

pytest.importorskip("triton")

from lastlayer.kernels.topk_softmax import triton as kernel

if kernels.available()["triton"] is not None:
    pytest.skip(kernels.available()["triton"], allow_module_level=True)

PATHS = ("registers", "one program", "two kernels", "many candidates")


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Sends rows of any width down one path; the last keeps few scores on chip."""
    if request.param != "registers":
        monkeypatch.setattr(kernel, "WIDEST_IN_REGISTERS", 0)
    if request.param in ("two kernels", "many candidates"):
        monkeypatch.setattr(kernel, "WIDEST_IN_ONE_PROGRAM", 0)
    if request.param == "many candidates":
        monkeypatch.setattr(kernel, "MOST_ON_CHIP", 64)
    return request.param


@pytest.mark.thin(3)
@pytest.mark.parametrize("k", few([1, 5, 100], 5))
def test_every_path(path, k, device):
    for n in few([1, 130], 130):
        check_topk("triton", rows(n, device=device), k)


@pytest.mark.thin(3)
@pytest.mark.parametrize("dtype", few([torch.float16, torch.bfloat16], torch.bfloat16))
def test_half_precision(path, dtype, device):
    check_topk("triton", rows(100, dtype, device), 20)


@pytest.mark.parametrize("n", few([2, 63, 1000, 1025, 2049], 63, 1025))
def test_odd_widths_by_the_path_they_take(n, device):
    check_topk("triton", rows(n, device=device), 7)


def test_the_first_of_equals_is_kept(path, device):
    scores = torch.randint(3, (2, 200), device=device).float()
    for k in few([1, 70, 199], 70):
        probs = topk_softmax(scores, k, impl="triton")
        assert ((probs != 0).sum(-1) == k).all()
        kept = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        assert (probs.gather(-1, kept) != 0).all()


def test_minus_zero_equals_zero(path, device):
    """An order of bits would tell them apart; scores do not."""
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]], device=device)
    probs = topk_softmax(scores, 2, impl="triton")
    assert probs.tolist() == [[0.5, 0.5, 0.0, 0.0, 0.0]]


def test_gradients(path, device):
    scores = torch.randn(3, 100, device=device)
    weights = torch.randn(3, 100, device=device)
    gradients = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaf = scores.detach().to(dtype, copy=True).requires_grad_()
        (topk_softmax(leaf, 6, impl=impl) * weights).sum().backward()
        gradients.append(leaf.grad.double())
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("n", [16384, 16385, 131072, 1_000_003])
def test_wide_rows_on_a_gpu(n):
    for k in (1, 50, 20_000):
        check_topk("triton", rows(n, device="cuda"), k)


@pytest.mark.thin(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loss_by_every_path(path, dtype, device):
    for k in few([1, 5, 100], 5):
        scores = rows(130, dtype, device)
        n = len(scores)
        target = torch.randint(130, (n,), device=device)
        target[0] = scores[0].argmax()
        scores[0, target[0]] += 12.0  # nearly right: nothing may cancel
        scores[1] = -torch.inf
        scores[2, target[2]] = -torch.inf
        scores[3, 7] = torch.nan
        scale = torch.randn(n, device=device)
        scale[4] = 0.0
        for given in (scale, None):
            losses, gradient = kernels.topk_softmax.loss("triton", scores, target, given, k)
            wide = None if given is None else given.cpu().double()
            expected = kernels.topk_softmax.loss(
                "reference", scores.cpu().double(), target.cpu(), wide, k
            )
            assert gradient.dtype == dtype
            assert error(losses, expected[0], 1e-5 * (1 + expected[0].nan_to_num().abs())) <= 1
            size = 2 * ROUNDING[dtype] * expected[1].nan_to_num().abs() + 1e-6
            assert error(gradient, expected[1], size) <= 1
            nearly = expected[1][0, target[0]]
            assert error(gradient[0, target[0]], nearly, 2e-2 * nearly.abs() + 1e-7) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_distributions(dtype, device):
    """The kernel of losses takes class ids only, and the loss distributions as well."""
    scores = rows(30, dtype, device).requires_grad_()
    target = torch.rand(scores.shape, device=device).softmax(-1)
    exact = scores.detach().double().requires_grad_()
    truth = topk_softmax_loss(exact, target.double(), 4)
    with triton_chosen():
        loss = topk_softmax_loss(scores, target, 4)
        (made,) = torch.autograd.grad(loss, scores)
    assert error(loss, truth) < 1e-5
    assert error(made, torch.autograd.grad(truth, exact)[0]) < 4 * ROUNDING[dtype]
