"""What the tables for a terminal and for the page have in common."""

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import TypeVar

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lastlayer.bench.baseline_record import BaselineRecord
from lastlayer.bench.record import Record

EMPTY = "·"

RecordT = TypeVar("RecordT", bound=Record)


def milliseconds(value: float | None) -> str:
    """Three significant digits, never in powers of ten."""
    if value is None:
        return EMPTY
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}" if value >= 1 else f"{value:.3f}"


def ratio(value: float | None) -> str:
    """A ratio of times."""
    return EMPTY if value is None else f"{value:.3g}" if value >= 100 else f"{value:.2f}"


def percent(value: float | None) -> str:
    """A fraction in percent."""
    return EMPTY if value is None else f"{100 * value:.0f}%"


def small(value: float | None) -> str:
    """An error."""
    return EMPTY if value is None else f"{value:.0e}"


def gigabytes(peak_bytes: int | None) -> str:
    """Bytes as GB, 10⁹ bytes."""
    if peak_bytes is None:
        return EMPTY
    return f"{peak_bytes / 1e9:.{2 if peak_bytes >= 1e8 else 3}f}"


def rate(tflop_per_s: float | None) -> str:
    """Teraflops a second."""
    if tflop_per_s is None:
        return EMPTY
    return f"{tflop_per_s:.0f}" if tflop_per_s >= 10 else f"{tflop_per_s:.3f}"


def gemm_limit(tflop_per_s: float) -> str:
    """The rate of a product in words."""
    return f"GEMM {rate(tflop_per_s)} TFLOP/s"


def rank(record: BaselineRecord) -> int:
    """The baseline first, then ours."""
    if record.label == record.baseline:
        return 0
    return 1 if record.is_ours else 2


def _heading_only(title: str, first_column: str) -> Table:
    """A table without rows."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column(first_column, no_wrap=True)
    return table


def comparison(
    title: str,
    records: Iterable[RecordT],
    columns: Mapping[str, Callable[[RecordT], str]],
    *,
    case: Callable[[RecordT], str],
    rank: Callable[[RecordT], int],
) -> Table:
    """One row a method, one group a case.

    Args:
        title: above the table.
        records: those of a case stand together.
        columns: heading and content of each.
        case: names a group.
        rank: methods of lower rank come first.
    """
    records = list(records)
    table = _heading_only(title, "method")
    # Names of cases may be longer than those of methods, and then go on in the next line.
    table.columns[0].no_wrap = False
    table.columns[0].min_width = 2 + max((len(r.label) for r in records), default=0)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("status", min_width=16, overflow="fold")
    for name, group in groupby(records, key=case):
        table.add_section()
        table.add_row(Text(name, style="bold"))
        # What could not be timed was written first; sorting is stable, so the rest keeps its order.
        for record in sorted(group, key=rank):
            table.add_row(
                Text(f"  {record.label}", style="cyan" if record.is_ours else ""),
                *(show(record) for show in columns.values()),
                Text(record.status, style=status_style(record)),
            )
    return table


def by_method(
    title: str,
    first_column: str,
    records: Iterable[RecordT],
    *,
    row: Callable[[RecordT], str],
    cell: Callable[[RecordT], str | Text],
    rank: Callable[[RecordT], int],
) -> Table:
    """One column a method, one row a case.

    Args:
        title: above the table.
        first_column: what the rows are.
        records: those of a row stand together.
        row: names a row.
        cell: what is shown of a method there.
        rank: methods of lower rank come first.
    """
    records = list(records)
    labels = list(dict.fromkeys(record.label for record in sorted(records, key=rank)))
    table = _heading_only(title, first_column)
    for label in labels:
        table.add_column(escape(label.replace(" ", "\n", 1)), justify="right")
    for name, group in groupby(records, key=row):
        found = {record.label: cell(record) for record in group}
        table.add_row(name, *(found.get(label, EMPTY) for label in labels))
    return table


def status_style(record: Record) -> str:
    """The colour of what came out."""
    if record.status == "ok":
        return "green"
    return "bold red" if record.is_ours else "yellow"
