"""Row-wise steps of every implementation against the reference in float64."""

import pytest
import torch
from implementations import DTYPES, ROUNDING, error, every_implementation, place

from lastlayer.kernels import touched_rows

# Rows of the weight, its width, touched rows.
SHAPES = [(1, 1, 1), (40, 33, 7), (9, 1100, 9), (5, 4, 0)]


def problem(v, d, k, dtype, device):
    weight = torch.randn(v, d).to(device, dtype)
    ids = torch.randperm(v)[:k].sort().values.to(device)
    # Not contiguous: a gradient may be a part of a wider one.
    gradient = torch.randn(k, d + 1).to(device, dtype)[:, :d]
    return weight, ids, gradient


def close(made, expected, dtype, scale=8.0):
    assert error(made, expected) <= scale * ROUNDING[dtype] * (1 + float(expected.abs().max()))


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adagrad(impl, dtype, shape):
    device = place(impl, dtype)
    weight, ids, gradient = problem(*shape, dtype, device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.rand(shape[0], device=device, dtype=wide)
    exact = weight.double().cpu(), total.double().cpu()
    touched_rows.adagrad_(impl, weight, total, ids, gradient, 0.3, 0.1, 1e-6)
    given = ids.cpu(), gradient.double().cpu()
    touched_rows.adagrad_("reference", *exact, *given, 0.3, 0.1, 1e-6)
    close(weight, exact[0], dtype)
    close(total, exact[1], wide)


@pytest.mark.thin(3)
@every_implementation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_adam(impl, dtype, shape, decays, betas):
    device = place(impl, dtype)
    v, d, _ = shape
    weight, ids, gradient = problem(*shape, dtype, device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    first = torch.randn(v, d, device=device, dtype=wide)
    second = torch.rand(v, d, device=device, dtype=wide)
    clock = torch.randint(50_000, (v,), device=device, dtype=torch.int32)
    clock[0] = 0
    step = torch.tensor(50_001, device=device)
    exact = [each.double().cpu() for each in (weight, first, second)]
    exact_clock = clock.cpu().clone()
    options = 0.3, 0.1, *betas, 1e-6, decays
    touched_rows.adam_(impl, weight, first, second, clock, step, ids, gradient, *options)
    given = exact_clock, step.cpu(), ids.cpu(), gradient.double().cpu()
    touched_rows.adam_("reference", *exact, *given, *options)
    for made, expected in zip((first, second), exact[1:], strict=True):
        close(made, expected, wide)
    assert torch.equal(clock.cpu(), exact_clock)
    # A root of what is nearly 0 magnifies.
    close(weight, exact[0], dtype, 64.0)


@pytest.mark.gpu
@pytest.mark.parametrize("decays", [True, False])
def test_warps_of_a_row_do_not_overtake_each_other(decays):
    # A row's clock is read by all of its warps and set by one: a race shows now and then.
    v, k, d = 3000, 2000, 1024
    for _ in range(20):
        weight, ids, gradient = problem(v, d, k, torch.float32, "cuda")
        first, second = torch.randn(v, d, device="cuda"), torch.rand(v, d, device="cuda")
        clock = torch.randint(1000, (v,), device="cuda", dtype=torch.int32)
        step = torch.tensor(1001, device="cuda")
        exact = [each.double() for each in (weight, first, second)]
        exact_clock, options = clock.clone(), (0.3, 0.1, 0.9, 0.999, 1e-6, decays)
        touched_rows.adam_("triton", weight, first, second, clock, step, ids, gradient, *options)
        given = exact_clock, step, ids, gradient.double()
        touched_rows.adam_("reference", *exact, *given, *options)
        assert torch.equal(clock, exact_clock)
        for made, expected in zip((first, second), exact[1:], strict=True):
            close(made, expected, torch.float32)
        close(weight, exact[0], torch.float32, 64.0)


@every_implementation
@pytest.mark.parametrize("adam", [True, False])
def test_of_slots_of_the_same_row_the_first_counts(impl, adam):
    device = place(impl)
    weight, _, gradient = problem(9, 20, 6, torch.float32, device)
    ids = torch.tensor([1, 1, 1, 4, 8, 8], device=device)
    once = weight.clone()
    first = torch.tensor([0, 3, 4], device=device)
    for out, rows, some in ((weight, ids, gradient), (once, ids[first], gradient[first])):
        if adam:
            state = [torch.zeros(9, 20, device=device) for _ in range(2)]
            clock = torch.zeros(9, device=device, dtype=torch.int32)
            step = torch.tensor(1, device=device)
            options = 0.3, 0.1, 0.9, 0.999, 1e-6, True
            touched_rows.adam_(impl, out, *state, clock, step, rows, some, *options)
        else:
            total = torch.zeros(9, device=device)
            touched_rows.adagrad_(impl, out, total, rows, some, 0.3, 0.1, 1e-6)
    assert torch.equal(weight, once)


@every_implementation
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("n", [0, 1, 31, 33, 256, 3001])
def test_sorted_ids(impl, dtype, n):
    """Equal ids keep their order; some are negative."""
    if impl == "cpu":
        with pytest.raises(ValueError, match="it has no CPU implementation"):
            touched_rows.sort_ids(impl, torch.zeros(3, dtype=dtype))
        return
    device = place(impl)
    for least, most in ((-1, 2), (-5, n + 1), (torch.iinfo(dtype).max - 9, torch.iinfo(dtype).max)):
        ids = torch.randint(least, most, (n,), dtype=dtype, device=device)
        ordered, order = touched_rows.sort_ids(impl, ids)
        right = torch.sort(ids.cpu(), stable=True)
        assert torch.equal(ordered.cpu(), right.values)
        assert torch.equal(order.cpu(), right.indices)
        assert ordered.dtype == dtype


def test_many_ids_are_sorted_by_torch(monkeypatch):
    triton = pytest.importorskip("lastlayer.kernels._triton")
    ids = torch.randint(5, (40,), device=place("triton"))
    few = triton.sort_ids(ids)
    monkeypatch.setattr(triton, "MOST_COMPARED", 39)
    for one, other in zip(few, triton.sort_ids(ids), strict=True):
        assert torch.equal(one, other)
