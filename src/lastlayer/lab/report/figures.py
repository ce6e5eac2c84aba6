"""All figures of the page: quality and cost, origins of differences, cost by number of classes.

Charts do not depend on light or dark mode: colours come from Vega's configuration, and from the
signals ``ink`` and ``muted``. The page has one legend for all charts; the signal ``shown`` lists
the heads to draw.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import altair as alt

from lastlayer.lab import metrics
from lastlayer.lab.metrics import Metric
from lastlayer.lab.records import Cost
from lastlayer.lab.report.look import LIGHT_INK, SHAPES, Look
from lastlayer.lab.results import Axis, HeadSummary, Results, curve, interpolate
from lastlayer.lab.statistics import Estimate, estimate
from lastlayer.lab.verdict import bounds, describe, joined

Row = dict[str, Any]
# Points of a mean learning curve.
_GRID = 60
# The time axis is logarithmic if the longest curve is more than this many times the shortest.
_UNEQUAL = 5.0
# Bins of confidence, as in the calibration error, and the minimal predictions in a bin to draw it.
_BINS, _FEWEST = 15, 20
# A baseline further away than this many spans of the heads is drawn at the edge of its axis.
_FAR = 1.5
_MOST_TICKS = 6
# Ticks within a decade, from dense to sparse.
_MANTISSAS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 3), (1,))
# Number of letters of a name that fit to the left of a chart: on a phone, and on a wider screen.
_LINES = 18, 36
# Dashes are for lines only: the outline of a symbol is not drawn.
_LEGEND = {"title": None, "symbolOpacity": 1, "labelLimit": 300, "symbolStrokeWidth": 0}

alt.data_transformers.disable_max_rows()


class View(NamedTuple):
    """One state of a figure's selector."""

    key: str
    label: str  # of the button
    alt_text: str
    layers: list[Any]  # of the chart
    height: Any = 340
    legend: bool = True  # whether a picture has a legend; the axis may name the heads instead

    def chart(self, looks: Sequence[Look], *, in_page: bool = True) -> dict[str, Any]:
        """The chart in Vega-Lite; colours and symbols of heads are the same on every chart.

        In the page it has the width of the page and no legend; otherwise width 640 and a legend.
        """
        heads = [look.name for look in looks]
        signals = {"shown": heads, "ink": LIGHT_INK.text, "muted": LIGHT_INK.muted}
        size = {"width": "container" if in_page else 640, "height": self.height}
        chart = alt.layer(*self.layers).properties(**size)
        chart = chart.add_params(*(alt.param(name=name, value=v) for name, v in signals.items()))
        made: dict[str, Any] = chart.to_dict(validate=False)
        made.pop("config", None)
        marks = {
            "color": [look.light for look in looks],
            "shape": [SHAPES[look.shape] for look in looks],
            "strokeDash": [list(look.dash) for look in looks],
        }
        legend = None if in_page or not self.legend else _LEGEND
        for layer in made["layer"]:
            for channel, values in marks.items():
                if (own := layer.get("encoding", {}).get(channel, {})).get("field") == "head":
                    own |= {"scale": {"domain": heads, "range": values}, "legend": legend}
        if in_page:
            made["autosize"] = {"type": "fit-x", "contains": "padding"}
        return made


class Figure(NamedTuple):
    """A chart of the page, with one or more views; its caption is in the template."""

    key: str
    title: str
    views: Sequence[View]


def all_figures(results: Results) -> tuple[Figure, ...]:
    """All figures that have data, in the order of the page."""
    made = (
        Figure("tradeoff", "Quality against cost", tradeoff(results)),
        Figure("equal", "At equal time, and at the end", equal(results)),
        Figure("curves", "Learning curves", curves(results)),
        Figure("deciles", "Quality by frequency", deciles(results)),
        Figure("calibration", "Calibration", calibration(results)),
        Figure("support", "Support and coverage", support(results)),
        Figure("step_time", "Time per step", step_time(results)),
        Figure("classes", "Cost of the head by number of classes", against_classes(results)),
    )
    return tuple(each for each in made if each.views)


def tradeoff(results: Results) -> list[View]:
    """Quality against cost."""
    costs = results.measured([
        metrics.STEP_MS, metrics.SECONDS, metrics.MEMORY, metrics.PARAMETERS,
        metrics.HEAD_PARAMETERS,
    ])  # fmt: skip
    return [_tradeoff(results, cost) for cost in costs] if results.ranked else []


