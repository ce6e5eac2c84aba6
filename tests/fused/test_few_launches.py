"""The way of small problems on a GPU: one product, the loss and its gradient, and two products."""

import math

import pytest
import torch
from unfused import (
    cross_entropy,
    distance,
    entmax,
    gradients,
    make_problem,
    topk_softmax,
    unfused,
)

from lastlayer import asymmetric_loss, bce_loss, kernels, zlpr_loss
from lastlayer.fused import (
    labels,
    linear_bce_loss,
    linear_cross_entropy,
    linear_entmax_loss,
    linear_topk_softmax_loss,
    linear_zlpr_loss,
    rows,
)
from lastlayer.fused.cross_entropy import PLAIN
from lastlayer.fused.function import Call


def linear_asymmetric(*problem, offsets=None, reduction="mean"):
    numbers = 4.0, 1.0, 0.05, 1.0
    return labels.asymmetric_label_loss(
        *problem, numbers, offsets=offsets, values=None, ignore_index=-100, reduction=reduction,
        chunk_classes="auto",
    )  # fmt: skip


OPTIONS = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1, "z_loss": 0.01},
    "bent": {"softcap": 2.0, "temperature": 0.7},
}
LOSSES = {
    "cross_entropy": (linear_cross_entropy, cross_entropy, {}),
    "entmax": (linear_entmax_loss, entmax, {"alpha": 1.5}),
    "topk_softmax": (linear_topk_softmax_loss, topk_softmax, {"k": 5}),
}


@pytest.fixture
def calls(monkeypatch):
    """Sends every call the way of small problems on a GPU, on a CPU too; the calls that went it."""
    seen = []

    def is_small(call):
        seen.append(call)
        return True

    monkeypatch.setattr(rows, "is_small_on_gpu", is_small)
    for name in LOSSES:
        monkeypatch.setitem(rows.ROW_LOSSES, name, rows.ROW_LOSSES[name]._replace(native=None))
    return seen


@pytest.fixture(params=["reference", "triton"])
def impl(request, monkeypatch):
    if (reason := kernels.available()[request.param]) is not None:
        pytest.skip(reason)
    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("without the interpreter kernels need tensors on a GPU: test_on_a_gpu")
    reduced = kernels.softmax_rows.reduced_
    monkeypatch.setattr(
        kernels.softmax_rows, "reduced_", lambda _, *given: reduced(request.param, *given)
    )
    return request.param


def in_float64(problem):
    return [
        each.detach().double().requires_grad_() if each.is_floating_point() else each
        for each in problem
    ]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [False, True])
def test_cross_entropy_in_float64(calls, options, reduction, bias):
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


@pytest.mark.parametrize("name", ["entmax", "topk_softmax"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignore_index", [None, -100])
def test_sparse_losses(calls, name, reduction, ignore_index):
    function, row_loss, options = LOSSES[name]
    problem = make_problem(ignored=() if ignore_index is None else (0, 5))
    more = {"reduction": reduction, "ignore_index": ignore_index, **options}
    ours, truth = function(*problem, **more), unfused(row_loss, *problem, **more)
    torch.testing.assert_close(ours, truth)
    torch.testing.assert_close(gradients(ours, problem), gradients(truth, problem))
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "d", "v"), [(1, 1, 1), (5, 33, 65), (7, 8, 3), (2, 130, 200)])
def test_kernels_and_odd_sizes(calls, impl, dtype, n, d, v):
    ignored = (0,) if n > 1 else ()
    problem = make_problem(n, d, v, ignored=ignored, dtype=dtype, scale=1 / math.sqrt(d))
    exact = in_float64(problem)
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


@pytest.mark.parametrize("name", LOSSES)
def test_float32_parameters_under_autocast_get_float32_gradients(calls, name):
    function, row_loss, options = LOSSES[name]
    problem = make_problem(9, 16, 40, dtype=torch.float32, scale=0.25)
    with torch.autocast("cpu", torch.bfloat16):
        loss = function(*problem, ignore_index=None, **options)
    exact = unfused(row_loss, *problem, **options)
    for mine, true in zip(gradients(loss, problem), gradients(exact, problem), strict=True):
        assert mine.dtype == torch.float32
        assert distance(mine, true) < 0.03
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


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("place", range(3))
def test_only_the_wanted_gradients(calls, name, place):
    function, _, options = LOSSES[name]
    problem = make_problem()
    expected = gradients(function(*problem, **options), problem)
    for i, each in enumerate((problem[0], problem[1], problem[3])):
        each.requires_grad_(i == place)
    (made,) = gradients(function(*problem, **options), problem)
    torch.testing.assert_close(made, expected[place])
    assert len(calls) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"device": "cpu"}, {"dtype": torch.float16}, {"chunk_rows": "low"}, {"chunk_rows": "4"},
        {"reduction": "none"}, {"class_weight": torch.ones(29)}, {"row_weight": torch.ones(13)},
        {"n": rows._FEW_ROWS + 1}, {"v": rows._FEW_SCORES}, {"v": 0},
        {"name": "cross_entropy_statistics"},
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_go_this_way(change, monkeypatch):
    monkeypatch.setattr(rows.kernels, "available", lambda: {"triton": None})

    class Hidden:
        def __init__(self, n, dtype, device):
            self.shape, self.dtype, self.is_cuda = (n, 7), dtype, device == "cuda"

    def goes(n=13, v=29, device="cuda", dtype=torch.bfloat16, name="cross_entropy", **given):
        weights = given.get("class_weight"), given.get("row_weight"), None
        operands = Hidden(n, dtype, device), torch.empty(v, 7, device="meta"), None, None, *weights
        options = name, PLAIN, -100, given.get("chunk_rows", "auto"), False, ""
        reduction = given.get("reduction", "mean")
        return rows.is_small_on_gpu(Call(operands, options, reduction, (True,)))

    assert goes()
    assert goes(dtype=torch.float32)
    assert not goes(**change)


