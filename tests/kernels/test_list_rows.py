"""The loss of listed classes and its gradient, against the definition in float64."""

import math

import pytest
import torch
from implementations import error, every_implementation, place
from test_entmax_rows import probabilities
from torch import Tensor

from lastlayer import kernels

ALPHAS = (1.0, 1.001, 1.2, 1.5, 2.0, 3.0)
with_each_alpha = pytest.mark.parametrize("alpha", ALPHAS)
V = 50


def problem(n, k, scale, device, *, padded=True):
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


def check(impl, inputs, alpha):
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
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_alphas_and_shapes(impl, alpha, scale):
    for n, k in [(1, 1), (5, 1), (3, 2), (40, 7), (33, 17), (9, 50)]:
        check(impl, problem(n, k, scale, place(impl)), alpha)


@every_implementation
@pytest.mark.parametrize("k", [129, 200, 512])
def test_long_lists(impl, k, monkeypatch):
    monkeypatch.setitem(globals(), "V", 600)
    for alpha in (1.0, 1.5, 1.7):
        check(impl, problem(4, k, 1.0, place(impl)), alpha)


@every_implementation
@with_each_alpha
def test_without_class_weights(impl, alpha):
    inputs = problem(12, 9, 1.0, place(impl))
    ones = torch.ones_like(inputs[5])
    weighted = kernels.entmax_rows.listed(impl, *inputs[:5], ones, alpha)
    plain = kernels.entmax_rows.listed(impl, *inputs[:5], None, alpha)
    assert all(map(torch.equal, weighted, plain))


@every_implementation
@with_each_alpha
def test_offsets_do_not_count(impl, alpha):
    inputs = problem(12, 9, 1.0, place(impl))
    inputs[0], inputs[3] = (inputs[0] * 8).round() / 8, (inputs[3] * 8).round() / 8
    moved = [inputs[0] + 2.0**16, *inputs[1:3], inputs[3] + 2.0**16, *inputs[4:]]
    near, far = (kernels.entmax_rows.listed(impl, *each, alpha) for each in (inputs, moved))
    assert error(far[0], near[0]) <= 1e-5
    torch.testing.assert_close(far[1], near[1], rtol=1e-6, atol=0)


@every_implementation
@with_each_alpha
def test_rows_without_a_result(impl, alpha):
    inputs = problem(6, 8, 1.0, place(impl), padded=False)
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
    inputs = problem(3, 5, 1.0, place(impl), padded=False)
    scores, classes, target, at_target = inputs[:4]
    target.copy_(classes[:, 2])
    scores[:, 2] = at_target.fill_(200.0)
    loss, values, entries = kernels.entmax_rows.listed(impl, *inputs, alpha)
    assert loss.abs().max() <= 1e-6
    assert dense(values, entries).abs().max() <= 1e-6


@every_implementation
def test_no_rows(impl):
    made = kernels.entmax_rows.listed(impl, *problem(0, 5, 1.0, place(impl)), 1.5)
    assert [tuple(each.shape) for each in made] == [(0,), (0, 6), (0, 6)]


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_float64(impl):
    place(impl)
    inputs = [
        each.double() if each.is_floating_point() else each for each in problem(9, 7, 1.0, "cpu")
    ]
    for alpha in (1.0, 1.3, 1.5, 2.0):
        loss, gradient = truth(*inputs, alpha)
        made, values, classes = kernels.entmax_rows.listed(impl, *inputs, alpha)
        assert error(made, loss) <= 1e-12
        assert error(dense(values, classes), gradient) <= 1e-12


@pytest.mark.parametrize("scaled", [True, False])
def test_what_is_traced_has_the_shapes_of_what_is_made(scaled):
    inputs = problem(4, 6, 1.0, "cpu")
    if not scaled:
        inputs[4] = None
    operation = torch.ops.lastlayer.list_rows.default
    torch.library.opcheck(operation, (*inputs, 1.5), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@with_each_alpha
def test_many_rows_on_a_gpu(alpha):
    for n, k in [(2048, 30), (1000, 50)]:
        check("triton", problem(n, k, 2.0, "cuda"), alpha)
