"""The sweep: every public call is in it, plain torch code is what it stands for, and its table."""

from importlib import import_module

import pytest
import torch

from benchmarks import driver, page, sweep, sweep_heads
from benchmarks.__main__ import main
from benchmarks.heads import Problem
from benchmarks.record import append, read
from benchmarks.sweep import SPECS, Size
from lastlayer import heads

CPU = torch.device("cpu")
SMALL = Size(6, 8, 70)
PROBLEM = Problem(5, 8, 40, torch.float64, CPU)
CALLED = {spec.name.partition(",")[0] for spec in SPECS}


def judged(case, method):
    return driver._verify(case, method, case.work(method), case.draw(CPU, 3), {})


@pytest.mark.parametrize("package", ["", ".losses", ".fused", ".maps"])
def test_every_public_name_is_in_the_sweep_or_has_a_reason(package):
    public = set(import_module(f"lastlayer{package}").__all__)
    assert public <= CALLED | sweep.NOT_TIMED.keys()
    assert not CALLED & sweep.NOT_TIMED.keys()


def test_every_registered_head_is_in_the_sweep():
    planned = {case.section for case in sweep_heads.cases(SMALL, CPU)}
    for name, (_, recipe) in heads.registered().items():
        calls = [c for c in sweep_heads.CALLS if recipe.task == "lm" or c != sweep_heads.SAMPLE]
        assert {f"head {name}: {call}" for call in calls} <= planned


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_calls_are_verified(spec, dtype):
    case = spec.case(SMALL, dtype)
    for method in case.methods:
        facts = judged(case, method)
        assert facts["verified"], (method.label, facts)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_torchs_code_computes_the_same_or_is_marked(spec):
    """Where no other reference is given, torch's code is one; where one is, it differs."""
    if spec.exact is None:
        return
    case = spec.case(SMALL, "float64")
    inputs = case.draw(CPU, 5)
    one, other = (case.reference(computed, inputs) for computed in ("torch", spec.name))
    if "indices" not in one:
        name = "loss" if "loss" in one else "probs"
        assert driver.relative_error(one[name], other[name]) > 1e-6


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", sweep_heads.recipes())
@pytest.mark.parametrize("call", sweep_heads.CALLS)
def test_calls_of_heads_are_verified(name, call):
    cases = [c for c in sweep_heads.cases(SMALL, CPU) if c.section == f"head {name}: {call}"]
    for case in cases:
        for method in case.methods:
            facts = judged(case, method)
            assert facts["verified"], (method.label, facts)


def test_wrong_results_of_heads_are_found(monkeypatch):
    (case,) = [c for c in sweep_heads.cases(SMALL, CPU) if c.section == "head full: topk 10"]
    right = heads.FullSoftmax.topk
    for wrong in (
        lambda self, h, k: heads.TopK(*(x[:, 1:] for x in right(self, h, k + 1))),
        lambda self, h, k: heads.TopK(right(self, h, k).values + 0.01, right(self, h, k).classes),
        lambda self, h, k: heads.TopK(right(self, h, k).values, right(self, h, k).classes.flip(-1)),
    ):
        monkeypatch.setattr(heads.FullSoftmax, "topk", wrong)
        assert judged(case, case.methods[1])["status"].startswith("log_prob off by")


def test_the_plain_character_network_is_that_of_the_head():
    head = sweep_heads.built("char_cnn", PROBLEM)
    plain = sweep_heads._PlainSpellings(head)
    torch.testing.assert_close(plain.vectors(), head.class_vectors(), rtol=1e-12, atol=1e-14)
    hidden, target = PROBLEM.draw(CPU, 4)
    one, other = (
        torch.autograd.grad(module(hidden, target), list(head.parameters()))
        for module in (plain, head)
    )
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-13)


@pytest.fixture
def pair(make_record):
    def made(section, ms, **changes):
        same = dict(family="sweep", section=section, baseline="torch softmax", scores=None)
        base = dict(source="torch", method="softmax", computes="torch", p20_ms=1.0)
        ours = dict(method=section, computes=section, p20_ms=ms, peak_bytes=1_060_000_000)
        return [make_record(**same, **base), make_record(**same, **ours | changes)]

    return made


def test_the_table_has_the_worst_first_and_the_page_the_misses(pair, tmp_path):
    failed = dict(median_ms=None, p20_ms=None, status="wrong: x", verified=False, peak_bytes=None)
    records = [
        *pair("a", 1.05), *pair("b", 3.0, computes="torch"), *pair("c", 1.0, peak_bytes=2 * 10**9),
        *pair("head hierarchical: log_prob all", 2.5), *pair("d", None, **failed),
    ]  # fmt: skip
    (grid,) = sweep.shown(records, misses=False)
    assert [row[0][0] for row in grid.rows] == ["d", "b", "h", "c", "a"]
    assert grid.title.startswith("3 of 5 calls take more than 1.1 times torch's time, 1 more than")
    assert grid.rows[0][1] == "wrong: x"
    assert grid.rows[1][3:] == ["softmax", "1.00", "1.06 GB", "3.00", "1.00"]
    assert grid.rows[3][3] == "softmax (other function)"
    assert grid.rows[3][-1] == "1.89"
    for each in records:
        append(tmp_path / "r.jsonl", each)
    made = page.render(tmp_path)
    section = made[made.index("## Every call: NVIDIA H200") :]
    assert section.count("\n| ") == 2 + 4
    assert "every node of the tree must be computed" in section
    assert "Targets" not in section


def test_small_peaks_are_not_compared(pair):
    base, ours = pair("a", 1.0, peak_bytes=900)
    assert sweep.memory_ratio(ours, base) == pytest.approx(9e-7, rel=0.1)
    (base, _), (ours, _) = pair("a", 1.0), pair("a", 1.0)
    small = [driver.replace(each, peak_bytes=900) for each in (ours, base)]
    assert sweep.memory_ratio(*small) is None


def test_a_run_shares_its_seconds_and_appends_records(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sweep.SIZES, "cpu", (SMALL,))
    budgets = []
    measure = driver.Run.measure
    monkeypatch.setattr(
        driver.Run, "measure", lambda s, c: budgets.append(s.clock) or measure(s, c)
    )
    path = tmp_path / "r.jsonl"
    options = ["--quick", "--device", "cpu", "--only", "softmax_loss", "--seconds", "0"]
    assert main(["sweep", *options, "--json", str(path)]) == 0
    assert {r.section for r in read(path)} == {
        "topk_softmax_loss", "in_batch_softmax_loss", "linear_topk_softmax_loss"
    }  # fmt: skip
    assert {(c.budget_s, c.fewest_samples) for c in budgets} == {(0.0, driver._FEWEST)}
    assert "of 3 calls take more than 1.1 times torch's time" in capsys.readouterr().out
