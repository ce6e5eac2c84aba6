"""The charts of the page, as Altair makes them, and their axes.

A chart knows nothing of light or dark: colours come from Vega's configuration, and from the signals
``ink`` and ``muted``. In the page the legend of all charts is one, so that a chart has none of its
own there, and the signal ``shown`` lists the heads to draw.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from lastlayer.lab.metrics import Metric
from lastlayer.lab.report.look import LIGHT_INK, SHAPES, Look

Row = dict[str, Any]
_MOST_TICKS = 6
# Letters of a name that fit beside a chart on a phone.
_LINE = 18
# Of a decade, from dense to sparse.
_MANTISSAS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 3), (1,))

alt.data_transformers.disable_max_rows()


class Charts:
    """Makes charts of the same heads with the same marks.

    Args:
        looks: of the heads.
        in_page: as wide as the page lets it be and without a legend; else 640 wide with one.
        validate: check the charts against the schema of Vega-Lite.
    """

    def __init__(
        self, looks: Sequence[Look], *, in_page: bool = True, validate: bool = False
    ) -> None:
        self.heads = [look.name for look in looks]
        self.validate = validate
        self.in_page = in_page
        legend = None if in_page else alt.Legend(title=None, symbolOpacity=1, labelLimit=300)

        def scale(values: list[Any]) -> dict[str, Any]:
            return {"scale": alt.Scale(domain=self.heads, range=values), "legend": legend}

        self.colour = alt.Color("head:N", **scale([look.light for look in looks]))
        self.fill = alt.Fill("head:N", **scale([look.light for look in looks]))
        self.shape = alt.Shape("head:N", **scale([SHAPES[look.shape] for look in looks]))
        self.dash = alt.StrokeDash("head:N", **scale([list(look.dash) for look in looks]))

    def scatter(
        self,
        rows: Sequence[Row],
        x: alt.X,
        y: alt.Y,
        front: Sequence[Row],
        tooltip: list[Any],
        baseline: Row | None = None,
    ) -> dict[str, Any]:
        """Points with whiskers along y, the line of those that none beats, and the baseline."""
        base = self._base(rows).encode(x=x, tooltip=tooltip)
        whiskers = base.mark_rule(strokeWidth=1.5, opacity=0.7, clip=True).encode(
            y=alt.Y("low:Q"), y2="high:Q", color=self.colour
        )
        points = base.mark_point(filled=True, size=130, opacity=1, style="heads").encode(
            y=y, color=self.colour, shape=self.shape
        )
        line = (
            alt.Chart(alt.Data(values=list(front)))
            .mark_line(strokeDash=[4, 4], strokeWidth=1.5, color=alt.expr("muted"))
            .encode(x=x, y=y, order=alt.Order("x:Q"))
        )
        # A mark without anything to draw is more than the layout of labels can bear.
        layers = [*self._baseline(baseline, y=y), *([line] if len(front) > 1 else [])]
        if any(row["low"] is not None for row in rows):
            layers.append(whiskers)
        return self._finish(alt.layer(*layers, points), height=380)

    def curves(
        self,
        rows: Sequence[Row],
        x: alt.X,
        y: alt.Y,
        tooltip: list[Any],
        baseline: Row | None = None,
    ) -> dict[str, Any]:
        """A line per head, a band from ``low`` to ``high``, and a symbol at its end."""
        base = self._base(rows).encode(x=x, tooltip=tooltip)
        band = (
            base.transform_filter("isValid(datum.low)")
            .mark_area(opacity=0.13, clip=True)
            .encode(y=alt.Y("low:Q"), y2="high:Q", fill=self.fill)
        )
        line = base.mark_line(strokeWidth=2.2, clip=True).encode(
            y=y, color=self.colour, strokeDash=self.dash
        )
        ends = (
            base.transform_filter("datum.last")
            .mark_point(filled=True, size=80, opacity=1)
            .encode(y=y, color=self.colour, shape=self.shape)
        )
        # A line has one tooltip for all of it: points that are not seen have their own.
        unseen = base.mark_point(size=140, opacity=0, clip=True).encode(y=y, color=self.colour)
        layers = [*self._baseline(baseline, y=y), band, line, ends, unseen]
        return self._finish(alt.layer(*layers), height=380)

    def lines(
        self,
        rows: Sequence[Row],
        x: alt.X,
        y: alt.Y,
        tooltip: list[Any],
        *,
        diagonal: bool = False,
        height: int = 340,
    ) -> dict[str, Any]:
        """A line with symbols per head."""
        base = self._base(rows).encode(x=x, y=y, color=self.colour, tooltip=tooltip)
        layers: list[Any] = []
        if diagonal:
            ends = alt.Data(values=[{"x": 0, "y": 0}, {"x": 1, "y": 1}])
            layers.append(
                alt.Chart(ends)
                .mark_line(strokeWidth=1.2, strokeDash=[4, 4], color=alt.expr("muted"))
                .encode(x=x, y=y)
            )
        layers.append(base.mark_line(strokeWidth=2).encode(strokeDash=self.dash))
        layers.append(base.mark_point(filled=True, size=55, opacity=1).encode(shape=self.shape))
        return self._finish(alt.layer(*layers), height=height)

    def against_classes(
        self,
        rows: Sequence[Row],
        own: int,
        x: alt.X,
        y: alt.Y,
        tooltip: list[Any],
    ) -> dict[str, Any]:
        """A line with symbols per head, and a rule at the data's own number of classes."""
        line = (
            self._base(rows)
            .mark_line(strokeWidth=2)
            .encode(x=x, y=y, color=self.colour, strokeDash=self.dash, tooltip=tooltip)
        )
        points = (
            self._base(rows)
            .mark_point(filled=True, size=80, opacity=1)
            .encode(x=x, y=y, color=self.colour, shape=self.shape, tooltip=tooltip)
        )
        rule = (
            alt.Chart(alt.Data(values=[{"x": own}]))
            .mark_rule(strokeDash=[2, 3], color=alt.expr("muted"))
            .encode(x=x)
        )
        return self._finish(alt.layer(rule, line, points), height=340)

    def dots(
        self,
        rows: Sequence[Row],
        x: alt.X,
        tooltip: list[Any],
        *,
        order: Sequence[str],
        from_zero: bool = False,
    ) -> dict[str, Any]:
        """A row per head: its symbol, its whisker, and ``text`` at its right."""
        y = alt.Y("head:N", sort=list(order), title=None, axis=_names(order))
        base = self._base(rows).encode(y=y, tooltip=tooltip)
        whiskers = base.mark_rule(strokeWidth=2, opacity=0.7, clip=True).encode(
            x=alt.X("low:Q"), x2="high:Q", color=self.colour
        )
        points = base.mark_point(filled=True, size=110, opacity=1).encode(
            x=x, color=self.colour, shape=self.shape
        )
        numbers = base.mark_text(align="left", dx=14, fontSize=12, color=alt.expr("ink")).encode(
            x=alt.X("end:Q"), text="text:N"
        )
        layers = [whiskers, points, numbers]
        if from_zero:
            layers.insert(
                0,
                base.mark_rule(strokeWidth=7, opacity=0.25, strokeCap="round").encode(
                    x=alt.X("zero:Q"), x2="x:Q", color=self.colour
                ),
            )
        return self._finish(alt.layer(*layers), height=alt.Step(30), legend=False)

    def dumbbells(
        self,
        rows: Sequence[Row],
        x: alt.X,
        tooltip: list[Any],
        *,
        order: Sequence[str],
        baseline: Row | None = None,
    ) -> dict[str, Any]:
        """A row per head with two symbols: filled at equal time, open at the end."""
        y = alt.Y("head:N", sort=list(order), title=None, axis=_names(order))
        base = self._base(rows).encode(y=y, tooltip=tooltip)
        joined = base.mark_line(strokeWidth=1.5, opacity=0.5).encode(
            x=x, color=self.colour, detail="head:N"
        )
        whiskers = base.mark_rule(strokeWidth=4, opacity=0.22, clip=True).encode(
            x=alt.X("low:Q"), x2="high:Q", color=self.colour
        )
        filled = (
            base.transform_filter("datum.at == 'equal time'")
            .mark_point(filled=True, size=110, opacity=1, shape="circle")
            .encode(x=x, color=self.colour)
        )
        hollow = (
            base.transform_filter("datum.at == 'the end'")
            .mark_point(filled=False, size=110, opacity=1, shape="square", strokeWidth=2)
            .encode(x=x, color=self.colour)
        )
        layers = [*self._baseline(baseline, x=x), joined, whiskers, filled, hollow]
        return self._finish(alt.layer(*layers), height=alt.Step(30), legend=False)

    def _baseline(self, row: Row | None, **across: Any) -> list[alt.Chart]:
        """A labelled line at what the frequencies of classes alone reach."""
        if row is None:
            return []
        base = alt.Chart(alt.Data(values=[row])).encode(
            tooltip=[alt.Tooltip("label:N", title="baseline")], **across
        )
        rule = base.mark_rule(strokeDash=[2, 3], strokeWidth=1.5, color=alt.expr("muted"))
        # Along a rule from side to side, or above one from top to bottom.
        if "y" in across:
            dy = 11 if row["high"] else -7
            left = row.get("side") == "left"
            side: dict[str, Any] = {"align": "left", "dx": 4, "dy": dy}
            if not left:
                side |= {"align": "right", "dx": -4}
            place = {"x": alt.value(0 if left else "width")}
        else:
            side = {"align": "right" if row["high"] else "left", "baseline": "bottom", "dy": -3}
            place = {"y": alt.value(0)}
        text = base.mark_text(fontSize=11, color=alt.expr("muted"), **side)
        return [rule, text.encode(text="label:N", **place)]

    def _base(self, rows: Sequence[Row]) -> alt.Chart:
        return alt.Chart(alt.Data(values=list(rows))).transform_filter(
            "indexof(shown, datum.head) >= 0"
        )

    def _finish(
        self, layered: alt.LayerChart | alt.FacetChart, *, height: Any, legend: bool = True
    ) -> dict[str, Any]:
        chart = layered.properties(
            width="container" if self.in_page else 640, height=height
        ).add_params(
            alt.param(name="shown", value=self.heads),
            alt.param(name="ink", value=LIGHT_INK.text),
            alt.param(name="muted", value=LIGHT_INK.muted),
        )
        # Checked by the tests against the schema; here that would take longer than all else.
        made: dict[str, Any] = chart.to_dict(validate=self.validate)
        made.pop("config", None)
        if not legend:
            made["config"] = {"legend": {"disable": True}}
        if self.in_page:
            made["autosize"] = {"type": "fit-x", "contains": "padding"}
        return made


