import io
import json
import os
import shutil
import signal
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from lastlayer.heads.recipes import ClassData
from lastlayer.lab import costs
from lastlayer.lab.comparison import Compared, compare
from lastlayer.lab.costs import Problem, Words
from lastlayer.lab.errors import LabError
from lastlayer.lab.feeding import PADDING
from lastlayer.lab.live import EventLines, LiveTable
from lastlayer.lab.options import CompareOptions
from lastlayer.lab.records import read_costs
from lastlayer.lab.results import read_results
from lastlayer.lab.specs import parse_specs

WORDS = 300
SIZES = [75, 300, 1200, 4800]
HEADS = ("full", "adaptive:cutoffs=100,200", "char_cnn:filters=1x4", "my_sizes:Fixed",
         "my_sizes:Hungry")  # fmt: skip
OWN = """
from lastlayer.heads import FullSoftmax

class Fixed(FullSoftmax):
    def __init__(self, in_features):
        super().__init__(in_features, 300)

class Hungry(FullSoftmax):
    def forward(self, hidden, target):
        if self.n_classes > 300:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9")
        return super().forward(hidden, target)
"""


def run(out: Path, *, data: Path | None = None, resume: bool = False, **options) -> Compared:
    given = {"budget": "1steps", "seeds": 1, "model": "bag", "width": 8, "batch": 4, "length": 8}
    asked = CompareOptions(data=str(data), **{**given, **options}) if data else CompareOptions()
    return compare(asked, out, resume=resume, console=Console(quiet=True))


