"""Odd sizes: one of anything, none of anything, several batch dimensions, strides of all kinds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unfused import (
    LOSSES,
    assert_fused_equals_unfused,
    cross_entropy,
    entmax,
    gradients,
    make_problem,
    topk_softmax,
    unfused,
)

from lastlayer.fused import (
    linear_cross_entropy,
    linear_entmax_loss,
    linear_statistics,
    linear_topk_softmax_loss,
)

ROW_LOSSES = {
    linear_cross_entropy: (cross_entropy, {"label_smoothing": 0.1}),
    linear_entmax_loss: (entmax, {"alpha": 1.5}),
    linear_topk_softmax_loss: (topk_softmax, {"k": 3}),
}
with_each_function = pytest.mark.parametrize("function", ROW_LOSSES, ids=lambda f: f.__name__)
with_each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
size = st.integers(1, 9)


@with_each_function
@given(
    batch=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    d=size,
    v=size,
    chunk_rows=st.one_of(size, st.sampled_from(["auto", "low"])),
    bias=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    data=st.data(),
)
def test_any_shape(function, batch, d, v, chunk_rows, bias, reduction, data):
    row_loss, options = ROW_LOSSES[function]
    problem = make_problem(batch, d, v, bias=bias)
    places = range(problem[2].numel())
    for row in data.draw(st.sets(st.sampled_from(places)) if places else st.just(set())):
        problem[2].view(-1)[row] = -100
    assert_fused_equals_unfused(
        function, row_loss, problem, chunk_rows=chunk_rows, reduction=reduction, **options
    )


@with_each_function
@pytest.mark.parametrize(
    ("n", "d", "v"), [(1, 7, 29), (13, 1, 29), (13, 7, 1), (1, 1, 1), (17, 31, 257), (129, 65, 33)]
)
@pytest.mark.parametrize("chunk_rows", [1, 5, "auto"])
def test_odd_sizes(function, n, d, v, chunk_rows):
    row_loss, options = ROW_LOSSES[function]
    for reduction in ("mean", "none"):
        assert_fused_equals_unfused(
            function, row_loss, make_problem(n, d, v, scale=d**-0.5), chunk_rows=chunk_rows,
            reduction=reduction, **options,
        )  # fmt: skip


@with_each_loss
@pytest.mark.parametrize("batch", [(), (6,), (2, 3), (2, 1, 3)])
def test_losses_of_rows_have_the_shape_of_the_target(loss, batch):
    problem = make_problem(batch)
    assert loss(*problem, reduction="none").shape == batch
    assert loss(*problem).shape == ()
    (gradient,) = torch.autograd.grad(loss(*problem), problem[0])
    assert gradient.shape == problem[0].shape


@with_each_loss
@pytest.mark.parametrize("batch", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_an_empty_batch(loss, batch, reduction):
    problem = make_problem(batch)
    value = loss(*problem, reduction=reduction)
    assert value.shape == (batch if reduction == "none" else ())
    assert not value.any()
    for gradient, of in zip(
        gradients(value.sum(), problem), (problem[0], problem[1], problem[3]), strict=True
    ):
        torch.testing.assert_close(gradient, torch.zeros_like(of))


@with_each_loss
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_all_targets_ignored(loss, reduction, dtype):
    problem = make_problem(5, ignored=range(5), dtype=dtype)
    value = loss(*problem, reduction=reduction)
    torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=0)
    for gradient in gradients(value.sum(), problem):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=0)


def test_no_row_with_a_weight():
    problem = make_problem(5)
    value = linear_cross_entropy(*problem, row_weight=torch.zeros(5))
    assert value == 0
    for gradient in gradients(value, problem):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=0)


@with_each_function
def test_no_features_leave_the_bias(function):
    row_loss, options = ROW_LOSSES[function]
    assert_fused_equals_unfused(function, row_loss, make_problem(3, d=0), **options)


@with_each_loss
def test_one_class_costs_nothing(loss):
    problem = make_problem(5, v=1)
    value = loss(*problem)
    torch.testing.assert_close(value, torch.zeros_like(value))
    for gradient in gradients(value, problem):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient))


@with_each_function
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_tensors_that_are_not_contiguous(function, reduction):
    row_loss, options = ROW_LOSSES[function]
    hidden = torch.randn(7, 6, 5, dtype=torch.float64).requires_grad_()
    weight = torch.randn(7, 58, dtype=torch.float64).requires_grad_()
    bias = torch.randn(29, 2, dtype=torch.float64).requires_grad_()
    target = torch.randint(29, (6, 5)).t()
    views = hidden.permute(2, 1, 0), weight[:, ::2].t(), target, bias[:, 0]
    ours = function(*views, chunk_rows=4, reduction=reduction, **options)
    truth = unfused(row_loss, *views, reduction=reduction, **options)
    torch.testing.assert_close(ours, truth)
    upstream = torch.randn_like(truth)
    leaves = hidden, weight, bias
    torch.testing.assert_close(
        torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(truth, leaves, upstream)
    )


def test_statistics_of_no_rows_are_empty():
    known = linear_statistics(*make_problem((0, 2)))
    assert all(each.shape == (0, 2) for each in known[1:])


def test_a_single_column_may_have_any_strides():
    weight, hidden = torch.randn(6, 1, requires_grad=True), torch.randn(4, 1)
    target, into = torch.randint(6, (4,)), torch.zeros(1, 6).t()
    linear_cross_entropy(hidden, weight, target, weight_grad=into).backward()
    (expected,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, target), weight)
    torch.testing.assert_close(into, expected)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"z_loss": 0.1}])
def test_a_mean_of_rows_without_any_weight_is_zero(options):
    weights = torch.tensor([0.0, 1.0, 1.0, 1.0])
    weight = torch.randn(4, 3, requires_grad=True)
    target = torch.zeros(5, dtype=torch.int64)
    loss = linear_cross_entropy(torch.randn(5, 3), weight, target, class_weight=weights, **options)
    assert loss == 0
    assert (torch.autograd.grad(loss, weight)[0] == 0).all()
