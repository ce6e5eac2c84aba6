"""Biases of -inf: classes, targets and whole rows that are out of the running."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from unfused import LOSSES

import lastlayer
from lastlayer import kernels
from lastlayer.fused import (
    linear_cross_entropy,
    linear_entmax_loss,
    linear_statistics,
    linear_topk_softmax_loss,
)
from lastlayer.fused.cross_entropy import _run_slabs, run_tiles
from lastlayer.fused.rows import Problem, Wanted
from lastlayer.heads import FullSoftmax, SelfNormalized

N, D, V = 6, 12, 40
ALLOWED = 20
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WITHIN = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

# Lists and dense rows of each, and the loss on scores that says what is right.
SPARSE = {
    "topk list": (
        partial(linear_topk_softmax_loss, k=5), partial(lastlayer.topk_softmax_loss, k=5),
    ),
    "topk list wider than what is allowed": (
        partial(linear_topk_softmax_loss, k=30), partial(lastlayer.topk_softmax_loss, k=30),
    ),
    "topk dense": (
        partial(linear_topk_softmax_loss, k=V), partial(lastlayer.topk_softmax_loss, k=V),
    ),
    "entmax": (
        partial(linear_entmax_loss, alpha=1.5), partial(lastlayer.entmax_loss, alpha=1.5),
    ),
    "sparsemax": (
        partial(linear_entmax_loss, alpha=2.0), partial(lastlayer.entmax_loss, alpha=2.0),
    ),
    "entmax 1.2": (
        partial(linear_entmax_loss, alpha=1.2), partial(lastlayer.entmax_loss, alpha=1.2),
    ),
}  # fmt: skip
EVERY = {
    **LOSSES,
    "topk_softmax dense": partial(linear_topk_softmax_loss, k=V),
    "entmax 1": partial(linear_entmax_loss, alpha=1.0),
    "all options": partial(
        linear_cross_entropy, softcap=5.0, temperature=0.7, z_loss=0.1, label_smoothing=0.1
    ),
    "all statistics": lambda *args, **options: (
        linear_statistics(*args, softcap=5.0, z_loss=0.1, **options).loss
    ),
}


@pytest.fixture(autouse=True)
def _quiet_interpreter():
    """Triton's interpreter is numpy, which warns where hardware makes an inf."""
    with np.errstate(all="ignore"):
        yield


def make(dtype=torch.float32, allowed=ALLOWED):
    hidden, weight = torch.randn(N, D).to(dtype), torch.randn(V, D).to(dtype)
    bias = torch.randn(V).to(dtype)
    bias[allowed:] = -math.inf
    target = torch.randint(ALLOWED, (N,))
    return hidden.requires_grad_(), weight.requires_grad_(), target, bias.requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPARSE)
def test_a_masked_target_costs_infinity_and_has_a_gradient(name, dtype):
    fused, on_scores = SPARSE[name]
    hidden, weight, target, bias = make(dtype)
    target[2] = ALLOWED + 5
    loss = fused(hidden, weight, target, bias, reduction="none", chunk_rows=4)
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight, bias)]
    scores = wide[0] @ wide[1].T + wide[2]
    expected = on_scores(scores, target, reduction="none")
    assert loss[2] == expected[2] == math.inf
    torch.testing.assert_close(
        loss.double(), expected, rtol=WITHIN[dtype], atol=WITHIN[dtype], check_dtype=False
    )
    made = torch.autograd.grad(loss.sum(), (hidden, weight, bias))
    true = torch.autograd.grad(expected.sum(), wide)
    for one, other in zip(made, true, strict=True):
        assert one.isfinite().all()
        assert float((one.double() - other).norm() / other.norm()) <= WITHIN[dtype]


