"""Colours and symbols of heads, the style of charts, and charts as Vega, PNG and SVG.

Charts are drawn once, in light colours. In dark mode the style sheet of the page replaces each
colour, so that no chart has to be drawn again.
"""

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
import vl_convert

from lastlayer.lab import families
from lastlayer.lab.records import HeadEntry

# Text colour, Okabe and Ito's colours, which colour-blind readers can distinguish, two of Tol's,
# and more for families that are rarely compared. Families refer to them by index.
LIGHT_COLOURS = (
    "#333333", "#0072B2", "#D55E00", "#009E73", "#CC79A7",
    "#E69F00", "#56B4E9", "#882255", "#8F8F1F", "#4B3FA0",
    "#9B3FA8", "#1F6B33", "#3AA8A0", "#8A8F98", "#8C5A3C",
)  # fmt: skip
DARK_COLOURS = (
    "#E6E6E6", "#4BA3DB", "#F0803C", "#2DC79B", "#E29BC4",
    "#F2B632", "#8FD3FA", "#D0527F", "#C9C955", "#9C92E8",
    "#D48BE0", "#79B986", "#7FD6CF", "#9AA0AA", "#C99A78",
)  # fmt: skip
# From this colour on, lines are dashed.
_DASHED = 9
DASHES: tuple[tuple[int, ...], ...] = ((1, 0), (7, 3), (2, 2), (9, 3, 2, 3))
# Vega's symbols, and their paths for the legend of the page.
SHAPE_PATHS = {
    "circle": "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0",
    "square": "M-4.5,-4.5h9v9h-9z",
    "triangle-up": "M0,-5L5.2,4.2h-10.4z",
    "diamond": "M0,-6L4.5,0L0,6L-4.5,0z",
    "cross": "M-5.5,-2h3.5v-3.5h4v3.5h3.5v4h-3.5v3.5h-4v-3.5h-3.5z",
    "triangle-down": "M0,5L5.2,-4.2h-10.4z",
    "triangle-right": "M5,0L-4.2,5.2v-10.4z",
    "triangle-left": "M-5,0L4.2,5.2v-10.4z",
}
SHAPES = tuple(SHAPE_PATHS)


class Ink(NamedTuple):
    """Colours of text, lines and background."""

    text: str
    muted: str
    line: str
    paper: str


LIGHT_INK = Ink(text="#1c2024", muted="#60646c", line="#e4e6ea", paper="#ffffff")
DARK_INK = Ink(text="#edeef0", muted="#a0a6b0", line="#30353d", paper="#16181c")

FONT = "-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
_PICTURE_FONT = "Liberation Sans, Arial, sans-serif"


class Look(NamedTuple):
    """How a head is drawn on every chart; colour and shape are indices of palette and SHAPES."""

    name: str
    colour: int
    shape: int
    dash: tuple[int, ...]

    @property
    def light(self) -> str:
        """The colour in light mode."""
        return LIGHT_COLOURS[self.colour]


def looks(heads: Sequence[HeadEntry]) -> list[Look]:
    """The looks of heads: colours are fixed per family; its variants differ in dash and symbol.

    Families that are rarely compared always have dashes, since there are more families than colours
    that every reader can distinguish.
    """
    seen: Counter[int] = Counter()
    made = []
    for head in heads:
        colour = families.colour(head.family)
        variant = seen[colour]
        seen[colour] += 1
        dash = DASHES[(variant + (colour >= _DASHED)) % len(DASHES)]
        made.append(Look(head.title, colour, (colour + variant) % len(SHAPES), dash))
    return made


def exchanges() -> list[tuple[str, str]]:
    """Each colour of a light chart, and its counterpart in dark mode."""
    light, dark = (*LIGHT_COLOURS, *LIGHT_INK), (*DARK_COLOURS, *DARK_INK)
    return list(zip(light, dark, strict=True))


def chart_config(*, font: str = FONT) -> dict[str, Any]:
    """The Vega configuration of charts in light mode."""
    ink = LIGHT_INK
    fonts = {"labelFont": font, "titleFont": font, "labelFontSize": 12}
    return {
        "background": None,
        "font": font,
        "axis": {
            **fonts, "labelColor": ink.muted, "titleColor": ink.text, "gridColor": ink.line,
            "domainColor": ink.line, "tickColor": ink.line, "titleFontSize": 12,
            "titleFontWeight": 500, "titlePadding": 10, "labelPadding": 6, "tickSize": 0,
            "domain": False,
        },
        "legend": {
            **fonts, "labelColor": ink.text, "titleColor": ink.muted, "titleFontSize": 11,
            "symbolStrokeWidth": 1.5, "symbolSize": 90,
        },
        "title": {
            "font": font, "subtitleFont": font, "color": ink.text, "subtitleColor": ink.muted,
            "fontSize": 15, "subtitleFontSize": 12, "anchor": "start", "offset": 14,
            "fontWeight": 600,
        },
        "text": {"font": font},
        "style": {"cell": {"stroke": None}},
    }  # fmt: skip


@cache
def _vega_lite() -> str:
    """The Vega-Lite version that Altair writes, or the newest that vl-convert supports."""
    written = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    known: list[str] = vl_convert.get_vegalite_versions()
    return written if written in known else known[-1]


@cache
def bundle() -> str:
    """Vega and vega-embed as one script, to embed in the page."""
    code: str = vl_convert.javascript_bundle(
        "window.vegaEmbed = vegaEmbed;", vl_version=_vega_lite()
    )
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def compiled(chart: dict[str, Any]) -> dict[str, Any]:
    """Compile a chart to Vega, without the configuration, which the page has once for all."""
    made: dict[str, Any] = vl_convert.vegalite_to_vega(
        {**chart, "config": chart_config()}, vl_version=_vega_lite()
    )
    made.pop("config", None)
    made.pop("background", None)
    named = [
        mark for mark in made.get("marks", ())
        if mark.get("type") == "symbol" and "heads" in json.dumps(mark.get("style", ""))
    ]  # fmt: skip
    if named:
        made["marks"].append(_labels(named[0]["name"], [each["name"] for each in made["marks"]]))
    return made


def _labels(points: str, others: list[str]) -> dict[str, Any]:
    """A mark that labels the points of a scatter plot with names, without overlap.

    Vega-Lite does not support this layout; Vega does, but only with a canvas, as in a browser.
    """
    return {
        "type": "text",
        "from": {"data": points},
        "interactive": False,
        "encode": {
            "enter": {"fontSize": {"value": 12}, "font": {"value": FONT},
                      "text": {"field": "datum.head"}},
            "update": {"fill": {"signal": "ink"}},
        },
        "transform": [{
            "type": "label",
            "size": {"signal": "[max(width, 1), max(height, 1)]"},
            "anchor": ["right", "left", "top-right", "bottom-right", "top", "bottom"],
            "offset": [4],
            "padding": 24,
            "avoidMarks": others,
        }],
    }  # fmt: skip


def write_picture(chart: dict[str, Any], stem: Path, *, title: str, subtitle: str) -> None:
    """Write a chart as ``stem``.png and ``stem``.svg, on white."""
    look = {**chart_config(font=_PICTURE_FONT), "background": LIGHT_INK.paper}
    words = {"text": title, "subtitle": subtitle, "frame": "group"}
    drawn: str = vl_convert.vegalite_to_svg(
        {**chart, "config": look, "title": words, "padding": 16}, vl_version=_vega_lite()
    )
    stem.with_suffix(".svg").write_text(drawn, encoding="utf-8")
    stem.with_suffix(".png").write_bytes(vl_convert.svg_to_png(drawn, scale=2))
