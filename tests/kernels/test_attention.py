"""Attention with entmax weights: every implementation against all weights in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from benchmarks.attention import Size
from benchmarks.attention import draw as draw_benchmark
from lastlayer import entmax, kernels
from lastlayer.attention import attention_weights, functional, sparse_attention

needs_triton = pytest.mark.skipif(
    kernels.available()["triton"] is not None, reason="neither a GPU nor Triton's interpreter"
)
TRITON = pytest.param("triton", marks=needs_triton)
both = pytest.mark.parametrize("impl", ["chunked", TRITON])
# Of results, and of gradients.
ROUNDING = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-12}


def device_of(impl):
    return "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"


def draw(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def problem(n=21, m=37, d=8, size=5, heads=2, key_heads=None, batch=1):
    key_heads = heads if key_heads is None else key_heads
    query = draw(batch, heads, n, d, scale=2.0)
    return query, draw(batch, key_heads, m, d, seed=1), draw(batch, key_heads, m, size, seed=2)


def dense(query, key, value, *, alpha=1.5, attn_mask=None, is_causal=False, scale=None,
          window=None, cu_seqlens=None, query_offset=0, enable_gqa=False):  # fmt: skip
    """All weights, and the definition of each option."""
    group = query.shape[-3] // key.shape[-3]
    key, value = (each.repeat_interleave(group, -3) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.mT * scale
    n, m = scores.shape[-2:]
    place, column = torch.arange(n)[:, None] + query_offset, torch.arange(m)
    allowed = torch.ones(n, m, dtype=torch.bool)
    if cu_seqlens is not None:
        of_queries, of_keys = cu_seqlens if isinstance(cu_seqlens, tuple) else [cu_seqlens] * 2
        own = torch.bucketize(torch.arange(n), of_queries[1:], right=True)
        theirs = torch.bucketize(column, of_keys[1:], right=True)
        allowed &= own[:, None] == theirs
        place = (torch.arange(n) - of_queries[own] + of_keys[own])[:, None]
    if is_causal:
        allowed &= column <= place
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window - 1, window - 1)
        allowed &= (left is None) | (column >= place - (left or 0))
        allowed &= (right is None) | (column <= place + (right or 0))
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask
    elif attn_mask is not None:
        allowed = allowed & attn_mask
    if isinstance(alpha, torch.Tensor) and alpha.dim() == 1:
        alpha = alpha[:, None, None]
    return entmax(scores.masked_fill(~allowed, -math.inf), alpha) @ value


def moved(options, impl, dtype):
    """Options on the device and, where they are added or multiplied, in the dtype of a test."""

    def one(each):
        if isinstance(each, tuple):
            return tuple(map(one, each))
        if not isinstance(each, torch.Tensor):
            return each
        return each.to(device_of(impl), dtype if each.is_floating_point() else each.dtype)

    return {name: one(each) for name, each in options.items()}


def agree(impl, dtype, tensors, options, tolerance=None):
    """Results and gradients of an implementation in a dtype beside all weights in float64."""
    exact = [each.clone().requires_grad_() for each in tensors]
    rounded = [each.detach().to(device_of(impl), dtype).requires_grad_() for each in tensors]
    # Both start from the same numbers.
    with torch.no_grad():
        for one, other in zip(exact, rounded, strict=True):
            one.copy_(other)
    taken = moved(options, impl, torch.promote_types(dtype, torch.float32))
    alphas = [
        each.requires_grad_() for each in (options.get("alpha"), taken.get("alpha"))
        if isinstance(each, torch.Tensor)
    ]  # fmt: skip
    wanted = dense(*exact, **options)
    got = sparse_attention(*rounded, impl=impl, **taken)
    assert got.shape == wanted.shape
    assert got.dtype == dtype
    upstream = draw(*wanted.shape, seed=3)
    truth = torch.autograd.grad(wanted, exact + alphas[:1], upstream)
    made = torch.autograd.grad(got, rounded + alphas[1:], upstream.to(got))
    tolerance = ROUNDING[dtype] if tolerance is None else tolerance
    for one, other in zip((got, *made), (wanted, *truth), strict=True):
        error = (one.detach().cpu().double() - other.detach()).norm()
        # With one key gradients of scores are 0, as a difference of others.
        assert float(error) <= tolerance * max(float(other.detach().norm()), 1.0)


CUTS = torch.tensor([0, 3, 3, 10, 21])
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.7},
    "window": {"window": 4},
    "left and right": {"window": (6, 2)},
    "right only": {"window": (None, 1)},
    "causal window": {"window": 5, "is_causal": True},
    "offset": {"is_causal": True, "query_offset": 16},
    "before all keys": {"is_causal": True, "query_offset": -3},
    "bool mask": {"attn_mask": draw(1, 1, 21, 37, seed=4) > -0.5},
    "mask of keys": {"attn_mask": draw(37, seed=5) > 0},
    "added": {"attn_mask": draw(2, 21, 37, seed=6)},
    "added -inf, causal": {
        "attn_mask": draw(21, 37, seed=7).masked_fill(draw(21, 37, seed=8) > 0.5, -math.inf),
        "is_causal": True,
    },
}
ALPHAS = [1.0, 1.25, 1.5, 1.7, 2.0]
MANY_ALPHAS = [1.01, 1.05, 1.2, 4 / 3, 1.45, 3.0, torch.tensor([1.0, 1.2, 1.5, 2.0])]


def agree_on_sinks(dtype, n, m, alpha, tolerance):
    """Rows with one large score, as of a token that all attend to, among nearly equal ones."""
    query, key, value = problem(n, m, d=16, size=16, heads=4)
    scores = 0.1 * draw(4, n, m)
    scores[..., 0] = torch.linspace(0, 6, n)
    if isinstance(alpha, torch.Tensor):
        alpha = alpha.double()
    options = {"alpha": alpha, "attn_mask": scores.float().double()}
    agree("triton", dtype, (0.01 * query, key, value), options, tolerance)


class TestAgainstAllWeights:
    @pytest.mark.parametrize("impl", [TRITON])
    @pytest.mark.parametrize("scale", [0.05, 4.0])
    @pytest.mark.parametrize(
        "alpha",
        [
            1.0 + 3e-7,
            1.0001,
            1.003,
            1.05,
            1.2,
            1.3,
            1.45,
            1.6,
            1.95,
            2.5,
            torch.tensor([1.0, 1.35]),
        ],
        ids=str,
    )
    def test_any_alpha_in_half_precision(self, impl, scale, alpha):
        """The kernels take fast logarithms there, and stop the search for thresholds earlier."""
        query, key, value = problem(n=67, m=200, d=16, size=16)
        alpha = alpha.double() if isinstance(alpha, torch.Tensor) else alpha
        agree(impl, torch.float16, (scale * query, key, value), {"alpha": alpha}, 2e-3)

    @pytest.mark.parametrize("impl", [TRITON])
    @pytest.mark.parametrize("alpha", [1.2, 1.45, MANY_ALPHAS[-1]], ids=str)
    def test_one_large_score_among_many_equal_ones(self, impl, alpha):
        """A sum near 1 is then far from the threshold: the last step alone would not do."""
        agree_on_sinks(torch.float16, 16, 1024, alpha, 1.5e-3)

    @pytest.mark.parametrize("impl", [TRITON])
    @pytest.mark.parametrize("alpha", [3.0, torch.tensor([1.5, 3.0])], ids=str)
    def test_steep_slopes_in_half_precision(self, impl, alpha):
        """Slopes are 1 / p here: the rounding of a mean of values was multiplied by them."""
        alpha = alpha.double() if isinstance(alpha, torch.Tensor) else alpha
        tensors = problem(n=40, m=500, d=64, size=64)
        agree(impl, torch.float16, tensors, {"alpha": alpha}, 1.5e-3)

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("alpha", MANY_ALPHAS, ids=str)
    def test_fast_logarithms_of_a_gpu(self, dtype, alpha):
        """The interpreter has precise logarithms in their place."""
        tolerance = 1.5e-3 if dtype == torch.float16 else 8e-3
        agree_on_sinks(dtype, 192, 8192, alpha, tolerance)
        query, key, value = problem(n=300, m=2100, d=64, size=64, heads=4)
        agree("triton", dtype, (query, key, value), {"alpha": alpha}, 2 * tolerance)

    @both
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_equal_scores_at_a_very_large_alpha(self, impl, dtype):
        query, key, value = (x.to(device_of(impl), dtype) for x in problem(3, 5, heads=1))
        made = sparse_attention(0 * query, key, value, alpha=1e5, impl=impl)
        tolerance = ROUNDING[dtype]
        torch.testing.assert_close(
            made, value.mean(2, keepdim=True).expand_as(made), rtol=tolerance, atol=tolerance
        )

    @both
    @pytest.mark.parametrize("alpha", ALPHAS)
    def test_alpha(self, impl, alpha):
        agree(impl, torch.float32, problem(), {"alpha": alpha})

    @both
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_options(self, impl, options):
        agree(impl, torch.float32, problem(), options)

    @both
    def test_alpha_above_2(self, impl):
        # Slopes at the edge of the support are steep there.
        agree(impl, torch.float32, problem(), {"alpha": 2.5}, 2e-4)

    @both
    @pytest.mark.parametrize("shape", [(2,), (2, 1, 1), (2, 2, 1, 1), ()], ids=str)
    def test_an_alpha_per_head_gets_a_gradient(self, impl, shape):
        alpha = 1.2 + draw(*shape).abs()
        agree(impl, torch.float32, problem(batch=2), {"alpha": alpha.clamp(max=2.0)}, 5e-5)

    @both
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("alpha", [1.5, 2.0])
    def test_half_precision(self, impl, dtype, alpha):
        if device_of(impl) == "cpu" and impl == "triton" and dtype == torch.bfloat16:
            pytest.skip("the interpreter multiplies the bits of bfloat16")
        agree(impl, dtype, problem(), {"alpha": alpha, "is_causal": True})

    @both
    @pytest.mark.parametrize("heads", [1, 2])
    def test_query_heads_share_key_heads(self, impl, heads):
        agree(
            impl,
            torch.float32,
            problem(heads=4, key_heads=heads),
            {"enable_gqa": True, "window": 9},
        )

    @both
    @pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 37), (17, 1), (65, 64), (64, 130)])
    def test_lengths(self, impl, n, m):
        agree(impl, torch.float32, problem(n, m, heads=1, batch=1), {})

    @both
    @pytest.mark.parametrize(("d", "size"), [(1, 3), (16, 16), (33, 20), (130, 40)])
    def test_sizes_of_heads(self, impl, d, size):
        agree(impl, torch.float32, problem(9, 40, d, size, heads=1), {})

    @both
    @pytest.mark.parametrize("more", [{}, {"is_causal": True}, {"window": 2}], ids=str)
    @pytest.mark.parametrize("keys", [None, torch.tensor([0, 2, 9, 9, 37])], ids=["same", "others"])
    def test_packed_sequences(self, impl, more, keys):
        tensors = problem(21, 21 if keys is None else 37, batch=1)
        agree(
            impl,
            torch.float32,
            tensors,
            {"cu_seqlens": CUTS if keys is None else (CUTS, keys), **more},
        )

    @both
    def test_batch_dimensions_and_strides(self, impl):
        query, key, value = (
            each.transpose(1, 2).contiguous().transpose(1, 2) for each in problem(batch=2)
        )
        agree(impl, torch.float32, (query, key, value), {"is_causal": True})
        agree(impl, torch.float32, [each[0] for each in problem()], {})
        agree(
            impl,
            torch.float32,
            [each.unflatten(0, (1, 2)) for each in problem(batch=2)],
            OPTIONS["added"],
        )

    def test_many_chunks(self, monkeypatch):
        monkeypatch.setattr(functional, "_CHUNK_BYTES", 4 * 2 * 37 * 5)
        for options in OPTIONS.values():
            agree("chunked", torch.float32, problem(), options)
        agree("chunked", torch.float32, problem(21, 21, batch=1), {"cu_seqlens": CUTS})

    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_few_weights_are_saved_for_backward(self, monkeypatch, options):
        tensors = [each.float().requires_grad_() for each in problem(21, 37, d=64)]
        taken = moved(options, "chunked", torch.float32)
        grads = []
        for few in (True, False):
            calls = []
            forward = kernels.entmax.forward
            monkeypatch.setattr(
                kernels.entmax, "forward", lambda *x, f=forward, c=calls: c.append(1) or f(*x)
            )
            if not few:
                monkeypatch.setattr(functional, "_saves_weights", lambda _: False)
            made = sparse_attention(*tensors, **taken)
            grads.append(torch.autograd.grad(made.square().sum(), tensors))
            assert len(calls) == (1 if few else 2)
            monkeypatch.undo()
        torch.testing.assert_close(*grads)

    @needs_triton
    def test_long_rows_in_the_kernel(self):
        agree("triton", torch.float32, problem(70, 300, heads=1, batch=1), {"is_causal": True})

    @needs_triton
    @pytest.mark.parametrize("alpha", [1.5, 2.0])
    def test_supports_of_nearly_equal_scores(self, alpha):
        """A gradient of sparsemax needs the very support: one key more in a row is another one."""
        device = device_of("triton")
        tensors = draw_benchmark(Size(768, 2, 64), 0.85, torch.float16, "cpu", seed=0)
        *exact, upstream = (each.double() for each in tensors)
        exact[0].requires_grad_()
        made = [each.to(device).requires_grad_() for each in tensors[:3]]
        truth = torch.autograd.grad(dense(*exact, alpha=alpha), exact[0], upstream)[0]
        out = sparse_attention(*made, alpha=alpha, impl="triton")
        (found,) = torch.autograd.grad(out, made[0], tensors[3].to(device))
        assert (found.cpu().double() - truth).norm() <= 3e-3 * truth.norm()

    @given(st.integers(0, 2**30))
    def test_any_mask(self, seed):
        generator = torch.Generator().manual_seed(seed)
        mask = torch.rand(21, 37, generator=generator) < torch.rand(21, 1, generator=generator)
        agree("chunked", torch.float64, problem(heads=2, batch=1), {"attn_mask": mask})


class TestIdentities:
    @both
    def test_alpha_1_is_softmax(self, impl):
        tensors = [each.float().to(device_of(impl)) for each in problem(21, 21)]
        made = sparse_attention(*tensors, alpha=1.0, is_causal=True, impl=impl)
        truth = scaled_dot_product_attention(*tensors, is_causal=True)
        torch.testing.assert_close(made, truth, rtol=1e-5, atol=1e-5)

    @both
    def test_the_order_of_keys_does_not_matter(self, impl):
        query, key, value = (each.float().to(device_of(impl)) for each in problem())
        order = torch.randperm(37, generator=torch.Generator().manual_seed(1)).to(key.device)
        made = sparse_attention(query, key[:, :, order], value[:, :, order], impl=impl)
        torch.testing.assert_close(
            made, sparse_attention(query, key, value, impl=impl), rtol=1e-5, atol=1e-5
        )

    @both
    @pytest.mark.parametrize("alpha", [1.5, 2.0, 1.7])
    @pytest.mark.thin(2)
    @pytest.mark.parametrize(
        ("scale", "shift"), [(1.0, -5000.0), (1.0, 1e4), (0.01, 0.0), (30.0, 0.0)]
    )
    def test_weights_sum_to_1_at_any_scale_and_offset(self, impl, alpha, scale, shift):
        query, key, _ = (each.float().to(device_of(impl)) for each in problem(9, 200, heads=1))
        value, mask = (
            torch.ones(1, 1, 200, 1, device=key.device),
            torch.full((), shift, device=key.device),
        )
        made = sparse_attention(query * scale, key, value, alpha=alpha, attn_mask=mask, impl=impl)
        torch.testing.assert_close(made, torch.ones_like(made), rtol=2e-6, atol=2e-6)

    @both
    @pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
    def test_a_query_with_nothing_to_look_at(self, impl, alpha):
        tensors = [each.float().to(device_of(impl)).requires_grad_() for each in problem()]
        mask = torch.ones(21, 37, dtype=torch.bool, device=tensors[0].device)
        mask[[0, 20]] = False
        made = sparse_attention(*tensors, alpha=alpha, attn_mask=mask, impl=impl)
        assert not made[:, :, [0, 20]].any()
        grads = torch.autograd.grad(made.sum(), tensors)
        assert not grads[0][:, :, [0, 20]].any()
        assert all(bool(each.isfinite().all()) for each in grads)
        nothing = sparse_attention(
            *tensors, alpha=alpha, attn_mask=torch.zeros_like(mask), impl=impl
        )
        assert not nothing.any()
        assert not any(each.any() for each in torch.autograd.grad(nothing.sum(), tensors))

    @both
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_what_is_not_a_number_stays_in_its_query(self, impl, value):
        query, key, values = (each.float().to(device_of(impl)) for each in problem())
        truth = sparse_attention(query, key, values, impl=impl)
        query[0, 1, 3, 0] = value
        made = sparse_attention(query, key, values, impl=impl)
        assert made[0, 1, 3].isnan().all()
        made[0, 1, 3] = truth[0, 1, 3]
        assert torch.equal(made, truth)

    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"alpha": 1.3}], ids=str)
    def test_gradcheck(self, options):
        tensors = [each.requires_grad_() for each in problem(4, 5, 3, 2, heads=2, key_heads=1)]
        mask = draw(4, 5, seed=9).requires_grad_()
        assert torch.autograd.gradcheck(
            lambda q, k, v, m: sparse_attention(q, k, v, attn_mask=m, enable_gqa=True, **options),
            (*tensors, mask),
        )

    def test_an_added_mask_gets_a_gradient(self):
        tensors, mask = problem(), draw(2, 1, 37, seed=9).requires_grad_()
        made, truth = (f(*tensors, attn_mask=mask) for f in (sparse_attention, dense))
        one, two = (torch.autograd.grad(each.square().sum(), mask)[0] for each in (made, truth))
        torch.testing.assert_close(one, two)

    @both
    def test_a_decoded_query_is_that_of_all_queries(self, impl):
        query, key, value = (each.float().to(device_of(impl)) for each in problem(37, 37))
        whole = sparse_attention(query, key, value, is_causal=True, window=9, impl=impl)
        last = sparse_attention(
            query[:, :, -1:], key, value, window=9, is_causal=True, query_offset=36, impl=impl
        )
        torch.testing.assert_close(last, whole[:, :, -1:])


class TestDropout:
    @both
    def test_weights_are_dropped_alike_in_both_passes(self, impl):
        """The output is linear in the values, by the same weights in forward and backward."""
        query, key, value = (each.float().to(device_of(impl)) for each in problem())
        value.requires_grad_()
        torch.manual_seed(3)
        made = sparse_attention(query, key, value, dropout_p=0.4, impl=impl)
        upstream = torch.randn_like(made)
        (of_value,) = torch.autograd.grad(made, value, upstream)
        torch.testing.assert_close(
            (of_value * value).sum(), (made * upstream).sum(), rtol=1e-4, atol=1e-4
        )
        torch.manual_seed(3)
        again = sparse_attention(query, key, value, dropout_p=0.4, impl=impl)
        assert torch.equal(made, again)
        assert not torch.equal(again, sparse_attention(query, key, value, dropout_p=0.4, impl=impl))

    @both
    def test_gradients_are_those_of_finite_differences(self, impl):
        query, key, value = (
            each.float().to(device_of(impl)) for each in problem(5, 9, heads=1, batch=1)
        )
        query.requires_grad_()

        def loss(moved):
            torch.manual_seed(1)
            return (
                sparse_attention(moved, key, value, dropout_p=0.3, impl=impl)
                .double()
                .square()
                .sum()
            )

        (found,) = torch.autograd.grad(loss(query), query)
        step = 1e-2 * torch.randn_like(query)
        with torch.no_grad():
            change = loss(query + step) - loss(query - step)
        torch.testing.assert_close(
            change.item() / 2, (found * step).sum().item(), rtol=3e-2, atol=1e-3
        )

    @both
    def test_the_mean_is_that_without(self, impl):
        query, key = (
            each.float().to(device_of(impl)) for each in problem(3, 9, heads=1, batch=1)[:2]
        )
        value = torch.eye(9, device=key.device)[None, None]
        torch.manual_seed(5)
        drawn = torch.stack(
            [sparse_attention(query, key, value, dropout_p=0.5, impl=impl) for _ in range(80)]
        )
        exact = sparse_attention(query, key, value, impl=impl)
        assert float((drawn.mean(0) - exact).abs().max()) < 0.35
        ratio = drawn[:, exact != 0] / exact[exact != 0]
        assert set(ratio.mul(1e3).round().div(1e3).unique().tolist()) == {0.0, 2.0}

    @both
    def test_all_weights_dropped(self, impl):
        tensors = [each.float().to(device_of(impl)).requires_grad_() for each in problem()]
        made = sparse_attention(*tensors, dropout_p=1.0, impl=impl)
        assert not made.any()
        assert not any(each.any() for each in torch.autograd.grad(made.sum(), tensors))


class TestHowItIsCalled:
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    def test_compiled_whole(self):
        tensors = [each.float().requires_grad_() for each in problem()]
        compiled = torch.compile(sparse_attention, fullgraph=True, backend="aot_eager")
        made, truth = (f(*tensors, is_causal=True) for f in (compiled, sparse_attention))
        assert torch.equal(made, truth)
        one, two = (torch.autograd.grad(each.sum(), tensors) for each in (made, truth))
        for each, other in zip(one, two, strict=True):
            assert torch.equal(each, other)

    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    def test_packed_sequences_compiled_whole(self):
        """Their values cannot be checked while a compiler traces."""
        tensors = [each.float() for each in problem(21, 21)]
        compiled = torch.compile(sparse_attention, fullgraph=True, backend="aot_eager")
        made, truth = (f(*tensors, cu_seqlens=CUTS) for f in (compiled, sparse_attention))
        assert torch.equal(made, truth)

    def test_autocast(self):
        query, key, value = (each.float() for each in problem())
        with torch.autocast("cpu", torch.bfloat16):
            # As of a parameter and the results of layers.
            made = sparse_attention(query, key.bfloat16(), value)
            assert made.dtype == torch.bfloat16
            # Only the inputs are rounded, not the scores.
            halves = [each.bfloat16().requires_grad_() for each in (query, key, value)]
            mask, grads = draw(21, 37, seed=6).float(), []
            for enabled in (True, False):
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    out = sparse_attention(*halves, attn_mask=mask)
                    grads.append((out, *torch.autograd.grad(out.sum(), halves)))
                    weights = attention_weights(query.bfloat16(), key.bfloat16(), attn_mask=mask)
                    grads[-1] += (weights.values,)
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointing(self, reentrant):
        tensors = [each.requires_grad_() for each in problem()]

        def attend(*tensors):
            return sparse_attention(*tensors, alpha=1.3, dropout_p=0.3)

        grads = []
        for call in (attend, lambda *t: checkpoint(attend, *t, use_reentrant=reentrant)):
            torch.manual_seed(1)
            out = call(*tensors).square().sum()
            out.backward()
            grads.append([each.grad for each in tensors])
            for each in tensors:
                each.grad = None
        torch.testing.assert_close(*grads)

    @pytest.mark.parametrize("alpha", [1.5, 2.0])
    def test_second_derivatives(self, alpha):
        tensors = [each.requires_grad_() for each in problem(3, 5, 2, 2, heads=2, key_heads=1)]
        mask = draw(3, 5, seed=9).requires_grad_()
        assert torch.autograd.gradgradcheck(
            lambda q, k, v, m: sparse_attention(
                q, k, v, attn_mask=m, alpha=alpha, enable_gqa=True, is_causal=True
            ),
            (*tensors, mask),
        )

    def test_second_derivatives_with_dropout_are_refused(self):
        tensors = [each.requires_grad_() for each in problem()]
        made = sparse_attention(*tensors, dropout_p=0.1).sum()
        with pytest.raises(RuntimeError, match="second derivatives are not supported with dropout"):
            torch.autograd.grad(made, tensors, create_graph=True)

    def test_vmap(self):
        query, key, value = problem(batch=3)
        mask, alpha = draw(3, 21, 37, seed=3), 1.2 + draw(3, 2, seed=4).abs()
        some = draw(3, 37, seed=5) > 0

        def attend(query, mask, alpha, some):
            out = sparse_attention(query, key[0], value[0], attn_mask=mask, alpha=alpha)
            return out + sparse_attention(query, key[0], value[0], attn_mask=some, window=9)

        made = torch.func.vmap(attend)(query, mask, alpha, some)
        rows = zip(query, mask, alpha, some, strict=True)
        torch.testing.assert_close(made, torch.stack([attend(*row) for row in rows]))

    def test_gradients_of_each_example(self):
        query, key, value = problem(batch=3)

        def loss(query, key):
            return sparse_attention(query, key, value[0], is_causal=True).square().sum()

        made = torch.func.vmap(torch.func.grad(loss, (0, 1)))(query, key)
        for i in range(3):
            row = [each[i].clone().requires_grad_() for each in (query, key)]
            torch.testing.assert_close(
                [each[i] for each in made], torch.autograd.grad(loss(*row), row)
            )

    @both
    def test_far_positions(self, impl):
        tensors = [each.float().to(device_of(impl)) for each in problem()]
        truth = sparse_attention(*tensors, impl=impl)
        for options in ({"window": 10**12}, {"window": [10**12, None], "query_offset": 2**29}):
            torch.testing.assert_close(sparse_attention(*tensors, **options, impl=impl), truth)
        far = sparse_attention(*tensors, window=9, query_offset=2**29, impl=impl)
        assert not far.any()

    def test_memory_is_that_of_a_chunk(self):
        n = 3000
        tensors = [torch.randn(1, 1, n, 4, requires_grad=True) for _ in range(3)]
        with torch.profiler.profile(
            profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
        ) as seen:
            before = functional._CHUNK_BYTES
            functional._CHUNK_BYTES = 1 << 20
            try:
                sparse_attention(*tensors).sum().backward()
            finally:
                functional._CHUNK_BYTES = before
        largest = max(event.cpu_memory_usage for event in seen.events())
        assert largest < 3 * (1 << 20)

    def test_heads_of_size_0(self):
        query, key, value = problem(d=0)
        mean = value.mean(2, keepdim=True).expand(-1, -1, 21, -1)
        torch.testing.assert_close(sparse_attention(query, key, value), mean)

    def test_empty(self):
        query, key, value = problem(0, 5)
        assert sparse_attention(query, key, value).shape == (1, 2, 0, 5)
        query, key, value = problem(5, 0)
        assert not sparse_attention(query, key, value).any()


class TestWeights:
    @pytest.mark.parametrize(
        "options", [{}, {"is_causal": True}, {"alpha": 2.0}, {"window": 3}], ids=str
    )
    def test_they_are_the_non_zeros(self, options, monkeypatch):
        monkeypatch.setattr(functional, "_CHUNK_BYTES", 8 * 2 * 37 * 5)
        query, key, _ = problem()
        found = attention_weights(query, key, **options)
        exact = dense(
            query, key, torch.eye(37, dtype=torch.float64).expand(1, 2, 37, 37), **options
        )
        assert torch.equal(found.counts, (exact != 0).sum(-1))
        assert found.values.shape[-1] == found.counts.max()
        spread = torch.zeros_like(exact).scatter_add_(-1, found.keys.clamp(min=0), found.values)
        torch.testing.assert_close(spread, exact)
        assert bool((found.values.diff(dim=-1) <= 0).all())
        assert torch.equal(found.keys == -1, found.values == 0)


WRONG = {
    "query: expected": lambda q, k, v: (q[0, 0], k, v, {}),
    "key: expected batch": lambda q, k, v: (q, k[..., :3], v, {}),
    "value: expected": lambda q, k, v: (q, k, v[:, :, :3], {}),
    "key: expected query's 4 heads, got 2; enable_gqa": lambda q, k, v: (q, k[:, :2], v[:, :2], {}),
    "key: expected a divisor of query's 4": lambda q, k, v: (
        q, k[:, :3], v[:, :3], {"enable_gqa": True}
    ),
    "value: expected the dtype of query, torch.float64": lambda q, k, v: (q, k, v.float(), {}),
    "key: expected the device of query, cpu": lambda q, k, v: (q, k.to("meta"), v, {}),
    "query: expected torch.float16, torch.bfloat16": lambda *t: (
        *(x.to(torch.float8_e4m3fn) for x in t), {}
    ),
    "query: expected a torch.Tensor, got list": lambda q, k, v: (q.tolist(), k, v, {}),
    "query: expected a dense tensor": lambda *t: (
        *(torch.nested.nested_tensor(list(x), layout=torch.jagged) for x in t), {}
    ),
    "alpha: expected the device of query": lambda *t: (*t, {"alpha": torch.ones(4, device="meta")}),
    "alpha: expected": lambda *t: (*t, {"alpha": 0.5}),
    "alpha: expected one per head": lambda *t: (*t, {"alpha": torch.ones(3)}),
    "alpha: expected \\(4,\\) or": lambda *t: (*t, {"alpha": torch.ones(4, 1, 2)}),
    "attn_mask: expected a shape": lambda *t: (*t, {"attn_mask": torch.ones(3, 3)}),
    "attn_mask: expected bool": lambda *t: (*t, {"attn_mask": torch.ones(21, 37).int()}),
    "window: expected": lambda *t: (*t, {"window": (1, 2, 3)}),
    "window": lambda *t: (*t, {"window": 0}),
    "dropout_p": lambda *t: (*t, {"dropout_p": 1.5}),
    "scale": lambda *t: (*t, {"scale": 0.0}),
    "cu_seqlens: expected batch": lambda *t: (*t, {"cu_seqlens": CUTS}),
    "cu_seqlens: expected ascending": lambda *t: (*(x[:1] for x in t), {"cu_seqlens": CUTS}),
    "cu_seqlens: expected an int32": lambda *t: (*(x[:1] for x in t), {"cu_seqlens": CUTS / 1}),
    "cu_seqlens: expected an int32 or": lambda *t: (*(x[:1] for x in t), {"cu_seqlens": [0, 21]}),
    "query_offset: expected at most": lambda *t: (*t, {"query_offset": 2**40}),
    "impl: expected": lambda *t: (*t, {"impl": "fast"}),
    "impl: 'triton' cannot run": lambda *t: (*t, {"impl": "triton"}),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    *tensors, options = WRONG[message](*problem(heads=4, batch=2))
    with pytest.raises((ValueError, TypeError), match=message):
        sparse_attention(*tensors, **options)