def _tradeoff(results: Results, cost: Metric) -> View:
    metric, best = results.metric, results.front(cost)
    rows = [
        {**_place(s, metric, s.estimates[metric.key]), "x": price.mean,
         "y": s.estimates[metric.key].mean, "cost": cost.format(price.mean)}
        for s in results.ranked if (price := s.estimates.get(cost.key)) is not None
    ]  # fmt: skip
    held, base = _baseline(results, "test", _in_sight(metric, rows, "y"))
    if base is not None:
        # Its label is on the side away from the nearest head.
        near = min(rows, key=lambda row: abs(row["y"] - base["value"]))["x"]
        base["left"] = sum(near > row["x"] for row in rows) * 2 > len(rows)
    x = alt.X("x:Q", title=_title(cost), **_around(cost, [row["x"] for row in rows]))
    y = alt.Y("y:Q", title=metric.label, **_around(metric, held))
    tooltip = [_tip("head"), _tip("value", metric.label), _tip("cost", cost.label)]
    points, layers = _heads(rows, tooltip, x=x, y=y), _baseline_layers(base, y=y)
    # The layout of labels fails with a mark that draws nothing.
    if len(best) > 1:
        front = [{"x": s.mean(cost.key), "y": s.mean(metric.key)} for s in best]
        layers.append(_dashed(front).encode(x=x, y=y, order=alt.Order("x:Q")))
    if any(row["low"] is not None for row in rows):
        layers.append(_whiskers(points, "y"))
    told = f"Scatter plot of {metric.label} against {cost.label} for {len(rows)} heads. Not beaten "
    told += f"in both: {', '.join(s.title for s in best)}."
    return View(cost.key, cost.label, told, [*layers, _points(points, 130, style="heads")], 380)


def equal(results: Results) -> list[View]:
    """Validation quality at equal time, and at the end, where steps are equal."""
    metric = results.metric
    rows = [
        {**_place(s, metric, found), "x": found.mean, "at": at}
        for s in results.ranked
        for at, found in (("equal time", s.at_equal_seconds), ("the end", s.at_equal_steps))
        if found is not None
    ]
    if not rows:
        return []
    held, line = _baseline(results, "valid", _in_sight(metric, rows, "x"))
    x = alt.X("x:Q", title=metric.label, **_around(metric, held))
    tooltip = [_tip("head"), _tip("at"), _tip("value", metric.label)]
    base = _heads(rows, tooltip, x=x, y=_names([s.title for s in results.ranked]))
    timed, ended = (
        base.transform_filter(f"datum.at == '{at}'") for at in ("equal time", "the end")
    )
    mark: dict[str, Any] = {"size": 110, "opacity": 1}
    layers = [
        *_baseline_layers(line, x=x),
        base.mark_line(strokeWidth=1.5, opacity=0.5).encode(detail="head:N"),
        _whiskers(base, "x", strokeWidth=4, opacity=0.22),
        timed.mark_point(filled=True, shape="circle", **mark),
        ended.mark_point(filled=False, shape="square", strokeWidth=2, **mark),
    ]
    after = metrics.seconds(results.equal_seconds or 0.0)
    told = f"{metric.label} after {after} of training and after {results.equal_steps or 0:,} steps"
    return [View("both", "both", f"For each head, {told}.", layers, alt.Step(30), legend=False)]


def curves(results: Results) -> list[View]:
    """Learning curves over steps and over seconds."""
    return [*_curve(results, "steps", "over steps"), *_curve(results, "seconds", "over time")]


