"""What is said of data before training."""

import json
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from lastlayer import trees
from lastlayer.cli import app
from lastlayer.lab.data import LabelData, LabelPart, Lists, TextData, Vocabulary, load
from lastlayer.lab.inspect import (
    for_labels,
    for_text,
    inspect_data,
    render,
    unigram_nll,
    zipf_fit,
)


def text_of(counts, name="made"):
    """Text with these counts, in all three parts."""
    tokens = ("<unk>", *(f"w{i}" for i in range(1, len(counts))))
    ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    words = Vocabulary(tokens, np.asarray(counts, np.int64))
    return TextData(name, words, ids, ids, ids[: len(ids) // 2], {"source": "here"})


@pytest.fixture(scope="module")
def zipfian():
    return inspect_data(text_of((200_000 / np.arange(1, 12_001)).astype(int)))


@pytest.mark.parametrize("slope", [0.5, 1.0, 1.7])
def test_the_slope_of_a_law_is_found(slope):
    fit = zipf_fit((1e9 / np.arange(1, 1001) ** slope).astype(np.int64))
    assert fit.slope == pytest.approx(slope, abs=0.01)
    assert fit.r_squared > 0.999
    assert fit.ranks == 1000 if slope < 1.7 else fit.ranks <= 1000


def test_the_slope_does_not_hang_on_order_or_on_classes_that_are_rare(seed):
    counts = (1e6 / np.arange(1, 3001)).astype(np.int64)
    fit = zipf_fit(counts)
    mixed = np.random.default_rng(seed).permutation(counts)
    assert zipf_fit(mixed) == fit
    assert zipf_fit(np.concatenate([counts, np.ones(50_000, np.int64)])) == fit


def test_no_slope_where_there_is_nothing_to_fit():
    assert zipf_fit(np.full(9, 100)) is None
    assert zipf_fit(np.full(1000, 4)) is None
    level = zipf_fit(np.full(1000, 50))
    assert level.slope == pytest.approx(0.0, abs=1e-12)


def test_entropy_tail_and_half():
    few = inspect_data(text_of([1, 4, 2, 1])).numbers
    assert few["entropy_bits"] == pytest.approx(1.75)
    assert few["half"] == 1
    assert few["tail_1k"] == 0.0
    assert inspect_data(text_of([3, 3, 1])).numbers["half"] == 2
    many = inspect_data(text_of([3] * 1000 + [1] * 500)).numbers
    assert many["tail_1k"] == pytest.approx(500 / 3500)
    assert many["half"] == 584


def test_the_unigram_model_is_normalised(seed):
    counts = np.random.default_rng(seed).integers(0, 9, 20)
    counts[0] = 1
    each = [np.exp(-unigram_nll(counts, np.array([c]))) for c in range(20)]
    assert sum(each) == pytest.approx(1.0)


def test_text(zipfian):
    counts = (200_000 / np.arange(1, 12_001)).astype(int)
    found = zipfian.numbers
    assert zipfian.task == "lm"
    assert zipfian.classes == 12_000
    assert zipfian.zipf.slope == pytest.approx(1.0, abs=0.02)
    assert found["effective_classes"] == pytest.approx(2 ** found["entropy_bits"])
    # On its own counts the unigram model comes near the entropy.
    assert found["unigram_perplexity"] == pytest.approx(found["effective_classes"], rel=0.01)
    assert found["entropy_bits"] <= found["huffman_bits"] < found["entropy_bits"] + 1
    assert found["huffman_bits"] < found["balanced_bits"] <= np.ceil(np.log2(12_000))
    assert found["tail_1k"] == pytest.approx(counts[1000:].sum() / counts.sum())
    assert found["tail_10k"] == pytest.approx(counts[10_000:].sum() / counts.sum())
    assert found["unknown"] == pytest.approx(counts[0] / counts.sum())
    assert list(found["cutoffs"]) == sorted(found["cutoffs"])
    assert found["adaptive_savings"] > 1.5
    assert json.loads(json.dumps(zipfian.as_json()))["task"] == "lm"


def test_every_suggestion_is_a_spec_with_a_reason(zipfian):
    from lastlayer.lab.specs import parse_spec

    heads = [each.head for each in zipfian.suggestions]
    assert heads[0].startswith("adaptive:cutoffs=")
    assert "full" in heads
    assert len({*heads}) == len(heads)
    for each in zipfian.suggestions:
        parse_spec(each.head, task="lm")
        assert each.why.endswith(".")


FACTS = {
    "classes": 50_000,
    "effective_classes": 900.0,
    "half": 100,
    "seen_once": 0.1,
    "huffman_bits": 10.0,
    "cutoffs": (100, 5000),
    "adaptive_savings": 9.0,
    "hidden": 256,
}


@pytest.mark.parametrize(
    ("changed", "first", "has", "lacks"),
    [
        ({}, "adaptive:cutoffs=100,5000", "differentiated", "char_cnn"),
        ({"classes": 500, "effective_classes": 300.0}, "full", "full", "hierarchical"),
        ({"cutoffs": (), "adaptive_savings": 1.0}, "full", "sampled", "adaptive:cutoffs="),
        ({"effective_classes": 40_000.0}, "adaptive:cutoffs=100,5000", "full", "entmax"),
        ({"seen_once": 0.5}, "adaptive:cutoffs=100,5000", "char_cnn", "differentiated"),
        ({"classes": 5_000}, "adaptive:cutoffs=100,5000", "hierarchical", "sampled"),
    ],
)
def test_facts_decide(changed, first, has, lacks):
    facts = {**FACTS, **changed}
    heads = [each.head for each in for_text(facts.pop("classes"), facts)]
    assert heads[0] == first
    assert has in heads
    assert lacks not in heads


def test_labels():
    lists = Lists(np.array([0, 1, 0, 0, 2]), np.array([0, 2, 3, 3, 5]))
    train = LabelPart(np.array([[1, 0], [0, 0], [2, 1], [0, 3]], np.float32), lists)
    test = LabelPart(train.features[:1], Lists(np.array([0, 3]), np.array([0, 2])))
    names = ("a", "b", "c", "d")
    counts = np.array([3, 1, 1, 0])
    data = LabelData("set", train, test, test, ("x", "y"), names, counts, {"source": "s"})
    found = inspect_data(data)
    assert found.numbers["cardinality"] == 1.25
    assert found.numbers["density"] == 1.25 / 4
    assert found.numbers["without"] == 0.25
    assert found.numbers["most"] == 2
    assert found.numbers["distinct"] == 4
    assert found.numbers["filled"] == 0.5
    assert found.numbers["most_frequent"] == 0.75
    assert found.numbers["unseen"] == 0.25
    assert found.numbers["unseen_in_test"] == 0.5
    assert found.numbers["imbalance"] == pytest.approx(3 / 1.25)
    assert found.zipf is None
    assert json.loads(json.dumps(found.as_json()))["classes"] == 4


def test_facts_decide_for_labels():
    few = {"cardinality": 1.1, "density": 0.2, "imbalance": 2.0, "most": 3}
    assert [each.head for each in for_labels(6, few)] == ["zlpr", "bce", "sparsemax_labels"]
    many = {"cardinality": 19.0, "density": 0.02, "imbalance": 20.0, "most": 25}
    assert [each.head for each in for_labels(900, many)] == ["zlpr", "bce", "asymmetric"]


def test_what_comes_from_the_data_is_printed_as_it_is():
    console = Console(width=120, force_terminal=False)
    with console.capture() as got:
        render(inspect_data(text_of([30] * 40, name="[red]bold[/red]")), console)
    assert "[red]bold[/red]" in got.get()


def test_the_command(tmp_path):
    (tmp_path / "a.txt").write_text("a b a c\n" * 40)
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "a.txt")])
    assert shown.exit_code == 0
    told = CliRunner().invoke(
        app, ["inspect", str(tmp_path / "a.txt"), "--json", "--min-count", "1"]
    )
    content = json.loads(told.output)
    data = load(tmp_path / "a.txt", min_count=1)
    assert content["classes"] == data.n_classes
    depth = trees.huffman(np.maximum(data.counts, 1)).expected_depth(data.counts)
    assert content["huffman_bits"] == pytest.approx(depth)
    assert content["suggestions"][0]["head"] == "full"


@pytest.mark.parametrize(
    "arguments", [["no-such-file"], ["--task", "sums"], ["--encoding", "utf-9"]]
)
def test_the_command_refuses_with_code_2(tmp_path, arguments, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a b a c\n" * 40)
    source = [] if arguments[0] == "no-such-file" else ["a.txt"]
    shown = CliRunner().invoke(app, ["inspect", *source, *arguments])
    assert shown.exit_code == 2
    assert "lastlayer: " in shown.output
    assert "Traceback" not in shown.output


def test_the_module_is_imported_without_torch():
    code = "import sys, lastlayer.lab.inspect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