LABEL_LOSSES = {
    "zlpr": (linear_zlpr_loss, zlpr_loss),
    "bce": (linear_bce_loss, bce_loss),
    "asymmetric": (linear_asymmetric, asymmetric_loss),
}


def labelled(n, d, v, m, dtype=torch.float64, device="cpu"):
    """Hidden states, class vectors, lists with padding and duplicates, and biases."""
    lists = torch.randint(v, (n, m), device=device)
    lists[::3, 0], lists[1::4, -1] = -100, lists[1::4, 0]
    made = torch.randn(n, d), torch.randn(v, d) / d**0.5, torch.randn(v)
    hidden, weight, bias = (each.to(device, dtype).requires_grad_() for each in made)
    return hidden, weight, lists, bias


def of_scores(name, problem, reduction):
    """Of dense labels and stored scores, in float64."""
    hidden, weight, lists, bias = in_float64(problem)
    on = torch.zeros(len(lists), len(weight) + 1, dtype=torch.bool, device=lists.device)
    on.scatter_(1, torch.where(lists < 0, len(weight), lists), True)
    leaves = hidden, weight, bias
    loss = LABEL_LOSSES[name][1](hidden @ weight.t() + bias, on[:, :-1], reduction=reduction)
    return loss, torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("name", LABEL_LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("flat", [False, True])
def test_label_losses(monkeypatch, name, reduction, flat):
    monkeypatch.setattr(labels, "_is_small", lambda _: False)
    monkeypatch.setattr(labels, "has_few_scores_on_gpu", lambda *_: True)
    monkeypatch.setattr(labels, "_bce_by_torch", lambda *_: None)
    # The way of large problems would use it.
    monkeypatch.setattr(labels, "_Slabs", None)
    hidden, weight, lists, bias = problem = labelled(9, 5, 31, 4)
    given, options = lists, {"reduction": reduction}
    if flat:
        given, options["offsets"] = lists.flatten(), torch.arange(0, 37, 4)
    loss = LABEL_LOSSES[name][0](hidden, weight, given, bias, **options)
    truth, slopes = of_scores(name, problem, reduction)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight, bias)), slopes)
    with torch.no_grad():
        torch.testing.assert_close(
            LABEL_LOSSES[name][0](hidden, weight, given, bias, **options), truth
        )


def test_labels_that_go_by_slabs(monkeypatch):
    monkeypatch.setattr(labels, "has_few_scores_on_gpu", lambda *_: True)
    hidden, weight, lists, bias = labelled(3, 5, 7, 2, torch.bfloat16)

    def goes(values=None, smoothing=0.0, chunk="auto", dtype=torch.bfloat16):
        operands = hidden.to(dtype), weight, bias, lists, None, values
        return labels._is_small_on_gpu(
            Call(operands, ("zlpr", smoothing, -100, chunk, []), "mean", (True,) * 3)
        )

    assert goes()
    assert goes(dtype=torch.float32)
    assert not goes(values=torch.ones(3, 2))
    assert not goes(smoothing=0.1)
    assert not goes(chunk="low")
    monkeypatch.setattr(labels, "keeps_float32", lambda _: False)
    assert goes()
    assert not goes(dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LABEL_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "d", "v"), [(1, 1, 6), (255, 127, 10_001), (513, 512, 20_003)])
def test_label_losses_on_a_gpu(monkeypatch, name, dtype, n, d, v):
    monkeypatch.setattr(labels, "_Slabs", None)
    hidden, weight, lists, bias = problem = labelled(n, d, v, 3, dtype, "cuda")
    lists = torch.where(lists < 0, 1 << 40, lists) if n > 1 else lists  # do not count either
    loss = LABEL_LOSSES[name][0](hidden, weight, lists, bias)
    truth, slopes = of_scores(name, problem, "mean")
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-5)
    for mine, true in zip(torch.autograd.grad(loss, (hidden, weight, bias)), slopes, strict=True):
        slack = 8e-3 if dtype == torch.bfloat16 else 1e-5
        assert (mine.double() - true).norm() <= slack * true.norm() + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options"),
    [*[("cross_entropy", each) for each in OPTIONS.values()], ("entmax", {}), ("topk_softmax", {})],
    ids=str,
)
@pytest.mark.parametrize(("n", "d", "v"), [(1, 1, 6), (255, 127, 10_001), (513, 512, 20_003)])
def test_on_a_gpu(monkeypatch, dtype, name, options, n, d, v):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    small, seen = rows.is_small_on_gpu, []
    monkeypatch.setattr(rows, "is_small_on_gpu", lambda call: seen.append(small(call)) or seen[-1])
    function, row_loss, more = LOSSES[name]
    ignored = (0,) if n > 1 else ()
    made = make_problem(n, d, v, ignored=ignored, dtype=dtype, scale=1 / math.sqrt(d))
    problem = [each.detach().cuda().requires_grad_(each.requires_grad) for each in made]
    exact = in_float64(problem)
    ours = function(*problem, **options, **more)
    truth = unfused(row_loss, *exact, **options, **more)
    assert seen == [True]
    # Scores are rounded to half precision, which averages out over many classes.
    loss_slack = 5e-3 if dtype == torch.bfloat16 and v < 1000 else 1e-4
    torch.testing.assert_close(ours.double(), truth, rtol=loss_slack, atol=loss_slack)
    for mine, true in zip(gradients(ours, problem), gradients(truth, exact), strict=True):
        slack = 8e-3 if dtype == torch.bfloat16 else 1e-5
        assert (mine.double() - true).norm() <= slack * true.norm() + 1e-6
