"""Every bug that was found in another implementation of these maps, as a test of ours."""

import math

import pytest
import torch
from torch.nn import functional

from lastlayer import (
    Entmax,
    EntmaxLoss,
    Sparsemax,
    SparsemaxLoss,
    entmax,
    entmax_loss,
    sparsemax,
    sparsemax_loss,
)

FP32 = torch.float32
MAPS = {
    "sparsemax": sparsemax,
    "entmax 1.5": entmax,
    "entmax 1.25": lambda s, **o: entmax(s, 1.25, **o),
    "entmax 3": lambda s, **o: entmax(s, 3.0, **o),
}
LOSSES = {
    "sparsemax": sparsemax_loss,
    "entmax 1.5": entmax_loss,
    "entmax 1.25": lambda s, y, **o: entmax_loss(s, y, 1.25, **o),
}
with_each_map = pytest.mark.parametrize("function", MAPS.values(), ids=MAPS)
with_each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
tracing_warns = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def off_by(probs: torch.Tensor) -> float:
    """How far the worst row is from a sum of 1."""
    return (probs.double().sum(-1) - 1).abs().max().item()


@with_each_map
def test_minus_inf_rows_do_not_raise(function):
    """entmax 1.3 raises an IndexError (a device-side assert on CUDA), its bisection gives NaN."""
    scores = torch.randn(3, 6)
    scores[1] = -math.inf
    probs = function(scores)
    assert (probs[1] == 0).all()
    assert off_by(probs[[0, 2]]) < 1e-6


@with_each_map
def test_plus_inf_does_not_raise(function):
    """entmax 1.3 raises an IndexError on one +inf."""
    scores = torch.randn(2, 6)
    scores[0, 2] = math.inf
    probs = function(scores)
    assert probs[0].isnan().all()
    assert off_by(probs[1]) < 1e-6


@with_each_map
def test_empty_class_dimension(function):
    """entmax 1.3 raises an IndexError where torch.softmax returns an empty tensor."""
    assert function(torch.zeros(3, 0)).shape == (3, 0)


@with_each_map
@pytest.mark.parametrize("scale", [1e8, 1e20, 3e37])
def test_huge_scores(function, scale):
    """entmax's bisection and tensorflow/addons have NaN rows: the maximum is not subtracted."""
    assert off_by(function(scale * torch.randn(4, 50))) < 1e-6
    extremes = torch.tensor([3e38, -3e38, 1.0, 2.0])
    assert function(extremes).tolist() == [1.0, 0.0, 0.0, 0.0]


@with_each_map
def test_offset_of_a_million(function):
    """Liger's sparsemax is off by 0.19 (1e22 at 1e20): it sums before subtracting the maximum."""
    scores = torch.randint(-32, 32, (4, 100)) / 16
    assert torch.equal(function(scores + 1e6), function(scores))
    assert off_by(function(torch.randn(4, 100) + 1e20)) < 1e-6


@with_each_map
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_far_below_zero(function, dtype):
    """deep-spin/entmax issue 30: NaN for [0, -5, …] - 1000 in bfloat16."""
    scores = (torch.tensor([0.0, -5.0, -5.0, -5.0]) - 1000).to(dtype)
    probs = function(scores)
    assert probs.isfinite().all()
    assert off_by(probs) <= 4e-3
    assert probs.argmax() == 0


@with_each_map
def test_bf16_rows_of_32000_sum_to_one(function):
    """entmax 1.3 sums to 0.92 to 1.05: it adds up in bfloat16."""
    scores = (0.01 * torch.randn(3, 32000)).bfloat16()
    assert off_by(function(scores)) <= 4e-3


@with_each_map
@pytest.mark.parametrize(("n", "scale"), [(1024, 0.1), (1024, 0.01), (16384, 0.05)])
def test_flat_rows_sum_to_one(function, n, scale):
    """AdaSplash's default of two iterations leaves sums from 0.41 to 7.88."""
    assert off_by(function(scale * torch.randn(4, n))) < 1e-6
    assert off_by(function(scale * torch.randn(4, n) + 1e4)) < 1e-6


