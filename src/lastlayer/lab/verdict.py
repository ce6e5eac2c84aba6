"""The verdict of a comparison, and its limitations.

Three findings: the best quality at equal steps, the best at equal time, and the recommendation,
which is the cheapest head whose quality is within the tolerance of the best. If the learning curves
of the leaders still improve fast, or would cross soon, the verdict is that it is too early to tell.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from lastlayer.lab import metrics
from lastlayer.lab.metrics import Metric
from lastlayer.lab.records import OPEN, STARTED
from lastlayer.lab.results import HeadSummary, Results
from lastlayer.lab.statistics import Estimate

# A gain over the last quarter of the steps counts as fast above this many tolerances.
_FAST = 3.0
# Curves count as crossing if they would cross within this many times the steps.
_AHEAD, _QUARTER = 4.0, 4.0 / 3.0
_MOST_AHEAD = 20.0
# A sentence lists at most this many heads by name.
_MOST_NAMED = 3
# Step times up to this ratio count as equal.
_SAME_TIME = 1.05
# Relative difference of the results of one model, computed in two ways.
_SAME_RESULT = 1e-4


@dataclass(frozen=True)
class Verdict:
    """The conclusions of a comparison."""

    headline: str
    detail: str
    """The reasons for the headline; both together are one or two sentences."""
    findings: tuple[str, ...]
    """Best at equal steps, best at equal time, and what the runner-up would cost or save."""
    notes: tuple[str, ...]
    """Warnings: failures, heads below the baseline, disturbed runs, and notes about the data."""
    best: HeadSummary | None
    recommended: HeadSummary | None
    tied: tuple[HeadSummary, ...]
    """Heads that are not significantly different from the best one."""
    needed: int | None = None
    """If it is too early, the estimated number of steps until the recommendation is clear."""
    runner_up: HeadSummary | None = None
    """The best head other than the recommended one."""
    below_baseline: bool = False
    """Whether no head beats the frequency baseline, so that none can be recommended."""

    @property
    def sentence(self) -> str:
        """Headline and detail."""
        return self.headline + self.detail


def verdict(results: Results) -> Verdict:
    """Derive the verdict from the results."""
    ranked, metric = results.ranked, results.metric
    if not ranked:
        return Verdict(*_without_results(results), (), (), None, None, ())
    best, notes = ranked[0], tuple(_notes(results))
    quality = describe(metric, best.estimates[metric.key])
    if len(ranked) == 1:
        headline = f"{best.title} is the only head with a result"
        remark = _statuses([s for s in results.summaries if s.rank is None])
        if len(results.comparison.heads) == 1:
            headline = f"Only {in_sentence(best)} was trained"
            remark = "there is nothing to compare it with"
        detail = f": {metric.label} {quality} after {budget_text(results)}; {remark}."
        return Verdict(headline, detail, (), notes, best, best, ())
    apart = results.told_apart()
    tied = tuple(s for s in ranked[1:] if not apart[s.head.slug])
    chosen = recommended(results)
    needed = steps_needed(results, chosen)
    headline = f"Take {in_sentence(chosen)}"
    assessment = f"the best quality; {_certainty(best, tied)}"
    if chosen is not best:
        assessment = _compared_with_best(results, chosen, tied)
    ours = describe(metric, chosen.estimates[metric.key])
    detail = f": {metric.label} {ours} after {budget_text(results)}, {assessment}."
    if needed is not None:
        headline = f"It is too early to tell: about {needed:,} steps are needed"
        again = f"steps={needed}" if results.comparison.from_python else f"--budget {needed}steps"
        detail = (
            f". After {budget_text(results)} {_unsettled(results, chosen)}; repeat with {again}. "
            f"So far {in_sentence(best)} is ahead, with {metric.label} {quality}"
        )
        # Also name the head that would be recommended now.
        cheaper = f"; {in_sentence(chosen)} would be taken now, {assessment}"
        detail += "." if chosen is best else f"{cheaper}."
    below = not results.beats_baseline(best)
    if below:
        headline = f"No head beats the {results.baseline_name} baseline"
        detail = (
            f": after {budget_text(results)} {in_sentence(best)} is the best with {metric.label} "
            f"{quality}, and the baseline has {metric.format(results.baseline())}; train longer, "
            "or look for an error in the data."
        )
    runner_up = next(s for s in ranked if s is not chosen)
    findings = _findings(results, chosen, runner_up, tied)
    return Verdict(headline, detail, findings, notes, best, chosen, tied, needed, runner_up, below)


def recommended(results: Results) -> HeadSummary:
    """The head with the fastest step among those whose quality is within the tolerance of the best.

    Of heads with about the same step time, the best in quality is taken. A head with a failed run,
    or one that does not beat the baseline, is not recommended.
    """
    best = results.ranked[0]
    good = [
        each for each in results.ranked
        if results.loss(best, each) <= results.tolerance
        and not each.any_failed
        and results.beats_baseline(each)
    ]  # fmt: skip
    times = [each.mean("step_ms") or math.inf for each in good]
    least = _SAME_TIME * min(times, default=math.inf)
    return next((each for each, ms in zip(good, times, strict=True) if ms <= least), best)


def steps_needed(results: Results, chosen: HeadSummary) -> int | None:
    """The estimated steps until the recommendation is clear; None if it is clear now.

    It is not clear if the best or the recommended head still gains fast, or if the curve of another
    head would pass the best one within four times the steps, extrapolated from the last quarter.
    """
    best, steps = results.ranked[0], results.equal_steps
    if steps is None or best.gain is None:
        return None
    falling = _falling(results, chosen)
    factors = [2 * (each.gain or 0.0) / (_FAST * results.tolerance) for each in falling]
    if any(_steeper(each) for each in falling):
        # Improvement still accelerates, so it cannot be extrapolated.
        factors.append(_AHEAD)
    factors += [2 * factor for _, factor in _passing(results)]
    if not factors:
        return None
    return _rounded(steps * min(_MOST_AHEAD, max(2.0, *factors)))


def _passing(results: Results) -> list[tuple[HeadSummary, float]]:
    """Heads that would pass the best one, each with the factor of the steps until then."""
    best, found = results.ranked[0], []
    for other in results.ranked[1:]:
        closing = (other.gain or 0.0) - (best.gain or 0.0)
        gap = results.loss(best, other)
        # Changes within the tolerance do not change the recommendation.
        matters = gap > results.tolerance or closing > results.tolerance
        reach = closing * math.log(_AHEAD) / math.log(_QUARTER)
        if closing > 0 and matters and gap <= reach:
            found.append((other, _QUARTER ** (gap / closing)))
    return found


def _falling(results: Results, chosen: HeadSummary) -> list[HeadSummary]:
    """The leaders that gain fast, or more than the tolerance at an increasing rate."""
    leaders = {each.head.slug: each for each in (results.ranked[0], chosen)}.values()
    return [
        each for each in leaders
        if (gain := each.gain or 0.0) > _FAST * results.tolerance
        or (gain > results.tolerance and _steeper(each))
    ]  # fmt: skip


def _steeper(summary: HeadSummary) -> bool:
    """Whether a head gained more over the last quarter of the steps than over the one before."""
    before = summary.gain_before
    return before is not None and (summary.gain or 0.0) > before


def _rounded(steps: float) -> int:
    size = int(10 ** max(0, math.floor(math.log10(steps)) - 1))
    return round(steps / size) * size


def describe(metric: Metric, found: Estimate) -> str:
    """Mean and interval as text.

    Example:
        >>> describe(metrics.PERPLEXITY, Estimate(143.2, 3, 139.1, 147.4))
        '143 (139–147)'
    """
    span = interval(metric, found)
    return metric.format(found.mean) + (f" ({span})" if span else "")


def interval(metric: Metric, found: Estimate) -> str:
    """The 95% interval as text; empty with one seed, or if both ends round to the same number."""
    first, last = map(metric.format, bounds(metric, found))
    return "" if first == last else f"{first.removesuffix('%')}–{last}"


def bounds(metric: Metric, found: Estimate) -> tuple[float | None, float | None]:
    """Both ends of the interval, clipped to the range of the metric."""
    if found.low is None or found.high is None:
        return None, None
    return max(found.low, metric.least), min(found.high, metric.most)


def joined(names: Iterable[str]) -> str:
    """Join names as in a sentence.

    Example:
        >>> joined(["adaptive", "full", "nce"])
        'adaptive, full and nce'
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def in_sentence(summary: HeadSummary) -> str:
    """The name of a head within a sentence: lower case, unless an abbreviation or a class."""
    name = summary.title
    return name[:1].lower() + name[1:] if re.match(r"\w[a-z]+\b", name) else name


