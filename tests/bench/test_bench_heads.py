import io
import re
from dataclasses import replace

import pytest
import torch
from lastlayer.bench import heads as bench_heads
from lastlayer.bench import memory, runner, session, timing
from lastlayer.bench.cases import USUAL_DTYPE
from lastlayer.bench.command import chosen
from lastlayer.bench.heads import cases, entries, top, truth
from lastlayer.bench.heads.cases import AGAINST, DRAWS, STEP, TOP, TREES, Sizes
from lastlayer.bench.heads.entries import ADAPTIVE, FULL, HUFFMAN, LINEAR, SAMPLED, TWO_LEVEL
from lastlayer.bench.heads.entry import CPU, CUDA, SWEEP, WORDS, Entry
from lastlayer.bench.heads.family import Heads
from lastlayer.bench.results import read
from lastlayer.bench.timing import CpuTimer
from rich.console import Console
from torch.nn import functional

from lastlayer import heads

CPU_DEVICE = torch.device("cpu")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
SMALL = Sizes(
    steps=((12, 256, 2000),),
    words=((6, 8, 20),),
    top=(8, 16, 700),
    against=(6, 16),
    classes=(50, 200),
    draws=(400,),
    trees=(300,),
    clustered=(200,),
)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the bench of heads on tiny shapes; gives exit code, output, records, and the plot."""
    monkeypatch.setattr(runner, "_ROTATED_BYTES", 0)
    timer = CpuTimer(budget_s=0.0, fewest_samples=1, sample_ms=0.01)
    monkeypatch.setattr(Heads, "timer", lambda self, device, *, quick: timer)
    monkeypatch.setattr(timing, "_PRODUCT", {"cpu": (64, torch.float32)})
    monkeypatch.setattr(cases, "CPU_SIZES", SMALL)
    monkeypatch.setattr(cases, "QUICK_CPU_SIZES", SMALL)

    def made(*, only: str = "", quick: bool = True, plot: bool = False):
        text, path, picture = io.StringIO(), tmp_path / "r.jsonl", tmp_path / "p.png"
        code = bench_heads.run(
            device="cpu",
            quick=quick,
            only=only,
            json_path=path,
            plot_path=picture if plot else None,
            out=Console(file=text),
        )
        return code, text.getvalue(), read(path) if path.exists() else [], picture

    return made


def found_in(records):
    return {(r.section, r.shape, r.source, r.method): r for r in records}


def test_a_run_verifies_times_and_writes_down(run):
    code, text, records, picture = run(plot=True)
    assert code == 0
    assert {(r.section, r.shape) for r in records} == {
        (STEP, (12, 256, 2000)),
        (STEP, (6, 8, 20)),
        (TOP, (8, 16, 700)),
        (AGAINST, (6, 16, 50)),
        (AGAINST, (6, 16, 200)),
        (DRAWS, (400,)),
        (TREES, (300,)),
        (TREES, (200,)),
    }
    for record in records:
        assert record.verified, record
        assert record.median_ms > 0
        if record.section in (STEP, AGAINST):
            assert record.direction == "forward+backward"
            assert record.loss_error < 1e-5
            assert record.hidden_error < 1e-3
            assert record.weight_error < 1e-3
            assert record.parameters > 0
        if record.section == TOP:
            assert record.value_error < 1e-5
            assert record.classes_differ == 0
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
    assert "plot: " in text
    words = " ".join(text.split())
    for title in ("step 12×256×2000 float32", "top 10 8×16×700 float32", "300 classes"):
        assert title in words


def test_ratios_are_to_the_baseline_of_the_case(run):
    found = found_in(run(only="step")[2])
    linear, ours = (found[STEP, (12, 256, 2000), *key]
                    for key in (("torch", LINEAR), ("lastlayer", HUFFMAN)))  # fmt: skip
    assert linear.baseline == ours.baseline == f"torch {LINEAR}"
    assert linear.ratio_to_baseline == 1
    assert ours.times_faster == pytest.approx(linear.median_ms / ours.median_ms)
    gathered = found[STEP, (12, 256, 2000), "torch", "gathered paths, Huffman, sparse"]
    assert gathered.ratio_to_ours == pytest.approx(gathered.median_ms / ours.median_ms)


def test_every_head_of_the_table_is_in_a_step(run):
    made = {(r.source, r.method) for r in run(only="step")[2]}
    assert made == {(e.source, e.name) for e in entries.ENTRIES if e.on & {CPU, WORDS}}


def test_a_head_is_added_by_one_entry(run, monkeypatch):
    def build(problem):
        return heads.FullSoftmax(problem.width, problem.classes, **problem.made)

    mine = Entry("mine", build, truth.by_log_prob, frozenset({CPU, SWEEP}))
    monkeypatch.setattr(cases, "ENTRIES", (*entries.ENTRIES, mine))
    found = found_in(run()[2])
    assert found[STEP, (12, 256, 2000), "lastlayer", "mine"].verified
    assert found[AGAINST, (6, 16, 50), "lastlayer", "mine"].verified
    assert (STEP, (6, 8, 20), "lastlayer", "mine") not in found


def test_every_run_draws_the_same(run):
    first, again = run(only="top")[2], run(only="top")[2]
    assert {r.seed for r in first} == {r.seed for r in again}
    (case,) = chosen(cases.plan(CPU_DEVICE, quick=True), "top")
    inputs = [Heads().draw(case, CPU_DEVICE, 3)[0] for _ in range(2)]
    assert torch.equal(*inputs)


def test_a_wrong_gradient_is_not_timed_and_fails_the_run(run, monkeypatch):
    right = heads.FullSoftmax.forward

    def half_a_gradient(self, hidden, target):
        return right(self, hidden / 2 + hidden.detach() / 2, target)

    monkeypatch.setattr(heads.FullSoftmax, "forward", half_a_gradient)
    code, text, records, _ = run(only="cost")
    assert code == 1
    wrong = [r for r in records if r.method == FULL]
    assert {r.status for r in wrong} == {"wrong: gradient of hidden off by 5.0e-01"}
    assert {r.median_ms for r in wrong} == {None}
    assert "2 of our results failed verification" in text


def test_a_gradient_of_nan_is_wrong(run, monkeypatch):
    right = heads.FullSoftmax.forward

    def poisoned(self, hidden, target):
        loss = right(self, hidden, target)
        return loss + (self.bias - self.bias.detach()).abs().sqrt().sum()

    monkeypatch.setattr(heads.FullSoftmax, "forward", poisoned)
    code, _, records, _ = run(only="cost")
    assert code == 1
    assert {r.status for r in records if r.method == FULL} == {"wrong: gradient of bias off by nan"}


def test_a_wrong_loss_is_found(run, monkeypatch):
    right = functional.cross_entropy

    def off(*arguments, **options):
        return right(*arguments, **options) * (1.0 if "reduction" in options else 1.01)

    monkeypatch.setattr(functional, "cross_entropy", off)
    found = found_in(run(only="step")[2])
    record = found[STEP, (12, 256, 2000), "torch", LINEAR]
    assert record.status == "inexact: loss off by 1.0e-02"
    assert record.median_ms > 0


def test_wrong_classes_are_found(run, monkeypatch):
    right = heads.AdaptiveSoftmax.topk

    def second_best(self, hidden, k):
        best = right(self, hidden, k + 1)
        return heads.TopK(best.values[..., 1:], best.classes[..., 1:])

    monkeypatch.setattr(heads.AdaptiveSoftmax, "topk", second_best)
    code, _, records, _ = run(only="top")
    assert code == 1
    wrong = [r for r in records if r.method.startswith("adaptive")]
    assert len(wrong) == 2
    for record in wrong:
        assert record.status.startswith("wrong: classes whose log-probability is off by")


def test_a_class_that_is_found_twice_is_wrong(run, monkeypatch):
    right = heads.HierarchicalSoftmax.topk

    def doubled(self, hidden, k):
        best = right(self, hidden, k)
        best.classes[..., 1] = best.classes[..., 0]
        return best

    monkeypatch.setattr(heads.HierarchicalSoftmax, "topk", doubled)
    code, _, records, _ = run(only="top")
    assert code == 1
    assert {r.status for r in records if r.method.startswith("hierarchical")} == {
        "wrong: classes whose log-probability is off by inf"
    }


def test_what_would_not_fit_is_not_tried(run, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 12 * 2000 * 14 - 1)
    found = found_in(run(only="2000")[2])
    record = found[STEP, (12, 256, 2000), "torch", LINEAR]
    assert record.status.startswith("does not fit: needs about 0 GB")
    assert found[STEP, (12, 256, 2000), "lastlayer", FULL].verified


def test_a_full_run_writes_lines(run):
    _, text, _, _ = run(quick=False, only="6×8×20")
    line = r"^\d\d:\d\d:\d\d step 6×8×20 float32 lastlayer full \(fused\): [\d.]+ ms ok$"
    assert re.search(line, text, re.M)


def test_a_part_of_no_title_is_refused_with_all_titles(run, monkeypatch):
    monkeypatch.setattr(session, "measure", lambda *_, **__: pytest.fail("work was done"))
    code, text, _, _ = run(only="quadratic")
    assert code == 2
    assert "only: expected part of one of [step 12×256×2000" in text.replace("\n", " ")


def test_a_plot_of_other_cases_is_refused(run, monkeypatch):
    monkeypatch.setattr(session, "measure", lambda *_, **__: pytest.fail("work was done"))
    code, text, _, _ = run(only="trees", plot=True)
    assert code == 2
    assert "expected cases of 'cost against V', which the plot shows" in text


def test_what_cannot_be_run_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(session, "measure", lambda *_, **__: pytest.fail("work was done"))
    text = io.StringIO()
    settings = {"quick": True, "only": "", "json_path": None, "plot_path": None}
    assert bench_heads.run(device="tpu", out=Console(file=text), **settings) == 2
    assert "device: expected 'cpu' or 'cuda', got 'tpu'" in text.getvalue()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_full_plan_is_what_the_goals_need(device):
    planned = cases.plan(torch.device(device), quick=False)
    of = {section: [c for c in planned if c.section == section] for section in cases.SECTIONS}
    steps = {"cpu": [(256, 256, 50_000), (256, 256, 5_000)],
             "cuda": [(8192, 512, 50_000), (8192, 512, 1_000_000), (8192, 512, 5_000)]}  # fmt: skip
    assert [c.shape for c in of[STEP]] == steps[device]
    assert [c.shape for c in of[TOP]] == [(256, 512, 1_000_000)]
    assert [c.shape[-1] for c in of[AGAINST]] == list(cases.MANY)
    assert bool(of[TREES]) == (device == "cpu")
    assert [c.shape for c in of[DRAWS]] == [(10_000_000,) if device == "cpu" else (1_000_000,)]
    assert {c.dtype for c in of[TOP] + of[AGAINST]} == {USUAL_DTYPE[device]}
    for case in of[STEP] + of[TOP] + of[AGAINST]:
        assert case.baseline is case.methods[0]
        names = [(m.source, m.name) for m in case.methods]
        assert len(set(names)) == len(names)
        # A ratio to ours can only be written once ours was timed.
        sources = [m.is_ours for m in case.methods[1:]]
        assert sources == sorted(sources, reverse=True)
    main = {m.name for m in of[STEP][0].methods}
    assert {LINEAR, FULL, HUFFMAN, ADAPTIVE, "gathered paths, Huffman, sparse"} <= main
    swept = {FULL, HUFFMAN, TWO_LEVEL, ADAPTIVE, SAMPLED}
    assert {m.name for m in of[AGAINST][0].methods} == swept
    assert of[STEP][0].baseline.name == (LINEAR if device == "cpu" else FULL)


def test_only_looks_at_the_title():
    planned = chosen(cases.plan(CPU_DEVICE, quick=False), "COST")
    assert {c.section for c in planned} == {AGAINST}


def test_few_of_the_methods_store_scores():
    storing = [e for e in entries.ENTRIES if e.score_bytes]
    assert [e.name for e in storing] == [LINEAR]
    problem = cases.plan(CPU_DEVICE, quick=False)[0].problem
    assert storing[0].method(problem).scratch((256, 256, 50_000), 4) == 256 * 50_000 * 14


@pytest.mark.gpu
def test_a_run_on_a_gpu_measures_memory_and_times(monkeypatch, tmp_path):
    monkeypatch.setattr(cases, "QUICK_CUDA_SIZES", replace(SMALL, trees=(), clustered=()))
    text, path = io.StringIO(), tmp_path / "r.jsonl"
    settings = {"quick": True, "only": "", "json_path": path, "plot_path": None}
    assert bench_heads.run(device="cuda", out=Console(file=text), **settings) == 0
    records = read(path)
    assert {r.section for r in records} == {STEP, TOP, AGAINST, DRAWS}
    for record in records:
        assert record.verified or not record.is_ours, record
        assert record.peak_bytes is not None
    assert {e.name for e in entries.ENTRIES if CUDA in e.on} <= {r.method for r in records}
    assert top.named(top.HIERARCHICAL, 1.0) in {r.method for r in records}
