"""Measurements of heads as tables for a terminal."""

from collections.abc import Callable, Iterable, Sequence

from rich.table import Table

from lastlayer.bench import table
from lastlayer.bench.heads.cases import AGAINST, DRAWS, STEP, TOP, TREES
from lastlayer.bench.heads.draws import DRAWN
from lastlayer.bench.heads.record import HeadRecord
from lastlayer.bench.table import EMPTY, milliseconds, small

REPLAYED: dict[str, Callable[[HeadRecord], str]] = {
    "replayed": lambda r: milliseconds(r.replayed_ms)
}
# By heading, what is shown of every call of a head; errors come after these.
COLUMNS: dict[str, Callable[[HeadRecord], str]] = {
    "ms": lambda r: milliseconds(r.median_ms),
    **REPLAYED,
    "faster": lambda r: faster(r.times_faster),
    "MB": lambda r: megabytes(r.peak_bytes),
    "M": lambda r: millions(r.parameters),
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


def all_of(records: Sequence[HeadRecord]) -> list[Table]:
    """One table a section that there are records of."""
    made = {STEP: steps, TOP: best, AGAINST: against_classes, DRAWS: drawn, TREES: built}
    found = {name: [r for r in records if r.section == name] for name in made}
    return [made[name](mine) for name, mine in found.items() if mine]


def steps(records: Iterable[HeadRecord]) -> Table:
    """Times, memory, parameters and errors of training steps."""
    return table.comparison(
        "heads: a training step, verified, then timed, forward + backward",
        records,
        COLUMNS
        | {
            "loss": lambda r: small(r.loss_error),
            "dX": lambda r: small(r.hidden_error),
            "dW": lambda r: small(r.weight_error),
        },
        case=lambda r: f"{r.section} {r.case}",
        rank=table.rank,
    )


def best(records: Iterable[HeadRecord]) -> Table:
    """Times, memory and errors of the best classes."""
    return table.comparison(
        "heads: the best classes of each row",
        records,
        COLUMNS | {"error": lambda r: small(r.value_error)},
        case=lambda r: f"{r.section} {r.case}",
        rank=table.rank,
    )


def drawn(records: Iterable[HeadRecord]) -> Table:
    """Time and memory of drawing classes."""
    return table.comparison(
        f"samplers: {DRAWN:,} draws with replacement",
        records,
        {name: COLUMNS[name] for name in ("ms", "replayed", "faster", "MB")}
        | {"log q": lambda r: small(r.value_error)},
        case=lambda r: r.case,
        rank=table.rank,
    )


def built(records: Iterable[HeadRecord]) -> Table:
    """Time and memory of building trees."""
    return table.comparison(
        "trees: what building them takes",
        records,
        {name: COLUMNS[name] for name in ("ms", "MB")},
        case=lambda r: r.case,
        rank=table.rank,
    )


def against_classes(records: Iterable[HeadRecord]) -> Table:
    """Milliseconds of each head, one row a number of classes."""
    return table.by_method(
        "ms of a training step against the number of classes",
        "classes",
        records,
        row=lambda r: f"{r.shape[-1]:,}",
        cell=lambda r: milliseconds(r.median_ms),
        rank=table.rank,
    )
