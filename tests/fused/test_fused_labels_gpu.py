"""Fused multi-label losses on a GPU: against float64, memory, no waiting, CUDA graphs."""

import pytest
import torch

from lastlayer.fused import linear_bce_loss, linear_zlpr_loss
from waits import no_waits

pytestmark = pytest.mark.gpu
with_each_loss = pytest.mark.parametrize(
    "loss", [linear_zlpr_loss, linear_bce_loss], ids=["zlpr", "bce"]
)


def made(n, d, v, m, dtype=torch.bfloat16):
    hidden = torch.randn(n, d, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(v, d, device="cuda") / d**0.5).to(dtype).requires_grad_()
    lists = torch.randint(v, (n, m), device="cuda")
    lists[::3, 0] = -100
    bias = torch.randn(v, device="cuda").to(dtype).requires_grad_()
    return hidden, weight, lists, bias


@with_each_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.01])
def test_against_float64(loss, dtype, smoothing):
    hidden, weight, lists, bias = made(67, 96, 5003, 3, dtype)
    leaves = hidden, weight, bias
    exact = [each.detach().cpu().double().requires_grad_() for each in leaves]
    right = loss(exact[0], exact[1], lists.cpu(), exact[2], label_smoothing=smoothing)
    slopes = torch.autograd.grad(right, exact)
    most = 1e-3 if dtype == torch.float32 else 1e-2
    for chunk_classes in (700, "auto"):
        options = {"label_smoothing": smoothing, "chunk_classes": chunk_classes}
        ours = loss(hidden, weight, lists, bias, **options)
        assert ours.item() == pytest.approx(right.item(), rel=2e-3)
        for one, slope in zip(torch.autograd.grad(ours, leaves), slopes, strict=True):
            assert (one.cpu().double() - slope).norm() <= most * slope.norm()


@with_each_loss
def test_the_host_never_waits(loss):
    problem = made(64, 32, 1000, 4)
    offsets = torch.arange(0, 257, 4, device="cuda")
    with no_waits():
        loss(*problem).backward()
        hidden, weight, lists, bias = problem
        loss(hidden, weight, lists.flatten(), bias, offsets=offsets).backward()


@with_each_loss
def test_results_repeat(loss):
    problem = made(300, 64, 20_000, 5)
    first, second = (
        torch.autograd.grad(loss(*problem), (problem[0], problem[1])) for _ in range(2)
    )
    assert all(torch.equal(*each) for each in zip(first, second, strict=True))


@with_each_loss
def test_it_can_be_captured(loss):
    hidden, weight, lists, _ = made(64, 32, 1000, 4)

    def step():
        return torch.autograd.grad(loss(hidden, weight, lists), (hidden, weight))

    expected = step()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    graph.replay()
    torch.testing.assert_close(replayed, expected)


@with_each_loss
@pytest.mark.parametrize(("chunk_classes", "allowed"), [("auto", 1.0e9), ("low", 0.35e9)])
def test_peak_memory(loss, chunk_classes, allowed):
    hidden, weight, lists, _ = made(1024, 64, 1_000_000, 8)
    loss(hidden, weight, lists, chunk_classes=chunk_classes).backward()
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss(hidden, weight, lists, chunk_classes=chunk_classes).backward()
    results = hidden.grad.nbytes + weight.grad.nbytes
    assert torch.cuda.max_memory_allocated() - before - results < allowed
