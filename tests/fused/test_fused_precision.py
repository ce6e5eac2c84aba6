"""Half precision against float64, whatever the number of chunks; and the mistakes others made."""

import math

import pytest
import torch
from unfused import cross_entropy, distance, entmax, gradients, topk_softmax, unfused

from lastlayer.fused import cross_entropy as fused_cross_entropy
from lastlayer.fused import (
    linear_cross_entropy,
    linear_entmax_loss,
    linear_statistics,
    linear_topk_softmax_loss,
    scores,
)

HALVES = (torch.bfloat16, torch.float16)
N, D, V = 2048, 24, 384
# What one rounding of each gradient costs, and what is allowed on top of it.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
with_each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
with_chunks = pytest.mark.parametrize("chunks", [1, 2, 8, 64])


def half_problem(dtype, n=N, d=D, v=V, *, bias=False):
    """Scores of about 1 from numbers that the dtype holds exactly, and the same in float64."""
    rounded = [torch.randn(n, d), torch.randn(v, d) / math.sqrt(d)]
    rounded += [torch.randn(v)] if bias else []
    halves = [each.to(dtype).requires_grad_() for each in rounded]
    doubles = [each.detach().double().requires_grad_() for each in halves]
    target = torch.randint(v, (n,))
    return tuple((hidden, weight, target, *offset) for hidden, weight, *offset in (halves, doubles))


@with_each_half
@with_chunks
def test_loss_and_gradients_of_the_cross_entropy(dtype, chunks):
    """torch 2.13 adds losses and the weight's gradient up in bfloat16, worse with each chunk."""
    problem, exact = half_problem(dtype, bias=True)
    ours = linear_cross_entropy(*problem, chunk_rows=N // chunks)
    truth = unfused(cross_entropy, *exact)
    assert ours.dtype == torch.float32
    assert abs(ours.item() / truth.item() - 1) < 1e-5
    for mine, true in zip(gradients(ours, problem), gradients(truth, exact), strict=True):
        assert mine.dtype == dtype
        assert distance(mine, true) < TOLERANCE[dtype]


@with_each_half
@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 2.0, "temperature": 0.7}, {"z_loss": 1e-2, "class_weight": True}],
    ids=["plain", "bent", "weighted"],
)
def test_low_memory_adds_no_more_often(monkeypatch, dtype, options):
    """Where a few rows fill the memory there would be many chunks: classes are cut instead."""
    monkeypatch.setitem(scores.BYTES, ("rows", "cpu"), (20 * V * 2,) * 2)
    taken = []
    slabs = fused_cross_entropy._run_slabs
    monkeypatch.setattr(
        fused_cross_entropy, "_run_slabs", lambda *args: taken.append(args) or slabs(*args)
    )
    if "class_weight" in options:
        options = {**options, "class_weight": torch.rand(V, dtype=torch.float64) + 0.5}
    problem, exact = half_problem(dtype, 2048, bias=True)
    for target in (problem[2], exact[2]):
        target[::7] = -100
    for reduction in ("mean", "none"):
        ours = linear_cross_entropy(*problem, chunk_rows="low", reduction=reduction, **options)
        truth = unfused(cross_entropy, *exact, reduction=reduction, **options)
        assert abs(ours.sum().item() / truth.sum().item() - 1) < 2e-5
        # Large enough that float16 can hold the gradients.
        upstream = torch.randn_like(ours).sign() * 500
        for mine, true in zip(
            gradients(ours, problem, upstream),
            gradients(truth, exact, upstream.double()),
            strict=True,
        ):
            # A factor that is no power of two is one more rounding.
            assert distance(mine, true) < 1.2 * TOLERANCE[dtype]
    assert len(taken) == 2


@with_each_half
@pytest.mark.parametrize(
    ("function", "row_loss", "options"),
    [
        (linear_entmax_loss, entmax, {"alpha": 1.5}),
        (linear_entmax_loss, entmax, {"alpha": 2.0}),
        (linear_topk_softmax_loss, topk_softmax, {"k": 1 << 20}),
    ],
    ids=["entmax15", "sparsemax", "topk"],
)
def test_loss_and_gradients_of_sparse_losses(dtype, function, row_loss, options):
    """Their gradients follow each score, so they carry the rounding of the scores as well."""
    problem, exact = half_problem(dtype, 1024)
    ours = function(*problem, chunk_rows=128, **options)
    truth = unfused(row_loss, *exact, **options)
    assert abs(ours.item() / truth.item() - 1) < 1e-4
    for mine, true in zip(gradients(ours, problem), gradients(truth, exact), strict=True):
        assert distance(mine, true) < 4 * TOLERANCE[dtype]


