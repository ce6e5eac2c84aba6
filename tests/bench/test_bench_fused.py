import io
import re
import sys

import pytest
import torch
from lastlayer.bench import fused as bench_fused
from lastlayer.bench import memory, session
from lastlayer.bench.cases import Method
from lastlayer.bench.command import chosen
from lastlayer.bench.fused import cases, methods
from lastlayer.bench.fused.cases import LARGE, SMALL, SPARSE
from lastlayer.bench.peers import PeerMissing
from lastlayer.bench.results import read
from rich.console import Console
from torch.nn import functional

from lastlayer import fused

CUDA = torch.device("cuda")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def found_in(outcome):
    return {(r.section, r.scores, r.source, r.method): r for r in outcome.records}


def test_a_run_verifies_times_and_writes_down(small_fused_run):
    outcome = small_fused_run()
    assert outcome.code == 0
    assert {(r.section, r.shape, r.scores) for r in outcome.records} == {
        (LARGE, (12, 8, 90), "flat"),
        *((SPARSE, (10, 8, 90), kind) for kind in ("trained-like", "flat", "very flat")),
    }
    for record in outcome.records:
        rows, width, classes = record.shape
        assert record.verified, record
        assert record.direction == "forward+backward"
        assert record.loss_error < 1e-5
        assert record.weight_error < 5e-3
        assert record.hidden_error < 5e-3
        operations = 6 * rows * width * classes
        assert record.tflop_per_s == pytest.approx(operations / record.median_ms / 1e9)
        assert record.fraction_of_gemm == pytest.approx(
            record.tflop_per_s / record.gemm_tflop_per_s
        )
        assert "N(0, 1)" in record.scores_made
    assert "large width 12×8×90 float32, flat scores" in outcome.text
    assert "supports, 10×8×90 float32, very flat scores: sparsemax" in outcome.text


def test_ratios_are_to_the_baseline_of_the_case(small_fused_run):
    found = found_in(small_fused_run())
    eager, ours = (
        found[LARGE, "flat", "torch", "eager"],
        found[LARGE, "flat", "lastlayer", "cross_entropy"],
    )
    assert eager.baseline == ours.baseline == "torch eager"
    assert eager.ratio_to_baseline == 1
    assert ours.ratio_to_baseline == pytest.approx(ours.median_ms / eager.median_ms)
    assert ours.ratio_to_ours is None
    low = found[LARGE, "flat", "lastlayer", "cross_entropy, low memory"]
    assert low.ratio_to_ours == pytest.approx(low.median_ms / ours.median_ms)
    entmax = found[SPARSE, "flat", "lastlayer", "entmax 1.5"]
    assert entmax.baseline == "lastlayer cross_entropy"
    stored = found[SPARSE, "flat", "lastlayer", "entmax 1.5, stored scores"]
    assert stored.ratio_to_ours == pytest.approx(stored.median_ms / entmax.median_ms)


def test_supports_are_counted_for_those_that_have_one(small_fused_run):
    found = found_in(small_fused_run(only="sparse"))
    assert all(section == SPARSE for section, *_ in found)
    wide = found[SPARSE, "very flat", "lastlayer", "entmax 1.5"]
    assert 45 < wide.support_mean <= wide.support_max <= 90
    narrow = found[SPARSE, "trained-like", "lastlayer", "sparsemax"]
    assert 1 <= narrow.support_mean <= narrow.support_max < 45
    assert found[SPARSE, "flat", "lastlayer", "cross_entropy"].support_max is None


def test_a_wrong_gradient_is_not_timed_and_fails_the_run(small_fused_run, monkeypatch):
    right = fused.linear_entmax_loss

    def half_a_gradient(hidden, weight, target, **options):
        return right(hidden, weight / 2 + weight.detach() / 2, target, **options)

    monkeypatch.setattr(fused, "linear_entmax_loss", half_a_gradient)
    outcome = small_fused_run(only="trained")
    assert outcome.code == 1
    found = found_in(outcome)
    for name in ("sparsemax", "entmax 1.5"):
        record = found[SPARSE, "trained-like", "lastlayer", name]
        assert record.median_ms is None
        assert record.status == "wrong: gradient of weight off by 5.0e-01"
        assert record.loss_error < 1e-5
    assert "2 of our results failed verification" in outcome.text


