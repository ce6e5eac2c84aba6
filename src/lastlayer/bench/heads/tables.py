"""Measurements of heads as tables for a terminal."""

from collections.abc import Callable, Iterable
from itertools import groupby

from rich.markup import escape
from rich.table import Table

from lastlayer.bench import table
from lastlayer.bench.heads.record import HeadRecord
from lastlayer.bench.table import EMPTY, milliseconds, small

REPLAYED: dict[str, Callable[[HeadRecord], str]] = {
    "replayed": lambda r: milliseconds(r.replayed_ms)
}
LEGEND = (
    "replayed: ms of a CUDA graph of the same call, on a GPU, unless the host waits in it · "
    "faster: the ms of the first method of the case over these · "
    "MB: peak memory beyond inputs and parameters, gradients included\n"
    "M: parameters, in millions · loss, dX, dW: relative errors against float64, of the "
    "loss and in norm of the gradients\n"
    "error: largest difference of a log-probability between the classes found and the best ones · "
    "targets by Zipf's law, p ∝ 1/rank"
)


def faster(times: float | None) -> str:
    """A ratio of times that may be of any size."""
    if times is None:
        return EMPTY
    return f"{times:.2g}" if times < 1 else milliseconds(times)


def megabytes(peak_bytes: int | None) -> str:
    """Bytes as MB, 10⁶ bytes."""
    if peak_bytes is None:
        return EMPTY
    return f"{peak_bytes / 1e6:,.{0 if peak_bytes >= 1e8 else 1}f}"


def millions(count: int | None) -> str:
    """A number of parameters."""
    return EMPTY if count is None else f"{count / 1e6:.{1 if count >= 1e7 else 2}f}"


def limit(gemm_tflop_per_s: float) -> str:
    """The rate of a product in words."""
    digits = 0 if gemm_tflop_per_s >= 10 else 3
    return f"GEMM {gemm_tflop_per_s:.{digits}f} TFLOP/s"


def steps(records: Iterable[HeadRecord]) -> Table:
    """Times, memory, parameters and errors of training steps."""
    return table.comparison(
        "heads: a training step, verified, then timed, forward + backward",
        records,
        {
            "ms": lambda r: milliseconds(r.median_ms),
            **REPLAYED,
            "faster": lambda r: faster(r.times_faster),
            "MB": lambda r: megabytes(r.peak_bytes),
            "M": lambda r: millions(r.parameters),
            "loss": lambda r: small(r.loss_error),
            "dX": lambda r: small(r.hidden_error),
            "dW": lambda r: small(r.weight_error),
        },
        case=lambda r: f"{r.section} {r.case}",
        rank=rank,
    )


def best(records: Iterable[HeadRecord]) -> Table:
    """Times, memory and errors of the best classes."""
    return table.comparison(
        "heads: the best classes of each row",
        records,
        {
            "ms": lambda r: milliseconds(r.median_ms),
            **REPLAYED,
            "faster": lambda r: faster(r.times_faster),
            "MB": lambda r: megabytes(r.peak_bytes),
            "M": lambda r: millions(r.parameters),
            "error": lambda r: small(r.value_error),
        },
        case=lambda r: f"{r.section} {r.case}",
        rank=rank,
    )


def built(records: Iterable[HeadRecord]) -> Table:
    """Time and memory of building trees."""
    return table.comparison(
        "trees: what building them takes",
        records,
        {"ms": lambda r: milliseconds(r.median_ms), "MB": lambda r: megabytes(r.peak_bytes)},
        case=lambda r: r.case,
        rank=rank,
    )


def against_classes(records: Iterable[HeadRecord]) -> Table:
    """Milliseconds of each head, one row a number of classes."""
    records = list(records)
    labels = list(dict.fromkeys(record.label for record in records))
    made = table.heading_only("ms of a training step against the number of classes", "classes")
    for label in labels:
        made.add_column(escape(label.replace(" ", "\n", 1)), justify="right")
    for classes, group in groupby(records, key=lambda record: record.shape[-1]):
        found = {r.label: milliseconds(r.median_ms) for r in group}
        made.add_row(f"{classes:,}", *(found.get(label, EMPTY) for label in labels))
    return made


def rank(record: HeadRecord) -> int:
    """The baseline first, then ours."""
    if record.label == record.baseline:
        return 0
    return 1 if record.is_ours else 2
