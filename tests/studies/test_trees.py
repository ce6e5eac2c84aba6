"""The study of trees: its reader of WordNet, its vectors of words, its verdict, a quick run."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lastlayer.heads import HierarchicalSoftmax
from lastlayer.lab.data.text import Reading
from lastlayer.trees import WordNetReader, balanced, huffman, wordnet
from studies import language, trees
from studies.__main__ import main

sys.path.append(str(Path(__file__).parent))
from made_text import sentences, write, write_wikitext

TABLE = """\
1n\t03\tentity\t\tall there is
2n\t05\tanimal,beast\t1n\ta living thing
3n\t05\tdog,domestic_dog\t2n\ta member of the genus Canis
4n\t18\tcad,dog\t1n\tsomeone who is morally reprehensible
5n\t05\tpoodle\t3n\ta dog
6v\t38\tgo,move\t\tchange location
7v\t38\trun\t6v\tmove fast
8n\t04\trun,tally\t1n\ta score
9v\t38\tjog\t7v\trun slowly
10a\t00\tfast(a)\t\tquick
"""


@pytest.fixture
def synsets(tmp_path):
    path = tmp_path / "wordnet" / "glosses.tsv.gz"
    write(path, TABLE.splitlines())
    return trees.Synsets(path)


@pytest.fixture
def data(tmp_path):
    write(tmp_path / "brown" / "brown.txt.gz", ["# made", *sentences(500, 60, seed=1)])
    return language.brown(tmp_path / "brown" / "brown.txt.gz", Reading(min_count=1))


@pytest.mark.parametrize(
    ("word", "sense"),
    [
        ("dog", "3n"),  # named first there, second in "cad"
        ("Dogs", "3n"),
        ("beast", "2n"),
        ("run", "7v"),  # has a hyponym, the other sense has none
        ("going", None),  # base forms of two letters are left out
        ("jogs", "9v"),
        ("fast", "10a"),
        ("moved", "6v"),
        ("the", None),
    ],
)
def test_senses_of_words(synsets, word, sense):
    assert synsets.sense(word) == sense


def test_the_reader_makes_a_tree(synsets):
    assert isinstance(synsets, WordNetReader)
    assert synsets.area("7v") == "verb.38"
    tree = wordnet(["poodle", "beast", "jog", "the", "tally"], [1, 2, 3, 4, 5], reader=synsets)
    assert tree.n_classes == 5
    poodle, beast, jog = map(tree.code, ("poodle", "beast", "jog"))
    together = next(i for i, (a, b) in enumerate(zip(poodle, beast, strict=False)) if a != b)
    apart = next(i for i, (a, b) in enumerate(zip(poodle, jog, strict=False)) if a != b)
    assert apart < together


def test_two_trees_have_the_paths_of_both(data, synsets):
    vectors = torch.randn(data.n_classes, 8, generator=torch.Generator().manual_seed(0))
    known = trees.Known(data, synsets, seed=3, vectors=vectors)
    both = trees.two_trees(known)
    one = trees.TREES[trees.OVERLAPPING](known)
    other = trees._learned(known, 1, kind="adaptive", overlap=trees.OVERLAP)
    assert both.n_paths == one.n_paths + other.n_paths
    for c in range(data.n_classes):
        sides = enumerate((one, other))
        assert sorted(both.codes(c)) == sorted(
            [side, *code] for side, tree in sides for code in tree.codes(c)
        )


def test_choices_and_paths_are_those_of_the_words(data, synsets):
    tree = huffman(data.counts)
    found = trees.described(tree, data)
    assert found["choices"] == pytest.approx(tree.expected_depth(data.counts))
    assert found["paths"] == pytest.approx(1.0)
    known = trees.Known(data, synsets, 0, torch.randn(data.n_classes, 4))
    both = trees.two_trees(known)
    share = data.counts / data.counts.sum()
    lengths = [sum(map(len, both.codes(c))) for c in range(data.n_classes)]
    assert trees.described(both, data)["choices"] == pytest.approx(float(share @ lengths))


def test_mean_states_are_those_before_each_word(data):
    setting = language.Setting(width=4, epochs=1, rates=(0.01,), held_out=200)
    head = lambda: HierarchicalSoftmax(4, balanced(data.n_classes))  # noqa: E731
    _, model = language.fit(data, head, 0.01, 0, setting, torch.device("cpu"))
    feed = language.feed_of(data, setting, torch.device("cpu"))
    found = trees.mean_states(model, feed)
    before: dict[int, list[np.ndarray]] = {}
    for step in range(feed.steps_per_epoch):
        batch = feed.batch(0, step)
        with torch.no_grad():
            hidden = model.body(batch.inputs)
        for state, word in zip(hidden.flatten(0, 1), batch.target.flatten().tolist(), strict=True):
            before.setdefault(word, []).append(state.numpy())
    for word, each in before.items():
        np.testing.assert_allclose(found[word].numpy(), np.mean(each, 0), rtol=1e-4, atol=1e-5)


def _found(perplexity):
    """As measured, with these perplexities and hardly a difference between seeds."""
    runs = {
        name: [
            {"test": value + 0.01 * seed, "seconds": [0.0, 2.0, 4.0], "valid": [9.0, 8.0, 8.0],
             "flat": True, "rate": 0.01, "choices": 9.0, "paths": 1.0, "build": 0.1, "vectors": 0.1}
            for seed in range(3)
        ]
        for name, value in perplexity.items()
    }  # fmt: skip
    corpus = {
        "classes": 9, "tokens": {"train": 9}, "runs": runs,
        "in_wordnet": {"words": 0.5, "occurrences": 0.5},
    }  # fmt: skip
    return {"device": "cpu", "corpora": {"Made": corpus}}


def test_the_verdict_follows_the_perplexities():
    published = {name: float(trees.PUBLISHED.get(name, (140.0, 0))[0]) for name in trees.TREES}
    published[trees.FLAT] = trees.PUBLISHED[trees.FLAT][0]
    assert trees.verdict(_found(published)).word == "holds"
    upside_down = {name: 1000 - value for name, value in published.items()}
    told = trees.verdict(_found(upside_down))
    assert told.word == "does not hold"
    assert "learned < random" in told.why
    alike = dict.fromkeys(published, 100.0)
    assert "not significant" in trees.verdict(_found(alike)).why


def test_quick_on_made_texts(data, synsets, tmp_path, capsys):
    write_wikitext(tmp_path, words=60)
    out = tmp_path / "out"
    assert main(["trees", "--quick", "--data", str(tmp_path), "--out", str(out)]) == 0
    assert "Brown" in capsys.readouterr().out
    kept = json.loads((out / "trees.json").read_text(encoding="utf-8"))
    for corpus in kept["found"]["corpora"].values():
        assert list(corpus["runs"]) == [*trees.TREES, trees.FLAT]
        for (run,) in corpus["runs"].values():
            assert run["test"] < run["valid"][0]
