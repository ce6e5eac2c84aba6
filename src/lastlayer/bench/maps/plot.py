"""Bandwidth against width as a PNG."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from lastlayer.bench.maps.record import MapRecord
from lastlayer.bench.maps.tables import Unit, unit_for
from lastlayer.bench.plot import (
    OTHER_COLOURS,
    OURS_COLOURS,
    beside_legend,
    panels_by_device,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def bandwidth_against_width(records: Sequence[MapRecord], path: Path) -> None:
    """Draw bandwidth over the number of columns, one panel a device, one line a method.

    Args:
        records: those of the section ``"widths"``; others are left out.
        path: where the PNG goes.

    Raises:
        MissingPlotLibrary: matplotlib is not installed.
        ValueError: no record has a width to draw.
    """
    swept = [r for r in records if r.section == "widths" and r.tb_per_s is not None]
    if not swept:
        raise ValueError("records: expected timings of the section 'widths', got none")
    figure, panels = panels_by_device((7.5, 4.6), swept)
    for panel, device, mine in panels:
        unit = unit_for(mine[-1].copy_tb_per_s)
        _draw_lines(panel, mine, unit)
        limit = mine[-1].copy_tb_per_s * unit.per_tb
        panel.axhline(limit, color="black", linestyle=":", linewidth=1)
        panel.annotate(
            f"copy, {limit:.3g} {unit.name}",
            (0.01, limit),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=8,
        )
        highest = max([limit, *(unit.per_tb * (r.tb_per_s or 0.0) for r in mine)])
        panel.set_xscale("log", base=2)
        panel.set_ylim(0, 1.12 * highest)
        panel.set_title(f"{device}, {mine[0].dtype}, forward", loc="left", fontsize=10)
        panel.set_xlabel("columns (the number of scores is constant)")
        panel.set_ylabel(f"{unit.name} read and written")
        beside_legend(panel, 0.0)
    save(figure, path)


def _draw_lines(panel: "Axes", records: list[MapRecord], unit: Unit) -> None:
    ours, others = cycle(OURS_COLOURS), cycle(OTHER_COLOURS)
    for source, method in dict.fromkeys((record.source, record.method) for record in records):
        line = sorted(
            (record.shape[-1], unit.per_tb * (record.tb_per_s or 0.0))
            for record in records
            if (record.source, record.method) == (source, method)
        )
        is_ours = source == "lastlayer"
        panel.plot(
            [width for width, _ in line],
            [speed for _, speed in line],
            marker="o",
            markersize=4 if is_ours else 3,
            linewidth=2.2 if is_ours else 1.2,
            color=next(ours if is_ours else others),
            zorder=3 if is_ours else 2,
            label=f"{source} {method}",
        )
