"""Times and memory of all methods of each case as bars, in a PNG."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lastlayer.bench.baseline_record import LossRecord
from lastlayer.bench.plot import OTHER_COLOURS, OURS_COLOURS, new_figure, save, without_frame
from lastlayer.bench.table import gigabytes, milliseconds, rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Inches of a bar, and of what a panel has above and below its bars.
_BAR, _MARGIN = 0.21, 0.62
# Bars start here on a logarithmic axis, which has no zero.
_LEAST_GB = 0.003
# Bars of methods that take more times as long as the fastest are cut off.
_LONGEST = 5.0
# How much longer than its longest bar an axis is, for the text behind it.
_ROOM, _LOG_ROOM = 1.4, 6.0


def times_and_memory(
    records: Sequence[LossRecord], path: Path, *, of: str, time: str, log_memory: bool
) -> None:
    """Draw one row of two panels a case: milliseconds, and memory beyond inputs and gradients.

    Args:
        records: those that were not timed are left out.
        path: where the PNG goes.
        of: what was timed, for an error.
        time: the name of the axis of times.
        log_memory: whether memories differ by powers of ten.

    Raises:
        MissingPlotLibrary: matplotlib is not installed.
        ValueError: no record has a time to draw.
    """
    cases: dict[tuple[str, str, str], list[LossRecord]] = {}
    for record in records:
        if record.median_ms is not None:
            cases.setdefault((record.device, record.section, record.case), []).append(record)
    if not cases:
        raise ValueError(f"records: expected timings of {of}, got none")
    heights = [_MARGIN + _BAR * len(found) for found in cases.values()]
    figure = new_figure(9.5, sum(heights))
    panels = figure.subplots(len(cases), 2, squeeze=False, height_ratios=heights)
    for (left, right), ((device, section, case), found) in zip(panels, cases.items(), strict=True):
        found.sort(key=rank)
        left.set_title(f"{section}: {case} · {device}", loc="left", fontsize=8.5)
        left.set_yticks(range(len(found)), [record.label for record in found], fontsize=7.5)
        right.set_yticks([])
        _draw_times(left, found)
        _draw_memory(right, found, log=log_memory)
    panels[-1, 0].set_xlabel(time, fontsize=8)
    kind = " (log)" if log_memory else ""
    panels[-1, 1].set_xlabel(f"peak memory beyond inputs and gradients, GB{kind}", fontsize=8)
    save(figure, path)


def _draw_times(panel: "Axes", records: list[LossRecord]) -> None:
    times = [record.median_ms or 0.0 for record in records]
    longest = min(max(times), _LONGEST * min(times))
    _bars(
        panel, records, lambda r: r.median_ms, lambda r: f"{milliseconds(r.median_ms)} ms", longest
    )
    panel.set_xlim(0, _ROOM * longest)


def _draw_memory(panel: "Axes", records: list[LossRecord], *, log: bool) -> None:
    least = _LEAST_GB if log else 0.0

    def length(record: LossRecord) -> float | None:
        return None if record.peak_bytes is None else max(least, record.peak_bytes / 1e9)

    _bars(panel, records, length, lambda r: f"{gigabytes(r.peak_bytes)} GB")
    largest = max((r.peak_bytes or 0) / 1e9 for r in records)
    if log:
        panel.set_xscale("log")
        panel.set_xlim(_LEAST_GB / 2, _LOG_ROOM * max(largest, 10 * _LEAST_GB))
    else:
        panel.set_xlim(0, _ROOM * largest or 1)


def _bars(
    panel: "Axes",
    records: list[LossRecord],
    value: Callable[[LossRecord], float | None],
    text: Callable[[LossRecord], str],
    longest: float = math.inf,
) -> None:
    for place, record in enumerate(records):
        length = value(record)
        if length is None:
            continue
        remark = ", cut off" if length > longest else "" if record.verified else ", inexact"
        length = min(length, longest)
        panel.barh(place, length, height=0.72, color=_colour(record))
        panel.annotate(
            f"{text(record)}{remark}",
            (length, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    panel.set_ylim(len(records) - 0.4, -0.6)
    panel.tick_params(axis="x", labelsize=7)
    panel.tick_params(axis="y", length=0)
    without_frame(panel)


def _colour(record: LossRecord) -> str:
    if not record.is_ours:
        return OTHER_COLOURS[-1]
    # A variant is named after what it varies: "cross_entropy, low memory".
    return OURS_COLOURS[2 if ", " in record.method else 0]
