"""All targets as data, and the rows of the table at the top of the page."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks import contrastive, fused, heads, llama, maps, multilabel, plain, table
from benchmarks.driver import BACKWARD, FORWARD
from benchmarks.record import OURS, Record

CUDA, CPU = "cuda", "cpu"
MET, REPLAYED, MISSED, NOT_MEASURED = "met", "replayed only", "**missed**", "not measured"


class Measure(NamedTuple):
    """The quantity that a target limits.

    ``value`` computes it from a record, the records of its case, and whether to use replayed times,
    which are used only where there are any.
    """

    words: str
    value: Callable[[Record, Sequence[Record], bool], float | None]
    show: Callable[[float], str]
    is_time: bool = True
    at_least: bool = False


def _labelled(case: Sequence[Record], label: str) -> Record | None:
    return next((r for r in case if r.label == label), None)


def _ms(record: Record | None, replayed: bool) -> float | None:
    if record is None:
        return None
    return record.replayed_ms if replayed and record.replayed_ms else record.median_ms


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _times(label: str) -> Measure:
    def value(record: Record, case: Sequence[Record], replayed: bool) -> float | None:
        mine, other = _ms(record, replayed), _ms(_labelled(case, label), replayed)
        return mine / other if mine and other else None

    return Measure(f"the time of {label}", value, lambda v: f"{table.ratio(v)} ×")


def _memory_of(label: str) -> Measure:
    def value(record: Record, case: Sequence[Record], _: bool) -> float | None:
        other = _labelled(case, label)
        if other is None or not other.peak_bytes or record.peak_bytes is None:
            return None
        return record.peak_bytes / other.peak_bytes

    return Measure(f"of the memory of {label}", value, _percent, is_time=False)


def _memory_above(label: str) -> Measure:
    def value(record: Record, case: Sequence[Record], _: bool) -> float | None:
        other = _labelled(case, label)
        if other is None or other.peak_bytes is None or record.peak_bytes is None:
            return None
        return record.peak_bytes - other.peak_bytes

    return Measure(f"above the memory of {label}", value, table.data_size, is_time=False)


def _error(*names: str) -> Measure:
    def value(record: Record, _: Sequence[Record], __: bool) -> float | None:
        found = [record.errors.get(name) for name in names]
        return None if None in found else max(each for each in found if each is not None)

    return Measure(f"error of {' and '.join(names)}", value, lambda v: f"{v:.1e}", is_time=False)


MEMORY = Measure("of memory", lambda r, *_: r.peak_bytes, table.data_size, is_time=False)
TIME = Measure("per call", lambda r, _, c: _ms(r, c), lambda v: f"{table.milliseconds(v)} ms")
OF_COPY = Measure(
    "of copy bandwidth", lambda r, _, c: r.of_limit(_ms(r, c)), _percent, at_least=True
)


@dataclass(frozen=True)
class Select:
    """Selects records; None matches all."""

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
        """Whether a record is selected."""
        wanted = vars(self).items()
        return all(value is None or getattr(record, name) == value for name, value in wanted)


@dataclass(frozen=True)
class Target:
    """A limit for the worst of the selected records."""

    which: Select
    measure: Measure
    limit: float

    @property
    def goal(self) -> str:
        """The target in words."""
        bound = "at least" if self.measure.at_least else "at most"
        return f"{self.which.method}: {bound} {self.measure.show(self.limit)} {self.measure.words}"

    def judge(self, cases: Iterable[Sequence[Record]]) -> list[str]:
        """The target, the worst case, its measured and its replayed value, and the verdict."""
        found = [(r, case) for case in cases for r in case if self.which(r)]
        wrong = [r for r, _ in found if r.is_ours and not r.verified]
        if wrong:
            return [self.goal, wrong[0].title, wrong[0].status, table.EMPTY, MISSED]
        sign = -1.0 if self.measure.at_least else 1.0

        def worst(replayed: bool) -> tuple[float, Record] | None:
            values = ((self.measure.value(r, case, replayed), r) for r, case in found)
            known = [(value, r) for value, r in values if value is not None]
            return max(known, key=lambda each: sign * each[0], default=None)

        eager, replayed = worst(False), worst(self.measure.is_time)
        if eager is None:
            return [self.goal, self.which.section, table.EMPTY, table.EMPTY, NOT_MEASURED]
        verdict, shown = MISSED, table.EMPTY
        if replayed is not None and replayed != eager:
            shown = self.measure.show(replayed[0])
            if sign * replayed[0] <= sign * self.limit:
                verdict = REPLAYED
        if sign * eager[0] <= sign * self.limit:
            verdict = MET
        return [self.goal, eager[1].title, self.measure.show(eager[0]), shown, verdict]


Held = Callable[..., list[Target]]


def _of(family: str) -> Held:
    """A function that creates targets of a family, from selected records and their limits."""

    def held(
        device: str, section: str, method: str, limits: dict[Measure, float], **where: Any
    ) -> list[Target]:
        which = Select(family, device, section, method, **where)
        return [Target(which, measure, limit) for measure, limit in limits.items()]

    return held


def _maps(held: Held) -> list[Target]:
    made, softmax = [], _times("torch softmax")
    for method, peer, slowest in (("sparsemax", "sparsemax", 1.5), ("entmax 1.5", "entmax15", 2.5)):
        for dtype, least, sums in (("float32", 0.80, 1e-6), ("bfloat16", 0.65, 4e-3)):
            same = {"dtype": dtype}
            made += held(CUDA, "shapes", method, {OF_COPY: least}, direction=FORWARD, **same)
            made += held(CUDA, "shapes", method, {softmax: 1.0}, direction=BACKWARD, **same)
            made += held(CUDA, "scales", method, {_error("sums"): sums}, **same)
        limits = {softmax: slowest, _times(f"entmax {peer}"): 0.1}
        made += held(CPU, "shapes", method, limits, direction=FORWARD)
        made += held(CPU, "shapes", method, {softmax: 2.0}, direction=BACKWARD)
    ours, widest = _times("lastlayer entmax 1.5"), maps.SHAPES[CUDA][-1]
    made += held(CUDA, "shapes", maps.SUPPORT, {ours: 0.70}, shape=widest)
    return made + held(CUDA, "scales", "sparsemax", {_times("adasplash triton_sparsemax"): 1.0})


def _fused(held: Held) -> list[Target]:
    main, low, wide = (f"cross_entropy{way}" for way in ("", ", low memory", ", float32 sum"))
    exact = {_error("weight"): 4e-3, _error("loss"): 1e-5}
    compiled, eager = _times("torch compiled"), _times("torch eager")
    chunks = _times(f"torch compiled, {fused.CHUNK_ROWS}-row chunks")
    cce = _times("cut-cross-entropy linear CE")
    made = [
        *held(CUDA, fused.LARGE, main, {compiled: 1.03, MEMORY: 1.1e9, **exact}),
        *held(CUDA, fused.LARGE, low, {compiled: 1.25, MEMORY: 0.3e9, **exact}),
        *held(CUDA, fused.LARGE, wide, {_error("weight"): 1e-5}),
        *held(CUDA, fused.SMALL, main, {cce: 1 / 1.5, chunks: 1 / 1.5, MEMORY: 0.5e9, **exact}),
    ]
    for method in ("sparsemax", "entmax 1.5"):
        for kind in fused.KINDS:
            most = {_times("lastlayer cross_entropy"): 1.0 if kind == fused.TRAINED else 1.3}
            made += held(CUDA, fused.SPARSE, method, most, scores=kind)
    for method in (main, *fused.LOSSES):
        made += held(CUDA, fused.SPARSE, method, exact)
    limits = {eager: 1.0, _memory_of("torch eager"): 0.1, **exact}
    return made + held(CPU, fused.LARGE, main, limits)


def _multilabel(held: Held) -> list[Target]:
    linear, dense = multilabel.LINEAR_ZLPR, multilabel.DENSE_ZLPR
    main, on_scores = multilabel.MAIN[linear], multilabel.MAIN[dense]
    beside = {_times("torch eager"): 1.0, _memory_of("torch eager"): 0.1}
    return [
        *held(CUDA, linear, main, {TIME: 12.0, MEMORY: 1e9}),
        *held(CUDA, dense, on_scores, {OF_COPY: 0.7}, direction=FORWARD),
        *held(CPU, linear, main, beside),
    ]


def _contrastive(held: Held) -> list[Target]:
    where = contrastive.SYMMETRIC, contrastive.MAIN
    compiled, eager = _times("torch compiled"), _times("torch eager")
    exact = {_error("loss"): 1e-4, _error("query", "key"): 4e-3}
    return [
        *held(CUDA, *where, {compiled: 1.0, MEMORY: 0.4e9}, shape=(32768, 768)),
        *held(CUDA, *where, {MEMORY: 4e9}, shape=(131072, 768)),
        *held(CUDA, *where, exact),
        *held(CPU, *where, {eager: 1.0}),
    ]


_STEPS, _WORDS = heads.SIZES[CUDA, False].steps, heads.SIZES[CPU, False].steps[0]
_MANY, _MILLION = _STEPS[0], _STEPS[-1]


def _heads(held: Held) -> list[Target]:
    most = {
        heads.HUFFMAN: 0.6, heads.ADAPTIVE: 3.0, heads.ADAPTIVE_25: 3.0, heads.SAMPLED: 0.8,
        heads.SAMPLED + heads.UPDATED: 1.5, heads.FEW_NCE: 1.0, heads.FEW_NEGATIVE: 0.8,
        heads.FULL: 50.0,
    }  # fmt: skip
    made = []
    for method, ms in most.items():
        made += held(CUDA, heads.STEP, method, {TIME: ms}, shape=_MILLION)
    made += held(CUDA, heads.STEP, heads.ADAPTIVE_25, {TIME: 1.5}, shape=_MANY)
    full = _times(f"lastlayer {heads.FULL}")
    for shape in _STEPS:
        made += held(CUDA, heads.STEP, heads.SLICES, {full: 0.4}, shape=shape)
    made += held(CUDA, heads.STEP, heads.SAMPLED, {MEMORY: 250e6, full: 1 / 40}, shape=_MILLION)
    for kind in (heads.FULL_TOP, heads.SAMPLED_TOP):
        name = heads.top_name(kind, heads.SPREADS[0])
        made += held(CUDA, heads.TOP, name, {TIME: 1.2, MEMORY: 0.1e9})
    made += held(CUDA, heads.DRAWS, heads.ALIAS, {TIME: 0.02})
    dense, linear = _times(f"torch {heads.DENSE}"), _times(f"torch {heads.LINEAR}")
    for spread in heads.SPREADS:
        tree, adaptive = (heads.top_name(k, spread) for k in (heads.TREE_TOP, heads.ADAPTIVE_TOP))
        made += held(CUDA, heads.TOP, tree, {dense: 1.0})
        made += held(CUDA, heads.TOP, adaptive, {dense: 1.0})
        made += held(CPU, heads.TOP, tree, {dense: 1 / 50})
    faster = {heads.HUFFMAN: 60, heads.ADAPTIVE: 12, heads.ADAPTIVE_50: 12, heads.SAMPLED: 40}
    for method, times in faster.items():
        made += held(CPU, heads.STEP, method, {linear: 1 / times}, shape=_WORDS)
    made += held(CPU, heads.DRAWS, heads.ALIAS, {_times("torch multinomial"): 1 / 20})
    return made + held(CPU, heads.TREES, "huffman", {TIME: 2000.0})


def _llama(held: Held) -> list[Target]:
    peers = f"liger-kernel {llama.LIGER_LOSS}", f"cut-cross-entropy {llama.CCE_LOSS}"
    limits = {_times(peer): 1.0 for peer in peers} | {_memory_above(peer): 0.3e9 for peer in peers}
    made = [
        target
        for section in llama.SECTIONS
        for target in held(CUDA, section, llama.SWAPPED, limits)
    ]
    for section, ms in zip(llama.GPT2_SECTIONS, (40.0, 33.0), strict=True):
        made += held(CUDA, section, llama.SWAPPED, {TIME: ms})
    return made


TARGETS = [
    target
    for made in (_fused, _multilabel, _contrastive, _heads, _maps, _llama)
    for target in made(_of(made.__name__.removeprefix("_")))
]


class Figure(NamedTuple):
    """A row of the table at the top of the page.

    ``beside`` is the label of the method that it is compared with; if empty, that is the fastest
    method of another package that computes the same function.
    """

    what: str
    which: Select
    beside: str = ""


def _plain(call: str, *shapes: tuple[int, ...], torch_code: str) -> Iterator[Figure]:
    """Plain calls compared with torch's code, on a GPU."""
    name, _, variant = call.partition(", ")
    for shape in shapes:
        size = "×".join(f"{n:,}" for n in shape)
        what = f"`{name}`, {variant}, {size}" if variant else f"`{name}`, {size}"
        yield Figure(what, Select("plain", CUDA, call, call, shape), f"torch {torch_code}")


