"""The maps against brute force in float64, and against each other."""

import math
from functools import partial

import brute_force
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

from lastlayer import (
    Entmax,
    Sparsemax,
    TopKSoftmax,
    entmax,
    entmax_support,
    sparsemax,
    topk_softmax,
)

ALPHAS = (1.0, 1.05, 1.25, 1.5, 1.75, 2.0, 3.0)
MAPS = {
    "sparsemax": (sparsemax, brute_force.sparsemax),
    **{
        f"entmax {alpha}": (partial(entmax, alpha=alpha), partial(brute_force.entmax, alpha=alpha))
        for alpha in ALPHAS
    },
    **{
        f"topk {k}": (partial(topk_softmax, k=k), partial(brute_force.topk_softmax, k=k))
        for k in (1, 2, 5, 1000)
    },
}


def brute(function, scores: torch.Tensor) -> torch.Tensor:
    rows = [function(row.double().numpy()) for row in scores]
    return torch.from_numpy(np.stack(rows))


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_equals_brute_force_in_float64(name, scale, impl):
    function, definition = MAPS[name]
    for n in (1, 2, 3, 17, 300):
        scores = scale * torch.randn(4, n, dtype=torch.float64)
        probs = function(scores, impl=impl)
        expected = brute(definition, scores)
        tolerance = 1e-6 if name == "entmax 3.0" else 1e-10  # its slope is infinite at the edge
        assert (probs - expected).abs().max() < tolerance, (name, n)


@given(
    st.sampled_from(sorted(MAPS)),
    st.integers(1, 70),
    st.integers(0, 2**31),
    st.floats(1e-3, 1e4),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from([0.0, 0.3, 0.9]),
    st.booleans(),
)
def test_lower_precision_equals_brute_force(name, n, seed, scale, dtype, masked, tied):
    function, definition = MAPS[name]
    generator = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(3, n, generator=generator)
    if tied:
        scores = scores.round()
    scores = scores.to(dtype)
    allowed = torch.rand(3, n, generator=generator) >= masked
    allowed[:, seed % n] = True
    probs = function(scores, mask=allowed)
    expected = torch.zeros(3, n, dtype=torch.float64)
    for row, (values, keep) in enumerate(zip(scores, allowed, strict=True)):
        expected[row, keep] = torch.from_numpy(definition(values[keep].double().numpy()))
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype]
    if name == "entmax 3.0":
        tolerance = max(tolerance, 1e-3)
    assert (probs.double() - expected).abs().max() <= tolerance
    assert (probs[~allowed] == 0).all()
    total = probs.double().sum(-1)
    assert (total - 1).abs().max() <= {torch.float32: 1e-6}.get(dtype, 4e-3)


@given(
    st.floats(1.0, 4.0),
    st.integers(1, 400),
    st.floats(-3, 20),
    st.floats(-1e6, 1e6),
    st.integers(0, 2**31),
)
def test_rows_sum_to_one_at_any_alpha_scale_offset_and_width(alpha, n, scale, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = offset + 10.0**scale * torch.randn(2, n, generator=generator)
    probs = entmax(scores, alpha)
    assert (probs >= 0).all()
    assert (probs.double().sum(-1) - 1).abs().max() <= 1e-6


@given(st.integers(1, 200), st.sampled_from(ALPHAS))
def test_equal_scores_share_equally(n, alpha):
    probs = entmax(torch.full((n,), -3.5), alpha)
    assert (probs * n - 1).abs().max() < 1e-5
    assert (probs == probs[0]).all()


@pytest.mark.parametrize("n", [131072, 1_000_003])
@pytest.mark.parametrize("scale", [1e-3, 2.0])
def test_wide_rows_sum_to_one(n, scale):
    scores = scale * torch.randn(n)
    for probs in (sparsemax(scores), entmax(scores), topk_softmax(scores, 50)):
        assert abs(probs.double().sum().item() - 1) <= 1e-6


def test_alpha_one_is_softmax_and_two_is_sparsemax():
    scores = 3 * torch.randn(20, 50, dtype=torch.float64)
    assert (entmax(scores, 1.0) - torch.softmax(scores, -1)).abs().max() < 1e-14
    assert torch.equal(entmax(scores, 2.0), sparsemax(scores))
    assert torch.equal(entmax(scores, 2), sparsemax(scores))


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_a_tensor_alpha_agrees_with_a_number(alpha):
    scores = 2 * torch.randn(20, 50, dtype=torch.float64)
    per_row = entmax(scores, torch.full((20, 1), alpha, dtype=torch.float64))
    assert (per_row - entmax(scores, alpha)).abs().max() < 1e-12


def test_alpha_just_above_one_is_nearly_softmax():
    scores = 2 * torch.randn(5, 30, dtype=torch.float64)
    softmax = torch.softmax(scores, -1)
    for excess in (1e-3, 1e-6, 1e-10, 1e-15):
        assert (entmax(scores, 1 + excess) - softmax).abs().max() < 20 * excess + 1e-12


@pytest.mark.parametrize("k", [5, 6, 100])
def test_topk_of_all_is_softmax(k):
    scores = torch.randn(7, 5)
    assert (topk_softmax(scores, k) - torch.softmax(scores, -1)).abs().max() < 1e-6


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 4), st.integers(0, 2**31))
def test_topk_keeps_exactly_k_and_the_first_of_equals(n, k, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (3, n), generator=generator).float()
    probs = topk_softmax(scores, k)
    assert ((probs != 0).sum(-1) == min(k, n)).all()
    kept = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    expected = torch.zeros(3, n, dtype=torch.bool).scatter(-1, kept, True)
    assert torch.equal(probs != 0, expected)


