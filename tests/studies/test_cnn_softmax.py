"""The study of the CNN softmax: words held out, what is measured of them, and its verdict."""

import json
import math

import numpy as np
import pytest
import torch
from made_text import write_spelled_wikitext

from lastlayer.heads import CharCNNSoftmax, FullSoftmax
from lastlayer.lab.data.text import UNKNOWN, Reading
from lastlayer.lab.models import ModelSettings, build_body
from studies import cnn_softmax as study
from studies.__main__ import main
from studies.language import Model, Setting, wikitext2

SETTING = Setting(width=8, batch=8)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return wikitext2(
        write_spelled_wikitext(tmp_path_factory.mktemp("text")) / "wikitext2", Reading()
    )


@pytest.fixture(scope="module")
def held(whole):
    return study.hold_out(whole, study.Size(300, 8_000, 20, 4))


def _model(head, held):
    words = held.data.n_classes
    return Model(build_body(ModelSettings("bag", "lm", words, 8, length=SETTING.length)), head)


def test_words_held_out_are_unknown_everywhere_but_in_the_open_test_text(whole, held):
    data, n = held.data, held.data.n_classes
    assert (n, len(held.words), len(held.seen)) == (280, 20, 20)
    assert all(each.max() < n for each in (data.train, data.valid, data.test))
    assert not set(held.words) & set(data.vocabulary.tokens)
    assert np.array_equal(np.bincount(data.train, minlength=n), data.counts)
    spelled = np.array([*data.vocabulary.tokens, *held.words])
    before = np.array(whole.vocabulary.tokens)[whole.test]
    after = spelled[held.test]
    assert (after[after != UNKNOWN] == before[after != UNKNOWN]).all()
    is_new = held.test >= n
    assert is_new.any()
    assert (data.test[is_new] == data.vocabulary.unknown).all()
    assert np.array_equal(data.test[~is_new], held.test[~is_new])
    unseen = {*np.array(whole.vocabulary.tokens)[whole.train[:8_000]]} - {*data.vocabulary.tokens}
    assert held.types == len(unseen)
    new, seen = held.counts
    assert [data.counts[i] for i in held.seen] == seen
    assert all(study._OFTEN[0] <= each <= study._OFTEN[1] for each in (*new, *seen))


def test_too_short_a_text_is_refused(whole):
    with pytest.raises(ValueError, match="expected at least 4000 words that occur 6 to 100 times"):
        study.hold_out(whole, study.Size(300, 8_000, 2_000, 4))


def test_measures_of_a_group_are_those_of_a_loop():
    head, hidden = FullSoftmax(8, 30), torch.randn(40, 8)
    group = torch.tensor([3, 7, 8, 20, 29])
    target = group[torch.randint(5, (40,))]
    found = study.of_group(head, hidden, target, group)
    log_prob = head.log_prob(hidden).double().detach()
    sums = {"nll": 0.0, "others": 0.0, "among": 0.0, "rank": 0.0}
    for row, own in zip(log_prob, target.tolist(), strict=True):
        share = row[group].exp() / row[group].exp().sum()
        sums["nll"] -= row[own].item() / 40
        sums["others"] -= row[group].mean().item() / 40
        sums["among"] -= math.log(share[group.tolist().index(own)]) / 40
        sums["rank"] += sum(row[i] > row[own] for i in group.tolist()).item() / 4 / 40
    assert found == pytest.approx(sums)


def test_equal_scores_have_the_rank_and_perplexity_of_chance():
    head, group = FullSoftmax(8, 30), torch.arange(10, 20)
    for each in head.parameters():
        torch.nn.init.zeros_(each)
    found = study.of_group(head, torch.randn(25, 8), torch.randint(10, 20, (25,)), group)
    assert found["rank"] == pytest.approx(0.5)
    assert math.exp(found["among"]) == pytest.approx(10)
    assert math.exp(found["nll"]) == pytest.approx(30)
    assert study.by_frequency([3, 3, 3], np.array([5, 0, 1])) == pytest.approx(math.log(3))


def test_new_words_are_judged_wherever_they_come_next(held):
    torch.manual_seed(0)
    head = CharCNNSoftmax(8, held.data.vocabulary.tokens, filters=((1, 4), (2, 4)))
    model, n = _model(head, held), held.data.n_classes
    hidden, target = study.rows_before(model, held, SETTING)
    windows = (len(held.test) - 1) // SETTING.length
    after = held.test[1 : windows * SETTING.length + 1]
    assert len(target) == np.isin(after, [*range(n, n + 20), *held.seen]).sum()
    found = study.judge_words(model, held, SETTING)
    assert head.n_classes == n
    head.add_classes(held.words)
    head.eval()
    rows = target >= n
    own = head.log_prob(hidden[rows], target[rows])
    assert found["new"]["nll"] == pytest.approx(-own.mean().item(), rel=1e-5)
    assert len(found["near"]) == study._SHOWN
    assert set(found["near"]) <= set(held.words)
    plain = study.judge_words(_model(FullSoftmax(8, n), held), held, SETTING)
    assert "new" not in plain
    assert plain["unknown"] > math.log(held.types)


def test_quick_on_made_text(tmp_path, capsys):
    arguments = [
        "--quick",
        "--data",
        str(write_spelled_wikitext(tmp_path)),
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(["cnn-softmax", *arguments]) == 0
    assert "The pattern " in capsys.readouterr().out
    kept = json.loads((tmp_path / "o" / "cnn-softmax.json").read_text(encoding="utf-8"))["found"]
    assert kept["of_words"]["new"]["occurrences"] > 0
    assert {"full softmax", "full softmax, narrow", "CNN softmax"} <= set(kept["runs"])


def _found(full, bare, corrected, rank):
    group = {"nll": 8.0, "others": 8.5, "among": 4.0, "rank": rank}
    run = {"valid": [9.0, 5.0], "seconds": [0.0, 1.0], "rate": 0.01, "flat": True, "unknown": 9.0,
           "parameters": 1_000, "seen": group, "new": group}  # fmt: skip
    tests = {study.FULL: full, study.NARROW: full + 1, study.CNN: bare,
             f"{study.CNN} + 8": corrected}  # fmt: skip
    runs = {
        name: [run | {"test": value * more} for more in (0.999, 1.0, 1.001)]
        for name, value in tests.items()
    }
    words = {"occurrences": 100, "by_frequency": 4.0}
    return {"words": 4_000, "tokens": 1, "width": 64, "narrow": 24, "new": 200, "types": 9_000,
            "of_words": {"new": words, "seen": words}, "runs": runs}  # fmt: skip


def test_the_verdict_follows_the_figures():
    published = study.verdict(_found(30.0, 39.8, 35.8, 0.3))
    assert published.word == "holds"
    assert "regains 41% of" in published.why
    better = study.verdict(_found(40.0, 35.0, 34.0, 0.3))
    assert better.word == "holds in part"
    assert "Spelling costs nothing here" in better.why
    assert study.verdict(_found(40.0, 35.0, 36.0, 0.6)).word == "does not hold"
