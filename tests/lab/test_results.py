import json
import math
import random

import numpy as np
import pytest
from made_runs import HEADS, make, slug
from scipy import stats

from lastlayer.lab import metrics
from lastlayer.lab._intervals import Estimate, difference, estimate, t_quantile
from lastlayer.lab._reading import HeadEntry, Point, Run, read_comparison
from lastlayer.lab.errors import LabError
from lastlayer.lab.results import interpolate, pareto_front, read_results
from lastlayer.lab.verdict import told_apart, verdict


@pytest.mark.parametrize("degrees", [*range(1, 15), 20, 50, 1000])
def test_t_quantile_is_student_s(degrees):
    assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=2e-4)


def test_t_quantile_needs_a_degree_of_freedom():
    with pytest.raises(ValueError, match="degrees"):
        t_quantile(0)


@pytest.mark.parametrize("n", [2, 3, 7, 30])
def test_interval_is_the_t_interval(seed, n):
    values = np.random.default_rng(seed).normal(5, 2, n)
    found = estimate(list(values))
    low, high = stats.t.interval(0.95, n - 1, values.mean(), stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx(
        (values.mean(), low, high), rel=1e-3
    )
    assert found.n == n


def test_logarithmic_mean_is_that_of_the_logarithms(seed):
    values = np.random.default_rng(seed).lognormal(4, 0.3, 4)
    found, inner = estimate(list(values), log=True), estimate(list(np.log(values)))
    for name in ("mean", "low", "high"):
        assert getattr(found, name) == pytest.approx(math.exp(getattr(inner, name)))


def test_one_seed_has_no_interval():
    assert estimate([3.0]) == Estimate(3.0, 1)
    assert not estimate([3.0]).has_interval
    assert estimate([]) is None
    assert estimate([math.nan, math.inf]) is None


def test_an_interval_beyond_all_floats_is_infinite():
    assert estimate([1e-100, 1e100], log=True).high == math.inf


def test_differences_are_taken_seed_by_seed():
    ours, theirs = {0: 1.0, 1: 10.0, 2: 5.0}, {0: 2.0, 1: 11.0, 7: 0.0}
    assert difference(ours, theirs, log=False) == Estimate(1.0, 2, 1.0, 1.0)
    ratio = difference({0: 2.0, 1: 3.0}, {0: 4.0, 1: 6.0}, log=True)
    assert ratio.mean == pytest.approx(math.log(2))


def test_a_folder_is_read(tmp_path):
    found = read_comparison(make(tmp_path, heads=3, seeds=2))
    assert [head.family for head in found.heads] == ["full", "adaptive", "hierarchical"]
    assert found.heads[1].title == "Adaptive softmax (cutoffs=1000,4000)"
    assert [(run.head.slug, run.seed) for run in found.runs] == [
        (slug(head[0]), seed) for head in HEADS[:3] for seed in (0, 1)
    ]
    assert all(run.finished and run.valid and run.train and run.explorer for run in found.runs)
    assert found.n_classes == 10_000
    assert found.task == "lm"


def test_a_run_that_was_killed_is_unfinished(tmp_path):
    make(tmp_path, heads=2, seeds=1, statuses={"full": "unfinished", "adaptive": "not started"})
    path = tmp_path / "runs/full-s0/metrics.jsonl"
    whole = len(path.read_text().splitlines())
    path.write_text(path.read_text() + '{"kind": "train", "ste')
    full, adaptive = read_comparison(tmp_path).runs
    assert (full.status, adaptive.status) == ("unfinished", "not started")
    assert len(full.train) + len(full.valid) == whole
    assert full.numbers["steps"] == max(point.step for point in full.train)
    assert not full.failed
    assert not full.finished


def test_a_step_that_was_repeated_after_a_resume_counts_once(tmp_path):
    make(tmp_path, heads=1, seeds=1)
    path = tmp_path / "runs/full-s0/metrics.jsonl"
    before = read_comparison(tmp_path).runs[0]
    path.write_text(path.read_text() + path.read_text())
    assert read_comparison(tmp_path).runs[0].valid == before.valid


def test_what_is_no_number_is_left_out(tmp_path):
    make(tmp_path, heads=1, seeds=1)
    path = tmp_path / "runs/full-s0/result.json"
    result = json.loads(path.read_text())
    result["test"] |= {"perplexity": math.inf, "nll": math.nan, "top1": None}
    result["test"]["calibration"] = None
    path.write_text(json.dumps(result))
    (run,) = read_comparison(tmp_path).runs
    assert not {"perplexity", "nll", "top1"} & run.test.keys()
    assert run.calibration == ()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("compare.json", None, "expected one that `lastlayer compare --out` wrote"),
        ("compare.json", "{", "broken file"),
        ("compare.json", "[]", "expected a JSON object, got list"),
        ("compare.json", '{"schema": 99}', "expected schema 1, got 99"),
        ("runs/full-s0/result.json", "nonsense", "broken file"),
        ("runs/full-s0/metrics.jsonl", '{"kind"\n{}\n', "line 1: expected JSON"),
    ],
)
def test_a_broken_folder_is_told(tmp_path, file, text, message):
    make(tmp_path, heads=1, seeds=1)
    (tmp_path / file).unlink()
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(LabError, match=message):
        read_results(tmp_path)


