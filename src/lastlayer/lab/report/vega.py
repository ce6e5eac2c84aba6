"""Charts as Vega, which browsers draw and vl-convert turns into PNG and SVG."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from lastlayer.lab.report import theme

_MARK_OF_HEADS = "heads"
_PICTURE_FONT = "Liberation Sans, Arial, sans-serif"


@cache
def vega_lite() -> str:
    """The version that Altair writes, or the newest that vl-convert has."""
    written = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    known: list[str] = vl_convert.get_vegalite_versions()
    return written if written in known else known[-1]


def compiled(chart: dict[str, Any]) -> dict[str, Any]:
    """The chart as Vega, without its configuration, which the page has once for all charts."""
    made: dict[str, Any] = vl_convert.vegalite_to_vega(
        {**chart, "config": theme.chart_config()}, vl_version=vega_lite()
    )
    made.pop("config", None)
    made.pop("background", None)
    _add_labels(made)
    return made


@cache
def bundle() -> str:
    """Vega and vega-embed as one script, for the page to hold."""
    code: str = vl_convert.javascript_bundle(
        "window.vegaEmbed = vegaEmbed;", vl_version=vega_lite()
    )
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def write_picture(chart: dict[str, Any], stem: Path, *, title: str, subtitle: str) -> list[Path]:
    """The chart as ``stem``.png and ``stem``.svg, on white."""
    look = {**theme.chart_config(font=_PICTURE_FONT), "background": theme.LIGHT_INK.paper}
    look["legend"] = {**look["legend"], **chart.get("config", {}).get("legend", {})}
    words = {"text": title, "subtitle": subtitle, "frame": "group"}
    drawn: str = vl_convert.vegalite_to_svg(
        {**chart, "config": look, "title": words, "padding": 16}, vl_version=vega_lite()
    )
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    svg.write_text(drawn, encoding="utf-8")
    png.write_bytes(vl_convert.svg_to_png(drawn, scale=2))
    return [png, svg]


def _add_labels(vega: dict[str, Any]) -> None:
    """Names beside the points of a scatter plot where there is room, none over another.

    Vega-Lite has no such layout; Vega does, but only where there is a canvas, as in a browser.
    """
    for mark in vega.get("marks", ()):
        if mark.get("type") == "symbol" and _MARK_OF_HEADS in json.dumps(mark.get("style", "")):
            break
    else:
        return
    vega["marks"].append(
        {
            "type": "text",
            "from": {"data": mark["name"]},
            "interactive": False,
            "encode": {
                "enter": {
                    "fontSize": {"value": 12},
                    "font": {"value": theme.FONT},
                    "text": {"field": "datum.head"},
                },
                "update": {"fill": {"signal": "ink"}},
            },
            "transform": [
                {
                    "type": "label",
                    "size": {"signal": "[max(width, 1), max(height, 1)]"},
                    "anchor": ["right", "left", "top-right", "bottom-right", "top", "bottom"],
                    "offset": [4],
                    "padding": 24,
                    "avoidMarks": [each["name"] for each in vega["marks"]],
                }
            ],
        }
    )
