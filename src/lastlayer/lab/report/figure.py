"""What figures are made of, and what their rows have in common."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from lastlayer.lab.metrics import Metric
from lastlayer.lab.report.charts import Charts, Row
from lastlayer.lab.results import HeadSummary
from lastlayer.lab.statistics import Estimate
from lastlayer.lab.verdict import bounds, describe


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
