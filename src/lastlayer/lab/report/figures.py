"""All figures of the page: quality and its cost, where differences come from, cost by classes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from lastlayer.lab import metrics
from lastlayer.lab.metrics import Metric
from lastlayer.lab.records import Cost
from lastlayer.lab.report import charts as axes
from lastlayer.lab.report.charts import Charts, Row
from lastlayer.lab.results import Axis, HeadSummary, Results, interpolate, quality_of
from lastlayer.lab.statistics import Estimate, estimate
from lastlayer.lab.verdict import bounds, describe

# Points of a mean learning curve.
_GRID = 60
# How many times longer than the shortest a curve is when time is drawn on a logarithmic axis.
_UNEQUAL = 5.0
# Of confidence, as the calibration error has them.
_BINS = 15
# A baseline further away than so many times the span of the heads is at the edge of its axis.
_FAR = 1.5


@dataclass(frozen=True)
class View:
    """One state of a figure's selector."""

    key: str
    label: str
    """Of the button."""
    alt_text: str
    chart: Callable[[Charts], dict[str, Any]]


@dataclass(frozen=True)
class Figure:
    """A chart of the page, with one or more views."""

    key: str
    title: str
    caption: str
    views: tuple[View, ...]


def place(summary: HeadSummary, metric: Metric, found: Estimate) -> dict[str, Any]:
    """What every row has: the head, the interval, and the value as text."""
    low, high = bounds(metric, found)
    if high is not None and math.isinf(high):
        high = 1e300
    return {"head": summary.title, "low": low, "high": high, "value": describe(metric, found)}


def baseline(
    results: Results, part: str, values: Sequence[float]
) -> tuple[list[float], Row | None]:
    """The values that an axis must hold, and the row of the line of the frequency baseline.

    A baseline that is so far away that heads could not be told apart beside it is drawn at the
    edge of the axis, and its label says that it is further.
    """
    metric, asked = results.metric, results.comparison.baseline
    measured = asked.get(part)
    if not isinstance(measured, Mapping):
        measured, part = asked.get("test"), "test"
    value = measured.get(metric.key) if isinstance(measured, Mapping) else None
    if not isinstance(value, int | float) or not math.isfinite(value) or not values:
        return list(values), None
    if metric.log and value <= 0:
        return list(values), None
    place = math.log if metric.log and min(values) > 0 else float
    low, high, at = place(min(values)), place(max(values)), place(value)
    room = _FAR * max(high - low, 0.3 if place is math.log else 0.05)
    # Half of the margin that the axis has.
    edge = low - 0.04 * (high - low) if at < low else high + 0.04 * (high - low)
    far = not low - room <= at <= high + room
    label = f"{asked.get('name', 'frequency')} baseline {metric.format(value)}"
    shown = math.exp(edge) if place is math.log else edge
    row: Row = {"value": shown if far else value, "high": at > (low + high) / 2,
                "label": f"{label} (off the axis)" if far else label}  # fmt: skip
    return [*values, *([] if far else [float(value)])], row


def tip(field: str, title: str) -> alt.Tooltip:
    """A line of a tooltip that holds text."""
    return alt.Tooltip(f"{field}:N", title=title)


def in_sight(metric: Metric, rows: Sequence[Row], key: str) -> list[float]:
    """The values that an axis must hold: all means, and whiskers unless they dwarf the means."""
    means = [row[key] for row in rows]
    low, high = min(means), max(means)
    ends = [end for row in rows for end in (row["low"], row["high"]) if end is not None]
    if metric.log:
        room = max((high / low) ** 0.4, 1.3)
        floor, ceiling = low / room, high * room
    else:
        room = max(0.4 * (high - low), 0.1 * abs(high))
        floor, ceiling = low - room, high + room
    return [*means, *(min(max(end, floor), ceiling) for end in ends)]


def first_capital(text: str) -> str:
    """Of a sentence; ε stays as it is."""
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def tradeoff(results: Results) -> Figure:
    """Quality against what it costs."""
    costs = [metrics.STEP_MS, metrics.SECONDS, metrics.MEMORY, metrics.PARAMETERS]
    if results.comparison.budget.get("kind") == "seconds":
        costs.remove(metrics.SECONDS)
    costs.append(metrics.HEAD_PARAMETERS)
    views = [_tradeoff(results, cost) for cost in results.measured(costs)]
    return Figure(
        "tradeoff",
        "Quality against cost",
        f"{first_capital(results.metric.label)} on test data; "
        f"{_better(results.metric)} is better, further left is cheaper. Whiskers are 95% "
        "confidence intervals over seeds. The dashed line joins the heads that no other beats in "
        "both.",
        tuple(view for view in views if view is not None),
    )


