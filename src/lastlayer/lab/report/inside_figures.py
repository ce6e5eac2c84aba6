"""Where differences come from: rare targets, calibration, and what has probability 0."""

import math

import altair as alt

from lastlayer.lab import metrics
from lastlayer.lab.metrics import Metric
from lastlayer.lab.report import axes
from lastlayer.lab.report.charts import Row
from lastlayer.lab.report.figure import Figure, View, first_capital, place, tip
from lastlayer.lab.results import HeadSummary, Results
from lastlayer.lab.statistics import estimate

# Of confidence, as the calibration error has them.
_BINS = 15


def deciles(results: Results) -> Figure:
    """Quality by how frequent the target is."""
    smooth = results.metric is metrics.EPS_PERPLEXITY
    kinds = (
        Metric("eps_nll", "−log p, ε-smoothed", "number", lower_is_better=True)
        if smooth
        else Metric("nll", "−log p", "number", lower_is_better=True),
        Metric("top1", "top-1 accuracy", "percent", lower_is_better=False),
        Metric("top10", "top-10 accuracy", "percent", lower_is_better=False),
        Metric("recall", "recall", "percent", lower_is_better=False),
    )
    views = [_deciles(results, kind) for kind in kinds]
    return Figure(
        "deciles",
        "Quality by frequency",
        "Targets by how frequent their class is: each group holds a tenth of all occurrences in "
        "the training data, the most frequent classes at the left. Mean over seeds.",
        tuple(view for view in views if view is not None),
    )


def _deciles(results: Results, kind: Metric) -> View | None:
    rows = []
    for summary in results.ranked:
        for decile in sorted({int(p["decile"]) for r in summary.finished for p in r.by_decile
                              if "decile" in p}):  # fmt: skip
            parts = [p for r in summary.finished for p in r.by_decile
                     if p.get("decile") == decile and p.get("count")]  # fmt: skip
            values = [p[kind.key] for p in parts if kind.key in p]
            found = estimate(values) if len(values) == len(parts) else None
            if found is not None:
                rows.append({**place(summary, kind, found), "x": decile, "y": found.mean})
    if not rows:
        return None
    # Domains are given, so that axes stay where they are when a head is hidden.
    x = alt.X("x:O", title="frequency decile of the target, 1 = most frequent",
              scale=alt.Scale(domain=sorted({row["x"] for row in rows})),
              axis=alt.Axis(grid=False, labelAngle=0))  # fmt: skip
    top = max(row["y"] for row in rows) or 1.0
    y = alt.Y(
        "y:Q", title=kind.label, axis=axes.axis(kind), scale=alt.Scale(domain=[0, 1.05 * top])
    )
    tooltip = [tip("head", "head"), alt.Tooltip("x:O", title="decile"), tip("value", kind.label)]
    return View(
        kind.key,
        kind.label,
        f"{first_capital(kind.label)} by frequency decile of the target, a line a head.",
        lambda charts: charts.lines(rows, x, y, tooltip),
    )


def calibration(results: Results) -> Figure:
    """How often the best class is right, by how likely the head says it is."""
    rows = []
    for summary in results.ranked:
        rows.extend(_calibration(summary))
    views: tuple[View, ...] = ()
    if rows:
        x = alt.X("x:Q", title="probability given to the best class", axis=axes.percent(),
                  scale=alt.Scale(domain=[0, 1]))  # fmt: skip
        y = alt.Y("y:Q", title="how often it is right", axis=axes.percent(),
                  scale=alt.Scale(domain=[0, 1]))  # fmt: skip
        tooltip = [tip("head", "head"), alt.Tooltip("x:Q", title="said", format=".1%"),
                   alt.Tooltip("y:Q", title="right", format=".1%"),
                   alt.Tooltip("count:Q", title="predictions", format=",")]  # fmt: skip
        views = (
            View(
                "calibration",
                "calibration",
                "Calibration: how often the best class is right against its probability, a line "
                "a head; the diagonal is perfect.",
                lambda charts: charts.lines(rows, x, y, tooltip, diagonal=True, height=360),
            ),
        )
    return Figure(
        "calibration",
        "Calibration",
        "On the diagonal a probability means what it says; below it the head is too sure of "
        "itself. All seeds together, bins with at least 20 predictions.",
        views,
    )


def _calibration(summary: HeadSummary) -> list[Row]:
    bins: dict[int, list[tuple[float, float, float]]] = {}
    for run in summary.finished:
        for part in run.calibration:
            if {"confidence", "accuracy", "count"} <= part.keys():
                bins.setdefault(int(part["confidence"] * _BINS), []).append(
                    (part["count"], part["confidence"], part["accuracy"])
                )
    rows: list[Row] = []
    for _, parts in sorted(bins.items()):
        total = sum(count for count, _, _ in parts)
        if total >= 20:
            rows.append({
                "head": summary.title, "count": total,
                "x": sum(count * said for count, said, _ in parts) / total,
                "y": sum(count * right for count, _, right in parts) / total,
            })  # fmt: skip
    return rows


def support(results: Results) -> Figure:
    """How many classes have a probability above zero."""
    measure = metrics.BY_KEY["support"]
    rows = []
    for summary in results.ranked:
        found, covered = summary.estimates.get("support"), summary.estimates.get("coverage")
        if found is not None:
            share = metrics.format_value(covered.mean, "share") if covered else metrics.NOTHING
            rows.append({**place(summary, measure, found), "x": found.mean,
                         "end": found.high or found.mean, "share": share,
                         "text": share})  # fmt: skip
    n_classes = results.comparison.n_classes
    if not rows or not any(row["x"] < (n_classes or math.inf) * 0.999 for row in rows):
        rows = []
    order = [row["head"] for row in sorted(rows, key=lambda row: row["x"])]
    high = max([n_classes or 1, *(row["x"] for row in rows)]) if rows else 1
    # Room for the numbers at the right.
    x = alt.X("x:Q", title="classes with a probability above 0",
              scale=alt.Scale(type="log", domain=[1, high**1.35], nice=False),
              axis=alt.Axis(format="~s", values=axes.log_ticks(1, high)))  # fmt: skip
    tooltip = [tip("head", "head"), tip("value", "support size"), tip("share", "coverage")]
    view = View(
        "support",
        "support",
        "Support size and coverage of each head: "
        + "; ".join(f"{r['head']} {r['value']}, {r['text']}" for r in rows)
        + ".",
        lambda charts: charts.dots(rows, x, tooltip, order=order),
    )
    return Figure(
        "support",
        "Support and coverage",
        "How many classes a prediction keeps above probability 0, on average, and at the right the "
        "share of targets that are among them. A sparse head that misses a target has infinite "
        "perplexity.",
        (view,) if rows else (),
    )