def _curve(results: Results, axis: Axis, label: str) -> list[View]:
    metric = results.metric
    rows = [row for s in results.summaries for row in _mean_curve(s, metric, axis)]
    if not rows:
        return []
    title = "seconds of training" if axis == "seconds" else "steps"
    ends = [row["x"] for row in rows if row["last"]]
    ticks: dict[str, Any] = {"grid": False, "format": ".3~s" if axis == "steps" else ",.8~g"}
    if max(ends) > _UNEQUAL * min(ends) > 0:
        # If one head takes much longer, the others would not be visible on a linear axis.
        start = max(min(ends) / 50, min(row["x"] for row in rows if row["x"] > 0))
        rows = [row for row in rows if row["x"] >= start]
        scale = alt.Scale(type="log", domain=[start, max(ends)], nice=False)
        ticks["values"] = log_ticks(start, max(ends))
    else:
        scale = alt.Scale(domain=[0, max(ends)], nice=False)
        ticks["tickCount"] = 6
    x = alt.X("x:Q", title=title, scale=scale, axis=alt.Axis(**ticks))
    # After a random start, values fall by orders of magnitude within a few steps: the first tenth
    # does not count for the axis.
    settled = [row["y"] for row in rows if row["x"] >= 0.1 * max(ends)]
    held, line = _baseline(results, "valid", settled)
    y = alt.Y("y:Q", title=metric.label, **_around(metric, held))
    at = alt.Tooltip("x:Q", title=title, format=",.4~g")
    base = _heads(rows, [_tip("head"), at, _tip("value", metric.label)], x=x, y=y)
    band = base.transform_filter("isValid(datum.low)").mark_area(opacity=0.13, clip=True)
    layers = [
        *_baseline_layers(line, y=y),
        band.encode(y="low:Q", y2="high:Q"),
        _lines(base),
        _points(base.transform_filter("datum.last")),
        # A line has only one tooltip, so invisible points provide one for each value.
        base.mark_point(size=140, opacity=0, clip=True),
    ]
    names = {row["head"] for row in rows}
    told = f"Learning curves of {len(names)} heads: {metric.label} {label}."
    return [View(axis, label, told, layers, 380)]


def _mean_curve(summary: HeadSummary, metric: Metric, axis: Axis) -> list[Row]:
    """The mean over seeds, as far as all were validated; over unfinished runs if none finished."""
    runs = [run for run in summary.finished or summary.runs if curve(run, metric, axis)]
    places = sorted({x for run in runs for x, _ in curve(run, metric, axis)})
    if len(places) > _GRID:
        step = (len(places) - 1) / (_GRID - 1)
        places = [places[round(i * step)] for i in range(_GRID)]
    rows: list[Row] = []
    for where in places:
        values = [v for run in runs if (v := interpolate(run, metric, axis, where)) is not None]
        found = estimate(values, log=metric.log) if len(values) == len(runs) else None
        if found is not None:
            several = len(values) > 1
            rows.append({
                **_place(summary, metric, found), "x": where, "y": found.mean, "last": False,
                "low": min(values) if several else None, "high": max(values) if several else None,
            })  # fmt: skip
    if rows:
        rows[-1]["last"] = True
    return rows


def deciles(results: Results) -> list[View]:
    """Quality by frequency of the target."""
    smooth = results.metric is metrics.EPS_PERPLEXITY
    kinds = (
        Metric("eps_nll", "−log p, ε-smoothed", "number", lower_is_better=True) if smooth
        else Metric("nll", "−log p", "number", lower_is_better=True),
        Metric("top1", "top-1 accuracy", "percent", lower_is_better=False),
        Metric("top10", "top-10 accuracy", "percent", lower_is_better=False),
        Metric("recall", "recall", "percent", lower_is_better=False),
    )  # fmt: skip
    return [view for kind in kinds for view in _deciles(results, kind)]


def _deciles(results: Results, kind: Metric) -> list[View]:
    rows: list[Row] = []
    for summary in results.ranked:
        parts = defaultdict(list)
        for part in (part for run in summary.finished for part in run.by_decile):
            if "decile" in part and part.get("count"):
                parts[int(part["decile"])].append(part)
        for decile, of_seeds in sorted(parts.items()):
            values = [part[kind.key] for part in of_seeds if kind.key in part]
            found = estimate(values) if len(values) == len(of_seeds) else None
            if found is not None:
                rows.append({**_place(summary, kind, found), "x": decile, "y": found.mean})
    if not rows:
        return []
    # Fixed domains, so that axes do not change when a head is hidden.
    x = alt.X("x:O", title="frequency decile of the target, 1 = most frequent",
              scale=alt.Scale(domain=sorted({row["x"] for row in rows})),
              axis=alt.Axis(grid=False, labelAngle=0))  # fmt: skip
    top = max(row["y"] for row in rows) or 1.0
    y = alt.Y("y:Q", title=kind.label, scale=alt.Scale(domain=[0, 1.05 * top]),
              axis=alt.Axis(format=_format(kind), tickCount=5))  # fmt: skip
    tooltip = [_tip("head"), alt.Tooltip("x:O", title="decile"), _tip("value", kind.label)]
    told = f"{first_capital(kind.label)} by frequency decile of the target, a line per head."
    return [View(kind.key, kind.label, told, _joined_points(rows, tooltip, x, y))]


