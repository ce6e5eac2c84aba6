"""Colours, shapes and dashes of heads, and the look of a chart.

Charts are drawn once, in the colours for light. The page's style sheet exchanges each colour for
its counterpart when it is dark, so that no chart has to be drawn again, on paper neither.

A head is told apart by colour, shape and dash together: there are nine colours, eight shapes and
four dashes, so that no two of the first 36 heads share both colour and dash.
"""

from dataclasses import dataclass, fields
from typing import Any

# Okabe and Ito's colours, which colour-blind readers can tell apart, the ink, and two of Tol's.
LIGHT_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333", "#882255",
    "#8F8F1F",
)  # fmt: skip
DARK_COLOURS = (
    "#4BA3DB", "#F0803C", "#2DC79B", "#E29BC4", "#F2B632", "#8FD3FA", "#E6E6E6", "#D0527F",
    "#C9C955",
)  # fmt: skip
SHAPES = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "cross",
    "triangle-down",
    "triangle-right",
    "triangle-left",
)
DASHES: tuple[tuple[int, ...], ...] = ((1, 0), (7, 3), (2, 2), (9, 3, 2, 3))

# In the order of SHAPES, about the origin, for the legend of the page.
SHAPE_PATHS = (
    "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0",
    "M-4.5,-4.5h9v9h-9z",
    "M0,-5L5.2,4.2h-10.4z",
    "M0,-6L4.5,0L0,6L-4.5,0z",
    "M-5.5,-2h3.5v-3.5h4v3.5h3.5v4h-3.5v3.5h-4v-3.5h-3.5z",
    "M0,5L5.2,-4.2h-10.4z",
    "M5,0L-4.2,5.2v-10.4z",
    "M-5,0L4.2,5.2v-10.4z",
)


@dataclass(frozen=True)
class Ink:
    """The colours that are not a head's."""

    text: str
    muted: str
    line: str
    paper: str


LIGHT_INK = Ink(text="#1c2024", muted="#60646c", line="#e4e6ea", paper="#ffffff")
DARK_INK = Ink(text="#edeef0", muted="#a0a6b0", line="#30353d", paper="#16181c")

FONT = "-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"


def colour_index(position: int) -> int:
    """Which colour the head at this position has."""
    return position % len(LIGHT_COLOURS)


def shape(position: int) -> str:
    """The symbol of the head at this position."""
    return SHAPES[position % len(SHAPES)]


def dash(position: int) -> tuple[int, ...]:
    """The dashes of the head at this position."""
    return DASHES[position % len(DASHES)]


def exchanges() -> list[tuple[str, str]]:
    """Each colour of a light chart, and its counterpart in the dark."""
    inks = [(getattr(LIGHT_INK, f.name), getattr(DARK_INK, f.name)) for f in fields(Ink)]
    return [*zip(LIGHT_COLOURS, DARK_COLOURS, strict=True), *inks]


def chart_config(*, font: str = FONT) -> dict[str, Any]:
    """What Vega takes as its configuration: charts are drawn for light, and themed by the page."""
    ink = LIGHT_INK
    return {
        "background": None,
        "font": font,
        "range": {"category": list(LIGHT_COLOURS)},
        "axis": {
            "labelColor": ink.muted,
            "titleColor": ink.text,
            "gridColor": ink.line,
            "domainColor": ink.line,
            "tickColor": ink.line,
            "labelFont": font,
            "titleFont": font,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": 500,
            "titlePadding": 10,
            "labelPadding": 6,
            "tickSize": 0,
            "domain": False,
        },
        "legend": {
            "labelColor": ink.text,
            "titleColor": ink.muted,
            "labelFont": font,
            "titleFont": font,
            "labelFontSize": 12,
            "titleFontSize": 11,
            "symbolStrokeWidth": 1.5,
            "symbolSize": 90,
        },
        "title": {
            "color": ink.text,
            "subtitleColor": ink.muted,
            "font": font,
            "subtitleFont": font,
            "fontSize": 15,
            "subtitleFontSize": 12,
            "anchor": "start",
            "offset": 14,
            "fontWeight": 600,
        },
        "text": {"font": font},
        "style": {"cell": {"stroke": None}},
    }
