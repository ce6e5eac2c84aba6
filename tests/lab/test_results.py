import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from made_runs import HEADS, make, slug
from scipy import stats

from lastlayer.lab import metrics
from lastlayer.lab.errors import LabError
from lastlayer.lab.records import Comparison, HeadEntry, Point, Run, read_comparison
from lastlayer.lab.results import interpolate, read_results, summarise
from lastlayer.lab.statistics import Estimate, estimate, holm, p_values
from lastlayer.lab.verdict import in_sentence, times_less, verdict


def test_p_values_of_two_heads_are_those_of_a_paired_t_test(seed):
    draw = np.random.default_rng(seed)
    ours, theirs = (dict(enumerate(draw.lognormal(1, 0.2, 5))) for _ in range(2))
    plain = stats.ttest_rel([*theirs.values()], [*ours.values()]).pvalue
    assert p_values([ours, theirs], log=False) == {(0, 1): pytest.approx(plain)}
    logs = [[math.log(each) for each in side.values()] for side in (theirs, ours)]
    found = p_values([ours, theirs], log=True)[0, 1]
    assert found == pytest.approx(stats.ttest_rel(*logs).pvalue)
    assert p_values([{1: 2.0}, {1: 3.0}], log=False) == {(0, 1): 1.0}
    assert p_values([{1: 2.0, 2: 3.0}, {1: 2.0, 2: 3.0}], log=False) == {(0, 1): 1.0}
    assert p_values([{1: 2.0, 2: 3.0}, {1: 4.0, 2: 5.0}], log=False) == {(0, 1): 0.0}


def test_variances_are_pooled_unless_that_of_a_pair_is_larger(seed):
    """The pooled one is the residual variance of heads and seeds in two ways."""
    draw = np.random.default_rng(seed)
    values = draw.normal(0, 1, 4) + draw.normal(0, 0.3, (5, 4))
    residual = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    pooled = 2 * (residual**2).sum() / (4 * 3)
    for (i, j), found in p_values([dict(enumerate(row)) for row in values], log=False).items():
        gap = values[j] - values[i]
        t = abs(gap.mean()) / math.sqrt(max(gap.var(ddof=1), pooled) / 4)
        assert found == pytest.approx(2 * stats.t.sf(t, 4 * 3))


def test_holm_s_correction(seed):
    draw = np.random.default_rng(seed)
    for _ in range(20):
        given = [*draw.uniform(0, 0.2, draw.integers(1, 8))]
        made = holm(given)
        n = len(given)
        for i, p in enumerate(given):
            before = sorted(q for q in given if q <= p)
            steps = [(n - k) * q for k, q in enumerate(before)]
            assert made[i] == pytest.approx(min(1.0, max(steps)))
    assert holm([]) == []


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
    assert estimate([3.0]).low is None
    assert estimate([]) is None
    assert estimate([math.nan, math.inf]) is None


def test_an_interval_beyond_all_floats_is_infinite():
    assert estimate([1e-100, 1e100], log=True).high == math.inf


def test_heads_are_compared_by_the_seeds_that_both_have():
    ours, theirs = {0: 1.0, 1: 10.0, 2: 5.0}, {0: 2.0, 1: 11.5, 7: 0.0}
    found = p_values([ours, theirs], log=False)[0, 1]
    assert found == p_values([{0: 1.0, 1: 10.0}, theirs], log=False)[0, 1] < 1


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


def test_a_run_that_became_worse_counts_with_its_best(tmp_path):
    """The best model by validation is what is judged, at equal time as well."""
    comparison = read_results(make(tmp_path, heads=1, seeds=1)).comparison
    (run,) = comparison.runs
    curve = [(0, 0.0, 90.0), (10, 1.0, 40.0), (20, 2.0, 80.0)]
    valid = tuple(Point(step, at, {"perplexity": value}) for step, at, value in curve)
    (summary,) = summarise(replace(comparison, runs=(replace(run, valid=valid),))).summaries
    assert summary.at_equal_steps.mean == summary.at_equal_seconds.mean == pytest.approx(40.0)


