"""Fused against unfused in float64: every option, every reduction, every way to cut the rows."""

import pytest
import torch
from torch.nn import functional
from unfused import (
    assert_fused_equals_unfused,
    cross_entropy,
    entmax,
    entmax_probs,
    gradients,
    make_problem,
    scores,
    topk_softmax,
)

from lastlayer.fused import (
    linear_cross_entropy,
    linear_entmax_loss,
    linear_statistics,
    linear_topk_softmax_loss,
    rows,
    sparse,
)

N, V = 13, 29
REDUCTIONS = ("mean", "sum", "none")
CHUNKS = (1, 3, "auto")
IGNORED = (0, 5, 6, 12)
OPTIONS = {
    "plain": {},
    "label_smoothing": {"label_smoothing": 0.1},
    "all_smoothing": {"label_smoothing": 1.0},
    "class_weight": {"class_weight": True},
    "row_weight": {"row_weight": True},
    "z_loss": {"z_loss": 0.01},
    "softcap": {"softcap": 2.0},
    "temperature": {"temperature": 0.6},
    "weights": {"class_weight": True, "row_weight": True, "label_smoothing": 0.2},
    "bent": {"softcap": 3.0, "temperature": 1.7, "z_loss": 0.1},
    "everything": {
        "label_smoothing": 0.3, "class_weight": True, "row_weight": True, "z_loss": 0.05,
        "softcap": 4.0, "temperature": 0.8,
    },
}  # fmt: skip
with_each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
with_each_chunking = pytest.mark.parametrize("chunk_rows", CHUNKS)


def filled(options, n=N, v=V):
    """The options with weights drawn."""
    sizes = {"class_weight": v, "row_weight": n}
    drawn = {
        name: torch.rand(size, dtype=torch.float64) + 0.1
        for name, size in sizes.items()
        if options.get(name)
    }
    return {**options, **drawn}


@with_each_reduction
@with_each_chunking
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_cross_entropy(options, reduction, chunk_rows):
    for bias in (False, True):
        for ignored, ignore_index in (((), -100), (IGNORED, -100), ((), None)):
            problem = make_problem(N, v=V, bias=bias, ignored=ignored)
            assert_fused_equals_unfused(
                linear_cross_entropy, cross_entropy, problem, reduction=reduction,
                chunk_rows=chunk_rows, ignore_index=ignore_index, **filled(options),
            )  # fmt: skip


@pytest.mark.parametrize("chunk_rows", ["low", N - 1, N, N + 1, 1000])
def test_other_ways_to_cut_the_rows(chunk_rows):
    for function, row_loss, options in (
        (linear_cross_entropy, cross_entropy, filled(OPTIONS["everything"])),
        (linear_entmax_loss, entmax, {"alpha": 1.5}),
        (linear_topk_softmax_loss, topk_softmax, {"k": 5}),
    ):
        for reduction in REDUCTIONS:
            assert_fused_equals_unfused(
                function, row_loss, make_problem(N, v=V, ignored=(3,)), reduction=reduction,
                chunk_rows=chunk_rows, **options,
            )  # fmt: skip


@with_each_reduction
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_is_that_of_torch(reduction, bias, smoothing, weighted):
    problem = hidden, weight, target, offset = make_problem(N, v=V, bias=bias, ignored=IGNORED)
    class_weight = torch.rand(V, dtype=torch.float64) if weighted else None
    ours = linear_cross_entropy(
        *problem, reduction=reduction, label_smoothing=smoothing, class_weight=class_weight,
        chunk_rows=4,
    )  # fmt: skip
    values = functional.linear(hidden, weight, offset)
    truth = functional.cross_entropy(
        values, target, class_weight, reduction=reduction, label_smoothing=smoothing
    )
    torch.testing.assert_close(ours, truth)
    upstream = torch.randn_like(truth)
    torch.testing.assert_close(
        gradients(ours, problem, upstream), gradients(truth, problem, upstream)
    )


