"""How gradients are handed out, what is computed for them, and what is left alone."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile
from unfused import (
    LOSSES,
    cross_entropy,
    entmax,
    entmax_probs,
    gradients,
    make_problem,
    scores,
    unfused,
)

from lastlayer.fused import (
    linear_cross_entropy,
    linear_entmax_loss,
    linear_topk_softmax_loss,
)
from lastlayer.fused.rows import _RowsEngine
from lastlayer.fused.scores import rows_at_a_time

N, D, V = 12, 5, 40
with_each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
DENSE = {name: LOSSES[name] for name in ("cross_entropy", "statistics")}
SPARSE = {name: LOSSES[name] for name in ("entmax", "sparsemax", "topk_softmax")}


def profiled(work):
    """Every operator that ran, with the shapes it was given."""
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True, acc_events=True
    ) as seen:
        work()
    return list(seen.events())


def products(work):
    """The shapes of the two matrices of each product of matrices that ran."""
    shapes = []
    for event in profiled(work):
        if event.name == "aten::mm":
            shapes.append(tuple(map(tuple, event.input_shapes[:2])))
        if event.name == "aten::addmm":
            shapes.append(tuple(map(tuple, event.input_shapes[1:3])))
    return shapes


def trained(**options):
    """A problem whose rows are sure of a few classes."""
    return make_problem(N, D, V, scale=20.0, **options)


class TestBackward:
    @with_each_loss
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("factor", [1.0, 3.0])
    def test_a_second_one_gives_the_same(self, loss, reduction, factor):
        problem = make_problem(N)
        value = loss(*problem, reduction=reduction).sum() * factor
        leaves = problem[0], problem[1], problem[3]
        once = torch.autograd.grad(value, leaves, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(value, leaves), once)

    @with_each_loss
    def test_a_second_one_works_with_weight_grad(self, loss):
        hidden, weight, target, bias = make_problem(N)
        into = torch.zeros_like(weight)
        value = loss(hidden, weight, target, bias, weight_grad=into)
        value.backward(retain_graph=True)
        once = into.clone(), hidden.grad.clone()
        value.backward()
        torch.testing.assert_close((into, hidden.grad), (2 * once[0], 2 * once[1]))

    @with_each_loss
    def test_gradients_that_were_handed_out_are_the_users_own(self, loss):
        problem = make_problem(N)
        value = loss(*problem)
        made = torch.autograd.grad(value, problem[1], retain_graph=True)[0]
        kept = made.clone()
        made.zero_()
        torch.testing.assert_close(torch.autograd.grad(value, problem[1])[0], kept, rtol=0, atol=0)

    @with_each_loss
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_a_derivative_of_it_is_refused(self, loss, reduction):
        problem = make_problem(N)
        value = loss(*problem, reduction=reduction).sum()
        with pytest.raises(RuntimeError, match=r"no second derivatives.*use a loss on scores"):
            torch.autograd.grad(value, problem[0], create_graph=True)

    @with_each_loss
    def test_a_batch_of_gradients_is_refused(self, loss):
        problem = make_problem(N)
        losses = loss(*problem, reduction="none")
        with pytest.raises(RuntimeError, match=r"one upstream gradient at a time, got a batch"):
            torch.autograd.grad(losses, problem[0], torch.eye(N), is_grads_batched=True)

    @with_each_loss
    @pytest.mark.parametrize("factor", [0.0, -3.0, 1e-3, 1e6])
    def test_any_upstream_gradient(self, loss, factor):
        problem = make_problem(N)
        plain = gradients(loss(*problem), problem)
        for mine, one in zip(gradients(loss(*problem) * factor, problem), plain, strict=True):
            torch.testing.assert_close(mine, one * factor)

    @with_each_loss
    def test_two_losses_on_the_same_weight_add_up(self, loss):
        problem, other = make_problem(N), make_problem(N)
        both = loss(*problem) + 2 * loss(other[0], problem[1], other[2], problem[3])
        (of_both,) = torch.autograd.grad(both, problem[1])
        (first,) = torch.autograd.grad(loss(*problem), problem[1])
        (second,) = torch.autograd.grad(
            loss(other[0], problem[1], other[2], problem[3]), problem[1]
        )
        torch.testing.assert_close(of_both, first + 2 * second)

    def test_kernels_get_one_upstream_number_per_row(self, monkeypatch):
        """The gradient of a sum has a stride of 0, which kernels would read beyond its end."""
        strides, invoke = [], _RowsEngine.invoke

        def looked_at(self, call):
            strides.append(None if call.upstream is None else call.upstream.stride())
            return invoke(self, call)

        monkeypatch.setattr(_RowsEngine, "invoke", looked_at)
        hidden, weight, target, bias = make_problem(4, 3, 7)
        hidden.requires_grad_()
        linear_cross_entropy(hidden, weight, target, bias, reduction="none").sum().backward()
        assert strides == [None, (1,)]

    @with_each_loss
    def test_gradcheck(self, loss):
        problem = make_problem(4, 3, 7, ignored=(1,))

        def rows(hidden, weight, bias):
            return loss(hidden, weight, problem[2], bias, reduction="none", chunk_rows=3)

        assert torch.autograd.gradcheck(rows, (problem[0], problem[1], problem[3]))

    @with_each_loss
    def test_row_weights_get_none(self, loss):
        row_weight = torch.rand(N, requires_grad=True)
        loss(*make_problem(N), row_weight=row_weight).backward()
        assert row_weight.grad is None

    @with_each_loss
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("v", [V, 400])
    @pytest.mark.parametrize("scale", [1.0, 1e-6], ids=["peaked", "flat"])
    def test_nan_stays_in_its_row(self, loss, dtype, v, scale):
        problem = make_problem(N, v=v, scale=scale, bias=False, dtype=dtype)
        with torch.no_grad():
            problem[0][3] = float("nan")
        value = loss(*problem, reduction="none", chunk_rows=N)
        assert value.isnan().nonzero().flatten().tolist() == [3]
        (gradient,) = torch.autograd.grad(value.sum(), problem[0])
        assert gradient.isnan().any(-1).nonzero().flatten().tolist() == [3]

    @with_each_loss
    def test_ignored_rows_may_hold_anything(self, loss):
        problem = make_problem(N, ignored=(3,))
        with torch.no_grad():
            problem[0][3] = float("nan")
        value = loss(*problem)
        assert all(each.isfinite().all() for each in (value, *gradients(value, problem)))


class TestWork:
    """What is computed, by counting products."""

    @pytest.mark.parametrize("loss", DENSE.values(), ids=DENSE)
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    @pytest.mark.parametrize(
        "frozen", [(), (0,), (1,), (3,), (0, 3), (1, 3), (0, 1)], ids=lambda f: f"frozen{f}"
    )
    def test_products_for_frozen_tensors_are_skipped(self, loss, reduction, frozen):
        problem = make_problem(N, D, V)
        for place in frozen:
            problem[place].requires_grad_(False)

        def work():
            loss(*problem, reduction=reduction, chunk_rows=N).sum().backward()

        shapes = products(work)
        forward = shapes.count(((N, D), (D, V)))
        to_hidden = shapes.count(((N, V), (V, D)))
        to_weight = shapes.count(((V, N), (N, D)))
        # All scores of one chunk are kept for backward; statistics make them again.
        again = reduction == "none" and loss is LOSSES["statistics"]
        assert forward == (2 if again else 1)
        assert to_hidden == (0 if 0 in frozen else 1)
        assert to_weight == (0 if 1 in frozen else 1)
        assert forward + to_hidden + to_weight == len(shapes)
        for place in (0, 1, 3):
            assert (problem[place].grad is None) == (place in frozen)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_what_is_kept_for_backward_serves_twice(self, dtype):
        """With other factors, row weights and all options; then it becomes the gradient."""
        problem = make_problem(N, D, V, dtype=dtype)
        options = dict(row_weight=torch.rand(N), label_smoothing=0.1, z_loss=0.01, softcap=9.0)
        factors = torch.randn(2, N)
        factors[:, 3] = 0.0
        loss = linear_cross_entropy(*problem, reduction="none", **options)
        for i, each in enumerate(factors):
            leaves = [problem[place] for place in (0, 1, 3)]
            made = torch.autograd.grad(loss, leaves, each.to(loss.dtype), retain_graph=i == 0)
            whole = linear_cross_entropy(*problem, reduction="none", chunk_rows=N - 1, **options)
            expected = torch.autograd.grad(whole, leaves, each.to(loss.dtype))
            close = {torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
            for one, other in zip(made, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=close, atol=close)

    @pytest.mark.parametrize("loss", SPARSE.values(), ids=SPARSE)
    def test_short_lists_need_no_product_but_the_scores(self, loss):
        problem = trained()
        shapes = products(lambda: loss(*problem, chunk_rows=N).backward())
        assert shapes == [((N, D), (D, V))]

    @with_each_loss
    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_nothing_but_the_scores_where_no_gradient_is_recorded(self, loss, context):
        problem = make_problem(N, D, V)
        expected = loss(*problem).detach()

        def work():
            with context():
                value = loss(*problem, chunk_rows=N)
            assert not value.requires_grad
            torch.testing.assert_close(value, expected)

        assert products(work) == [((N, D), (D, V))]

    @with_each_loss
    def test_nothing_but_the_scores_where_no_tensor_wants_one(self, loss):
        problem = [each if each is None else each.detach() for each in make_problem(N, D, V)]
        assert products(lambda: loss(*problem, chunk_rows=N)) == [((N, D), (D, V))]

    @with_each_loss
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_ignored_rows_are_left_out_before_any_product(self, loss, reduction):
        problem = make_problem(N, D, V, ignored=(0, 1, 5, 9, 10))
        shapes = products(lambda: loss(*problem, reduction=reduction).sum().backward())
        kept = N - 5
        assert shapes
        assert set(shapes) <= {((kept, D), (D, V)), ((kept, V), (V, D)), ((V, kept), (kept, D))}
        assert not problem[0].grad[[0, 1, 5, 9, 10]].any()

    @with_each_loss
    def test_chunks_have_the_rows_that_were_asked_for(self, loss):
        shapes = products(lambda: loss(*trained(), chunk_rows=5))
        heights = [first[0] for first, second in shapes if second == (D, V)]
        assert heights == [5, 5, 2]

    @with_each_loss
    @pytest.mark.parametrize("scale", [20.0, 1e-6], ids=["peaked", "flat"])
    def test_all_scores_are_never_held(self, loss, scale):
        n, d, v, chunk = 40, 3, 1500, 8
        problem = make_problem(n, d, v, dtype=torch.float32, scale=scale)
        for reduction in ("mean", "none"):
            fused = partial(loss, *problem, chunk_rows=chunk, reduction=reduction)
            events = profiled(lambda fused=fused: fused().sum().backward())
            largest = max(event.self_cpu_memory_usage for event in events)
            # The scores of a chunk; twice their size where they are sorted with their places.
            assert 0 < largest <= chunk * v * 8

    @pytest.mark.parametrize(("chunk_rows", "budget"), [("auto", 48e6), ("low", 12e6)])
    @pytest.mark.parametrize("v", [10, 30_000, 128_256, 1_000_000])
    def test_default_chunks_keep_to_their_memory(self, chunk_rows, budget, v):
        for n in (1, 7, 1000, 100_000):
            rows = rows_at_a_time(chunk_rows, torch.empty(n, 1), v)
            assert 1 <= rows <= n
            # Eight rows are taken in any case.
            assert rows <= 8 or rows * v * 4 <= budget * 1.1
            assert rows == n or rows * v * 4 >= budget / 4


class TestLists:
    """Class rows outside every support are not touched in backward."""

    def touched(self, problem, alpha=1.5):
        probs = entmax_probs(scores(*problem[:2], problem[3]).detach(), alpha)
        touched = (probs > 0).any(0)
        touched[problem[2]] = True
        assert touched.any()
        assert not touched.all()
        return touched

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_their_gradient_is_exactly_zero(self, reduction):
        problem = trained()
        touched = self.touched(problem)
        value = linear_entmax_loss(*problem, chunk_rows=5, reduction=reduction).sum()
        _, of_weight, of_bias = gradients(value, problem)
        assert not of_weight[~touched].any()
        assert not of_bias[~touched].any()
        assert of_weight[touched].any(-1).all()

    def test_what_is_in_weight_grad_stays_there(self):
        problem = trained()
        touched = self.touched(problem)
        into = torch.full_like(problem[1], float("nan"))
        into[touched] = 0.0
        linear_entmax_loss(*problem, chunk_rows=5, weight_grad=into).backward()
        _, truth, _ = gradients(unfused(entmax, *problem), problem)
        assert into[~touched].isnan().all()
        torch.testing.assert_close(into[touched], truth[touched])

    def test_top_k(self):
        problem = trained()
        best = scores(*problem[:2], problem[3]).topk(3).indices
        touched = torch.zeros(V, dtype=torch.bool)
        touched[best.flatten()] = True
        touched[problem[2]] = True
        value = linear_topk_softmax_loss(*problem, k=3, chunk_rows=5)
        _, of_weight, _ = gradients(value, problem)
        assert not of_weight[~touched].any()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
@with_each_loss
@pytest.mark.parametrize("options", [{"reduction": "none"}, {"chunk_rows": 2}], ids=str)
def test_a_tangent_is_not_dropped(loss, options):
    """Forward mode needs no requires_grad: without an error the derivative would be missing."""
    hidden, weight, target, bias = (each.detach() for each in make_problem(N, D, V))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(hidden, torch.randn_like(hidden))
        with pytest.raises(RuntimeError, match=r"jvp|forward AD"):
            loss(dual, weight, target, bias, **options)


class TestWeightGrad:
    @with_each_loss
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("chunk_rows", [1, 5, "auto"])
    def test_adds_to_what_is_there(self, loss, reduction, chunk_rows):
        problem = hidden, weight, _, bias = make_problem(N, D, V, ignored=(4,))
        upstream = torch.randn(N if reduction == "none" else (), dtype=torch.float64)
        options = {"reduction": reduction, "chunk_rows": chunk_rows}
        of_hidden, of_weight, of_bias = gradients(loss(*problem, **options), problem, upstream)
        before = torch.randn_like(weight)
        into = before.clone()
        loss(*problem, weight_grad=into, **options).backward(upstream)
        torch.testing.assert_close(into, before + of_weight)
        torch.testing.assert_close(hidden.grad, of_hidden)
        torch.testing.assert_close(bias.grad, of_bias)
        assert weight.grad is None

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_in_float32(self, dtype):
        hidden, weight, target, bias = make_problem(N, D, V, dtype=dtype)
        into = torch.zeros(V, D)
        linear_cross_entropy(hidden, weight, target, bias, weight_grad=into).backward()
        doubles = [each.detach().double().requires_grad_() for each in (hidden, weight, bias)]
        exact = doubles[0], doubles[1], target, doubles[2]
        _, truth, _ = gradients(unfused(cross_entropy, *exact), exact)
        torch.testing.assert_close(into.double(), truth, rtol=1e-4, atol=1e-6)
        assert weight.grad is None
        assert bias.grad.dtype == dtype

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_in_float16_with_frozen_hidden_and_no_bias(self, reduction):
        """No gradient is left for autograd, and that of the weight has been scaled already."""
        hidden, weight, target, _ = make_problem(N, D, V, bias=False, dtype=torch.float16)
        into = torch.zeros(V, D)
        loss = linear_cross_entropy(
            hidden.detach(), weight, target, reduction=reduction, weight_grad=into
        )
        loss.sum().backward()
        exact = hidden.detach().double(), weight.detach().double().requires_grad_(), target, None
        truth = unfused(cross_entropy, *exact, reduction=reduction).sum()
        (of_weight,) = torch.autograd.grad(truth, exact[1])
        torch.testing.assert_close(into.double(), of_weight, rtol=1e-4, atol=1e-6)

    def test_weight_grad_itself_over_several_steps(self):
        problem = make_problem(N)
        weight = problem[1]
        (once,) = torch.autograd.grad(linear_cross_entropy(*problem), weight)
        weight.grad = torch.zeros_like(weight)
        memory = weight.grad.data_ptr()
        for _ in range(3):
            linear_cross_entropy(*problem, weight_grad=weight.grad).backward()
        torch.testing.assert_close(weight.grad, 3 * once)
        assert weight.grad.data_ptr() == memory

    def test_a_part_of_a_larger_tensor(self):
        problem = make_problem(N, D, V)
        (truth,) = torch.autograd.grad(linear_cross_entropy(*problem), problem[1])
        whole = torch.zeros(V, D + 3, dtype=torch.float64)
        linear_cross_entropy(*problem, weight_grad=whole[:, 1 : D + 1]).backward()
        torch.testing.assert_close(whole[:, 1 : D + 1], truth)
        assert not whole[:, 0].any()
        assert not whole[:, D + 1 :].any()

    @with_each_loss
    def test_frozen_hidden(self, loss):
        hidden, weight, target, bias = make_problem(N, D, V)
        (truth,) = torch.autograd.grad(loss(hidden, weight, target, bias), weight)
        into = torch.zeros_like(weight)
        loss(hidden.detach(), weight, target, bias, weight_grad=into).backward()
        torch.testing.assert_close(into, truth)


class TestModels:
    def tied(self):
        embedding = nn.Embedding(V, D, dtype=torch.float64)
        return embedding, torch.randint(V, (N,)), torch.randint(V, (N,))

    @with_each_loss
    def test_tied_embeddings_get_the_sum(self, loss):
        embedding, words, target = self.tied()
        weight = embedding.weight
        loss(torch.tanh(embedding(words)), weight, target).backward()
        # The two roles by themselves.
        source, head = weight.detach().clone(), weight.detach().clone()
        source.requires_grad_()
        head.requires_grad_()
        loss(torch.tanh(source[words]), head, target).backward()
        torch.testing.assert_close(weight.grad, source.grad + head.grad)

    def test_tied_embeddings_with_weight_grad(self):
        embedding, words, target = self.tied()
        weight = embedding.weight
        linear_cross_entropy(torch.tanh(embedding(words)), weight, target).backward()
        truth, weight.grad = weight.grad, torch.zeros_like(weight)
        linear_cross_entropy(
            torch.tanh(embedding(words)), weight, target, weight_grad=weight.grad
        ).backward()
        torch.testing.assert_close(weight.grad, truth)

    @with_each_loss
    def test_checkpointing(self, loss):
        problem = make_problem(N)
        plain = gradients(loss(*problem), problem)
        value = torch.utils.checkpoint.checkpoint(loss, *problem, use_reentrant=False)
        for mine, one in zip(gradients(value, problem), plain, strict=True):
            torch.testing.assert_close(mine, one)

    @with_each_loss
    def test_meta_tensors(self, loss):
        problem = [each.detach().to("meta") for each in make_problem((2, 3))]
        problem[0].requires_grad_()
        value = loss(*problem)
        assert value.is_meta
        value.backward()
        assert problem[0].grad.shape == problem[0].shape

    @with_each_loss
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_compile(self, loss, reduction, dtype):
        layer = nn.Sequential(nn.Linear(4, D), nn.Tanh()).to(dtype)
        _, weight, target, bias = make_problem(N, D, V, ignored=(3,), dtype=dtype)
        inputs = torch.randn(N, 4, dtype=dtype)
        leaves = [*layer.parameters(), weight, bias]

        def model(inputs, target):
            rows = loss(layer(inputs), weight, target, bias, reduction=reduction, chunk_rows=5)
            return (rows * torch.arange(1, rows.numel() + 1)).sum() * 3

        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {
            "rtol": 2e-3, "atol": 2e-3
        }  # fmt: skip
        with warnings.catch_warnings(action="ignore"):  # torch's own, while it traces
            ours = compiled(inputs, target)
            made = torch.autograd.grad(ours, leaves)
        plain = model(inputs, target)
        torch.testing.assert_close(ours, plain, **tolerance)
        for mine, one in zip(made, torch.autograd.grad(plain, leaves), strict=True):
            assert mine.dtype == one.dtype
            torch.testing.assert_close(mine, one, **tolerance)

    def test_weight_grad_is_left_out_of_a_graph_that_may_break(self):
        problem = make_problem(N)
        (truth,) = torch.autograd.grad(linear_cross_entropy(*problem), problem[1])
        into = torch.zeros_like(problem[1])
        torch.compiler.reset()
        compiled = torch.compile(
            lambda *tensors: linear_cross_entropy(*tensors, weight_grad=into), backend="aot_eager"
        )
        with warnings.catch_warnings(action="ignore"):  # torch's own, while it traces
            compiled(*problem).backward()
        torch.testing.assert_close(into, truth)
        assert problem[1].grad is None

    def test_compile_without_some_gradients(self):
        hidden, weight, target, bias = make_problem(N)
        compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
        for frozen in (0, 1, 3):
            torch.compiler.reset()
            problem = [hidden, weight, target, bias]
            problem[frozen] = problem[frozen].detach()
            with warnings.catch_warnings(action="ignore"):  # torch's own, while it traces
                made = gradients(compiled(*problem), problem)
            torch.testing.assert_close(made, gradients(linear_cross_entropy(*problem), problem))