def test_the_front_is_what_none_beats_in_both(tmp_path, seed):
    results = read_results(make(tmp_path, heads=6))
    summaries = results.ranked
    draw = random.Random(seed)
    for summary in summaries:
        for key in ("perplexity", "step_ms"):
            summary.estimates[key] = Estimate(float(draw.randint(1, 4)), 1)
    front = results.front(metrics.STEP_MS)

    def beaten(one, other):
        a = [one.mean(key) for key in ("perplexity", "step_ms")]
        b = [other.mean(key) for key in ("perplexity", "step_ms")]
        return all(x <= y for x, y in zip(a, b, strict=True)) and a != b

    for summary in summaries:
        assert (summary in front) != any(beaten(other, summary) for other in summaries)
    assert [s.mean("step_ms") for s in front] == sorted(s.mean("step_ms") for s in front)


def test_the_recommendation_is_the_cheapest_within_the_tolerance(tmp_path):
    results = read_results(make(tmp_path, heads=6, noise=0.001))
    found = verdict(results)
    # Adaptive has the best quality; hierarchical is 10% worse and a little cheaper.
    assert found.best.head.family == found.recommended.head.family == "adaptive"
    assert found.headline == "Take adaptive softmax (cutoffs=1000,4000)"
    assert "3 seeds" in found.detail
    assert found.tied == ()
    assert found.needed is None
    path = tmp_path / "compare.json"
    asked = json.loads(path.read_text())
    asked["settings"]["tolerance"] = 0.12
    path.write_text(json.dumps(asked))
    found = verdict(read_results(tmp_path))
    assert found.best.head.family == "adaptive"
    assert found.recommended.head.family == "hierarchical"
    assert "worse than adaptive softmax" in found.detail
    assert "83% of the time per step" in found.detail


def test_findings_name_equal_steps_equal_time_and_the_runner_up(tmp_path):
    steps, seconds, runner_up = verdict(read_results(make(tmp_path, heads=6))).findings
    assert steps.startswith("After the same 3,000 steps adaptive softmax")
    assert seconds.startswith("At equal time (19.5 s of training) adaptive softmax")
    assert seconds.endswith("; all others are significantly worse (3 seeds).")
    assert "time per step" in runner_up


def test_what_does_not_differ_significantly_at_equal_time_is_told(tmp_path):
    close = read_results(make(tmp_path / "close", heads=4, noise=3.0))
    assert not any(close.told_apart(timed=True).values())
    assert "not significantly different" in verdict(close).findings[1]
    clear = read_results(make(tmp_path / "clear", heads=4, noise=1e-4))
    apart = clear.told_apart(timed=True)
    assert all(apart.values())
    assert clear.best_at_equal_time.head.slug not in apart
    assert "all others are significantly worse (3 seeds)" in verdict(clear).findings[1]


def test_what_does_not_differ_significantly_is_told(tmp_path):
    results = read_results(make(tmp_path, heads=4, noise=3.0))
    found = verdict(results)
    apart = results.told_apart()
    assert found.tied == tuple(s for s in results.ranked[1:] if not apart[s.head.slug])
    assert found.tied
    assert "not significantly different" in found.findings[0]


def test_verdict_of_one_seed_has_no_test(tmp_path):
    found = verdict(read_results(make(tmp_path, heads=3, seeds=1)))
    assert "one seed" in found.sentence
    assert len(found.tied) == 2


@pytest.mark.parametrize(
    ("late", "why"),
    [
        ({"adaptive": 0.2}, "still gain fast"),
        ({"full": 0.08}, "full softmax would soon pass adaptive softmax"),
    ],
)
def test_it_is_too_early_where_leaders_fall_fast_or_cross(tmp_path, late, why):
    found = verdict(read_results(make(tmp_path, heads=4, late=late)))
    assert found.headline.startswith("It is too early to tell")
    assert f"{found.needed:,} steps" in found.headline
    assert why in found.detail
    assert found.needed >= 6000
    assert f"--budget {found.needed}steps" in found.detail
    if found.recommended is not found.best:
        assert f"{found.recommended.title.lower()} would be taken now" in found.detail.lower()


