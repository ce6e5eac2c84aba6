"""The way of small problems on a GPU, in which one kernel does all that is between the products."""

import math

import pytest
import torch
from unfused import cross_entropy, distance, gradients, make_problem, unfused

from lastlayer import kernels
from lastlayer.fused import cross_entropy as engine
from lastlayer.fused import linear_cross_entropy
from lastlayer.fused.rows import ROW_LOSSES

OPTIONS = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1, "z_loss": 0.01},
    "bent": {"softcap": 2.0, "temperature": 0.7},
}


@pytest.fixture
def calls(monkeypatch):
    """Sends every cross entropy the short way, on a CPU too; the calls that went it."""
    seen = []

    def few(call):
        seen.append(call)
        return engine.in_few_launches(call)

    kind = ROW_LOSSES["cross_entropy"]._replace(few=few, native=None)
    monkeypatch.setitem(ROW_LOSSES, "cross_entropy", kind)
    return seen


@pytest.fixture(params=["reference", "triton"])
def impl(request, monkeypatch):
    if (reason := kernels.available()[request.param]) is not None:
        pytest.skip(reason)
    reduced = kernels.softmax_rows.reduced_
    monkeypatch.setattr(
        kernels.softmax_rows, "reduced_", lambda _, *given: reduced(request.param, *given)
    )
    return request.param


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_in_float64(calls, options, reduction, bias):
    """Against autograd on stored scores, with ignored rows and without."""
    for ignored in ((), (0, 5)):
        problem = make_problem(bias=bias, ignored=ignored)
        ours = linear_cross_entropy(*problem, reduction=reduction, **options)
        truth = unfused(cross_entropy, *problem, reduction=reduction, **options)
        torch.testing.assert_close(ours, truth)
        upstream = torch.rand_like(truth)
        made = gradients(ours, problem, upstream)
        torch.testing.assert_close(made, gradients(truth, problem, upstream))
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "d", "v"), [(1, 1, 1), (5, 33, 65), (7, 8, 3), (2, 130, 200)])
def test_kernels_and_odd_sizes(calls, impl, dtype, n, d, v):
    problem = make_problem(
        n, d, v, ignored=(0,) if n > 1 else (), dtype=dtype, scale=1 / math.sqrt(d)
    )
    exact = [each if each.dtype == torch.int64 else each.detach().double().requires_grad_()
             for each in problem]  # fmt: skip
    ours, truth = linear_cross_entropy(*problem), unfused(cross_entropy, *exact)
    assert ours.dtype == torch.float32
    # The scores of other classes are rounded to half precision.
    loss_slack = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(ours.double(), truth, rtol=loss_slack, atol=loss_slack)
    for mine, true in zip(gradients(ours, problem), gradients(truth, exact), strict=True):
        assert mine.dtype == dtype
        # Triton's interpreter truncates to bfloat16.
        slack = 2e-2 if dtype == torch.bfloat16 else 1e-5
        assert (mine.double() - true).norm() <= slack * true.norm() + 1e-6
    assert calls


def test_float32_parameters_under_autocast_get_float32_gradients(calls):
    hidden, weight, target, bias = make_problem(9, 16, 40, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, target, bias)
    made = gradients(loss, (hidden, weight, target, bias))
    exact = unfused(cross_entropy, hidden, weight, target, bias)
    for mine, true in zip(made, gradients(exact, (hidden, weight, target, bias)), strict=True):
        assert mine.dtype == torch.float32
        assert distance(mine, true) < 0.02
    assert calls


def test_ignored_rows_may_hold_anything(calls, impl):
    hidden, weight, target, bias = make_problem(6, 8, 20, dtype=torch.float32)
    clean = linear_cross_entropy(hidden[2:], weight, target[2:], bias)
    wanted = gradients(clean, (hidden, weight, target, bias))
    dirty = hidden.detach().clone()
    dirty[:2], target[:2] = math.nan, -100
    dirty.requires_grad_()
    loss = linear_cross_entropy(dirty, weight, target, bias)
    torch.testing.assert_close(loss, clean)
    torch.testing.assert_close(gradients(loss, (dirty, weight, target, bias)), wanted)
    target[:] = -100
    loss = linear_cross_entropy(dirty, weight, target, bias)
    assert loss == 0
    assert not any(each.any() for each in gradients(loss, (dirty, weight, target, bias)))
    assert len(calls) == 3


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_only_the_wanted_gradients(calls, wanted):
    problem = make_problem()
    loss = linear_cross_entropy(*problem)
    expected = gradients(loss, problem)
    for each, needed in zip((problem[0], problem[1], problem[3]), wanted, strict=True):
        each.requires_grad_(needed)
    (made,) = gradients(linear_cross_entropy(*problem), problem)
    torch.testing.assert_close(made, expected[wanted.index(True)])
    assert len(calls) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"device": "cpu"}, {"dtype": torch.float16}, {"chunk_rows": "low"}, {"chunk_rows": "4"},
        {"reduction": "none"}, {"class_weight": torch.ones(29)}, {"row_weight": torch.ones(13)},
        {"n": engine._FEW_ROWS + 1}, {"v": engine._FEW_SCORES}, {"v": 0},
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_go_this_way(change, monkeypatch):
    """The problem is on a meta device, and stands for one on a GPU."""
    monkeypatch.setattr(engine, "in_few_launches", lambda _: "few")
    monkeypatch.setattr(engine.kernels, "available", lambda: {"triton": None})

    class Rows:
        def __init__(self, n, dtype, device):
            self.shape, self.dtype, self.is_cuda = (n, 7), dtype, device == "cuda"

    def way(n=13, v=29, device="cuda", dtype=torch.bfloat16, **given):
        weights = given.get("class_weight"), given.get("row_weight"), None
        operands = Rows(n, dtype, device), torch.empty(v, 7, device="meta"), None, None, *weights
        options = "cross_entropy", engine.PLAIN, -100, given.get("chunk_rows", "auto"), False, ""
        return engine._few(engine.Call(operands, options, given.get("reduction", "mean"), (True,)))

    assert way() == way(dtype=torch.float32) == "few"
    assert way(**change) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("n", "d", "v"), [(1, 1, 2), (255, 127, 10_001), (513, 512, 32_003)])
def test_on_a_gpu(monkeypatch, dtype, options, n, d, v):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    seen = []
    way = engine.in_few_launches
    monkeypatch.setattr(engine, "in_few_launches", lambda call: seen.append(call) or way(call))
    made = make_problem(n, d, v, ignored=(0,) if n > 1 else (), dtype=dtype, scale=1 / math.sqrt(d))
    problem = [each.detach().cuda().requires_grad_(each.requires_grad) for each in made]
    exact = [each.detach().double().requires_grad_() if each.is_floating_point() else each
             for each in problem]  # fmt: skip
    ours = linear_cross_entropy(*problem, **options)
    truth = unfused(cross_entropy, *exact, **options)
    assert len(seen) == 1
    torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-4)
    for mine, true in zip(gradients(ours, problem), gradients(truth, exact), strict=True):
        slack = 6e-3 if dtype == torch.bfloat16 else 1e-5
        assert (mine.double() - true).norm() <= slack * true.norm() + 1e-6
