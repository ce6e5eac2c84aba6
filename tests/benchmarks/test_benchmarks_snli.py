"""Attention on SNLI: a dozen pairs are read, trained on, gone on with, and become a page."""

import gzip
import json
import statistics

import pytest
import torch

from benchmarks import snli
from benchmarks.__main__ import DOCS, RESULTS, main

pytest.importorskip("matplotlib")

PREMISES = ("A man in a T-shirt doesn't ride the dog's bike.", "Two women, by the sea, are here!")
HYPOTHESES = ("A man rides.", "The bike is new.", "Nobody isn't here.")


@pytest.fixture
def place(tmp_path):
    """A folder with two premises, each with a hypothesis of each label, in all three formats."""
    pairs = [(p, h, label) for p in PREMISES for label, h in enumerate(HYPOTHESES)]
    folder = tmp_path / "data" / "snli"
    folder.mkdir(parents=True)

    def write(name, lines):
        (folder / name).write_bytes(gzip.compress("\n".join(lines).encode()))

    number = {0: "3", 1: "1", 2: "2"}
    twice = [*pairs, *pairs]
    write("subset_train.tsv.gz", ["\t".join([number[x], number[x], p, h]) for p, h, x in twice])
    keys = "premise", "hypothesis", "label"
    rows = [dict(zip(keys, (p, h, snli.LABELS[x]), strict=True)) for p, h, x in pairs]
    write("dev.jsonl.gz", map(json.dumps, rows))
    clean = [" ".join(snli.words(each)) for each in (*PREMISES, *HYPOTHESES)]
    write("test.txt.gz", [f"{p}\t{h}\t{x}" for p in clean[:2] for x, h in enumerate(clean[2:])])
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def run(place, *more):
    return main(["snli", str(place / "data"), "--json", str(place / "snli.json"), *more])


def kept(place):
    return json.loads((place / "snli.json").read_text(encoding="utf-8"))


def test_the_three_files_give_the_same_pairs(place):
    texts = snli.read(place / "data")
    assert texts["train"][:6] == texts["dev"] == texts["test"]
    first = ["a", "man", "in", "a", "t-shirt", "does", "n't", "ride", "the", "dog", "'s", "bike"]
    assert texts["test"][0] == (first, ["a", "man", "rides"], 0)
    assert [each.label for each in texts["train"]] == [0, 1, 2] * 4


def test_batches_have_every_pair_once(place):
    texts = snli.read(place / "data")["train"]
    ids, start = snli.learn_words(texts, snli.Settings(width=4))
    pairs = snli.encode(texts, ids)
    assert len(start) == len(ids) + 2
    assert not start[: snli.UNKNOWN + 1].any()
    row = lambda x: tuple(x[x != snli.PADDING].tolist())  # noqa: E731

    def seen(batches):
        return [(row(p), row(h), int(x)) for b in batches for p, h, x in zip(*b, strict=True)]

    expected = seen([pairs])
    assert seen(pairs.batches(5)) == expected
    order = torch.Generator().manual_seed(0)
    shuffled, again = seen(pairs.batches(5, order)), seen(pairs.batches(5, order))
    assert sorted(shuffled) == sorted(again) == sorted(expected)
    assert shuffled != again


def test_a_text_without_words_is_one_unknown_word():
    pairs = snli.encode([snli.Text([], ["so"], 1)], {"so": 2})
    assert pairs.premise.tolist() == [[snli.UNKNOWN]]
    assert pairs.hypothesis.tolist() == [[2]]


def test_focus():
    premise = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [9, 9, 0, 0]])
    weights = torch.tensor([[0.0, 0.97, 0.03, 0.0], [0.5, 0.0, 0.0, 0.5], [0.06, 0.94, 0.0, 0.0]])
    found = snli.focus(weights, premise)
    torch.testing.assert_close(found["kept"], torch.tensor([0.5, 0.5, 1.0]))
    torch.testing.assert_close(found["most"], torch.tensor([0.25, 0.5, 1.0]))
    torch.testing.assert_close(found["place"], torch.tensor([1.03 / 3, 0.5, 0.94]))
    torch.testing.assert_close(
        found["moved"], torch.tensor([float("nan"), 1.0, float("nan")]), equal_nan=True
    )


@pytest.mark.parametrize("name", [m for m, x in snli.METHODS.items() if x.alpha is not None])
def test_weights_are_those_that_the_premise_is_read_with(name):
    torch.manual_seed(0)
    method, start = snli.METHODS[name], 3 * torch.randn(9, 4)
    model = snli.Reader(start, method, 0.0)
    premise = torch.tensor([[2, 3, 4, 5, 6], [7, 8, 0, 0, 0]])
    pairs = snli.Pairs(premise, torch.tensor([[3, 4], [5, 0]]), torch.tensor([0, 1]))
    weights = model.weights(pairs)
    torch.testing.assert_close(weights.sum(1), torch.ones(2))
    assert not weights[1, 2:].any()
    both, mask = model._read(pairs)
    torch.testing.assert_close(model.pool(both, mask), (weights.unsqueeze(1) @ both).squeeze(1))
    shorter = snli.Pairs(*(each[1:] for each in pairs))
    shorter = snli.Pairs(shorter.premise[:, :2], shorter.hypothesis[:, :1], shorter.label)
    torch.testing.assert_close(model(shorter), model(pairs)[1:])