def _tradeoff(results: Results, cost: Metric) -> View | None:
    metric = results.metric
    rows = []
    for summary in results.ranked:
        quality, price = summary.estimates[metric.key], summary.estimates.get(cost.key)
        if price is not None:
            rows.append({**place(summary, metric, quality), "x": price.mean, "y": quality.mean,
                         "cost": cost.format(price.mean)})  # fmt: skip
    if not rows:
        return None
    front = [{"x": s.mean(cost.key), "y": s.mean(metric.key)} for s in results.front(cost)]
    x = alt.X("x:Q", title=axes.title(cost), **axes.around(cost, [r["x"] for r in rows]))
    held, base = baseline(results, "test", in_sight(metric, rows, "y"))
    if base is not None:
        # Where the head that is next to it leaves room.
        at = base["value"]
        near = min(rows, key=lambda row: abs(row["y"] - at))["x"]
        costly = sum(near > row["x"] for row in rows) * 2 > len(rows)
        base = {**base, "y": at, "side": "left" if costly else "right"}
    y = alt.Y("y:Q", title=metric.label, **axes.around(metric, held))
    tooltip = [tip("head", "head"), tip("value", metric.label), tip("cost", cost.label)]
    best = results.front(cost)
    names = ", ".join(s.title for s in best)
    return View(
        cost.key,
        cost.label,
        f"Scatter plot of {metric.label} against {cost.label} for {len(rows)} heads. "
        f"Not beaten in both: {names}.",
        lambda charts: charts.scatter(rows, x, y, front, tooltip, base),
    )


def equal(results: Results) -> Figure:
    """Validation quality at equal time, beside that at the end, where steps are equal."""
    metric = results.metric
    rows = [
        {**place(summary, metric, found), "x": found.mean, "at": at}
        for summary in results.ranked
        for at, found in (
            ("equal time", summary.at_equal_seconds),
            ("the end", summary.at_equal_steps),
        )
        if found is not None
    ]
    seconds, steps = results.equal_seconds, results.equal_steps
    views: tuple[View, ...] = ()
    if rows and seconds is not None and steps is not None:
        held, base = baseline(results, "valid", in_sight(metric, rows, "x"))
        base = base and {**base, "x": base["value"]}
        x = alt.X("x:Q", title=metric.label, **axes.around(metric, held))
        order = [s.title for s in results.ranked]
        tooltip = [tip("head", "head"), tip("at", "at"), tip("value", metric.label)]
        view = View(
            "both",
            "both",
            f"For each head, {metric.label} after {metrics.seconds(seconds)} of training and after "
            f"{steps:,} steps.",
            lambda charts: charts.dumbbells(rows, x, tooltip, order=order, baseline=base),
        )
        views = (view,)
    return Figure(
        "equal",
        "At equal time, and at the end",
        f"{first_capital(metric.label)} on validation data. Filled circles: at equal time, after "
        f"the {metrics.seconds(seconds or 0.0)} of training that the fastest head took. Open "
        f"squares: at the end, after the same {steps or 0:,} steps. Read off the learning curves, "
        "between two validations by interpolation.",
        views,
    )


def curves(results: Results) -> Figure:
    """Learning curves over seconds and over steps."""
    views = [_curve(results, "steps", "over steps"), _curve(results, "seconds", "over time")]
    return Figure(
        "curves",
        "Learning curves",
        f"{first_capital(results.metric.label)} on validation data, the mean over seeds; bands "
        "reach from the lowest to the highest seed. Time is that of training alone, without "
        "warm-up and evaluation.",
        tuple(view for view in views if view is not None),
    )


