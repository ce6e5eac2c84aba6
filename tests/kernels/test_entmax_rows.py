"""The loss of entmax from probabilities and from lists, against its definition in float64."""

import math

import numpy as np
import pytest
import torch
from implementations import (
    DTYPES,
    ROUNDING,
    SMALLEST,
    error,
    every_implementation,
    few,
    place,
    three_threads,
)
from torch import Tensor

from lastlayer import kernels

ALPHAS = (1.0, 1.2, 1.5, 2.0, 3.0)


def probabilities(scores: Tensor, alpha: float) -> Tensor:
    """By bisection of the threshold."""
    if alpha == 1.0:
        return torch.softmax(scores, -1)
    excess = alpha - 1.0
    low = (excess * scores).amax(-1, keepdim=True) - 1.0
    high = low + 1.0
    for _ in range(80):
        middle = (low + high) / 2
        total = (excess * scores - middle).clamp(min=0).pow(1 / excess).sum(-1, keepdim=True)
        low, high = torch.where(total >= 1, middle, low), torch.where(total >= 1, high, middle)
    probs = (excess * scores - low).clamp(min=0).pow(1 / excess)
    return probs / probs.sum(-1, keepdim=True)


def loss_of(probs: Tensor, scores: Tensor, target: Tensor, alpha: float) -> Tensor:
    """``<p - y, scores> + H(p)``, with what has no probability left out."""
    present = probs > 0
    logs = torch.log(torch.where(present, probs, 1.0))
    if alpha == 1.0:
        entropy = -(probs * logs).sum(-1)
    else:
        entropy = (probs - probs.pow(alpha)).sum(-1) / (alpha * (alpha - 1.0))
    expected_score = torch.where(present, probs * scores, 0.0).sum(-1)
    return expected_score - scores.gather(-1, target[:, None]).squeeze(-1) + entropy


def problem(n_rows, n, scale, alpha, dtype, device):
    scores = (scale * torch.randn(n_rows, n)).to(dtype)
    target = torch.randint(n, (n_rows,))
    probs = probabilities(scores.double(), alpha)
    loss = loss_of(probs, scores.double(), target, alpha)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    row_scale = torch.rand(n_rows, dtype=wide) + 0.1
    parts = (probs.to(dtype), scores, target, row_scale)
    return [each.to(device) for each in parts], loss


def check(impl, inputs, expected, alpha):
    probs, scores, target, row_scale = inputs
    dtype = probs.dtype
    kept = probs.clone()
    loss = kernels.entmax_rows.forward_(impl, kept, scores, target, None, alpha)
    assert torch.equal(kept, probs), "no gradient was asked for"
    size = 1 + scores[scores.isfinite()].double().abs().max() if scores.numel() else 1
    within = {torch.float64: 1e-12, torch.float32: 3e-6}.get(dtype, 4 * ROUNDING[dtype] ** 1.5)
    assert loss.dtype == row_scale.dtype
    assert error(loss, expected, float(size)) <= within
    again = kernels.entmax_rows.forward_(impl, kept, scores, target, row_scale, alpha)
    assert torch.equal(again, loss)
    one = torch.nn.functional.one_hot(target, probs.shape[1]).double()
    gradient = ((probs.double() - one) * row_scale.double()[:, None]).cpu()
    slack = ROUNDING[dtype] * gradient.abs() + SMALLEST[dtype] + 1e-300
    assert error(kept, gradient, slack) <= 1


@every_implementation
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_alphas_and_shapes(impl, alpha, scale):
    device = place(impl)
    for shape in [(1, 1), (1, 7), (5, 1), (4, 64), (3, 130), (2, 1025)]:
        check(impl, *problem(*shape, scale, alpha, torch.float32, device), alpha)


@every_implementation
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(impl, alpha, dtype):
    for scale in (0.1, 2.0):
        check(impl, *problem(4, 200, scale, alpha, dtype, place(impl, dtype)), alpha)


@every_implementation
@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_large_scores(impl, alpha):
    device = place(impl)
    for scale in (1e4, 3.0):
        inputs, _ = problem(4, 100, scale, alpha, torch.float32, device)
        scores = inputs[1] + 1e4
        probs = probabilities(scores.cpu().double(), alpha)
        expected = loss_of(probs, scores.cpu().double(), inputs[2].cpu(), alpha)
        check(impl, [probs.float().to(device), scores, *inputs[2:]], expected, alpha)


