"""``lastlayer bench FAMILY``: what a family is told, and what is refused before any work."""

import inspect
import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lastlayer.cli import app

runner = CliRunner()


@pytest.fixture(params=["fused", "heads", "multilabel", "contrastive"])
def family(request):
    return request.param


@pytest.fixture
def calls(monkeypatch, family):
    """Stands in for the benchmark and keeps what it was called with."""
    made = []
    stub = ModuleType(f"lastlayer.bench.{family}")
    stub.run = lambda **options: made.append(options) or 3
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    return made


def told(family, *, peers, **options):
    """What a family is called with; heads have no peers to leave out."""
    return options if family == "heads" else options | {"peers": peers}


@pytest.mark.parametrize("picture_option", ["--png", "--plot"])
def test_options_are_passed_on(calls, family, tmp_path, picture_option):
    results, picture = tmp_path / "r.jsonl", tmp_path / "p.png"
    options = ["--quick", "--device", "cpu", "--only", "small"]
    options += [] if family == "heads" else ["--no-peers"]
    files = ["--json", str(results), picture_option, str(picture)]
    assert runner.invoke(app, ["bench", family, *options, *files]).exit_code == 3
    (call,) = calls
    assert isinstance(call.pop("out"), Console)
    assert call == told(
        family, device="cpu", quick=True, peers=False, only="small", json_path=results,
        plot_path=picture,
    )  # fmt: skip


def test_defaults(calls, family):
    runner.invoke(app, ["bench", family])
    (call,) = calls
    del call["out"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert call == told(
        family, device=device, quick=False, peers=True, only="", json_path=None, plot_path=None
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "gpu"], "--device: expected one of auto, cpu, cuda, got 'gpu'"),
        (["--png", "p.pdf"], "--plot: expected a file that ends in .png, got 'p.pdf'"),
        (["--json", "."], "--json: expected a file, got the folder '.'"),
    ],
)
def test_bad_options_are_refused_before_any_work(calls, family, arguments, message):
    result = runner.invoke(app, ["bench", family, *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert not calls


def test_the_plan_takes_what_the_command_tells_it(family):
    run = import_module(f"lastlayer.bench.{family}").run
    options = told(family, quick=True, peers=False) | run.plan_to_draw
    inspect.signature(run.plan).bind(torch.device("cpu"), **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtypes'"):
        inspect.signature(run.plan).bind(torch.device("cpu"), **options, dtypes=("float32",))
