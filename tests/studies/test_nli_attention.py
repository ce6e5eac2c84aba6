"""Attention in inference: a dozen made pairs are read, trained on, and become tables and a plot."""

import gzip
import json
import statistics
from itertools import pairwise

import pytest
import torch

from studies import frame
from studies import nli_attention as nli
from studies.__main__ import main

PREMISES = ("A man in a T-shirt doesn't ride the dog's bike.", "Two women, by the sea, are here!")
HYPOTHESES = ("A man rides.", "The bike is new.", "Nobody isn't here.")
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """Two premises, each with a hypothesis of each label, in all three formats."""
    pairs = [(p, h, label) for p in PREMISES for label, h in enumerate(HYPOTHESES)]
    (tmp_path / "snli").mkdir()

    def write(name, lines):
        (tmp_path / name).write_bytes(gzip.compress("\n".join(lines).encode()))

    number = {0: "3", 1: "1", 2: "2"}
    twice = [*pairs, *pairs]
    write(nli.TRAIN, ["\t".join([number[x], number[x], p, h]) for p, h, x in twice])
    keys = "premise", "hypothesis", "label"
    rows = [dict(zip(keys, (p, h, nli.LABELS[x]), strict=True)) for p, h, x in pairs]
    write(nli.DEV, map(json.dumps, rows))
    clean = [" ".join(nli.words(each)) for each in (*PREMISES, *HYPOTHESES)]
    write(nli.TEST, [f"{p}\t{h}\t{x}" for p in clean[:2] for x, h in enumerate(clean[2:])])
    return tmp_path


@pytest.fixture
def texts(folder):
    return nli.read(frame.Options(folder, (0,), True, CPU))


def test_the_three_files_give_the_same_pairs(texts):
    assert texts["train"][:6] == texts["dev"] == texts["test"]
    first = ["a", "man", "in", "a", "t-shirt", "does", "n't", "ride", "the", "dog", "'s", "bike"]
    assert texts["test"][0] == (first, ["a", "man", "rides"], 0)
    assert [each.label for each in texts["train"]] == [0, 1, 2] * 4


def test_the_whole_training_part_is_taken_where_it_is_there(folder, texts):
    rows = [
        {"gold_label": label, "sentence1": PREMISES[0], "sentence2": HYPOTHESES[0], "pairID": "x"}
        for label in ("contradiction", "-", "entailment")
    ]
    (folder / nli.WHOLE).write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    found = nli.read(frame.Options(folder, (0,), True, CPU))
    assert [each.label for each in found["train"]] == [2, 0], "no agreement is no label"
    assert found["train"][1] == texts["train"][0]
    assert found["dev"] == texts["dev"]


def test_batches_have_every_pair_once_and_little_padding(texts):
    ids, start = nli.learn_words(texts["train"], nli.Settings(width=4))
    pairs = nli.encode(texts["train"], ids)
    assert len(start) == len(ids) + 2
    assert not start[: nli.UNKNOWN + 1].any()
    order = torch.Generator().manual_seed(0)
    in_order, shuffled, again = (list(pairs.batches(5, x)) for x in (None, order, order))
    for rows in (in_order, shuffled, again):
        assert sorted(torch.cat(rows).tolist()) == list(range(len(pairs.label)))
    assert torch.cat(shuffled).tolist() != torch.cat(again).tolist()
    lengths = [int((pairs.premise[rows] != nli.PADDING).sum(1).max()) for rows in in_order]
    assert all(a <= b for a, b in pairwise(lengths))
    assert [pairs.at(rows).premise.shape[1] for rows in in_order] == lengths


def test_a_text_without_words_is_one_unknown_word():
    pairs = nli.encode([nli.Text([], ["so"], 1)], {"so": 2})
    assert pairs.premise.tolist() == [[nli.UNKNOWN]]
    assert pairs.hypothesis.tolist() == [[2]]


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_focus(scale):
    """Weights that do not sum to 1 count by their shares."""
    premise = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [9, 9, 0, 0]])
    weights = torch.tensor([[0.0, 0.97, 0.03, 0.0], [0.5, 0.0, 0.0, 0.5], [0.06, 0.94, 0.0, 0.0]])
    found = nli.focus(scale * weights, premise)
    close = torch.testing.assert_close
    nan = float("nan")
    close(found["kept"], torch.tensor([0.5, 0.5, 1.0]))
    close(found["most"], torch.tensor([0.25, 0.5, 1.0]))
    close(found["place"].float(), torch.tensor([1.03 / 3, 0.5, 0.94]))
    close(found["moved"].float(), torch.tensor([nan, 1.0, nan]), equal_nan=True)


@pytest.mark.parametrize("name", [m for m, x in nli.METHODS.items() if x.alpha is not None])
def test_weights_are_those_that_the_premise_is_read_with(name):
    torch.manual_seed(0)
    model = nli.Reader(3 * torch.randn(9, 4), nli.METHODS[name], 0.0)
    premise = torch.tensor([[2, 3, 4, 5, 6], [7, 8, 0, 0, 0]])
    pairs = nli.Pairs(premise, torch.tensor([[3, 4], [5, 0]]), torch.tensor([0, 1]))
    weights = model.weights(pairs)
    assert not weights[1, 2:].any()
    if name == nli.LOGISTIC:
        assert ((weights > 0) & (weights < 1)).sum() == 7
        assert (weights.sum(1) - 1).abs().min() > 1e-3
    else:
        torch.testing.assert_close(weights.sum(1), torch.ones(2))
    both, mask = model.read(pairs)
    torch.testing.assert_close(model.pool(both, mask), (weights.unsqueeze(1) @ both).squeeze(1))
    shorter = nli.Pairs(premise[1:, :2], pairs.hypothesis[1:, :1], pairs.label[1:])
    torch.testing.assert_close(model(shorter), model(pairs)[1:])


