"""The commands of the lab: instant help, mistakes told in one message, and one whole comparison."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lastlayer.cli import app
from lastlayer.lab.errors import LabError
from lastlayer.lab.live import EventLines, Forecast
from lastlayer.lab.records import LOCK, Lock
from lastlayer.lab.specs import catalogue, parse_spec, parse_specs
from lastlayer.lab.training import Progress

TEXT = "the cat saw the dog and the dog saw a cat\n" * 60
SIZE = ["--model", "bag", "--width", "8"]
runner = CliRunner()
COMMANDS = ("compare", "heads", "inspect", "plan", "show", "report", "generate", "export")


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


def test_help_lists_every_head():
    shown = runner.invoke(app, ["compare", "--help"], env={"COLUMNS": "100"}).output
    lines = [line.split() for line in shown.splitlines()]
    for name in catalogue():
        assert any(words[:1] == [name] and len(words) > 1 for words in lines), name


def test_heads_are_listed_with_their_arguments():
    found = {
        each["head"]: each for each in json.loads(runner.invoke(app, ["heads", "--json"]).stdout)
    }
    assert found.keys() == catalogue().keys()
    assert "cutoffs" in found["adaptive"]["arguments"]
    assert all(each["about"] and each["class"] for each in found.values())
    shown = runner.invoke(app, ["heads"]).output
    assert "adaptive: Adaptive softmax (AdaptiveSoftmax, --task lm" in shown


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("softmax", "full"),
        ("FullSoftmax", "full"),
        ("AdaptiveSoftmax:cutoffs=20,40", "adaptive"),
        ("EntmaxHead", "entmax"),
        ("char-cnn", "char_cnn"),
        ("NCE", "nce"),
    ],
)
def test_heads_have_other_names(text, family):
    assert parse_spec(text).family == family


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
        (["plan", "--classes", "9", "--hidden", "4", "--rows", "2", "--task", "pairs"], "'pairs'"),
        (["plan", "--classes", "9" * 12, "--hidden", "4", "--rows", "2"], "at most 20,000,000"),
        (["compare", "--task", "multilabel", "--model", "lstm"], "expected bag for --task"),
        (["compare", "--seeds", "9" * 12], "--seeds: expected at most 10,000"),
        (["compare", "--model", "bag", "--layers", "2"], "--layers: expected none for a bag"),
        (["compare", "--encoding", "latin-1"], "--encoding: expected none for data that is no"),
        (
            ["plan", "--classes", "9", "--dtype", "float16"],
            "--dtype: expected it only with --ranks",
        ),
        (
            ["plan", "--classes", "9", "--ranks", "2", "--seconds", "1"],
            "--seconds: expected it only",
        ),
        (["compare", "--threads", "100000"], "--threads: expected at most 1,024"),
        (["compare", "text.txt", "--encoding", "utf-9"], "text.txt: --encoding: expected the name"),
        (["compare", "text.txt", "--width", "9" * 12], "--width: expected a model that fits"),
        (["compare", "--head", ":"], "no head ''; there are adaptive"),
        (["compare", "--head", "broken_module:Head"], "broken_module.py:1: "),
        (["compare", "text.txt", "--length", "9999"], "--length: expected at most 5"),
        (["compare", "text.txt", "--length", "8", "--batch", "999"], "--batch: expected at most 7"),
    ],
)
def test_mistakes_have_exit_code_2(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_module.py").write_text("def (:")
    (tmp_path / "text.txt").write_text(TEXT)
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
    "one class": "one class: the training part has only one word",
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
    (tmp_path / "text.txt").write_text(TEXT)
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


FAILING = """
from lastlayer.heads import FullSoftmax

class Failing(FullSoftmax):
    def forward(self, hidden, target):
        raise RuntimeError("the moon is full")
"""


def test_the_reason_of_a_failed_head_is_in_the_terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lastlayer.lab.report._draw", lambda *_: None)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "one_failing_head.py").write_text(FAILING)
    words = ["--head", "full", "--head", "one_failing_head:Failing", "--budget", "4steps"]
    result = runner.invoke(app, ["compare", "text.txt", *words, *SIZE, "--lr", "0.01"])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if "the moon is full" in line]
    # On the way for each seed, and once in the summary.
    assert len(lines) == 4
    assert "seeds 1, 2, 3: error: RuntimeError" in lines[-1]


def test_one_process_at_a_time_works_on_a_folder(tmp_path):
    lock = Lock(tmp_path)
    with pytest.raises(LabError, match=f"on which process {os.getpid()} does"):
        Lock(tmp_path)
    lock.release()
    assert not list(tmp_path.iterdir())
    Lock(tmp_path).release()


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    program = (
        "from pathlib import Path; from lastlayer.lab.records import Lock\n"
        f"lock = Lock(Path({str(tmp_path)!r})); print('held', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(LabError, match=f"process {holder.pid} does"):
        Lock(tmp_path)
    holder.kill()
    holder.communicate()
    assert (tmp_path / LOCK).exists()
    Lock(tmp_path).release()


def test_a_folder_that_is_in_use_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "out"
    out.mkdir()
    lock = Lock(out)
    result = runner.invoke(app, ["compare", "text.txt", *SIZE, "--out", "out"])
    lock.release()
    assert result.exit_code == 2, result.output
    assert "no other process" in result.output
    assert not list(out.iterdir())


SLOW = """
import sys, time
import torch
from lastlayer.lab import report, training
from lastlayer.cli import main

