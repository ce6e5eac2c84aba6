"""The goals that the maps are held to, and whether the records meet them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lastlayer.bench.map_cases import CPU_SHAPES, CUDA_SHAPES, MAX_SUPPORT, SCALES
from lastlayer.bench.record import Record
from lastlayer.bench.table import ratio, small
from lastlayer.bench.verify import SUM_TOLERANCE

MET, MISSED, NOT_MEASURED = "met", "**missed**", "not measured"

_METHODS = ("sparsemax", "entmax 1.5")
_CUDA_FRACTIONS = {"float32": 0.80, "bfloat16": 0.65}
_SUM_LIMITS = {str(dtype).removeprefix("torch."): limit for dtype, limit in SUM_TOLERANCE.items()}
_ALL_SCALES = f"scales {SCALES[0]:g} to {SCALES[-1]:g}"


def _part(record: Record) -> tuple[str, str, str]:
    return record.section, record.dtype, record.direction


class Results:
    """The records of one device, of each section, dtype and direction from the newest full run."""

    def __init__(self, records: Iterable[Record]) -> None:
        by_age = sorted(records, key=lambda record: record.date)
        newest = {_part(record): record.run for record in by_age}
        self.records = [record for record in by_age if record.run == newest[_part(record)]]
        self.last = self.records[-1]

    def of(self, section: str, direction: str = "forward") -> list[Record]:
        """The records of a section in one direction."""
        return [r for r in self.records if (r.section, r.direction) == (section, direction)]

    def find(
        self,
        method: str,
        shape: tuple[int, int],
        dtype: str,
        *,
        source: str = "lastlayer",
        section: str = "shapes",
        direction: str = "forward",
        scale: float = 2.0,
    ) -> Record | None:
        """The one record of a method on a shape."""
        wanted = (method, source, shape, dtype, scale)
        for r in self.of(section, direction):
            if (r.method, r.source, r.shape, r.dtype, r.scale) == wanted:
                return r
        return None


@dataclass(frozen=True)
class Target:
    """A goal set before the measurement: in words, where, what came out, whether it is met."""

    goal: str
    where: str
    measured: str
    verdict: str


def targets(results: Results) -> list[Target]:
    """Every goal for this kind of device."""
    if results.last.device_type == "cpu":
        return [*_cpu_targets(results)]
    return [
        *_bandwidth_targets(results),
        *_backward_targets(results),
        *_support_targets(results),
        *_scale_targets(results),
    ]


def _judge(
    goal: str,
    shape: tuple[int, int],
    dtype: str,
    found: list[Record | None],
    value: Callable[[Record], float | None],
    is_met: Callable[[float], bool],
    show: Callable[[float], str],
) -> Target:
    """Hold the largest value of all records against a goal; all of them must be there."""
    where = f"{shape[0]}×{shape[1]} {dtype}"
    wrong = [r for r in found if r is not None and r.source == "lastlayer" and not r.verified]
    if wrong:
        return Target(goal, where, wrong[0].status, MISSED)
    values = [None if record is None else value(record) for record in found]
    known = [number for number in values if number is not None]
    if len(known) < len(values):
        return Target(goal, where, "·", NOT_MEASURED)
    return Target(goal, where, show(max(known)), MET if is_met(max(known)) else MISSED)


def _bandwidth_targets(results: Results) -> Iterator[Target]:
    for method in _METHODS:
        for dtype, fraction in _CUDA_FRACTIONS.items():
            for shape in CUDA_SHAPES:
                yield _judge(
                    f"{method} forward: at least {fraction:.0%} of copy bandwidth",
                    shape,
                    dtype,
                    [results.find(method, shape, dtype)],
                    lambda record: record.fraction_of_copy,
                    lambda value, least=fraction: value >= least,
                    _percent,
                )


def _backward_targets(results: Results) -> Iterator[Target]:
    for method in _METHODS:
        for dtype in _CUDA_FRACTIONS:
            for shape in CUDA_SHAPES:
                yield _judge(
                    f"{method} forward + backward: faster than torch.softmax",
                    shape,
                    dtype,
                    [results.find(method, shape, dtype, direction="forward+backward")],
                    lambda record: record.ratio_to_softmax,
                    lambda value: value < 1,
                    _times,
                )


def _support_targets(results: Results) -> Iterator[Target]:
    shape, method = CUDA_SHAPES[-1], f"entmax_support 1.5, {MAX_SUPPORT}"
    for dtype in _CUDA_FRACTIONS:
        yield _judge(
            "entmax_support: less than 70% of the time of the dense forward",
            shape,
            dtype,
            [results.find(method, shape, dtype)],
            lambda record: record.ratio_to_ours,
            lambda value: value < 0.70,
            _percent,
        )


def _scale_targets(results: Results) -> Iterator[Target]:
    for dtype in _CUDA_FRACTIONS:
        for shape in CUDA_SHAPES:

            def at_all_scales(
                method: str,
                source: str = "lastlayer",
                shape: tuple[int, int] = shape,
                dtype: str = dtype,
            ) -> list[Record | None]:
                return [
                    results.find(method, shape, dtype, source=source, section="scales", scale=scale)
                    for scale in SCALES
                ]

            for method in _METHODS:
                yield _judge(
                    f"{method}, {_ALL_SCALES}: rows sum to 1 within {_SUM_LIMITS[dtype]:g}",
                    shape,
                    dtype,
                    at_all_scales(method),
                    lambda record: record.row_sum_error,
                    lambda value, most=_SUM_LIMITS[dtype]: value <= most,
                    small,
                )
            yield _judge(
                f"sparsemax, {_ALL_SCALES}: never slower than AdaSplash's triton_sparsemax",
                shape,
                dtype,
                at_all_scales("triton_sparsemax", "adasplash"),
                _our_time_over_this,
                lambda value: value <= 1,
                _times,
            )


def _cpu_targets(results: Results) -> Iterator[Target]:
    dtype = "float32"
    slowest = {"sparsemax": 1.5, "entmax 1.5": 2.5}
    peers = {"sparsemax": "sparsemax", "entmax 1.5": "entmax15"}
    for method in _METHODS:
        for shape in CPU_SHAPES:
            yield _judge(
                f"{method} forward: within {slowest[method]:g} times torch.softmax's time",
                shape,
                dtype,
                [results.find(method, shape, dtype)],
                lambda record: record.ratio_to_softmax,
                lambda value, most=slowest[method]: value <= most,
                _times,
            )
        for shape in CPU_SHAPES:
            yield _judge(
                f"{method} forward: at least 10 times faster than the entmax package",
                shape,
                dtype,
                [results.find(peers[method], shape, dtype, source="entmax")],
                lambda record: record.ratio_to_ours,
                lambda value: value >= 10,
                _times,
            )
        for shape in CPU_SHAPES:
            yield _judge(
                f"{method} forward + backward: within 2 times torch.softmax's time",
                shape,
                dtype,
                [results.find(method, shape, dtype, direction="forward+backward")],
                lambda record: record.ratio_to_softmax,
                lambda value: value <= 2,
                _times,
            )


def _our_time_over_this(peer: Record) -> float | None:
    return None if peer.ratio_to_ours is None else 1 / peer.ratio_to_ours


def _times(value: float) -> str:
    return f"{ratio(value)}×"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"
