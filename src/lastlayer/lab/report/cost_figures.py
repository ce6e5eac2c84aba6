"""Time of a step as measured, and operations against the number of classes."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from lastlayer.lab import metrics
from lastlayer.lab.report import axes, theory
from lastlayer.lab.report.charts import Row
from lastlayer.lab.report.figure import Figure, View, tip
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
    x = alt.X("x:Q", title="milliseconds a step", axis=alt.Axis(format=",.8~g", tickCount=6),
              scale=alt.Scale(domain=[0, top * 1.3], nice=False))  # fmt: skip
    tooltip = [tip("head", "head"), tip("text", "time a step")]
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


def operations(results: Results) -> Figure:
    """Theoretical cost of the head against the number of classes."""
    n_classes, width = results.comparison.n_classes, _width(results)
    rows: list[Row] = []
    here: list[Row] = []
    if n_classes:
        grid = sorted({round(10 ** (2 + i / 8)) for i in range(33)} | {n_classes})
        for summary in results.ranked:
            head = summary.head
            for v in grid:
                cost = theory.operations(head.family, v, width, head.arguments)
                if cost is not None:
                    row = {"head": summary.title, "x": v, "y": cost,
                           "formula": theory.in_words(head.family, head.arguments)}  # fmt: skip
                    rows.append(row)
                    if v == n_classes:
                        here.append(row)
    x = alt.X("x:Q", title="number of classes", **_span([row["x"] for row in rows], grid=False))
    y = alt.Y("y:Q", title="multiply-adds a target", **_span([row["y"] for row in rows]))
    tooltip = [tip("head", "head"), alt.Tooltip("x:Q", title="classes", format=","),
               alt.Tooltip("y:Q", title="multiply-adds", format=".3s"),
               tip("formula", "formula")]  # fmt: skip
    view = View(
        "operations",
        "operations",
        "Multiply-adds that a target costs each head, against the number of classes, both on "
        "logarithmic axes.",
        lambda charts: charts.theory(rows, here, x, y, tooltip),
    )
    return Figure(
        "operations",
        "Cost against classes, in theory",
        f"Products with class vectors for one target at width {width}, where frequencies follow "
        "Zipf's law. Symbols are at this data. Heads with the same formula lie on one line. Time "
        "follows these counts only in part: gathers, memory traffic and the model beneath are not "
        "in them.",
        (view,) if rows else (),
    )


def _span(values: Sequence[float], **options: Any) -> dict[str, Any]:
    """A logarithmic axis from the least to the most, with a letter for thousands."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    return {
        "scale": alt.Scale(type="log", domain=[low, high], nice=False),
        "axis": alt.Axis(format="~s", values=axes.log_ticks(low, high), **options),
    }


def _width(results: Results) -> int:
    model = results.comparison.model
    for key in ("width", "hidden"):
        if isinstance(model.get(key), int):
            return int(model[key])
    return 256
