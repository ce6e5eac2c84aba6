"""Times and memory of all methods as a PNG."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lastlayer.bench.fused.tables import gigabytes
from lastlayer.bench.multilabel.record import MultilabelRecord
from lastlayer.bench.multilabel.tables import rank
from lastlayer.bench.plot import OTHER_COLOURS, OURS_COLOURS, new_figure, save
from lastlayer.bench.table import milliseconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Inches of a bar, and of what a panel has above and below its bars.
_BAR, _MARGIN = 0.21, 0.62
# How much longer than its longest bar an axis is, for the text behind it.
_ROOM = 1.4


def times_and_memory(records: Sequence[MultilabelRecord], path: Path) -> None:
    """Draw one row of two panels a case: milliseconds, and memory beyond inputs and gradients.

    Args:
        records: those that were not timed are left out.
        path: where the PNG goes.

    Raises:
        MissingPlotLibrary: matplotlib is not installed.
        ValueError: no record has a time to draw.
    """
    cases: dict[tuple[str, str, str], list[MultilabelRecord]] = {}
    for record in records:
        if record.median_ms is not None:
            cases.setdefault((record.device, record.section, record.case), []).append(record)
    if not cases:
        raise ValueError("records: expected timings of losses of many labels, got none")
    heights = [_MARGIN + _BAR * len(found) for found in cases.values()]
    figure = new_figure(9.5, sum(heights))
    panels = figure.subplots(len(cases), 2, squeeze=False, height_ratios=heights)
    for (left, right), ((device, section, case), found) in zip(panels, cases.items(), strict=True):
        found.sort(key=rank)
        left.set_title(f"{section}: {case} · {device}", loc="left", fontsize=8.5)
        _bars(left, found, lambda r: r.median_ms, lambda r: f"{milliseconds(r.median_ms)} ms")
        left.set_yticks(range(len(found)), [record.label for record in found], fontsize=7.5)
        _bars(
            right,
            found,
            lambda r: None if r.peak_bytes is None else r.peak_bytes / 1e9,
            lambda r: f"{gigabytes(r.peak_bytes)} GB",
        )
        right.set_yticks([])
    panels[-1, 0].set_xlabel("ms", fontsize=8)
    panels[-1, 1].set_xlabel("peak memory beyond inputs and gradients, GB", fontsize=8)
    save(figure, path)


def _bars(
    panel: "Axes",
    records: list[MultilabelRecord],
    value: Callable[[MultilabelRecord], float | None],
    text: Callable[[MultilabelRecord], str],
) -> None:
    for place, record in enumerate(records):
        length = value(record)
        if length is None:
            continue
        panel.barh(place, length, height=0.72, color=_colour(record))
        panel.annotate(
            text(record) if record.verified else f"{text(record)}, inexact",
            (length, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    longest = max((value(record) or 0.0 for record in records), default=0.0)
    panel.set_xlim(0, _ROOM * longest if longest else 1)
    panel.set_ylim(len(records) - 0.4, -0.6)
    panel.tick_params(axis="x", labelsize=7)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right"]].set_visible(False)


def _colour(record: MultilabelRecord) -> str:
    return OURS_COLOURS[0] if record.is_ours else OTHER_COLOURS[-1]
