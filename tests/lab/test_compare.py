"""lastlayer compare: every head with every seed, kept, resumed, and told."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lastlayer.cli import app
from lastlayer.lab import commands, evaluation, runs
from lastlayer.lab import comparison as lab
from lastlayer.lab.comparison import compare
from lastlayer.lab.errors import LabError, SpecError
from lastlayer.lab.options import CompareOptions
from lastlayer.lab.results import read_results
from lastlayer.lab.verdict import verdict

runner = CliRunner()
HEADS = ("full", "entmax", "hierarchical")
QUICK = {"model": "bag", "width": 8, "batch": 4, "length": 8, "lr": "0.01"}
LINE = "the cat sat on the mat and the dog saw the cat run to the old mill by the sea\n"


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "small.txt"
    path.write_text(LINE * 60, encoding="utf-8")
    return path


def run(text: Path, out: Path, **options):
    resume = options.pop("resume", False)
    given = {"data": str(text), "heads": HEADS, "budget": "8steps", "seeds": 1, **QUICK, **options}
    return compare(CompareOptions(**given), out, resume=resume, console=Console(quiet=True))


@pytest.fixture(scope="session")
def compared(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("compared") / "out"
    return run(text, out, seeds=2)


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_time(lines: list[dict]) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def test_every_head_has_a_result_with_the_first_seed_before_the_second(compared):
    order = [(each["label"], each["seed"]) for each in compared.results]
    assert order == [(head, seed) for seed in (1, 2) for head in HEADS]
    assert not compared.interrupted


def test_results_hold_what_the_page_needs(compared):
    for result in compared.results:
        assert result["status"] == "ok", result["reason"]
        assert result["steps"] == 8
        assert result["tokens"] == 8 * 4 * 8
        assert 0 < result["head_parameters"] < result["parameters"]
        assert result["step_ms_low"] <= result["step_ms"] <= result["step_ms_high"]
        test = result["test"]
        assert 0 <= test["top1"] <= test["top10"] <= 1
        assert sum(part["count"] for part in test["by_decile"]) == test["rows"]
        assert sum(part["count"] for part in test["calibration"]) == test["rows"]
        assert len(result["explorer"]) > 0
        for entry in result["explorer"]:
            assert (entry["path"] is not None) == (result["family"] == "hierarchical")
    full = next(each for each in compared.results if each["family"] == "full")
    assert full["test"]["coverage"] == 1.0
    assert (
        full["test"]["support"]
        == json.loads((compared.out / "compare.json").read_text())["data"]["classes"]
    )


def test_the_path_to_the_target_multiplies_to_its_probability(compared):
    result = next(each for each in compared.results if each["family"] == "hierarchical")
    for entry in result["explorer"]:
        product = 1.0
        for choice in entry["path"]:
            product *= choice["p"]
        assert product == pytest.approx(entry["target_p"], rel=1e-4)


def test_files_are_as_promised(compared):
    frozen = json.loads((compared.out / "compare.json").read_text())
    assert [head["slug"] for head in frozen["heads"]] == list(HEADS)
    assert frozen["seeds"] == [1, 2]
    assert frozen["command"][:2] == ["lastlayer", "compare"]
    per_epoch = frozen["settings"]["steps_per_epoch"]
    assert frozen["budget"] == {
        "kind": "steps", "amount": 8, "asked": "8 steps", "epochs": round(8 / per_epoch, 4),
    }  # fmt: skip
    assert frozen["baseline"]["name"] == "unigram"
    assert frozen["baseline"]["test"]["perplexity"] > 1
    for head in HEADS:
        folder = compared.out / "runs" / f"{head}-s2"
        config = json.loads((folder / "config.json").read_text())
        assert config["seed"] == 2
        assert config["data"]["fingerprint"] == frozen["data"]["fingerprint"]
        valid = [line for line in lines_of(folder) if line["kind"] == "valid"]
        assert valid[0]["step"] == 0
        assert valid[-1]["step"] == 8
        assert valid[-1]["seconds"] > 0
        assert not (folder / "checkpoint").exists()
        assert not list(folder.rglob("*.tmp"))


def test_a_time_is_that_of_the_slowest_head(text, tmp_path):
    done = run(text, tmp_path / "out", heads=("full", "hierarchical"), budget="0.05s")
    budget = json.loads((done.out / "compare.json").read_text())["budget"]
    assert budget["asked"] == "0.05s"
    assert budget["slowest"] in ("full", "hierarchical")
    assert budget["amount"] == pytest.approx(50 / budget["step_ms"], abs=1.1, rel=0.01)
    assert {each["steps"] for each in done.results} == {budget["amount"]}
    again = compare(CompareOptions(), done.out, resume=True, console=Console(quiet=True))
    assert [each["steps"] for each in again.results] == [each["steps"] for each in done.results]


def test_each_head_gets_the_rate_that_is_best_on_validation_data(text, tmp_path):
    done = run(text, tmp_path / "out", heads=("full", "hierarchical"), budget="24steps", lr="auto")
    written = json.loads((done.out / "rates.json").read_text())
    for result in done.results:
        found = written[result["slug"]]
        scores = [each["score"] for each in found["tried"]]
        best = scores.index(min(scores))
        # Three around the usual one, and one more where the outermost of them is the best.
        rates = [each["lr"] for each in found["tried"]]
        assert rates == sorted(set(rates))
        assert (len(rates) == 3) == (best == 1)
        # The next lower one where its perplexity is within 3% of the best, in more than an epoch.
        repeats = json.loads((done.out / "compare.json").read_text())["budget"]["epochs"] > 1
        lower = repeats and best > 0 and scores[best - 1] <= scores[best] + math.log(1.03)
        assert result["lr"] == found["lr"] == rates[best - lower]
        assert found["steps"] == 20


def test_the_lower_of_two_learning_rates_that_are_as_good_is_taken(text, tmp_path, monkeypatch):
    """Scores of short runs, by the rate: the best is 0.012, or a lower one that is hardly worse."""
    scores = {0.0013: 5.5, 0.004: 5.0, 0.012: 4.99, 0.036: 5.4}

    def short_run(_bench, _spec, rate, *_):
        return scores[min(scores, key=lambda each: abs(math.log(each / rate)))]

    monkeypatch.setattr(runs, "_short_run", short_run)
    monkeypatch.setattr(runs, "_RATE_SHARE", 1.0)
    for slow, budget, expected in (
        (5.0, "2epochs", 0.004), (5.1, "2epochs", 0.012), (5.0, "1epochs", 0.012)
    ):  # fmt: skip
        scores[0.004] = slow
        out = tmp_path / f"{slow}-{budget}"
        done = run(text, out, heads=("full",), budget=budget, lr="auto")
        assert [each["lr"] for each in done.results] == [expected]


def test_a_rate_that_diverges_in_its_short_run_is_not_taken(text, tmp_path, monkeypatch):
    """Its training loss is checked, since a diverged model can look perfect on validation data."""

    class Diverging(runs.Stepper):
        def __init__(self, body, head, lr, clip):
            super().__init__(body, head, lr, clip)
            self.lr, self.steps = lr, 0

        def step(self, batch):
            self.steps += 1
            made = super().step(batch)
            return made * 50 if self.lr > 0.005 and self.steps > 10 else made

    monkeypatch.setattr(runs, "Stepper", Diverging)
    monkeypatch.setattr(runs, "_RATE_SHARE", 1.0)
    monkeypatch.setattr(evaluation.TextJudge, "score", lambda *_: 1e-4)
    run(text, tmp_path / "out", heads=("full",), budget="20steps", lr="auto")
    (found,) = json.loads((tmp_path / "out" / "rates.json").read_text()).values()
    # JSON has no infinity.
    scores = {each["lr"]: each["score"] for each in found["tried"]}
    assert scores.pop(0.012) is scores.pop(0.036) is None
    assert len(scores) >= 1
    assert set(scores.values()) == {1e-4}
    assert found["lr"] in scores


def test_every_head_starts_at_the_class_frequencies(text, tmp_path):
    """Before the first step each head is as good as the unigram."""
    heads = ("full", "hierarchical", "adaptive:cutoffs=4", "sampled:n_samples=4", "nce")
    done = run(text, tmp_path / "out", heads=heads, budget="1steps", width=16)
    base = json.loads((done.out / "compare.json").read_text())["baseline"]["valid"]["nll"]
    for result in done.results:
        assert result["bias"] == "class frequencies"
        first = lines_of(done.out / "runs" / f"{result['slug']}-s1")[0]
        assert first["nll"] == pytest.approx(base, abs=0.15)


def test_the_best_model_by_validation_is_judged(text, tmp_path, monkeypatch):
    """A score that is best in the middle: the model of that step is what is kept."""
    seen = []

    def score(self, found):
        seen.append(found["nll"])
        return abs(len(seen) - 4)

    monkeypatch.setattr(evaluation.TextJudge, "score", score)
    kept = []
    at_the_end = evaluation.TextJudge.at_the_end

    def judge(self, body, head):
        kept.append(self.on_the_way(body, head)["nll"])
        return at_the_end(self, body, head)

    monkeypatch.setattr(evaluation.TextJudge, "at_the_end", judge)
    (result,) = run(text, tmp_path / "out", heads=("full",), budget="40steps").results
    points = [line for line in lines_of(tmp_path / "out/runs/full-s1") if line["kind"] == "valid"]
    assert result["best_step"] == points[3]["step"]
    assert kept == [pytest.approx(points[3]["nll"], rel=1e-6)]
    assert not (tmp_path / "out/runs/full-s1/best.safetensors").exists()


def test_the_command_asks_for_the_same(compared, tmp_path):
    """However it was begun: typed again, it gives the same options."""
    command = json.loads((compared.out / "compare.json").read_text())["command"]
    asked = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(commands, "_compare", lambda options, *_: asked.append(options) or 0)
        result = runner.invoke(app, command[1:])
    assert result.exit_code == 0, result.output
    assert asked[0].as_json() == json.loads((compared.out / "compare.json").read_text())["options"]


def test_a_finished_comparison_is_not_made_again(compared, monkeypatch):
    monkeypatch.setattr(lab, "perform", lambda *_: pytest.fail("made again"))
    again = compare(CompareOptions(), compared.out, resume=True, console=Console(quiet=True))
    assert [each["label"] for each in again.results] == [e["label"] for e in compared.results]


def test_other_options_are_not_resumed(compared):
    other = CompareOptions(budget="9steps", heads=HEADS)
    with pytest.raises(LabError, match="--budget was 8steps and is 9steps"):
        compare(other, compared.out, resume=True, console=Console(quiet=True))


def test_other_data_is_not_resumed(text, tmp_path):
    moved = tmp_path / "moving.txt"
    moved.write_text(LINE * 30, encoding="utf-8")
    run(moved, tmp_path / "out", heads=("full",), budget="1steps")
    moved.write_text(LINE * 31, encoding="utf-8")
    with pytest.raises(LabError, match=r"data was .* and is"):
        run(moved, tmp_path / "out", heads=("full",), budget="1steps", resume=True)


def test_a_folder_that_holds_something_is_not_taken(text, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(LabError, match="--out: expected a folder that is new or empty"):
        run(text, tmp_path)


def test_a_folder_that_cannot_be_written_is_told_first(text, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with pytest.raises(LabError, match="--out: expected a folder that can be written"):
        run(text, blocked / "out")


def test_a_full_disk_is_told_first(text, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    monkeypatch.setattr(lab, "perform", lambda *_: pytest.fail("trained"))
    with pytest.raises(LabError, match=r"of free disk .* got 100 B"):
        run(text, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_values_that_the_data_cannot_have_are_told_first(text, tmp_path):
    with pytest.raises(SpecError, match=r"--head adaptive:cutoffs=9999: cutoffs: expected"):
        run(text, tmp_path / "out", heads=("adaptive:cutoffs=9999",))
    assert not (tmp_path / "out").exists()


def test_the_body_starts_from_the_same_numbers_under_every_head(text, tmp_path, monkeypatch):
    made, build = [], lab.build_body

    def recorded(settings):
        body = build(settings)
        made.append(body.embedding.weight.detach().clone())
        return body

    monkeypatch.setattr(lab, "build_body", recorded)
    run(text, tmp_path / "out", heads=("full", "adaptive:cutoffs=3"), budget="1steps", seeds=2)
    _, one, other, next_seed, _ = made
    assert torch.equal(one, other)
    assert not torch.equal(one, next_seed)


FAILING = """
import torch
from lastlayer.heads import FullSoftmax