def budget_text(results: Results) -> str:
    """The steps of each run, such as ``400 steps (2.5 epochs)``."""
    steps, epochs = (results.comparison.budget.get(key) for key in ("amount", "epochs"))
    if not isinstance(steps, int | float):
        return "the same budget"
    text = f"{steps:,g} step{'s' * (steps != 1)}"
    if isinstance(epochs, int | float):
        text += f" ({epochs:.3g} epoch{'s' * (epochs != 1)})"
    return text


def times_less(ours: float, theirs: float) -> str:
    """A ratio of times or memory, in words.

    Example:
        >>> times_less(1.0, 8.0), times_less(3.0, 4.0), times_less(2.0, 1.0), times_less(1.0, 1.02)
        ('an eighth of the', '75% of the', '2 times the', 'the same')
    """
    share = ours / theirs
    if 0.97 < share < 1.03:
        return "the same"
    if share >= 1.15:
        return f"{share:.1f} times the".replace(".0 ", " ")
    words = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth", 8: "an eighth",
             10: "a tenth"}  # fmt: skip
    for n, word in words.items():
        if abs(share * n - 1) < 0.08:
            return f"{word} of the"
    return f"{100 * share:.0f}% of the" if share > 0.02 else f"{100 * share:.1g}% of the"


def _compared_with_best(results: Results, chosen: HeadSummary, tied: Sequence[HeadSummary]) -> str:
    best = results.ranked[0]
    worse = f"{100 * results.loss(best, chosen):.1f}% worse than"
    relation = "not significantly different from" if chosen in tied else worse
    return f"{relation} {in_sentence(best)}{_for_time(chosen, best)}"