def calibration(results: Results) -> list[View]:
    """Accuracy of the best class by its probability."""
    rows = [row for summary in results.ranked for row in _calibration(summary)]
    if not rows:
        return []
    whole: dict[str, Any] = {
        "axis": alt.Axis(format="~%", tickCount=5), "scale": alt.Scale(domain=[0, 1]),
    }  # fmt: skip
    x = alt.X("x:Q", title="probability given to the best class", **whole)
    y = alt.Y("y:Q", title="how often it is right", **whole)
    tooltip = [_tip("head"), alt.Tooltip("x:Q", title="said", format=".1%"),
               alt.Tooltip("y:Q", title="right", format=".1%"),
               alt.Tooltip("count:Q", title="predictions", format=",")]  # fmt: skip
    diagonal = _dashed([{"x": 0, "y": 0}, {"x": 1, "y": 1}]).encode(x=x, y=y)
    told = "Calibration: how often the best class is right against its probability, a line per "
    told += "head; the diagonal is perfect."
    layers = [diagonal, *_joined_points(rows, tooltip, x, y)]
    return [View("calibration", "calibration", told, layers)]


def _calibration(summary: HeadSummary) -> list[Row]:
    bins = defaultdict(list)
    for part in (part for run in summary.finished for part in run.calibration):
        if {"confidence", "accuracy", "count"} <= part.keys():
            bins[int(part["confidence"] * _BINS)].append(part)
    rows: list[Row] = []
    for _, parts in sorted(bins.items()):
        total = sum(part["count"] for part in parts)
        if total >= _FEWEST:
            said, right = (
                sum(part["count"] * part[key] for part in parts) / total
                for key in ("confidence", "accuracy")
            )
            rows.append({"head": summary.title, "count": total, "x": said, "y": right})
    return rows


def support(results: Results) -> list[View]:
    """Number of classes with a probability above zero."""
    measure, n_classes = metrics.BY_KEY["support"], results.comparison.n_classes
    rows: list[Row] = []
    for summary in results.ranked:
        found, covered = summary.estimates.get("support"), summary.mean("coverage")
        if found is not None:
            rows.append({**_place(summary, measure, found), "x": found.mean,
                         "end": found.high or found.mean,
                         "text": metrics.format_value(covered, "share")})  # fmt: skip
    if not any(row["x"] < 0.999 * (n_classes or math.inf) for row in rows):
        return []
    high = max([n_classes or 1, *(row["x"] for row in rows)])
    # Space for the numbers on the right.
    x = alt.X("x:Q", title="classes with a probability above 0",
              scale=alt.Scale(type="log", domain=[1, high**1.35], nice=False),
              axis=alt.Axis(format="~s", values=log_ticks(1, high)))  # fmt: skip
    tooltip = [_tip("head"), _tip("value", "support size"), _tip("text", "coverage")]
    listed = "; ".join(f"{row['head']} {row['value']}, {row['text']}" for row in rows)
    told = f"Support size and coverage of each head: {listed}."
    return [View("support", "support", told, _dots(rows, tooltip, x), alt.Step(30), legend=False)]


def step_time(results: Results) -> list[View]:
    """Time per training step."""
    rows: list[Row] = []
    for summary in results.ranked:
        mean = summary.mean(metrics.STEP_MS.key)
        if mean is not None:
            low, high = (
                pick((run.numbers.get(key, mean) for run in summary.finished), default=mean)
                for pick, key in ((min, "step_ms_low"), (max, "step_ms_high"))
            )
            rows.append({"head": summary.title, "x": mean, "text": metrics.STEP_MS.format(mean),
                         "low": low, "high": high, "end": high, "zero": 0})  # fmt: skip
    if not rows:
        return []
    top = max(row["high"] for row in rows)
    x = alt.X("x:Q", title="milliseconds per step", axis=alt.Axis(format=",.8~g", tickCount=6),
              scale=alt.Scale(domain=[0, top * 1.3], nice=False))  # fmt: skip
    dots = _dots(rows, [_tip("head"), _tip("text", "time per step")], x)
    bars = _heads(rows, [], x="zero:Q", x2="x:Q", y=dots[1].encoding.y)
    layers = [bars.mark_rule(strokeWidth=7, opacity=0.25, strokeCap="round"), *dots]
    told = "; ".join(f"{row['head']} {row['text']}" for row in rows)
    return [
        View("step_time", "step_time", f"Time per training step: {told}.", layers, alt.Step(30),
             legend=False)
    ]  # fmt: skip


