"""The goals that InfoNCE is held to."""

from collections.abc import Iterator

from targets import Results, Target, judge, times

from lastlayer.bench.contrastive.cases import CPU_SHAPES, CUDA_SHAPES
from lastlayer.bench.contrastive.methods import MAIN
from lastlayer.bench.contrastive.record import ContrastiveRecord
from lastlayer.bench.contrastive.truth import SYMMETRIC
from lastlayer.bench.table import gigabytes

# The batch that is compared with torch.compile, and one whose similarities no memory would hold.
COMPARED, LARGEST = 32768, 131072
MOST_BYTES = {COMPARED: 0.4e9, LARGEST: 4e9}
LOSS_ERROR, GRADIENT_ERROR = 1e-4, 4e-3


def contrastive_targets(results: Results[ContrastiveRecord]) -> list[Target]:
    """Every goal for this kind of device."""
    if results.last.device_type == "cpu":
        return [*_cpu_targets(results)]
    return [*_cuda_targets(results)]


def _find(results: Results[ContrastiveRecord], shape: tuple[int, ...]) -> ContrastiveRecord | None:
    for r in results.of(SYMMETRIC, "forward+backward"):
        if (r.shape, r.method, r.source) == (shape, MAIN, "lastlayer"):
            return r
    return None


def _cuda_targets(results: Results[ContrastiveRecord]) -> Iterator[Target]:
    for shape in CUDA_SHAPES[SYMMETRIC]:
        pairs, found, where = shape[0], [_find(results, shape)], "×".join(map(str, shape))
        if pairs == COMPARED:
            yield _no_slower("torch.compile", found, where)
        if pairs in MOST_BYTES:
            most = MOST_BYTES[pairs]
            yield judge(
                f"symmetric {MAIN}: at most {most / 1e9:g} GB beyond inputs and gradients",
                where,
                found,
                lambda r: r.peak_bytes,
                lambda value, most=most: value <= most,
                lambda value: f"{gigabytes(round(value))} GB",
            )
        yield judge(
            f"symmetric {MAIN}: loss within {LOSS_ERROR:g} of float64",
            where,
            found,
            lambda r: r.loss_error,
            lambda value: value <= LOSS_ERROR,
            _two_digits,
        )
        yield judge(
            f"symmetric {MAIN}: gradients within {GRADIENT_ERROR:g} of float64",
            where,
            found,
            _gradient_error,
            lambda value: value <= GRADIENT_ERROR,
            _two_digits,
        )


def _cpu_targets(results: Results[ContrastiveRecord]) -> Iterator[Target]:
    for shape in CPU_SHAPES[SYMMETRIC]:
        where = "×".join(map(str, shape))
        yield _no_slower("torch with all similarities stored", [_find(results, shape)], where)


def _no_slower(than: str, found: list[ContrastiveRecord | None], where: str) -> Target:
    return judge(
        f"symmetric {MAIN}: no slower than {than}",
        where,
        found,
        lambda r: r.ratio_to_baseline,
        lambda value: value <= 1,
        times,
    )


def _gradient_error(record: ContrastiveRecord) -> float | None:
    if record.query_error is None or record.key_error is None:
        return None
    return max(record.query_error, record.key_error)


def _two_digits(value: float) -> str:
    return f"{value:.1e}"