@every_implementation
@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0])
def test_masked_classes(impl, alpha):
    (_, scores, target, row_scale), _ = problem(4, 90, 2.0, alpha, torch.float32, "cpu")
    masked = torch.rand(4, 90) < 0.6
    masked.scatter_(-1, target[:, None], False)
    scores[masked] = -math.inf
    probs = probabilities(scores.double(), alpha)
    expected = loss_of(probs, scores.double(), target, alpha)
    device = place(impl)
    inputs = [each.to(device) for each in (probs.float(), scores, target, row_scale)]
    check(impl, inputs, expected, alpha)


@every_implementation
@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_a_masked_target_costs_infinity(impl, alpha):
    """So does a row that has nothing but masked classes."""
    device = place(impl)
    (_, scores, target, row_scale), _ = problem(9, 40, 2.0, alpha, torch.float32, device)
    scores.scatter_(-1, target[:, None], -math.inf)
    probs = probabilities(scores.double(), alpha).float()
    probs[0], scores[0] = 0.0, -math.inf
    loss = kernels.entmax_rows.forward_(impl, probs, scores, target, row_scale, alpha)
    assert (loss == math.inf).all()


@every_implementation
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_nan_stays_in_its_row(impl, alpha):
    (probs, scores, target, row_scale), _ = problem(4, 70, 2.0, alpha, torch.float32, place(impl))
    probs[2] = math.nan
    scores[2, 5] = math.nan
    loss = kernels.entmax_rows.forward_(impl, probs, scores, target, row_scale, alpha)
    assert loss.isnan().tolist() == [False, False, True, False]
    assert probs.isnan().any(-1).tolist() == [False, False, True, False]
    assert probs[2].isnan().all()


@every_implementation
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_rows_of_scale_0_have_no_gradient(impl, alpha):
    """Even where they are NaN: such a row is ignored, and nothing of it may leave it."""
    (probs, scores, target, row_scale), _ = problem(4, 70, 2.0, alpha, torch.float32, place(impl))
    probs[2] = scores[2] = math.nan
    row_scale[1:3] = 0.0
    kernels.entmax_rows.forward_(impl, probs, scores, target, row_scale, alpha)
    assert (probs == 0).all(-1).tolist() == [False, True, True, False]
    assert probs.isfinite().all()


@every_implementation
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_what_rounding_took_is_paid_for(impl, alpha):
    """Probabilities that sum to less than 1 give the loss of those that sum to 1."""
    device = place(impl)
    inputs, expected = problem(6, 300, 0.5, alpha, torch.float32, device)
    inputs[0] = inputs[0] * 0.999
    loss = kernels.entmax_rows.forward_(impl, inputs[0], *inputs[1:3], None, alpha)
    assert error(loss, expected) <= 1e-5


@every_implementation
def test_rows_of_a_wider_matrix(impl):
    inputs, expected = problem(4, 60, 1.0, 1.5, torch.float32, place(impl))
    wider = [torch.nn.functional.pad(each, (0, 40), value=7.0) for each in inputs[:2]]
    views = [each[:, :60] for each in wider]
    loss = kernels.entmax_rows.forward_(impl, *views, *inputs[2:], 1.5)
    assert error(loss, expected) <= 1e-5
    kernels.entmax_rows.forward_(impl, *inputs, 1.5)
    assert torch.equal(views[0], inputs[0])
    assert all((each[:, 60:] == 7.0).all() for each in wider)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(impl, dtype):
    inputs, _ = problem(0, 5, 1.0, 1.5, dtype, place(impl, dtype))
    assert kernels.entmax_rows.forward_(impl, *inputs, 1.5).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_threads_share_the_rows(dtype, monkeypatch):
    place("cpu")
    from lastlayer.kernels.entmax_rows import cpu

    inputs, _ = problem(50, 2000, 2.0, 1.5, dtype, "cpu")

    def both():
        probs = inputs[0].clone()
        return kernels.entmax_rows.forward_("cpu", probs, *inputs[1:], 1.5), probs

    alone = both()
    monkeypatch.setattr(cpu, "WIDENED", 20 * 2000)
    with three_threads():
        together = both()
    assert all(map(torch.equal, alone, together))


