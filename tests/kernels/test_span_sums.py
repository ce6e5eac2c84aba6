"""Sums over all spans and their gradients, tile by tile, against float64.

There are Triton kernels only; on a machine without a GPU they run in Triton's interpreter.
"""

import math

import pytest
import torch

from lastlayer import kernels
from lastlayer.kernels.span_sums import SpanParts, reference

pytest.importorskip("triton")
if kernels.available()["triton"] is not None:
    pytest.skip(kernels.available()["triton"], allow_module_level=True)

from lastlayer.kernels.span_sums import triton as kernel

# Texts, types, tokens, width: one of each, and sizes that no tile divides.
SHAPES = [(1, 1, 1, 1), (2, 3, 5, 16), (1, 2, 64, 20), (3, 2, 70, 64), (1, 1, 130, 7)]


def problem(shape, device, shared=False, biased=False, masked=False, listed=True, n_right=9):
    n_texts, n_types, n, depth = shape
    held = n_texts, 1 if shared else n_types, n, depth
    query, key = (torch.randn(held, device=device) * depth**-0.25 for _ in range(2))
    biases = [torch.randn(n_texts, n_types, n, device=device) if biased else None for _ in range(2)]
    mask = torch.rand(n_texts, n, device=device) < 0.8 if masked else None
    # As `listed_cells` leaves them: each once, those that end before they start and none are -1.
    kind, one, other = (
        torch.randint(most, (n_texts, n_right), device=device) for most in (n_types, n, n)
    )
    cells = (kind * n + torch.minimum(one, other)) * n + torch.maximum(one, other)
    cells = torch.where(torch.rand(cells.shape, device=device) < 0.2, -1, cells)
    if not listed:
        cells = torch.rand(n_texts, n_types, n, n, device=device) < 0.1
    return SpanParts(query, key, *biases, mask), cells


def in_float64(each):
    return each if each is None or each.dtype == torch.bool else each.double()


def check(parts, target, n_types):
    exact = SpanParts(*(None if each is None else in_float64(each).cpu() for each in parts))
    found = kernel.log_sums(parts, target, n_types)
    right = reference.log_sums(exact, target.cpu(), n_types)
    torch.testing.assert_close(found.cpu().double(), right, rtol=2e-5, atol=1e-5)
    # A score is rounded, and the exponential makes that a relative error of its size.
    largest = float((exact.query @ exact.key.mT).abs().max())
    rtol = max(2e-5, 4 * 2.0**-24 * largest)
    grad = torch.randn(found.shape[1:], device=found.device)
    made = kernel.gradients(parts, target, found, grad, n_types)
    wanted = reference.gradients(exact, target.cpu(), right, grad.double().cpu(), n_types)
    for one, other in zip(made, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.shape == other.shape
            torch.testing.assert_close(one.cpu().double(), other, rtol=rtol, atol=2e-5)


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "dense"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_dense_formula(shape, listed, device):
    check(*problem(shape, device, listed=listed), shape[1])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_every_form(shared, biased, masked, device):
    shape = 2, 3, 67, 12
    check(*problem(shape, device, shared, biased, masked), shape[1])


def test_nothing_right_and_nothing_there(device):
    parts, cells = problem((2, 2, 70, 8), device, masked=True)
    parts.mask[1] = False
    nothing = torch.full_like(cells, -1)
    check(parts, nothing, 2)
    found = kernel.log_sums(parts, nothing, 2)
    assert (found[1] == 0).all()
    assert (found[:, 1] == 0).all()


@pytest.mark.parametrize("size", [1e-3, 100.0, 1e4])
def test_very_large_and_very_small_scores(size, device):
    parts, cells = problem((1, 2, 66, 4), device)
    check(parts._replace(query=parts.query * size), cells, 2)


def test_tiny_sums_keep_their_digits(device):
    """Wrong spans far below 0: the sum is lost beside the 1 in all but its logarithm."""
    start_bias = torch.full((1, 1, 66), -18.0, device=device)
    vectors = torch.zeros(1, 1, 66, 4, device=device)
    cells = torch.full((1, 1), -1, device=device)
    parts = SpanParts(vectors, vectors, start_bias, torch.zeros_like(start_bias), None)
    found = kernel.log_sums(parts, cells, 1)
    expected = math.log1p(66 * 67 / 2 * math.exp(-18.0))
    assert found[0].item() == pytest.approx(expected, rel=1e-5)


def test_the_same_to_the_last_bit_again(device):
    given = problem((2, 2, 80, 16), device, biased=True)
    found = kernel.log_sums(*given, 2)
    assert torch.equal(found, kernel.log_sums(*given, 2))
    grad = torch.rand(2, 2, device=device)
    first, second = (kernel.gradients(*given, found, grad, 2) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("depth", [64, 50])
def test_long_texts_on_a_gpu(depth, shared, device):
    shape = 2, 5, 700, depth
    check(*problem(shape, device, shared, biased=shared, masked=True, n_right=300), shape[1])