def _curve(results: Results, axis: Axis, label: str) -> View | None:
    metric = results.metric
    rows: list[Row] = []
    for summary in results.summaries:
        rows.extend(_mean_curve(summary, metric, axis))
    if not rows:
        return None
    title = "seconds of training" if axis == "seconds" else "steps"
    form = ".3~s" if axis == "steps" else ",.8~g"
    ends = [row["x"] for row in rows if row["last"]]
    if max(ends) > _UNEQUAL * min(ends) > 0:
        # Where one head takes much longer than another, the others could not be seen.
        rows = [row for row in rows if row["x"] > 0]
        start, stop = max(min(ends) / 50, min(row["x"] for row in rows)), max(ends)
        rows = [row for row in rows if row["x"] >= start]
        scale = alt.Scale(type="log", domain=[start, stop], nice=False)
        x_axis = alt.Axis(grid=False, format=form, values=axes.log_ticks(start, stop))
    else:
        scale = alt.Scale(domain=[0, max(ends)], nice=False)
        x_axis = alt.Axis(grid=False, format=form, tickCount=6)
    x = alt.X("x:Q", title=title, scale=scale, axis=x_axis)
    # From a random start, values fall by orders of magnitude in moments: the axis begins where the
    # heads have begun to differ.
    held, base = baseline(results, "valid", _settled(rows))
    base = base and {**base, "y": base["value"]}
    y = alt.Y("y:Q", title=metric.label, **axes.around(metric, held))
    tooltip = [tip("head", "head"), alt.Tooltip("x:Q", title=title, format=",.4~g"),
               tip("value", metric.label)]  # fmt: skip
    return View(
        axis,
        label,
        f"Learning curves of {len({r['head'] for r in rows})} heads: {metric.label} {label}.",
        lambda charts: charts.curves(rows, x, y, tooltip, base),
    )


def _mean_curve(summary: HeadSummary, metric: Metric, axis: Axis) -> list[Row]:
    """The mean over seeds, as far as all were validated; of what there is, if none finished."""
    runs = [
        run
        for run in summary.finished or summary.runs
        if any(quality_of(p, metric) is not None for p in run.valid)
    ]
    places = {
        p.seconds if axis == "seconds" else float(p.step)
        for run in runs
        for p in run.valid
        if quality_of(p, metric) is not None
    }
    rows: list[Row] = []
    for where in _thinned(sorted(places)):
        values = [interpolate(run, metric, axis, where) for run in runs]
        known = [value for value in values if value is not None]
        found = estimate(known, log=metric.log) if len(known) == len(runs) else None
        if found is not None:
            band = {"low": min(known), "high": max(known)} if len(known) > 1 else {}
            rows.append({**place(summary, metric, found), "low": None, "high": None, **band,
                         "x": where, "y": found.mean, "last": False})  # fmt: skip
    if rows:
        rows[-1]["last"] = True
    return rows


def _thinned(places: Sequence[float]) -> list[float]:
    if len(places) <= _GRID:
        return list(places)
    step = (len(places) - 1) / (_GRID - 1)
    return [places[round(i * step)] for i in range(_GRID)]


def _settled(rows: Sequence[Row]) -> list[float]:
    """The values after the first tenth of the longest curve."""
    end = max(row["x"] for row in rows)
    later = [row["y"] for row in rows if row["x"] >= 0.1 * end]
    return later or [row["y"] for row in rows]


def _better(metric: Metric) -> str:
    return "lower" if metric.lower_is_better else "higher"


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
        f"{first_capital(kind.label)} by frequency decile of the target, a line per head.",
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
                "per head; the diagonal is perfect.",
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


def step_time(results: Results) -> Figure:
    """Measured time of a step at this number of classes."""
    measure = metrics.STEP_MS
    rows: list[Row] = []
    for summary in results.ranked:
        found = summary.estimates.get(measure.key)
        if found is None:
            continue
        lows = [r.numbers["step_ms_low"] for r in summary.finished if "step_ms_low" in r.numbers]
        highs = [r.numbers["step_ms_high"] for r in summary.finished if "step_ms_high" in r.numbers]
        rows.append({
            "head": summary.title, "x": found.mean, "text": measure.format(found.mean),
            "low": min(lows, default=found.mean), "high": (high := max(highs, default=found.mean)),
            "end": high, "zero": 0,
        })  # fmt: skip
    order = [row["head"] for row in sorted(rows, key=lambda row: row["x"])]
    top = max((row["high"] for row in rows), default=1.0)
    x = alt.X("x:Q", title="milliseconds per step", axis=alt.Axis(format=",.8~g", tickCount=6),
              scale=alt.Scale(domain=[0, top * 1.3], nice=False))  # fmt: skip
    tooltip = [tip("head", "head"), tip("text", "time per step")]
    view = View(
        "step_time",
        "step time",
        "Time per training step: " + "; ".join(f"{r['head']} {r['text']}" for r in rows) + ".",
        lambda charts: charts.dots(rows, x, tooltip, order=order, from_zero=True),
    )
    n_classes = results.comparison.n_classes
    return Figure(
        "step_time",
        "Time per step",
        "The whole training step, with backbone and optimiser"
        + (f", at the {n_classes:,} classes of this data" if n_classes else "")
        + ". Whiskers span the middle half of all steps.",
        (view,) if rows else (),
    )