@pytest.mark.thin(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in EVERY if name != "all options"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_masked_target_of_weight_zero_counts_nothing(name, dtype, reduction):
    hidden, weight, target, bias = make(dtype)
    target[2] = ALLOWED + 5
    counted = torch.ones(N)
    counted[2] = 0.0
    loss = EVERY[name](hidden, weight, target, bias, row_weight=counted, reduction=reduction)
    assert loss.isfinite().all()
    made = torch.autograd.grad(loss.sum(), (hidden, weight, bias))
    assert all(each.isfinite().all() for each in made)
    assert (made[0][2] == 0).all()


@pytest.mark.thin(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_nothing_allowed_costs_infinity_and_moves_nothing(name, dtype, weighted, reduction):
    hidden, weight, target, bias = make(dtype, allowed=0)
    class_weight = torch.rand(V) + 0.5 if weighted else None
    loss = EVERY[name](
        hidden, weight, target, bias, class_weight=class_weight, reduction=reduction, chunk_rows=4
    )
    assert (loss == math.inf).all()
    for each in torch.autograd.grad(loss.sum(), (hidden, weight, bias)):
        assert (each == 0).all()
    nothing = torch.zeros(N)
    loss = EVERY[name](hidden, weight, target, bias, row_weight=nothing, reduction=reduction)
    assert (loss == 0).all()


def test_statistics_where_nothing_is_allowed():
    hidden, weight, target, bias = make(allowed=0)
    known = linear_statistics(hidden, weight, target, bias, softcap=3.0)
    assert (known.logsumexp == -math.inf).all()
    assert (known.log_prob == -math.inf).all()
    assert (known.entropy == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("allowed", [0, 150])
def test_in_slabs_of_classes(dtype, softcap, allowed, monkeypatch):
    """Some slabs, or all of them, have no class that is allowed."""
    n, d, v = 20, 8, 400
    monkeypatch.setattr("lastlayer.fused.cross_entropy.budget_bytes", lambda *_: 128 * 128 * 2)
    hidden, weight = torch.randn(n, d).to(dtype), torch.randn(v, d).to(dtype)
    bias, target = torch.randn(v).to(dtype), torch.randint(150, (n,))
    bias[allowed:] = -math.inf
    if allowed:
        target[3] = allowed + 1
    wanted = Wanted(True, True, True)
    problem = Problem(hidden, weight, bias, target, torch.ones(n), None, wanted, torch.float32)
    result = _run_slabs(problem, (0.0, 0.1, softcap, 0.8), "low")
    made = result.hidden, result.weight, result.bias
    if not allowed:
        assert (result.loss == math.inf).all()
        assert all((each == 0).all() for each in made)
        return
    leaves = [each.double().requires_grad_() for each in (hidden, weight[:150], bias[:150])]
    scores = leaves[0] @ leaves[1].T + leaves[2]
    scores = (softcap * torch.tanh(scores / softcap) if softcap else scores) / 0.8
    lse = scores.logsumexp(-1)
    met = target < 150
    at_target = scores.gather(-1, torch.where(met, target, 0)[:, None]).squeeze(-1)
    losses = lse - torch.where(met, at_target, 0.0) + 0.1 * lse.square()
    assert result.loss[3] == math.inf
    torch.testing.assert_close(result.loss[met].double(), losses[met], rtol=1e-2, atol=1e-2)
    true = torch.autograd.grad(losses.sum(), leaves)
    assert all(each.isfinite().all() for each in made)
    assert float((result.weight[:150].double() - true[1]).norm() / true[1].norm()) <= 2e-2
    assert (result.weight[150:] == 0).all(-1).sum() >= 249


@pytest.mark.parametrize(("smoothing", "softcap"), [(0.0, 0.0), (0.1, 0.0), (0.0, 3.0)])
def test_in_tiles(smoothing, softcap, device):
    pytest.importorskip("triton")
    if kernels.available()["triton"] is not None:
        pytest.skip(kernels.available()["triton"])
    hidden = torch.randn(20, 16, device=device).half()
    weight = torch.randn(150, 16, device=device).half()
    bias = torch.full((150,), -math.inf, device=device).half()
    target = torch.randint(150, (20,), device=device)
    ones = torch.ones(20, device=device)
    wanted = Wanted(True, True, True)
    problem = Problem(hidden, weight, bias, target, ones, None, wanted, torch.float32)
    result = run_tiles(problem, (smoothing, 0.1, softcap, 0.7))
    assert (result.loss == math.inf).all()
    for each in (result.hidden, result.weight, result.bias):
        assert (each == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_a_soft_cap_brings_nothing_back(dtype, z_loss):
    """As if the masked classes were not there."""
    hidden, weight, target, bias = make(dtype)
    options = {"softcap": 2.0, "temperature": 0.8, "z_loss": z_loss, "chunk_rows": 4}
    ours = linear_statistics(hidden, weight, target, bias, **options)
    fewer = linear_statistics(hidden, weight[:ALLOWED], target, bias[:ALLOWED], **options)
    torch.testing.assert_close(ours, fewer)
    leaves = hidden, weight, bias
    made = torch.autograd.grad(ours.loss, leaves)
    torch.testing.assert_close(made, torch.autograd.grad(fewer.loss, leaves))
    assert (made[1][ALLOWED:] == 0).all()
    target[0] = ALLOWED
    gone = linear_statistics(hidden, weight, target, bias, reduction="none", **options)
    assert gone.loss[0] == math.inf
    assert gone.log_prob[0] == -math.inf
    assert all(each.isfinite().all() for each in torch.autograd.grad(gone.loss.sum(), leaves))


def test_a_head_with_a_soft_cap_gives_masked_classes_nothing():
    head = FullSoftmax(D, V, softcap=2.0, temperature=1.3)
    with torch.no_grad():
        head.bias[ALLOWED:] = -math.inf
    hidden = torch.randn(N, D, requires_grad=True)
    logs = head.log_prob(hidden)
    assert (logs[:, ALLOWED:] == -math.inf).all()
    torch.testing.assert_close(logs.exp().sum(-1), torch.ones(N))
    assert (head.topk(hidden, ALLOWED).classes < ALLOWED).all()
    assert (head.sample(hidden, 50) < ALLOWED).all()
    target = torch.randint(ALLOWED, (N,))
    right = logs.gather(-1, target[:, None])
    torch.testing.assert_close(head(hidden, target), -right.mean())
    made = torch.autograd.grad(-right.mean(), (hidden, head.weight, head.bias))
    expected = torch.autograd.grad(head(hidden, target), (hidden, head.weight, head.bias))
    torch.testing.assert_close(made, expected)
    assert (made[1][ALLOWED:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 5, V + 1])
def test_a_row_that_is_no_number_is_no_hit(dtype, k):
    hidden, weight, target, _ = make(dtype)
    with torch.no_grad():
        hidden[1] = math.nan
        weight[V - 1] = math.nan
    assert not linear_statistics(hidden, weight, target, k=k).in_top_k.any()
    known = linear_statistics(hidden, weight[: V - 1], target, k=k)
    assert not known.in_top_k[1]
    plain = linear_statistics(hidden[2:], weight[: V - 1], target[2:], k=k)
    assert torch.equal(known.in_top_k[2:], plain.in_top_k)


@pytest.mark.parametrize("impl", kernels.IMPLEMENTATIONS)
@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0])
def test_no_probability_is_no_gradient(impl, alpha, device):
    if kernels.available()[impl] is not None:
        pytest.skip(kernels.available()[impl])
    device = "cpu" if impl == "cpu" else device
    scores, target = torch.randn(3, 50, device=device), torch.tensor([4, 7, 49], device=device)
    scores[1], scores[2, 49] = -math.inf, -math.inf
    probs = kernels.entmax.forward("reference", scores, alpha, None)
    before, scale = probs.clone(), torch.tensor([1.0, 2.0, 3.0], device=device)
    loss = kernels.entmax_rows.forward_(impl, probs, scores, target, scale, alpha)
    assert loss[0].isfinite()
    assert (loss[1:] == math.inf).all()
    assert (probs[1] == 0).all()
    before[0, 4] -= 1
    before[2, 49] -= 1
    torch.testing.assert_close(probs, before * scale[:, None])


@pytest.mark.parametrize("impl", kernels.IMPLEMENTATIONS)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_the_gradient_of_a_slab_leaves_masked_classes_alone(impl, softcap, device):
    if kernels.available()[impl] is not None:
        pytest.skip(kernels.available()[impl])
    device = "cpu" if impl == "cpu" else device
    scores, ones = torch.randn(4, 60, device=device), torch.ones(4, device=device)
    scores[:, 20:] = -math.inf
    target = torch.full((4,), -1, device=device)
    # Even where what a cap would bring back is too large for a slope of 0.
    for lse in (3.0, -200.0):
        made = scores.clone()
        kernels.softmax_rows.gradient_(impl, made, target, ones, lse * ones, ones, softcap, 0.8)
        assert (made[:, 20:] == 0).all()


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("widest", [0, 512], ids=["dense", "listed"])
def test_a_loss_beyond_the_range_of_the_dtype_is_infinite(k, widest, monkeypatch):
    """Not NaN: what is missing of the probabilities would have an infinite price."""
    monkeypatch.setattr("lastlayer.fused.sparse.WIDEST_TOP", widest)
    hidden, weight = torch.ones(4, 1), torch.tensor([[3e38], [-3e38], [0.0], [1.0]])
    losses = linear_topk_softmax_loss(hidden, weight, torch.arange(4), k=k, reduction="none")
    assert losses.tolist()[:2] == [0.0, math.inf]
    assert losses[2:].isfinite().all()


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_penalty_beyond_the_range_of_the_dtype_is_infinite(fraction):
    head = SelfNormalized(1, 1, bias=False, fraction=fraction)
    torch.nn.init.constant_(head.weight, 3e37)
    assert head(torch.ones(2, 1), torch.zeros(2, dtype=torch.int64)) == math.inf
