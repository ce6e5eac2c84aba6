"""Best classes, draws and log-probabilities of rows of scores, against float64."""

import math

import pytest
import torch
from implementations import error, every_implementation, few, place, three_threads

from lastlayer import kernels
from lastlayer.fused import prediction as fused
from lastlayer.kernels import prediction

# Rows and classes: one block, blocks that are full or not, more blocks than best classes.
SHAPES = [(3, 1), (5, 7), (4, 64), (7, 65), (3, 1003)]
# A bias, the soft cap and the temperature.
FORMS = [(False, 0.0, 1.0), (True, 0.0, 0.7), (True, 3.0, 1.3)]

# Log-probabilities are plain torch on the CPU.
in_torch_on_cpu = pytest.mark.parametrize("impl", ["reference", "triton"])


def problem(n, n_classes, biased, device, dtype=torch.float32):
    scores = 2 * torch.randn(n, n_classes, dtype=dtype)
    # Ties; a row with a NaN, a masked one, and one with infinities of both signs.
    scores[0] = scores[0].round()
    scores[1, n_classes // 2] = math.nan
    scores[2] = -math.inf
    if n > 3:
        scores[3, ::2], scores[3, -1] = -math.inf, math.inf
    bias = torch.randn(n_classes, dtype=dtype).to(device) if biased else None
    return scores.to(device), bias


def truth(scores, bias, softcap, temperature):
    """Log-probabilities in float64."""
    scores = scores.cpu().double() + (0.0 if bias is None else bias.cpu().double())
    if softcap:
        capped = softcap * torch.tanh(scores / softcap)
        scores = torch.where(scores == -math.inf, scores, capped)
    logs = torch.log_softmax(scores / temperature, -1)
    return scores / temperature, torch.where((scores == -math.inf).all(-1, True), -math.inf, logs)


@every_implementation
@pytest.mark.parametrize("form", few(FORMS, FORMS[0], FORMS[2]))
@pytest.mark.parametrize(("n", "n_classes"), SHAPES)
def test_the_best_are_those_of_a_sort(impl, n, n_classes, form):
    device = place(impl)
    scores, bias = problem(n, n_classes, form[0], device)
    plain, logs = truth(scores, bias, *form[1:])
    for k in {1, min(10, n_classes), min(100, n_classes)}:
        for normalised, right in ((True, logs), (False, plain)):
            found = prediction.best(impl, scores, bias, *form[1:], k, normalised)
            values, classes, total = found
            expected = prediction.best("reference", scores, bias, *form[1:], k, normalised)
            assert torch.equal(classes.cpu(), expected[1].cpu())
            assert error(values, right.gather(-1, classes.cpu()), 1e-5) < 1
            assert (classes.sort(-1).values.diff(dim=-1) > 0).all()
            if normalised:
                sums = plain.logsumexp(-1)
                broken = right.isnan().any(-1)
                assert error(total, torch.where(broken, math.nan, sums), 1e-5) < 1
    nothing = prediction.best(impl, scores, bias, *form[1:], 0, True)
    assert nothing[0].shape == nothing[1].shape == (n, 0)
    assert error(nothing[2], torch.where(broken, math.nan, sums), 1e-5) < 1


@pytest.mark.thin(3)
@pytest.mark.parametrize(("n", "n_classes"), [(5, 7), (7, 65), (3, 1003)])
def test_the_best_by_blocks(n, n_classes, monkeypatch):
    """Wide rows are read block by block."""
    device = place("triton")
    from lastlayer.kernels.prediction import triton

    scores, bias = problem(n, n_classes, True, device)
    for k in {1, min(10, n_classes), min(100, n_classes)}:
        for normalised in (True, False):
            alike = prediction.best("reference", scores, bias, 0.0, 0.7, k, normalised)
            monkeypatch.setattr(triton, "WIDEST_WHOLE", 0)
            found = prediction.best("triton", scores, bias, 0.0, 0.7, k, normalised)
            assert torch.equal(found[1], alike[1])
            assert error(found[0], alike[0], 1e-5) < 1
            assert error(found[2], alike[2], 1e-5) < 1


@every_implementation
def test_of_equal_ones_the_lower_class_is_first(impl):
    device = place(impl)
    scores = torch.zeros(2, 500, device=device)
    scores[0, 300:310] = 1.0
    scores[1, ::2] = -0.0
    _, classes, _ = prediction.best(impl, scores, None, 0.0, 1.0, 12, False)
    assert classes[0].tolist() == [*range(300, 310), 0, 1]
    assert classes[1].tolist() == [*range(12)]


@every_implementation
def test_order_is_that_of_rounded_log_probabilities(impl):
    """Scores that differ, and log-probabilities that do not: the lower class comes first."""
    device = place(impl)
    scores = torch.full((1, 300), 10.0, device=device)
    scores[0, 1:100] -= 1e-6 * torch.arange(1, 100, device=device)
    scores[0, 0] = -5.0
    values, classes, _ = prediction.best(impl, scores, None, 0.0, 1.0, 50, True)
    ahead = (values[0, :-1] > values[0, 1:]) | (classes[0, :-1] < classes[0, 1:])
    assert ahead.all()
    lowest = values[0, -1]
    total = prediction.best(impl, scores, None, 0.0, 1.0, 0, True)[2]
    better = scores[0] - total > lowest
    assert set(better.nonzero().squeeze(-1).tolist()) <= set(classes[0].tolist())


@pytest.mark.thin(3)
@every_implementation
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "n_classes"), few(SHAPES, (5, 7), (3, 1003)))
def test_draws_invert_the_distribution(impl, n, n_classes, form):
    device = place(impl)
    scores, bias = problem(n, n_classes, form[0], device)
    _, logs = truth(scores, bias, *form[1:])
    uniform = torch.rand(n, 40, dtype=torch.float64)
    uniform[:, 0], uniform[:, 1] = 0.0, 1.0 - 2.0**-53
    drawn = prediction.draw(impl, scores, bias, *form[1:], uniform.to(device)).cpu()
    broken = logs.isnan().any(-1) | (logs == -math.inf).all(-1)
    assert (drawn[broken] == -1).all()
    logs, drawn, uniform = logs[~broken], drawn[~broken], uniform[~broken]
    shares = logs.exp()
    assert (shares.gather(-1, drawn) > 0).all()
    after = shares.cumsum(-1).gather(-1, drawn)
    assert (uniform < after + 1e-5).all()
    assert (uniform > after - shares.gather(-1, drawn) - 1e-5).all()