class Full(FullSoftmax):
    def forward(self, hidden, target):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

class Broken(FullSoftmax):
    def forward(self, hidden, target):
        raise KeyError("no such key")

class Vanishing(FullSoftmax):
    def forward(self, hidden, target):
        return super().forward(hidden, target) * float("nan")

class Hollow(FullSoftmax):
    def log_prob(self, hidden, classes=None):
        return super().log_prob(hidden, classes) * float("nan")

class Exploding(FullSoftmax):
    calls = 0
    def forward(self, hidden, target):
        self.calls += 1
        return super().forward(hidden, target) * 10.0 ** self.calls
"""


STALLING = """
import time
from lastlayer.heads import FullSoftmax

class Stalling(FullSoftmax):
    calls = 0
    def forward(self, hidden, target):
        self.calls += 1
        if self.calls % 8 == 0:
            time.sleep(0.15)
        return super().forward(hidden, target)
"""


def test_a_head_whose_steps_stall_is_named_with_the_disturbed_machine(text, tmp_path, monkeypatch):
    (tmp_path / "stalling_head.py").write_text(STALLING)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Whatever else runs here now is no part of it.
    monkeypatch.setattr("lastlayer.lab.runs.load_per_core", lambda: 0.5)
    out = tmp_path / "out"
    run(text, out, heads=("full", "stalling_head:Stalling"), budget="40steps")
    found = verdict(read_results(out))
    (note,) = [note for note in found.notes if "machine was disturbed" in note]
    assert "stalling" in note.lower()


def _blocks(path: Path, words: int = 256, blocks: int = 8, length: int = 40_000) -> Path:
    """Text in which a word tells the block of the next one, and four words of that block.

    Blocks differ in frequency, so that they are subtrees of a balanced tree, which learns them
    soon; the words within them follow no tree.
    """
    draw, size = np.random.default_rng(0), words // blocks
    share = 1.6 ** -np.arange(blocks)
    share /= share.sum()
    near = [
        block * size + draw.choice(size, 4, replace=False)
        for block in draw.choice(blocks, words, p=share)
    ]
    other = draw.choice(blocks, length, p=share) * size + draw.integers(size, size=length)
    ids = [0]
    for place, noise, any_one in zip(
        draw.integers(4, size=length), draw.random(length) < 0.1, other, strict=True
    ):
        ids.append(int(any_one if noise else near[ids[-1]][place]))
    lines = (ids[i : i + 20] for i in range(0, length, 20))
    path.write_text("\n".join(" ".join(f"w{i}" for i in line) for line in lines))
    return path


def test_a_lead_that_turns_later_is_too_early_to_tell(tmp_path):
    data, heads = _blocks(tmp_path / "blocks.txt"), ("full", "hierarchical:tree=balanced")
    best, needed = {}, {}
    for steps in (40, 400):
        out = tmp_path / str(steps)
        run(data, out, heads=heads, budget=f"{steps}steps", batch=8, length=16)
        found = verdict(read_results(out))
        best[steps], needed[steps] = found.best.head.family, found.needed
    assert best == {40: "hierarchical", 400: "full"}
    assert needed[40] > 40


def test_what_goes_wrong_in_a_run_is_a_result(text, tmp_path, monkeypatch):
    (tmp_path / "failing_heads.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("Full", "Broken", "Vanishing", "Exploding", "Hollow")
    heads = (*(f"failing_heads:{name}" for name in names), "full")
    done = run(text, tmp_path / "out", heads=heads)
    assert [each["status"] for each in done.results] == [
        "out of memory", "error", "nan", "diverged", "nan", "ok",
    ]  # fmt: skip
    reasons = [each["reason"] for each in done.results]
    assert "Tried to allocate 20 GiB" in reasons[0]
    assert reasons[1] == "KeyError: 'no such key'"
    assert "nan by step 1" in reasons[2]
    assert "rose from" in reasons[3]
    assert "NaN for some rows of the test data" in reasons[4]
    assert [each["test"] is None for each in done.results] == [True] * 5 + [False]


def test_ctrl_c_stops_and_resume_goes_on(text, tmp_path, monkeypatch):
    moves = []

    def interrupted(bench, spec, seed, tell, stopped):
        def press(*told):
            moves.append(told)
            if spec.family == "entmax" and told[1].step == 3:
                os.kill(os.getpid(), signal.SIGINT)

        return perform(bench, spec, seed, press, stopped)

    perform = lab.perform
    monkeypatch.setattr(lab, "perform", interrupted)
    said = io.StringIO()
    given = {"data": str(text), "heads": HEADS, "budget": "8steps", "seeds": 1, **QUICK}
    console = Console(file=said, width=100)
    first = compare(CompareOptions(**given), tmp_path / "out", resume=False, console=console)
    assert first.interrupted
    lines = [line.partition(" ")[2] for line in said.getvalue().splitlines()]
    # At once: before the line of the run that it ends.
    stopping = "Stopping after the current step"
    at = next(i for i, line in enumerate(lines) if line.startswith(stopping))
    assert lines[at + 1] == "2/3 entmax seed 1: interrupted"
    assert [each["status"] for each in first.results] == ["ok", "interrupted"]
    assert (tmp_path / "out/runs/entmax-s1/checkpoint/state.json").is_file()
    monkeypatch.setattr(lab, "perform", perform)
    second = run(text, tmp_path / "out", resume=True)
    assert [each["status"] for each in second.results] == ["ok"] * 3


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_ctrl_c_is_answered_beside_what_machines_read(text, tmp_path, monkeypatch, option):
    def interrupted(*given):
        os.kill(os.getpid(), signal.SIGINT)
        return perform(*given)

    perform, out = lab.perform, tmp_path / "my out"
    monkeypatch.setattr(lab, "perform", interrupted)
    monkeypatch.setattr("lastlayer.lab.report.write_report", lambda out: out / "report.html")
    words = ["--model", "bag", "--width", "8", "--budget", "9steps", "--seeds", "1", option]
    result = runner.invoke(app, ["compare", str(text), *words, "--out", str(out)])
    assert result.exit_code == 130, result.output
    told = result.stderr.splitlines()
    assert told[0].startswith("Stopping after the current step, then writing the page.")
    assert told[1] == f"Stopped. Resume with: lastlayer compare --resume --out '{out}'"
    if option == "--quiet":
        assert result.stdout == f"{out / 'report.html'}\n"
    else:
        assert json.loads(result.stdout)["interrupted"] is True


KILLED = """
import sys, time
from pathlib import Path
import torch
from rich.console import Console
from lastlayer.lab import comparison, options, training