def test_the_definition_is_that_of_the_map():
    """The test's own bisection against the one of the tests of the maps."""
    scores = torch.randn(3, 20, dtype=torch.float64)
    for alpha in ALPHAS[1:]:
        probs = probabilities(scores, alpha)
        inside = np.maximum((alpha - 1) * scores.numpy(), -np.inf) - probs.numpy() ** (alpha - 1)
        support = probs.numpy() > 1e-9
        spread = [np.ptp(row[kept]) for row, kept in zip(inside, support, strict=True)]
        assert max(spread) < 1e-9
        assert (probs.sum(-1) - 1).abs().max() < 1e-12


LISTED_ALPHAS = (1.0, 1.001, 1.2, 1.5, 2.0, 3.0)
with_each_alpha = pytest.mark.parametrize("alpha", few(LISTED_ALPHAS, 1.0, 1.2, 2.0))
V = 50


def problem_listed(n, k, scale, device, *, padded=True):
    """Scores, classes (-1 for none, never all of a row), targets and their scores, and scales."""
    classes = torch.rand(n, V).argsort(-1)[:, :k]
    if padded:
        classes[:, 1:][torch.rand(n, k - 1) < 0.4] = -1
    scores, target = scale * torch.randn(n, k), torch.randint(V, (n,))
    among = classes == target[:, None]
    at_target = torch.where(among, scores, 0.0).sum(-1)
    at_target = torch.where(among.any(-1), at_target, -3.0 * scale - torch.rand(n))
    parts = scores, classes, target, at_target, torch.rand(n) + 0.1, torch.rand(V) + 0.1
    return [each.to(device) for each in parts]


def truth(scores, classes, target, at_target, row_scale, class_weight, alpha):
    """Losses and dense gradients ``(n, V)`` in float64."""
    theta = scores.cpu().double().masked_fill(classes.cpu() < 0, -math.inf)
    probs = probabilities(theta, alpha)
    present, weight = probs > 0, class_weight.cpu().double()[target.cpu()]
    logs = torch.log(torch.where(present, probs, 1.0))
    entropy = -(probs * logs)
    if alpha != 1.0:
        entropy = -(probs * torch.expm1((alpha - 1.0) * logs)) / (alpha * (alpha - 1.0))
    lead = torch.where(present, theta - at_target.cpu().double()[:, None], 0.0)
    loss = (probs * lead + entropy).sum(-1) * weight
    scale = (row_scale.cpu().double() * weight)[:, None]
    return loss, dense(probs * scale, classes.cpu().clamp(min=0)) - dense(
        scale, target.cpu()[:, None]
    )


def dense(values: Tensor, classes: Tensor) -> Tensor:
    zeros = torch.zeros(values.shape[0], V, dtype=torch.float64)
    return zeros.scatter_add(-1, classes.cpu(), values.cpu().double())


def check_listed(impl, inputs, alpha):
    loss, gradient = truth(*inputs, alpha)
    made, values, classes = kernels.entmax_rows.listed(impl, *inputs, alpha)
    size = 1 + float(inputs[0].abs().max()) if inputs[0].numel() else 1.0
    assert error(made, loss, size) <= 3e-6
    assert error(dense(values, classes), gradient) <= 1e-5
    assert (values[:, :-1][inputs[1] < 0] == 0).all(), "padding"
    assert torch.equal(classes[:, -1], inputs[2])
    alone = kernels.entmax_rows.listed(impl, *inputs[:4], None, inputs[5], alpha)
    assert torch.equal(alone[0], made)
    assert [each.numel() for each in alone[1:]] == [0, 0]


@every_implementation
@with_each_alpha
@pytest.mark.parametrize("scale", few([0.01, 1.0, 30.0], 0.01, 30.0))
def test_alphas_and_shapes_listed(impl, alpha, scale):
    for n, k in few([(1, 1), (5, 1), (3, 2), (40, 7), (33, 17), (9, 50)], (1, 1), (9, 7), (5, 17)):
        check_listed(impl, problem_listed(n, k, scale, place(impl)), alpha)


