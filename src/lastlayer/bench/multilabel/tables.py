"""Measurements of losses of many labels as tables for a terminal."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from lastlayer.bench import loss_table, table
from lastlayer.bench.maps.tables import unit_for
from lastlayer.bench.multilabel.record import MultilabelRecord
from lastlayer.bench.table import percent, small

LEGEND = loss_table.legend(
    "6·rows·width·labels",
    "TB/s, GB/s: bytes that must be read and written, over the time · of copy: the same, over the "
    "copy bandwidth",
    "loss, dX, dW, dS: relative errors against float64, of the loss and in norm of the gradients",
)
LINEAR_COLUMNS = loss_table.COLUMNS | {
    "dX": lambda r: small(r.hidden_error),
    "dW": lambda r: small(r.weight_error),
}


def dense_columns(copy_tb_per_s: float) -> dict[str, Callable[[Any], str]]:
    """Those of losses of scores: bandwidth in place of operations."""
    unit = unit_for(copy_tb_per_s)
    columns = {
        "ms": loss_table.COLUMNS["ms"],
        unit.name: lambda r: unit.show(r.tb_per_s),
        "of copy": lambda r: percent(r.fraction_of_copy),
    }
    same = {name: loss_table.COLUMNS[name] for name in ("÷ base", "GB", "loss")}
    return columns | same | {"dS": lambda r: small(r.scores_error)}


def all_of(records: Sequence[MultilabelRecord]) -> list[Table]:
    """A table with and one without a linear layer, where there are such records."""
    linear = [record for record in records if not is_dense(record)]
    dense = [record for record in records if is_dense(record)]
    return [*([_linear(linear)] if linear else []), *([_dense(dense)] if dense else [])]


def is_dense(record: MultilabelRecord) -> bool:
    """Whether its inputs were scores."""
    return len(record.shape) == 2


def _linear(records: list[MultilabelRecord]) -> Table:
    return table.comparison(
        "linear layer and loss: verified, then timed, forward + backward",
        records,
        LINEAR_COLUMNS,
        case=lambda r: f"{r.section} {r.size} {r.dtype}",
        rank=table.rank,
    )


def _dense(records: list[MultilabelRecord]) -> Table:
    return table.comparison(
        "loss of scores and labels: verified, then timed",
        records,
        dense_columns(records[0].copy_tb_per_s),
        case=lambda r: f"{r.section} {r.case}",
        rank=table.rank,
    )