def against_classes(results: Results) -> list[View]:
    """Measured cost of the head alone against the number of classes."""
    return [
        *_measured(results, "time", metrics.STEP_MS, lambda cost: cost.ms),
        *_measured(results, "memory", metrics.MEMORY, lambda cost: cost.peak_memory_mb),
    ]


def _measured(
    results: Results, key: str, metric: Metric, value: Callable[[Cost], float | None]
) -> list[View]:
    """A line per head through all measured sizes."""
    costs, titles = results.costs, {head.slug: head.title for head in results.comparison.heads}
    if costs is None:
        return []
    rows: list[Row] = [
        {"head": titles[cost.slug], "x": cost.classes, "y": found, "text": metric.format(found),
         "rows": f"{costs.rows:,}", "samples": f"{cost.samples}"}
        for cost in costs.found
        if (found := value(cost)) is not None and found > 0 and cost.slug in titles
    ]  # fmt: skip
    if not rows:
        return []
    sizes = sorted({costs.own, *(row["x"] for row in rows)})
    x = alt.X("x:Q", title="number of classes",
              **_log_scale(sizes, grid=False, values=sizes, format=","))  # fmt: skip
    y = alt.Y("y:Q", title=_title(metric), **_log_scale([row["y"] for row in rows]))
    tooltip = [_tip("head"), alt.Tooltip("x:Q", title="classes", format=","),
               _tip("text", metric.label), _tip("rows"),
               _tip("samples", "steps timed")]  # fmt: skip
    rule = _data([{"x": costs.own}]).mark_rule(strokeDash=[2, 3], color=alt.expr("muted"))
    at_own = "; ".join(f"{r['head']} {r['text']}" for r in rows if r["x"] == costs.own)
    told = (
        f"{first_capital(metric.label)} of each head alone against the number of classes, both on "
        f"logarithmic axes. At {costs.own:,} classes: {at_own or 'nothing was measured'}."
    )
    return [View(key, key, told, [rule.encode(x=x), *_joined_points(rows, tooltip, x, y)])]


def left_out(results: Results) -> list[tuple[str, list[str]]]:
    """For each head the sizes that were not measured, grouped by reason."""
    found: list[tuple[str, list[str]]] = []
    for head in results.comparison.heads:
        reasons: dict[str, list[int]] = defaultdict(list)
        for cost in results.costs.found if results.costs else ():
            if cost.slug == head.slug and cost.reason:
                reasons[cost.reason].append(cost.classes)
        if reasons:
            told = [
                f"{joined([f'{n:,}' for n in sorted(sizes)])} classes: {reason}"
                for reason, sizes in reasons.items()
            ]
            found.append((head.title, told))
    return found


def _data(rows: Sequence[Row]) -> alt.Chart:
    return alt.Chart(alt.Data(values=list(rows)))


def _dashed(points: Sequence[Row]) -> Any:
    return _data(points).mark_line(strokeDash=[4, 4], strokeWidth=1.5, color=alt.expr("muted"))


def _whiskers(base: alt.Chart, along: str, **look: Any) -> Any:
    rule = base.mark_rule(clip=True, **{"strokeWidth": 1.5, "opacity": 0.7, **look})
    return rule.encode(**{along: "low:Q", f"{along}2": "high:Q"})


def _heads(rows: Sequence[Row], tooltip: list[Any], **axes: Any) -> alt.Chart:
    """The base of the layers of a chart: the rows of the visible heads, in colour."""
    shown = _data(rows).transform_filter("indexof(shown, datum.head) >= 0")
    return shown.encode(color="head:N", tooltip=tooltip, **axes)