def test_methods_of_a_seed_start_at_the_same_parameters():
    start, made = torch.randn(5, 4), []
    for method in snli.METHODS.values():
        torch.manual_seed(3)
        made.append(snli.Reader(start, method, 0.1).state_dict())
    for name, value in made[0].items():
        assert all(torch.equal(value, each[name]) for each in made)


def test_the_hypothesis_alone_knows_nothing_of_the_premise():
    model = snli.Reader(torch.randn(9, 4), snli.METHODS["hypothesis"], 0.0)
    hypothesis, label = torch.tensor([[3, 4], [3, 4]]), torch.tensor([0, 1])
    scores = model(snli.Pairs(torch.tensor([[2, 3, 4], [7, 8, 0]]), hypothesis, label))
    torch.testing.assert_close(scores[0], scores[1])


def test_the_best_epoch_is_kept(place, monkeypatch):
    texts = snli.read(place / "data")
    settings = snli.Settings(width=4, epochs=3)
    ids, start = snli.learn_words(texts["train"], settings)
    parts = {part: snli.encode(each, ids) for part, each in texts.items()}
    right, states = [0.5, 1.0, 0.5], []

    def predict(model, pairs, _device):
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        n = round(right[len(states) - 1] * len(pairs.label))
        return torch.cat([pairs.label[:n], pairs.label[n:] - 1])

    monkeypatch.setattr(snli, "predict", predict)
    cpu = torch.device("cpu")
    model, curves = snli.train(parts, start, snli.METHODS["softmax"], 1, settings, cpu)
    assert curves["dev"] == right
    assert len(curves["loss"]) == 3
    assert all(torch.equal(x, states[1][name]) for name, x in model.state_dict().items())
    assert not all(torch.equal(x, states[2][name]) for name, x in model.state_dict().items())


def test_runs_become_tables_and_pictures(place, capsys):
    assert run(place, "--seeds", "2", "--commit", "abc1234") == 0
    assert "12 of 12: entmax, learned α, seed 2" in capsys.readouterr().out
    runs = kept(place)["runs"]
    assert sorted({(x["method"], x["seed"]) for x in runs}) == sorted(
        (name, seed) for name in snli.METHODS for seed in (1, 2)
    )
    (soft,) = (x for x in runs if x["method"] == "softmax" and x["seed"] == 1)
    assert soft["test"]["kept"]["all"] == 1.0
    assert [len(each) for each in soft["weights"]] == [12] * 3
    assert {x["alpha"] for x in runs if x["method"] == "learned"}.isdisjoint({1.5})

    (place / "snli.md").write_text("What surprised us.\n", encoding="utf-8")
    (place / "docs" / "pictures").mkdir(parents=True)
    written = snli.write_page(place, place / "docs")
    assert [x.name for x in written] == [snli.PICTURE, snli.WORDS_PICTURE, snli.PAGE]
    assert all(x.read_bytes().startswith(b"\x89PNG") for x in written[:2])
    page = written[2].read_text(encoding="utf-8")
    assert page.endswith("What surprised us.\n")
    (line,) = (x for x in page.splitlines() if x.startswith("| sparsemax | ") and "±" in x)
    tests = {
        name: [x["test"]["accuracy"]["all"] for x in runs if x["method"] == name]
        for name in ("sparsemax", "softmax")
    }
    cells = [cell.split("±")[0].strip() for cell in line.strip("|").split("|")]
    mean, base = (100 * statistics.fmean(tests[name]) for name in ("sparsemax", "softmax"))
    assert [float(x) for x in cells[2:4]] == pytest.approx([mean, mean - base], abs=0.06)
    assert "at abc1234." in page


def test_a_study_that_was_stopped_goes_on(place, monkeypatch, capsys):
    train, made = snli.train, []

    def stopping(parts, start, method, *rest):
        made.append(method)
        if len(made) == 3:
            raise KeyboardInterrupt
        return train(parts, start, method, *rest)

    monkeypatch.setattr(snli, "train", stopping)
    assert run(place, "--seeds", "1") == 1
    assert "call it again to go on" in capsys.readouterr().out
    first = kept(place)["runs"]
    assert [x["method"] for x in first] == list(snli.METHODS)[:2]
    assert run(place, "--seeds", "1") == 0
    assert kept(place)["runs"][:2] == first
    assert [x["method"] for x in kept(place)["runs"]] == list(snli.METHODS)
    assert len(made) == 7, "a run that was kept was made again"
    assert run(place, "--seeds", "1", "--lr", "0.01") == 2
    assert "--json: expected a file of runs with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "data: expected a folder with snli/subset_train.tsv.gz, got 'nowhere'"),
        (["data", "--seeds", "0"], "--seeds: expected at least 1, got 0"),
        (["data", "--lr", "0"], "--lr: expected more than 0, got 0.0"),
    ],
)
def test_mistakes_are_told_before_any_work(place, monkeypatch, capsys, words, told):
    monkeypatch.chdir(place)
    monkeypatch.setattr(snli, "learn_words", lambda *_: pytest.fail("work was done"))
    assert main(["snli", *words, "--json", "snli.json"]) == 2
    assert told in capsys.readouterr().err
    assert not (place / "snli.json").exists()


def test_the_committed_page_is_what_the_committed_runs_give():
    page = (DOCS / snli.PAGE).read_text(encoding="utf-8")
    assert page == snli.render(RESULTS / "study")