@pytest.fixture(scope="module", autouse=True)
def much_time():
    """However slow the machine: nothing is left out for it, but where a test says so."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(costs, "SECONDS_A_HEAD", 1e6)
        yield


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """As many words as there are classes, but for the unknown one and the end of a line."""
    folder = tmp_path_factory.mktemp("costs")
    (folder / "my_sizes.py").write_text(OWN)
    line = " ".join(f"w{i}" for i in range(WORDS - 2)) + "\n"
    (folder / "words.txt").write_text(line * 30)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.syspath_prepend(str(folder))
        yield run(folder / "out", data=folder / "words.txt", heads=HEADS)


@pytest.fixture
def unmeasured(compared, tmp_path):
    """The same comparison before costs were measured."""
    out = Path(shutil.copytree(compared.out, tmp_path / "out"))
    (out / "costs.json").unlink()
    return out


def found(record: dict) -> dict[tuple[str, int], dict]:
    return {(each["slug"], each["classes"]): each for each in record["costs"]}


@pytest.mark.parametrize("own", [2, 20, 63, 64, 255, 256, 1023, 1024, 60_000, 10**6])
def test_sizes_rise_around_that_of_the_data(own):
    sizes = costs.sizes_around(own)
    assert own in sizes
    assert sizes == sorted(set(sizes))
    assert len(sizes) == costs.SIZES
    assert sizes[0] >= min(own, costs.FEWEST_CLASSES)


def test_every_head_has_a_time_or_a_reason_at_every_size(compared):
    assert [each["status"] for each in compared.results] == ["ok"] * len(HEADS)
    record = compared.costs
    assert record == json.loads((compared.out / "costs.json").read_text())
    assert (record["own"], record["rows"], record["width"]) == (WORDS, 32, 8)
    assert record["classes"] == SIZES
    assert record["complete"]
    slugs = [each["slug"] for each in compared.results]
    assert sorted(found(record)) == sorted((slug, size) for slug in slugs for size in SIZES)
    assert len(record["costs"]) == len(HEADS) * len(SIZES)
    for each in record["costs"]:
        assert ("ms" in each) != bool(each["reason"])
        if "ms" in each:
            assert 0 < each["low_ms"] <= each["ms"] <= each["high_ms"]
            assert each["samples"] >= 2


def test_what_cannot_be_built_or_run_has_its_reason(compared):
    cost = found(compared.costs)
    timed = {slug: [size for size in SIZES if "ms" in cost[slug, size]] for slug, _ in cost}
    assert timed == {
        "full": SIZES,
        "adaptive-cutoffs-100-200": SIZES[1:],
        "char_cnn-filters-1x4": SIZES,
        "my_sizes-fixed": [WORDS],
        "my_sizes-hungry": SIZES[:2],
    }
    assert cost["adaptive-cutoffs-100-200", 75]["reason"].startswith("cutoffs: expected")
    assert cost["my_sizes-fixed", 75]["reason"] == (
        "it always has 300 classes, whatever number it is built for"
    )
    assert "out of memory: DefaultCPUAllocator" in cost["my_sizes-hungry", 1200]["reason"]


def test_results_hold_them(compared):
    read = read_results(compared.out).costs
    assert read is not None
    written = compared.costs["costs"]
    assert [{k: v for k, v in asdict(c).items() if v is not None} for c in read.found] == written


def test_they_are_not_measured_again(compared, monkeypatch):
    monkeypatch.setattr(costs.Meter, "time", lambda *_: pytest.fail("measured again"))
    assert run(compared.out, resume=True).costs == compared.costs


@pytest.mark.parametrize("held", ["", "[]", '{"costs": 3}', '{"schema": 1, "rows": 31}'])
def test_what_is_not_of_this_comparison_is_measured_again(unmeasured, monkeypatch, held):
    (unmeasured / "costs.json").write_text(held)
    monkeypatch.setattr(costs, "SECONDS_A_HEAD", 0.0)
    again = run(unmeasured, resume=True).costs
    assert again["complete"]
    assert len(again["costs"]) == len(HEADS) * len(SIZES)


def test_a_broken_file_is_told_by_name(unmeasured):
    assert read_results(unmeasured).costs is None
    for held, message in (
        ("{", "expected JSON"),
        ('{"schema": 2}', "expected schema 1, got 2"),
        ('{"schema": 1, "costs": [3]}', "expected a file of `lastlayer compare`"),
    ):
        (unmeasured / "costs.json").write_text(held)
        with pytest.raises(LabError, match=rf"costs\.json.*{message}"):
            read_costs(unmeasured)


def test_what_would_take_too_long_is_left_out(unmeasured, monkeypatch):
    monkeypatch.setattr(costs, "SECONDS_A_HEAD", 0.0)
    monkeypatch.setattr(costs, "SHARE_OF_TRAINING", 0.0)
    monkeypatch.setattr(costs.Meter, "time", lambda *_: pytest.fail("measured"))
    done = run(unmeasured, resume=True)
    assert not done.interrupted
    for each in done.costs["costs"]:
        assert each["reason"] == costs.TOO_LONG


def test_longer_training_gives_more_time(monkeypatch):
    monkeypatch.setattr(costs, "SECONDS_A_HEAD", 1.5)
    trained = [{"seconds": 400.0}, {"seconds": None}, {"seconds": 200.0}]
    assert costs._seconds_for(2, trained) == pytest.approx(30.0)
    assert costs._seconds_for(40, trained) == pytest.approx(60.0)


def test_what_would_not_fit_into_memory_is_left_out(unmeasured, monkeypatch):
    monkeypatch.setattr(costs, "free_memory", lambda _: 1000)
    cost = found(run(unmeasured, resume=True).costs)
    assert "ms" in cost["full", 75]
    assert [cost["full", size]["reason"] for size in SIZES[1:]] == [costs.TOO_LARGE] * 3


def test_free_memory_is_known_here():
    free = costs.free_memory(torch.device("cpu"))
    assert free is None or free > 2**20


def test_ctrl_c_keeps_what_is_there_and_resume_goes_on(unmeasured, monkeypatch):
    measure, calls = costs.Meter.time, []

    def pressed(self, *what):
        calls.append(what)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return measure(self, *what)

    monkeypatch.setattr(costs.Meter, "time", pressed)
    first = run(unmeasured, resume=True)
    assert first.interrupted
    assert not first.costs["complete"]
    assert len(first.costs["costs"]) == 3
    assert json.loads((unmeasured / "costs.json").read_text()) == first.costs
    second = run(unmeasured, resume=True)
    assert second.costs["complete"]
    assert second.costs["costs"][:3] == first.costs["costs"]


def test_an_interrupted_training_has_no_costs(unmeasured, monkeypatch):
    monkeypatch.setattr(
        "lastlayer.lab.comparison._run_all", lambda *args: args[-1].append(True) or []
    )
    done = run(unmeasured, resume=True)
    assert (done.interrupted, done.costs) == (True, None)
    assert not (unmeasured / "costs.json").exists()


def test_words_are_different_and_as_many_as_classes():
    own = ["a", "bb", "ccc", "dddd", "eeeee"]
    for classes in (1, 2, 4, 5, 6, 23):
        words = list(Words(own, classes))
        assert len(set(words)) == len(words) == classes


def problem(shape, lengths) -> Problem:
    counts = np.arange(50, 0, -1)
    needs = ClassData(8, counts, [f"w{i}" for i in range(50)])
    return Problem(needs, shape, lengths, torch.device("cpu"))


@pytest.mark.parametrize("classes", [2, 50, 500])
def test_targets_and_counts_follow_zipf_s_law(classes):
    made = problem((16, 32), None)
    target = made.batch(classes).target
    assert target.shape == (16, 32)
    assert made.body()(None).shape == (16, 32, 8)
    often = torch.bincount(target.flatten(), minlength=classes)
    assert len(often) == classes
    assert often.argmax() == 0
    counts = made.at(classes).counts
    assert len(counts) == classes
    assert counts.min() >= 1
    assert (np.diff(counts) <= 0).all()
    assert counts[0] == pytest.approx(2 * counts[1], abs=2)


@pytest.mark.parametrize("classes", [100, 5000])
def test_rows_have_as_many_labels_as_in_the_data(classes):
    lengths = np.array([0, 1, 3, 7])
    made = problem((4, 7), lengths)
    target = made.batch(classes).target
    assert made.rows == 4
    assert made.body()(None).shape == (4, 8)
    for row, length in zip(target.tolist(), lengths, strict=True):
        labels = [each for each in row if each != PADDING]
        assert len(set(labels)) == len(labels) == length
        assert all(0 <= each < classes for each in labels)


def test_labels_are_measured_too(tmp_path):
    arff = "@relation made\n@attribute a numeric\n@attribute x {0,1}\n@attribute y {0,1}\n@data\n"
    arff += "".join(f"{i % 7},{i % 2},{int(i % 3 > 0)}\n" for i in range(60))
    (tmp_path / "labels.arff").write_text(arff)
    names = "".join(f'<label name="{name}"/>' for name in "xy")
    xml = f'<labels xmlns="http://mulan.sourceforge.net/labels">{names}</labels>'
    (tmp_path / "labels.xml").write_text(xml)
    heads = ("zlpr", "bce", "asymmetric", "sparsemax_labels")
    done = run(
        tmp_path / "out", data=tmp_path / "labels.arff", task="multilabel", heads=heads, length=None
    )
    assert done.costs["classes"] == [2, 8, 32, 128]
    assert (done.costs["task"], done.costs["rows"]) == ("multilabel", 4)
    assert [each["reason"] for each in done.costs["costs"]] == [""] * 16


def test_progress_is_shown():
    specs = parse_specs(["full", "entmax"])
    said = io.StringIO()
    lines = EventLines(Console(file=said, width=100), specs, 1)
    lines.measures(specs[0], 75, 0.0)
    lines.measures(specs[1], 75, 0.1)
    lines._told = 0.0
    lines.measures(specs[0], 1200, 0.5)
    told = [line.partition(" ")[2] for line in said.getvalue().splitlines()]
    assert told == [
        "Measuring the cost of each head against the number of classes",
        "cost against classes: 50%, full with 1,200",
    ]
    drawn = io.StringIO()
    console = Console(file=drawn, width=100, force_terminal=True)
    table = LiveTable(console, specs, [1])
    table.measures(specs[1], 1200, 0.5)
    table.close()
    assert "cost against classes: 50%, entmax with 1,200" in drawn.getvalue()
