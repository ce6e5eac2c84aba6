"""The summary table for the page, Markdown and CSV, and settings as text."""

import csv
import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lastlayer.lab import metrics
from lastlayer.lab.metrics import Metric
from lastlayer.lab.results import HeadSummary, Results
from lastlayer.lab.statistics import Estimate
from lastlayer.lab.verdict import Verdict, interval

_FIRST_COSTS = (
    metrics.MEMORY, metrics.HEAD_PARAMETERS, metrics.STEPS, metrics.EPOCHS,
    metrics.RATE_OF_LEARNING,
)  # fmt: skip
_OF_SPARSE_HEADS = ("eps_perplexity", "coverage", "support")
# Metrics without a better direction.
_NO_BEST = {
    "support", "steps", "epochs", "seconds", "parameters", "head_parameters", "lr", "gain",
}  # fmt: skip
_HELP = {
    **{m.key: "test data" for m in metrics.QUALITY},
    "step_ms": "median over steps, without warm-up and evaluation",
    "tokens_per_second": "targets per second of training",
    "peak_memory_mb": "while the run was trained",
    "parameters": "backbone and head together",
}
# Full names of settings, which have short names in files.
_NAMES = {
    "width": "hidden size", "hidden": "hidden size", "batch": "batch size", "lr": "learning rate",
    "body": "backbone", "valid": "validation", "train": "training",
}  # fmt: skip


class Cell(NamedTuple):
    """The cell of one metric and one head."""

    text: str
    span: str = ""  # the confidence interval, in small type
    sort: float | None = None
    best: bool = False


class Column(NamedTuple):
    """A metric, or a metric at equal time or steps."""

    key: str
    label: str
    help: str
    metric: Metric
    read: Callable[[HeadSummary], Estimate | None]


def columns(results: Results, *, telling: bool = True) -> list[Column]:
    """The columns of all measured metrics, the ranking metric and the time per step first.

    ``telling`` leaves out coverage, support and ε-smoothed perplexity if no head is sparse.
    """
    metric = results.metric
    found = [_column(metric, "test data, the best model by validation; heads are ranked by it")]
    found += [_column(m, _HELP[m.key]) for m in results.measured([metrics.STEP_MS])]
    if results.equal_seconds is not None and results.equal_steps is not None:
        after = metrics.seconds(results.equal_seconds)
        found += [
            Column("equal_time", "at equal time",
                   f"{metric.label}, validation data after {after} of training",
                   metric, lambda s: s.at_equal_seconds),
            Column("gain", metrics.GAIN.label,
                   "improvement of validation over the last quarter of the steps: if it is large, "
                   "the runs are too short",
                   metrics.GAIN,
                   lambda s: None if s.gain is None else Estimate(s.gain, len(s.finished))),
        ]  # fmt: skip
    silent = _OF_SPARSE_HEADS if telling and not _any_sparse(results) else ()
    others = [m for m in metrics.QUALITY if m is not metric and m.key not in silent]
    rest = [m for m in metrics.COSTS if m not in (metrics.STEP_MS, *_FIRST_COSTS)]
    measured = results.measured([*_FIRST_COSTS, *others, *rest])
    return found + [_column(m, _HELP.get(m.key, "")) for m in measured]


def _column(metric: Metric, help_: str) -> Column:
    return Column(metric.key, metric.label, help_, metric, lambda s: s.estimates.get(metric.key))


def _any_sparse(results: Results) -> bool:
    """Whether a head gives probability 0 to some class."""
    supports = [found for s in results.ranked if (found := s.mean("support")) is not None]
    return min(supports, default=1e300) < 0.999 * (results.comparison.n_classes or 0)


def cell(column: Column, summary: HeadSummary, results: Results) -> Cell:
    """The cell of a column and a head; it records whether it is the best of its column."""
    found = column.read(summary)
    if found is None:
        infinite = column.metric.key == "perplexity" and summary.finished
        return Cell("∞" if infinite else metrics.NOTHING)
    means = [other.mean for s in results.ranked if (other := column.read(s)) is not None]
    as_good = [m for m in means if not column.metric.better(found.mean, m)]
    telling = len(means) > 1 and column.key not in _NO_BEST
    return Cell(
        column.metric.format(found.mean),
        # Costs hardly differ between seeds, so an interval is not informative.
        interval(column.metric, found) if column.metric.tested else "",
        found.mean,
        best=telling and len(as_good) == 1,
    )


