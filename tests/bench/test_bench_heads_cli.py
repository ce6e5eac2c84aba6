import sys
from types import ModuleType

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lastlayer.cli import app

runner = CliRunner()


@pytest.fixture
def calls(monkeypatch):
    """Stands in for the benchmark and keeps what it was called with."""
    made = []
    stub = ModuleType("lastlayer.bench.heads")
    stub.run = lambda **options: made.append(options) or 3
    monkeypatch.setitem(sys.modules, "lastlayer.bench.heads", stub)
    return made


@pytest.mark.parametrize("picture_option", ["--png", "--plot"])
def test_options_are_passed_on(calls, tmp_path, picture_option):
    results, picture = tmp_path / "heads.jsonl", tmp_path / "heads.png"
    options = ["--quick", "--device", "cpu", "--only", "step"]
    files = ["--json", str(results), picture_option, str(picture)]
    assert runner.invoke(app, ["bench", "heads", *options, *files]).exit_code == 3
    (call,) = calls
    assert isinstance(call.pop("out"), Console)
    assert call == {
        "device": "cpu",
        "quick": True,
        "only": "step",
        "json_path": results,
        "plot_path": picture,
    }


def test_defaults(calls):
    runner.invoke(app, ["bench", "heads"])
    (call,) = calls
    del call["out"]
    assert call == {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "quick": False,
        "only": "",
        "json_path": None,
        "plot_path": None,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "gpu"], "--device: expected one of auto, cpu, cuda, got 'gpu'"),
        (["--png", "heads.pdf"], "--plot: expected a file that ends in .png, got 'heads.pdf'"),
        (["--json", "."], "--json: expected a file, got the folder '.'"),
    ],
)
def test_bad_options_are_refused_before_any_work(calls, arguments, message):
    result = runner.invoke(app, ["bench", "heads", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert not calls