@with_each_half
@pytest.mark.parametrize("label_smoothing", [0.1, 0.9])
def test_label_smoothing_is_exact(dtype, label_smoothing):
    problem, exact = half_problem(dtype, 1024)
    options = {"label_smoothing": label_smoothing, "z_loss": 1e-3}
    ours = linear_cross_entropy(*problem, chunk_rows=64, **options)
    truth = unfused(cross_entropy, *exact, **options)
    assert abs(ours.item() / truth.item() - 1) < 1e-5
    for mine, true in zip(gradients(ours, problem), gradients(truth, exact), strict=True):
        assert distance(mine, true) < 2 * TOLERANCE[dtype]


@with_each_half
@with_chunks
def test_a_float32_sum_of_the_weights_gradient(dtype, chunks):
    (hidden, weight, target), exact = half_problem(dtype)
    into = torch.zeros_like(weight, dtype=torch.float32)
    loss = linear_cross_entropy(hidden, weight, target, chunk_rows=N // chunks, weight_grad=into)
    loss.backward()
    true_hidden, true_weight = gradients(unfused(cross_entropy, *exact), exact)
    assert weight.grad is None
    assert distance(into, true_weight) < 1e-5
    assert distance(hidden.grad, true_hidden) < TOLERANCE[dtype]


@with_each_half
@pytest.mark.parametrize("scale", [30.0, 1e-3], ids=["peaked", "flat"])
def test_a_float32_sum_for_sparse_losses(dtype, scale):
    (hidden, weight, target), exact = half_problem(dtype, 256)
    with torch.no_grad():
        hidden *= scale
        exact[0].copy_(hidden)
    for function, row_loss, options in (
        (linear_entmax_loss, entmax, {"alpha": 1.5}),
        (linear_topk_softmax_loss, topk_softmax, {"k": 5}),
    ):
        into = torch.zeros_like(weight, dtype=torch.float32)
        function(hidden, weight, target, chunk_rows=64, weight_grad=into, **options).backward()
        _, true_weight = gradients(unfused(row_loss, *exact, **options), exact)
        assert distance(into, true_weight) < 1e-5


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("upstream", [1.0, 65536.0])
def test_float16_gradients_of_small_probabilities_do_not_vanish(reduction, upstream):
    """1/n times a probability is below the smallest float16; a loss scale comes only later."""
    problem, exact = half_problem(torch.float16, 2048, 8, 2048)
    factor = upstream if reduction == "mean" else upstream / 2048
    ours = linear_cross_entropy(*problem, reduction=reduction, chunk_rows=256).sum() * factor
    truth = unfused(cross_entropy, *exact).sum() * upstream
    for mine, true in zip(gradients(ours, problem), gradients(truth, exact), strict=True):
        assert mine.dtype == torch.float16
        # Without a loss scale the results are themselves among the smallest numbers.
        assert distance(mine, true) < (6e-4 if upstream > 1 else 4e-3)


def test_float16_sums_over_many_rows_do_not_overflow():
    hidden = torch.full((3000, 1), 50.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(2, 1, dtype=torch.float16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(3000, dtype=torch.long)).backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[-25.0], [25.0]]).half())


@with_each_half
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradient_of_the_true_class_near_certainty(dtype, reduction):
    """Where p is 0.999, p - 1 from a rounded score would be wrong by its own size."""
    n_classes = 1000
    for _ in range(10):
        hidden = torch.randn(1, 16).to(dtype)
        weight = torch.zeros(n_classes, 16, dtype=dtype)
        wanted = math.log(0.999 * (n_classes - 1) / 0.001)
        weight[7] = (hidden[0].float() * wanted / hidden[0].float().square().sum()).to(dtype)
        problem = (
            hidden.requires_grad_(), weight, torch.tensor([7]),
            torch.zeros(n_classes, dtype=dtype, requires_grad=True),
        )  # fmt: skip
        exact = tuple(
            each if each is problem[2] else each.detach().double().requires_grad_()
            for each in problem
        )
        ours = linear_cross_entropy(*problem, reduction=reduction).sum()
        of_hidden, of_bias = gradients(ours, problem)
        true_hidden, _, true_bias = gradients(unfused(cross_entropy, *exact), exact)
        assert true_bias[7].abs() < 2e-3
        assert distance(of_bias[7], true_bias[7]) < TOLERANCE[dtype]
        assert distance(of_hidden, true_hidden) < 2 * TOLERANCE[dtype]


@with_each_half
def test_the_bias_counts_in_full(dtype):
    """Biases far larger than the products, with a gradient of their own."""
    problem, exact = half_problem(dtype, 512, bias=True)
    with torch.no_grad():
        problem[3].mul_(20)
        exact[3].copy_(problem[3])
    options = {"class_weight": torch.rand(V, dtype=torch.float64)}
    ours = linear_cross_entropy(*problem, chunk_rows=64, **options)
    truth = unfused(cross_entropy, *exact, **options)
    assert abs(ours.item() / truth.item() - 1) < 1e-3
    of_bias, true_bias = gradients(ours, problem)[2], gradients(truth, exact)[2]
    assert distance(of_bias, true_bias) < 2e-2


