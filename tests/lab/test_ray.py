"""Runs on a Ray cluster: the same folder and the same results, and a lost worker costs one run."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from lastlayer.cli import app
from lastlayer.lab import compare
from lastlayer.lab.errors import LabError

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = {"seeds": 2, "steps": 8, "progress": False, "device": "cpu"}
HEADS = ["full", "hierarchical"]
DRIVER = os.getpid()


@pytest.fixture(scope="module")
def cluster():
    """Two workers; comparisons that ask for a local one find it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )  # fmt: skip
    yield
    ray.shutdown()


def batches() -> list:
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    return list(zip(inputs.split(16), inputs.argmax(1).split(16), strict=True))


def backbone() -> nn.Module:
    return nn.Linear(4, 8)


def test_runs_are_those_without_ray(cluster, tmp_path):
    given = batches()
    here = compare(backbone, given[2:], given[:2], HEADS, out=tmp_path / "a", threads=1, **QUICK)
    there = compare(backbone, given[2:], given[:2], HEADS, out=tmp_path / "b", ray="local", **QUICK)
    assert [run.status for run in there.runs] == ["ok"] * 4
    assert [run.test for run in there.runs] == [run.test for run in here.runs]
    rates = [json.loads((tmp_path / each / "rates.json").read_text()) for each in "ab"]
    assert rates[0] == rates[1]
    again = compare(
        backbone, given[2:], given[:2], HEADS, out=tmp_path / "b", ray="local", resume=True, **QUICK
    )
    assert [run.test for run in again.runs] == [run.test for run in here.runs]


def test_a_lost_worker_costs_one_run_which_is_made_again(cluster, tmp_path):
    killed = tmp_path / "killed"

    def mortal() -> nn.Module:
        if os.getpid() != DRIVER and not killed.exists():
            killed.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.Linear(4, 8)

    given = batches()
    found = compare(
        mortal, given[2:], given[:2], HEADS, out=tmp_path / "out", ray="local", lr=0.01, **QUICK
    )
    assert killed.exists()
    assert [run.status for run in found.runs] == ["ok"] * 4


def test_a_worker_that_is_always_lost_is_a_failed_run(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("lastlayer.lab.on_ray._RETRIES", 1)

    class Mortal(nn.Linear):
        def train(self, mode: bool = True) -> "Mortal":
            if os.getpid() != DRIVER and mode:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().train(mode)

    given = batches()
    found = compare(
        lambda: Mortal(4, 8), given[2:], given[:2], ["full"], out=tmp_path / "out", ray="local",
        lr=0.01, **{**QUICK, "seeds": 1},
    )  # fmt: skip
    assert [run.status for run in found.runs] == ["error"]
    assert "worker was lost" in found.runs[0].reason


def test_an_address_without_a_cluster_is_one_message(tmp_path):
    text = tmp_path / "small.txt"
    text.write_text("the cat sat on the mat and the dog ran to the sea\n" * 40)
    words = ["compare", str(text), "--out", str(tmp_path / "out"), "--ray", "127.0.0.1:1"]
    begun = time.monotonic()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    assert "--ray: expected a Ray cluster at 127.0.0.1:1" in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()
    assert time.monotonic() - begun < 60
    with pytest.raises(LabError, match="ray: expected host:port, auto or local, got 'cluster'"):
        compare(backbone, batches(), batches(), HEADS, ray="cluster", **QUICK)


def test_more_cores_than_any_machine_has_are_refused(cluster, tmp_path):
    with pytest.raises(LabError, match="threads: expected at most the 2 CPUs"):
        compare(
            backbone, batches(), batches(), HEADS, out=tmp_path / "out", ray="local", threads=3,
            **QUICK,
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_the_command_takes_ray_without_an_address(cluster, tmp_path):
    text = tmp_path / "small.txt"
    text.write_text("the cat sat on the mat and the dog ran to the sea\n" * 40)
    words = ["--model", "bag", "--width", "8", "--budget", "4steps", "--seeds", "1", "--lr", "0.01"]
    words += ["--head", "full", "--out", str(tmp_path / "out"), "--ray", "--json"]
    result = CliRunner().invoke(app, ["compare", str(text), *words])
    assert result.exit_code == 0, result.output
    assert [each["status"] for each in json.loads(result.stdout)["runs"]] == ["ok"]


def test_another_process_joins_by_address_and_a_kill_costs_nothing_that_is_done(cluster, tmp_path):
    """The process that asked is killed; --resume goes on with what its workers have left."""
    text, out = tmp_path / "small.txt", tmp_path / "out"
    text.write_text("the cat sat on the mat and the dog ran to the sea\n" * 40)
    address = ray.get_runtime_context().gcs_address
    words = [sys.executable, "-m", "lastlayer", "compare", "--out", str(out), "--ray", address]
    given = ["--model", "bag", "--width", "8", "--budget", "300steps", "--seeds", "2", "--quiet"]
    first = subprocess.Popen([*words, str(text), *given, "--lr", "0.01", "--head", "full"])
    limit = time.monotonic() + 120
    while time.monotonic() < limit and not list(out.glob("runs/*/metrics.jsonl")):
        time.sleep(0.02)
    first.kill()
    first.wait()
    # Ray ends the tasks of a driver that is gone.
    time.sleep(2)
    subprocess.run([*words, "--resume", "--quiet"], check=True, timeout=240)
    results = [json.loads(path.read_text()) for path in out.glob("runs/*/result.json")]
    assert [(each["status"], each["steps"]) for each in results] == [("ok", 300)] * 2


def test_ctrl_c_stops_all_workers_and_resume_goes_on(cluster, tmp_path):
    slow, out = tmp_path / "slow", tmp_path / "out"
    slow.touch()

    class Slow(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if slow.exists() and os.getpid() != DRIVER:
                time.sleep(0.05)
            return super().forward(inputs)

    def press() -> None:
        while not list(out.glob("runs/*/metrics.jsonl")):
            time.sleep(0.02)
        os.kill(DRIVER, signal.SIGINT)

    given, pressing = batches(), threading.Thread(target=press)
    asked = {**QUICK, "steps": 200, "lr": 0.01, "out": out, "ray": "local"}
    pressing.start()
    found = compare(lambda: Slow(4, 8), given[2:], given[:2], HEADS, **asked)
    pressing.join()
    assert found.interrupted
    fates = {run.status for run in found.runs}
    assert "interrupted" in fates
    assert fates <= {"interrupted", "not started", "unfinished"}
    slow.unlink()
    again = compare(lambda: Slow(4, 8), given[2:], given[:2], HEADS, resume=True, **asked)
    assert [run.status for run in again.runs] == ["ok"] * 4
