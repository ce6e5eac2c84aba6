"""``lastlayer plan --ranks``: what heads cost over processes, without their memory."""

import json
import resource
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lastlayer.cli import app
from lastlayer.lab.commands import whole_number
from lastlayer.lab.errors import LabError
from lastlayer.lab.process_plan import MOST_TABLES, plan_processes, render_processes
from lastlayer.lab.specs import catalogue

RANKS = ["plan", "--classes", "100M", "--ranks", "64"]
runner = CliRunner()


@pytest.mark.parametrize("task", ["lm", "multilabel"])
def test_every_head_of_the_task_is_planned(task):
    names = [name for name, each in catalogue().items() if task in each.tasks]
    found = plan_processes(3000, 16, 8, 4, task=task, heads=names)
    assert [each.head for each in found] == names
    for each in found:
        assert each.plan is not None, each
        assert each.plan.n_classes == 3000
    spread = {each.head for each in found if not each.plan["class-parallel"].refused}
    assert spread == {*names} - {"adaptive_importance"}


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is told in other units")
def test_a_billion_classes_take_no_memory():
    heads = ["full", "entmax", "topk", "self_normalized", "sampled", "nce", "negative", "adaptive"]
    plan_processes(3000, 16, 8, 4, heads=heads)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = plan_processes(10**9, 512, 128, 256, heads=[*heads, "differentiated"], memory=80)
    assert all(each.plan.layout == "class-parallel" for each in found)
    # In kilobytes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.parametrize(
    "head", ["hierarchical", "char_cnn", "adaptive_importance", "sampled:sampler=unigram"]
)
def test_what_needs_a_table_of_all_classes_has_a_reason(head):
    (found,) = plan_processes(2 * MOST_TABLES, 16, 8, 4, heads=[head])
    assert found.plan is None
    assert f"at most {MOST_TABLES:,} classes" in found.reason
    assert found.as_json() == {"head": head, "reason": found.reason}
    console = Console(width=80, force_terminal=False)
    with console.capture() as got:
        render_processes([found], console)
    assert f"{head}: not planned: expected at most" in got.get()


def test_the_spec_counts():
    (few, many) = plan_processes(10**6, 16, 8, 4, heads=["nce:n_samples=10", "nce:n_samples=1000"])
    few, many = (each.plan["class-parallel"] for each in (few, many))
    assert many.nbytes > 10 * few.nbytes


def test_the_command():
    shown = runner.invoke(app, RANKS)
    assert shown.exit_code == 0, shown.output
    for words in ("replicate (DDP)", "FSDP2", "class-parallel", "too large", "fits", "Take class"):
        assert words in shown.output
    assert "FullSoftmax(512, 100,000,000)" in shown.output
    assert "…" not in shown.output
    content = json.loads(
        runner.invoke(app, [*RANKS, "--json", "--hidden", "64", "--gbps", "100"]).output
    )
    assert (content["classes"], content["hidden"], content["ranks"]) == (10**8, 64, 64)
    (head,) = content["heads"]
    assert (head["head"], head["layout"]) == ("full", "class-parallel")
    assert [each["name"] for each in head["layouts"]] == ["replicate", "fsdp", "class-parallel"]
    assert all(each["seconds"] > 0 for each in head["layouts"])


@pytest.mark.parametrize(
    ("text", "number"),
    [("250000", 250_000), ("250k", 250_000), ("1.5M", 1_500_000), ("1B", 10**9), ("2_000", 2000)],
)
def test_counts_as_people_write_them(text, number):
    assert whole_number(text) == number


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--classes", "10Q"], "expected a whole number such as"),
        (["--classes", "1.5"], "expected a whole number such as"),
        (["--classes", "-5"], "expected a whole number such as"),
        (["--classes", "1"], "--classes: expected at least 2, got 1"),
        (["--rows", "0"], "--rows: expected at least 1, got 0"),
        (["--ranks", "0"], "'--ranks'"),
        (["--memory", "0"], "--memory: expected a finite number above 0"),
        (["--gbps", "-1"], "--gbps: expected a finite number above 0"),
        (["--dtype", "int8"], "--dtype: expected one of float32, bfloat16, float16, got 'int8'"),
        (["--task", "pairs"], "--task: expected one of lm"),
        (["--head", "fulll"], "did you mean full?"),
        (["--head", "topk:k=x"], "expected int, got 'x'"),
    ],
)
def test_mistakes_have_exit_code_2(words, message):
    result = runner.invoke(app, [*RANKS, *words])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_sizes_are_needed_where_steps_are_measured():
    result = runner.invoke(app, ["plan", "--classes", "100", "--hidden", "8"])
    assert result.exit_code == 2
    assert "--rows: expected a number without --ranks, got none" in result.output


def test_arguments_are_checked():
    with pytest.raises(LabError, match="--ranks: expected at least 1"):
        plan_processes(100, 8, 8, 0)
