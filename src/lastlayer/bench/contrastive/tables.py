"""Measurements of contrastive losses as a table for a terminal."""

from collections.abc import Iterable

from rich.table import Table

from lastlayer.bench import table
from lastlayer.bench.contrastive.record import ContrastiveRecord
from lastlayer.bench.table import EMPTY, milliseconds, percent, ratio, small

LEGEND = (
    "TFLOP/s: 6·pairs²·width over the time, whatever the method does · "
    "of GEMM: the same, over the rate of a square product\n"
    "÷ base: time over that of the first method of the case · "
    "GB: peak memory beyond inputs and gradients\n"
    "loss, dQ, dK, dT: relative errors against float64, of the loss, in norm of the gradients of "
    "queries and keys, of that of the temperature"
)


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


def limit(gemm_tflop_per_s: float) -> str:
    """The rate of a product in words."""
    return f"GEMM {rate(gemm_tflop_per_s)} TFLOP/s"


def comparison(records: Iterable[ContrastiveRecord]) -> Table:
    """Times, rates, memory and errors."""
    return table.comparison(
        "InfoNCE: verified, then timed, forward + backward",
        records,
        {
            "ms": lambda r: milliseconds(r.median_ms),
            "TFLOP/s": lambda r: rate(r.tflop_per_s),
            "of GEMM": lambda r: percent(r.fraction_of_gemm),
            "÷ base": lambda r: ratio(r.ratio_to_baseline),
            "GB": lambda r: gigabytes(r.peak_bytes),
            "loss": lambda r: small(r.loss_error),
            "dQ": lambda r: small(r.query_error),
            "dK": lambda r: small(r.key_error),
            "dT": lambda r: small(r.temperature_error),
        },
        case=lambda r: f"{r.section} {r.case}",
        rank=rank,
    )


def rank(record: ContrastiveRecord) -> int:
    """The baseline first, then ours."""
    if record.label == record.baseline:
        return 0
    return 1 if record.is_ours else 2
