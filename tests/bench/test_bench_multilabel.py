"""The bench of losses of many labels: its runs, its truth and its page."""

import io

import pytest
import torch
from lastlayer.bench import multilabel as bench_multilabel
from lastlayer.bench import runner, session, timing
from lastlayer.bench.command import chosen
from lastlayer.bench.multilabel import cases, family, methods, tables, truth
from lastlayer.bench.multilabel.cases import CPU_SHAPES, CUDA_SHAPES
from lastlayer.bench.multilabel.plot import times_and_memory
from lastlayer.bench.multilabel.record import MultilabelRecord
from lastlayer.bench.multilabel.timer import ByLength
from lastlayer.bench.multilabel.truth import DENSE_ZLPR, LINEAR_BCE, LINEAR_ZLPR
from lastlayer.bench.record import append
from lastlayer.bench.results import read
from lastlayer.bench.timing import CpuTimer, Timing
from made_up_record import MADE_UP
from rich.console import Console

from lastlayer.fused import labels
from lastlayer.kernels import _registry
from lastlayer.losses import zlpr as on_scores

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RECORD = MADE_UP | dict(
    family="multilabel",
    section=LINEAR_ZLPR, method="linear_zlpr_loss", computes=LINEAR_ZLPR,
    shape=(1024, 768, 1_000_000), dtype="bfloat16", direction="forward+backward", median_ms=10.4,
    p20_ms=10.3, p80_ms=10.5, samples=30, inputs_made="hidden ~ N(0, 1)", tflop_per_s=453.0,
    gemm_tflop_per_s=745.0, fraction_of_gemm=0.61, tb_per_s=None, copy_tb_per_s=4.26,
    fraction_of_copy=None, baseline="torch compiled", ratio_to_baseline=0.61,
    peak_bytes=914_000_000, loss_error=5e-8, hidden_error=2.3e-3, weight_error=2.8e-3,
    scores_error=None,
)  # fmt: skip
DENSE = dict(
    section=DENSE_ZLPR, computes=DENSE_ZLPR, method="zlpr_loss", shape=(4096, 32768),
    direction="forward", tflop_per_s=None, fraction_of_gemm=None, tb_per_s=3.4,
    fraction_of_copy=0.8, hidden_error=None, weight_error=None,
)  # fmt: skip


def made_up(**changes):
    return MultilabelRecord(**RECORD | changes)


@pytest.fixture
def small_run(monkeypatch, tmp_path):
    """Runs on tiny shapes, one sample each, by the reference implementations."""
    monkeypatch.setattr(_registry, "selected", lambda op, device_type, dtype: "reference")
    monkeypatch.setattr(runner, "_ROTATED_BYTES", 0)
    timer = CpuTimer(budget_s=0.0, fewest_samples=1, sample_ms=0.01)
    monkeypatch.setattr(family.Multilabel, "timer", lambda self, device, *, quick: timer)
    shapes = {LINEAR_ZLPR: ((12, 8, 90),), LINEAR_BCE: ((12, 8, 90),), DENSE_ZLPR: ((10, 90),)}
    monkeypatch.setattr(cases, "QUICK_CPU_SHAPES", shapes)
    monkeypatch.setattr(timing, "_PRODUCT", {"cpu": (64, torch.float32)})
    monkeypatch.setattr(family, "_COPIED", {"cpu": 2**16})

    def run(*, only="", plot=False):
        text, path, picture = io.StringIO(), tmp_path / "r.jsonl", tmp_path / "p.png"
        code = bench_multilabel.run(
            device="cpu", quick=True, peers=False, only=only, json_path=path,
            plot_path=picture if plot else None, out=Console(file=text),
        )  # fmt: skip
        return code, text.getvalue(), read(path) if path.exists() else []

    return run