def test_ranks_follow_the_means(tmp_path):
    results = read_results(make(tmp_path))
    assert results.metric is metrics.EPS_PERPLEXITY
    means = [summary.mean("eps_perplexity") for summary in results.ranked]
    assert means == sorted(means)
    assert [summary.rank for summary in results.ranked] == list(range(1, 9))


def test_without_sparse_heads_ranks_are_by_perplexity(tmp_path):
    assert read_results(make(tmp_path, heads=6)).metric is metrics.PERPLEXITY


def test_several_labels_are_ranked_by_micro_f1(tmp_path):
    results = read_results(make(tmp_path, heads=4, task="multilabel"))
    means = [summary.mean("micro_f1") for summary in results.ranked]
    assert results.metric is metrics.MICRO_F1
    assert means == sorted(means, reverse=True)


def test_a_head_that_failed_once_ranks_below_all_that_did_not(tmp_path):
    results = read_results(make(tmp_path, heads=4, statuses={"adaptive-s1": "diverged"}))
    assert results.ranked[-1].head.family == "adaptive"
    assert results.ranked[-1].status == "2 ok, 1 diverged"
    assert len(results.ranked[-1].finished) == 2


def test_a_head_without_a_result_has_no_rank(tmp_path):
    results = read_results(make(tmp_path, heads=3, statuses={"full": "out of memory"}))
    assert results.summaries[-1].rank is None
    assert results.summaries[-1].estimates == {}
    assert len(results.ranked) == 2


def _run(points) -> Run:
    head = HeadEntry("full", "full", "full", "full", {})
    valid = tuple(Point(s, t, {"perplexity": p, "micro_f1": 1 / p}) for s, t, p in points)
    return Run(head, 0, "ok", "", {}, {}, valid=valid)


def test_interpolation_is_linear_in_the_logarithm_of_perplexity():
    run = _run([(0, 0.0, 100.0), (10, 2.0, 25.0)])
    assert interpolate(run, metrics.PERPLEXITY, "seconds", 1.0) == pytest.approx(50.0)
    assert interpolate(run, metrics.PERPLEXITY, "steps", 5) == pytest.approx(50.0)
    assert interpolate(run, metrics.MICRO_F1, "steps", 5) == pytest.approx((1 / 100 + 1 / 25) / 2)


def test_interpolation_goes_through_the_points_and_not_beyond(seed):
    draw = random.Random(seed)
    points = [(i, i + draw.random(), draw.uniform(10, 500)) for i in range(6)]
    run = _run(points)
    for step, seconds, value in points:
        assert interpolate(run, metrics.PERPLEXITY, "seconds", seconds) == value
        assert interpolate(run, metrics.PERPLEXITY, "steps", step) == value
    assert interpolate(run, metrics.PERPLEXITY, "seconds", points[-1][1] + 1e-9) is None
    assert interpolate(run, metrics.PERPLEXITY, "steps", -1) is None


def test_equal_time_and_steps_are_what_all_heads_reached(tmp_path):
    results = read_results(make(tmp_path, heads=6))
    runs = results.comparison.runs
    assert results.equal_steps == min(run.valid[-1].step for run in runs)
    assert results.equal_seconds == min(run.valid[-1].seconds for run in runs)
    for summary in results.ranked:
        values = [
            interpolate(run, results.metric, "steps", results.equal_steps) for run in summary.runs
        ]
        assert summary.at_equal_steps == estimate(values, log=True)
    # The full softmax learns most in a step, and the others do more of them.
    best = min(results.ranked, key=lambda summary: summary.at_equal_steps.mean)
    assert best.head.family == "full"


