"""Summary of a comparison: means over seeds, equal time, equal steps, ranks, Pareto front."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lastlayer.lab import metrics
from lastlayer.lab.metrics import Metric
from lastlayer.lab.records import (
    Comparison,
    Costs,
    HeadEntry,
    Point,
    Run,
    read_comparison,
    read_costs,
)
from lastlayer.lab.statistics import LEVEL, Estimate, estimate, holm, p_values

Axis = Literal["seconds", "steps"]
TOLERANCE = 0.03
# Shares of the steps between which the gain is computed: the last quarter, and the one before.
_LAST, _BEFORE = (0.75, 1.0), (0.5, 0.75)
# Ratio of mean and median step time, and load per core, above which a machine counts as disturbed.
_STALLED, _LOADED = 1.5, 1.5


@dataclass(frozen=True)
class HeadSummary:
    """One head over all its seeds."""

    head: HeadEntry
    runs: tuple[Run, ...]
    estimates: Mapping[str, Estimate]  # by the key of a metric, from finished runs
    # The best validation up to the time, and up to the step, that all finished runs reached.
    at_equal_seconds: Estimate | None
    at_equal_steps: Estimate | None
    equal_time: Mapping[int, float]  # that of at_equal_seconds, by seed
    # Relative improvement of validation over the last quarter of the steps.
    gain: float | None = None
    gain_before: float | None = None  # over the quarter before it
    rank: int | None = None  # 1 is best; None without a result

    @property
    def title(self) -> str:
        """Display name of the head."""
        return self.head.title

    @property
    def finished(self) -> tuple[Run, ...]:
        """The runs that were trained and tested."""
        return tuple(run for run in self.runs if run.finished)

    @property
    def any_failed(self) -> bool:
        """Whether a run failed."""
        return any(run.failed for run in self.runs)

    @property
    def status(self) -> str:
        """The status of the runs, such as ``ok``, or the number of runs with each status."""
        kinds = Counter(run.status for run in self.runs)
        if len(kinds) == 1:
            return next(iter(kinds))
        return ", ".join(f"{count} {status}" for status, count in kinds.items())

    @property
    def disturbed(self) -> bool:
        """Whether other processes slowed it: a mean step far above the median, or a high load."""
        return any(
            run.numbers.get("step_ms_mean", 0.0) > _STALLED * run.numbers.get("step_ms", math.inf)
            or run.numbers.get("load", 0.0) > _LOADED
            for run in self.runs
        )

    def mean(self, key: str) -> float | None:
        """The mean of a metric; None if not measured."""
        found = self.estimates.get(key)
        return None if found is None else found.mean

    def by_seed(self, metric: Metric) -> dict[int, float]:
        """The metric of each finished run, by seed."""
        values = {run.seed: _of_run(run, metric) for run in self.finished}
        return {seed: value for seed, value in values.items() if value is not None}


@dataclass(frozen=True)
class Results:
    """A summary of a comparison."""

    comparison: Comparison
    metric: Metric  # by which heads are ranked
    summaries: tuple[HeadSummary, ...]  # ordered by rank; heads without a result come last
    equal_seconds: float | None  # the training time up to which every finished run was validated
    equal_steps: int | None  # the step up to which every finished run was validated
    # Cost of each head by number of classes; None if not measured.
    costs: Costs | None = None

    @property
    def ranked(self) -> tuple[HeadSummary, ...]:
        """The heads that have a rank, best first."""
        return tuple(summary for summary in self.summaries if summary.rank is not None)

    def measured(self, candidates: Sequence[Metric]) -> list[Metric]:
        """The metrics that at least one head has."""
        return [m for m in candidates if any(m.key in s.estimates for s in self.summaries)]

    @property
    def tolerance(self) -> float:
        """Relative difference by which the recommended head may be worse than the best."""
        found = self.comparison.settings.get("tolerance")
        return float(found) if isinstance(found, int | float) else TOLERANCE

    def loss(self, best: HeadSummary, other: HeadSummary) -> float:
        """Relative difference by which ``other`` is worse than ``best`` in the ranking metric."""
        key = self.metric.key
        ours, theirs = best.mean(key) or 0.0, other.mean(key) or 0.0
        if self.metric.lower_is_better:
            return theirs / ours - 1.0 if ours else math.inf
        return 1.0 - theirs / ours if ours else 0.0

    @property
    def baseline_name(self) -> str:
        """The name of the baseline, such as ``unigram``."""
        return str(self.comparison.baseline.get("name", "frequency"))

    def baseline(self) -> float | None:
        """The ranking metric of predicting the class frequencies on test data; None if unknown."""
        found = self.comparison.baseline.get("test")
        value = found.get(self.metric.key) if isinstance(found, Mapping) else None
        return float(value) if isinstance(value, int | float) else None

    def beats_baseline(self, summary: HeadSummary) -> bool:
        """Whether a head is better than the class frequencies; True if that is unknown."""
        base, own = self.baseline(), summary.mean(self.metric.key)
        return base is None or own is None or self.metric.better(own, base)

    @property
    def best_at_equal_time(self) -> HeadSummary | None:
        """The head with the best validation at equal time; None without one."""
        pick = min if self.metric.lower_is_better else max
        timed = [(at.mean, s) for s in self.ranked if (at := s.at_equal_seconds) is not None]
        return pick(timed, key=lambda place: place[0])[1] if timed else None

    def told_apart(self, *, timed: bool = False) -> dict[str, bool]:
        """By slug, whether a head is significantly different from the best one.

        Paired t-tests with Holm's correction over all pairs of heads, since the best one is chosen
        by the same runs. With one seed no difference is significant. They compare test data at the
        end, or with ``timed`` validation data at equal time.
        """
        best = self.best_at_equal_time if timed else self.ranked[0]
        others = [s for s in self.ranked if s is not best]
        heads = [s for s in (best, *others) if s is not None]
        values = [s.equal_time if timed else s.by_seed(self.metric) for s in heads]
        found = p_values(values, log=self.metric.log)
        corrected = zip(found, holm([*found.values()]), strict=True)
        return {heads[j].head.slug: p < LEVEL for (i, j), p in corrected if i == 0}

    def front(self, cost: Metric) -> tuple[HeadSummary, ...]:
        """The Pareto front of quality and cost, cheapest first; ties are kept."""
        metric = self.metric
        places = [
            (s, quality, price) for s in self.ranked
            if (quality := s.mean(metric.key)) is not None
            and (price := s.mean(cost.key)) is not None
        ]  # fmt: skip
        front = [
            (price if cost.lower_is_better else -price, s)
            for s, quality, price in places
            if not any(
                (metric.better(q, quality) and not cost.better(price, p))
                or (cost.better(p, price) and not metric.better(quality, q))
                for _, q, p in places
            )
        ]
        return tuple(s for _, s in sorted(front, key=lambda place: place[0]))


def read_results(folder: Path) -> Results:
    """Read and summarise the folder of a comparison, finished or not."""
    return replace(summarise(read_comparison(folder)), costs=read_costs(Path(folder)))


def summarise(comparison: Comparison) -> Results:
    """Means, ranks, and quality at equal time and equal steps."""
    metric = ranking_metric(comparison)
    done = [run for run in comparison.runs if run.finished and run.valid]
    equal_seconds = min((run.valid[-1].seconds for run in done), default=None)
    equal_steps = min((run.valid[-1].step for run in done), default=None)
    summaries = []
    for head in comparison.heads:
        runs = tuple(run for run in comparison.runs if run.head.slug == head.slug)
        finished = [run for run in runs if run.finished]
        timed = _at(finished, metric, "seconds", equal_seconds)
        at_end = _at(finished, metric, "steps", equal_steps)
        at_time, at_step = (estimate([*v.values()], log=metric.log) for v in (timed, at_end))
        now, before = (_gain(finished, metric, *span) for span in (_LAST, _BEFORE))
        found = _estimates(finished)
        summaries.append(HeadSummary(head, runs, found, at_time, at_step, timed, now, before))
    return Results(comparison, metric, _ranked(summaries, metric), equal_seconds, equal_steps)


def ranking_metric(comparison: Comparison) -> Metric:
    """The metric by which heads are ranked.

    Several labels: micro-F1. Classification: accuracy. Pairs: recall at 1. Language models:
    perplexity, or the ε-smoothed perplexity if that of some head is infinite, because it gives
    probability 0 to a target.
    """
    finished = [run for run in comparison.runs if run.finished]
    measured = {key for run in finished for key in run.test}
    if comparison.task in ("classification", "pairs"):
        return metrics.ACCURACY if comparison.task == "classification" else metrics.RECALL_AT_1
    if comparison.task == "multilabel" or ("micro_f1" in measured and "nll" not in measured):
        return metrics.MICRO_F1 if "micro_f1" in measured else metrics.PRECISION_AT_1
    every_one_finite = all("perplexity" in run.test or "nll" in run.test for run in finished)
    if every_one_finite or "eps_perplexity" not in measured:
        return metrics.PERPLEXITY
    return metrics.EPS_PERPLEXITY


def quality_of(point: Point, metric: Metric) -> float | None:
    """The metric at a validation point; perplexity may be recorded as its logarithm."""
    value = point.values.get(metric.key)
    if value is not None:
        return value
    logarithm = {"perplexity": "nll", "eps_perplexity": "eps_nll"}.get(metric.key)
    return _exp(point.values.get(logarithm)) if logarithm else None


def curve(run: Run, metric: Metric, axis: Axis) -> list[tuple[float, float]]:
    """The learning curve of a run: pairs of seconds or steps, and validation quality."""
    return [
        (point.seconds if axis == "seconds" else float(point.step), value)
        for point in run.valid
        if (value := quality_of(point, metric)) is not None
    ]


def interpolate(run: Run, metric: Metric, axis: Axis, where: float) -> float | None:
    """Validation quality of a run at a time or step between two validations.

    It is interpolated linearly, in the logarithm if the metric has a logarithmic scale. None
    outside of the run's validations.
    """
    points = curve(run, metric, axis)
    if not points or not points[0][0] <= where <= points[-1][0]:
        return None
    index = bisect_left(points, where, key=lambda point: point[0])
    x1, y1 = points[index]
    if x1 == where:
        return y1
    x0, y0 = points[index - 1]
    share = (where - x0) / (x1 - x0)
    if metric.log and y0 > 0.0 and y1 > 0.0:
        return math.exp((1 - share) * math.log(y0) + share * math.log(y1))
    return (1 - share) * y0 + share * y1


def _at(runs: Sequence[Run], metric: Metric, axis: Axis, where: float | None) -> dict[int, float]:
    """By seed, the best validation up to a time or step, since the best model is tested."""
    pick, found = min if metric.lower_is_better else max, {}
    if where is None:
        return {}
    for run in runs:
        last = interpolate(run, metric, axis, where)
        if last is not None:
            before = (value for x, value in curve(run, metric, axis) if x <= where)
            found[run.seed] = pick([last, *before])
    return found


def _gain(runs: Sequence[Run], metric: Metric, start: float, end: float) -> float | None:
    """Relative improvement of the best validation so far between two fractions of the steps."""
    pick, found = min if metric.lower_is_better else max, []
    for run in runs:
        points = curve(run, metric, "steps")
        if len(points) < 3 or not points[-1][0]:
            continue
        earlier, later = (
            pick([value for step, value in points if step <= share * points[-1][0]], default=0.0)
            for share in (start, end)
        )
        if earlier > 0 and later > 0:
            found.append(earlier / later - 1 if metric.lower_is_better else later / earlier - 1)
    return sum(found) / len(found) if found else None


def _estimates(runs: Sequence[Run]) -> dict[str, Estimate]:
    found = {}
    for metric in (*metrics.QUALITY, *metrics.COSTS):
        values = [value for run in runs if (value := _of_run(run, metric)) is not None]
        # A mean over some of the seeds would hide that others have no finite value.
        if len(values) == len(runs) and (mean := estimate(values, log=metric.log)):
            found[metric.key] = mean
    return found


def _of_run(run: Run, metric: Metric) -> float | None:
    if not metric.tested:
        return run.numbers.get(metric.key)
    value = run.test.get(metric.key)
    if value is None and metric.key == "perplexity":
        return _exp(run.test.get("nll"))
    return value


def _ranked(summaries: Sequence[HeadSummary], metric: Metric) -> tuple[HeadSummary, ...]:
    """Rank heads, best first; a head with a failed run ranks below all heads without one."""
    sign = 1.0 if metric.lower_is_better else -1.0
    having = [(s, mean) for s in summaries if (mean := s.mean(metric.key)) is not None]
    having.sort(key=lambda place: (place[0].any_failed, sign * place[1]))
    placed = [replace(summary, rank=rank) for rank, (summary, _) in enumerate(having, 1)]
    return (*placed, *(s for s in summaries if s.mean(metric.key) is None))


def _exp(value: float | None) -> float | None:
    return None if value is None or value > 700.0 else math.exp(value)
