"""What all tables of losses with gradients begin with."""

from collections.abc import Callable
from typing import Any

from lastlayer.bench.table import gigabytes, milliseconds, percent, rate, ratio, small

# By heading, what is shown of a record; errors of gradients come after these.
COLUMNS: dict[str, Callable[[Any], str]] = {
    "ms": lambda r: milliseconds(r.median_ms),
    "TFLOP/s": lambda r: rate(r.tflop_per_s),
    "of GEMM": lambda r: percent(r.fraction_of_gemm),
    "÷ base": lambda r: ratio(r.ratio_to_baseline),
    "GB": lambda r: gigabytes(r.peak_bytes),
    "loss": lambda r: small(r.loss_error),
}


def legend(operations: str, *lines: str) -> str:
    """What the columns mean; ``lines`` are about those that only one family has."""
    first = (
        f"TFLOP/s: {operations} over the time, whatever the method does · "
        "of GEMM: the same, over the rate of a square product"
    )
    base = (
        "÷ base: time over that of the first method of the case · "
        "GB: peak memory beyond inputs and gradients"
    )
    *more, errors = lines
    return "\n".join([first, *more, base, errors])
