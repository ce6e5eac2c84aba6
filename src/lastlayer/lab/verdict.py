"""Which head to take, in one sentence that says how sure it is.

Two heads are told apart when the 95% interval of their difference, taken seed by seed, leaves out
zero. Each pair is judged for itself, with no correction for how many pairs there are.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from lastlayer.lab import metrics
from lastlayer.lab._intervals import Estimate
from lastlayer.lab.metrics import Metric
from lastlayer.lab.results import HeadSummary, Results


@dataclass(frozen=True)
class Verdict:
    """What the comparison says."""

    headline: str
    detail: str
    """What the headline rests on; the two together are one sentence."""
    notes: tuple[str, ...]
    """What else to know: failures, other winners, what a single seed cannot show."""
    best: HeadSummary | None
    tied: tuple[HeadSummary, ...]
    """Heads that cannot be told apart from the best one."""

    @property
    def sentence(self) -> str:
        """Headline and detail."""
        return self.headline + self.detail


def verdict(results: Results) -> Verdict:
    """The sentence at the top of the page."""
    ranked = results.ranked
    if not ranked:
        headline, detail = _nothing(results)
        return Verdict(headline, detail, (), None, ())
    best = ranked[0]
    quality = describe(results.metric, best.estimates[results.metric.key])
    found = f"{results.metric.label} {quality} {_after(results)}"
    notes = tuple(_notes(results, best))
    if len(results.comparison.heads) == 1:
        detail = f": {found}; there is nothing to compare it with."
        return Verdict(f"Only {in_sentence(best)} was trained", detail, notes, best, ())
    if len(ranked) == 1:
        detail = f": {found}; {_lost(results)}."
        return Verdict(f"{best.title} is the only head with a result", detail, notes, best, ())
    tied = tuple(s for s in ranked[1:] if not told_apart(results, best, s))
    speed = _against_full(results, best)
    detail = f": {found}{speed}; {_certainty(results, best, tied)}."
    return Verdict(_opening(best, tied, ranked), detail, notes, best, tied)


def told_apart(results: Results, best: HeadSummary, other: HeadSummary) -> bool:
    """Whether the seeds show that the other is worse. One seed shows nothing."""
    gap = results.compare(best, other)
    return gap is not None and gap.low is not None and gap.low > 0.0


def describe(metric: Metric, found: Estimate) -> str:
    """Mean and interval.

    Example:
        >>> describe(metrics.PERPLEXITY, Estimate(143.2, 3, 139.1, 147.4))
        '143 (139–147)'
    """
    text = metric.format(found.mean)
    if found.low is None or found.high is None:
        return text
    return f"{text} ({interval(metric, found)})"


def interval(metric: Metric, found: Estimate) -> str:
    """The 95% interval, or nothing with one seed."""
    if found.low is None or found.high is None:
        return ""
    low, high = bounds(metric, found)
    first, last = metric.format(low), metric.format(high)
    return f"{first.removesuffix('%')}–{last}"


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
    return f"{amount:,g} {kind if amount != 1 else kind.rstrip('s')}"


def _after(results: Results) -> str:
    return f"after {budget_text(results)} of training"


def _opening(best: HeadSummary, tied: Sequence[HeadSummary], ranked: Sequence[HeadSummary]) -> str:
    name = best.title[:1].upper() + best.title[1:]
    if not tied:
        return f"{name} is the best choice here"
    if any(len(s.finished) > 1 for s in ranked):
        return f"{name} has the best result here"
    return f"{name} came out best here"


def _certainty(results: Results, best: HeadSummary, tied: Sequence[HeadSummary]) -> str:
    ranked = results.ranked
    seeds = len(best.finished)
    if seeds < 2:
        return "with one seed there is no interval, so a small lead may be chance"
    at = f"at {seeds} seeds"
    if len(tied) == len(ranked) - 1:
        others = "the other" if len(tied) == 1 else f"the {len(tied)} others"
        return f"it cannot be told apart from {others} {at}"
    if tied:
        names = [in_sentence(s) for s in tied]
        listed = joined(names) if len(names) <= 3 else f"{len(names)} others"
        return f"{listed} cannot be told apart from it {at}"
    return f"{_lead(results, best, ranked[1])} {at}"


def _lead(results: Results, best: HeadSummary, second: HeadSummary) -> str:
    gap = results.compare(best, second)
    if gap is None or gap.low is None or gap.high is None:
        return f"the next, {in_sentence(second)}, is clearly behind"
    if results.metric.log:
        low, high = 100 * (exp(min(gap.low, 50.0)) - 1), 100 * (exp(min(gap.high, 50.0)) - 1)
        return f"the next, {in_sentence(second)}, is {_range(low, high)}% higher"
    return (
        f"the next, {in_sentence(second)}, is {_range(100 * gap.low, 100 * gap.high)} points lower"
    )


def _range(low: float, high: float) -> str:
    one, other = (f"{x:.1f}" if x < 9.95 else f"{x:,.0f}" for x in (low, high))
    return one if one == other else f"{one} to {other}"


def _against_full(results: Results, best: HeadSummary) -> str:
    """How many steps or how much time the best took beside the full softmax."""
    full = full_softmax(results)
    if full is None or full is best:
        return ""
    in_seconds = results.comparison.budget.get("kind") == "seconds"
    key = "steps" if in_seconds else "seconds"
    ours, theirs = best.mean(key), full.mean(key)
    if not ours or not theirs:
        return ""
    ratio = ours / theirs
    number = f"{ratio:.1f}" if ratio >= 0.95 else f"{ratio:.2f}"
    what = "the steps" if in_seconds else "the time"
    return f", with {number} × {what} of {in_sentence(full)}"


def _notes(results: Results, best: HeadSummary) -> list[str]:
    notes = []
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
    notes.extend(_other_winners(results, best))
    return notes


def _other_winners(results: Results, best: HeadSummary) -> list[str]:
    notes = []
    sign = 1.0 if results.metric.lower_is_better else -1.0
    equals = (
        ("time", lambda s: s.at_equal_seconds, results.equal_seconds, metrics.seconds),
        ("steps", lambda s: s.at_equal_steps, results.equal_steps, lambda n: f"{n:,} steps"),
    )
    for name, read, where, show in equals:
        places = [(found, s) for s in results.ranked if (found := read(s)) is not None]
        if where is None or len(places) < 2:
            continue
        found, winner = min(places, key=lambda place: sign * place[0].mean)
        if winner is not best:
            value = results.metric.format(found.mean)
            notes.append(
                f"At equal {name} ({show(where)}) {in_sentence(winner)} is ahead on validation "
                f"data, with {results.metric.label} {value}."
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
