"""The goals that the maps are held to."""

from collections.abc import Iterator

from targets import Results, Target, judge, times

from lastlayer.bench.maps.cases import CPU_SHAPES, CUDA_SHAPES, MAX_SUPPORT, SCALES
from lastlayer.bench.maps.record import MapRecord
from lastlayer.bench.maps.verify import SUM_TOLERANCE
from lastlayer.bench.table import small

_METHODS = ("sparsemax", "entmax 1.5")
_CUDA_FRACTIONS = {"float32": 0.80, "bfloat16": 0.65}
_SUM_LIMITS = {str(dtype).removeprefix("torch."): limit for dtype, limit in SUM_TOLERANCE.items()}
_ALL_SCALES = f"scales {SCALES[0]:g} to {SCALES[-1]:g}"


def map_targets(results: Results[MapRecord]) -> list[Target]:
    """Every goal for this kind of device."""
    if results.last.device_type == "cpu":
        return [*_cpu_targets(results)]
    return [
        *_bandwidth_targets(results),
        *_backward_targets(results),
        *_support_targets(results),
        *_scale_targets(results),
    ]


def _find(
    results: Results[MapRecord],
    method: str,
    shape: tuple[int, int],
    dtype: str,
    *,
    source: str = "lastlayer",
    section: str = "shapes",
    direction: str = "forward",
    scale: float = 2.0,
) -> MapRecord | None:
    """The one record of a method on a shape."""
    wanted = (method, source, shape, dtype, scale)
    for r in results.of(section, direction):
        if (r.method, r.source, r.shape, r.dtype, r.scale) == wanted:
            return r
    return None


def _where(shape: tuple[int, int], dtype: str) -> str:
    return f"{shape[0]}×{shape[1]} {dtype}"


def _bandwidth_targets(results: Results[MapRecord]) -> Iterator[Target]:
    for method in _METHODS:
        for dtype, fraction in _CUDA_FRACTIONS.items():
            for shape in CUDA_SHAPES:
                yield judge(
                    f"{method} forward: at least {fraction:.0%} of copy bandwidth",
                    _where(shape, dtype),
                    [_find(results, method, shape, dtype)],
                    lambda record: record.fraction_of_copy,
                    lambda value, least=fraction: value >= least,
                    _percent,
                )


def _backward_targets(results: Results[MapRecord]) -> Iterator[Target]:
    for method in _METHODS:
        for dtype in _CUDA_FRACTIONS:
            for shape in CUDA_SHAPES:
                yield judge(
                    f"{method} forward + backward: faster than torch.softmax",
                    _where(shape, dtype),
                    [_find(results, method, shape, dtype, direction="forward+backward")],
                    lambda record: record.ratio_to_softmax,
                    lambda value: value < 1,
                    times,
                )


def _support_targets(results: Results[MapRecord]) -> Iterator[Target]:
    shape, method = CUDA_SHAPES[-1], f"entmax_support 1.5, {MAX_SUPPORT}"
    for dtype in _CUDA_FRACTIONS:
        yield judge(
            "entmax_support: less than 70% of the time of the dense forward",
            _where(shape, dtype),
            [_find(results, method, shape, dtype)],
            lambda record: record.ratio_to_ours,
            lambda value: value < 0.70,
            _percent,
        )


def _scale_targets(results: Results[MapRecord]) -> Iterator[Target]:
    for dtype in _CUDA_FRACTIONS:
        for shape in CUDA_SHAPES:

            def at_all_scales(
                method: str,
                source: str = "lastlayer",
                shape: tuple[int, int] = shape,
                dtype: str = dtype,
            ) -> list[MapRecord | None]:
                return [
                    _find(
                        results, method, shape, dtype, source=source, section="scales", scale=scale
                    )
                    for scale in SCALES
                ]

            for method in _METHODS:
                yield judge(
                    f"{method}, {_ALL_SCALES}: rows sum to 1 within {_SUM_LIMITS[dtype]:g}",
                    _where(shape, dtype),
                    at_all_scales(method),
                    lambda record: record.row_sum_error,
                    lambda value, most=_SUM_LIMITS[dtype]: value <= most,
                    small,
                )
            yield judge(
                f"sparsemax, {_ALL_SCALES}: never slower than AdaSplash's triton_sparsemax",
                _where(shape, dtype),
                at_all_scales("triton_sparsemax", "adasplash"),
                _our_time_over_this,
                lambda value: value <= 1,
                times,
            )


def _cpu_targets(results: Results[MapRecord]) -> Iterator[Target]:
    dtype = "float32"
    slowest = {"sparsemax": 1.5, "entmax 1.5": 2.5}
    peers = {"sparsemax": "sparsemax", "entmax 1.5": "entmax15"}
    for method in _METHODS:
        for shape in CPU_SHAPES:
            yield judge(
                f"{method} forward: within {slowest[method]:g} times torch.softmax's time",
                _where(shape, dtype),
                [_find(results, method, shape, dtype)],
                lambda record: record.ratio_to_softmax,
                lambda value, most=slowest[method]: value <= most,
                times,
            )
        for shape in CPU_SHAPES:
            yield judge(
                f"{method} forward: at least 10 times faster than the entmax package",
                _where(shape, dtype),
                [_find(results, peers[method], shape, dtype, source="entmax")],
                lambda record: record.ratio_to_ours,
                lambda value: value >= 10,
                times,
            )
        for shape in CPU_SHAPES:
            yield judge(
                f"{method} forward + backward: within 2 times torch.softmax's time",
                _where(shape, dtype),
                [_find(results, method, shape, dtype, direction="forward+backward")],
                lambda record: record.ratio_to_softmax,
                lambda value: value <= 2,
                times,
            )


def _our_time_over_this(peer: MapRecord) -> float | None:
    return None if peer.ratio_to_ours is None else 1 / peer.ratio_to_ours


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"