def test_a_wrong_loss_is_found(small_fused_run, monkeypatch):
    right = functional.cross_entropy
    monkeypatch.setattr(functional, "cross_entropy", lambda *a, **o: right(*a, **o) * 1.01)
    record = found_in(small_fused_run(only="large"))[LARGE, "flat", "torch", "eager"]
    assert record.status == "inexact: loss off by 1.0e-02"
    assert record.median_ms > 0


def test_what_would_not_fit_is_not_tried(small_fused_run, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 12 * 90 * 16 - 1)
    outcome = small_fused_run(only="large")
    record = found_in(outcome)[LARGE, "flat", "torch", "eager"]
    assert record.status.startswith("does not fit: needs about 0 GB")
    assert record.median_ms is None
    assert found_in(outcome)[LARGE, "flat", "lastlayer", "cross_entropy"].verified


def test_the_rest_is_measured_where_a_method_gives_no_gradient(small_fused_run, monkeypatch):
    forgets = Method(
        "forgets",
        "liger-kernel",
        "cross_entropy",
        lambda: methods.step_of(lambda h, w, y: functional.cross_entropy(h @ w.detach().T, y)),
    )
    monkeypatch.setattr(methods, "TORCH_FUSED", forgets)
    outcome = small_fused_run(only="large", peers=True)
    assert outcome.code == 0
    record = found_in(outcome)[LARGE, "flat", "liger-kernel", "forgets"]
    assert record.status == "failed: RuntimeError: no gradient of weight"