def _points(base: alt.Chart, size: int = 80, **look: Any) -> Any:
    """The symbol of each head."""
    return base.mark_point(filled=True, size=size, opacity=1, **look).encode(shape="head:N")


def _lines(base: alt.Chart) -> Any:
    """A line per head."""
    return base.mark_line(strokeWidth=2, clip=True).encode(strokeDash="head:N")


def _joined_points(rows: Sequence[Row], tooltip: list[Any], x: alt.X, y: alt.Y) -> list[Any]:
    """A line with symbols per head."""
    base = _heads(rows, tooltip, x=x, y=y)
    return [_lines(base), _points(base, 65)]


def _dots(rows: Sequence[Row], tooltip: list[Any], x: alt.X) -> list[Any]:
    """A row per head, the lowest first: its whisker, its symbol, and ``text`` on the right."""
    order = [row["head"] for row in sorted(rows, key=lambda row: row["x"])]
    base = _heads(rows, tooltip, x=x, y=_names(order))
    text = base.mark_text(align="left", dx=14, fontSize=12)
    return [
        _whiskers(base, "x"),
        _points(base, 110),
        text.encode(x="end:Q", text="text:N", color=alt.value(LIGHT_INK.text)),
    ]


def _baseline(
    results: Results, part: str, values: Sequence[float]
) -> tuple[list[float], Row | None]:
    """The values that an axis must include, and the data of the frequency baseline's line.

    A baseline so far away that differences between heads would be invisible is drawn at the edge of
    the axis, and its label says so.
    """
    metric, asked = results.metric, results.comparison.baseline
    measured = asked[part] if isinstance(asked.get(part), Mapping) else asked.get("test")
    value = measured.get(metric.key) if isinstance(measured, Mapping) else None
    if not isinstance(value, int | float) or not math.isfinite(value) or not values:
        return list(values), None
    if metric.log and value <= 0:
        return list(values), None
    log = metric.log and min(values) > 0
    low, high, at = (math.log(v) if log else float(v) for v in (min(values), max(values), value))
    room = _FAR * max(high - low, 0.3 if log else 0.05)
    label = f"{results.baseline_name} baseline {metric.format(value)}"
    if not low - room <= at <= high + room:
        # Half of the margin of the axis.
        edge = low - 0.04 * (high - low) if at < low else high + 0.04 * (high - low)
        shown, held, label = math.exp(edge) if log else edge, [], f"{label} (off the axis)"
    else:
        shown, held = float(value), [float(value)]
    row: Row = {"value": shown, "x": shown, "y": shown, "label": label,
                "high": at > (low + high) / 2, "left": False}  # fmt: skip
    return [*values, *held], row


def _baseline_layers(row: Row | None, **across: Any) -> list[alt.Chart]:
    """A labelled line at the quality of the frequency baseline."""
    if row is None:
        return []
    base = _data([row]).encode(tooltip=[_tip("label", "baseline")], **across)
    rule = base.mark_rule(strokeDash=[2, 3], strokeWidth=1.5, color=alt.expr("muted"))
    side: dict[str, Any]
    # The label is along a horizontal rule, or above a vertical one.
    if "y" in across:
        place = {"x": alt.value(0 if row["left"] else "width")}
        side = {"align": "left" if row["left"] else "right", "dx": 4 if row["left"] else -4,
                "dy": 11 if row["high"] else -7}  # fmt: skip
    else:
        place = {"y": alt.value(0)}
        side = {"align": "right" if row["high"] else "left", "baseline": "bottom", "dy": -3}
    text = base.mark_text(fontSize=11, color=alt.expr("muted"), **side)
    return [rule, text.encode(text="label:N", **place)]


def _place(summary: HeadSummary, metric: Metric, found: Estimate) -> Row:
    """The common fields of rows: the head, the interval, and the value as text."""
    low, high = bounds(metric, found)
    if high is not None and math.isinf(high):
        high = 1e300
    return {"head": summary.title, "low": low, "high": high, "value": describe(metric, found)}


def _in_sight(metric: Metric, rows: Sequence[Row], key: str) -> list[float]:
    """The values that an axis must include: all means, and whiskers clipped to a range of them."""
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


def _tip(field: str, title: str = "") -> alt.Tooltip:
    """A line of a tooltip with text."""
    return alt.Tooltip(f"{field}:N", title=title or field)