@every_implementation
def test_many_small_classes_keep_their_shares(impl):
    device = place(impl)
    # Half of the mass in one class, the other half in 5000 that are lost in a float32 sum of 2^24.
    scores = torch.full((1, 5001), -math.log(2 * 5000), device=device)
    scores[0, 0] = -math.log(2)
    uniform = torch.linspace(0, 1, 65, dtype=torch.float64, device=device)[None, :-1]
    drawn = prediction.draw(impl, scores, None, 0.0, 1.0, uniform)
    expected = ((uniform - 0.5) * 10_000 + 1).clamp(min=0)
    assert ((drawn - expected).abs() < 2.0).all()


@in_torch_on_cpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "n_classes"), few(SHAPES, (3, 1), (7, 65), (3, 1003)))
def test_log_softmax_in_place(impl, n, n_classes, form):
    device = place(impl)
    scores, bias = problem(n, n_classes, form[0], device)
    _, logs = truth(scores, bias, *form[1:])
    # Rows that are further apart than they are long.
    wide = torch.full((n, n_classes + 5), 7.0, device=device)
    wide[:, :n_classes] = scores
    prediction.log_softmax_(impl, wide[:, :n_classes], bias, *form[1:])
    assert error(wide[:, :n_classes], logs, 1e-5) < 1
    assert (wide[:, n_classes:] == 7.0).all()
    offsets = torch.randn(n, 3, device=device)
    wide[:, :n_classes] = scores
    prediction.log_softmax_(impl, wide[:, :n_classes], bias, *form[1:], offsets[:, 1])
    assert error(wide[:, :n_classes], logs + offsets[:, 1:2].cpu(), 1e-5) < 1