def _certainty(best: HeadSummary, tied: Sequence[HeadSummary]) -> str:
    seeds = len(best.finished)
    if seeds < 2:
        return "with one seed there is no test, so a small lead may be chance"
    if not tied:
        return f"all others are significantly worse ({seeds} seeds)"
    verb = "is" if len(tied) == 1 else "are"
    return f"{_names_or_count(tied, 'others')} {verb} not significantly different ({seeds} seeds)"


def _names_or_count(summaries: Sequence[HeadSummary], word: str) -> str:
    """The names of the heads if they are few, else their number."""
    names = [in_sentence(each) for each in summaries]
    return joined(names) if len(names) <= _MOST_NAMED else f"{len(names)} {word}"


def _findings(
    results: Results, chosen: HeadSummary, runner_up: HeadSummary, tied: Sequence[HeadSummary]
) -> tuple[str, ...]:
    metric, best = results.metric, results.ranked[0]
    value = describe(metric, best.estimates[metric.key])
    steps = f"After the same {budget_text(results)} {in_sentence(best)} has the best quality"
    found = [f"{steps}, {metric.label} {value}; {_certainty(best, tied)}."]
    winner = results.best_at_equal_time
    if results.equal_seconds is not None and winner is not None and winner.at_equal_seconds:
        apart = results.told_apart(timed=True)
        level = [s for s in results.ranked if not apart.get(s.head.slug, True)]
        found.append(
            f"At equal time ({metrics.seconds(results.equal_seconds)} of training) "
            f"{in_sentence(winner)} is ahead on validation data, with {metric.label} "
            f"{describe(metric, winner.at_equal_seconds)}; {_certainty(winner, level)}."
        )
    return *found, _runner_up_sentence(results, chosen, runner_up, tied)


def _runner_up_sentence(
    results: Results, chosen: HeadSummary, other: HeadSummary, tied: Sequence[HeadSummary]
) -> str:
    """A sentence about the runner-up, which is the best head if a cheaper one is recommended."""
    metric, cost = results.metric, _for_time(other, chosen)
    best, ours = (metric.format(s.mean(metric.key)) for s in (other, chosen))
    if other is results.ranked[0] and best != ours:
        sure = " (not significantly better)" if chosen in tied else ""
        quality = f"{metric.label} {best} in place of {ours}{sure}"
        return f"{other.title} has the best quality: {quality}{cost}."
    gap = 100 * results.loss(chosen, other)
    quality = f"{gap:.1f}% worse than" if gap >= 0.05 else "as good as"
    return f"The runner-up is {in_sentence(other)}: {quality} {in_sentence(chosen)}{cost}."