@pytest.mark.parametrize("function", [sparsemax, entmax, partial(topk_softmax, k=2)])
def test_plus_infinity_makes_its_row_nan(function):
    scores = torch.randn(3, 6)
    scores[1, 4] = math.inf
    probs = function(scores)
    assert probs[1].isnan().all()
    assert torch.equal(probs[[0, 2]], function(scores[[0, 2]]))


@pytest.mark.parametrize("shape", [(6,), (1, 6), (4, 1), (2, 1, 6)])
def test_a_mask_broadcasts(shape):
    scores = torch.randn(2, 4, 6)
    mask = torch.rand(shape) > 0.4
    filled = scores.masked_fill(~mask, -math.inf)
    for function in (sparsemax, entmax, partial(topk_softmax, k=2)):
        assert torch.equal(function(scores, mask=mask), function(filled))


def test_a_masked_score_may_be_nan():
    scores, mask = torch.randn(2, 5), torch.tensor([True, True, False, True, True])
    expected = sparsemax(scores, mask=mask)
    scores[:, 2] = math.nan
    scores.requires_grad_()
    probs = sparsemax(scores, mask=mask)
    assert torch.equal(probs, expected)
    (gradient,) = torch.autograd.grad(probs[:, 0].sum(), scores)
    assert gradient.isfinite().all()
    assert (gradient[:, 2] == 0).all()


def test_modules_take_dim_and_mask():
    scores, mask = torch.randn(3, 4, 5), torch.rand(3, 4, 5) > 0.3
    pairs = [
        (Sparsemax(dim=1), partial(sparsemax, dim=1)),
        (Entmax(1.25, dim=-2), partial(entmax, alpha=1.25, dim=1)),
        (TopKSoftmax(2, dim=0), partial(topk_softmax, k=2, dim=0)),
    ]
    for module, function in pairs:
        assert torch.equal(module(scores), function(scores))
        assert torch.equal(module(scores, mask), function(scores, mask=mask))


def test_modules_say_what_they_are():
    assert repr(Sparsemax(dim=1)) == "Sparsemax(dim=1)"
    assert repr(Entmax(1.25)) == "Entmax(alpha=1.25, dim=-1, learn_alpha=False)"
    assert repr(Entmax(1.5, learn_alpha=True)) == "Entmax(alpha=1.5, dim=-1, learn_alpha=True)"
    many = Entmax(torch.full((8, 1, 1), 1.5), learn_alpha=True)
    assert "alpha=tensor(8, 1, 1)" in repr(many)
    assert repr(TopKSoftmax(3, dim=0)) == "TopKSoftmax(k=3, dim=0)"


def test_state_dicts_hold_alpha():
    learned = Entmax(1.7, learn_alpha=True)
    other = Entmax(1.5, learn_alpha=True)
    other.load_state_dict(learned.state_dict())
    assert abs(other.alpha.item() - 1.7) < 1e-6
    fixed = Entmax(torch.tensor([[1.2], [1.8]]))
    assert not list(fixed.parameters())
    assert torch.equal(fixed.state_dict()["fixed_alpha"], fixed.alpha)
    assert not Entmax(1.5).state_dict()


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_a_gradient_does_not_depend_on_where_memory_lies(alpha):
    """Sums whose order depends on addresses would differ in their last bit from call to call."""
    kept = []
    for _ in range(20):
        scores = (1.5 * torch.randn(2, 5, dtype=torch.float64)).requires_grad_()
        upstream, seen = torch.randn(2, 5, dtype=torch.float64), set()
        for size in range(100):
            kept.append(torch.empty(size % 40))
            del kept[: -1 - size % 7]
            (gradient,) = torch.autograd.grad(entmax(scores, alpha), scores, upstream)
            seen.add(tuple(gradient.flatten().tolist()))
        assert len(seen) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(
    "function", [sparsemax, entmax, partial(topk_softmax, k=3), lambda s: entmax_support(s)[0]]
)
def test_a_tangent_without_requires_grad_is_not_dropped(function):
    scores = torch.randn(2, 5)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(scores, torch.randn_like(scores))
        with pytest.raises(RuntimeError, match="jvp"):
            function(dual)


@pytest.mark.parametrize(
    "function",
    [
        lambda scores, _: sparsemax(scores),
        lambda scores, _: sparsemax(scores, 0),
        lambda scores, _: entmax(scores, 1.3),
        lambda scores, _: entmax(scores, 3.0),
        entmax,
        lambda scores, _: topk_softmax(scores, 3),
    ],
)
def test_a_batch_of_gradients(function):
    scores = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    probs, every = function(scores, alpha), torch.eye(20, dtype=torch.float64).view(20, 4, 5)
    slopes = partial(torch.autograd.grad, probs, [scores, alpha], retain_graph=True,
                     allow_unused=True, materialize_grads=True)  # fmt: skip
    found = slopes(every, is_grads_batched=True)
    for i, one in enumerate(every):
        expected = slopes(one)
        torch.testing.assert_close(found[0][i], expected[0])
        # A function that does not use alpha gives it a single zero, not one per gradient.
        torch.testing.assert_close(found[1].expand(20)[i], expected[1])
