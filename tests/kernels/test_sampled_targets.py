"""What surrounds the rows of drawn classes: the Triton kernels against the reference."""

import pytest
import torch
from implementations import place

from lastlayer.kernels import sampled_rows


def numbers(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def problem(n, m, d, v, dtype):
    """Hidden, weight, bias, target, ids."""
    target = torch.randint(v, (n,))
    target[::3] = -100
    # Neither contiguous nor of its own: a part of a wider batch.
    hidden = numbers(n, 2 * d, dtype=dtype)[:, ::2]
    return (
        hidden,
        numbers(v, d, dtype=dtype),
        numbers(v, dtype=dtype),
        target,
        torch.randint(v, (m,)),
    )


def both(operation, device, given, *rest):
    """By the kernel, and by the reference in float64."""
    there = [each.to(device) if isinstance(each, torch.Tensor) else each for each in given]
    wide = [
        each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for each in given
    ]
    return operation("triton", *there, *rest), operation("reference", *wide, *rest)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(("n", "p"), [(0, 1), (1, 1), (40, 3), (9000, 1)])
def test_rows_with_a_target_share_the_loss(mean, n, p):
    device = place("triton")
    target = torch.randint(-1, 2, (n, p))
    made, expected = both(sampled_rows.row_scale, device, (numbers(n, 2), target), mean)
    torch.testing.assert_close(made.cpu().double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "m", "d"), [(7, 5, 3), (0, 4, 33), (6, 1, 1100)])
@pytest.mark.parametrize("full", [True, False])
def test_start(dtype, n, m, d, full):
    device = place("triton")
    hidden, weight, bias, target, ids = problem(n, m, d, 11, dtype)
    more = (numbers(m), numbers(n), numbers(n)) if full else (numbers(m), None, None)
    given = hidden, weight, bias if full else None, target, ids, *more
    made, expected = both(sampled_rows.start, device, given, 0.7)
    assert torch.equal(made[0].cpu().double(), expected[0])
    assert torch.equal(made[1].cpu().double(), expected[1])
    assert not made[0][::3].any()
    for one, other in zip(made[2:4], expected[2:4], strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-5, atol=1e-4)
    assert made[4].dtype == torch.int32
    assert torch.equal(made[4].cpu(), expected[4])


@pytest.mark.parametrize("rule", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("to_hidden", [True, False])
@pytest.mark.parametrize("d", [3, 1100])
def test_finish(rule, to_hidden, d):
    device = place("triton")
    n, v = 6, 9
    first, logits, scale = 5 * numbers(n), 5 * numbers(n), numbers(n)
    # A row that does not count may have come to anything.
    scale[2], first[2] = 0.0, torch.inf
    weight, classes = numbers(v, d), torch.randint(v, (n,), dtype=torch.int32)
    before = numbers(n, d) if to_hidden else numbers(0)
    results = []
    for impl, dtype, where in (
        ("triton", torch.float32, device),
        ("reference", torch.float64, "cpu"),
    ):
        floats = [each.to(where, dtype) for each in (first, logits, scale, 2 * scale)]
        of_hidden = before.to(where, dtype, copy=True)
        losses, slopes = sampled_rows.finish_(
            impl, *floats, classes.to(where), weight.to(where, dtype), of_hidden, 0.7, *rule
        )
        results.append([losses, slopes, of_hidden])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-5, atol=1e-5)
    assert float(results[0][0][2]) == float(results[0][1][2]) == 0.0
