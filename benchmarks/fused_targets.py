"""The goals that the fused losses are held to."""

from collections.abc import Iterator

from targets import Results, Target, judge, times

from lastlayer.bench.fused import methods
from lastlayer.bench.fused.cases import CPU_SHAPES, CUDA_SHAPES, KINDS, LARGE, SMALL, SPARSE
from lastlayer.bench.fused.record import FusedRecord
from lastlayer.bench.fused.scores import FLAT, TRAINED
from lastlayer.bench.table import gigabytes, percent

Shape = tuple[int, int, int]

SLOWEST, SLOWEST_LOW = 1.03, 1.25
MOST_BYTES, MOST_LOW_BYTES, MOST_SMALL_BYTES = 1.1e9, 0.3e9, 0.5e9
FASTER = 1.5
SLOWEST_SPARSE = 1.3
LOSS_ERROR, WEIGHT_ERROR, FLOAT32_WEIGHT_ERROR = 1e-5, 4e-3, 1e-5
CPU_MEMORY = 0.1

_MAIN, _LOW, _FLOAT32 = (m.name for m in (methods.MAIN, methods.LOW, methods.FLOAT32_SUM))


def fused_targets(results: Results[FusedRecord]) -> list[Target]:
    """Every goal for this kind of device."""
    if results.last.device_type == "cpu":
        return [*_cpu_targets(results)]
    return [*_large_targets(results), *_small_targets(results), *_sparse_targets(results)]


def _find(
    results: Results[FusedRecord],
    section: str,
    shape: Shape,
    method: str,
    *,
    source: str = "lastlayer",
    scores: str = FLAT.name,
) -> FusedRecord | None:
    """The one record of a method in a case."""
    wanted = (shape, scores, method, source)
    for r in results.of(section, "forward+backward"):
        if (r.shape, r.scores, r.method, r.source) == wanted:
            return r
    return None


def _where(shape: Shape) -> str:
    return "×".join(map(str, shape))


def _memory_target(
    name: str, found: FusedRecord | None, most: float, where: str, *, below: bool = False
) -> Target:
    words = "less than" if below else "at most"
    return judge(
        f"{name}: {words} {most / 1e9:g} GB beyond inputs and gradients",
        where,
        [found],
        lambda r: r.peak_bytes,
        lambda value: value < most if below else value <= most,
        lambda value: f"{gigabytes(round(value))} GB",
    )


def _time_target(
    name: str, found: FusedRecord | None, most: float, than: str, where: str
) -> Target:
    words = f"no slower than {than}" if most == 1 else f"at most {most:g} times {than}'s time"
    return judge(
        f"{name}: {words}",
        where,
        [found],
        lambda r: r.ratio_to_baseline,
        lambda value: value <= most,
        times,
    )


def _error_targets(
    name: str,
    found: list[FusedRecord | None],
    where: str,
    *,
    weight: float = WEIGHT_ERROR,
    loss: float | None = LOSS_ERROR,
) -> Iterator[Target]:
    yield judge(
        f"{name}: gradient of the weight within {weight:g} of float64",
        where,
        found,
        lambda r: r.weight_error,
        lambda value: value <= weight,
        _two_digits,
    )
    if loss is not None:
        yield judge(
            f"{name}: loss within {loss:g} of float64",
            where,
            found,
            lambda r: r.loss_error,
            lambda value: value <= loss,
            _two_digits,
        )


def _large_targets(results: Results[FusedRecord]) -> Iterator[Target]:
    for shape in CUDA_SHAPES[LARGE]:
        main, low, wide = (_find(results, LARGE, shape, m) for m in (_MAIN, _LOW, _FLOAT32))
        where = _where(shape)
        yield _time_target(_MAIN, main, SLOWEST, "torch.compile", where)
        yield _memory_target(_MAIN, main, MOST_BYTES, where)
        yield _time_target(_LOW, low, SLOWEST_LOW, "torch.compile", where)
        yield _memory_target(_LOW, low, MOST_LOW_BYTES, where)
        yield from _error_targets(_MAIN, [main], where)
        yield from _error_targets(_LOW, [low], where)
        yield from _error_targets(_FLOAT32, [wide], where, weight=FLOAT32_WEIGHT_ERROR, loss=None)


def _small_targets(results: Results[FusedRecord]) -> Iterator[Target]:
    others = {
        "Cut Cross-Entropy": methods.CCE,
        f"torch.compile on chunks of {methods.CHUNK_ROWS} rows": methods.ON_CHUNKS,
    }
    for shape in CUDA_SHAPES[SMALL]:
        main, where = _find(results, SMALL, shape, _MAIN), _where(shape)
        for name, method in others.items():
            yield judge(
                f"{_MAIN}: at least {FASTER:g} times faster than {name}",
                where,
                [_find(results, SMALL, shape, method.name, source=method.source)],
                lambda r: r.ratio_to_ours,
                lambda value: value >= FASTER,
                times,
            )
        yield _memory_target(_MAIN, main, MOST_SMALL_BYTES, where, below=True)
        yield from _error_targets(_MAIN, [main], where)


def _sparse_targets(results: Results[FusedRecord]) -> Iterator[Target]:
    for shape in CUDA_SHAPES[SPARSE]:
        for computes in ("sparsemax", "entmax 1.5"):
            for kind in KINDS:
                yield _time_target(
                    computes,
                    _find(results, SPARSE, shape, computes, scores=kind.name),
                    1 if kind is TRAINED else SLOWEST_SPARSE,
                    _MAIN,
                    f"{_where(shape)}, {kind.name} scores",
                )
        for computes in (_MAIN, *methods.SPARSE):
            found = [_find(results, SPARSE, shape, computes, scores=kind.name) for kind in KINDS]
            yield from _error_targets(computes, found, f"{_where(shape)}, all kinds of scores")


def _cpu_targets(results: Results[FusedRecord]) -> Iterator[Target]:
    for shape in CPU_SHAPES[LARGE]:
        main, where = _find(results, LARGE, shape, _MAIN), _where(shape)
        eager = _find(results, LARGE, shape, methods.EAGER.name, source="torch")
        yield _time_target(_MAIN, main, 1, "linear + cross_entropy", where)

        def of_eager(record: FusedRecord, eager: FusedRecord | None = eager) -> float | None:
            if eager is None or not eager.peak_bytes or record.peak_bytes is None:
                return None
            return record.peak_bytes / eager.peak_bytes

        yield judge(
            f"{_MAIN}: at most {percent(CPU_MEMORY)} of the memory of linear + cross_entropy",
            where,
            [main],
            of_eager,
            lambda value: value <= CPU_MEMORY,
            lambda value: f"{100 * value:.1f}%",
        )
        yield from _error_targets(_MAIN, [main], where)


def _two_digits(value: float) -> str:
    return f"{value:.1e}"