class Paths:
    """Which of the two ways each chunk took."""

    def __init__(self, monkeypatch, module):
        self.taken = []
        for name in ("sparse_rows", "dense_rows"):
            original = getattr(module, name)

            def noted(*args, _original=original, _name=name):
                self.taken.append(_name)
                return _original(*args)

            monkeypatch.setattr(module, name, noted)


@with_each_reduction
@with_each_chunking
@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0, 3.0])
def test_entmax(alpha, reduction, chunk_rows):
    for options in ({}, OPTIONS["class_weight"], OPTIONS["row_weight"]):
        for bias in (False, True):
            problem = make_problem(N, v=V, bias=bias, ignored=IGNORED)
            assert_fused_equals_unfused(
                linear_entmax_loss, entmax, problem, alpha=alpha, reduction=reduction,
                chunk_rows=chunk_rows, **filled(options),
            )  # fmt: skip


@with_each_reduction
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 3.0])
@pytest.mark.parametrize(
    ("scale", "path"), [(20.0, {"sparse_rows"}), (1e-6, {"dense_rows"})], ids=["peaked", "flat"]
)
def test_entmax_on_peaked_and_on_flat_rows(monkeypatch, alpha, reduction, scale, path):
    paths = Paths(monkeypatch, sparse)
    problem = make_problem(N, v=400, bias=False, ignored=IGNORED, scale=scale)
    assert_fused_equals_unfused(
        linear_entmax_loss, entmax, problem, alpha=alpha, reduction=reduction, chunk_rows=4
    )
    assert set(paths.taken) == path


@with_each_reduction
@pytest.mark.parametrize("options", [{}, {"class_weight": True, "row_weight": True}])
def test_small_problems_take_dense_products(monkeypatch, reduction, options):
    monkeypatch.setattr(sparse, "_SMALL", {"cpu": 1 << 23})
    paths = Paths(monkeypatch, sparse)
    for ignored in ((), IGNORED):
        problem = make_problem(N, v=V, ignored=ignored)
        more = {"reduction": reduction, **filled(options)}
        for alpha in (1.0, 1.2, 1.5, 2.0, 3.0):
            assert_fused_equals_unfused(linear_entmax_loss, entmax, problem, alpha=alpha, **more)
        assert_fused_equals_unfused(linear_topk_softmax_loss, topk_softmax, problem, k=3, **more)
    assert not paths.taken


@with_each_reduction
@pytest.mark.parametrize("alpha", [1.2, 2.0])
def test_entmax_where_some_chunks_are_peaked_and_some_flat(monkeypatch, alpha, reduction):
    paths = Paths(monkeypatch, sparse)
    problem = make_problem(12, v=400, bias=True)
    with torch.no_grad():
        problem[0][::2] *= 20
        problem[0][5:8] *= 1e-5
        problem[3].mul_(1e-4)
    options = filled({"class_weight": True, "row_weight": True}, 12, 400)
    assert_fused_equals_unfused(
        linear_entmax_loss, entmax, problem, alpha=alpha, reduction=reduction, chunk_rows=1,
        **options,
    )  # fmt: skip
    assert set(paths.taken) == {"sparse_rows", "dense_rows"}


def test_entmax_lists_that_are_just_full_and_just_too_short(monkeypatch):
    problem = make_problem(N, v=60)
    with torch.no_grad():
        widest = int((entmax_probs(scores(*problem[:2], problem[3]), 1.5) > 0).sum(-1).max())
    for room, path in ((widest, "sparse_rows"), (widest - 1, "dense_rows")):
        monkeypatch.setattr(sparse, "WIDEST_SUPPORT", room)
        paths = Paths(monkeypatch, sparse)
        assert_fused_equals_unfused(linear_entmax_loss, entmax, problem, chunk_rows=N)
        assert path in paths.taken


