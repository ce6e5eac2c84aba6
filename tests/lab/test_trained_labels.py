"""A run of labels: trained, explored, loaded again, exported, and told where it makes no text."""

import shutil

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lastlayer.cli import app
from lastlayer.lab.comparison import compare
from lastlayer.lab.options import CompareOptions
from lastlayer.lab.trained import load_trained

LABELS = {"tall", "wide"}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    values = np.random.default_rng(0).standard_normal((60, 2)) * [1, 1000]
    rows = "".join(f"{a},{b},{int(a > 0)},{int(b > 0)}\n" for a, b in values)
    header = "@relation r\n@attribute height numeric\n@attribute width numeric\n"
    header += "".join(f"@attribute {name} {{0,1}}\n" for name in sorted(LABELS))
    (folder / "a.arff").write_text(f"{header}@data\n{rows}")
    names = "".join(f'<label name="{name}"/>' for name in sorted(LABELS))
    (folder / "a.xml").write_text(
        f'<labels xmlns="http://mulan.sourceforge.net/labels">{names}</labels>'
    )
    options = CompareOptions(
        data=str(folder / "a.arff"), task="multilabel", heads=("zlpr",), budget="3steps", seeds=1,
        width=4,
    )  # fmt: skip
    return compare(
        options, folder / "out", resume=False, console=Console(quiet=True)
    )  # fmt: skip


def test_rows_are_explored(done):
    (result,) = done.results
    assert len(result["explorer"]) == 6
    for entry in result["explorer"]:
        assert {each["name"] for each in entry["features"]} == {"height", "width"}
        assert {each["label"] for each in entry["top"]} == LABELS
        assert {each["label"] for each in entry["top"] if each["right"]} == {*entry["labels"]}


def test_it_is_loaded_and_exported(done, tmp_path):
    run = done.out / "runs" / "zlpr-s1"
    exported = CliRunner().invoke(app, ["export", str(run), "--to", str(tmp_path / "alone")])
    assert exported.exit_code == 0, exported.output
    assert "features.json" in exported.output
    rows = torch.randn(5, 2)
    predicted = []
    for folder in (run, tmp_path / "alone"):
        trained = load_trained(folder)
        assert {*trained.vocabulary.tokens} == LABELS
        predicted.append(trained.head.probability(trained.body(rows)))
    assert torch.equal(*predicted)


def test_it_makes_no_text(done):
    made = CliRunner().invoke(app, ["generate", str(done.out)])
    assert made.exit_code == 2
    assert "expected a run of the task lm, got one of multilabel" in made.output


@pytest.mark.parametrize("name", ["model.safetensors", "head/model.safetensors", "config.json"])
def test_a_damaged_run_is_told(done, tmp_path, name):
    shutil.copytree(done.out / "runs" / "zlpr-s1", tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(b"{}")
    for words in (["generate"], ["export", "--to", str(tmp_path / "to")]):
        result = CliRunner().invoke(app, [words[0], str(tmp_path / "run"), *words[1:]])
        assert result.exit_code == 2, result.output
        # The comparison that has its vocabulary is elsewhere.
        assert ("damaged" if words == ["generate"] else "without") in result.output
    assert not (tmp_path / "to").exists()