torch.set_num_threads(1)
training._CHECKPOINT_SECONDS, training._CHECKPOINT_SHARE = 0.0, 1e9
step = training.Stepper.step

def slow(self, batch):
    time.sleep(0.02)
    return step(self, batch)

training.Stepper.step = slow
given = options.CompareOptions.from_json(eval(sys.argv[1]))
comparison.compare(given, Path(sys.argv[2]), resume=False, console=Console(quiet=True))
"""


def test_killed_and_resumed_ends_as_one_that_was_never_killed(text, tmp_path):
    """The process gets no chance to clean up; it writes a checkpoint after every step."""
    given = {"heads": ("full", "sampled:n_samples=4"), "budget": "14steps", "seeds": 1, **QUICK}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    doomed = subprocess.Popen(
        [sys.executable, "-c", KILLED, repr({"data": str(text), **given}), str(killed)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    folder = killed / "runs" / "sampled-n_samples-4-s1"
    state = folder / "checkpoint" / "state.json"
    limit = time.monotonic() + 120
    while time.monotonic() < limit and doomed.poll() is None:
        if state.is_file() and json.loads(state.read_text())["step"] >= 5:
            break
        time.sleep(0.005)
    doomed.kill()
    said, _ = doomed.communicate()
    assert doomed.returncode == -signal.SIGKILL, said
    assert not (folder / "result.json").exists()

    run(text, killed, resume=True, **given)
    run(text, whole, **given)
    for slug in ("full-s1", "sampled-n_samples-4-s1"):
        one, other = (each / "runs" / slug for each in (killed, whole))
        assert without_time(lines_of(one)) == without_time(lines_of(other))
        results = [json.loads((each / "result.json").read_text()) for each in (one, other)]
        assert results[0]["test"] == results[1]["test"]
        assert results[0]["explorer"] == results[1]["explorer"]
        assert results[0]["steps"] == results[1]["steps"] == 14


def test_labels(tmp_path):
    """Two labels that follow from the signs of two features, which have units of their own."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 2, generator=draw) * torch.tensor([1e-3, 1e4]) + torch.tensor([2, 9e4])
    arff = "@relation made\n@attribute a numeric\n@attribute b numeric\n"
    arff += "@attribute small {0,1}\n@attribute large {0,1}\n@data\n"
    arff += "".join(f"{a:.6f},{b:.2f},{int(a > 2)},{int(b > 9e4)}\n" for a, b in rows.tolist())
    (tmp_path / "labels.arff").write_text(arff)
    names = "".join(f'<label name="{name}"/>' for name in ("small", "large"))
    xml = f'<labels xmlns="http://mulan.sourceforge.net/labels">{names}</labels>'
    (tmp_path / "labels.xml").write_text(xml)
    options = {"task": "multilabel", "width": 8, "batch": 40, "lr": "0.05", "budget": "60steps"}
    heads = ("zlpr", "bce", "asymmetric", "sparsemax_labels")
    done = run(
        tmp_path / "labels.arff", tmp_path / "out", **{**options, "heads": heads, "length": None}
    )
    for result in done.results:
        assert result["status"] == "ok", result["reason"]
        test = result["test"]
        assert test["precision_at_1"] <= 1
        assert test["rows"] == 40
        if result["family"] != "sparsemax_labels":
            assert test["micro_f1"] > 0.85, result["family"]
        found = 2 * test["micro_precision"] * test["micro_recall"]
        assert test["micro_f1"] == pytest.approx(
            found / (test["micro_precision"] + test["micro_recall"])
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "soon"], "--budget: expected an amount above 0 with its unit"),
        (["--head", "ful"], "no head 'ful'; did you mean full?"),
        (["--head", "full:bia=1"], "no argument 'bia'; did you mean bias?"),
        (["--model", "gru"], "--model: expected one of lstm, transformer, bag, got 'gru'"),
        (
            ["--task", "speech"],
            "--task: expected one of lm, classification, multilabel, pairs, got 'speech'",
        ),
        (["--seeds", "0"], "--seeds: expected at least 1, got 0"),
        (["--lr", "-1"], "--lr: expected auto or a number above 0, got '-1'"),
        (["--vocab-size", "1"], "--vocab-size: expected at least 2, got 1"),
        (["--resume"], "--resume: expected --out with the folder to continue"),
        (["--encoding", "klingon"], "klingon"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(text, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["compare", str(text), *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert not list(tmp_path.rglob("compare.json"))


def test_the_command_ends_with_json(text, tmp_path, monkeypatch):
    monkeypatch.setattr("lastlayer.lab.report.write_report", lambda out: out / "report.html")
    words = ["--model", "bag", "--width", "8", "--budget", "2steps", "--seeds", "1", "--json"]
    result = runner.invoke(
        app, ["compare", str(text), *words, "--head", "full", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert made["page"] == str(tmp_path / "out" / "report.html")
    assert [each["status"] for each in made["runs"]] == ["ok"]