def test_the_front_is_what_none_beats_in_both(tmp_path, seed):
    summaries = list(read_results(make(tmp_path, heads=6)).ranked)
    draw = random.Random(seed)
    for summary in summaries:
        for key in ("perplexity", "step_ms"):
            summary.estimates[key] = Estimate(float(draw.randint(1, 4)), 1)
    front = pareto_front(summaries, metrics.PERPLEXITY, metrics.STEP_MS)

    def beaten(one, other):
        a = [one.mean(key) for key in ("perplexity", "step_ms")]
        b = [other.mean(key) for key in ("perplexity", "step_ms")]
        return all(x <= y for x, y in zip(a, b, strict=True)) and a != b

    for summary in summaries:
        assert (summary in front) != any(beaten(other, summary) for other in summaries)
    assert [s.mean("step_ms") for s in front] == sorted(s.mean("step_ms") for s in front)


def test_verdict_names_the_best_and_how_sure_it_is(tmp_path):
    found = verdict(read_results(make(tmp_path, heads=6, noise=0.001)))
    assert found.best.title == "Adaptive softmax (cutoffs=1000,4000)"
    assert found.headline.startswith(found.best.title)
    for number in ("30 s", "2.2 ×", "3 seeds"):
        assert number in found.detail
    assert found.tied == ()
    assert any("full softmax" in note for note in found.notes)


def test_verdict_lists_what_cannot_be_told_apart(tmp_path):
    results = read_results(make(tmp_path, heads=4, noise=3.0))
    found = verdict(results)
    others = results.ranked[1:]
    assert found.tied == tuple(s for s in others if not told_apart(results, found.best, s))
    assert found.tied


def test_verdict_of_one_seed_has_no_interval(tmp_path):
    found = verdict(read_results(make(tmp_path, heads=3, seeds=1)))
    assert "(1" not in found.detail
    assert len(found.tied) == 2


def test_verdict_of_one_head(tmp_path):
    found = verdict(read_results(make(tmp_path, heads=1)))
    assert found.best.title == "Full softmax"
    assert found.tied == ()
    assert "perplexity" in found.detail


@pytest.mark.parametrize("status", ["nan", "out of memory", "unfinished", "interrupted"])
def test_verdict_when_no_head_has_a_result(tmp_path, status):
    statuses = {slug(head[0]): status for head in HEADS}
    found = verdict(read_results(make(tmp_path, heads=2, statuses=statuses)))
    assert f"6 {status}" in found.sentence
    assert found.best is None


def test_verdict_when_one_head_is_left(tmp_path):
    results = read_results(make(tmp_path, heads=2, statuses={"full": "nan"}))
    found = verdict(results)
    assert found.best.title in found.headline
    assert "full softmax: nan" in found.sentence


def test_verdict_of_several_labels(tmp_path):
    found = verdict(read_results(make(tmp_path, heads=3, task="multilabel", noise=0.001)))
    assert "micro-F1" in found.sentence
    assert "perplexity" not in found.sentence


def test_verdict_of_a_budget_in_steps_compares_time(tmp_path):
    results = read_results(make(tmp_path, heads=6, budget=("steps", 2000), noise=0.001))
    sentence = verdict(results).sentence
    assert "2,000 steps" in sentence
    assert "0.45 ×" in sentence


def test_heads_of_the_same_name_are_told_apart(tmp_path):
    make(tmp_path, heads=2, seeds=1)
    asked = json.loads((tmp_path / "compare.json").read_text())
    asked["heads"][1] |= {"spec": "mine:Head", "label": "Full softmax", "family": "mine:Head"}
    (tmp_path / "compare.json").write_text(json.dumps(asked))
    titles = [head.title for head in read_comparison(tmp_path).heads]
    assert titles == ["Full softmax [full]", "Full softmax [mine:Head]"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(999_999.9, "1M"), (9_999.9, "10k"), (9_994, "9,994"), (1.5e9, "1.5B"), (2.57e6, "2.57M")],
)
def test_counts_round_into_the_right_unit(value, shown):
    assert metrics.format_value(value, "count") == shown
