"""The study of frequency bands: its measures against their definitions, and a quick run."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from studies import frequency_bands as bands
from studies.__main__ import main

sys.path.append(str(Path(__file__).parent))
from made_text import write_wikitext

COUNTS = np.array([1000 // rank for rank in range(1, 401)])


@pytest.mark.parametrize("name", bands.HEADS)
def test_the_layout_has_every_class_once(name):
    head = bands.HEADS[name](COUNTS, 64)
    layout = bands.layout(head)
    assert sum(classes for classes, _ in layout) == head.n_classes == len(COUNTS)
    widths = [width for _, width in layout]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] <= 64
    hidden = torch.randn(5, 64)
    assert torch.allclose(head.log_prob(hidden).exp().sum(-1), torch.ones(5), atol=1e-5)


def test_shares_of_the_parameters_are_kept():
    full = len(COUNTS) * 64
    for name, share in (("differentiated, 1/2", 0.5), ("differentiated, 1/4", 0.25)):
        layout = bands.layout(bands.HEADS[name](COUNTS, 64))
        assert sum(classes * width for classes, width in layout) <= share * full


def test_prediction_is_timed_for_each_head():
    heads = {name: make(COUNTS, 64) for name, make in bands.HEADS.items()}
    hidden = {name: torch.randn(8, 64) for name in heads}
    times = bands.prediction_times(heads, hidden, torch.randint(400, (8,)), repeats=2)
    assert set(times) == set(heads)
    assert all(0 <= each < math.inf for found in times.values() for each in found.values())


def test_what_a_run_has_reached_in_some_time():
    run = {"seconds": [0.0, 2.0, 4.0, 6.0], "valid": [90.0, 50.0, 40.0, 45.0]}
    assert [bands.within(run, s) for s in (0.0, 2.0, 4.0, 5.0, 9.0)] == pytest.approx(
        [90, 50, 40, 40, 40]
    )
    assert bands.within(run, 1.0) == pytest.approx(math.sqrt(90 * 50))


def _run(test, seconds, deciles, topk=1.0):
    curve = [0.0, seconds, 2 * seconds]
    return {"test": test, "valid": [90.0, test + 1, test], "seconds": curve, "flat": True,
            "deciles": deciles, "topk": topk, "log_prob": topk, "rate": 0.01, "parameters": 10,
            "layout": [[10, 4]]}  # fmt: skip


def _found(**changed):
    """As published: adaptive is cheap, slices are early and worse for rare words."""
    rising, level = [0.1 * i for i in range(10)], [0.0] * 10
    made = dict.fromkeys(bands.HEADS, (50.0, 1.0, level))
    made[bands.FULL] = (49.0, 4.0, level)
    made[bands.SLICES] = (48.0, 2.0, rising)
    made[bands.FEWER] = (48.0, 2.0, rising)
    made[bands.PROJECTIONS] = (47.0, 2.0, level)
    made |= {getattr(bands, name): value for name, value in changed.items()}
    runs = {
        name: [_run(test + 0.01 * seed, seconds, deciles) for seed in range(3)]
        for name, (test, seconds, deciles) in made.items()
    }
    return {"device": "cpu", "classes": 10, "tokens": {"train": 9}, "runs": runs,
            "words_per_decile": [1] * 10}  # fmt: skip


def test_the_verdict_follows_the_figures():
    assert bands.verdict(_found()).word == "holds"
    level = [0.0] * 10
    slow = bands.verdict(_found(ADAPTIVE=(50.0, 3.9, level)))
    assert slow.word == "holds in part"
    assert "Not as published: adaptive as good in less than half of the time" in slow.why
    worse = _found(ADAPTIVE=(90.0, 1.0, level), SLICES=(46.0, 9.0, [-x for x in range(10)]))
    assert bands.verdict(worse).word == "does not hold"


def test_differences_are_to_the_full_softmax_of_the_same_seed():
    found = _found()
    for seed, run in enumerate(found["runs"][bands.FULL]):
        run["deciles"] = [float(seed)] * 10
    each = bands.differences(found, bands.SLICES)
    for i, by_seed in enumerate(each):
        assert by_seed == pytest.approx([0.1 * i - seed for seed in range(3)])
    assert bands._loses(_found(), bands.SLICES) == list(range(2, 11))


def test_quick_on_made_text(tmp_path, capsys):
    write_wikitext(tmp_path, words=300)
    out = tmp_path / "out"
    assert main(["frequency-bands", "--quick", "--data", str(tmp_path), "--out", str(out)]) == 0
    assert "The pattern" in capsys.readouterr().out
    found = json.loads((out / "frequency-bands.json").read_text(encoding="utf-8"))["found"]
    assert list(found["runs"]) == list(bands.HEADS)
    for (run,) in found["runs"].values():
        assert run["test"] < run["valid"][0]
        assert len(run["deciles"]) == 10
    assert sum(found["words_per_decile"]) == found["classes"]