def test_a_run_verifies_times_and_writes_down(small_run, tmp_path):
    code, text, records = small_run(plot=True)
    assert code == 0
    assert {(r.section, r.shape, r.direction) for r in records} == {
        (LINEAR_ZLPR, (12, 8, 90), "forward+backward"),
        (LINEAR_BCE, (12, 8, 90), "forward+backward"),
        (DENSE_ZLPR, (10, 90), "forward"),
        (DENSE_ZLPR, (10, 90), "forward+backward"),
    }
    for r in records:
        assert r.verified, r
        assert r.loss_error < 1e-5
        assert r.baseline == "torch eager"
        if r.section == DENSE_ZLPR:
            bytes_moved = 10 * 90 * (5 if r.direction == "forward" else 14)
            assert r.tb_per_s == pytest.approx(bytes_moved / r.median_ms / 1e9)
            assert r.fraction_of_copy == pytest.approx(r.tb_per_s / r.copy_tb_per_s)
            assert (r.scores_error is None) == (r.direction == "forward")
        else:
            assert r.tflop_per_s == pytest.approx(6 * 12 * 8 * 90 / r.median_ms / 1e9)
            assert max(r.hidden_error, r.weight_error) < 1e-5
    words = " ".join(text.split())
    assert "linear + ZLPR 12×8×90 float32" in words
    assert "ZLPR of scores 10×90 float32 forward+backward" in words
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_gradient_is_not_timed_and_fails_the_run(small_run, monkeypatch):
    right = labels.linear_zlpr_loss

    def half_a_gradient(hidden, weight, positives, **options):
        return right(hidden, weight / 2 + weight.detach() / 2, positives, **options)

    monkeypatch.setattr(labels, "linear_zlpr_loss", half_a_gradient)
    code, text, records = small_run(only="linear + ZLPR")
    assert code == 1
    wrong = {r.method: r for r in records if r.source == "lastlayer"}
    assert len(wrong) == 2
    for record in wrong.values():
        assert record.median_ms is None
        assert record.status == "wrong: gradient of weight off by 5.0e-01"
    assert "2 of our results failed verification" in text


def test_a_wrong_loss_is_found(small_run, monkeypatch):
    right = on_scores.zlpr_loss
    monkeypatch.setattr(on_scores, "zlpr_loss", lambda s, t: right(s, t) * 1.01)
    code, _, records = small_run(only="float32 forward")
    assert code == 1
    ours = [r for r in records if r.source == "lastlayer" and r.section == DENSE_ZLPR]
    assert {r.status for r in ours} == {"wrong: loss off by 1.0e-02"}


def test_what_cannot_be_run_is_refused_before_any_work(small_run, monkeypatch):
    monkeypatch.setattr(session, "measure", lambda *_, **__: pytest.fail("work was done"))
    code, text, _ = small_run(only="quadratic")
    assert code == 2
    assert "only: expected part of one of [linear + ZLPR 12×8×90" in text.replace("\n", " ")
    settings = dict(quick=True, peers=False, only="", json_path=None, plot_path=None)
    text = io.StringIO()
    assert bench_multilabel.run(device="tpu", out=Console(file=text), **settings) == 2
    assert "device: expected 'cpu' or 'cuda', got 'tpu'" in text.getvalue()


def test_the_full_plan_for_cuda_is_what_the_goals_need():
    planned = cases.plan(CUDA, quick=False, peers=True)
    assert [(c.section, c.shape, c.direction) for c in planned] == [
        (LINEAR_ZLPR, (1024, 768, 1_000_000), "forward+backward"),
        (LINEAR_BCE, (1024, 768, 1_000_000), "forward+backward"),
        (DENSE_ZLPR, (4096, 32768), "forward"),
        (DENSE_ZLPR, (4096, 32768), "forward+backward"),
    ]
    for case in planned:
        assert case.methods[0].name == "compiled"
        main = [m for m in case.methods if m.is_ours and not m.variant]
        assert [m.name for m in main] == [methods.MAIN[case.section]]
        assert main[0] is case.methods[1]
    without = cases.plan(CUDA, quick=False, peers=False)
    assert {m.source for c in without for m in c.methods} == {"lastlayer", "torch"}


@pytest.mark.parametrize("section", [LINEAR_ZLPR, LINEAR_BCE, DENSE_ZLPR])
def test_the_truth_is_that_of_torch(section, monkeypatch):
    monkeypatch.setattr(truth, "_BYTES", {"cpu": 3 * 8 * 70})
    lists = torch.rand(9, 70).argsort(-1)[:, :4]
    function = methods._TORCHS[section]
    if section == DENSE_ZLPR:
        scores = torch.randn(9, 70, dtype=torch.float64).float()
        on = torch.zeros(9, 70, dtype=torch.bool).scatter_(1, lists, value=True)
        inputs, found = (scores, on), truth.of_dense(scores, on)
    else:
        inputs = torch.randn(9, 5), torch.randn(70, 5), lists
        found = truth.of_linear(section, *inputs)
    leaves = [each.clone().requires_grad_() for each in inputs[:-1]]
    step = methods.step_of(function, section)(*leaves, inputs[-1])
    assert found.loss == pytest.approx(step.loss.item(), rel=1e-5)
    for got, right in zip(step.gradients, found.gradients, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-6)


