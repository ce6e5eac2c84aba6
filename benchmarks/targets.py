"""All targets as data: what each method is held to, and the ten figures that open the page."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks import contrastive, fused, heads, maps, multilabel, table
from benchmarks.driver import BACKWARD, FORWARD
from benchmarks.record import OURS, Record

CUDA, CPU = "cuda", "cpu"
MET, REPLAYED, MISSED, NOT_MEASURED = "met", "replayed only", "**missed**", "not measured"
EAGER_CLOCK, REPLAY_CLOCK = "median_ms", "replayed_ms"


class Measure(NamedTuple):
    """A number that a target holds: from a record, the records of its case, and which time."""

    words: str
    value: Callable[[Record, Sequence[Record], str], float | None]
    show: Callable[[float], str]
    is_time: bool = True


def _labelled(case: Sequence[Record], label: str) -> Record | None:
    return next((r for r in case if r.label == label), None)


def _ms(record: Record | None, clock: str) -> float | None:
    """Of replays where there are some and they are asked for."""
    if record is None:
        return None
    return record.replayed_ms if clock == REPLAY_CLOCK and record.replayed_ms else record.median_ms


def _times(label: str) -> Measure:
    def value(record: Record, case: Sequence[Record], clock: str) -> float | None:
        mine, other = _ms(record, clock), _ms(_labelled(case, label), clock)
        return mine / other if mine and other else None

    return Measure(f"the time of {label}", value, lambda v: f"{table.ratio(v)} ×")


def _memory_of(label: str) -> Measure:
    def value(record: Record, case: Sequence[Record], _: str) -> float | None:
        other = _labelled(case, label)
        if other is None or not other.peak_bytes or record.peak_bytes is None:
            return None
        return record.peak_bytes / other.peak_bytes

    return Measure(f"of the memory of {label}", value, lambda v: f"{100 * v:.1f}%", is_time=False)


def _error(*names: str) -> Measure:
    def value(record: Record, _: Sequence[Record], __: str) -> float | None:
        found = [record.errors.get(name) for name in names]
        known = [each for each in found if each is not None]
        return max(known) if len(known) == len(names) else None

    return Measure(f"error of {' and '.join(names)}", value, lambda v: f"{v:.1e}", is_time=False)


MEMORY = Measure("of memory", lambda r, _, __: r.peak_bytes, table.data_size, is_time=False)
TIME = Measure("per call", lambda r, _, c: _ms(r, c), lambda v: f"{table.milliseconds(v)} ms")
OF_COPY = Measure(
    "of copy bandwidth", lambda r, _, c: r.of_limit(_ms(r, c)), lambda v: f"{100 * v:.1f}%"
)


@dataclass(frozen=True)
class Select:
    """Which records are meant; None matches all."""

    family: str
    device_type: str
    section: str
    method: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    direction: str | None = None
    scores: str | None = None
    source: str | None = OURS

    def __call__(self, record: Record) -> bool:
        """Whether a record is one of them."""
        wanted = vars(self).items()
        return all(value is None or getattr(record, name) == value for name, value in wanted)


@dataclass(frozen=True)
class Target:
    """A limit that the worst of the selected records is held to."""

    which: Select
    measure: Measure
    limit: float
    at_least: bool = False

    @property
    def goal(self) -> str:
        """In words."""
        bound = "at least" if self.at_least else "at most"
        return f"{self.which.method}: {bound} {self.measure.show(self.limit)} {self.measure.words}"

    def judge(self, cases: Iterable[Sequence[Record]]) -> list[str]:
        """Goal, the worst case, what was measured there, the same replayed, and the verdict."""
        found = [(r, case) for case in cases for r in case if self.which(r)]
        wrong = [r for r, _ in found if r.is_ours and not r.verified]
        if wrong:
            return [self.goal, wrong[0].title, wrong[0].status, table.EMPTY, MISSED]
        sign = -1.0 if self.at_least else 1.0

        def worst(clock: str) -> tuple[float, Record] | None:
            values = ((self.measure.value(r, case, clock), r) for r, case in found)
            known = [(value, r) for value, r in values if value is not None]
            return max(known, key=lambda each: sign * each[0], default=None)

        eager = worst(EAGER_CLOCK)
        if eager is None:
            return [self.goal, self.which.section, table.EMPTY, table.EMPTY, NOT_MEASURED]
        replayed = worst(REPLAY_CLOCK) if self.measure.is_time else None
        if replayed == eager:
            replayed = None
        verdict = MET if self._holds(eager[0]) else MISSED
        if verdict == MISSED and replayed is not None and self._holds(replayed[0]):
            verdict = REPLAYED
        shown = table.EMPTY if replayed is None else self.measure.show(replayed[0])
        return [self.goal, eager[1].title, self.measure.show(eager[0]), shown, verdict]

    def _holds(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def _maps() -> list[Target]:
    sums = {"float32": 1e-6, "bfloat16": 4e-3}

    def on(device: str, method: str, section: str = "shapes", **where: Any) -> Select:
        return Select("maps", device, section, method, **where)

    made = []
    for method, peer, slowest in (("sparsemax", "sparsemax", 1.5), ("entmax 1.5", "entmax15", 2.5)):
        for dtype, least in (("float32", 0.80), ("bfloat16", 0.65)):
            forward = on(CUDA, method, dtype=dtype, direction=FORWARD)
            both = on(CUDA, method, dtype=dtype, direction=BACKWARD)
            made += [
                Target(forward, OF_COPY, least, at_least=True),
                Target(both, _times("torch softmax"), 1.0),
                Target(on(CUDA, method, "scales", dtype=dtype), _error("sums"), sums[dtype]),
            ]
        forward, both = (on(CPU, method, direction=way) for way in (FORWARD, BACKWARD))
        made += [
            Target(forward, _times("torch softmax"), slowest),
            Target(forward, _times(f"entmax {peer}"), 0.1),
            Target(both, _times("torch softmax"), 2.0),
        ]
    compact = on(CUDA, maps.SUPPORT, shape=maps.SHAPES[CUDA][-1])
    made.append(Target(compact, _times("lastlayer entmax 1.5"), 0.70))
    adasplash = _times("adasplash triton_sparsemax")
    made.append(Target(on(CUDA, "sparsemax", "scales"), adasplash, 1.0))
    return made


def _fused() -> list[Target]:
    main, low, wide = (f"cross_entropy{way}" for way in ("", ", low memory", ", float32 sum"))

    def on(device: str, section: str, method: str, **where: Any) -> Select:
        return Select("fused", device, section, method, **where)

    def exact(which: Select) -> list[Target]:
        return [Target(which, _error("weight"), 4e-3), Target(which, _error("loss"), 1e-5)]

    compiled, chunks = "torch compiled", f"torch compiled, {fused.CHUNK_ROWS}-row chunks"
    made = []
    for method, slowest, most in ((main, 1.03, 1.1e9), (low, 1.25, 0.3e9)):
        which = on(CUDA, fused.LARGE, method)
        made += [Target(which, _times(compiled), slowest), Target(which, MEMORY, most)]
        made += exact(which)
    made.append(Target(on(CUDA, fused.LARGE, wide), _error("weight"), 1e-5))
    small = on(CUDA, fused.SMALL, main)
    made += [Target(small, _times(o), 1 / 1.5) for o in ("cut-cross-entropy linear CE", chunks)]
    made += [Target(small, MEMORY, 0.5e9), *exact(small)]
    for method in ("sparsemax", "entmax 1.5"):
        for kind in fused.KINDS:
            which = on(CUDA, fused.SPARSE, method, scores=kind)
            most = 1.0 if kind == fused.TRAINED else 1.3
            made.append(Target(which, _times("lastlayer cross_entropy"), most))
    for method in (main, *fused.SPARSE_LOSSES):
        made += exact(on(CUDA, fused.SPARSE, method))
    cpu = on(CPU, fused.LARGE, main)
    made += [Target(cpu, _times("torch eager"), 1.0), Target(cpu, _memory_of("torch eager"), 0.1)]
    return made + exact(cpu)


def _multilabel() -> list[Target]:
    linear, dense = (multilabel.MAIN[s] for s in (multilabel.LINEAR_ZLPR, multilabel.DENSE_ZLPR))
    cuda, cpu = (Select("multilabel", d, multilabel.LINEAR_ZLPR, linear) for d in (CUDA, CPU))
    forward = Select("multilabel", CUDA, multilabel.DENSE_ZLPR, dense, direction=FORWARD)
    return [
        Target(cuda, TIME, 12.0),
        Target(cuda, MEMORY, 1e9),
        Target(forward, OF_COPY, 0.7, at_least=True),
        Target(cpu, _times("torch eager"), 1.0),
        Target(cpu, _memory_of("torch eager"), 0.1),
    ]


def _contrastive() -> list[Target]:
    def on(device: str, **where: Any) -> Select:
        return Select("contrastive", device, contrastive.SYMMETRIC, contrastive.MAIN, **where)

    middle, largest = on(CUDA, shape=(32768, 768)), on(CUDA, shape=(131072, 768))
    return [
        Target(middle, _times("torch compiled"), 1.0),
        Target(middle, MEMORY, 0.4e9),
        Target(largest, MEMORY, 4e9),
        Target(on(CUDA), _error("loss"), 1e-4),
        Target(on(CUDA), _error("query", "key"), 4e-3),
        Target(on(CPU), _times("torch eager"), 1.0),
    ]


def _heads() -> list[Target]:
    million = heads.SIZES[CUDA, False].steps[-1]
    words = heads.SIZES[CPU, False].steps[0]

    def on(device: str, section: str, method: str, **where: Any) -> Select:
        return Select("heads", device, section, method, **where)

    linear, sampled = f"torch {heads.LINEAR}", on(CUDA, heads.STEP, heads.SAMPLED, shape=million)
    faster = {heads.HUFFMAN: 60, heads.ADAPTIVE: 12, heads.ADAPTIVE_50: 12, heads.SAMPLED: 40}
    most = {
        heads.HUFFMAN: 0.6, heads.ADAPTIVE: 6.0, heads.ADAPTIVE_25: 6.0, heads.SAMPLED: 0.8,
        heads.SAMPLED + heads.UPDATED: 1.5,
    }  # fmt: skip
    made = [Target(on(CUDA, heads.STEP, n, shape=million), TIME, ms) for n, ms in most.items()]
    made += [
        Target(sampled, MEMORY, 250e6),
        Target(sampled, _times(f"lastlayer {heads.FULL}"), 1 / 40),
        Target(on(CUDA, heads.DRAWS, heads.ALIAS), TIME, 0.02),
    ]
    dense = _times(f"torch {heads.DENSE}")
    for spread in heads.SPREADS:
        for kind in (heads.TREE_TOP, heads.ADAPTIVE_TOP):
            made.append(Target(on(CUDA, heads.TOP, heads.top_name(kind, spread)), dense, 1.0))
        tree = on(CPU, heads.TOP, heads.top_name(heads.TREE_TOP, spread))
        made.append(Target(tree, dense, 1 / 50))
    made += [
        Target(on(CPU, heads.STEP, name, shape=words), _times(linear), 1 / times)
        for name, times in faster.items()
    ]
    alias, tree = on(CPU, heads.DRAWS, heads.ALIAS), on(CPU, heads.TREES, "huffman")
    return [*made, Target(alias, _times("torch multinomial"), 1 / 20), Target(tree, TIME, 2000.0)]


TARGETS = [*_fused(), *_multilabel(), *_contrastive(), *_heads(), *_maps()]


class Figure(NamedTuple):
    """One of the figures that open the page.

    ``beside`` is the label of what it is compared with; without one, the fastest method of another
    package that computes the same function.
    """

    what: str
    which: Select
    beside: str = ""


_MILLION, _WORDS = heads.SIZES[CUDA, False].steps[-1], heads.SIZES[CPU, False].steps[0]
FIGURES = (
    Figure("`linear_cross_entropy`, wide hidden states",
           Select("fused", CUDA, fused.LARGE, "cross_entropy", (8192, 4096, 128256))),
    Figure("`linear_cross_entropy`, a million classes",
           Select("fused", CUDA, fused.SMALL, "cross_entropy", (16384, 128, 1_000_000))),
    Figure("`linear_entmax_loss` (α = 1.5) beside our cross entropy",
           Select("fused", CUDA, fused.SPARSE, "entmax 1.5", scores=fused.TRAINED),
           "lastlayer cross_entropy"),
    Figure("`linear_zlpr_loss`, a million labels",
           Select("multilabel", CUDA, multilabel.LINEAR_ZLPR, "linear_zlpr_loss")),
    Figure("`info_nce`, symmetric, 32,768 pairs",
           Select("contrastive", CUDA, contrastive.SYMMETRIC, contrastive.MAIN, (32768, 768))),
    Figure("`SampledSoftmax` step, a million classes",
           Select("heads", CUDA, heads.STEP, heads.SAMPLED, _MILLION), f"torch {heads.LINEAR}"),
    Figure("`HierarchicalSoftmax` step (Huffman), a million classes",
           Select("heads", CUDA, heads.STEP, heads.HUFFMAN, _MILLION)),
    Figure("`AdaptiveSoftmax` step, 50,000 classes",
           Select("heads", CUDA, heads.STEP, heads.ADAPTIVE_25, (8192, 512, 50_000))),
    Figure("`sparsemax` forward and backward, short rows",
           Select("maps", CUDA, "shapes", "sparsemax", (65536, 1024), "bfloat16", BACKWARD),
           "torch softmax"),
    Figure("`HierarchicalSoftmax` step (Huffman) on a CPU, 50,000 classes",
           Select("heads", CPU, heads.STEP, heads.HUFFMAN, _WORDS), f"torch {heads.LINEAR}"),
)  # fmt: skip
