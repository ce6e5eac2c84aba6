"""The figures of all families: bars of time and memory per case, or lines over a size."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import table
from benchmarks.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INSTALL_COMMAND = 'pip install "lastlayer[lab]"'
# Okabe and Ito's colours, which colour-blind readers can tell apart.
OURS_COLOURS = ("#0072B2", "#009E73", "#56B4E9", "#E69F00", "#CC79A7")
OTHER_COLOURS = ("#D55E00", "#000000", "#F0E442", "#7F7F7F")
# Heights in inches: of a bar, of the margins of a panel of bars, and of a panel of lines.
_BAR, _MARGIN, _LINES = 0.21, 0.62, 4.2
# Bars are cut off at this multiple of the fastest method's.
_LONGEST = 5.0
# More cases than this are one panel of ratios; the height of a case in it, and its markers.
_MOST_PANELS, _CASE, _MARKERS = 16, 0.19, ("s", "^", "v", "x")


def is_available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(records: Sequence[Record], path: Path, sweeps: Mapping[str, str]) -> None:
    """Write a PNG of all cases that were timed, one row of panels per case or sweep.

    Many cases are one panel of times relative to the first method of each case.

    Raises:
        ValueError: if nothing was timed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [r for r in records if r.median_ms is not None]
    if not timed:
        raise ValueError("records: expected at least one that was timed, got none")
    groups: dict[tuple[str, str], list[Record]] = {}
    for group in table.by_case(timed):
        first = group[0]
        name = first.section if first.section in sweeps else first.title
        groups.setdefault((first.device, name), []).extend(group)
    if len(groups) > _MOST_PANELS:
        figure = Figure(figsize=(9.5, 1.3 + _CASE * len(groups)), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        _ratios(figure.subplots(1, 1), groups)
        figure.savefig(path, format="png", metadata={"Software": None})
        return
    heights = [
        _LINES if group[0].section in sweeps else _MARGIN + _BAR * len(group)
        for group in groups.values()
    ]
    figure = Figure(figsize=(9.5, sum(heights)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subfigures(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for row, ((device, name), group) in zip(rows, groups.items(), strict=True):
        row.suptitle(f"{name} · {device}", x=0.01, ha="left", fontsize=8.5)
        if group[0].section in sweeps:
            _lines(row.subplots(1, 1), group, sweeps[group[0].section])
        else:
            left, right = row.subplots(1, 2)
            _bars(left, group, "ms", [r.median_ms for r in group], longest=_LONGEST)
            left.set_yticks(range(len(group)), [r.label for r in group], fontsize=7.5)
            _bars(right, group, "GB", [r.peak_bytes and r.peak_bytes / 1e9 for r in group])
            right.set_yticks([])
    figure.savefig(path, format="png", metadata={"Software": None})


def _ratios(panel: "Axes", groups: Mapping[tuple[str, str], list[Record]]) -> None:
    """The time of each method relative to the first of its case, ours filled."""
    named = dict.fromkeys(r.label for group in groups.values() for r in group[1:] if r.is_ours)
    # Cases of different functions have a name of their own for each.
    shown = {name: name if len(named) <= len(OURS_COLOURS) else "lastlayer" for name in named}
    colours = dict(zip(dict.fromkeys(shown.values()), OURS_COLOURS, strict=False))
    markers: dict[str, str] = {}
    for place, group in enumerate(groups.values()):
        base = group[0].median_ms
        for record in group[1:]:
            if not base or not record.median_ms:
                continue
            ratio, name = record.median_ms / base, shown.get(record.label, record.label)
            if record.is_ours:
                panel.plot(ratio, place, "o", color=colours[name], ms=5, label=name, zorder=3)
                continue
            name = "torch.compile" if name.endswith("compiled") else name
            marker = markers.setdefault(name, _MARKERS[len(markers) % len(_MARKERS)])
            panel.plot(ratio, place, marker, color=OTHER_COLOURS[-1], ms=4, label=name)
    panel.axvline(1.0, color="black", lw=0.8)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_yticks(range(len(groups)), [name for _, name in groups], fontsize=6.5)
    panel.set_ylim(len(groups) - 0.4, -0.6)
    bases = dict.fromkeys(group[0].label for group in groups.values())
    panel.set_xlabel(f"time relative to {', '.join(bases)} (left is faster)", fontsize=8)
    panel.grid(visible=True, alpha=0.3)
    panel.tick_params(axis="x", labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
    known = dict(zip(*panel.get_legend_handles_labels()[::-1], strict=True))
    panel.figure.legend(
        known.values(), known.keys(), fontsize=7, frameon=False, ncols=min(5, len(known)),
        loc="outside upper center",
    )  # fmt: skip


def _lines(panel: "Axes", records: list[Record], axis: str) -> None:
    """Time over a size, solid for plain calls and dotted for replayed graphs."""
    ours, others = cycle(OURS_COLOURS), cycle(OTHER_COLOURS)
    for label in dict.fromkeys(r.label for r in records):
        mine = [r for r in records if r.label == label]
        colour = next(ours if mine[0].is_ours else others)
        for clock, style in (("median_ms", "o-"), ("replayed_ms", ":")):
            times = ((table.swept(r, axis), getattr(r, clock)) for r in mine)
            points = sorted((size, ms) for size, ms in times if ms)
            if points:
                name = label if clock == "median_ms" else None
                panel.plot(*zip(*points, strict=True), style, color=colour, label=name, ms=3.5)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel(axis, fontsize=8)
    panel.set_ylabel("ms, dotted: replayed", fontsize=8)
    panel.grid(visible=True, alpha=0.3)
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _bars(
    panel: "Axes",
    records: list[Record],
    unit: str,
    values: Sequence[float | None],
    longest: float = float("inf"),
) -> None:
    known = [value for value in values if value is not None]
    most = min(max(known, default=1.0), longest * min(known, default=1.0)) or 1.0
    for place, (record, value) in enumerate(zip(records, values, strict=True)):
        if value is None:
            continue
        colour = OURS_COLOURS[0] if record.is_ours else OTHER_COLOURS[-1]
        remark = ", cut off" if value > most else "" if record.verified else ", inexact"
        length = min(value, most)
        panel.barh(place, length, height=0.72, color=colour)
        if unit == "ms" and record.replayed_ms is not None:
            panel.plot([record.replayed_ms] * 2, [place - 0.36, place + 0.36], color="black")
        panel.annotate(
            f"{table.milliseconds(value)} {unit}{remark}", (length, place), xytext=(3, 0),
            textcoords="offset points", va="center", fontsize=7,
        )  # fmt: skip
    panel.set_xlim(0, 1.4 * most)
    panel.set_ylim(len(records) - 0.4, -0.6)
    panel.tick_params(axis="x", labelsize=7)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right"]].set_visible(False)