def _names(heads: Sequence[str]) -> alt.Axis:
    """Names of heads at the left of rows, in two lines on a phone."""
    narrow = "containerSize()[0] < 500"
    lines = json.dumps({head: two_lines(head) for head in heads})
    return alt.Axis(
        labelLimit=alt.ExprRef(f"{narrow} ? 150 : 260"),
        labelExpr=f"{narrow} ? {lines}[datum.label] : datum.label",
        labelFontSize=alt.ExprRef(f"{narrow} ? 11 : 12"),
        labelLineHeight=13,
        grid=False,
        labelPadding=10,
    )


def two_lines(name: str) -> list[str]:
    """A name in two lines where it is long, at a space.

    Example:
        >>> two_lines("Adaptive softmax (cutoffs=1000,4000)"), two_lines("NCE")
        (['Adaptive softmax', '(cutoffs=1000,4000)'], ['NCE'])
    """
    places = [i for i, letter in enumerate(name) if letter == " "]
    if len(name) <= _LINE or not places:
        return [name]
    at = min(places, key=lambda i: max(i, len(name) - i - 1))
    return [name[:at], name[at + 1 :]]


def around(metric: Metric, values: Sequence[float]) -> dict[str, Any]:
    """Scale and axis for the values with a margin, logarithmic where the metric is."""
    low, high = min(values), max(values)
    if metric.log and low > 0:
        margin = max((high / low) ** 0.08, 1.03)
        low, high = low / margin, high * margin
        return {
            "scale": alt.Scale(type="log", domain=[low, high], nice=False),
            "axis": axis(metric, values=log_ticks(low, high)),
        }
    margin = max(0.08 * (high - low), 1e-3 * abs(high), 1e-9)
    domain = [max(0.0, low - margin) if low >= 0 else low - margin, high + margin]
    return {"scale": alt.Scale(domain=domain, nice=False, zero=False), "axis": axis(metric)}


