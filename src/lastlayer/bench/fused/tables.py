"""Measurements of fused losses as a table for a terminal."""

from collections.abc import Iterable
from itertools import groupby

from rich.table import Table

from lastlayer.bench import loss_table, table
from lastlayer.bench.fused.record import FusedRecord
from lastlayer.bench.table import small

LEGEND = loss_table.legend(
    "6·rows·width·classes",
    "loss, dX, dW: relative errors against float64, of the loss and in norm of the gradients",
)
COLUMNS = loss_table.COLUMNS | {
    "dX": lambda r: small(r.hidden_error),
    "dW": lambda r: small(r.weight_error),
}


def supports(records: Iterable[FusedRecord]) -> str:
    """Mean and largest support of each function that has one, in words."""
    found = {
        r.computes: f"{r.computes} {r.support_mean:.1f} (at most {r.support_max})"
        for r in records
        if r.support_mean is not None
    }
    return ", ".join(found.values())


def notes(records: Iterable[FusedRecord]) -> list[str]:
    """The supports of each case that has some."""
    cases = groupby(records, key=lambda record: record.case)
    found = {case: supports(group) for case, group in cases}
    return [f"supports, {case}: {sizes}" for case, sizes in found.items() if sizes]


def comparison(records: Iterable[FusedRecord]) -> Table:
    """Times, rates, memory and errors."""
    return table.comparison(
        "fused losses: verified, then timed, forward + backward",
        records,
        COLUMNS,
        case=lambda r: f"{r.section} {r.case}",
        rank=table.rank,
    )
