"""What a comparison says, and how far that can be trusted.

Three findings: the best quality at equal steps, the best at equal time, and the recommendation,
which is the cheapest head whose quality is within the tolerance of the best. Where the curves of
the leaders still fall fast, or would cross soon, the verdict is that it is too early to tell.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lastlayer.lab import metrics
from lastlayer.lab.metrics import Metric
from lastlayer.lab.results import HeadSummary, Results
from lastlayer.lab.statistics import Estimate

# A gain over the last quarter of the steps that is so many tolerances is fast.
_FAST = 3.0
# Curves count as crossing if they would within so many times the steps.
_AHEAD, _QUARTER = 4.0, 4.0 / 3.0
_MOST_AHEAD = 20.0


@dataclass(frozen=True)
class Verdict:
    """What the comparison says."""

    headline: str
    detail: str
    """What the headline rests on; the two together are one or two sentences."""
    findings: tuple[str, ...]
    """Best at equal steps, best at equal time, and what the runner-up would cost or save."""
    notes: tuple[str, ...]
    """What else to know: failures, baselines, disturbed runs, what a single seed cannot show."""
    best: HeadSummary | None
    recommended: HeadSummary | None
    tied: tuple[HeadSummary, ...]
    """Heads that are not significantly different from the best one."""
    needed: int | None = None
    """Steps that it is expected to take until heads can be told apart, where it is too early."""
    runner_up: HeadSummary | None = None
    """The best head beside the recommended one."""

    @property
    def sentence(self) -> str:
        """Headline and detail."""
        return self.headline + self.detail


def verdict(results: Results) -> Verdict:
    """The sentences at the top of the page."""
    ranked = results.ranked
    if not ranked:
        headline, detail = _nothing(results)
        return Verdict(headline, detail, (), (), None, None, ())
    best = ranked[0]
    quality = describe(results.metric, best.estimates[results.metric.key])
    found = f"{results.metric.label} {quality} after {budget_text(results)}"
    notes = tuple(_notes(results))
    if len(results.comparison.heads) == 1:
        headline = f"Only {in_sentence(best)} was trained"
        detail = f": {found}; there is nothing to compare it with."
        return Verdict(headline, detail, (), notes, best, best, ())
    if len(ranked) == 1:
        detail = f": {found}; {_lost(results)}."
        headline = f"{best.title} is the only head with a result"
        return Verdict(headline, detail, (), notes, best, best, ())
    apart = results.told_apart()
    tied = tuple(s for s in ranked[1:] if not apart[s.head.slug])
    chosen = recommended(results)
    needed = steps_needed(results, chosen)
    runner_up = next(s for s in ranked if s is not chosen)
    findings = tuple(_findings(results, best, tied, chosen, runner_up))
    if needed is not None:
        headline = f"It is too early to tell: about {needed:,} steps are needed"
        detail = (
            f". After {budget_text(results)} {_unsettled(results, chosen)}; repeat with --budget "
            f"{needed}steps. So far {in_sentence(best)} is ahead, with {results.metric.label} "
            f"{quality}."
        )
        return Verdict(headline, detail, findings, notes, best, chosen, tied, needed, runner_up)
    headline = f"Take {in_sentence(chosen)}"
    detail = f": {_reason(results, best, chosen, tied)}."
    return Verdict(headline, detail, findings, notes, best, chosen, tied, None, runner_up)


def recommended(results: Results) -> HeadSummary:
    """The cheapest head by its step whose quality is within the tolerance of the best.

    A head that failed with some seed, or does not beat the baseline, is not recommended.
    """
    best = results.ranked[0]
    good = [
        each for each in results.ranked
        if results.loss(best, each) <= results.tolerance
        and not each.any_failed
        and results.beats_baseline(each)
    ]  # fmt: skip
    return min(good, key=lambda each: each.mean("step_ms") or math.inf, default=best)


def steps_needed(results: Results, chosen: HeadSummary) -> int | None:
    """Steps until the leaders can be told apart; None where they can be now.

    Leaders are the best head, the one that is recommended, and those whose curves would pass the
    best one within four times the steps, if each goes on as over its last quarter.
    """
    best, steps = results.ranked[0], results.equal_steps
    if steps is None or best.gain is None:
        return None
    fast = _FAST * results.tolerance
    factors = [
        each.gain / fast * 2 for each in {best.head.slug: best, chosen.head.slug: chosen}.values()
        if each.gain is not None and each.gain > fast
    ]  # fmt: skip
    for other in results.ranked[1:]:
        closing = (other.gain or 0.0) - best.gain
        gap = results.loss(best, other)
        # What stays within the tolerance would not change the recommendation.
        matters = gap > results.tolerance or closing > results.tolerance
        reach = closing * math.log(_AHEAD) / math.log(_QUARTER)
        if closing > 0 and matters and gap <= reach:
            factors.append(2 * _QUARTER ** (gap / closing))
    if not factors:
        return None
    return _rounded(steps * min(_MOST_AHEAD, max(2.0, *factors)))


def _rounded(steps: float) -> int:
    size = int(10 ** max(0, math.floor(math.log10(steps)) - 1))
    return round(steps / size) * size


def describe(metric: Metric, found: Estimate) -> str:
    """Mean and interval.

    Example:
        >>> describe(metrics.PERPLEXITY, Estimate(143.2, 3, 139.1, 147.4))
        '143 (139–147)'
    """
    span = interval(metric, found)
    return metric.format(found.mean) + (f" ({span})" if span else "")


def interval(metric: Metric, found: Estimate) -> str:
    """The 95% interval; nothing with one seed, or where both ends are the same when rounded."""
    first, last = map(metric.format, bounds(metric, found))
    return "" if first == last else f"{first.removesuffix('%')}–{last}"


def bounds(metric: Metric, found: Estimate) -> tuple[float | None, float | None]:
    """Both ends of the interval, within what the metric can be."""
    if found.low is None or found.high is None:
        return None, None
    return max(found.low, metric.least), min(found.high, metric.most)


def joined(names: Sequence[str]) -> str:
    """Names as a sentence has them.

    Example:
        >>> joined(["adaptive", "full", "nce"])
        'adaptive, full and nce'
    """
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def in_sentence(summary: HeadSummary) -> str:
    """The name of a head within a sentence: small, unless it is an abbreviation."""
    name = summary.title
    return name[:1].lower() + name[1:] if name[1:2].islower() else name


def full_softmax(results: Results) -> HeadSummary | None:
    """The head that the others are measured against."""
    for summary in results.ranked:
        if summary.head.family == "full":
            return summary
    return None


def budget_text(results: Results) -> str:
    """The budget as a person would say it."""
    budget = results.comparison.budget
    amount = budget.get("amount")
    if not isinstance(amount, int | float):
        return "the same budget"
    kind = str(budget.get("kind", ""))
    if kind == "seconds":
        return metrics.seconds(float(amount))
    text = f"{amount:,g} {kind if amount != 1 else kind.rstrip('s')}"
    epochs = budget.get("epochs")
    if kind == "steps" and isinstance(epochs, int | float):
        text += f" ({epochs:.2g} epochs)"
    return text


def times_less(ours: float, theirs: float) -> str:
    """How much less time or memory, in words.

    Example:
        >>> times_less(1.0, 8.0), times_less(3.0, 4.0), times_less(2.0, 1.0)
        ('an eighth of the', '75% of the', '2 times the')
    """
    share = ours / theirs
    if share >= 1.15:
        return f"{share:.1f} times the".replace(".0 ", " ")
    words = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth", 8: "an eighth",
             10: "a tenth"}  # fmt: skip
    for n, word in words.items():
        if abs(share * n - 1) < 0.08:
            return f"{word} of the"
    return f"{100 * share:.0f}% of the" if share > 0.02 else f"{100 * share:.1g}% of the"


def _reason(
    results: Results, best: HeadSummary, chosen: HeadSummary, tied: Sequence[HeadSummary]
) -> str:
    quality = describe(results.metric, chosen.estimates[results.metric.key])
    after = f"{results.metric.label} {quality} after {budget_text(results)}"
    if chosen is best:
        return f"{after}, the best quality; {_certainty(best, tied)}"
    worse = 100 * results.loss(best, chosen)
    spent = times_less(chosen.mean("step_ms") or math.nan, best.mean("step_ms") or math.nan)
    beside = "not significantly different from" if chosen in tied else f"{worse:.1f}% worse than"
    return f"{after}, {beside} {in_sentence(best)} for {spent} time per step"


def _certainty(best: HeadSummary, tied: Sequence[HeadSummary]) -> str:
    seeds = len(best.finished)
    if seeds < 2:
        return "with one seed there is no test, so a small lead may be chance"
    if not tied:
        return f"all others are significantly worse ({seeds} seeds)"
    names = [in_sentence(s) for s in tied]
    listed = joined(names) if len(names) <= 3 else f"{len(names)} others"
    verb = "is" if len(names) == 1 else "are"
    return f"{listed} {verb} not significantly different ({seeds} seeds)"


def _findings(
    results: Results,
    best: HeadSummary,
    tied: Sequence[HeadSummary],
    chosen: HeadSummary,
    runner_up: HeadSummary,
) -> list[str]:
    metric = results.metric
    value = describe(metric, best.estimates[metric.key])
    steps = f"After the same {budget_text(results)} {in_sentence(best)} has the best quality"
    found = [f"{steps}, {metric.label} {value}; {_certainty(best, tied)}."]
    sign = 1.0 if metric.lower_is_better else -1.0
    timed = [(at, s) for s in results.ranked if (at := s.at_equal_seconds) is not None]
    if results.equal_seconds is not None and len(timed) > 1:
        at, winner = min(timed, key=lambda place: sign * place[0].mean)
        found.append(
            f"At equal time ({metrics.seconds(results.equal_seconds)} of training) "
            f"{in_sentence(winner)} is ahead on validation data, with {metric.label} "
            f"{metric.format(at.mean)}."
        )
    return [*found, _beside(results, chosen, runner_up)]


def _beside(results: Results, chosen: HeadSummary, other: HeadSummary) -> str:
    """The runner-up, and what it would cost or save."""
    gap = 100 * results.loss(chosen, other)
    quality = f"{abs(gap):.1f}% {'worse' if gap > 0 else 'better'}"
    ours, theirs = chosen.mean("step_ms"), other.mean("step_ms")
    cost = f" for {times_less(theirs, ours)} time per step" if ours and theirs else ""
    return f"The runner-up is {in_sentence(other)}: {quality} than {in_sentence(chosen)}{cost}."


def _unsettled(results: Results, chosen: HeadSummary) -> str:
    best = results.ranked[0]
    fast = _FAST * results.tolerance
    falling = {s.head.slug: s for s in (best, chosen) if (s.gain or 0.0) > fast}
    if falling:
        shown = joined([f"{in_sentence(s)} ({100 * (s.gain or 0):.0f}%)" for s in falling.values()])
        return f"the leaders still gain fast over the last quarter of the steps: {shown}"
    return "curves of the leaders would cross soon"


def _notes(results: Results) -> list[str]:
    told = results.comparison.data.get("description")
    notes = [f"{each}." for each in told.get("notes", ())] if isinstance(told, Mapping) else []
    failed = [s for s in results.summaries if s.any_failed]
    if failed:
        notes.append(f"Not every run came to a result: {_fates(failed)}.")
    still_open = sum(run.status in {"unfinished", "not started", "interrupted"}
                     for run in results.comparison.runs)  # fmt: skip
    if still_open:
        total = len(results.comparison.runs)
        notes.append(f"{still_open} of {total} runs did not reach the end of their budget.")
    if results.metric is metrics.EPS_PERPLEXITY:
        notes.append(
            "A sparse head gave probability 0 to some targets, which makes its perplexity "
            "infinite, so heads are ranked by the ε-smoothed perplexity that all of them have."
        )
    base = results.baseline()
    below = [s for s in results.ranked if not results.beats_baseline(s)]
    if base is not None and below:
        name = results.comparison.baseline.get("name", "frequency")
        notes.append(
            f"The {name} baseline has {results.metric.label} {results.metric.format(base)}; "
            f"{joined([in_sentence(s) for s in below])} did not beat it."
        )
    disturbed = [s for s in results.summaries if s.disturbed]
    if disturbed:
        notes.append(
            "The machine was disturbed: steps took far longer than their median, or other "
            f"processes ran, with {joined([in_sentence(s) for s in disturbed])}. Times of these "
            "heads are not to be trusted; --resume repeats nothing, so compare again."
        )
    other_start = sorted({run.head.title for run in results.comparison.runs
                          if run.bias and run.bias != "class frequencies"})  # fmt: skip
    if other_start:
        notes.append(
            f"{joined(other_start)} could not start at the class frequencies, as the others did."
        )
    return notes


def _lost(results: Results) -> str:
    return _fates([s for s in results.summaries if s.rank is None])


def _fates(summaries: Sequence[HeadSummary]) -> str:
    return "; ".join(f"{in_sentence(s)}: {s.status}" for s in summaries)


def _nothing(results: Results) -> tuple[str, str]:
    runs = results.comparison.runs
    if not runs:
        return "No head was trained", "."
    kinds = Counter(run.status for run in runs)
    what = joined([f"{count} {status}" for status, count in kinds.most_common()])
    failed = any(run.failed for run in runs)
    headline = "No head came to a result" if failed else "No head has finished yet"
    return headline, f": of {len(runs)} runs, {what}."
