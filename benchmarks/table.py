"""The tables of all families, one per case with one row per method, for a terminal or the page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.record import Record

EMPTY = "·"
LEGEND = (
    "ms: a plain eager call, host time included · replayed: per call of a CUDA graph · "
    "÷ base: ms over that of the first method · rate: required work over ms\n"
    "of limit: rate over that of a matrix product (TFLOP/s) or a copy (B/s) in the same run · "
    "memory: peak beyond inputs and results (heads: and parameters) · "
    "errors: distance to float64"
)


def console() -> Console:
    """Standard output; 180 columns wide if piped, for which rich would use 80."""
    made = Console()
    return made if made.is_terminal else Console(width=180)


class Grid(NamedTuple):
    """A table of text."""

    title: str
    headings: list[str]
    rows: list[list[str]]

    def rich(self) -> Table:
        """The table for a terminal."""
        made = Table(title=escape(self.title), title_justify="left", box=box.SIMPLE_HEAD)
        for index, heading in enumerate(self.headings):
            right = index > 0 and heading not in ("errors", "")
            made.add_column(escape(heading), justify="right" if right else "left", overflow="fold")
        for row in self.rows:
            made.add_row(*map(escape, row))
        return made

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def milliseconds(value: float | None) -> str:
    """A time with three significant digits, without an exponent."""
    if value is None:
        return EMPTY
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}" if value >= 1 else f"{value:.3f}"


def ratio(value: float | None) -> str:
    """A ratio of times."""
    if value is None:
        return EMPTY
    return f"{value:.3g}" if value >= 100 or value < 0.1 else f"{value:.2f}"


def data_size(value: float | None) -> str:
    """Bytes in MB or GB."""
    if value is None:
        return EMPTY
    return f"{value / 1e9:.2f} GB" if value >= 1e8 else f"{value / 1e6:.1f} MB"


def rate(record: Record) -> str:
    """Operations or bytes per second."""
    value = record.rate(record.median_ms)
    if value is None:
        return EMPTY
    if record.flop is not None:
        return f"{value:.0f} TFLOP/s" if value >= 10 else f"{value:.3f} TFLOP/s"
    return f"{value:.2f} TB/s" if value >= 0.5 else f"{1000 * value:.1f} GB/s"


def timed(record: Record, text: str) -> str:
    """The measured value, or why it was not measured."""
    if record.median_ms is None:
        return record.status
    return text if record.verified else f"{text} *inexact*"


# By heading, the text of a cell, from a record and the baseline of its case.
COLUMNS: dict[str, Callable[[Record, Record | None], str]] = {
    "ms": lambda r, _: timed(r, milliseconds(r.median_ms)),
    "replayed": lambda r, _: milliseconds(r.replayed_ms),
    "÷ base": lambda r, base: ratio(over(r, base)),
    "rate": lambda r, _: rate(r),
    "of limit": lambda r, _: _joined(_said("{:.0%}", r.of_limit(r.median_ms))),
    "memory": lambda r, _: data_size(r.peak_bytes),
    "parameters": lambda r, _: _joined(_said("{:.2f} M", r.parameters and r.parameters / 1e6)),
    "errors": lambda r, _: _joined(*(_said(n + " {:.0e}", e) for n, e in r.errors.items())),
    "": lambda r, _: _joined(r.settings, _said("support {:.1f}", r.support_mean)),
}


def _said(words: str, value: float | None) -> str | None:
    return None if value is None else words.format(value)


def _joined(*said: str | None) -> str:
    return ", ".join(text for text in said if text) or EMPTY


def over(record: Record, base: Record | None, clock: str = "median_ms") -> float | None:
    """The time of a record divided by that of another."""
    mine, other = (getattr(each, clock, None) for each in (record, base))
    return mine / other if mine and other else None


def by_case(records: Iterable[Record]) -> list[list[Record]]:
    """The records of each case: the baseline first, then ours, then the others."""
    groups: dict[object, list[Record]] = {}
    for record in records:
        groups.setdefault((record.device, record.case), []).append(record)
    return [
        sorted(group, key=lambda r: 0 if r.label == r.baseline else 1 if r.is_ours else 2)
        for group in groups.values()
    ]


def case_grid(group: Sequence[Record]) -> Grid:
    """All methods of one case; columns without any value are left out."""
    base = next((r for r in group if r.label == r.baseline), None)
    columns = {
        heading: [show(record, base) for record in group] for heading, show in COLUMNS.items()
    }
    shown = {name: cells for name, cells in columns.items() if set(cells) != {EMPTY}}
    rows = [[r.label, *cells] for r, *cells in zip(group, *shown.values(), strict=True)]
    return Grid(group[0].title, ["", *shown], rows)


def sweep_grid(groups: Sequence[Sequence[Record]], axis: str) -> Grid:
    """Times of each method against a size, one row per case; replayed times in brackets."""
    labels = list(dict.fromkeys(r.label for group in groups for r in group))
    rows = []
    for group in groups:
        first = group[0]
        size = f"{first.shape[-1]:,}"
        if axis == "scale":
            size = f"{first.shape[0]}×{first.shape[-1]} {first.dtype}, {first.scale:g}"
        cells = {}
        for r in group:
            replayed = "" if r.replayed_ms is None else f" ({milliseconds(r.replayed_ms)})"
            cells[r.label] = timed(r, milliseconds(r.median_ms) + replayed)
        rows.append([size, *(cells.get(label, EMPTY) for label in labels)])
    record = groups[0][0]
    title = f"{record.section}: ms (replayed) against {axis}, {record.direction}"
    return Grid(title, [axis, *labels], rows)


def swept(record: Record, axis: str) -> float:
    """The position of a record on the axis of a sweep."""
    return record.scale or 0.0 if axis == "scale" else float(record.shape[-1])


def grids(records: Iterable[Record], sweeps: Mapping[str, str]) -> list[Grid]:
    """All tables of one family on one device."""
    found: dict[str, list[list[Record]]] = {}
    for group in by_case(records):
        found.setdefault(group[0].section, []).append(group)
    made = []
    for section, groups in found.items():
        if section in sweeps:
            made.append(sweep_grid(groups, sweeps[section]))
        else:
            made += map(case_grid, groups)
    return made