def baseline(results: Results, chosen: list[Column]) -> list[str]:
    """The row of the frequency baseline, one text per column; empty if not measured."""
    test = results.comparison.baseline.get("test")
    if not isinstance(test, Mapping) or results.baseline() is None:
        return []
    return [c.metric.format(test.get(c.key) if c.metric.tested else None) for c in chosen]


def markdown(results: Results, verdict: Verdict) -> str:
    """The verdict with findings and notes, and the summary table, as Markdown."""
    told = [verdict.sentence, *(f"- {each}" for each in (*verdict.findings, *verdict.notes)), ""]
    return "\n".join([*told, markdown_table(results, columns(results)), note(results), ""])


def markdown_table(results: Results, chosen: list[Column]) -> str:
    """A Markdown table with a row per head, best first, and one for the baseline."""
    heading = ["#", "head", *(c.label for c in chosen), "runs"]
    rows = [heading, ["--:", ":--", *["--:"] * len(chosen), ":--"]]
    for s in results.summaries:
        cells = [cell(c, s, results) for c in chosen]
        values = [f"{c.text} ({c.span})" if c.span else c.text for c in cells]
        rows.append([str(s.rank or ""), s.title, *values, runs_text(s)])
    if base := baseline(results, chosen):
        rows.append(["", f"{results.baseline_name} baseline", *base, ""])
    return "\n".join([*map(_line, rows), ""])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"


def comma_separated(results: Results) -> str:
    """CSV with one row per head: mean and both ends of the interval of each metric."""
    chosen = columns(results, telling=False)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [f"{c.key}{part}" for c in chosen for part in ("", "_low", "_high")]
    writer.writerow(["rank", "head", "spec", "family", "runs", "finished", "status", *names])
    for s in results.summaries:
        found = [c.read(s) for c in chosen]
        numbers = [n for e in found for n in ((e.mean, e.low, e.high) if e else (None,) * 3)]
        first = s.rank, s.title, s.head.spec, s.head.family, len(s.runs), len(s.finished), s.status
        writer.writerow([_safe("" if value is None else value) for value in (*first, *numbers)])
    return out.getvalue()


def _safe(value: object) -> object:
    """Quote text that a spreadsheet would interpret as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value


def note(results: Results, where: str = "in parentheses") -> str:
    """A note on means and intervals."""
    most = max((len(s.finished) for s in results.summaries), default=0)
    if most < 2:
        return "One seed: there are no confidence intervals." if most else "No run has finished."
    return f"Means over seeds; {where} 95% confidence intervals."


def runs_text(summary: HeadSummary) -> str:
    """The number of runs of a head and their status."""
    n, status = len(summary.runs), summary.status
    return status if status != "ok" and (n == 1 or "," in status) else f"{n} {status}"


def named(key: str) -> str:
    """The display name of a setting.

    Example:
        >>> named("width"), named("rows.valid"), named("valid_size")
        ('hidden size', 'rows.validation', 'validation size')
    """
    parts = (part.split("_") for part in key.split("."))
    return ".".join(" ".join(_NAMES.get(word, word) for word in part) for part in parts)


def flat(group: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested settings to paths; empty values are left out.

    Keys of ``description`` that its group already has are left out as well.

    Example:
        >>> flat({"name": "a", "description": {"name": "a", "types": 3}, "limit": None})
        {'name': 'a', 'types': 3}
    """
    found: dict[str, Any] = {}
    for key, value in group.items():
        if key == "description" and isinstance(value, Mapping):
            found |= {k: v for k, v in flat(value, before).items() if k not in found}
        elif isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}.")
        elif value is not None and value != "":
            found[f"{before}{key}"] = value
    return found


def plain(value: Any) -> str:
    """The value of a setting as text.

    Example:
        >>> plain(True), plain(12000), plain(0.001), plain([1, 2])
        ('yes', '12,000', '0.001', '1, 2')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
