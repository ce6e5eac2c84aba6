"""Records as tables for a terminal."""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lastlayer.bench.record import Record

EMPTY = "·"


def size_of(record: Record) -> str:
    """Rows × columns."""
    return "×".join(str(extent) for extent in record.shape)


def label_of(record: Record) -> str:
    """Source and method."""
    return f"{record.source} {record.method}"


def milliseconds(value: float | None) -> str:
    """Three significant digits, never in powers of ten."""
    if value is None:
        return EMPTY
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}" if value >= 1 else f"{value:.3f}"


def ratio(value: float | None) -> str:
    """A ratio of times."""
    return EMPTY if value is None else f"{value:.3g}" if value >= 100 else f"{value:.2f}"


class Unit(NamedTuple):
    """Bandwidth in a unit that suits the device."""

    name: str
    per_tb: float

    def show(self, tb_per_s: float | None) -> str:
        """Three significant digits or so."""
        if tb_per_s is None:
            return EMPTY
        value = tb_per_s * self.per_tb
        return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def unit_for(copy_tb_per_s: float) -> Unit:
    """Terabytes a second for GPUs, gigabytes a second for processors."""
    return Unit("TB/s", 1) if copy_tb_per_s >= 0.5 else Unit("GB/s", 1000)


def percent(value: float | None) -> str:
    """A fraction in percent."""
    return EMPTY if value is None else f"{100 * value:.0f}%"


def small(value: float | None) -> str:
    """An error."""
    return EMPTY if value is None else f"{value:.0e}"


def comparison(records: Iterable[Record], title: str) -> Table:
    """Times, ratios and the fraction of the limit, one row a method, one group a case."""
    records = list(records)
    unit = _unit_of(records)
    table = _table(title, "method")
    for heading in ("ms", unit.name, "of copy", "÷ softmax", "÷ ours", "|Σ−1|"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("status", min_width=16, overflow="fold")
    for case, group in groupby(records, key=_case_of):
        table.add_section()
        table.add_row(Text(case, style="bold"))
        for record in sorted(group, key=_rank):
            table.add_row(
                Text(f"  {label_of(record)}", style="cyan" if _is_ours(record) else ""),
                milliseconds(record.median_ms),
                unit.show(record.tb_per_s),
                percent(record.fraction_of_copy),
                ratio(record.ratio_to_softmax),
                ratio(record.ratio_to_ours),
                small(record.row_sum_error),
                Text(record.status, style=_status_style(record)),
            )
    return table


def by_scale(records: Iterable[Record]) -> Table:
    """Milliseconds and worst row sum of each method, one row a scale."""
    records = list(records)
    labels = list(dict.fromkeys(label_of(record) for record in sorted(records, key=_rank)))
    table = _table("ms and |Σ−1| at other scales of the scores", "case")
    for label in labels:
        table.add_column(escape(label.replace(" ", "\n", 1)), justify="right")
    groups = groupby(records, key=lambda r: f"{size_of(r)} {r.dtype} scale {r.scale:g}")
    for case, group in groups:
        found = {label_of(record): _time_and_sum(record) for record in group}
        table.add_row(case, *(found.get(label, EMPTY) for label in labels))
    return table


def by_width(records: Iterable[Record]) -> Table:
    """Bandwidth of each method, one row a width."""
    records = list(records)
    unit = _unit_of(records)
    labels = list(dict.fromkeys(label_of(record) for record in sorted(records, key=_rank)))
    table = _table(f"{unit.name} against width", "columns")
    for label in labels:
        table.add_column(escape(label.replace(" ", "\n", 1)), justify="right")
    for width, group in groupby(records, key=lambda record: record.shape[-1]):
        found = {label_of(record): unit.show(record.tb_per_s) for record in group}
        table.add_row(str(width), *(found.get(label, EMPTY) for label in labels))
    return table


def legend() -> str:
    """What the columns mean."""
    return (
        "TB/s, GB/s: bytes that must be read and written, over the time · "
        "of copy: the same, over the measured copy bandwidth\n"
        "÷ softmax, ÷ ours: time over that of torch.softmax, "
        "and of our dense result for the same function · |Σ−1|: worst row sum"
    )


def _table(title: str, first_column: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column(first_column, no_wrap=True)
    return table


def _unit_of(records: list[Record]) -> Unit:
    return unit_for(max((record.copy_tb_per_s for record in records), default=0.0))


def _case_of(record: Record) -> str:
    return f"{size_of(record)} {record.dtype} {record.direction}"


def _time_and_sum(record: Record) -> Text:
    text = f"{milliseconds(record.median_ms)}  {small(record.row_sum_error)}"
    return Text(text, style=_status_style(record) if record.status != "ok" else "")


def _rank(record: Record) -> int:
    # What could not be timed was written first; sorting is stable, so the rest keeps its order.
    if record.computes == "softmax":
        return 0
    return 1 if _is_ours(record) else 2


def _is_ours(record: Record) -> bool:
    return record.source == "lastlayer"


def _status_style(record: Record) -> str:
    if record.status == "ok":
        return "green"
    return "bold red" if _is_ours(record) else "yellow"
