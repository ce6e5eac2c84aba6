"""Measurements of losses of many labels as tables for a terminal."""

from collections.abc import Sequence

from rich.table import Table

from lastlayer.bench import table
from lastlayer.bench.fused.tables import gigabytes, rate
from lastlayer.bench.fused.tables import limit as gemm_limit
from lastlayer.bench.maps.tables import limit as copy_limit
from lastlayer.bench.maps.tables import unit_for
from lastlayer.bench.multilabel.record import MultilabelRecord
from lastlayer.bench.table import milliseconds, percent, ratio, small

LEGEND = (
    "TFLOP/s: 6·rows·width·labels over the time, whatever the method does · "
    "of GEMM: the same, over the rate of a square product\n"
    "TB/s, GB/s: bytes that must be read and written, over the time · of copy: the same, over the "
    "copy bandwidth\n"
    "÷ base: time over that of the first method of the case · "
    "GB: peak memory beyond inputs and gradients\n"
    "loss, dX, dW, dS: relative errors against float64, of the loss and in norm of the gradients"
)


def limit(gemm_tflop_per_s: float, copy_tb_per_s: float) -> str:
    """Both limits in words."""
    return f"{gemm_limit(gemm_tflop_per_s)}, {copy_limit(copy_tb_per_s)}"


def all_of(records: Sequence[MultilabelRecord]) -> list[Table]:
    """A table with and one without a linear layer, where there are such records."""
    linear = [record for record in records if not is_dense(record)]
    dense = [record for record in records if is_dense(record)]
    return [*([_linear(linear)] if linear else []), *([_dense(dense)] if dense else [])]


def is_dense(record: MultilabelRecord) -> bool:
    """Whether its inputs were scores."""
    return len(record.shape) == 2


def rank(record: MultilabelRecord) -> int:
    """The baseline first, then ours."""
    if record.label == record.baseline:
        return 0
    return 1 if record.is_ours else 2


def _linear(records: list[MultilabelRecord]) -> Table:
    return table.comparison(
        "linear layer and loss: verified, then timed, forward + backward",
        records,
        {
            "ms": lambda r: milliseconds(r.median_ms),
            "TFLOP/s": lambda r: rate(r.tflop_per_s),
            "of GEMM": lambda r: percent(r.fraction_of_gemm),
            "÷ base": lambda r: ratio(r.ratio_to_baseline),
            "GB": lambda r: gigabytes(r.peak_bytes),
            "loss": lambda r: small(r.loss_error),
            "dX": lambda r: small(r.hidden_error),
            "dW": lambda r: small(r.weight_error),
        },
        case=lambda r: f"{r.section} {r.size} {r.dtype}",
        rank=rank,
    )


def _dense(records: list[MultilabelRecord]) -> Table:
    unit = unit_for(records[0].copy_tb_per_s)
    return table.comparison(
        "loss of scores and labels: verified, then timed",
        records,
        {
            "ms": lambda r: milliseconds(r.median_ms),
            unit.name: lambda r: unit.show(r.tb_per_s),
            "of copy": lambda r: percent(r.fraction_of_copy),
            "÷ base": lambda r: ratio(r.ratio_to_baseline),
            "GB": lambda r: gigabytes(r.peak_bytes),
            "loss": lambda r: small(r.loss_error),
            "dS": lambda r: small(r.scores_error),
        },
        case=lambda r: f"{r.section} {r.case}",
        rank=rank,
    )
