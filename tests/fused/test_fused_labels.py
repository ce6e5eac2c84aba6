"""Fused multi-label losses, against dense targets in float64 with all scores stored."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from lastlayer.fused import label_lists
from lastlayer.fused import labels as module
from lastlayer.fused.labels import linear_bce_loss, linear_zlpr_loss
from lastlayer.fused.scores import classes_at_a_time

PAD = -100
LOSSES = {"zlpr": linear_zlpr_loss, "bce": linear_bce_loss}
with_each_loss = pytest.mark.parametrize("name", LOSSES)
size = st.integers(1, 9)


def dense_target(lists, values, smoothing, v):
    """One label at a time; the first of duplicates counts."""
    rows = lists.reshape(lists.shape[:-1].numel(), lists.shape[-1])
    target = torch.full((rows.shape[0], v), smoothing, dtype=torch.float64)
    for row, labels in enumerate(rows.tolist()):
        for place in reversed(range(len(labels))):
            if labels[place] != PAD:
                on = 1.0 - smoothing if values is None else values.reshape(rows.shape)[row, place]
                target[row, labels[place]] = on
    return target.reshape(*lists.shape[:-1], v)


def dense_loss(name, scores, target):
    """A loss for each row."""
    if name == "bce":
        return -(
            target * torch.nn.functional.logsigmoid(scores)
            + (1 - target) * torch.nn.functional.logsigmoid(-scores)
        ).sum(-1)
    zero = scores.new_zeros(*scores.shape[:-1], 1)
    negative = torch.cat([zero, scores + torch.log1p(-target)], -1)
    positive = torch.cat([zero, torch.log(target) - scores], -1)
    return negative.logsumexp(-1) + positive.logsumexp(-1)


def made(batch, d, v, m, *, bias=True, dtype=torch.float64, scale=1.0, duplicates=True):
    hidden = torch.randn(*batch, d, dtype=torch.float64).to(dtype)
    weight = (scale * torch.randn(v, d, dtype=torch.float64)).to(dtype)
    biases = torch.randn(v, dtype=torch.float64).to(dtype) if bias else None
    if duplicates:
        lists = torch.randint(v, (*batch, m))
    else:
        lists = torch.rand(*batch, v).argsort(-1)[..., :m].clone()
    lists[torch.rand(*batch, m) < 0.3] = PAD
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    return (*leaves, lists, None if biases is None else biases.requires_grad_())


def reduced(losses, reduction):
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" or not losses.numel() else losses.mean()


def gradients(loss, leaves):
    factors = torch.rand(loss.shape, dtype=loss.dtype, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((loss * factors).sum(), leaves)


def assert_equal_to_dense(
    name, problem, *, values=None, smoothing=0.0, reduction="mean", **options
):
    hidden, weight, lists, bias = problem
    leaves = [each for each in (hidden, weight, bias) if each is not None]
    fused = LOSSES[name](
        hidden, weight, lists, bias, values=values, label_smoothing=smoothing, reduction=reduction,
        **options,
    )  # fmt: skip
    target = dense_target(lists, values, smoothing, weight.shape[0])
    scores = hidden @ weight.mT + (0.0 if bias is None else bias)
    dense = reduced(dense_loss(name, scores, target), reduction)
    torch.testing.assert_close(fused, dense)
    for ours, theirs in zip(gradients(fused, leaves), gradients(dense, leaves), strict=True):
        torch.testing.assert_close(ours, theirs)


@with_each_loss
@given(
    batch=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    d=size,
    v=size,
    m=st.integers(0, 5),
    chunk_classes=st.one_of(size, st.sampled_from(["auto", "low"])),
    bias=st.booleans(),
    soft=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)
def test_any_shape(name, batch, d, v, m, chunk_classes, bias, soft, smoothing, reduction):
    problem = made(batch, d, v, m, bias=bias)
    values = torch.rand(*batch, m, dtype=torch.float64) if soft else None
    assert_equal_to_dense(
        name, problem, values=values, smoothing=smoothing, reduction=reduction,
        chunk_classes=chunk_classes,
    )  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("batch", [(7,), (2, 3), (0,), ()])
def test_small_problems_are_made_at_once(monkeypatch, batch, reduction):
    monkeypatch.setattr(module, "_ONE_SLAB_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_RULES", {})
    for bias in (False, True):
        hidden, weight, lists, biases = made(batch, 5, 20, 4, bias=bias)
        assert_equal_to_dense("zlpr", (hidden, weight, lists, biases), reduction=reduction)
        options = {"bias": biases, "reduction": reduction}
        expected = linear_zlpr_loss(hidden, weight, lists, **options)
        kept = lists != PAD
        offsets = torch.nn.functional.pad(kept.reshape(-1, 4).sum(1).cumsum(0), (1, 0))
        flat = linear_zlpr_loss(hidden, weight, lists[kept], offsets=offsets, **options)
        torch.testing.assert_close(flat, expected)
        # One more class, of which nothing is said but that it pads.
        wide = torch.cat([weight, weight.new_zeros(1, 5)])
        options["bias"] = torch.cat([weight.new_zeros(20) if biases is None else biases,
                                     weight.new_full((1,), -math.inf)])  # fmt: skip
        padded = lists.masked_fill(~kept, 20)
        made_with = linear_zlpr_loss(hidden, wide, padded, ignore_index=20, **options)
        torch.testing.assert_close(made_with, expected)


@with_each_loss
@pytest.mark.parametrize("values", [None, 0.0, 1.0])
def test_labels_at_their_limits(name, values):
    """A label of 0 leaves the positive sum, one of 1 the negative one, whatever is listed."""
    problem = made((6,), 5, 20, 4, scale=3.0)
    given_values = None if values is None else torch.full((6, 4), values, dtype=torch.float64)
    assert_equal_to_dense(name, problem, values=given_values)


@with_each_loss
def test_all_labels_on_and_none(name):
    hidden, weight, _, bias = made((3,), 4, 7, 1)
    everything = torch.arange(7).expand(3, 7).clone()
    assert_equal_to_dense(name, (hidden, weight, everything, bias), chunk_classes=3)
    nothing = torch.full((3, 2), PAD)
    assert_equal_to_dense(name, (hidden, weight, nothing, bias), chunk_classes=3)


@with_each_loss
@pytest.mark.parametrize("soft", [False, True])
def test_csr_is_the_same_as_padded(name, soft):
    hidden, weight, lists, bias = made((2, 5), 4, 30, 6)
    values = torch.rand(lists.shape) if soft else None
    kept = lists != PAD
    offsets = torch.nn.functional.pad(kept.reshape(10, 6).sum(1).cumsum(0), (1, 0))
    padded = LOSSES[name](hidden, weight, lists, bias, values=values, reduction="none")
    csr = LOSSES[name](
        hidden, weight, lists[kept], bias, offsets=offsets, reduction="none",
        values=None if values is None else values[kept],
    )  # fmt: skip
    assert padded.shape == (2, 5)
    torch.testing.assert_close(padded, csr)


@with_each_loss
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.uint16])
def test_lists_of_any_integers(name, dtype):
    hidden, weight, lists, bias = made((4,), 4, 30, 3)
    lists[lists == PAD] = 0
    offsets = torch.arange(0, 13, 3)
    right = LOSSES[name](hidden, weight, lists, bias, ignore_index=None)
    assert LOSSES[name](hidden, weight, lists.to(dtype), bias) == right
    flat = lists.to(dtype).flatten()
    in_csr = LOSSES[name](hidden, weight, flat, bias, offsets=offsets.to(dtype))
    torch.testing.assert_close(in_csr, right)


@with_each_loss
def test_without_an_ignore_index_nothing_is_padding(name):
    hidden, weight, lists, bias = made((4,), 4, 30, 3)
    lists[0, 0] = PAD
    with pytest.raises(ValueError, match="positives: expected class ids from 0 to 29, got -100"):
        LOSSES[name](hidden, weight, lists, bias, ignore_index=None)


@with_each_loss
@pytest.mark.parametrize("wide", [False, True])
def test_a_class_may_be_the_padding(name, wide, monkeypatch):
    """Also of lists with offsets, whose keys are sorted in 32 or 64 bits."""
    if wide:
        monkeypatch.setattr(label_lists.torch, "iinfo", lambda dtype: SimpleNamespace(max=0))
    hidden, weight, _, bias = made((3,), 4, 9, 2)
    offsets, lists = torch.tensor([0, 4, 4, 7]), torch.tensor([3, 8, 2, 8, 3, 3, 0])
    got = LOSSES[name](hidden, weight, lists, bias, offsets=offsets, ignore_index=3)
    padded = torch.tensor([[3, 8, 2, 8], [3, 3, 3, 3], [0, 3, 3, 3]])
    same = LOSSES[name](hidden, weight, padded, bias, ignore_index=3)
    meant = torch.tensor([[8, 2], [PAD, PAD], [0, PAD]])
    right = dense_loss(name, hidden @ weight.mT + bias, dense_target(meant, None, 0.0, 9)).mean()
    torch.testing.assert_close(got, right)
    torch.testing.assert_close(same, right)


@pytest.mark.parametrize("height", [12.0, 16.0, 40.0])
def test_positives_are_left_out_of_the_sum_not_subtracted(height):
    """Where all is right with a wide margin, what a subtraction leaves is noise."""
    weight = torch.full((1000, 1), -height)
    weight[[3, 7]] = height
    weight.requires_grad_()
    loss = linear_zlpr_loss(torch.ones(1, 1), weight, torch.tensor([[3, 7]]))
    (gradient,) = torch.autograd.grad(loss, weight)
    away = math.exp(-height)
    right = math.log1p(998 * away) + math.log1p(2 * away)
    assert loss.item() == pytest.approx(right, rel=1e-5)
    on = torch.tensor([-away / (1 + 2 * away)] * 2)
    torch.testing.assert_close(gradient[[3, 7], 0], on, rtol=1e-5, atol=0)
    assert (gradient[[0, 999]] > 0).all()


def test_a_million_right_negatives_count():
    """Each counts less than the rounding of 1, and together they are most of the loss."""
    weight = torch.full((1_000_000, 1), -18.0)
    loss = linear_bce_loss(torch.ones(1, 1), weight, torch.tensor([[PAD]]))
    assert loss.item() == pytest.approx(1e6 * math.log1p(math.exp(-18)), rel=1e-4)


@with_each_loss
def test_a_bias_of_minus_infinity_takes_a_label_out(name):
    hidden, weight, lists, bias = made((4,), 3, 9, 2, duplicates=False)
    lists[lists == 8] = PAD
    gone = bias.detach().clone()
    gone[8] = -math.inf
    for smoothing in (0.0, 0.1):
        options = {"label_smoothing": smoothing, "chunk_classes": 4}
        less = LOSSES[name](hidden, weight[:8], lists, bias[:8], **options)
        out = LOSSES[name](hidden, weight, lists, gone, **options)
        torch.testing.assert_close(out, less)
        torch.testing.assert_close(
            *(torch.autograd.grad(each, (hidden, weight)) for each in (out, less))
        )


@with_each_loss
def test_a_nan_stays_in_its_row(name):
    hidden, weight, lists, bias = made((4,), 3, 9, 2)
    with torch.no_grad():
        hidden[1] = math.nan
    loss = LOSSES[name](hidden, weight, lists, bias, reduction="none", chunk_classes=4)
    assert loss.isnan().tolist() == [False, True, False, False]
    (gradient,) = torch.autograd.grad(loss[[0, 2, 3]].sum(), hidden)
    assert not gradient[[0, 2, 3]].isnan().any()


class TestPrecision:
    @with_each_loss
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_keeps_to_float64(self, name, dtype):
        hidden, weight, lists, bias = made(
            (64,), 32, 500, 3, dtype=dtype, duplicates=False, scale=0.3
        )
        leaves = hidden, weight, bias
        exact = [each.detach().double().requires_grad_() for each in leaves]
        right = LOSSES[name](exact[0], exact[1], lists, exact[2])
        slopes = torch.autograd.grad(right, exact)
        for chunk_classes in (128, "auto"):
            loss = LOSSES[name](hidden, weight, lists, bias, chunk_classes=chunk_classes)
            assert loss.dtype == torch.float32
            assert loss.item() == pytest.approx(right.item(), rel=2e-3)
            for ours, slope in zip(torch.autograd.grad(loss, leaves), slopes, strict=True):
                assert ours.dtype == dtype
                assert (ours.double() - slope).norm() <= 1e-2 * slope.norm()

    def test_a_gradient_smaller_than_float16_survives_a_loss_scale(self):
        hidden, weight, lists, _ = made((4096,), 4, 50, 1, dtype=torch.float16, bias=False)
        loss = linear_zlpr_loss(hidden, weight, lists)
        (scaled,) = torch.autograd.grad(loss * 2.0**16, hidden)
        exact = hidden.detach().double().requires_grad_()
        (right,) = torch.autograd.grad(
            linear_zlpr_loss(exact, weight.detach().double(), lists) * 2.0**16, exact
        )
        assert (scaled.double() - right).norm() <= 1e-2 * right.norm()

    def test_another_half_precision_of_the_weight_under_autocast(self):
        hidden, weight, lists, _ = made((6,), 8, 40, 2, bias=False, dtype=torch.float32)
        narrow = weight.detach().half().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_zlpr_loss(hidden, narrow, lists)
        gradient = torch.autograd.grad(loss, (hidden, narrow))
        assert [each.dtype for each in gradient] == [torch.float32, torch.float16]
        exact = linear_zlpr_loss(hidden, weight, lists)
        for ours, right in zip(gradient, torch.autograd.grad(exact, (hidden, weight)), strict=True):
            assert (ours.float() - right).norm() <= 2e-2 * right.norm()


class TestBackward:
    @with_each_loss
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_a_kept_graph_can_be_walked_again(self, name, reduction):
        problem = made((3,), 4, 9, 2)
        loss = LOSSES[name](*problem, reduction=reduction, chunk_classes=4).sum()
        factors = 1.0, 3.0, 1.0
        first, second, third = (
            torch.autograd.grad(factor * loss, (problem[0], problem[1]), retain_graph=True)
            for factor in factors
        )
        torch.testing.assert_close([3.0 * each for each in first], list(second))
        torch.testing.assert_close(first, third)

    @with_each_loss
    def test_second_derivatives_are_refused(self, name):
        problem = made((3,), 4, 9, 2)
        with pytest.raises(RuntimeError, match="zlpr_loss_from_indices"):
            torch.autograd.grad(LOSSES[name](*problem), problem[0], create_graph=True)

    @with_each_loss
    def test_what_is_frozen_costs_no_product(self, name):
        hidden, weight, lists, _ = made((3,), 4, 9, 2, bias=False)
        walks = {"zlpr": 2, "bce": 1}[name]

        def products(hidden, weight):
            return len(product_shapes(lambda: LOSSES[name](hidden, weight, lists, chunk_classes=3)))

        assert products(hidden.detach(), weight.detach()) == 3
        # The last slab is held: it need not be made again.
        scores = 3 * walks - (walks - 1)
        assert products(hidden.detach(), weight) == scores + 3
        assert products(hidden, weight.detach()) == scores + 3
        assert products(hidden, weight) == scores + 6

    def test_without_a_reduction_the_normalisers_are_not_made_again(self):
        hidden, weight, lists, _ = made((3,), 4, 9, 2, bias=False)
        loss = linear_zlpr_loss(hidden, weight, lists, reduction="none", chunk_classes=3).sum()
        assert len(product_shapes(loss.backward)) == 9


def profiled(work):
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True, acc_events=True
    ) as seen:
        work()
    return list(seen.events())


def product_shapes(work):
    return [
        each.input_shapes for each in profiled(work) if each.name in ("aten::mm", "aten::addmm")
    ]


class TestMemory:
    @with_each_loss
    def test_all_scores_are_never_held(self, name):
        n, d, v, chunk = 16, 2, 640, 64
        problem = made((n,), d, v, 2, dtype=torch.float32)
        for reduction in ("mean", "none"):
            fused = partial(LOSSES[name], *problem, chunk_classes=chunk, reduction=reduction)
            events = profiled(lambda fused=fused: fused().sum().backward())
            largest = max(event.self_cpu_memory_usage for event in events)
            assert 0 < largest <= max(v * d * 4, (n * chunk + 1) * 4)

    @pytest.mark.parametrize(("chunk_classes", "budget"), [("auto", 8e6), ("low", 2e6)])
    @pytest.mark.parametrize("v", [10, 30_000, 1_000_000])
    def test_default_slabs_keep_to_their_memory(self, chunk_classes, budget, v):
        for n in (1, 7, 1000, 100_000):
            at_a_time = classes_at_a_time(chunk_classes, torch.empty(n, 1), v)
            assert 1 <= at_a_time <= v
            # Sixteen labels are taken in any case.
            assert at_a_time <= 16 or at_a_time * n * 4 <= budget
            assert at_a_time == v or at_a_time * n * 4 >= budget / 4


@with_each_loss
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiling_changes_nothing(name, reduction):
    torch.compiler.reset()
    hidden, weight, lists, bias = made((5,), 4, 12, 3, dtype=torch.float32)

    def loss(hidden, weight, bias):
        return LOSSES[name](
            hidden, weight, lists, bias, reduction=reduction, label_smoothing=0.1
        ).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    leaves = hidden, weight, bias
    torch.testing.assert_close(compiled(*leaves), loss(*leaves))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*leaves), leaves), torch.autograd.grad(loss(*leaves), leaves)
    )


@with_each_loss
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"positives": [[1]]}, TypeError, "positives: expected a torch.Tensor"),
        ({"positives": torch.zeros(3, 2)}, TypeError, "positives: expected integer class ids"),
        (
            {"positives": torch.zeros(2, 2).long()},
            ValueError,
            r"positives: expected shape \(3, m\)",
        ),
        ({"positives": torch.full((3, 1), 9)}, ValueError, "positives: expected class ids from 0"),
        ({"positives": torch.full((3, 1), -1)}, ValueError, "got -1"),
        ({"offsets": torch.tensor([0, 3])}, ValueError, "offsets: expected shape"),
        ({"values": torch.full((3, 2), 1.5)}, ValueError, r"values: expected labels in \[0, 1\]"),
        ({"values": torch.ones(3)}, ValueError, "values: expected the shape of positives"),
        ({"label_smoothing": 0.5}, ValueError, "label_smoothing: expected 0 to below 0.5"),
        ({"hidden": torch.zeros(3, 5)}, ValueError, "hidden: expected shape"),
        ({"weight": torch.zeros(9)}, ValueError, "weight: expected shape"),
        ({"bias": torch.zeros(3)}, ValueError, "bias: expected shape"),
        ({"reduction": "max"}, ValueError, "reduction"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index: expected an int"),
        ({"chunk_classes": 0}, ValueError, "chunk_classes: expected at least 1"),
        ({"chunk_classes": "all"}, TypeError, "chunk_classes: expected an int, 'auto' or 'low'"),
    ],
)
def test_bad_input(name, change, error, words):
    usual = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(9, 4),
        "positives": torch.zeros(3, 2).long(),
    }
    with pytest.raises(error, match=words):
        LOSSES[name](**usual | change)