def _for_time(one: HeadSummary, other: HeadSummary) -> str:
    """The step time of one head relative to another in words; empty if not measured."""
    ours, theirs = one.mean("step_ms"), other.mean("step_ms")
    if not ours or not theirs:
        return ""
    doubt = " (on a disturbed machine)" if one.disturbed or other.disturbed else ""
    return f" for {times_less(ours, theirs)} time per step{doubt}"


def _unsettled(results: Results, chosen: HeadSummary) -> str:
    if falling := _falling(results, chosen):
        shown = joined(f"{in_sentence(s)} ({100 * (s.gain or 0):.0f}%)" for s in falling)
        return f"the leaders still gain fast over the last quarter of the steps: {shown}"
    passing = _names_or_count([other for other, _ in _passing(results)], "heads")
    return f"{passing} would soon pass {in_sentence(results.ranked[0])} at the present rate"


def _notes(results: Results) -> list[str]:
    asked, metric = results.comparison, results.metric
    description = asked.data.get("description")
    data_notes = description.get("notes", ()) if isinstance(description, Mapping) else ()
    notes = [f"{each[:1].upper()}{each[1:]}." for each in data_notes]
    if failed := [s for s in results.summaries if s.any_failed]:
        notes.append(f"Some runs failed: {_statuses(failed)}.")
    if still_open := sum(run.status in OPEN for run in asked.runs):
        notes.append(
            f"{still_open} of {len(asked.runs)} runs did not reach the end of their budget."
        )
    if metric is metrics.EPS_PERPLEXITY:
        notes.append(
            "A sparse head gave probability 0 to some targets, which makes its perplexity "
            "infinite, so heads are ranked by the ε-smoothed perplexity that all of them have."
        )
    below = [s for s in results.ranked if not results.beats_baseline(s)]
    if below:
        notes.append(
            f"The {results.baseline_name} baseline has {metric.label} "
            f"{metric.format(results.baseline())}; {joined(map(in_sentence, below))} did not beat "
            "it."
        )
    for one, other in combinations(results.ranked, 2):
        if _is_same_model(one, other):
            notes.append(
                f"{one.title} and {in_sentence(other)} have the same results and the same number "
                "of parameters: for this data they are the same model."
            )
    if disturbed := [s for s in results.summaries if s.disturbed]:
        notes.append(
            "The machine was disturbed: steps took far longer than their median, or other "
            f"processes ran, with {_names_or_count(disturbed, 'heads')}. Their times are "
            "unreliable; compare again in a new folder."
        )
    other_start = {run.head.title for run in asked.runs if run.bias not in ("", STARTED)}
    if other_start:
        notes.append(
            f"{joined(sorted(other_start))} could not initialise biases by class frequencies, as "
            "the others did."
        )
    return notes


def _is_same_model(one: HeadSummary, other: HeadSummary) -> bool:
    """Whether all test metrics agree, as those of adaptive softmax without clusters and full."""
    keys = [metrics.HEAD_PARAMETERS.key, *(metric.key for metric in metrics.QUALITY)]
    pairs = [(one.mean(key), other.mean(key)) for key in keys]
    return all(
        a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=_SAME_RESULT))
        for a, b in pairs
    )


def _statuses(summaries: Sequence[HeadSummary]) -> str:
    return "; ".join(f"{in_sentence(s)}: {s.status}" for s in summaries)


def _without_results(results: Results) -> tuple[str, str]:
    runs = results.comparison.runs
    if not runs:
        return "No head was trained", "."
    kinds = Counter(run.status for run in runs)
    what = joined([f"{count} {status}" for status, count in kinds.most_common()])
    failed = any(run.failed for run in runs)
    headline = "No head has a result" if failed else "No head has finished yet"
    return headline, f": of {len(runs)} runs, {what}."