def axis(metric: Metric, **options: Any) -> alt.Axis:
    """With labels in the unit of the metric."""
    if metric.style in {"percent", "share"}:
        return percent()
    form = ".3~s" if metric.style == "count" else ",.8~g"
    # Vega drops every second of the values if it is told a count as well.
    return alt.Axis(format=form, **(options or {"tickCount": 5}))


def percent() -> alt.Axis:
    """Labels in percent."""
    return alt.Axis(format="~%", tickCount=5)


def title(metric: Metric) -> str:
    """The name of the metric, with its unit."""
    unit = {"ms": "ms", "megabytes": "MB", "seconds": "s"}.get(metric.style)
    return f"{metric.label} ({unit})" if unit else metric.label


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two positive ones, at most six.

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
    every = math.ceil(len(inside) / _MOST_TICKS)
    return inside[::every]


def _even_ticks(low: float, high: float) -> list[float]:
    size = 10.0 ** math.floor(math.log10(high - low))
    for step in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0):
        first, last = math.ceil(low / (step * size)), math.floor(high / (step * size))
        if last - first < _MOST_TICKS:
            return [_tidy(i * step * size) for i in range(first, last + 1)]
    return []


def _tidy(value: float) -> float:
    """Without the last digits of a float, and whole where it is whole."""
    value = float(f"{value:.10g}")
    return int(value) if value == int(value) else value
