"""Softmax over scores that are never stored, tile by tile, against float64.

There are Triton kernels only; on a machine without a GPU they run in Triton's interpreter.
"""

from typing import NamedTuple

import pytest
import torch
from implementations import few
from torch import Tensor

from lastlayer import kernels

pytest.importorskip("triton")
if kernels.available()["triton"] is not None:
    pytest.skip(kernels.available()["triton"], allow_module_level=True)

from lastlayer.kernels.linear_softmax.triton import (
    Mix,
    finish_rows,
    gradient_of_classes,
    mix_of_rows,
)

# The interpreter multiplies the bits of bfloat16; float32 shows there that nothing else is lost.
ON_A_GPU = torch.cuda.is_available()
DTYPES = (torch.float16, torch.bfloat16 if ON_A_GPU else torch.float32)
# Rows, classes, width: one of each, and sizes that no tile divides.
SHAPES = [(1, 1, 1), (1, 130, 16), (67, 3, 5), (70, 150, 64), (5, 140, 100), (3, 70, 200)]
# Products of half-precision numbers are rounded to them once more before they are added up.
WITHIN = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Problem(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    softcap: float
    temperature: float


def problem(shape, dtype, device, biased=False, softcap=0.0, temperature=1.0) -> Problem:
    n, n_classes, depth = shape
    hidden = torch.randn(n, depth, device=device).to(dtype)
    weight = (2 * depth**-0.5 * torch.randn(n_classes, depth, device=device)).to(dtype)
    bias = torch.randn(n_classes, device=device).to(dtype) if biased else None
    return Problem(hidden, weight, bias, softcap, temperature)


def truth(case: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """The logsumexp, probabilities and slopes of all scores in float64."""
    scores = case.hidden.cpu().double() @ case.weight.cpu().double().t()
    if case.bias is not None:
        scores = scores + case.bias.cpu().double()
    slope = torch.full_like(scores, 1 / case.temperature)
    if case.softcap:
        slope = slope / torch.cosh(scores / case.softcap).square()
        capped = case.softcap * torch.tanh(scores / case.softcap)
        scores = capped.masked_fill(scores == -torch.inf, -torch.inf)
    scores = scores / case.temperature
    return torch.logsumexp(scores, -1), torch.softmax(scores, -1), slope


def relative(actual: Tensor, expected: Tensor) -> float:
    actual = actual.detach().cpu().double()
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def together(mix: Mix) -> tuple[Tensor, Tensor]:
    """The logsumexp and the mean of all parts."""
    lse = torch.logsumexp(mix.lse, 0)
    shares = torch.where(mix.lse == -torch.inf, 0.0, torch.exp(mix.lse - lse))
    return lse, torch.einsum("sn,snd->nd", shares, mix.mean_vector)


def check_mix(case: Problem) -> None:
    lse, probs, slope = truth(case)
    expected = (probs * slope) @ case.weight.cpu().double()
    mix = mix_of_rows(*case, False)
    assert mix.lse.dtype == torch.float32
    assert mix.mean_vector.shape == (len(mix.lse), 0, case.hidden.shape[1])
    assert (torch.logsumexp(mix.lse, 0).cpu() - lse).abs().max() <= 1e-5
    mix = mix_of_rows(*case, True)
    made, mean = together(mix)
    assert (made.cpu() - lse).abs().max() <= 1e-5
    assert mean.dtype == torch.float32
    assert relative(mean, expected) <= WITHIN[case.hidden.dtype]
    check_finish(case, mix)


def check_finish(case: Problem, mix: Mix) -> None:
    """With everything there is, and with nothing."""
    lse, mean = (each.double().cpu() for each in together(mix))
    n, n_classes, device = len(lse), case.weight.shape[0], case.hidden.device
    target = torch.randint(n_classes, (n,), device=device)
    exact = torch.randn(n, device=device)
    at_target, slope = exact.double().cpu(), 1 / case.temperature
    if case.softcap:
        slope = slope / torch.cosh(at_target / case.softcap).square()
        at_target = case.softcap * torch.tanh(at_target / case.softcap)
    at_target = at_target / case.temperature
    own = case.weight.double().cpu()[target.cpu()]
    for everything in (True, False):
        scale, weight = (torch.rand(2, n, device=device) + 0.5) if everything else (None, None)
        more = torch.rand((), device=device) if everything else None
        keep, z_loss = (0.8, 0.1) if everything else (1.0, 0.0)
        rows = finish_rows(
            mix, case.weight, target, exact, scale, weight, keep, more, z_loss, case.softcap,
            case.temperature, torch.float32,
        )  # fmt: skip
        pull = torch.full_like(lse, keep)
        if everything:
            pull = pull * weight.double().cpu()
        loss = pull * (lse - at_target) + z_loss * lse.square()
        push = pull + 2 * z_loss * lse
        if everything:
            push = (push + more.double().cpu()) * scale.double().cpu()
            pull = pull * scale.double().cpu()
        parts = push[:, None] * mean, (pull * slope)[:, None] * own
        gradient = parts[0] - parts[1]
        assert (rows.loss.cpu() - loss).abs().max() <= 1e-5 * (1 + lse.abs().max()) ** 2
        assert relative(rows.factors, torch.stack([lse, push, pull])) <= 1e-5
        # They may cancel, as with a single class: the error is of the size of what was subtracted.
        size = (parts[0].norm() + parts[1].norm()) / gradient.norm()
        assert relative(rows.gradient, gradient) <= 1e-6 * size


def check_gradient(
    case: Problem, add: bool = False, size: float = 1.0, into: torch.dtype | None = None
) -> None:
    """``size`` is that of the row factors: 1/n in a mean, and in float16 that must not vanish."""
    hidden, weight, bias, softcap, temperature = case
    n, (n_classes, depth) = hidden.shape[0], weight.shape
    lse, probs, slope = truth(case)
    device, dtype = hidden.device, into or weight.dtype
    target = torch.randint(n_classes, (n,), device=device)
    push, pull = (size * (torch.rand(n, device=device) + 0.5) for _ in range(2))
    scores = probs * push.cpu().double()[:, None]
    scores[torch.arange(n), target.cpu()] -= pull.cpu().double()
    scores = scores * slope
    before = size * torch.randn(n_classes, depth, device=device).to(dtype)
    bias_before = size * torch.randn(n_classes, device=device)
    out = before.clone() if add else torch.empty_like(before)
    bias_out = None
    if bias is not None:
        bias_out = bias_before.clone() if add else torch.empty_like(bias_before)
    factors = torch.stack([lse.float().to(device), push, pull])
    gradient_of_classes(
        hidden, weight, bias, target, factors, softcap, temperature, out, bias_out, add
    )
    expected = scores.t() @ hidden.cpu().double()
    bias_expected = scores.sum(0)
    if add:
        expected = expected + before.cpu().double()
        bias_expected = bias_expected + bias_before.cpu().double()
    within = WITHIN[hidden.dtype]
    assert relative(out, expected) <= within
    if bias_out is not None:
        assert relative(bias_out, bias_expected) <= within


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", few([False, True], True))
def test_shapes(dtype, biased, device):
    for shape in few(SHAPES, *SHAPES[::2]):
        case = problem(shape, dtype, device, biased)
        check_mix(case)
        check_gradient(case)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_soft_cap_and_temperature(softcap, temperature, device):
    case = problem((20, 90, 24), torch.float16, device, True, softcap, temperature)
    check_mix(case)
    check_gradient(case, add=softcap > 0)


@pytest.mark.parametrize("into", [None, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_what_is_there_is_added_to(into, biased, device):
    check_gradient(problem((40, 70, 20), torch.float16, device, biased), add=True, into=into)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-6, 1e3])
def test_row_factors_of_any_size(dtype, size, device):
    """The sum is taken of factors around 1; only what is written has the size of the result."""
    check_gradient(problem((40, 70, 20), dtype, device, True), size=size, into=torch.float32)


def test_large_scores(device):
    case = problem((9, 150, 32), torch.float16, device)
    lse, probs, _ = truth(case._replace(weight=case.weight * 64))
    made, mean = together(mix_of_rows(*case._replace(weight=case.weight * 64), True))
    assert (made.cpu() - lse).abs().max() <= 1e-6 * lse.abs().max()
    assert relative(mean, probs @ (case.weight * 64).cpu().double()) <= 1e-2


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_masked_classes(softcap, device):
    """A bias of -inf: no probability, no gradient."""
    case = problem((9, 150, 32), torch.float16, device, True, softcap)
    case.bias[torch.rand(150, device=device) < 0.5] = -float("inf")
    # All that a program sees first, and the whole of one share.
    case.bias[:140] = -float("inf")
    case.bias[145] = 0.5
    check_mix(case)
    masked = case.bias == -float("inf")
    out, bias_out = torch.empty_like(case.weight), torch.empty(150, device=device)
    lse = truth(case)[0].float().to(device)
    ones = torch.ones(9, device=device)
    target = torch.full((9,), 145, device=device)
    factors = torch.stack([lse, ones, ones])
    gradient_of_classes(*case[:3], target, factors, softcap, 1.0, out, bias_out, False)
    assert (out[masked] == 0).all()
    assert (bias_out[masked] == 0).all()
    assert out.isfinite().all()
    # The target is among them.
    gone = torch.full((9,), -torch.inf, device=device)
    rows = finish_rows(
        mix_of_rows(*case, True), case.weight, torch.zeros_like(target), gone, ones, None, 1.0,
        None, 0.1, softcap, 1.0, torch.float32,
    )  # fmt: skip
    assert (rows.loss == torch.inf).all()
    assert rows.factors.isfinite().all()
    assert rows.gradient.isfinite().all()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_rows_with_nothing_allowed(softcap, device):
    case = problem((9, 150, 32), torch.float16, device, True, softcap)
    case.bias[:] = -torch.inf
    mix = mix_of_rows(*case, True)
    assert (mix.lse == -torch.inf).all()
    assert (mix.mean_vector == 0).all()
    gone, ones = torch.full((9,), -torch.inf, device=device), torch.ones(9, device=device)
    target, more = torch.arange(9, device=device), torch.ones((), device=device)
    rows = finish_rows(
        mix, case.weight, target, gone, ones, ones, 0.9, more, 0.1, softcap, 1.0, torch.float32
    )
    assert (rows.loss == torch.inf).all()
    assert (rows.factors[0] == -torch.inf).all()
    assert (rows.factors[1:] == 0).all()
    assert (rows.gradient == 0).all()
    out, bias_out = torch.empty_like(case.weight), torch.empty(150, device=device)
    gradient_of_classes(*case[:3], target, rows.factors, softcap, 1.0, out, bias_out, False)
    assert (out == 0).all()
    assert (bias_out == 0).all()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_reference_agrees_on_masked_classes(softcap, device):
    from lastlayer.kernels.linear_softmax import reference

    case = problem((9, 40, 16), torch.float16, device, True, softcap)
    case.bias[10:] = -torch.inf
    lse, probs, slope = truth(case)
    made, mean = reference.mix_of_rows(*case)
    assert (made.cpu() - lse).abs().max() <= 1e-5
    assert relative(mean, (probs * slope) @ case.weight.cpu().double()) <= 1e-5
    case.bias[:] = -torch.inf
    lse, mean = reference.mix_of_rows(*case)
    assert (lse == -torch.inf).all()
    assert (mean == 0).all()
    nothing, target = torch.zeros_like(lse), torch.arange(9, device=device)
    for each in reference.gradient_of_classes(
        *case[:3], target, lse, nothing, nothing, softcap, 1.0
    ):
        assert (each == 0).all()


def test_rows_in_the_order_of_their_targets_need_no_sort(device):
    case = problem((70, 300, 40), torch.float16, device, True)
    lse = truth(case)[0].float().to(device)
    target = torch.randint(300, (70,), device=device).sort().values
    factors = torch.cat([lse[None], torch.rand(2, 70, device=device)])
    made = []
    for in_order in (False, True):
        out, bias_out = torch.empty_like(case.weight), torch.empty(300, device=device)
        gradient_of_classes(
            *case[:3], target, factors, *case[3:], out, bias_out, False, in_order=in_order
        )
        made.append((out, bias_out))
    for sorted_here, sorted_before in zip(*made, strict=True):
        assert torch.equal(sorted_here, sorted_before)


@pytest.mark.parametrize("splits", [1, 3])
def test_classes_cut_into_parts(splits, monkeypatch, device):
    """Each part has its own logsumexp and mean; they are put together afterwards."""
    from lastlayer.kernels.linear_softmax import triton as kernel

    monkeypatch.setattr(kernel, "_splits", lambda *_: splits)
    for shape in [(30, 500, 16), (3, 129, 200)]:
        check_mix(problem(shape, torch.float16, device, True))


def test_the_same_to_the_last_bit_again(device):
    case = problem((70, 150, 40), torch.float16, device, True, 2.0, 0.8)
    lse = truth(case)[0].float().to(device)
    target = torch.randint(150, (70,), device=device)
    factors = torch.cat([lse[None], torch.rand(2, 70, device=device)])

    def everything():
        mix = mix_of_rows(*case, True)
        out, bias_out = torch.empty_like(case.weight), torch.empty(150, device=device)
        gradient_of_classes(*case[:3], target, factors, *case[3:], out, bias_out, False)
        return *mix, out, bias_out

    for one, other in zip(everything(), everything(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [16, 64, 100, 128, 256])
def test_many_tiles_on_a_gpu(dtype, depth):
    case = problem((1000, 40_007, depth), dtype, "cuda", True, 5.0, 0.9)
    check_mix(case)
    check_gradient(case)
    check_gradient(case, add=True, into=torch.float32)
