"""Tables, pictures, the page, its targets, and the comparison of two runs."""

import pytest

from benchmarks import diff, page, plot, table
from benchmarks.__main__ import RESULTS
from benchmarks.record import append
from benchmarks.targets import FIGURES, MET, MISSED, NOT_MEASURED, REPLAYED, TARGETS, Select, Target
from benchmarks.targets import _times as times


@pytest.fixture
def case(make_record):
    base = dict(source="torch", method="compiled", median_ms=40.0)
    return [
        make_record(source="liger-kernel", method="x", median_ms=None, status="failed: X",
                    errors={}, peak_bytes=None),
        make_record(), make_record(**base), make_record(source="quack-kernels", verified=False),
    ]  # fmt: skip


def test_a_table_has_the_base_first_then_ours_then_the_others(case):
    (group,) = table.by_case(case)
    grid = table.case_grid(group)
    assert grid.title == "large width 8192×4096×128256 bfloat16 forward+backward, flat scores"
    first, ours, failed, inexact = grid.rows
    assert grid.headings == ["", "ms", "÷ base", "rate", "of limit", "memory", "errors"]
    assert first[0] == "torch compiled"
    assert ours[:6] == ["lastlayer cross_entropy", "39.8", "0.99", "653 TFLOP/s", "88%", "1.06 GB"]
    assert ours[6] == "loss 3e-07, hidden 2e-03, weight 2e-03"
    assert failed[1] == "failed: X"
    assert inexact[1] == "39.8 *inexact*"
    assert grid.markdown().count("\n") == 5
    assert grid.rich().row_count == 4


def test_a_sweep_is_one_table_with_both_times(make_record):
    records = [
        make_record(section="widths", shape=(2, n), median_ms=n / 100, replayed_ms=0.1)
        for n in (100, 2000)
    ]
    (grid,) = table.grids(records, {"widths": "columns"})
    assert grid.headings == ["columns", "lastlayer cross_entropy"]
    assert grid.rows == [["100", "1.00 (0.100)"], ["2,000", "20.0 (0.100)"]]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "·"), (0.0804, "0.080"), (1.2345, "1.23"), (12.345, "12.3"), (278.6, "279")],
)
def test_milliseconds_have_three_digits(value, shown):
    assert table.milliseconds(value) == shown


def test_bars_and_lines_are_drawn(case, make_record, tmp_path):
    swept = [make_record(section="widths", shape=(2, n), replayed_ms=1.0) for n in (10, 100)]
    plot.draw([*case, *swept], tmp_path / "p.png", {"widths": "columns"})
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="expected at least one that was timed"):
        plot.draw(case[:1], tmp_path / "q.png", {})


def test_many_cases_are_ratios(make_record, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure")
    records = [
        make_record(
            section=f"case {n}", source=source, method=method, median_ms=ms, baseline="torch CE"
        )
        for n in range(plot._MOST_PANELS + 1)
        for source, method, ms in (
            ("torch", "CE", 2.0), ("lastlayer", "ours", n + 1.0), ("torch", "CE, compiled", 1.0)
        )
    ]  # fmt: skip
    seen = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, *_, **__: seen.append(self))
    plot.draw(records, "p.png", {})
    ((panel,),) = [figure.axes for figure in seen]
    drawn = [(line.get_label(), *line.get_xdata()) for line in panel.lines[:-1]]
    ours = [ratio for name, ratio in drawn if name == "lastlayer ours"]
    assert ours == [(n + 1) / 2 for n in range(plot._MOST_PANELS + 1)]
    assert {ratio for name, ratio in drawn if name == "torch.compile"} == {0.5}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, MET),
        ({"median_ms": 42.0}, MISSED),
        ({"median_ms": 42.0, "replayed_ms": 39.0}, REPLAYED),
        ({"verified": False, "status": "wrong: x", "median_ms": None}, MISSED),
        ({"method": "another"}, NOT_MEASURED),
    ],
)
def test_a_target_is_judged_by_the_eager_time(make_record, changes, verdict):
    target = Target(Select("fused", "cuda", "large width", "cross_entropy"),
                    times("torch compiled"), 1.0)  # fmt: skip
    base = make_record(source="torch", method="compiled", median_ms=40.0)
    assert target.judge(table.by_case([base, make_record(**changes)]))[-1] == verdict


def test_the_worst_case_of_a_target_counts(make_record):
    which = Select("fused", "cuda", "large width", "cross_entropy")
    records = []
    for rows, ms in ((1, 10.0), (2, 39.0), (3, 20.0)):
        same = {"shape": (rows, 2, 3)}
        records += [make_record(**same, median_ms=ms), make_record(**same, source="torch",
                    method="compiled", median_ms=40.0)]  # fmt: skip
    row = Target(which, times("torch compiled"), 0.5).judge(table.by_case(records))
    assert row[1].startswith("large width 2×2×3")
    assert row[2:] == ["0.97 ×", "·", MISSED]


def test_the_page_opens_with_figures_and_misses_are_bold(make_record, tmp_path):
    assert len(FIGURES) == len({figure.which for figure in FIGURES})
    assert len(TARGETS) > 60
    for each in (make_record(), make_record(source="torch", method="compiled", median_ms=30.0)):
        append(tmp_path / "r.jsonl", each)
    made = page.render(tmp_path)
    (line,) = [line for line in made.splitlines() if line.startswith("| `linear_cross_entropy`, w")]
    assert "| 39.8 | · | torch compiled | 30.0 | **1.33** | 1.06 GB |" in line
    assert "at abc1234 with" in made
    assert "## Fused losses: NVIDIA H200" in made


def test_without_records_the_page_says_so(tmp_path):
    assert "No measurements have been recorded yet." in page.render(tmp_path)


def test_the_committed_page_is_what_the_committed_records_give():
    assert page.PAGE.read_text(encoding="utf-8") == page.render(RESULTS), (
        "docs/performance.md is out of date: python -m benchmarks page"
    )


def test_two_runs_are_compared_the_worst_first(make_record, tmp_path, capsys):
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    slower, faster, peer = dict(shape=(1, 2, 3)), dict(shape=(4, 5, 6)), dict(source="torch")
    for changes, before, after in ((slower, 10.0, 11.0), (faster, 10.0, 9.0), (peer, 10.0, 30.0)):
        append(old, make_record(**changes, median_ms=before))
        append(new, make_record(**changes, median_ms=after, run="2", commit="def"))
    append(old, make_record(section="gone"))
    assert diff.report(old, new, limit=1.03, everything=False) == 1
    shown = capsys.readouterr().out
    assert shown.index("1×2×3") < shown.index("4×5×6")
    assert "torch cross_entropy" not in shown
    assert "1 of 2 of our methods take more than 1.03 times as long; 1 were not" in shown
    assert diff.report(old, new, limit=1.2, everything=True) == 0
    with pytest.raises(ValueError, match="expected a full run of a method"):
        diff.report(old, RESULTS / "maps-cpu.jsonl", limit=1.0, everything=False)
