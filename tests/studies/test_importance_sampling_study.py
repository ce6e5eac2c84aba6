"""The study of importance sampling: what it counts, what it compares, and what it makes of it."""

import gzip
import json
import math
import random

import pytest
import torch

from lastlayer.lab.data.text import Reading
from lastlayer.lab.training import Stepper
from studies import importance_sampling as study
from studies.__main__ import main
from studies.importance_sampling import ADAPTIVE, EXACT, NAMES, SAMPLED, SHARED, UNIGRAM
from studies.language import Model, Setting, brown, feed_of, fit

SETTING = Setting(width=study.SETTING.width, batch=8, length=16, epochs=2, held_out=600)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text in which the word before says much about the next."""
    rng, word, words = random.Random(0), 1, []
    for _ in range(12_000):
        word = (3 * word + 1) % 300 if rng.random() < 0.5 else int(rng.paretovariate(0.8)) % 300
        words.append(f"w{word}")
    made = tmp_path_factory.mktemp("data")
    (made / "brown").mkdir()
    text = "# made\n" + "\n".join(" ".join(words[i : i + 20]) for i in range(0, len(words), 20))
    (made / "brown" / "brown.txt.gz").write_bytes(gzip.compress(text.encode()))
    return made


@pytest.fixture(scope="module")
def data(folder):
    return brown(folder / "brown" / "brown.txt.gz", Reading(min_count=4))


def test_quick_on_made_text(folder, tmp_path, capsys):
    arguments = ["importance-sampling", "--quick", "--device", "cpu", "--data", str(folder)]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "19 (2003)†" in shown
    assert "100 (2008)†" in shown
    assert (tmp_path / "importance-sampling.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "importance-sampling.json").read_text())["found"]
    assert set(found["runs"]) == set(NAMES)
    for name, (run,) in found["runs"].items():
        assert len(run["curve"]) == len(run["watched"]) + 1 == 5
        # Looks at the ends of epochs are what the epochs have.
        assert [each[1] for each in run["curve"][::2]] == run["valid"]
        assert [each[0] for each in run["curve"][::2]] == run["seconds"]
        scores = [each["scores"] for each in run["watched"]]
        if name in (EXACT, SAMPLED):
            assert set(scores) == {found["classes"] if name == EXACT else study.SAMPLES + 1}
        else:
            expected = [1 + x["drawn"] + x["all"] * found["classes"] for x in run["watched"]]
            assert scores == pytest.approx(expected, rel=1e-4)
            assert min(x["drawn"] for x in run["watched"]) >= study.TARGET_ESS


def test_divergence_is_kl_and_what_draws_are_worth():
    torch.manual_seed(0)
    log_p = torch.randn(3, 40, dtype=torch.float64).log_softmax(-1)
    log_q = (0.5 * torch.randn(40, dtype=torch.float64)).log_softmax(-1)
    kl, worth = study.divergence(log_p, log_q)
    expected = torch.nn.functional.kl_div(
        log_q.expand(3, -1), log_p, reduction="none", log_target=True
    )
    assert torch.allclose(kl, expected.sum(-1))
    # The effective size of many draws is their number over Σ p² / q.
    ids = torch.multinomial(log_q.exp(), 400_000, replacement=True)
    weight = (log_p - log_q)[:, ids].exp()
    ess = weight.sum(-1).square() / weight.square().sum(-1)
    assert torch.allclose(ess * worth, torch.full_like(ess, 400_000.0), rtol=0.05)
    same, one = study.divergence(log_q, log_q)
    assert same.item() == pytest.approx(0.0, abs=1e-12)
    assert one.item() == pytest.approx(1.0)


@pytest.mark.parametrize("name", [UNIGRAM, ADAPTIVE, SHARED])
def test_the_watcher_counts_the_draws_of_training_steps_alone(data, name):
    torch.manual_seed(0)
    watcher = study.Watcher(name, data)
    feed = feed_of(data, SETTING, CPU)
    body = torch.nn.Embedding(data.n_classes, SETTING.width, sparse=True)
    head = watcher.make()
    head.init_bias_from_counts(data.counts)
    stepper = Stepper(body, head, 0.01, clip=1.0)
    drawn, gave_up = 0, 0
    for step in range(3):
        stepper.step(feed.batch(0, step))
        drawn += int(head.n_drawn.sum())
        gave_up += int(head.took_all.sum())
    with torch.no_grad():
        stepper.loss(feed.batch(0, 3))
    words = 3 * feed.batch_size
    found = watcher(Model(body, head), feed)
    assert found["words"] == words
    assert found["drawn"] == pytest.approx(drawn / words)
    assert found["all"] == pytest.approx(gave_up / words)
    assert found["scores"] == pytest.approx(1 + (drawn + gave_up * data.n_classes) / words)
    assert ("kl_own" in found) == (name == ADAPTIVE)
    assert watcher(Model(body, head), feed)["words"] == 0


def test_the_proposal_of_the_unigram_head_stays_the_unigram(data):
    """It draws for each row, and learns nothing, unlike the adaptive one."""
    feed = feed_of(data, SETTING, CPU)
    moved = {}
    for name in (UNIGRAM, ADAPTIVE):
        torch.manual_seed(0)
        body = torch.nn.Embedding(data.n_classes, SETTING.width, sparse=True)
        head = study.make_head(name, data)
        before = [each.clone() for each in head.sampler.proposal()]
        stepper = Stepper(body, head, 0.01, clip=1.0)
        for step in range(2):
            stepper.step(feed.batch(0, step))
        pairs = zip(before, head.sampler.proposal(), strict=True)
        moved[name] = not all(torch.equal(a, b) for a, b in pairs)
    assert moved == {UNIGRAM: False, ADAPTIVE: True}


def test_looks_within_an_epoch_do_not_change_what_is_trained(data):
    once, _ = fit(data, lambda: study.make_head(EXACT, data), 0.01, 0, SETTING, CPU)
    often, _ = fit(data, lambda: study.make_head(EXACT, data), 0.01, 0, SETTING, CPU, looks=3)
    assert often["valid"] == pytest.approx(once["valid"], rel=1e-5)
    assert "curve" not in once
    assert len(often["curve"]) == 1 + 3 * (len(often["valid"]) - 1)


def _run(perplexities, scores=100.0, seconds=10.0, drawn=100.0, kl=1.0):
    """Two looks per epoch; draws and KL grow from look to look where they are given as a list."""
    n = len(perplexities) - 1
    drawn = drawn if isinstance(drawn, list) else [drawn] * n
    kl = kl if isinstance(kl, list) else [kl] * n
    watched = [
        {"words": 10.0, "drawn": d, "all": 0.0, "scores": scores, "kl_unigram": k, "kl_own": k,
         "needed_unigram": d, "needed_own": d}
        for d, k in zip(drawn, kl, strict=True)
    ]  # fmt: skip
    curve = [[i * seconds, each] for i, each in enumerate(perplexities)]
    return {
        "curve": curve, "watched": watched, "valid": perplexities[::2],
        "seconds": [each[0] for each in curve[::2]], "test": perplexities[-1], "rate": 0.01,
        "flat": True, "seed": 0, "step_ms": 1.0, "parameters": 1,
    }  # fmt: skip


CURVE = [400.0, 200.0, 150.0, 120.0, 100.0]


def test_when_a_level_is_reached_and_when_it_is_not():
    run = _run(CURVE)
    point = study.reached(run, math.sqrt(400 * 200))
    assert point.seconds == pytest.approx(5.0)
    assert point.scores == pytest.approx(500.0)
    assert study.reached(run, 150.0).seconds == pytest.approx(20.0)
    assert study.reached(run, 400.0).seconds == 0.0
    assert study.reached(run, 99.0) is None


def _found(**changed):
    runs = {
        EXACT: _run(CURVE, scores=5000.0),
        UNIGRAM: _run(CURVE, scores=250.0, seconds=4.0, drawn=[100.0, 200.0, 300.0, 400.0]),
        ADAPTIVE: _run(CURVE, scores=50.0, seconds=2.0, kl=0.3),
        SHARED: _run(CURVE, scores=250.0),
        SAMPLED: _run(CURVE, scores=501.0),
    }
    runs |= changed
    made = {name: [run] * 3 for name, run in runs.items()}
    return {
        "classes": 5000, "tokens": 10_000, "looks": 2, "most": 1250, "runs": made, "batch": 1024,
        "exact_ns": {"1": 80.0, "1024": 8.0},
    }  # fmt: skip


def test_speed_ups_and_the_verdict_follow_from_the_figures():
    found = _found()
    assert study.speed_ups(found, EXACT, "best") == [pytest.approx((1.0, 1.0))] * 3
    assert study.speed_ups(found, ADAPTIVE, "epoch") == [pytest.approx((5.0, 100.0))] * 3
    told = study.verdict(found)
    assert told.word == "holds"
    assert "5.0 times as fast and with 100.0 times fewer scores" in told.why
    slow = _found(**{ADAPTIVE: _run(CURVE, scores=50.0, seconds=20.0, kl=0.3)})
    assert study.verdict(slow).word == "holds in part"
    assert "2.0 times as slowly" in study.verdict(slow).why
    never = [400.0, 390.0, 380.0, 370.0, 360.0]
    bad = _found(**{name: _run(never, seconds=20.0) for name in (UNIGRAM, ADAPTIVE)})
    told = study.verdict(bad)
    assert told.word == "does not hold"
    assert "in 0 of 3 runs" in told.why
    assert [row[1] for row in study.grids(bad)[1].rows[:2]] == ["not reached"] * 2
