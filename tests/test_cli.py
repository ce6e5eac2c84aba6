"""The `lastlayer` command: cheap help, clear refusals, and a doctor that tells the truth."""

import io
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lastlayer import _doctor, kernels
from lastlayer.cli import app

runner = CliRunner()


@pytest.fixture
def bench_calls(monkeypatch):
    """Stands in for the benchmark and keeps what it was called with."""
    calls = []
    stub = ModuleType("lastlayer.bench.maps")
    stub.run = lambda **options: calls.append(options) or 3
    monkeypatch.setitem(sys.modules, "lastlayer.bench.maps", stub)
    return calls


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["bench", "--help"],
        ["bench", "maps", "--help"],
        ["compare", "--help"],
    ],
    ids=" ".join,
)
def test_help_and_version_import_no_torch(arguments):
    program = (
        "import sys\n"
        f"sys.argv = ['lastlayer', *{arguments!r}]\n"
        "from lastlayer.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'numba', 'triton', 'matplotlib'} & sys.modules.keys()\n"
        "    print('imported:', sorted(heavy), file=sys.stderr)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    assert ran.stderr.strip() == "imported: []"


def test_version_is_the_installed_one():
    assert runner.invoke(app, ["--version"]).output.strip() == metadata.version("lastlayer")


def test_bench_maps_passes_its_options_on(bench_calls, tmp_path):
    results, picture = tmp_path / "maps.jsonl", tmp_path / "maps.png"
    options = ["--quick", "--no-peers", "--device", "cpu", "--json", results, "--plot", picture]
    dtypes = ["--dtype", "bfloat16", "--dtype", "float32", "--dtype", "bfloat16"]
    result = runner.invoke(app, ["bench", "maps", *map(str, options), *dtypes])
    assert result.exit_code == 3
    (call,) = bench_calls
    assert isinstance(call.pop("out"), Console)
    assert call == {
        "device": "cpu",
        "dtypes": ("bfloat16", "float32"),
        "quick": True,
        "peers": False,
        "json_path": results,
        "plot_path": picture,
    }


def test_bench_maps_defaults(bench_calls):
    runner.invoke(app, ["bench", "maps"])
    (call,) = bench_calls
    del call["out"]
    assert call == {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "dtypes": (),
        "quick": False,
        "peers": True,
        "json_path": None,
        "plot_path": None,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "gpu"], "--device: expected one of auto, cpu, cuda, got 'gpu'"),
        (
            ["--dtype", "float32", "--dtype", "int8"],
            "--dtype: expected one of float32, bfloat16, float16, float64, got 'int8'",
        ),
        (["--plot", "maps.pdf"], "--plot: expected a file that ends in .png, got 'maps.pdf'"),
        (["--plot", "no/maps.png"], "--plot: expected a file in an existing folder, got 'no/"),
        (["--json", "no/maps.jsonl"], "--json: expected a file in an existing folder, got 'no/"),
        (["--json", "."], "--json: expected a file, got the folder '.'"),
    ],
)
def test_bad_options_are_refused_before_any_work(
    bench_calls, monkeypatch, tmp_path, arguments, message
):
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["bench", "maps", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1
    assert not bench_calls
    assert not list(tmp_path.iterdir())


def test_cuda_is_refused_where_there_is_none(bench_calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = runner.invoke(app, ["bench", "maps", "--device", "cuda"])
    assert result.exit_code == 2
    assert "--device: expected a CUDA GPU that torch can use, got none" in result.output
    assert "--device cpu" in result.output
    assert not bench_calls


def test_plot_names_the_extra_it_needs(bench_calls, monkeypatch, tmp_path):
    monkeypatch.setattr("lastlayer.cli.find_spec", lambda name: None)
    result = runner.invoke(app, ["bench", "maps", "--plot", str(tmp_path / "maps.png")])
    assert result.exit_code == 2
    assert 'pip install "lastlayer[lab]"' in result.output
    assert not bench_calls


def test_doctor_json_agrees_with_what_it_reports_on():
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)

    assert report["versions"]["lastlayer"] == metadata.version("lastlayer")
    assert report["versions"]["torch"] == metadata.version("torch")
    assert [device["type"] for device in report["devices"]].count("cuda") == (
        torch.cuda.device_count()
    )
    assert report["devices"][0]["device"] == "cpu"
    assert report["devices"][0]["threads"] == torch.get_num_threads()
    assert {name: each["reason"] for name, each in report["implementations"].items()} == (
        kernels.available()
    )
    assert {row["op"] for row in report["kernels"]} >= {"entmax", "entmax_support", "topk_softmax"}
    for row in report["kernels"]:
        dtype = getattr(torch, row["dtype"])
        assert row["implementation"] == kernels.selected(row["op"], row["device_type"], dtype)


def test_doctor_text_names_every_operation_and_extra():
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0
    report = _doctor.examine()
    for name in [row.op for row in report.kernels] + [extra.name for extra in report.extras]:
        assert name in result.output


def test_doctor_says_how_to_add_a_missing_extra(monkeypatch):
    version = _doctor._version
    monkeypatch.setattr(
        _doctor, "_version", lambda name: None if name == "matplotlib" else version(name)
    )
    report = _doctor.examine()
    (lab,) = [extra for extra in report.extras if extra.name == "lab"]
    assert [requirement.split(">")[0] for requirement in lab.missing] == ["matplotlib"]
    assert lab.command == 'pip install "lastlayer[lab]"'

    narrow = io.StringIO()
    _doctor.render(report, Console(file=narrow, width=40))
    assert 'pip install "lastlayer[lab]"' in narrow.getvalue()


def test_doctor_sees_a_requirement_that_is_too_old(monkeypatch):
    version = _doctor._version
    monkeypatch.setattr(
        _doctor, "_version", lambda name: "0.1" if name == "matplotlib" else version(name)
    )
    lacking = {extra.name: extra.missing for extra in _doctor.examine().extras}
    assert any(requirement.startswith("matplotlib>=") for requirement in lacking["lab"])


def test_doctor_works_from_a_tree_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(_doctor, "_version", lambda name: None)
    out = io.StringIO()
    _doctor.render(_doctor.examine(), Console(file=out, width=120))
    assert "lastlayer is not installed, so its extras are unknown: pip install -e ." in (
        out.getvalue()
    )


def test_doctor_shows_each_gpu_and_where_dtypes_differ():
    gpu = _doctor.Device("cuda:0", "cuda", "Some GPU", "capability 9.0", memory_bytes=80 * 2**30)
    report = _doctor.Report(
        versions={"triton": None},
        devices=(gpu,),
        implementations={"cpu": "no numba"},
        kernels=(
            _doctor.Kernel("entmax", "cuda", "float32", "triton"),
            _doctor.Kernel("entmax", "cuda", "float64", "reference"),
        ),
        extras=(),
    )
    out = io.StringIO()
    _doctor.render(report, Console(file=out, width=120))
    shown = out.getvalue()
    assert "Some GPU, capability 9.0, 80 GiB" in shown
    assert "triton (float32); reference (float64)" in shown
    assert "The cpu kernels cannot run here: no numba." in shown
    assert "not installed" in shown


def test_the_module_runs_as_a_script():
    path = Path(sys.modules["lastlayer.cli"].__file__)
    ran = subprocess.run(
        [sys.executable, str(path), "--help"], capture_output=True, text=True, check=True
    )
    assert "doctor" in ran.stdout
