"""The language models of the studies: corpora, training until flat, the best model."""

import gzip
import random

import numpy as np
import pytest
import torch

from lastlayer.heads import FullSoftmax, HierarchicalSoftmax
from lastlayer.lab.data.text import Reading
from lastlayer.trees import huffman
from studies import language

SETTING = language.Setting(width=16, batch=4, length=8, epochs=6, rates=(0.03,), held_out=500)
CPU = torch.device("cpu")


@pytest.fixture
def corpus(tmp_path, seed):
    """Sentences of a chain in which one word follows another most of the time."""
    rng, word, lines = random.Random(seed), 0, ["# ca01"]
    for _ in range(200):
        line = []
        for _ in range(19):
            word = (word + 1) % 40 if rng.random() < 0.8 else int(rng.paretovariate(0.7)) % 40
            line.append(f"W{word}")
        lines.append(" ".join(line))
    path = tmp_path / "brown.txt.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_brown_is_cut_in_its_order_without_the_names_of_files(corpus):
    data = language.brown(corpus, Reading())
    assert [len(part) for part in (data.train, data.valid, data.test)] == [2800, 666, 534]
    assert not {"#", "ca01"} & set(data.vocabulary.tokens)
    assert "w1" in data.vocabulary.tokens
    assert data.counts.sum() == len(data.train)


def test_wikitext2_keeps_its_parts(tmp_path):
    for part, text in (("train", "a b a <unk>\na b\n"), ("valid", "a c\n"), ("test", "b b\n")):
        (tmp_path / f"{part}.txt.gz").write_bytes(gzip.compress(text.encode()))
    data = language.wikitext2(tmp_path, Reading())
    assert data.vocabulary.decode(data.train) == [
        "a",
        "b",
        "a",
        "<unk>",
        "<eos>",
        "a",
        "b",
        "<eos>",
    ]
    assert data.vocabulary.decode(data.valid) == ["a", "<unk>", "<eos>"]


def test_a_run_learns_ends_and_gives_its_best_model(corpus, seed):
    data = language.brown(corpus, Reading())
    tree = huffman(data.counts)
    for make in (
        lambda: FullSoftmax(16, data.n_classes),
        lambda: HierarchicalSoftmax(16, tree, sparse=True),
    ):
        run, model = language.fit(data, make, 0.03, seed, SETTING, CPU)
        assert len(run["valid"]) == len(run["seconds"]) <= SETTING.epochs + 1
        assert min(run["valid"]) < 0.6 * run["valid"][0]
        assert all(np.diff(run["seconds"]) > 0)
        feed = language.feed_of(data, SETTING, CPU)
        again = language.perplexity(model, feed, "valid", SETTING)
        assert again == pytest.approx(min(run["valid"]))
        rows = language.judge(model, feed, "test", SETTING)
        assert np.exp(rows.nll.mean()) == pytest.approx(run["test"], rel=1e-5)


def test_the_rate_that_learns_is_chosen(corpus, seed):
    data = language.brown(corpus, Reading())
    setting = SETTING._replace(rates=(1e-6, 0.03))
    make = lambda: FullSoftmax(16, data.n_classes)  # noqa: E731
    assert language.choose_rate(data, make, seed, setting, CPU) == 0.03


def test_curves_that_still_fall_are_named():
    runs = {"full": [{"flat": True}, {"flat": False}], "nce": [{"flat": True}]}
    assert language.not_flat(runs) == (
        "In 1 of 3 runs validation still improved at the last epoch (full)."
    )
    assert language.not_flat({"nce": runs["nce"]}) == (
        "In all 1 runs validation had stopped improving before the last epoch."
    )
