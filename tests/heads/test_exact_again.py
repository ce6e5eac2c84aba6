"""Exact heads at their edges: sums over many chunks, memory to add to, compiled searches."""

import pytest
import torch

from lastlayer import heads
from lastlayer.fused import linear_cross_entropy

HEADS = {
    "full": lambda **how: heads.FullSoftmax(16, 90, **how),
    "entmax": lambda **how: heads.EntmaxHead(16, 90, alpha=1.3, **how),
    "topk": lambda **how: heads.TopKSoftmaxHead(16, 90, 20, **how),
}


MANY = {
    "full": lambda **how: heads.FullSoftmax(32, 200, **how),
    "adaptive": lambda **how: heads.AdaptiveSoftmax(32, cutoffs=[20, 80], n_classes=200, **how),
    "differentiated": lambda **how: heads.DifferentiatedSoftmax(32, [(50, 24), (150, 8)], **how),
}


@pytest.mark.parametrize("make", MANY.values(), ids=MANY)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("chunk_rows", [4, 64, 1024])
def test_gradients_of_chosen_log_probs_do_not_depend_on_the_number_of_chunks(
    make, chunk_rows, autocast
):
    dtype = torch.float32 if autocast else torch.bfloat16
    head = make(chunk_rows=chunk_rows, dtype=dtype)
    exact = make(dtype=torch.float64)
    exact.load_state_dict(head.state_dict())
    hidden, target = torch.randn(1024, 32).bfloat16(), torch.randint(200, (1024, 1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = -head.log_prob(hidden.to(dtype), target).mean()
    right = -exact.log_prob(hidden.double(), target).mean()
    made = torch.autograd.grad(loss, list(head.parameters()))
    expected = torch.autograd.grad(right, list(exact.parameters()))
    for got, true in zip(made, expected, strict=True):
        assert got.dtype == dtype
        assert (got.double() - true).norm() <= 8e-3 * true.norm()


@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
@pytest.mark.filterwarnings("ignore")
def test_searches_in_compiled_code(make):
    head = make()
    hidden = torch.randn(7, 16)
    with torch.no_grad():
        head.weight[40:60] = head.weight[40]  # ties
        head.bias[40:60] = 3.0
    torch.compiler.reset()
    search = torch.compile(lambda x: head.topk(x, 5), backend="aot_eager", fullgraph=True)
    for got, right in zip(search(hidden), head.topk(hidden, 5), strict=True):
        torch.testing.assert_close(got, right)
    logs = torch.compile(head.log_prob, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logs(hidden), head.log_prob(hidden))


@pytest.mark.parametrize(
    "make",
    [
        lambda w: torch.zeros(1, 3).expand(6, 3),
        lambda w: torch.zeros(20).as_strided((6, 3), (1, 1)),
        lambda w: torch.zeros(3, 6).t(),
        lambda w: w,
        lambda w: w.detach(),
    ],
    ids=["expanded", "overlapping", "transposed", "the weight", "a view of it"],
)
def test_memory_that_no_gradient_can_be_added_to(make):
    weight = torch.randn(6, 3, requires_grad=True)
    kept = weight.detach().clone()
    with pytest.raises(ValueError, match="weight_grad: expected"):
        linear_cross_entropy(
            torch.randn(4, 3), weight, torch.randint(6, (4,)), weight_grad=make(weight)
        )
    assert torch.equal(weight, kept)


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
