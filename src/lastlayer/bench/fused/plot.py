"""Times and memory of all methods as a PNG."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lastlayer.bench.fused.record import FusedRecord
from lastlayer.bench.fused.tables import gigabytes, rank
from lastlayer.bench.plot import OTHER_COLOURS, OURS_COLOURS, new_figure, save
from lastlayer.bench.table import milliseconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Inches of a bar, and of what a panel has above and below its bars.
_BAR, _MARGIN = 0.21, 0.62
# Bars start here, as a logarithmic axis has no zero.
_LEAST_GB = 0.003
# Bars of methods that take more times as long as the fastest are cut off.
_LONGEST = 5.0
# How much longer than its longest bar an axis is, for the text behind it.
_ROOM, _LOG_ROOM = 1.4, 6.0


def times_and_memory(records: Sequence[FusedRecord], path: Path) -> None:
    """Draw one row of two panels a case: milliseconds, and memory beyond inputs and gradients.

    Args:
        records: those that were not timed are left out.
        path: where the PNG goes.

    Raises:
        MissingPlotLibrary: matplotlib is not installed.
        ValueError: no record has a time to draw.
    """
    cases: dict[tuple[str, str, str], list[FusedRecord]] = {}
    for record in records:
        if record.median_ms is not None:
            cases.setdefault((record.device, record.section, record.case), []).append(record)
    if not cases:
        raise ValueError("records: expected timings of fused losses, got none")
    heights = [_MARGIN + _BAR * len(found) for found in cases.values()]
    figure = new_figure(9.5, sum(heights))
    panels = figure.subplots(len(cases), 2, squeeze=False, height_ratios=heights)
    for (left, right), ((device, section, case), found) in zip(panels, cases.items(), strict=True):
        found.sort(key=rank)
        left.set_title(f"{section}: {case} · {device}", loc="left", fontsize=8.5)
        left.set_yticks(range(len(found)), [record.label for record in found], fontsize=7.5)
        right.set_yticks([])
        times = [record.median_ms or 0.0 for record in found]
        longest = min(max(times), _LONGEST * min(times))
        _bars(
            left, found, lambda r: r.median_ms, lambda r: f"{milliseconds(r.median_ms)} ms", longest
        )
        left.set_xlim(0, _ROOM * longest)
        _bars(
            right,
            found,
            lambda r: None if r.peak_bytes is None else max(_LEAST_GB, r.peak_bytes / 1e9),
            lambda r: f"{gigabytes(r.peak_bytes)} GB",
        )
        right.set_xscale("log")
        largest = max((r.peak_bytes or 0) / 1e9 for r in found)
        right.set_xlim(_LEAST_GB / 2, _LOG_ROOM * max(largest, 10 * _LEAST_GB))
    panels[-1, 0].set_xlabel("forward + backward, ms", fontsize=8)
    panels[-1, 1].set_xlabel("peak memory beyond inputs and gradients, GB (log)", fontsize=8)
    save(figure, path)


def _bars(
    panel: "Axes",
    records: list[FusedRecord],
    value: Callable[[FusedRecord], float | None],
    text: Callable[[FusedRecord], str],
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
    panel.spines[["top", "right"]].set_visible(False)


def _colour(record: FusedRecord) -> str:
    if not record.is_ours:
        return OTHER_COLOURS[-1]
    return OURS_COLOURS[0 if record.method == record.computes else 2]
