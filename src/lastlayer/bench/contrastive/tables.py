"""Measurements of contrastive losses as a table for a terminal."""

from collections.abc import Iterable

from rich.table import Table

from lastlayer.bench import loss_table, table
from lastlayer.bench.contrastive.record import ContrastiveRecord
from lastlayer.bench.table import small

LEGEND = loss_table.legend(
    "6·pairs²·width",
    "loss, dQ, dK, dT: relative errors against float64, of the loss, in norm of the gradients of "
    "queries and keys, of that of the temperature",
)
COLUMNS = loss_table.COLUMNS | {
    "dQ": lambda r: small(r.query_error),
    "dK": lambda r: small(r.key_error),
    "dT": lambda r: small(r.temperature_error),
}


def comparison(records: Iterable[ContrastiveRecord]) -> Table:
    """Times, rates, memory and errors."""
    return table.comparison(
        "InfoNCE: verified, then timed, forward + backward",
        records,
        COLUMNS,
        case=lambda r: f"{r.section} {r.case}",
        rank=table.rank,
    )
