"""A plan is measured: times that are those of the heads, and reasons where there is none."""

import json
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lastlayer.cli import app
from lastlayer.lab import costs
from lastlayer.lab.costs import PlannedHead, plan, render_plan
from lastlayer.lab.errors import LabError, SpecError
from lastlayer.lab.specs import catalogue

SIZES = ["plan", "--classes", "3000", "--hidden", "8", "--rows", "16", "--device", "cpu"]


@pytest.mark.parametrize("task", ["lm", "multilabel"])
def test_every_head_of_the_task_is_measured(task):
    found = plan(600, 8, 16, task=task)
    families = {each.head.partition(":")[0] for each in found}
    assert families == {name for name, each in catalogue().items() if task in each.tasks}
    for each in found:
        assert each.reason == ""
        assert 0 < each.low_ms <= each.ms <= each.high_ms
        assert each.samples >= 2
        assert each.parameters > 0
    assert [each.ms for each in found] == sorted(each.ms for each in found)


def test_chosen_heads_have_the_parameters_of_their_size():
    found = {each.head: each for each in plan(600, 8, 16, heads=["full", "topk:k=5"])}
    assert found.keys() == {"full", "topk:k=5"}
    assert found["full"].parameters == 600 * 9
    with pytest.raises(SpecError, match="no head 'fulll'"):
        plan(600, 8, 16, heads=["fulll"])


def test_more_work_takes_longer():
    small, large = (plan(n, 64, 512, heads=["full"])[0].ms for n in (300, 30_000))
    assert large > 3 * small


def test_what_would_take_too_long_has_a_reason_and_the_time_at_a_smaller_size(monkeypatch):
    timed = costs.Meter.time

    def slow(self, spec, classes):
        self.left -= 3.0
        return replace(timed(self, spec, classes), ms=1e3)

    monkeypatch.setattr(costs.Meter, "time", slow)
    (found,) = plan(16 * 256, 8, 16, heads=["full"], seconds=1.0)
    assert found.ms is None
    assert found.reason == costs.TOO_LONG
    assert "ms with 256 classes" in found.smaller


def test_what_would_not_fit_has_a_reason(monkeypatch):
    monkeypatch.setattr(costs, "free_memory", lambda _: 20_000)
    (found,) = plan(16 * 256, 8, 16, heads=["full"])
    assert found.reason == costs.TOO_LARGE
    with pytest.raises(LabError, match="expected a problem that fits"):
        plan(16 * 256, 100, 16, heads=["full"])


def test_few_classes():
    assert all(each.ms or each.reason for each in plan(2, 1, 1))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1, 8, 8), ValueError, "classes: expected at least 2, got 1"),
        ((10**12, 8, 8), ValueError, "classes: expected at most 20,000,000, got 1,000,000,000,000"),
        ((8, 0, 8), ValueError, "hidden: expected at least 1, got 0"),
        ((8, 8, 2.0), TypeError, "rows: expected an int, got float"),
        ((8, 8, 8, "tpu"), ValueError, "device: expected one of"),
        ((8, 8, 8, "cpu", "sums"), ValueError, "task: expected one of"),
    ],
)
def test_sizes_are_checked(arguments, error, message):
    *sizes, task = arguments if len(arguments) == 5 else (*arguments, "lm")
    with pytest.raises(error, match=message):
        plan(*sizes, task=task)


def test_the_table_tells_what_was_not_measured():
    console = Console(width=80, force_terminal=False)
    made = [
        PlannedHead("full", 9, 1.0, 0.9, 1.2, 9, 12.0, 5000, head="full"),
        PlannedHead("nce", 9, reason="no time", head="nce"),
    ]
    with console.capture() as got:
        render_plan(made, console)
    assert "1.00 ms" in got.get()
    assert "no time" in got.get()
    assert "nce" in got.get()


def test_the_command(monkeypatch):
    spec = "hierarchical:tree=two_level"
    made = [PlannedHead("slug", 3000, 1.0, 0.9, 1.2, 9, 12.0, 5000, head=spec)]
    asked = []
    monkeypatch.setattr(costs, "plan", lambda *sizes, **more: asked.append((sizes, more)) or made)
    shown = CliRunner().invoke(app, [*SIZES, "--head", "full", "--seconds", "3"])
    assert shown.exit_code == 0, shown.output
    assert asked[0][0] == (3000, 8, 16, "cpu")
    assert (asked[0][1]["heads"], asked[0][1]["seconds"]) == (("full",), 3.0)
    assert "hierarchical:tree=two_level" in shown.output
    assert "…" not in shown.output  # fits into 80 columns
    content = json.loads(CliRunner().invoke(app, [*SIZES, "--json"]).output)
    assert content["classes"] == 3000
    assert content["heads"][0]["ms"] == 1.0
    monkeypatch.undo()
    wrong = CliRunner().invoke(app, [*SIZES[:-1], "abacus"])
    assert wrong.exit_code == 2
    assert "expected one of auto, cpu, cuda, got 'abacus'" in wrong.output
    wrong = CliRunner().invoke(app, [*SIZES, "--head", "fulll"])
    assert wrong.exit_code == 2
    assert "did you mean full?" in wrong.output.replace("\n", " ")
    assert CliRunner().invoke(app, ["plan", *SIZES[3:]]).exit_code == 2