@with_each_reduction
@with_each_chunking
@pytest.mark.parametrize("k", [1, 5, V - 1, V, V + 10])
def test_topk(k, reduction, chunk_rows):
    for options in ({}, OPTIONS["class_weight"], OPTIONS["row_weight"]):
        for bias in (False, True):
            problem = make_problem(N, v=V, bias=bias, ignored=IGNORED)
            assert_fused_equals_unfused(
                linear_topk_softmax_loss, topk_softmax, problem, k=k, reduction=reduction,
                chunk_rows=chunk_rows, **filled(options),
            )  # fmt: skip


@with_each_reduction
@pytest.mark.parametrize(("k", "path"), [(4, {"sparse_rows"}), (5, {"dense_rows"}), (V, set())])
def test_topk_by_lists_and_dense(monkeypatch, k, path, reduction):
    monkeypatch.setattr(sparse, "WIDEST_TOP", 4)
    paths = Paths(monkeypatch, sparse)
    problem = make_problem(N, v=V, ignored=IGNORED)
    assert_fused_equals_unfused(
        linear_topk_softmax_loss, topk_softmax, problem, k=k, reduction=reduction, chunk_rows=4
    )
    assert set(paths.taken) == path


def test_topk_beyond_the_widest_list(monkeypatch):
    paths = Paths(monkeypatch, sparse)
    problem = make_problem(5, v=600)
    assert_fused_equals_unfused(
        linear_topk_softmax_loss, topk_softmax, problem, k=513, chunk_rows=2
    )
    assert set(paths.taken) == {"dense_rows"}


@pytest.mark.parametrize("ignore_index", [0, 3, V - 1, -1, 12345])
def test_any_number_can_stand_for_ignored(ignore_index):
    problem = make_problem(N, v=V)
    problem[2][[1, 7]] = ignore_index
    for reduction in REDUCTIONS:
        assert_fused_equals_unfused(
            linear_cross_entropy, cross_entropy, problem, ignore_index=ignore_index,
            reduction=reduction, class_weight=torch.rand(V, dtype=torch.float64), chunk_rows=4,
        )  # fmt: skip


def test_a_class_out_of_the_running_by_its_bias():
    hidden, weight, target, bias = make_problem(N, v=V)
    target = target % 10
    with torch.no_grad():
        bias[10:] = -float("inf")
    for function, options in (
        (linear_cross_entropy, {}),
        (linear_entmax_loss, {"alpha": 1.5}),
        (linear_topk_softmax_loss, {"k": 20}),
    ):
        ours = function(hidden, weight, target, bias, chunk_rows=4, **options)
        fewer = function(hidden, weight[:10], target, bias[:10], chunk_rows=4, **options)
        torch.testing.assert_close(ours, fewer)
        torch.testing.assert_close(
            torch.autograd.grad(ours, (hidden, weight)),
            torch.autograd.grad(fewer, (hidden, weight)),
        )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", ["some", "all", "none"])
def test_short_steps_leave_ignored_rows_out_without_waiting(
    monkeypatch, reduction, weighted, ignored
):
    """As on CUDA, where the rows stay and have factors of 0."""
    target = torch.randint(9, (6,))
    if ignored != "none":
        target[:: 1 if ignored == "all" else 2] = -100
    options = {"reduction": reduction, "row_weight": torch.rand(6) if weighted else None}
    found = []
    for masked in (False, True):
        if masked:
            monkeypatch.setattr(rows, "masks_ignored_rows", lambda *given: given[2] is not None)
        torch.manual_seed(0)
        hidden = torch.randn(6, 4)
        hidden[target == -100] = torch.nan
        weight = torch.randn(9, 4, requires_grad=True)
        loss = linear_cross_entropy(hidden.requires_grad_(), weight, target, **options)
        loss.sum().backward()
        known = linear_statistics(hidden, weight, target, **options)
        found.append((loss, hidden.grad, weight.grad, known.entropy, known.argmax))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
