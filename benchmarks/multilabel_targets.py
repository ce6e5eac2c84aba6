"""The goals that losses of many labels are held to."""

from collections.abc import Iterator

from targets import Results, Target, judge, times

from lastlayer.bench.multilabel.cases import CPU_SHAPES, CUDA_SHAPES
from lastlayer.bench.multilabel.methods import MAIN
from lastlayer.bench.multilabel.record import MultilabelRecord
from lastlayer.bench.multilabel.truth import DENSE_ZLPR, LINEAR_ZLPR
from lastlayer.bench.table import gigabytes, milliseconds, percent

MOST_MS, MOST_BYTES = 12.0, 1.0e9
FRACTION_OF_COPY = 0.7
CPU_MEMORY = 0.1

_ZLPR = MAIN[LINEAR_ZLPR]


def multilabel_targets(results: Results[MultilabelRecord]) -> list[Target]:
    """Every goal for this kind of device."""
    if results.last.device_type == "cpu":
        return [*_cpu_targets(results)]
    return [*_cuda_targets(results)]


def _find(
    results: Results[MultilabelRecord],
    section: str,
    shape: tuple[int, ...],
    method: str,
    *,
    source: str = "lastlayer",
    direction: str = "forward+backward",
) -> MultilabelRecord | None:
    """The one record of a method in a case."""
    for r in results.of(section, direction):
        if (r.shape, r.method, r.source) == (shape, method, source):
            return r
    return None


def _where(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _cuda_targets(results: Results[MultilabelRecord]) -> Iterator[Target]:
    for shape in CUDA_SHAPES[LINEAR_ZLPR]:
        found, where = [_find(results, LINEAR_ZLPR, shape, _ZLPR)], _where(shape)
        yield judge(
            f"{_ZLPR}: at most {MOST_MS:g} ms",
            where,
            found,
            lambda r: r.median_ms,
            lambda value: value <= MOST_MS,
            lambda value: f"{milliseconds(value)} ms",
        )
        yield judge(
            f"{_ZLPR}: at most {MOST_BYTES / 1e9:g} GB beyond inputs and gradients",
            where,
            found,
            lambda r: r.peak_bytes,
            lambda value: value <= MOST_BYTES,
            lambda value: f"{gigabytes(round(value))} GB",
        )
    for shape in CUDA_SHAPES[DENSE_ZLPR]:
        yield judge(
            f"{MAIN[DENSE_ZLPR]}: at least {percent(FRACTION_OF_COPY)} of copy bandwidth forward",
            _where(shape),
            [_find(results, DENSE_ZLPR, shape, MAIN[DENSE_ZLPR], direction="forward")],
            lambda r: r.fraction_of_copy,
            lambda value: value >= FRACTION_OF_COPY,
            percent,
        )


def _cpu_targets(results: Results[MultilabelRecord]) -> Iterator[Target]:
    for shape in CPU_SHAPES[LINEAR_ZLPR]:
        found, where = [_find(results, LINEAR_ZLPR, shape, _ZLPR)], _where(shape)
        eager = _find(results, LINEAR_ZLPR, shape, "eager", source="torch")

        def of_eager(
            record: MultilabelRecord, eager: MultilabelRecord | None = eager
        ) -> float | None:
            if eager is None or not eager.peak_bytes or record.peak_bytes is None:
                return None
            return record.peak_bytes / eager.peak_bytes

        yield judge(
            f"{_ZLPR}: no slower than torch with all scores stored",
            where,
            found,
            lambda r: r.ratio_to_baseline,
            lambda value: value <= 1,
            times,
        )
        yield judge(
            f"{_ZLPR}: at most {percent(CPU_MEMORY)} of that one's memory",
            where,
            found,
            of_eager,
            lambda value: value <= CPU_MEMORY,
            lambda value: f"{100 * value:.1f}%",
        )