def test_heads_that_are_the_same_model_are_named(tmp_path):
    out = make(tmp_path, heads=3)
    for seed in range(3):
        own = json.loads((out / f"runs/full-s{seed}/result.json").read_text())
        other = out / f"runs/adaptive-s{seed}/result.json"
        same = {"test": own["test"], "head_parameters": own["head_parameters"]}
        other.write_text(json.dumps({**json.loads(other.read_text()), **same}))
    told = [each for each in verdict(read_results(out)).notes if "the same model" in each]
    assert len(told) == 1
    assert "full softmax" in told[0].lower()
    assert "adaptive softmax" in told[0].lower()


def _asked(out, **changed):
    path = out / "compare.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    return out


def test_a_comparison_from_python_names_arguments_and_no_options(tmp_path):
    out = make(tmp_path, heads=4, late={"adaptive": 0.2}, statuses={"full-s1": "interrupted"})
    slow = out / "runs/hierarchical-s1/result.json"
    slow.write_text(json.dumps({**json.loads(slow.read_text()), "load": 9.0}))
    found = verdict(read_results(_asked(out, command=["lastlayer.lab.compare"])))
    assert f"steps={found.needed}." in found.detail
    assert "--" not in " ".join((found.sentence, *found.findings, *found.notes))


@pytest.mark.parametrize(("times", "family"), [(0.97, "adaptive"), (0.8, "hierarchical")])
def test_of_heads_that_cost_the_same_the_better_one_is_recommended(tmp_path, times, family):
    out = make(tmp_path, heads=3, noise=0.001)
    for seed in range(3):
        paths = [out / f"runs/{name}-s{seed}/result.json" for name in ("adaptive", "hierarchical")]
        ms = json.loads(paths[0].read_text())["step_ms"]
        cheap = {
            **json.loads(paths[1].read_text()),
            "step_ms": ms / max(1.0, times) * min(1, times),
        }
        paths[1].write_text(json.dumps(cheap))
    found = verdict(read_results(_asked(out, settings={"tolerance": 0.2})))
    assert found.recommended.head.family == family


@pytest.mark.parametrize(("noise", "sure"), [(0.001, False), (0.05, True)])
def test_where_a_cheaper_head_is_recommended_the_best_one_is_the_other_choice(
    tmp_path, noise, sure
):
    out = make(tmp_path, heads=4, noise=noise)
    found = verdict(read_results(_asked(out, settings={"tolerance": 0.9})))
    assert found.recommended.head.family == "hierarchical"
    assert found.runner_up is found.best
    told = found.findings[-1]
    assert told.startswith(f"{found.best.title} has the best quality")
    assert metrics.PERPLEXITY.format(found.best.mean("perplexity")) in told
    assert "worse" not in told
    assert ("not significantly" in told) == sure


def test_a_head_below_the_baseline_is_named_and_not_recommended(tmp_path):
    make(tmp_path, heads=4)
    path = tmp_path / "compare.json"
    asked = json.loads(path.read_text())
    asked["baseline"]["test"]["perplexity"] = 152.0
    path.write_text(json.dumps(asked))
    found = verdict(read_results(tmp_path))
    (note,) = [note for note in found.notes if "baseline" in note]
    assert "unigram baseline has perplexity 152" in note
    assert "did not beat it" in note
    assert found.headline.startswith("Take ")
    asked["baseline"]["test"]["perplexity"] = 2.0
    path.write_text(json.dumps(asked))
    found = verdict(read_results(tmp_path))
    assert found.below_baseline
    assert found.headline == "No head beats the unigram baseline"
    assert f"{found.best.title.lower()} is the best" in found.detail.lower()


