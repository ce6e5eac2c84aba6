"""A tensor times a number on its device."""

import math

import pytest
import torch
from implementations import DTYPES, ROUNDING, SMALLEST, error, every_implementation, place

from lastlayer.kernels import products


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (4099,), (0, 4)])
def test_every_number_is_multiplied(impl, dtype, shape):
    device = place(impl, dtype)
    for factor in (-1.7, 0.0, 1e-3):
        before = torch.randn(shape).to(device, dtype)
        values = before.clone()
        products.scale_(impl, values, torch.tensor(factor, device=device))
        expected = before.cpu().double() * torch.tensor(factor).double()
        slack = 2 * ROUNDING[dtype] * expected.abs() + SMALLEST[dtype] + 1e-300
        assert error(values, expected, slack) <= 1


@every_implementation
def test_one_changes_nothing(impl):
    device = place(impl)
    before = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45, 3e38], device=device)
    values = before.clone()
    products.scale_(impl, values, torch.ones((), device=device))
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))


@every_implementation
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_factor_that_is_no_number(impl, factor):
    device = place(impl)
    values = torch.tensor([2.0, 0.0, -1.0], device=device)
    products.scale_(impl, values, torch.tensor(factor, device=device))
    expected = torch.tensor([2.0, 0.0, -1.0]) * factor
    assert error(values, expected) == 0


@every_implementation
def test_the_factor_may_be_wider_or_narrower(impl):
    device = place(impl)
    for factor in (torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.5).bfloat16()):
        values = torch.ones(3, device=device)
        products.scale_(impl, values, factor.to(device))
        assert error(values, torch.full((3,), float(factor))) <= 1e-7


def test_a_program_takes_several_blocks(monkeypatch):
    kernel = pytest.importorskip("lastlayer.kernels.products.triton")
    monkeypatch.setattr(kernel, "MOST_PROGRAMS", 2)
    device = place("triton")
    before = torch.randn(5 * 4096 + 3, device=device)
    values = before.clone()
    products.scale_("triton", values, torch.tensor(0.5, device=device))
    assert torch.equal(values, 0.5 * before)