def test_logistic_weights_are_sigmoids_of_the_scores_of_softmax():
    torch.manual_seed(0)
    logistic, soft = nli.LogisticPooling(6), nli.AttentionPooling(6, alpha=1.0)
    soft.load_state_dict(logistic.state_dict())
    hidden, mask = torch.randn(2, 5, 6), torch.ones(2, 5, dtype=torch.bool)
    weights = logistic.dense_weights(hidden, mask)
    made = (torch.softmax(torch.logit(weights), 1).unsqueeze(1) @ hidden).squeeze(1)
    torch.testing.assert_close(made, soft(hidden, mask))


def test_methods_of_a_seed_start_at_the_same_parameters():
    start, made = torch.randn(5, 4), []
    for method in nli.METHODS.values():
        torch.manual_seed(3)
        made.append(nli.Reader(start, method, 0.1).state_dict())
    for name, value in made[0].items():
        assert all(torch.equal(value, each[name]) for each in made)
    pools = [each["pool.query"] for each in made if "pool.query" in each]
    assert len(pools) == 4
    assert all(torch.equal(each, pools[0]) for each in pools)


def test_the_hypothesis_alone_knows_nothing_of_the_premise():
    model = nli.Reader(torch.randn(9, 4), nli.METHODS["hypothesis alone"], 0.0)
    hypothesis, label = torch.tensor([[3, 4], [3, 4]]), torch.tensor([0, 1])
    states = model(nli.Pairs(torch.tensor([[2, 3, 4], [7, 8, 0]]), hypothesis, label))
    torch.testing.assert_close(states[0], states[1])


def test_the_best_epoch_is_kept(texts, monkeypatch):
    settings = nli.Settings(width=4, epochs=3)
    ids, start = nli.learn_words(texts["train"], settings)
    parts = {part: nli.encode(each, ids) for part, each in texts.items()}
    right, states = [0.5, 1.0, 0.5], []

    def predict(model, pairs):
        states.append({k: v.clone() for k, v in model.reader.state_dict().items()})
        n = round(right[len(states) - 1] * len(pairs.label))
        return torch.cat([pairs.label[:n], pairs.label[n:] - 1])

    monkeypatch.setattr(nli.Model, "predict", predict)
    model, made = nli.train(parts, start, nli.METHODS["softmax"], 0.1, 1, settings, CPU)
    assert made["dev"] == right
    kept = model.reader.state_dict()
    assert all(torch.equal(x, states[1][name]) for name, x in kept.items())
    assert not all(torch.equal(x, states[2][name]) for name, x in kept.items())


def test_predictions_are_in_the_order_of_the_pairs(texts):
    ids, start = nli.learn_words(texts["train"], nli.Settings(width=4))
    pairs = nli.encode(texts["train"], ids)
    model = nli.Model(nli.Reader(start, nli.METHODS["sparsemax"], 0.5), nli.FullSoftmax(4, 3))
    found, weights = model.predict(pairs), model.weights(pairs)
    for i in range(len(pairs.label)):
        one = pairs.at(torch.tensor([i]))
        assert found[i] == model.predict(one)
        torch.testing.assert_close(weights[i, : one.premise.shape[1]], model.weights(one)[0])


def test_runs_become_a_table_and_a_plot(folder, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--quick", "--seeds", "2", "--device", "cpu", "--data", str(folder)]
    assert main(["nli-attention", *arguments, "--out", str(out)]) == 0
    assert "The pattern " in capsys.readouterr().out
    kept = json.loads((out / "nli-attention.json").read_text(encoding="utf-8"))
    assert (out / "nli-attention.png").read_bytes().startswith(b"\x89PNG")
    found = kept["found"]
    assert list(found["runs"]) == list(nli.METHODS)
    assert all(len(runs) == 2 for runs in found["runs"].values())
    assert found["runs"]["softmax"][0]["test"]["kept"] == 1.0
    assert [each["label"] for each in found["examples"]] == [0]
    assert [len(x) for x in found["seen"]["sparsemax"]["weights"]] == [7]
    (grid,) = nli.grids(found)
    assert {len(row) for row in grid.rows} == {len(grid.headings)}
    (row,) = (row for row in grid.rows if row[0] == "sparsemax")
    tests = [100 * run["test"]["accuracy"] for run in found["runs"]["sparsemax"]]
    assert row[1] == "82.20†"
    assert float(row[2].split()[0]) == pytest.approx(statistics.fmean(tests), abs=0.06)


def test_the_verdict_follows_the_figures():
    def made(sparse, last, kept):
        accuracy = dict.fromkeys(nli.METHODS, 0.7) | {nli.SPARSEMAX: sparse, nli.LAST: last}
        runs = {
            name: [
                {"rate": 0.1, "dev": [0.6, 0.7, 0.6, 0.6], "step_ms": 1.0,
                 "test": {"accuracy": value + 1e-4 * seed * (-1) ** i, "kept": kept, "most": 0.2,
                          "place": 0.5, "moved": 0.1}}
                for seed in range(3)
            ]
            for i, (name, value) in enumerate(accuracy.items())
        }  # fmt: skip
        settings, sizes = {"width": 64}, {"train": 18_000, "test": 9_824}
        return {"runs": runs, "whole": False, "settings": settings, "sizes": sizes}

    assert nli.verdict(made(0.7, 0.65, 0.3)).word == "holds"
    assert nli.verdict(made(0.7, 0.7, 0.3)).word == "holds in part"
    assert nli.verdict(made(0.6, 0.65, 0.3)).word == "does not hold"
    assert nli.verdict(made(0.7, 0.65, 0.9)).word == "does not hold"