@with_each_map
def test_rows_below_minus_a_thousand(function):
    """AdaSplash 2 starts its running maximum at -1000."""
    scores = torch.randint(-16, 16, (3, 40)) / 8
    assert torch.equal(function(scores - 4096), function(scores))


@with_each_map
def test_rows_wider_than_65536(function):
    """Liger's sparsemax refuses more than 65,536 columns."""
    assert off_by(function(torch.randn(2, 70_001))) < 1e-6


def test_float32_accuracy_on_wide_rows():
    """entmax's sort is off by 2e-6 to 3e-6 in L1 at 32 thousand columns, its bisection by 1e-7."""
    scores = torch.randn(3, 32768)
    for function in (sparsemax, entmax):
        exact = function(scores.double(), impl="reference")
        assert (function(scores).double() - exact).abs().sum(-1).max() < 1.5e-6


def test_alpha_one_is_softmax():
    """entmax_bisect(alpha=1) is 0.77 away from softmax in L1, without an error."""
    scores = torch.randn(4, 30)
    for alpha in (1, 1.0, torch.tensor(1.0)):
        assert (entmax(scores, alpha) - torch.softmax(scores, -1)).abs().sum(-1).max() < 1e-5


def test_alpha_below_one_is_an_error():
    """deep-spin/entmax issue 39: a learned alpha drifts below 1 and the result is wrong."""
    for alpha in (0.9, torch.tensor(0.9)):
        with pytest.raises(ValueError, match="alpha: expected at least 1"):
            entmax(torch.randn(4), alpha)
    module = Entmax(1.01, learn_alpha=True)
    module.log_excess.grad = torch.tensor(1e3)
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert module.alpha >= 1
    assert off_by(module(torch.randn(3, 8))) < 1e-6


@with_each_map
@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_every_dim(function, dim):
    """entmax with k= raises for dim=-2: `X.dim() - dim` has the wrong sign."""
    scores = torch.randn(3, 4, 5)
    expected = function(scores.movedim(dim, -1)).movedim(-1, dim)
    assert torch.equal(function(scores, dim=dim), expected)
    assert torch.equal(function(scores[0, 0]), function(scores)[0, 0])


def test_three_scores_by_hand():
    """tensorflow issue 127246: keras gives 0.5 to the first of these, it is 0.5875."""
    probs = sparsemax(torch.tensor([0.175, 0.0, -2.0], dtype=torch.float64))
    assert torch.allclose(probs, torch.tensor([0.5875, 0.4125, 0.0], dtype=torch.float64))


@with_each_map
def test_double_backward_on_sparse_rows(function):
    """entmax15 and entmax_bisect fail gradgradcheck where a zero is in the row (d sqrt at 0)."""
    scores = torch.tensor([[2.0, 1.7, -5.0, 1.2]], dtype=torch.float64, requires_grad=True)
    assert (function(scores) == 0).any()
    assert torch.autograd.gradgradcheck(function, (scores,))