_LOSS, _LABELS, _LAYER = "cross_entropy, compiled", "BCE, compiled", "linear + cross_entropy"
_ODD = ((8192, 4096, 128259), (8192, 2048, 32003), (4096, 768, 50257))
_LARGE_SCORES, _SMALL_SCORES = (4096, 131072), (32, 100)
FIGURES = (
    Figure("`linear_cross_entropy`, wide hidden states",
           Select("fused", CUDA, fused.LARGE, "cross_entropy", (8192, 4096, 128256))),
    Figure("`linear_cross_entropy`, a million classes",
           Select("fused", CUDA, fused.SMALL, "cross_entropy", (16384, 128, 1_000_000))),
    Figure("`linear_entmax_loss` (α = 1.5) vs our cross entropy",
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
    *_plain(plain.LAYER, *_ODD, torch_code=f"{_LAYER}, compiled"),
    *(
        figure
        for call in ("sparsemax_loss", "entmax_loss, alpha 1.5", "entmax_loss, alpha 1.3")
        for figure in _plain(call, _LARGE_SCORES, torch_code=_LOSS)
    ),
    *_plain("bce_loss", _LARGE_SCORES, torch_code=_LABELS),
    *_plain("asymmetric_loss", _LARGE_SCORES, torch_code=_LABELS),
    *_plain("sparsemax", _SMALL_SCORES, torch_code="softmax"),
    *_plain("sparsemax_loss", _SMALL_SCORES, torch_code="cross_entropy"),
)  # fmt: skip
