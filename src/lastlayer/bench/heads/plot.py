"""The cost of a step against the number of classes as a PNG."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lastlayer.bench.heads.cases import AGAINST
from lastlayer.bench.heads.entries import FULL, HUFFMAN, TWO_LEVEL
from lastlayer.bench.heads.record import HeadRecord
from lastlayer.bench.plot import (
    OTHER_COLOURS,
    OURS_COLOURS,
    beside_legend,
    panels_by_device,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# How a cost grows, and the head whose last point the guide line of it goes through.
GUIDES: dict[str, tuple[Callable[[float], float], str]] = {
    "O(V)": (float, FULL),
    "O(√V)": (math.sqrt, TWO_LEVEL),
    "O(log V)": (math.log, HUFFMAN),
}
_COLOURS = (*OURS_COLOURS, *OTHER_COLOURS)


def time_against_classes(records: Sequence[HeadRecord], path: Path) -> None:
    """Draw milliseconds of a step over the number of classes, one panel a device.

    Args:
        records: those of the section "cost against V"; others are left out.
        path: where the PNG goes.

    Raises:
        MissingPlotLibrary: matplotlib is not installed.
        ValueError: no record is of that section.
    """
    swept = [r for r in records if r.section == AGAINST and r.median_ms is not None]
    if not swept:
        raise ValueError(f"records: expected timings of the section {AGAINST!r}, got none")
    figure, panels = panels_by_device((8.5, 4.2), swept)
    for panel, device, mine in panels:
        _draw_lines(panel, mine)
        _draw_guides(panel, mine)
        rows, width, _ = mine[0].shape
        title = f"{device}: {rows} rows of {width} numbers, {mine[0].dtype}, forward + backward"
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel("classes V")
        panel.set_ylabel("ms of a training step")
        beside_legend(panel, 0.08)
    save(figure, path)


def _line_of(records: list[HeadRecord], method: str) -> list[tuple[int, float]]:
    return sorted((r.shape[-1], r.median_ms or 0.0) for r in records if r.method == method)


def _draw_lines(panel: "Axes", records: list[HeadRecord]) -> None:
    for place, method in enumerate(dict.fromkeys(record.method for record in records)):
        line = _line_of(records, method)
        panel.plot(
            [classes for classes, _ in line],
            [milliseconds for _, milliseconds in line],
            marker="o",
            markersize=4,
            linewidth=2,
            color=_COLOURS[place % len(_COLOURS)],
            label=method,
        )


def _draw_guides(panel: "Axes", records: list[HeadRecord]) -> None:
    """Dotted lines of pure growth: a head that runs along one grows like it."""
    for name, (growth, method) in GUIDES.items():
        line = _line_of(records, method)
        if not line:
            continue
        (first, _), (last, reached) = line[0], line[-1]
        # A logarithm is bent on these axes, so that two points are not enough.
        steps = [first * (last / first) ** (i / 40) for i in range(41)]
        heights = [reached * growth(each) / growth(last) for each in steps]
        panel.plot(steps, heights, color="black", linestyle=":", linewidth=1, zorder=1)
        panel.annotate(
            name,
            (last, reached),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