@with_each_half
def test_one_upstream_gradient_a_row(dtype):
    problem, exact = half_problem(dtype, 512)
    upstream = torch.randn(512)
    ours = linear_cross_entropy(*problem, reduction="none", chunk_rows=32)
    truth = unfused(cross_entropy, *exact, reduction="none")
    for mine, true in zip(
        gradients(ours, problem, upstream), gradients(truth, exact, upstream.double()), strict=True
    ):
        assert distance(mine, true) < TOLERANCE[dtype]


def test_many_chunks_in_float32_are_one_chunk():
    torch.manual_seed(0)
    problem, _ = half_problem(torch.float32, 1024)
    whole = linear_cross_entropy(*problem, chunk_rows=1024)
    parts = linear_cross_entropy(*problem, chunk_rows=1)
    assert distance(parts, whole) < 1e-6
    for mine, true in zip(gradients(parts, problem), gradients(whole, problem), strict=True):
        assert distance(mine, true) < 1e-6


@with_each_half
def test_log_probabilities_come_from_exact_scores(dtype):
    problem, exact = half_problem(dtype, 1024)
    known = linear_statistics(*problem)
    scores, rounding = exact[0] @ exact[1].T, torch.finfo(dtype).eps
    truth = torch.log_softmax(scores, -1).gather(-1, exact[2][:, None])[:, 0]
    error = (known.log_prob - truth).abs()
    # Of the normaliser, where one rounded score is nearly all of it.
    assert (error <= 0.51 * rounding * scores.abs().amax(-1)).all()
    # In most rows roundings cancel there. That of the target's own score would not.
    assert error.mean() < 0.1 * rounding


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_entmax_loss])
def test_autocast(function):
    """float32 parameters, bfloat16 products, float32 loss and gradients."""
    row_loss = {linear_cross_entropy: cross_entropy, linear_entmax_loss: entmax}[function]
    halves, exact = half_problem(torch.bfloat16, 1024, bias=True)
    problem = tuple(
        each if each is halves[2] else each.detach().float().requires_grad_() for each in halves
    )
    for reduction in ("mean", "none"):
        with torch.autocast("cpu", torch.bfloat16):
            ours = function(*problem, reduction=reduction, chunk_rows=128).sum()
        truth = unfused(row_loss, *exact, reduction=reduction).sum()
        assert ours.dtype == torch.float32
        assert abs(ours.item() / truth.item() - 1) < (1e-4 if row_loss is entmax else 3e-5)
        for mine, true in zip(gradients(ours, problem), gradients(truth, exact), strict=True):
            assert mine.dtype == torch.float32
            assert distance(mine, true) < 8e-3


def test_autocast_rounds_nothing_but_the_scores():
    """The exact score of the target and the sum over all classes stay in float32."""
    halves, _ = half_problem(torch.bfloat16, 512)
    problem = halves[0].detach().float(), halves[1].detach().float(), halves[2]
    for options in ({}, {"label_smoothing": 0.5}, {"class_weight": torch.rand(V)}):
        with torch.autocast("cpu", torch.bfloat16):
            inside = linear_cross_entropy(*problem, reduction="none", **options)
        outside = linear_cross_entropy(*halves, reduction="none", **options)
        torch.testing.assert_close(inside, outside, rtol=1e-6, atol=1e-6)


def test_autocast_leaves_float64_alone():
    _, exact = half_problem(torch.bfloat16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(*exact)
    torch.testing.assert_close(ours, unfused(cross_entropy, *exact))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_small_sparse_losses_are_exact_at_the_edge_of_their_supports(dtype, reduction):
    """Scores that half precision would make equal decide who is in it."""
    hidden, weight = torch.randn(9, 24).to(dtype), (torch.randn(300, 24) / 2).to(dtype)
    bias, target = torch.randn(300).to(dtype), torch.randint(300, (9,))
    upstream = torch.randn(9).double() if reduction == "none" else None
    for fused, options in (
        (linear_entmax_loss, {"alpha": 1.5}),
        (linear_topk_softmax_loss, {"k": 40}),
    ):
        made = []
        for of in (dtype, torch.float64):
            leaves = [each.detach().to(of).requires_grad_() for each in (hidden, weight, bias)]
            loss = fused(*leaves[:2], target, leaves[2], reduction=reduction, **options)
            loss.backward(None if upstream is None else upstream.to(loss.dtype))
            made.append([loss.detach().double(), *(each.grad.double() for each in leaves)])
        (loss, *found), (exact, *expected) = made
        torch.testing.assert_close(loss, exact, rtol=1e-5, atol=1e-5)
        for one, other in zip(found, expected, strict=True):
            assert (one - other).norm() <= 6e-3 * other.norm()