def test_labels_of_a_row_differ():
    (case,) = chosen(cases.plan(CPU, quick=True, peers=False), "linear + ZLPR")
    *_, lists = family.Multilabel().draw(case, CPU, 3)
    assert lists.shape == (64, 8)
    assert (lists.diff(dim=1) > 0).all()
    assert lists.min() >= 0
    assert lists.max() < case.shape[-1]


@pytest.mark.parametrize(("milliseconds", "used"), [(0.1, "short"), (9.0, "long")])
def test_the_timer_is_chosen_by_the_fastest(milliseconds, used, monkeypatch):
    from lastlayer.bench.multilabel import timer

    class Named:
        def __init__(self, name):
            self.name = name

        def time(self, thunks):
            yield from ((key, self.name) for key in thunks)

    took = {"fast": milliseconds, "slow": 100.0}
    monkeypatch.setattr(timer, "_milliseconds", lambda thunk: took[thunk()])
    by_length = ByLength(short=Named("short"), long=Named("long"))
    thunks = {"slow": lambda: "slow", "fast": lambda: "fast"}
    assert dict(by_length.time(thunks)) == {"slow": used, "fast": used}
    assert not dict(by_length.time({}))


def test_what_raises_is_never_the_fastest(monkeypatch):
    from lastlayer.bench.multilabel.timer import _milliseconds

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert _milliseconds(lambda: 1 / 0) == float("inf")
    assert 0 <= _milliseconds(lambda: None) < 1000
    assert Timing.of([1.0]).median_ms == 1.0


def goal(page, *parts):
    """What was measured for a goal, and the verdict."""
    (line,) = [line for line in page.splitlines() if all(part in line for part in parts)]
    measured, verdict = line.strip("| ").split(" | ")[-2:]
    return measured, verdict


def page_of(render, tmp_path, records):
    for record in records:
        append(tmp_path / "r.jsonl", record)
    return render.render(tmp_path)


def test_the_page_has_goals_and_tables(render, tmp_path):
    compiled = dict(source="torch", method="compiled", median_ms=17.0, peak_bytes=8_300_000_000)
    records = [made_up(**compiled, ratio_to_baseline=1.0), made_up(), made_up(**DENSE)]
    page = page_of(render, tmp_path, records)
    assert "## Many labels: NVIDIA H200\n" in page
    assert "GEMM 745 TFLOP/s, copy 4.26 TB/s." in page
    where = "| 1024×768×1000000 |"
    assert goal(page, where, "at most 12 ms") == ("10.4 ms", "met")
    assert goal(page, where, "at most 1 GB") == ("0.91 GB", "met")
    assert goal(page, "at least 70% of copy") == ("80%", "met")
    row = "| lastlayer linear_zlpr_loss | 10.4 | 453 | 61% | 0.61 | 0.91 | 5e-08 | 2e-03 | 3e-03 |"
    assert row in page
    assert "### Linear + ZLPR, 1024×768×1000000 bfloat16 forward+backward\n" in page
    assert "### ZLPR of scores, 4096×32768 bfloat16 forward\n" in page
    assert CUDA_SHAPES[LINEAR_ZLPR] == ((1024, 768, 1_000_000),)


def test_goals_of_a_cpu(render, tmp_path):
    cpu = dict(device="Some CPU", device_type="cpu", threads=2, dtype="float32")
    cpu |= dict(shape=CPU_SHAPES[LINEAR_ZLPR][0], baseline="torch eager")
    eager = dict(source="torch", method="eager", peak_bytes=400_000_000)
    records = [
        made_up(**cpu, **eager),
        made_up(**cpu | dict(ratio_to_baseline=0.9, peak_bytes=41_000_000)),
    ]
    page = page_of(render, tmp_path, records)
    assert goal(page, "linear_zlpr_loss: no slower than torch") == ("0.90×", "met")
    assert goal(page, "at most 10% of that one's memory") == ("10.2%", "**missed**")


def test_the_terminals_tables_fit():
    text = io.StringIO()
    for table in tables.all_of([made_up(), made_up(**DENSE)]):
        Console(file=text, width=116).print(table)
    assert max(map(len, text.getvalue().splitlines())) <= 116
    assert len(tables.all_of([made_up()])) == 1


def test_a_picture_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected timings of losses of many labels, got none"):
        times_and_memory([made_up(median_ms=None)], tmp_path / "p.png")
