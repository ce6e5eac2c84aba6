"""Quality against cost, at equal time and steps, and on the way."""

from collections.abc import Sequence

import altair as alt

from lastlayer.lab import metrics
from lastlayer.lab.metrics import Metric
from lastlayer.lab.report import axes
from lastlayer.lab.report.charts import Row
from lastlayer.lab.report.figure import Figure, View, first_capital, in_sight, place, tip
from lastlayer.lab.results import Axis, HeadSummary, Results, interpolate, quality_of
from lastlayer.lab.statistics import estimate

# Points of a mean learning curve.
_GRID = 60
# How many times longer than the shortest a curve is when time is drawn on a logarithmic axis.
_UNEQUAL = 5.0


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
        f"{_better(results.metric)} is better, further left is cheaper. Whiskers are 95% intervals "
        "over seeds. The dashed line joins the heads that none other beats in both.",
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
    y = alt.Y("y:Q", title=metric.label, **axes.around(metric, in_sight(metric, rows, "y")))
    tooltip = [tip("head", "head"), tip("value", metric.label), tip("cost", cost.label)]
    best = results.front(cost)
    names = ", ".join(s.title for s in best)
    return View(
        cost.key,
        cost.label,
        f"Scatter plot of {metric.label} against {cost.label} for {len(rows)} heads. "
        f"Not beaten in both: {names}.",
        lambda charts: charts.scatter(rows, x, y, front, tooltip),
    )


def equal(results: Results) -> Figure:
    """Validation quality at equal time and at equal steps."""
    metric = results.metric
    rows = [
        {**place(summary, metric, found), "x": found.mean, "at": at}
        for summary in results.ranked
        for at, found in (
            ("equal time", summary.at_equal_seconds),
            ("equal steps", summary.at_equal_steps),
        )
        if found is not None
    ]
    where = []
    if results.equal_seconds is not None and results.equal_steps is not None:
        where = [metrics.seconds(results.equal_seconds), f"{results.equal_steps:,} steps"]
    figure = Figure(
        "equal",
        "Equal time, equal steps",
        f"{first_capital(metric.label)} on validation data. Filled circles: at equal time "
        f"({where[0] if where else ''} of training, the most that all heads reached). Open "
        f"squares: at equal steps ({where[1] if where else ''}). Read off the learning curves, "
        "between two validations by interpolation.",
        (),
    )
    if not rows or not where:
        return figure
    x = alt.X("x:Q", title=metric.label, **axes.around(metric, in_sight(metric, rows, "x")))
    order = [s.title for s in results.ranked]
    tooltip = [tip("head", "head"), tip("at", "at"), tip("value", metric.label)]
    view = View(
        "both",
        "both",
        f"For each head, {metric.label} at {where[0]} and at {where[1]} of training.",
        lambda charts: charts.dumbbells(rows, x, tooltip, order=order),
    )
    return Figure(figure.key, figure.title, figure.caption, (view,))


def curves(results: Results) -> Figure:
    """Learning curves over seconds and over steps."""
    views = [_curve(results, "seconds", "over seconds"), _curve(results, "steps", "over steps")]
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
    y = alt.Y("y:Q", title=metric.label, **axes.around(metric, _settled(rows)))
    tooltip = [tip("head", "head"), alt.Tooltip("x:Q", title=title, format=",.4~g"),
               tip("value", metric.label)]  # fmt: skip
    return View(
        axis,
        label,
        f"Learning curves of {len({r['head'] for r in rows})} heads: {metric.label} {label}.",
        lambda charts: charts.curves(rows, x, y, tooltip),
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
    """The values after the first twentieth of the longest curve."""
    end = max(row["x"] for row in rows)
    later = [row["y"] for row in rows if row["x"] >= 0.05 * end]
    return later or [row["y"] for row in rows]


def _better(metric: Metric) -> str:
    return "lower" if metric.lower_is_better else "higher"