def test_a_full_run_writes_lines(small_fused_run, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    outcome = small_fused_run(quick=False, only="large")
    assert outcome.code == 0
    assert found_in(outcome)[LARGE, "flat", "torch", "compiled"].verified
    line = r"^\d\d:\d\d:\d\d large width 12×8×90 float32, flat scores torch eager: [\d.]+ ms ok$"
    assert re.search(line, outcome.text, re.M)


def test_the_plot_is_a_png(small_fused_run):
    outcome = small_fused_run(only="large", plot=True)
    assert outcome.plot_path.read_bytes().startswith(PNG_SIGNATURE)
    assert "plot: " in outcome.text


def test_a_part_of_no_title_is_refused_with_all_titles(small_fused_run, monkeypatch):
    monkeypatch.setattr(session, "measure", lambda *_, **__: pytest.fail("work was done"))
    outcome = small_fused_run(only="quadratic")
    assert outcome.code == 2
    assert "only: expected part of one of [large width 12×8×90" in outcome.text.replace("\n", " ")


def test_what_cannot_be_run_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(session, "measure", lambda *_, **__: pytest.fail("work was done"))
    text = io.StringIO()
    settings = {"quick": True, "peers": False, "only": "", "json_path": None, "plot_path": None}
    code = bench_fused.run(device="tpu", out=Console(file=text), **settings)
    assert code == 2
    assert "device: expected 'cpu' or 'cuda', got 'tpu'" in text.getvalue()


def test_the_full_plan_for_cuda_is_what_the_goals_need():
    planned = cases.plan(CUDA, quick=False, peers=True)
    assert [(c.section, c.shape) for c in planned if c.section != SPARSE] == [
        (LARGE, (8192, 4096, 128256)),
        (LARGE, (8192, 2048, 256000)),
        (LARGE, (16384, 1024, 50304)),
        (SMALL, (16384, 128, 1_000_000)),
        (SMALL, (16384, 64, 200_000)),
    ]
    assert {c.dtype for c in planned} == {"bfloat16"}
    for case in planned:
        assert case.baseline is case.methods[0]
        # A ratio to ours can only be written once ours was timed.
        place = {id(method): index for index, method in enumerate(case.methods)}
        for method in case.methods:
            main = [m for m in case.methods if m.is_ours and not m.variant]
            ours = [m for m in main if m.computes == method.computes]
            assert len(ours) == 1
            if method.variant:
                assert place[id(ours[0])] < place[id(method)]
        sources = {method.source for method in case.methods}
        if case.section == SPARSE:
            assert sources == {"lastlayer"}
        else:
            assert sources == {
                "lastlayer", "torch", "liger-kernel", "cut-cross-entropy", "quack-kernels"
            }  # fmt: skip
    small = [c for c in planned if c.section == SMALL]
    assert all(methods.ON_CHUNKS in c.methods for c in small)
    assert all(methods.FLOAT32_SUM in c.methods for c in planned if c.section == LARGE)
    # torch.compile makes at most eight graphs of one function.
    assert sum(methods.COMPILED in c.methods for c in planned) <= 8


def test_without_peers_only_torch_is_left():
    for case in cases.plan(CUDA, quick=True, peers=False):
        assert {method.source for method in case.methods} <= {"lastlayer", "torch"}


def test_only_looks_at_the_title():
    planned = chosen(cases.plan(CUDA, quick=False, peers=True), "Trained")
    assert [c.title() for c in planned] == ["sparse 8192×2048×128256 bfloat16, trained-like scores"]


def test_scores_that_cannot_fit_are_known_before():
    million = (16384, 128, 1_000_000)
    assert methods.EAGER.scratch(million, 2) == 16384 * 1_000_000 * 14
    assert methods.COMPILED.scratch(million, 2) == 16384 * 1_000_000 * 4
    assert methods.ON_CHUNKS.scratch is None


def inputs(rows=6, width=5, classes=11):
    hidden = torch.randn(rows, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(classes, width, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(classes, (rows,))


def plain_step(hidden, weight, target):
    loss = functional.cross_entropy(hidden @ weight.T, target)
    return loss, *torch.autograd.grad(loss, (hidden, weight))


def test_chunks_add_up_to_the_whole(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(methods, "CHUNK_ROWS", 4)
    given = inputs()
    step = methods.ON_CHUNKS.load()(*given)
    for got, expected in zip((step.loss, *step.gradients), plain_step(*given), strict=True):
        torch.testing.assert_close(got, expected, check_dtype=False, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", [methods.EAGER, methods.COMPILED, methods.TORCH_FUSED])
def test_torchs_ways_give_loss_and_gradients(method, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    given = [
        tensor.detach().float() if tensor.is_floating_point() else tensor for tensor in inputs()
    ]
    given[0].requires_grad_()
    given[1].requires_grad_()
    try:
        step = method.load()(*given)
    except PeerMissing:
        pytest.skip("this torch has no linear_cross_entropy")
    for got, expected in zip((step.loss, *step.gradients), plain_step(*given), strict=True):
        torch.testing.assert_close(got, expected)
    assert given[0].grad is None
    assert given[1].grad is None


def test_the_float32_sum_is_the_gradient(small_fused_run):
    given = [
        tensor.detach().bfloat16() if tensor.is_floating_point() else tensor for tensor in inputs()
    ]
    given[0].requires_grad_()
    given[1].requires_grad_()
    _, of_weight = methods.FLOAT32_SUM.load()(*given).gradients
    assert of_weight.dtype == torch.float32
    exact = [tensor.detach().double().requires_grad_() for tensor in given[:2]]
    _, _, expected = plain_step(*exact, given[2])
    assert float((of_weight - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(
    ("load", "package", "message"),
    [
        (methods.LIGER.load, "liger_kernel", 'pip install "lastlayer[peers]"'),
        (methods.CCE.load, "cut_cross_entropy", 'pip install "lastlayer[peers]"'),
        (methods.QUACK.load, "quack", "pip install quack-kernels"),
    ],
)
def test_an_absent_peer_names_its_command(load, package, message, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PeerMissing, match=re.escape(message)):
        load()


def test_a_torch_without_the_fused_function_says_so(monkeypatch):
    monkeypatch.delattr(functional, "linear_cross_entropy", raising=False)
    with pytest.raises(PeerMissing, match=re.escape(f"not in torch {torch.__version__}")):
        methods.TORCH_FUSED.load()


@pytest.mark.gpu
def test_a_run_on_a_gpu_measures_memory_and_times(monkeypatch, tmp_path):
    shapes = {LARGE: ((256, 320, 3000),), SMALL: ((256, 64, 3000),), SPARSE: ((128, 320, 3000),)}
    monkeypatch.setattr(cases, "QUICK_CUDA_SHAPES", shapes)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    text, path = io.StringIO(), tmp_path / "r.jsonl"
    settings = {"quick": True, "peers": False, "only": "", "json_path": path, "plot_path": None}
    assert bench_fused.run(device="cuda", out=Console(file=text), **settings) == 0
    records = read(path)
    assert {r.section for r in records} == {LARGE, SMALL, SPARSE}
    for record in records:
        assert record.verified, record
        assert record.peak_bytes is not None
    eager = [r for r in records if r.method == "eager"]
    for record in eager:
        rows, _, classes = record.shape
        assert record.peak_bytes > 8 * rows * classes
