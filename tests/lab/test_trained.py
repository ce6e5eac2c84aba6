"""What a trained run is good for: text, an export, and how far it is while it trains."""

import io
import json
from math import inf
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lastlayer.cli import app
from lastlayer.lab.comparison import compare
from lastlayer.lab.data import DataError
from lastlayer.lab.errors import LabError
from lastlayer.lab.live import EventLines, LiveTable, Watcher, outcome, watcher
from lastlayer.lab.options import CompareOptions
from lastlayer.lab.specs import parse_specs
from lastlayer.lab.trained import as_text, export, generate, load_trained, prompt_tokens
from lastlayer.lab.training import Progress

runner = CliRunner()
LINE = "one two three four five six seven eight nine ten\n"


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """Two heads that know a text by heart."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "numbers.txt").write_text(LINE * 80)
    options = CompareOptions(
        data=str(folder / "numbers.txt"), heads=("full", "hierarchical"), budget="120steps",
        seeds=1, model="bag", width=16, batch=8, length=8, lr=0.05,
    )  # fmt: skip
    compare(options, folder / "out", resume=False, console=Console(quiet=True))
    return folder / "out"


@pytest.mark.parametrize("slug", ["full-s1", "hierarchical-s1"])
def test_it_goes_on_as_the_text_does(out, slug):
    trained = load_trained(out / "runs" / slug)
    steps = list(generate(trained, ["one", "two"], tokens=4, top=3, temperature=0.0, seed=0))
    assert [step.token for step in steps] == ["three", "four", "five", "six"]
    for step in steps:
        assert step.top[0] == (step.token, pytest.approx(step.p, rel=1e-4))
        assert len(step.top) == 3


def test_draws_repeat_with_their_seed(out):
    trained = load_trained(out / "runs" / "full-s1")
    options = {"tokens": 20, "top": 1, "temperature": 1000.0}
    one, again, other = (
        [step.token for step in generate(trained, [], seed=seed, **options)] for seed in (1, 1, 2)
    )
    assert one == again != other


def test_the_command_prints_text_and_the_best_of_each_step(out):
    words = ["generate", str(out / "runs" / "full-s1"), "--prompt", "one", "--tokens", "3"]
    result = runner.invoke(app, [*words, "--temperature", "0"])
    assert result.exit_code == 0, result.output
    assert result.output.rstrip().endswith("one two three four")
    made = json.loads(runner.invoke(app, [*words, "--json", "--top", "2"]).stdout)
    assert len(made["steps"]) == 3
    assert all(len(step["top"]) == 2 for step in made["steps"])


def test_words_of_the_prompt_that_are_not_known_are_named(out):
    words = [
        "generate",
        str(out / "runs" / "full-s1"),
        "--prompt",
        "one zebra two zebra",
        "--tokens",
    ]
    result = runner.invoke(app, [*words, "1"])
    assert "read as <unk>: 'zebra'\n" in result.stderr
    assert json.loads(runner.invoke(app, [*words, "1", "--json"]).stdout)["unknown"] == ["zebra"]


def test_lines_end_where_the_text_says():
    assert as_text(["a", "b", "<eos>", "c", "<eos>"]) == "a b\nc"
    assert as_text(["import", "os", "<newline>", "os", ".", "path"]) == "import os\nos . path"


@pytest.mark.parametrize(
    ("form", "prompt", "tokens"),
    [
        ("text", "one two.\nthree", ["one", "two.", "<eos>", "three"]),
        ("json lines", "f(x)", ["f(x)"]),
        ("python source", "f(x)", ["f", "(", "x", ")"]),
        ("python source", "for i in range(", ["for", "i", "in", "range", "("]),
        ("python source", "if a:\n    b\n", ["if", "a", ":", "<newline>", "b", "<newline>"]),
        ("python source", "", []),
    ],
)
def test_a_prompt_is_cut_as_the_data_was(out, form, prompt, tokens):
    trained = load_trained(out / "runs" / "full-s1")
    trained.config["data"]["description"]["format"] = form
    assert prompt_tokens(trained, prompt) == tokens


@pytest.mark.parametrize("prompt", ["if a:\n    b\n  c", 'x = "half', "a ? b"])
def test_a_prompt_that_is_not_source_is_refused(out, prompt):
    trained = load_trained(out / "runs" / "full-s1")
    trained.config["data"]["description"]["format"] = "python source"
    with pytest.raises(DataError, match="--prompt: expected Python source"):
        prompt_tokens(trained, prompt)


def test_an_export_stands_alone(out, tmp_path):
    result = runner.invoke(
        app, ["export", str(out / "runs" / "hierarchical-s1"), "--to", str(tmp_path / "model")]
    )
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names >= {"model.safetensors", "head", "config.json", "vocabulary.json", "result.json"}
    here, there = load_trained(tmp_path / "model"), load_trained(out / "runs" / "hierarchical-s1")
    tokens = torch.tensor([here.vocabulary.encode(["one", "two"]).tolist()])
    with torch.no_grad():
        scores = [each.head.log_prob(each.body(tokens)) for each in (here, there)]
    assert torch.equal(*scores)


@pytest.mark.parametrize("command", ["generate", "export"])
def test_other_folders_are_refused(out, tmp_path, command):
    more = ["--to", str(tmp_path / "to")] if command == "export" else []
    result = runner.invoke(app, [command, str(tmp_path), *more])
    assert result.exit_code == 2
    assert "RUN: expected the folder of a finished run" in result.output
    result = runner.invoke(app, [command, str(out), *more])
    assert result.exit_code == 2
    assert "RUN: expected one run, got 2 in" in result.output


def test_python_names_its_own_arguments(out, tmp_path):
    with pytest.raises(LabError, match="path: expected the folder of a finished run"):
        load_trained(tmp_path)
    with pytest.raises(LabError, match="to: expected a folder that is new or empty"):
        export(out / "runs" / "full-s1", out)


def test_an_export_does_not_overwrite(out, tmp_path):
    (tmp_path / "precious").write_text("mine")
    run = str(out / "runs" / "full-s1")
    result = runner.invoke(app, ["export", run, "--to", str(tmp_path)])
    assert result.exit_code == 2
    assert "--to: expected a folder that is new or empty" in result.output


def test_a_run_of_labels_makes_no_text(out):
    trained = load_trained(out / "runs" / "full-s1")
    trained.config["model"]["task"] = "multilabel"
    with pytest.raises(LabError, match="trained: expected a run of the task lm"):
        next(generate(trained, [], tokens=1, top=1, temperature=1.0, seed=0))


DONE = {"status": "ok", "step_ms": 4.0, "test": {"perplexity": 12.5}}


def told(terminal: bool, quiet: bool = False) -> tuple[object, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, quiet=quiet)
    return watcher(console, parse_specs(["full", "nce"]), [1]), file


def test_a_terminal_gets_a_table_of_all_heads():
    watching, file = told(terminal=True)
    full, nce = parse_specs(["full", "nce"])
    assert isinstance(watching, LiveTable)
    watching.starts(full, 1)
    watching.searches(full)
    assert "full: short runs to find its learning rate" in file.getvalue()
    watching._drawn = -1e9
    watching.moves(0.5, Progress(step=5, seconds=0.1), 3.25)
    watching.ends(full, 1, DONE)
    watching.ends(nce, 1, {"status": "out of memory", "reason": "tried to allocate 9 GB"})
    watching.close()
    shown = file.getvalue()
    for text in ("full", "nce", "3.250", "perplexity 12.5", "out of memory: tried to allocate"):
        assert text in shown


def test_what_came_out_fits_into_80_columns():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    specs = parse_specs([])
    watching = LiveTable(console, specs, [1, 2, 3])
    for spec in specs:
        watching.ends(spec, 1, {**DONE, "step_ms": 123.4, "test": {"perplexity": 12345.6}})
    watching.close()
    with console.capture() as got:
        console.print(watching._table())
    assert got.get().count("12,346") == len(specs)


def test_what_is_said_stays_below_the_table():
    watching, file = told(terminal=True)
    watching.says("Stopping")
    watching.starts(parse_specs(["full"])[0], 1)
    watching._drawing = True  # a signal came while the table is drawn
    watching.says("Stopping now")
    assert "Stopping now" not in file.getvalue()
    watching._draw()
    watching.close()
    assert "Stopping now" in file.getvalue()


def test_elsewhere_there_are_lines():
    watching, file = told(terminal=False)
    (full, _) = parse_specs(["full", "nce"])
    assert isinstance(watching, EventLines)
    watching.starts(full, 1)
    watching.searches(full)
    watching._told = -1e9
    watching.moves(0.5, Progress(step=5), 3.25)
    watching.ends(full, 1, DONE)
    searched, moved, ended = file.getvalue().splitlines()
    assert searched.endswith("full: short runs to find its learning rate")
    assert "full seed 1: 50%, step 5, loss 3.25; 0:0" in moved
    assert "1/2 full seed 1: perplexity 12.5 (about " in ended


def test_quiet_shows_nothing():
    watching, file = told(terminal=True, quiet=True)
    assert type(watching) is Watcher
    watching.starts(parse_specs(["full"])[0], 1)
    watching.close()
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (DONE, "perplexity 12.5"),
        ({"status": "ok", "test": {"perplexity": 12345.6}}, "perplexity 12,346"),
        ({"status": "nan", "test": None}, "nan"),
        (
            {"status": "ok", "test": {"perplexity": None, "eps_perplexity": 30.0, "coverage": 0.9}},
            "ε-perplexity 30, covers 90.0%",
        ),
        (
            {"status": "ok", "test": {"perplexity": inf, "eps_perplexity": 30.0, "coverage": 0.9}},
            "ε-perplexity 30, covers 90.0%",
        ),
        ({"status": "ok", "test": {"micro_f1": 0.5}}, "micro-F1 0.500"),
    ],
)
def test_outcomes_in_a_few_words(result, text):
    assert outcome(result) == text