def test_a_stalled_machine_is_told(tmp_path):
    make(tmp_path, heads=3)
    path = tmp_path / "runs/full-s1/result.json"
    result = json.loads(path.read_text())
    result["step_ms_mean"] = 2.0 * result["step_ms"]
    path.write_text(json.dumps(result))
    (note,) = [note for note in verdict(read_results(tmp_path)).notes if "disturbed" in note]
    assert "full softmax" in note
    assert "adaptive" not in note


def test_a_choice_by_times_of_a_disturbed_machine_says_so(tmp_path):
    out = make(tmp_path, heads=4, noise=0.001)
    asked = {"settings": {"tolerance": 0.9}}
    assert "disturbed" not in verdict(read_results(_asked(out, **asked))).sentence
    for path in out.glob("runs/*/result.json"):
        result = json.loads(path.read_text())
        path.write_text(json.dumps({**result, "load": 4.0}))
    found = verdict(read_results(out))
    assert "time per step (on a disturbed machine)" in found.sentence
    (note,) = [note for note in found.notes if "disturbed" in note]
    assert "with 4 heads. Their times" in note


def _comparison(qualities, seeds):
    """Heads whose curves are flat: what a comparison is made of, without files."""
    heads = [HeadEntry(f"h{i}", f"h{i}", f"h{i}", "x", {}, f"H{i}") for i in range(len(qualities))]
    runs = []
    for head, of_seeds in zip(heads, qualities, strict=True):
        for seed, nll in zip(seeds, of_seeds, strict=True):
            points = tuple(Point(s, float(s), {"perplexity": math.exp(nll)}) for s in (0, 75, 100))
            numbers = {"step_ms": 1.0, "steps": 100.0}
            test = {"perplexity": math.exp(nll)}
            runs.append(Run(head, seed, "ok", "", numbers, test, valid=points))
    return summarise(Comparison(None, tuple(heads), tuple(seeds), tuple(runs)))


def test_chance_names_a_winner_in_at_most_one_of_twenty_comparisons(seed):
    draw = np.random.default_rng(seed)
    winners = 0
    for _ in range(200):
        shared = draw.normal(5, 0.1, 4)
        found = verdict(_comparison(shared + draw.normal(0, 0.02, (6, 4)), range(4)))
        winners += len(found.tied) < 5
    assert winners <= 10


def test_a_planted_difference_is_found(seed):
    draw = np.random.default_rng(seed)
    found = 0
    for _ in range(50):
        qualities = draw.normal(5, 0.1, 4) + draw.normal(0, 0.005, (5, 4))
        qualities[1:] += 0.1
        made = verdict(_comparison(qualities, range(4)))
        found += made.best.title == "H0" and not made.tied
    assert found >= 45


def test_one_bad_head_of_many_is_found_with_three_seeds(seed):
    draw = np.random.default_rng(seed)
    for _ in range(20):
        qualities = draw.normal(5, 0.1, 3) + draw.normal(0, 0.005, (12, 3))
        qualities[7] += 0.05
        made = verdict(_comparison(qualities, range(3)))
        assert "H7" not in [each.title for each in made.tied]


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


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [(1, 8, "an eighth of the"), (9.9, 20, "half of the"), (1, 50, "2% of the"),
     (3, 1, "3 times the"), (1, 1, "the same")],
)  # fmt: skip
def test_times_in_words(ours, theirs, words):
    assert times_less(ours, theirs) == words


@pytest.mark.parametrize(
    ("title", "shown"),
    [("Full softmax", "full softmax"), ("Char-CNN softmax", "char-CNN softmax"), ("NCE", "NCE"),
     ("InfoNCE", "InfoNCE"), ("MyHead", "MyHead"), ("Top-k softmax (k=6)", "top-k softmax (k=6)")],
)  # fmt: skip
def test_names_within_a_sentence_are_small_unless_they_are_abbreviations(tmp_path, title, shown):
    (summary,) = read_results(make(tmp_path, heads=1, seeds=1)).ranked
    named = replace(summary, head=replace(summary.head, title=title))
    assert in_sentence(named) == shown


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