@in_torch_on_cpu
def test_log_softmax_of_large_scores(impl):
    """Their common part does not round the logarithm of a sum away."""
    scores = torch.stack([torch.full((1003,), 2.0**33), torch.randn(1003) + 2.0**20])
    _, logs = truth(scores, None, 0.0, 1.0)
    made = scores.to(place(impl))
    prediction.log_softmax_(impl, made, None, 0.0, 1.0)
    assert error(made, logs, 1e-5) < 1


@in_torch_on_cpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "n_classes"), few(SHAPES, (3, 1), (3, 1003)))
def test_log_sigmoid_in_place(impl, n, n_classes, form):
    device = place(impl)
    scores, bias = problem(n, n_classes, form[0], device)
    shaped, _ = truth(scores, bias, *form[1:])
    wide = torch.full((n, n_classes + 5), 7.0, device=device)
    wide[:, :n_classes] = scores
    prediction.log_sigmoid_(impl, wide[:, :n_classes], bias, *form[1:])
    logs = torch.nn.functional.logsigmoid(shaped.cpu().double())
    unit = 1e-6 * (1 + logs.nan_to_num(neginf=0.0).abs())
    assert error(wide[:, :n_classes], logs, unit) < 3
    assert (wide[:, n_classes:] == 7.0).all()


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_float64_and_no_rows(impl):
    device = place(impl)
    scores, _ = problem(4, 300, False, device, torch.float64)
    values, classes, total = prediction.best(impl, scores, None, 0.0, 1.0, 5, True)
    assert values.dtype == total.dtype == torch.float64
    _, logs = truth(scores, None, 0.0, 1.0)
    assert error(values, logs.gather(-1, classes), 1e-12) < 1
    values, classes, total = prediction.best(impl, scores[:0], None, 0.0, 1.0, 5, True)
    assert values.shape == classes.shape == (0, 5)
    assert total.shape == (0,)


def test_threads_do_not_matter():
    place("cpu")
    scores, _ = problem(40, 2000, False, "cpu")
    alone = prediction.best("cpu", scores, None, 0.0, 1.0, 7, True)
    with three_threads():
        together = prediction.best("cpu", scores, None, 0.0, 1.0, 7, True)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.thin(3)
@pytest.mark.parametrize("form", FORMS)
def test_slabs_of_classes(form):
    """As of all scores at once, where a slab of them is held at a time."""
    device = place("triton")
    n, n_classes, depth = 6, 700, 12
    rows = torch.randn(n, depth, device=device)
    rows[1, 3] = math.nan
    weight = torch.randn(n_classes, depth, device=device)
    bias = torch.randn(n_classes, device=device) if form[0] else None
    if bias is not None:
        bias[650] = -math.inf
    layer = fused.Layer(weight, bias, *form[1:])
    _, logs = truth(rows @ weight.t(), bias, *form[1:])
    for k in (1, 9):
        values, classes = fused._best_by_slabs(rows, layer, k, 256, True)
        right = logs.sort(dim=-1, descending=True, stable=True)
        assert error(values, right.values[:, :k], 1e-4) < 1
        assert error(values, logs.gather(-1, classes.cpu()), 1e-4) < 1
    total = fused._by_slabs(rows, layer, 256, peaks=False).choose(0)[0]
    everything = prediction.best("reference", rows @ weight.t(), bias, *form[1:], 0, True)[2]
    assert error(total, everything, 1e-4) < 1
    uniform = torch.rand(n, 33, dtype=torch.float64, device=device)
    drawn = fused._draw_by_slabs(rows, layer, uniform, 256)
    expected = prediction.draw("reference", rows @ weight.t(), bias, *form[1:], uniform)
    assert (drawn[1] == -1).all()
    # A sum that is rounded otherwise may choose a neighbour.
    assert (drawn == expected).float().mean() > 0.9
    assert (kernels.products.scores("reference", rows, weight, bias, drawn.clamp(min=0))[0]
            > -math.inf).all()  # fmt: skip


def test_too_many_best_classes():
    device = place("triton")
    with pytest.raises(ValueError, match=r"^k: expected at most 128"):
        prediction.best("triton", torch.zeros(1, 500, device=device), None, 0.0, 1.0, 129, True)
