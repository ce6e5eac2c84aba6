"""Scores of chosen classes against a float64 product."""

import pytest
import torch
from implementations import DTYPES, error, every_implementation, place, three_threads

from lastlayer import kernels

# Rows, classes, width, chosen classes a row.
SHAPES = [(1, 1, 1, 1), (5, 7, 3, 1), (3, 50, 33, 20), (2, 9, 1100, 17), (0, 4, 5, 2), (3, 4, 5, 0)]


def problem(n, n_classes, depth, k, dtype, device):
    hidden = torch.randn(n, depth).to(device, dtype)
    weight = torch.randn(n_classes, depth).to(device, dtype)
    bias = torch.randn(n_classes).to(device, dtype)
    return hidden, weight, bias, torch.randint(n_classes, (n, k), device=device)


def check(impl, hidden, weight, bias, classes):
    scores = kernels.products.scores(impl, hidden, weight, bias, classes)
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    assert scores.dtype == wide
    every_score = hidden.cpu().double() @ weight.cpu().double().t()
    size = hidden.cpu().double().abs() @ weight.cpu().double().abs().t() + 1
    if bias is not None:
        every_score = every_score + bias.cpu().double()
        size = size + bias.cpu().double().abs()
    chosen = classes.cpu().clamp(min=0)
    expected = torch.where(classes.cpu() < 0, 0.0, every_score.gather(-1, chosen))
    unit = 4 * torch.finfo(wide).eps
    assert error(scores, expected, unit * size.gather(-1, chosen)) <= 1


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_shapes_and_dtypes(impl, dtype, biased):
    for shape in SHAPES:
        hidden, weight, bias, classes = problem(*shape, dtype, place(impl, dtype))
        check(impl, hidden, weight, bias if biased else None, classes)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_padding_has_no_score(impl, dtype, biased):
    hidden, weight, bias, classes = problem(6, 9, 20, 5, dtype, place(impl, dtype))
    classes[torch.rand(classes.shape, device=classes.device) < 0.4] = -1
    classes[0], classes[1, 0] = -1, -1
    weight[-1] = float("nan")  # what -1 would be from behind
    check(impl, hidden, weight, bias if biased else None, classes.where(classes != 8, 0))


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts(impl, dtype):
    hidden, weight, bias, classes = problem(4, 30, 40, 3, dtype, place(impl, dtype))
    for rows in (hidden, hidden.t().contiguous().t(), hidden.repeat(1, 2)[:, :40]):
        for vectors in (weight, weight.t().contiguous().t(), weight.repeat(2, 2)[::2, :40]):
            check(impl, rows, vectors, bias, classes)
    check(impl, hidden, weight, bias.repeat(2)[::2], classes.t().contiguous().t())


def test_half_precision_is_gathered_in_pieces(monkeypatch):
    place("cpu")
    from lastlayer.kernels.products import cpu

    monkeypatch.setattr(cpu, "WIDENED", 100)
    check("cpu", *problem(23, 30, 16, 3, torch.bfloat16, "cpu"))


def test_threads_share_the_rows():
    place("cpu")
    arguments = problem(300, 50, 128, 4, torch.float32, "cpu")
    alone = kernels.products.scores("cpu", *arguments)
    with three_threads():
        assert torch.equal(kernels.products.scores("cpu", *arguments), alone)