def test_a_one_hot_result_has_a_zero_jacobian():
    """At the edge of the support the Jacobian on the support is taken, as all projects do."""
    scores = torch.tensor([2.0, 0.0, 0.0], dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(entmax, scores)
    assert (jacobian == 0).all()


@tracing_warns
@with_each_map
def test_compile_fullgraph_with_grad(function):
    """entmax 1.3 raises Unsupported: its autograd.Function is written with classmethods."""
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    scores = torch.randn(3, 8, requires_grad=True)
    (ours,) = torch.autograd.grad(compiled(scores).square().sum(), scores)
    (eager,) = torch.autograd.grad(function(scores).square().sum(), scores)
    assert torch.equal(ours, eager)


@with_each_map
def test_vmap(function):
    """entmax 1.3 raises: its autograd.Function has no setup_context."""
    scores = torch.randn(3, 4, 6)
    assert torch.equal(torch.func.vmap(function)(scores), function(scores))


@with_each_loss
def test_default_ignore_index_works(loss):
    """entmax 1.3: `index -100 is out of bounds`, for the default itself."""
    scores = torch.randn(3, 5)
    ours = loss(scores, torch.tensor([1, -100, 4]))
    assert ours == loss(scores[[0, 2]], torch.tensor([1, 4]))
    assert loss(scores, torch.full((3,), -100)) == 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reduction_takes_the_words_of_torch(reduction):
    """entmax 1.3 has an empty AssertionError for "mean": it knows "elementwise_mean" only."""
    scores, target = torch.randn(3, 5), torch.tensor([0, 1, 2])
    for module in (SparsemaxLoss(reduction=reduction), EntmaxLoss(reduction=reduction)):
        loss = module(scores, target)
        assert loss.shape == ((3,) if reduction == "none" else ())
        assert (loss >= 0).all()


@with_each_loss
def test_minus_inf_scores_have_a_finite_loss(loss):
    """entmax 1.3 gives NaN (0 · -inf in an einsum) where cross_entropy is finite."""
    scores = torch.tensor([[0.5, -math.inf, 0.1]])
    masked = loss(scores, torch.tensor([0]))
    assert masked.isfinite()
    assert abs(masked - loss(scores[:, [0, 2]], torch.tensor([0]))) < 1e-7
    assert loss(scores, torch.tensor([1])) == math.inf


@with_each_loss
@pytest.mark.parametrize("offset", [1e4, 1e6, -1e6])
def test_a_loss_at_an_offset(loss, offset):
    """entmax 1.3 loses 1e-3 to 4e-3 at an offset of 1e4."""
    scores, target = torch.randint(-32, 32, (6, 20)) / 16, torch.randint(20, (6,))
    near, far = (loss(s, target, reduction="none") for s in (scores, scores + offset))
    assert (near - far).abs().max() < 1e-6


def test_hessian_of_sparsemax_loss_is_not_zero():
    """In entmax 1.3 it is exactly zero, silently; on a full support it is I - 11ᵀ/n."""
    scores = torch.tensor([0.1, 0.0, -0.1], dtype=torch.float64)
    target = torch.tensor(1)
    hessian = torch.autograd.functional.hessian(lambda s: sparsemax_loss(s, target), scores)
    assert (hessian - (torch.eye(3, dtype=torch.float64) - 1 / 3)).abs().max() < 1e-12


@with_each_loss
def test_hessians_of_losses(loss):
    """Every loss of entmax 1.3 has a zero Hessian."""
    scores = torch.tensor([[0.4, 0.0, -0.1, -4.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda s: loss(s, torch.tensor([1])), (scores,))


def test_alpha_has_a_gradient_in_the_loss():
    """entmax_bisect_loss returns none, silently."""
    scores = torch.tensor([[0.4, 0.0, -0.1]], dtype=torch.float64)
    alpha = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: entmax_loss(scores, torch.tensor([1]), a), (alpha,))
    (gradient,) = torch.autograd.grad(entmax_loss(scores, torch.tensor([1]), alpha), alpha)
    assert gradient != 0


@with_each_loss
def test_soft_targets_and_batches_of_any_rank(loss):
    """entmax 1.3 takes class ids and two dimensions only."""
    scores = torch.randn(2, 3, 5)
    target = torch.softmax(torch.randn(2, 3, 5), -1)
    soft = loss(scores, target, reduction="none")
    assert soft.shape == (2, 3)
    assert (soft >= -1e-6).all()
    ids = torch.randint(5, (2, 3))
    one_hot = functional.one_hot(ids, 5).float()
    assert torch.allclose(loss(scores, ids), loss(scores, one_hot), atol=1e-6)


def test_modules_show_their_options():
    """repr(entmax.Sparsemax(dim=-1)) is `Sparsemax()`."""
    assert repr(Sparsemax(dim=-1)) == "Sparsemax(dim=-1)"
    assert "alpha=1.5" in repr(Entmax())
    assert "alpha=1.5" in repr(EntmaxLoss())


@tracing_warns
@with_each_loss
def test_losses_compile_with_ignored_rows(loss):
    """nn.AdaptiveLogSoftmaxWithLoss cannot: its branches depend on the data."""
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    scores = torch.randn(2, 3, 5, requires_grad=True)
    target = torch.tensor([[0, -100, 2], [-100, 4, 1]])
    (ours,) = torch.autograd.grad(compiled(scores, target), scores)
    (eager,) = torch.autograd.grad(loss(scores, target), scores)
    assert (ours - eager).abs().max() < 1e-7
