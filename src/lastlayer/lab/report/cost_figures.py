"""Time of a step as measured, and cost against the number of classes, measured and in theory."""

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from lastlayer.lab import metrics
from lastlayer.lab._costs_reading import Cost
from lastlayer.lab.metrics import Metric
from lastlayer.lab.report import axes, theory
from lastlayer.lab.report.charts import Row
from lastlayer.lab.report.figure import Figure, View, first_capital, tip
from lastlayer.lab.results import Results


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
        "Time of a training step: " + "; ".join(f"{r['head']} {r['text']}" for r in rows) + ".",
        lambda charts: charts.dots(rows, x, tooltip, order=order, from_zero=True),
    )
    n_classes = results.comparison.n_classes
    return Figure(
        "step_time",
        "Time of a step, measured",
        "The whole training step, model and optimiser with it"
        + (f", at the {n_classes:,} classes of this data" if n_classes else "")
        + ". Whiskers hold the middle half of all steps.",
        (view,) if rows else (),
    )


def against_classes(results: Results) -> Figure:
    """Cost of the head alone against the number of classes: measured, and in theory."""
    costs = results.costs
    views = (
        _measured(results, "time", "time, measured", metrics.STEP_MS, lambda cost: cost.ms),
        _measured(
            results, "memory", "memory, measured", metrics.MEMORY, lambda cost: cost.peak_memory_mb
        ),
        _in_theory(results),
    )
    measured = "" if costs is None else (
        f"Measured: the loss of each head alone, forward and backward, with {costs.rows:,} rows at "
        f"width {costs.width:,}, on fresh heads; the median after warm-up. "
    )  # fmt: skip
    return Figure(
        "classes",
        "Cost of the head against classes",
        f"{measured}In theory: products with class vectors for one target at width "
        f"{_width(results)}; time follows these counts only in part, for gathers and memory "
        "traffic are not in them, and heads with the same formula lie on one line. Frequencies "
        "follow Zipf's law. The dotted line is at this data.",
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
    """A line a head through all sizes at which it was measured."""
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
        lambda charts: charts.against_classes(rows, rows, costs.own, x, y, tooltip),
    )


def _in_theory(results: Results) -> View | None:
    """Multiply-adds by their formulas, marked at this data."""
    n_classes, width = results.comparison.n_classes, _width(results)
    if not n_classes:
        return None
    grid = sorted({round(10 ** (2 + i / 8)) for i in range(33)} | {n_classes})
    rows: list[Row] = [
        {"head": summary.title, "x": v, "y": cost,
         "formula": theory.in_words(summary.head.family, summary.head.arguments)}
        for summary in results.ranked
        for v in grid
        if (cost := theory.operations(summary.head.family, v, width, summary.head.arguments))
        is not None
    ]  # fmt: skip
    if not rows:
        return None
    x = _classes(grid)
    y = alt.Y("y:Q", title="multiply-adds a target", **_span([row["y"] for row in rows]))
    tooltip = [tip("head", "head"), alt.Tooltip("x:Q", title="classes", format=","),
               alt.Tooltip("y:Q", title="multiply-adds", format=".3s"),
               tip("formula", "formula")]  # fmt: skip
    here = [row for row in rows if row["x"] == n_classes]
    return View(
        "theory",
        "in theory",
        "Multiply-adds that a target costs each head, against the number of classes, both on "
        "logarithmic axes.",
        lambda charts: charts.against_classes(rows, here, n_classes, x, y, tooltip),
    )


def _classes(sizes: Sequence[int], **options: Any) -> alt.X:
    return alt.X("x:Q", title="number of classes", **_span(sizes, grid=False, **options))


def _span(found: Sequence[float], **options: Any) -> dict[str, Any]:
    """A logarithmic axis around the values, with a letter for thousands."""
    low, high = min(found), max(found)
    margin = max((high / low) ** 0.03, 1.01)
    low, high = low / margin, high * margin
    ticks = {"format": "~s", "values": axes.log_ticks(low, high), **options}
    return {
        "scale": alt.Scale(type="log", domain=[low, high], nice=False),
        "axis": alt.Axis(**ticks),
    }


def _width(results: Results) -> int:
    model = results.comparison.model
    for key in ("width", "hidden"):
        if isinstance(model.get(key), int):
            return int(model[key])
    return 256
