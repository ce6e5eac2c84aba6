"""Axes that begin and end near the values, with few and round ticks."""

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from lastlayer.lab.metrics import Metric

_MOST_TICKS = 6
# Of a decade, from dense to sparse.
_MANTISSAS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 3), (1,))


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
