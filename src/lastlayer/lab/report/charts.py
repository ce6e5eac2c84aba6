"""The charts of the page, as Altair makes them.

A chart knows nothing of light or dark: colours come from Vega's configuration, and from the signals
``ink`` and ``muted``. In the page the legend of all charts is one, so that a chart has none of its
own there, and the signal ``shown`` lists the heads to draw.
"""

from collections.abc import Sequence
from typing import Any

import altair as alt

from lastlayer.lab.report import theme

Row = dict[str, Any]

alt.data_transformers.disable_max_rows()


class Charts:
    """Makes charts of the same heads with the same marks.

    Args:
        heads: their names, in the order of colours.
        in_page: as wide as the page lets it be and without a legend; else 640 wide with one.
        validate: check the charts against the schema of Vega-Lite.
    """

    def __init__(
        self, heads: Sequence[str], *, in_page: bool = True, validate: bool = False
    ) -> None:
        self.heads = list(heads)
        self.validate = validate
        self.in_page = in_page
        positions = range(len(self.heads))
        legend = None if in_page else alt.Legend(title=None, symbolOpacity=1, labelLimit=300)
        self.colour = alt.Color(
            "head:N", scale=alt.Scale(domain=self.heads, range="category"), legend=legend
        )
        self.fill = alt.Fill(
            "head:N", scale=alt.Scale(domain=self.heads, range="category"), legend=legend
        )
        self.shape = alt.Shape(
            "head:N",
            scale=alt.Scale(domain=self.heads, range=[theme.shape(i) for i in positions]),
            legend=legend,
        )
        self.dash = alt.StrokeDash(
            "head:N",
            scale=alt.Scale(domain=self.heads, range=[list(theme.dash(i)) for i in positions]),
            legend=legend,
        )

    def scatter(
        self, rows: Sequence[Row], x: alt.X, y: alt.Y, front: Sequence[Row], tooltip: list[Any]
    ) -> dict[str, Any]:
        """Points with whiskers along y, and the line of those that none beats."""
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
        layers = [line] if len(front) > 1 else []
        if any(row["low"] is not None for row in rows):
            layers.append(whiskers)
        return self._finish(alt.layer(*layers, points), height=380)

    def curves(self, rows: Sequence[Row], x: alt.X, y: alt.Y, tooltip: list[Any]) -> dict[str, Any]:
        """A line a head, a band from ``low`` to ``high``, and a symbol at its end."""
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
        return self._finish(alt.layer(band, line, ends), height=380)

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
        """A line and symbols a head."""
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
        marked: Sequence[Row],
        own: int,
        x: alt.X,
        y: alt.Y,
        tooltip: list[Any],
    ) -> dict[str, Any]:
        """A line a head, its symbol at what is marked, and a rule at the data's own number."""
        line = (
            self._base(rows)
            .mark_line(strokeWidth=2)
            .encode(x=x, y=y, color=self.colour, strokeDash=self.dash, tooltip=tooltip)
        )
        points = (
            self._base(marked)
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
        """A row a head: its symbol, its whisker, and ``text`` at its right."""
        y = alt.Y("head:N", sort=list(order), title=None, axis=_names())
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
        self, rows: Sequence[Row], x: alt.X, tooltip: list[Any], *, order: Sequence[str]
    ) -> dict[str, Any]:
        """A row a head with two symbols: filled at equal time, open at equal steps."""
        y = alt.Y("head:N", sort=list(order), title=None, axis=_names())
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
            base.transform_filter("datum.at == 'equal steps'")
            .mark_point(filled=False, size=110, opacity=1, shape="square", strokeWidth=2)
            .encode(x=x, color=self.colour)
        )
        return self._finish(
            alt.layer(joined, whiskers, filled, hollow), height=alt.Step(30), legend=False
        )

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
            alt.param(name="ink", value=theme.LIGHT_INK.text),
            alt.param(name="muted", value=theme.LIGHT_INK.muted),
        )
        # Checked by the tests against the schema; here that would take longer than all else.
        made: dict[str, Any] = chart.to_dict(validate=self.validate)
        made.pop("config", None)
        if not legend:
            made["config"] = {"legend": {"disable": True}}
        if self.in_page:
            made["autosize"] = {"type": "fit-x", "contains": "padding"}
        return made


def _names() -> alt.Axis:
    """Names of heads at the left of rows, shorter on a phone."""
    room = alt.ExprRef("containerSize()[0] < 500 ? 112 : 260")
    return alt.Axis(labelLimit=room, grid=False, labelFontSize=12, labelPadding=10)