def first_capital(text: str) -> str:
    """Capitalise the first letter, except for ε."""
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def _title(metric: Metric) -> str:
    """The name of the metric, with its unit."""
    unit = {"ms": "ms", "megabytes": "MB", "seconds": "s"}.get(metric.style)
    return f"{metric.label} ({unit})" if unit else metric.label


def _names(heads: Sequence[str]) -> alt.Y:
    """Names of heads to the left of rows; long ones in two lines."""
    narrow = "containerSize()[0] < 500"
    short, long = (json.dumps({head: two_lines(head, n) for head in heads}) for n in _LINES)
    axis = alt.Axis(
        labelLimit=alt.ExprRef(f"{narrow} ? 165 : 260"),
        labelExpr=f"({narrow} ? {short} : {long})[datum.label]",
        labelFontSize=alt.ExprRef(f"{narrow} ? 11 : 12"),
        labelLineHeight=13, grid=False, labelPadding=10,
    )  # fmt: skip
    return alt.Y("head:N", sort=list(heads), title=None, axis=axis)


def two_lines(name: str, most: int) -> list[str]:
    """Split a name of more than ``most`` letters into two lines at a space.

    Example:
        >>> two_lines("Adaptive softmax (cutoffs=1000,4000)", 18), two_lines("NCE", 18)
        (['Adaptive softmax', '(cutoffs=1000,4000)'], ['NCE'])
    """
    places = [i for i, letter in enumerate(name) if letter == " "]
    if len(name) <= most or not places:
        return [name]
    at = min(places, key=lambda i: max(i, len(name) - i - 1))
    return [name[:at], name[at + 1 :]]


def _around(metric: Metric, values: Sequence[float]) -> dict[str, Any]:
    """Scale and axis for the values with a margin, logarithmic if the metric is."""
    low, high = min(values), max(values)
    if metric.log and low > 0:
        return _log_scale(values, share=0.08, least=1.03, format=_format(metric))
    margin = max(0.08 * (high - low), 1e-3 * abs(high), 1e-9)
    domain = [max(0.0, low - margin) if low >= 0 else low - margin, high + margin]
    axis = alt.Axis(format=_format(metric), tickCount=5)
    return {"scale": alt.Scale(domain=domain, nice=False, zero=False), "axis": axis}


def _log_scale(
    found: Sequence[float], share: float = 0.03, least: float = 1.01, **ticks: Any
) -> dict[str, Any]:
    """A logarithmic scale around the values, and its axis."""
    margin = max((max(found) / min(found)) ** share, least)
    low, high = min(found) / margin, max(found) * margin
    # SI suffixes for thousands, but not for thousandths.
    form = "~s" if low >= 1 else ",.3~g"
    axis = alt.Axis(**{"format": form, "values": log_ticks(low, high), **ticks})
    return {"scale": alt.Scale(type="log", domain=[low, high], nice=False), "axis": axis}


def _format(metric: Metric) -> str:
    """The format of axis labels, in the unit of the metric."""
    return {"percent": "~%", "share": "~%", "count": ".3~s"}.get(metric.style, ",.8~g")


def log_ticks(low: float, high: float) -> list[float]:
    """At most six round numbers between two positive ones, for a logarithmic axis.

    Example:
        >>> log_ticks(140, 270), log_ticks(1, 2000)
        ([150, 200, 250], [1, 10, 100, 1000])
    """
    if high <= low:
        return [_tidy(low)]
    if high / low < 2.5:
        return _even_ticks(low, high)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for mantissas in _MANTISSAS:
        ticks = [_tidy(m * 10.0**d) for d in decades for m in mantissas]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= _MOST_TICKS:
            return inside
    return inside[:: math.ceil(len(inside) / _MOST_TICKS)]


def _even_ticks(low: float, high: float) -> list[float]:
    size = 10.0 ** math.floor(math.log10(high - low))
    for step in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0):
        first, last = math.ceil(low / (step * size)), math.floor(high / (step * size))
        if last - first < _MOST_TICKS:
            return [_tidy(i * step * size) for i in range(first, last + 1)]
    return []


def _tidy(value: float) -> float:
    """Round to ten digits, and convert integral values to int."""
    value = float(f"{value:.10g}")
    return int(value) if value == int(value) else value