@every_implementation
@pytest.mark.parametrize("k", few([129, 200, 512], 200))
def test_long_lists(impl, k, monkeypatch):
    monkeypatch.setitem(globals(), "V", 600)
    for alpha in (1.0, 1.5, 1.7):
        check_listed(impl, problem_listed(4, k, 1.0, place(impl)), alpha)


@every_implementation
@with_each_alpha
def test_without_class_weights(impl, alpha):
    inputs = problem_listed(12, 9, 1.0, place(impl))
    ones = torch.ones_like(inputs[5])
    weighted = kernels.entmax_rows.listed(impl, *inputs[:5], ones, alpha)
    plain = kernels.entmax_rows.listed(impl, *inputs[:5], None, alpha)
    assert all(map(torch.equal, weighted, plain))


@every_implementation
@with_each_alpha
def test_offsets_do_not_count(impl, alpha):
    inputs = problem_listed(12, 9, 1.0, place(impl))
    inputs[0], inputs[3] = (inputs[0] * 8).round() / 8, (inputs[3] * 8).round() / 8
    moved = [inputs[0] + 2.0**16, *inputs[1:3], inputs[3] + 2.0**16, *inputs[4:]]
    near, far = (kernels.entmax_rows.listed(impl, *each, alpha) for each in (inputs, moved))
    assert error(far[0], near[0]) <= 1e-5
    torch.testing.assert_close(far[1], near[1], rtol=1e-6, atol=0)


@every_implementation
@with_each_alpha
def test_rows_without_a_result(impl, alpha):
    inputs = problem_listed(6, 8, 1.0, place(impl), padded=False)
    scores, classes, target, at_target = inputs[:4]
    scores[0], at_target[0] = -math.inf, -math.inf
    classes[1], at_target[1] = -1, -math.inf
    at_target[2] = -math.inf
    scores[3, 4] = math.nan
    scores[4, 4] = math.inf
    at_target[5] = math.nan
    loss, values, _ = kernels.entmax_rows.listed(impl, *inputs, alpha)
    assert (loss[:3] == math.inf).all()
    assert loss[3:].isnan().all()
    assert (values[:2] == 0).all(), "nothing to move"
    assert values[2].isfinite().all()
    assert (values[2, -1] == -inputs[4][2] * inputs[5][target[2]]).all()
    assert values[3:5, :-1].isnan().all()


@every_implementation
@with_each_alpha
def test_a_target_that_is_sure_costs_nothing(impl, alpha):
    inputs = problem_listed(3, 5, 1.0, place(impl), padded=False)
    scores, classes, target, at_target = inputs[:4]
    target.copy_(classes[:, 2])
    scores[:, 2] = at_target.fill_(200.0)
    loss, values, entries = kernels.entmax_rows.listed(impl, *inputs, alpha)
    assert loss.abs().max() <= 1e-6
    assert dense(values, entries).abs().max() <= 1e-6


@every_implementation
def test_no_rows_listed(impl):
    made = kernels.entmax_rows.listed(impl, *problem_listed(0, 5, 1.0, place(impl)), 1.5)
    assert [tuple(each.shape) for each in made] == [(0,), (0, 6), (0, 6)]


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_float64(impl):
    place(impl)
    inputs = [
        each.double() if each.is_floating_point() else each
        for each in problem_listed(9, 7, 1.0, "cpu")
    ]
    for alpha in (1.0, 1.3, 1.5, 2.0):
        loss, gradient = truth(*inputs, alpha)
        made, values, classes = kernels.entmax_rows.listed(impl, *inputs, alpha)
        assert error(made, loss) <= 1e-12
        assert error(dense(values, classes), gradient) <= 1e-12


@pytest.mark.parametrize("scaled", [True, False])
def test_what_is_traced_has_the_shapes_of_what_is_made(scaled):
    inputs = problem_listed(4, 6, 1.0, "cpu")
    if not scaled:
        inputs[4] = None
    operation = torch.ops.lastlayer.list_rows.default
    torch.library.opcheck(operation, (*inputs, 1.5), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@with_each_alpha
def test_many_rows_on_a_gpu(alpha):
    for n, k in [(2048, 30), (1000, 50)]:
        check_listed("triton", problem_listed(n, k, 2.0, "cuda"), alpha)