torch.set_num_threads(1)
step = training.Stepper.step
seconds = 0.05 if "--quick" in sys.argv else 60.0

def slow(self, batch):
    print("step", flush=True)
    time.sleep(seconds)
    return step(self, batch)

training.Stepper.step = slow
report._draw = lambda *_: None
sys.argv = [each for each in sys.argv if each != "--quick"]
main()
"""


@pytest.mark.parametrize("kind", ["search", "training"])
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_the_first_ctrl_c_stops_after_the_step(tmp_path, kind):
    ran, out = pressed(tmp_path, ["--quick"], kind)
    told, errors = ran.communicate(timeout=120)
    assert ran.returncode == 130, errors
    assert "Stopped. Resume with: lastlayer compare --resume" in told
    assert "Traceback" not in errors
    assert (out / "report.html").is_file()
    assert not (out / LOCK).exists()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_the_second_ctrl_c_ends_it_at_once(tmp_path):
    ran, out = pressed(tmp_path, [], "training")
    # It is answered, and goes on with a step that takes a minute.
    while "Stopping after the current step" not in ran.stdout.readline():
        assert ran.poll() is None
    began = time.perf_counter()
    ran.send_signal(signal.SIGINT)
    _, errors = ran.communicate(timeout=50)
    assert time.perf_counter() - began < 30
    assert ran.returncode not in (0, 2)
    assert "Traceback" not in errors
    assert not (out / LOCK).exists()


def pressed(folder, options, kind):
    """A comparison in a process of its own, after a Ctrl-C in its third step."""
    (folder / "text.txt").write_text(TEXT)
    rate = [] if kind == "search" else ["--lr", "0.01"]
    out = folder / "out"
    words = ["compare", "text.txt", *SIZE, "--head", "full", "--seeds", "1", "--budget", "400steps"]
    ran = subprocess.Popen(
        [sys.executable, "-c", SLOW, *words, *rate, *options, "--out", str(out)],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    seen = 0
    while seen < (3 if options else 1):
        line = ran.stdout.readline()
        assert line or ran.poll() is None, ran.stderr.read()
        seen += line == "step\n"
    ran.send_signal(signal.SIGINT)
    return ran, out


def test_the_time_left_is_that_of_the_runs_that_are_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    full, nce = parse_specs(["full", "nce"])
    forecast = Forecast([full, nce], seeds=3)
    assert forecast.left() is None
    forecast.starts(full.slug)
    now[0] += 4.0  # of the search for the learning rate
    forecast.moves(0.0)
    now[0] += 5.0
    forecast.moves(0.5)
    # Half of a run, two more of it, and three of the other head with its search.
    assert forecast.left() == pytest.approx(5 + 20 + 30 + 4)
    now[0] += 5.0
    forecast.ends(full.slug)
    assert forecast.left() == pytest.approx(20 + 30 + 4)
    forecast.starts(nce.slug)
    forecast.moves(0.0)
    now[0] += 1.0
    forecast.ends(nce.slug)
    assert forecast.left() == pytest.approx(20 + 2)
    assert "about 0:22 left of 0:37" in str(forecast)


def test_after_a_resume_the_time_left_is_that_of_the_finished_runs_of_each_head(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    full, char_cnn, topk = parse_specs(["full", "char_cnn", "topk"])
    forecast = Forecast([full, char_cnn, topk], seeds=3)
    for seconds in (50.0, 70.0, 60.0):
        forecast.ends(full.slug, seconds)
    for _ in range(2):
        forecast.ends(char_cnn.slug, 2000.0)
        forecast.ends(topk.slug, 100.0)
    assert forecast.left() == pytest.approx(2000 + 100)
    # The slow head goes on from its checkpoint: the others do not take as long as it does.
    forecast.starts(char_cnn.slug)
    now[0] += 3.0
    forecast.moves(0.02)
    assert forecast.left() == pytest.approx(0.98 * 2000 + 100)
    # At half its former speed: its own speed counts by the share that it has made.
    now[0] += 400.0
    forecast.moves(0.12)
    assert forecast.left() == pytest.approx(0.88 * (0.1 * 4000 + 0.9 * 2000) + 100)


def test_after_a_resume_a_head_without_runs_takes_the_mean_of_the_others(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: 100.0)
    full, nce, topk = parse_specs(["full", "nce", "topk"])
    forecast = Forecast([full, nce, topk], seeds=1)
    forecast.ends(full.slug, 40.0)
    forecast.ends(nce.slug, 60.0)
    assert forecast.left() == pytest.approx(50)


def test_lines_of_a_resumed_comparison_tell_the_time_left_of_its_recorded_runs(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    full, nce = parse_specs(["full", "nce"])
    said = io.StringIO()
    lines = EventLines(Console(file=said, width=100), [full, nce], seeds=2)
    done = {"status": "ok", "test": {"perplexity": 9.0}}
    lines.ends(full, 1, {**done, "seconds": 600.0})
    lines.ends(nce, 1, {**done, "seconds": 60.0})
    assert "left" not in said.getvalue()
    lines.starts(full, 2)
    lines.moves(0.5, Progress(step=5), None)
    now[0] += 6.0
    lines.moves(0.5, Progress(step=5), None)
    assert "full seed 2: 50%, step 5; 0:06 passed, about 6:00 left of 6:06" in said.getvalue()
    now[0] += 300.0
    lines.ends(full, 2, {**done, "seconds": 606.0})
    assert "3/4 full seed 2: perplexity 9 (about 1:00 left)" in said.getvalue()
