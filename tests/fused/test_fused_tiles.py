"""The way of narrow hidden states, called by itself: on a CPU it runs in Triton's interpreter."""

import numpy as np
import pytest
import torch
from unfused import cross_entropy, distance, scores

from lastlayer import kernels
from lastlayer.fused.cross_entropy import run_tiles
from lastlayer.fused.rows import Problem, Wanted

pytest.importorskip("triton")
if kernels.available()["triton"] is not None:
    pytest.skip(kernels.available()["triton"], allow_module_level=True)


@pytest.fixture(autouse=True)
def _quiet_interpreter():
    """Triton's interpreter is numpy, which warns where hardware makes an inf."""
    with np.errstate(all="ignore"):
        yield


PLAIN = {"smoothing": 0.0, "z_loss": 0.0, "softcap": 0.0, "temperature": 1.0}
CASES = [
    {},
    {"z_loss": 0.02},
    {"softcap": 2.0, "temperature": 0.7},
    {"smoothing": 0.1, "temperature": 1.5},
    {"smoothing": 0.2, "z_loss": 0.01},
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", CASES)
def test_loss_and_gradients(options, weighted, device):
    n, d, v = 40, 24, 150
    dtype = torch.float16
    hidden = torch.randn(n, d, device=device).to(dtype)
    weight = (torch.randn(v, d, device=device) / 2).to(dtype)
    bias = torch.randn(v, device=device).to(dtype)
    target = torch.randint(v, (n,), device=device)
    row_scale = (torch.rand(n, device=device) + 0.5) / n
    class_weight = torch.rand(v, device=device) + 0.5 if weighted else None
    chosen = {**PLAIN, **options}
    given = hidden, weight, bias, target
    wanted = Wanted(True, True, True)
    problem = Problem(*given, row_scale, class_weight, wanted, torch.float32)
    result = run_tiles(problem, tuple(chosen.values()))
    leaves = [each.double().requires_grad_() for each in (hidden, weight, bias)]
    values = scores(*leaves, chosen["softcap"] or None, chosen["temperature"])
    wide = None if class_weight is None else class_weight.double()
    losses = cross_entropy(
        values, target, label_smoothing=chosen["smoothing"], class_weight=wide,
        z_loss=chosen["z_loss"],
    )  # fmt: skip
    torch.testing.assert_close(result.loss.double(), losses, rtol=1e-4, atol=1e-4)
    expected = torch.autograd.grad((losses * row_scale).sum(), leaves)
    for made, true in zip((result.hidden, result.weight, result.bias), expected, strict=True):
        assert distance(made, true) < 3e-3
    alone = Problem(*given, None, class_weight, Wanted(), torch.float32)
    alone = run_tiles(alone, tuple(chosen.values()))
    assert torch.equal(alone.loss, result.loss)
    assert alone.hidden is alone.weight is alone.bias is None


def test_what_is_not_wanted_is_not_made(device):
    hidden = torch.randn(9, 16, device=device).half()
    weight = torch.randn(70, 16, device=device).half()
    target, ones = torch.randint(70, (9,), device=device), torch.ones(9, device=device)
    for wanted in (Wanted(hidden=True), Wanted(weight=True), Wanted(bias=True)):
        bias = weight[:, 0]
        problem = Problem(hidden, weight, bias, target, ones, None, wanted, torch.float16)
        made = run_tiles(problem, tuple(PLAIN.values()))
        there = tuple(each is not None for each in (made.hidden, made.weight, made.bias))
        assert there == wanted[:3]
