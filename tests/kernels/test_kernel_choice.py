"""Which implementation runs, and that torch accepts each operation."""

import pytest
import torch

from lastlayer import entmax, kernels, sparsemax, topk_softmax

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def test_what_can_run_here():
    available = kernels.available()
    assert set(available) == set(kernels.IMPLEMENTATIONS)
    assert available["reference"] is None
    assert available["cpu"] is None
    assert (
        available["triton"] is None
        or "triton" in available["triton"]
        or "CUDA" in available["triton"]
    )


@pytest.mark.parametrize("op", ["entmax", "entmax_backward", "entmax_support", "topk_softmax"])
def test_what_auto_takes(op):
    for dtype in FLOATING:
        assert kernels.selected(op, "cpu", dtype) == "cpu"
        assert kernels.selected(op, "mps", dtype) == "reference"
    assert kernels.selected(op, "cuda", torch.float64) == "reference"
    if kernels.available()["triton"] is None:
        assert kernels.selected(op, "cuda", torch.bfloat16) == "triton"
    with pytest.raises(ValueError, match=r"op: expected one of .* got 'softmax'"):
        kernels.selected("softmax", "cpu")


@pytest.mark.parametrize("function", [sparsemax, entmax, lambda s, **o: topk_softmax(s, 2, **o)])
def test_a_forced_implementation_that_cannot_run_raises(function):
    with pytest.raises(ValueError, match=r"impl: 'triton' cannot run .* no torch.float64|'triton'"):
        function(torch.zeros(2, 3, dtype=torch.float64), impl="triton")
    with pytest.raises(ValueError, match=r"impl: 'cpu' cannot run .* on 'meta'; use impl='auto'"):
        function(torch.zeros(2, 3, device="meta"), impl="cpu")


def test_every_implementation_that_runs_agrees():
    scores = torch.randn(5, 70)
    running = [name for name, reason in kernels.available().items() if reason is None]
    for function in (
        sparsemax,
        entmax,
        lambda s, **o: entmax(s, 1.2, **o),
        lambda s, **o: topk_softmax(s, 3, **o),
    ):
        expected = function(scores, impl="reference")
        for impl in running:
            assert (function(scores, impl=impl) - expected).abs().max() < 2e-6, impl


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_accepts_the_operations(dtype, device):
    scores = torch.randn(3, 4, 9, device=device).to(dtype)
    row_alpha = torch.full((3, 4), 1.3, device=device)
    probs = torch.ops.lastlayer.entmax(scores, 1.5, None)
    transposed = torch.randn(9, 4, device=device).to(dtype).t()
    cases = [
        (torch.ops.lastlayer.entmax, (scores, 1.5, None)),
        (torch.ops.lastlayer.entmax, (transposed, 2.0, None)),
        (torch.ops.lastlayer.entmax, (scores, float("nan"), row_alpha)),
        (torch.ops.lastlayer.entmax_backward, (probs, scores, 1.5, None)),
        (torch.ops.lastlayer.entmax_support, (scores, 1.5, None, 5)),
        (torch.ops.lastlayer.topk_softmax, (scores, 2)),
        (torch.ops.lastlayer.topk_softmax, (transposed, 2)),
        (torch.ops.lastlayer.entmax, (scores[:0], 1.5, None)),
    ]
    for op, arguments in cases:
        torch.library.opcheck(op.default, arguments)
