"""The `lastlayer` command: cheap help, clear refusals, and a doctor that tells the truth."""

import io
import json
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lastlayer import _doctor, kernels
from lastlayer.cli import app
from lastlayer.kernels import _registry

runner = CliRunner()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["doctor", "--help"],
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
    assert all(row["op"] in result.output for row in report["kernels"])
    assert all(extra["name"] in result.output for extra in report["extras"])


def test_doctor_says_how_to_add_a_missing_extra(monkeypatch):
    version = _doctor._version
    monkeypatch.setattr(
        _doctor, "_version", lambda name: None if name == "matplotlib" else version(name)
    )
    report = _doctor.examine()
    (lab,) = [extra for extra in report["extras"] if extra["name"] == "lab"]
    assert [requirement.split(">")[0] for requirement in lab["missing"]] == ["matplotlib"]
    assert lab["command"] == 'pip install "lastlayer[lab]"'

    narrow = io.StringIO()
    _doctor.render(report, Console(file=narrow, width=40))
    assert 'pip install "lastlayer[lab]"' in narrow.getvalue()


def test_doctor_ends_with_a_conclusion(monkeypatch):
    report = _doctor.examine()
    shown = runner.invoke(app, ["doctor"]).output.strip().splitlines()[-1]
    assert shown == _doctor.conclusion(report)
    fine = {**report, "extras": [], "devices": [{"type": "cpu"}]}
    fine["implementations"] = {"cpu": {"runs": True, "reason": None}}
    assert _doctor.conclusion(fine).endswith("on the CPU with its fast kernels.")
    slow = {**fine, "implementations": {"cpu": {"runs": False, "reason": "no numba"}}}
    assert "no numba" in _doctor.conclusion(slow)
    lacking = {**fine, "extras": [{"name": "lab", "missing": ["altair"], "command": "pip it"}]}
    assert _doctor.conclusion(lacking).endswith("pip it")
    assert "pip install -e ." in _doctor.conclusion({**fine, "versions": {}})
    apple = {**fine, "devices": [{"type": "cpu"}, {"type": "mps"}]}
    assert _doctor.conclusion(apple).endswith("mps: plain torch code, untested there.")


def test_on_rocm_the_kernels_for_cuda_are_not_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    # What is kept is that of this machine.
    asked = _registry.available.__wrapped__
    monkeypatch.setattr(_registry, "available", asked)
    assert "ROCm" in asked()["triton"]
    assert kernels.selected("entmax", "cuda", torch.float32) == "reference"


def test_doctor_sees_a_requirement_that_is_too_old(monkeypatch):
    version = _doctor._version
    monkeypatch.setattr(
        _doctor, "_version", lambda name: "0.1" if name == "matplotlib" else version(name)
    )
    lacking = {each["name"]: each["missing"] for each in _doctor.examine()["extras"]}
    assert any(requirement.startswith("matplotlib>=") for requirement in lacking["lab"])


def test_doctor_works_from_a_tree_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(_doctor, "_version", lambda name: None)
    out = io.StringIO()
    _doctor.render(_doctor.examine(), Console(file=out, width=120))
    assert "pip install -e ." in out.getvalue()


def test_doctor_shows_each_gpu_and_where_dtypes_differ():
    gpu = {"device": "cuda:0", "type": "cuda", "name": "Some GPU", "capability": "capability 9.0"}
    row = {"op": "entmax", "device_type": "cuda"}
    report = {
        "versions": {"triton": None},
        "devices": [{**gpu, "memory_bytes": 80 * 2**30}],
        "implementations": {"cpu": {"runs": False, "reason": "no numba"}},
        "kernels": [
            {**row, "dtype": "float32", "implementation": "triton"},
            {**row, "dtype": "float64", "implementation": "reference"},
        ],
        "extras": [],
    }
    out = io.StringIO()
    _doctor.render(report, Console(file=out, width=120))
    shown = out.getvalue()
    assert "Some GPU, capability 9.0, 80 GiB" in shown
    assert "triton (float32); reference (float64)" in shown
    assert "no numba" in shown


def test_the_package_runs_as_a_module():
    words = [sys.executable, "-m", "lastlayer", "--help"]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "doctor" in ran.stdout