def against_classes(results: Results) -> Figure:
    """Cost of the head alone against the number of classes, measured."""
    costs = results.costs
    views = (
        _measured(results, "time", "time", metrics.STEP_MS, lambda cost: cost.ms),
        _measured(results, "memory", "memory", metrics.MEMORY, lambda cost: cost.peak_memory_mb),
    )
    sizes = "" if costs is None else (
        f", with {costs.rows:,} rows and hidden size {costs.width:,}"
    )  # fmt: skip
    return Figure(
        "classes",
        "Cost of the head by number of classes",
        f"Measured: the loss of each head alone, forward and backward{sizes}, on fresh heads; the "
        "median after warm-up. Class frequencies follow Zipf's law. The dotted line is at the "
        "number of classes of this data.",
        tuple(view for view in views if view is not None),
    )


def left_out(results: Results) -> list[tuple[str, list[str]]]:
    """Heads with what was not measured of them and why; sizes with the same reason together."""
    found: list[tuple[str, list[str]]] = []
    costs = () if results.costs is None else results.costs.found
    for head in results.comparison.heads:
        reasons: dict[str, list[int]] = {}
        for cost in costs:
            if cost.slug == head.slug and cost.reason:
                reasons.setdefault(cost.reason, []).append(cost.classes)
        if reasons:
            found.append((head.title, [_sizes(n, reason) for reason, n in reasons.items()]))
    return found


def _sizes(sizes: list[int], reason: str) -> str:
    *first, last = (f"{classes:,}" for classes in sorted(sizes))
    return f"{', '.join(first)}{' and ' if first else ''}{last} classes: {reason}"


def _measured(
    results: Results, key: str, label: str, metric: Metric, value: Callable[[Cost], float | None]
) -> View | None:
    """A line per head through all sizes at which it was measured."""
    costs, titles = results.costs, {head.slug: head.title for head in results.comparison.heads}
    if costs is None:
        return None
    rows: list[Row] = [
        {"head": titles[cost.slug], "x": cost.classes, "y": found, "text": metric.format(found),
         "rows": f"{costs.rows:,}", "samples": f"{cost.samples}"}
        for cost in costs.found
        if (found := value(cost)) is not None and found > 0 and cost.slug in titles
    ]  # fmt: skip
    if not rows:
        return None
    sizes = sorted({costs.own, *(row["x"] for row in rows)})
    x = _classes(sizes, values=sizes, format=",")
    y = alt.Y("y:Q", title=axes.title(metric), **_span([row["y"] for row in rows]))
    tooltip = [tip("head", "head"), alt.Tooltip("x:Q", title="classes", format=","),
               tip("text", metric.label), tip("rows", "rows"),
               tip("samples", "steps timed")]  # fmt: skip
    at_own = "; ".join(f"{r['head']} {r['text']}" for r in rows if r["x"] == costs.own)
    return View(
        key,
        label,
        f"{first_capital(metric.label)} of each head alone against the number of classes, both on "
        f"logarithmic axes. At {costs.own:,} classes: {at_own or 'nothing was measured'}.",
        lambda charts: charts.against_classes(rows, costs.own, x, y, tooltip),
    )


def _classes(sizes: Sequence[int], **options: Any) -> alt.X:
    return alt.X("x:Q", title="number of classes", **_span(sizes, grid=False, **options))


def _span(found: Sequence[float], **options: Any) -> dict[str, Any]:
    """A logarithmic axis around the values."""
    low, high = min(found), max(found)
    margin = max((high / low) ** 0.03, 1.01)
    low, high = low / margin, high * margin
    # A letter for thousands, but none for thousandths.
    ticks = {
        "format": "~s" if low >= 1 else ",.3~g",
        "values": axes.log_ticks(low, high),
        **options,
    }
    return {
        "scale": alt.Scale(type="log", domain=[low, high], nice=False),
        "axis": alt.Axis(**ticks),
    }


_ALL = (tradeoff, equal, curves, deciles, calibration, support, step_time, against_classes)


def all_figures(results: Results) -> tuple[Figure, ...]:
    """Those that there is anything to show for, in the order of the page."""
    made = (figure(results) for figure in _ALL)
    return tuple(figure for figure in made if figure.views)
