"""Maps over a dimension whose numbers are not neighbours in memory: the CPU takes it in tiles."""

import pytest
import torch
from implementations import three_threads

import lastlayer

SHAPES = ((7, 130), (300, 65), (5, 3, 70), (1, 9), (2000, 3), (64, 2049))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, "rows"])
def test_columns_are_as_rows(shape, dtype, alpha):
    if alpha == "rows":
        alpha = 1.0 + torch.rand(1, *shape[1:], dtype=dtype)
    scores = torch.randn(shape, dtype=dtype, requires_grad=True)
    grad = torch.randn(shape, dtype=dtype)
    with three_threads():
        probs = lastlayer.entmax(scores, alpha, 0)
        (made,) = torch.autograd.grad(probs, scores, grad)
    assert probs.is_contiguous()
    assert made.is_contiguous()
    rows = scores.movedim(0, -1).contiguous()
    alphas = alpha.movedim(0, -1) if isinstance(alpha, torch.Tensor) else alpha
    truth = lastlayer.entmax(rows, alphas).movedim(-1, 0)
    (expected,) = torch.autograd.grad(truth, scores, grad)
    torch.testing.assert_close(probs, truth)
    torch.testing.assert_close(made, expected)


def test_rows_without_a_result():
    scores = torch.randn(6, 9)
    scores[2, 3], scores[:, 4] = torch.nan, -torch.inf
    probs = lastlayer.sparsemax(scores.requires_grad_(), 0)
    assert bool(probs[:, 3].isnan().all())
    assert bool((probs[:, 4] == 0).all())
    others = [0, 1, 2, 5, 6, 7, 8]
    torch.testing.assert_close(probs[:, others].sum(0), torch.ones(7))
    # An upstream gradient that is expanded has no memory of its own.
    (made,) = torch.autograd.grad(probs.sum(), scores)
    torch.testing.assert_close(made[:, others], torch.zeros(6, 7))
    assert bool((made[:, 4] == 0).all())
    assert lastlayer.sparsemax(torch.empty(4, 0), 0).shape == (4, 0)
    assert lastlayer.sparsemax(torch.empty(0, 4), 0).shape == (0, 4)
