"""The commands of the lab: instant help, mistakes told in one message, and one whole comparison."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lastlayer.cli import app

runner = CliRunner()
COMMANDS = ("compare", "inspect", "plan", "show", "report", "generate", "export")


def test_help_imports_neither_torch_nor_numpy():
    program = (
        "import sys\n"
        "from lastlayer.cli import app\n"
        "from typer.testing import CliRunner\n"
        f"for name in {COMMANDS!r}:\n"
        "    result = CliRunner().invoke(app, [name, '--help'])\n"
        "    assert result.exit_code == 0, result.output\n"
        "print(sorted({'torch', 'numpy', 'numba', 'altair', 'safetensors'} & sys.modules.keys()))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ran.stdout.strip(), ran.returncode) == ("[]", 0), ran.stderr


def test_the_program_lists_every_command():
    shown = runner.invoke(app, ["--help"]).output
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "no/such.txt"], "no/such.txt"),
        (["inspect", "no/such.txt"], "no/such.txt"),
        (["show", "no/such/run"], "no/such/run"),
        (["report", "no/such/folder"], "no/such/folder"),
        (["generate", "no/such/run"], "no/such/run"),
        (["export", "no/such/run", "--to", "there"], "no/such/run"),
        (["plan", "--classes", "10", "--hidden", "4", "--rows", "2", "--device", "tpu"], "tpu"),
        (["plan", "--classes", "9" * 12, "--hidden", "4", "--rows", "2"], "at most 20,000,000"),
        (["compare", "--task", "multilabel", "--model", "lstm"], "expected bag for --task"),
        (["compare", "--seeds", "9" * 12], "--seeds: expected at most 10,000"),
        (["compare", "--head", ":"], "no head ''; there are adaptive"),
        (["compare", "--head", "broken_module:Head"], "broken_module.py:1: "),
    ],
)
def test_mistakes_have_exit_code_2(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_module.py").write_text("def (:")
    result = runner.invoke(app, words)
    assert result.exit_code == 2, result.output
    assert message in result.output.replace("\n", "")
    assert "Traceback" not in result.output
    assert not list(tmp_path.rglob("*.json"))


ARFF = "@relation made\n@attribute size numeric\n@attribute red {0,1}\n@data\n"
XML = '<labels xmlns="http://mulan.sourceforge.net/labels"><label name="%s"></label></labels>'
BROKEN = {
    "empty": ({"data.txt": b""}, []),
    "binary": ({"data.txt": bytes(range(256)) * 8}, []),
    "one token": ({"data.txt": b"alone"}, []),
    "one class": ({"data.txt": b"same " * 200}, []),
    "wrong encoding": ({"data.txt": "größer als \xe4lter ".encode("latin-1") * 50}, []),
    "labels, not text": ({"data.arff": (ARFF + "1,1\n" * 20).encode()}, ["--task", "lm"]),
    "missing values": (
        {"data.arff": (ARFF + "?,1\n" * 20).encode(), "data.xml": (XML % "red").encode()},
        ["--task", "multilabel"],
    ),
    "other labels": (
        {"data.arff": (ARFF + "1,1\n" * 20).encode(), "data.xml": (XML % "blue").encode()},
        ["--task", "multilabel"],
    ),
}


# Remedies name options of the command, not arguments of Python.
SAID = {
    "one class": "one class: the training part has one word alone",
    "wrong encoding": "perhaps --encoding latin-1",
    "labels, not text": "give --task classification or --task multilabel",
    "missing values": "data.arff:5: a missing value (?) of 'size'",
    "other labels": "labels are no attributes of data.arff: 'blue'",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_data_is_told_before_any_work(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files, options = BROKEN[kind]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    result = runner.invoke(app, ["compare", next(iter(files)), *options, "--out", "out"])
    assert result.exit_code == 2, result.output
    told = result.output.replace("\n", "")
    assert "data." in told
    assert SAID.get(kind, "") in told
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_from_a_text_to_a_page(tmp_path, monkeypatch):
    """Everything that a person sees: lines on the way, the table, the verdict, the page."""
    monkeypatch.chdir(tmp_path)
    # Pictures take seconds, and the tests of the report draw them.
    monkeypatch.setattr("lastlayer.lab.report._draw", lambda *_: None)
    (tmp_path / "text.txt").write_text("the cat saw the dog and the dog saw a cat\n" * 60)
    words = ["--head", "full", "--head", "hierarchical", "--head", "sampled:n_samples=4"]
    size = ["--model", "bag", "--width", "8", "--budget", "6steps", "--seeds", "2"]
    result = runner.invoke(app, ["compare", "text.txt", *words, *size])
    assert result.exit_code == 0, result.output
    (out,) = (tmp_path / "lastlayer-runs").iterdir()
    assert out.name.startswith("text-")
    assert "6/6 sampled n_samples=4" in result.output
    page = out / "report.html"
    assert str(page.relative_to(tmp_path)) in result.output.replace("\n", "")
    assert "<html" in page.read_text(encoding="utf-8")
    assert (out / "summary.csv").read_text().count("\n") == 4
    shown = runner.invoke(app, ["show", str(out), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)
