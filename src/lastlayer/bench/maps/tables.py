"""Measurements of maps as tables for a terminal."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from lastlayer.bench import table
from lastlayer.bench.maps.cases import SECTIONS
from lastlayer.bench.maps.record import MapRecord
from lastlayer.bench.table import EMPTY, milliseconds, percent, ratio, small

LEGEND = (
    "TB/s, GB/s: bytes that must be read and written, over the time · "
    "of copy: the same, over the measured copy bandwidth\n"
    "÷ softmax, ÷ ours: time over that of torch.softmax, "
    "and of our dense result for the same function · |Σ−1|: worst row sum"
)


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


def limit(copy_tb_per_s: float) -> str:
    """The copy bandwidth in words."""
    unit = unit_for(copy_tb_per_s)
    return f"copy {unit.show(copy_tb_per_s)} {unit.name}"


def all_of(records: Sequence[MapRecord]) -> list[Table]:
    """The comparison, and a table for each sweep that was made."""
    of = {name: [r for r in records if r.section == name] for name in SECTIONS}
    made = [comparison(of["shapes"], "maps: verified, then timed")]
    sweeps = {"scales": by_scale, "widths": by_width}
    return made + [show(of[name]) for name, show in sweeps.items() if of[name]]


def comparison(records: Iterable[MapRecord], title: str) -> Table:
    """Times, ratios and the fraction of the limit."""
    records = list(records)
    unit = _unit_of(records)
    columns = {
        "ms": lambda r: milliseconds(r.median_ms),
        unit.name: lambda r: unit.show(r.tb_per_s),
        "of copy": lambda r: percent(r.fraction_of_copy),
        "÷ softmax": lambda r: ratio(r.ratio_to_softmax),
        "÷ ours": lambda r: ratio(r.ratio_to_ours),
        "|Σ−1|": lambda r: small(r.row_sum_error),
    }
    return table.comparison(
        title, records, columns, case=lambda r: f"{r.size} {r.dtype} {r.direction}", rank=_rank
    )


def by_scale(records: Iterable[MapRecord]) -> Table:
    """Milliseconds and worst row sum of each method, one row a scale."""
    return table.by_method(
        "ms and |Σ−1| at other scales of the scores",
        "case",
        records,
        row=lambda r: f"{r.size} {r.dtype} scale {r.scale:g}",
        cell=_time_and_sum,
        rank=_rank,
    )


def by_width(records: Iterable[MapRecord]) -> Table:
    """Bandwidth of each method, one row a width."""
    records = list(records)
    unit = _unit_of(records)
    return table.by_method(
        f"{unit.name} against width",
        "columns",
        records,
        row=lambda r: str(r.shape[-1]),
        cell=lambda r: unit.show(r.tb_per_s),
        rank=_rank,
    )


def _unit_of(records: list[MapRecord]) -> Unit:
    return unit_for(max((record.copy_tb_per_s for record in records), default=0.0))


def _time_and_sum(record: MapRecord) -> Text:
    text = f"{milliseconds(record.median_ms)}  {small(record.row_sum_error)}"
    return Text(text, style="" if record.status == "ok" else table.status_style(record))


def _rank(record: MapRecord) -> int:
    if record.computes == "softmax":
        return 0
    return 1 if record.is_ours else 2
