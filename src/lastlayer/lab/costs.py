"""What a training step of each head costs, measured: time and memory at a number of classes.

Every head is built for the size that is asked for, with class frequencies by Zipf's law, and its
loss is computed forward and backward without a backbone and without an optimiser. The cheapest head
comes first, and all heads share one time: where it or memory would not last, a reason is given
instead. ``lastlayer compare`` measures around the number of classes of its data, ``lastlayer plan``
at a size that a person names.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from lastlayer.heads.recipes import ClassData
from lastlayer.lab import metrics
from lastlayer.lab.errors import LabError, SpecError, first_line
from lastlayer.lab.feeding import PADDING, Batch, Feed
from lastlayer.lab.live import Watcher
from lastlayer.lab.machine import PeakMemory, free_memory, give_back, is_out_of_memory, load
from lastlayer.lab.options import DEVICES, one_of, whole
from lastlayer.lab.records import COSTS_FILE, COSTS_SCHEMA, Cost, read_json, write_json
from lastlayer.lab.runs import Bench
from lastlayer.lab.specs import HeadSpec, catalogue, parse_specs
from lastlayer.lab.training import Stepper

# Time for measuring: seconds per head, or this share of the training time if that is more.
SECONDS_A_HEAD, SHARE_OF_TRAINING = 1.5, 0.05
# Each number of classes is so many times the one before.
GROWTH, SIZES = 4, 4
# With fewer classes, a step costs little more than the overhead of its calls.
FEWEST_CLASSES = 64
# After one warm-up step, steps are timed until this time is used.
SAMPLED_SECONDS = 0.1
FEWEST_SAMPLES, MOST_SAMPLES = 2, 25
_MOST_OF_MEMORY = 0.5
# Without numbers: the page tells all sizes with the same reason together.
TOO_LONG = "it would have taken longer than what was left of the time for measuring"
TOO_LARGE = "it would have taken more than half of the free memory"
# Assumed copies of the weight (parameters, gradients, temporaries) where no peak was measured.
_COPIES = 4
# Extra draws with replacement, so that a row nearly always has enough different labels.
_SPARE_DRAWS, _SPARE_TIMES = 16, 4
# First private-use letter: words with one cannot be in the data.
_PRIVATE = 0xE000


class GivenStates(nn.Module):
    """A backbone whose hidden states are its parameters."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = nn.Parameter(hidden)

    def forward(self, _inputs: Any) -> Tensor:
        """The hidden states."""
        return self.hidden


class Words(Sequence[str]):
    """Unique words for any number of classes, about as long as those of the data.

    Example:
        >>> list(Words(["a", "b", "c", "d"], 2))
        ['a', 'd']
        >>> [len(word) for word in Words(["a", "bcd"], 4)]
        [1, 3, 2, 4]
    """

    def __init__(self, own: Sequence[str], classes: int) -> None:
        self._own, self._classes = own, classes

    def __len__(self) -> int:
        return self._classes

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._classes))]
        if not 0 <= index < self._classes:
            raise IndexError(index)
        own = len(self._own)
        if self._classes <= own:
            return self._own[round(index * (own - 1) / max(1, self._classes - 1))]
        more = chr(_PRIVATE + index // own) if index >= own else ""
        return self._own[index % own] + more


@dataclass(frozen=True)
class Problem:
    """Makes data for any number of classes that is otherwise like that of the comparison."""

    needs: ClassData  # what heads are made from at the data's own number of classes
    shape: tuple[int, ...]  # of the targets of a step, (batch, length), or (rows, labels)
    # How many labels each row has; None where each target is one class.
    lengths: NDArray[np.int64] | None
    device: torch.device  # where it is
    _made: dict[int, ClassData] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, needs: ClassData, feed: Feed, task: str, device: torch.device) -> "Problem":
        """With steps as the feed has them."""
        target = feed.batch(0, 0).target.cpu().numpy()
        lengths = (target != PADDING).sum(1) if task == "multilabel" else None
        return cls(needs, target.shape, lengths, device)

    @property
    def width(self) -> int:
        return self.needs.in_features

    @property
    def rows(self) -> int:
        return self.shape[0] if self.lengths is not None else int(np.prod(self.shape))

    def at(self, classes: int) -> ClassData:
        """What heads are made from at this number of classes."""
        if classes not in self._made:
            total = max(int(self.needs.counts.sum()), classes)
            counts = np.maximum(total * zipf_shares(classes), 1).astype(np.int64)
            words = Words(self.needs.spellings, classes)
            self._made[classes] = ClassData(self.width, counts, words)
        return self._made[classes]

    def body(self) -> GivenStates:
        """Hidden states of a step."""
        rows = self.shape if self.lengths is None else self.shape[:1]
        draw = torch.Generator().manual_seed(0)
        hidden = torch.randn(*rows, self.width, generator=draw)
        return GivenStates(hidden.to(self.device))

    def batch(self, classes: int) -> Batch:
        """Targets of a step, and tokens before them for heads that want to see some."""
        draw = np.random.default_rng([0, classes])
        ends = np.cumsum(zipf_shares(classes))
        if self.lengths is None:
            inputs, target = (_drawn(draw, ends, self.shape) for _ in range(2))
            return Batch(self._tensor(inputs), self._tensor(target), self.rows)
        table = np.full(self.shape, PADDING, np.int64)
        for row, length in zip(table, self.lengths, strict=True):
            # Of many draws the first that differ: with the chances of drawing without replacement.
            many = _drawn(draw, ends, (_SPARE_TIMES * int(length) + _SPARE_DRAWS,))
            kept = list(dict.fromkeys(many.tolist()))[: int(length)]
            row[: len(kept)] = kept
        return Batch(None, self._tensor(table), self.rows)

    def _tensor(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def zipf_shares(classes: int) -> NDArray[np.float64]:
    """Frequencies of classes by Zipf's law, one over the rank, to the sum 1."""
    shares = 1.0 / np.arange(1, classes + 1)
    return np.asarray(shares / shares.sum())


def _drawn(
    draw: np.random.Generator, ends: NDArray[np.float64], shape: tuple[int, ...]
) -> NDArray[np.int64]:
    found = np.searchsorted(ends, draw.random(shape), side="right")
    # The last end may be a little below 1.
    return np.minimum(found, len(ends) - 1).astype(np.int64)


class Meter:
    """Measures heads at one size after the other, as long as time and memory last.

    ``seconds`` are for all heads and sizes. Results are appended to ``found``.
    """

    def __init__(
        self, problem: Problem, specs: Sequence[HeadSpec], seconds: float, found: list[Cost]
    ) -> None:
        self._problem, self._specs, self.left, self.found = problem, specs, seconds, found
        # Seconds in which the last head of a spec and its data were made.
        self._making: dict[str, float] = {}
        self._device = problem.device
        # As large as a GPU's cache, which is cleared before each step. It is made first, so that it
        # is not counted as a head's memory.
        on_gpu = self._device.type == "cuda"
        self._buffer = torch.empty(2**28, dtype=torch.int8, device=self._device) if on_gpu else None

    def at(
        self,
        classes: int,
        tell: Callable[[HeadSpec, int], None] = lambda *_: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Every head that is not known at this size gets a time or a reason."""
        known = {each.slug for each in self.found if each.classes == classes}
        rising = sorted(self.found, key=lambda each: each.classes)
        largest = {each.slug: each for each in rising if each.ms is not None}
        too_long = {c.slug for c in rising if c.reason == TOO_LONG and c.classes < classes}
        expected = {s.slug: self._expected(largest.get(s.slug), classes) for s in self._specs}
        for spec in sorted(self._specs, key=lambda each: expected[each.slug][0]):
            if spec.slug in known:
                continue
            if stopped():
                return
            tell(spec, classes)
            seconds, memory = expected[spec.slug]
            free, reason = free_memory(self._device), ""
            if spec.slug in too_long or self.left <= 0 or seconds > self.left:
                reason = TOO_LONG
            elif free is not None and memory > _MOST_OF_MEMORY * free:
                reason = TOO_LARGE
            cost = Cost(spec.slug, classes, reason=reason) if reason else self.time(spec, classes)
            self.found.append(cost)

    def _expected(self, last: Cost | None, classes: int) -> tuple[float, float]:
        """Seconds and bytes, as if all grew with the number of classes; 0 where none is known."""
        if last is None or last.ms is None:
            return 0.0, 0.0
        growth, usual = classes / last.classes, _COPIES * last.classes * self._problem.width
        seconds = 1e-3 * (1 + FEWEST_SAMPLES) * last.ms + self._making.get(last.slug, 0.0)
        return growth * seconds, growth * 1e6 * (last.peak_memory_mb or 4e-6 * usual)

    def time(self, spec: HeadSpec, classes: int) -> Cost:
        """The cost of a step; an error of the head becomes its reason."""
        try:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                if spec.slug not in self._making:
                    # What a resumed comparison has not trained is imported and compiled here.
                    self._ready(spec, classes)[1]()
                return self._time(spec, classes)
        except Exception as error:  # noqa: BLE001 — a head of the user's may raise anything
            return Cost(spec.slug, classes, reason=_reason(error, spec))

    def _time(self, spec: HeadSpec, classes: int) -> Cost:
        held = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0
        began = time.perf_counter()
        head, step = self._ready(spec, classes)
        self._making[spec.slug] = time.perf_counter() - began
        first = self._milliseconds(step)
        memory = PeakMemory(self._device, head)
        memory.start()
        samples: list[float] = []
        while len(samples) < FEWEST_SAMPLES or (
            len(samples) < MOST_SAMPLES and sum(samples) < 1e3 * SAMPLED_SECONDS
        ):
            samples.append(self._milliseconds(step))
        memory.stop()
        low, median, high = np.percentile(samples, [20, 50, 80]).tolist()
        # The first step of a size may compile something: that is not taken from the time.
        self.left -= time.perf_counter() - began - max(0.0, first - median) / 1e3
        return Cost(
            spec.slug, classes, median, low, high, len(samples),
            None if memory.megabytes is None else memory.megabytes - held / 1e6,
            sum(each.numel() for each in head.parameters()),
        )  # fmt: skip

    def _ready(self, spec: HeadSpec, classes: int) -> tuple[nn.Module, Callable[[], None]]:
        """The head, and what makes a step of it."""
        head = spec.build(self._problem.at(classes)).to(self._device).train()
        made = getattr(head, "n_classes", classes)
        if made != classes:
            raise SpecError(f"it has {made:,} classes, whatever it is built for")
        body, batch = self._problem.body(), self._problem.batch(classes)
        stepper = Stepper(body, head, lr=0.0, clip=1.0)
        learned = [*body.parameters(), *head.parameters()]

        def step() -> None:
            for each in learned:
                each.grad = None
            stepper.loss(batch).backward()

        return head, step

    def _milliseconds(self, step: Callable[[], None]) -> float:
        """Of a step, on a GPU by its own clock."""
        if self._buffer is None:
            start = time.perf_counter()
            step()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._buffer.zero_()
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize(self._device)
        return float(begin.elapsed_time(end))


def _reason(error: Exception, spec: HeadSpec) -> str:
    text = first_line(error)
    if isinstance(error, SpecError):
        return text.removeprefix(f"--head {spec.text}: ")
    if is_out_of_memory(error):
        return f"out of memory: {text}"
    return f"{type(error).__name__}: {text}"


def sizes_around(own: int) -> list[int]:
    """The number of classes of the data, two smaller ones unless they are too few, and larger ones.

    Example:
        >>> sizes_around(60_000), sizes_around(20)
        ([3750, 15000, 60000, 240000], [20, 80, 320, 1280])
    """
    smaller = [own // GROWTH**i for i in (2, 1) if own // GROWTH**i >= FEWEST_CLASSES]
    return [*smaller, *(own * GROWTH**i for i in range(SIZES - len(smaller)))]


def measure_costs(
    bench: Bench,
    specs: Sequence[HeadSpec],
    results: Sequence[dict[str, Any]],
    watching: Watcher,
    stopped: Callable[[], bool],
) -> dict[str, Any]:
    """Measure what costs.json of a comparison lacks; returns its content."""
    task, own = bench.model.task, bench.needs.n_classes
    problem = Problem.of(bench.needs, bench.feed, task, bench.device)
    sizes = sizes_around(own)
    header = {
        "schema": COSTS_SCHEMA, "task": task, "rows": problem.rows, "width": problem.width,
        "own": own, "classes": sizes, "heads": [spec.text for spec in specs],
        "device": bench.record["device"], "frequencies": "Zipf: one over the rank",
        "what": "forward and backward of the loss, without model and optimiser",
    }  # fmt: skip
    path, total = bench.out / COSTS_FILE, len(specs) * len(sizes)
    found = _kept(path, header)

    def record() -> dict[str, Any]:
        listed = [{k: v for k, v in asdict(each).items() if v is not None} for each in found]
        return {**header, "complete": len(found) == total, "costs": listed}

    if len(found) == total:
        return record()
    meter = Meter(problem, specs, _seconds_for(len(specs), results), found)
    try:
        # The smallest first, and that of the data next. Killed, it goes on with the next size.
        for classes in dict.fromkeys([sizes[0], own, *sizes]):
            meter.at(
                classes, lambda spec, n: watching.measures(spec, n, len(found) / total), stopped
            )
            write_json(path, record())
            if stopped():
                break
    finally:
        write_json(path, record())
        give_back()
    return record()


def _seconds_for(heads: int, results: Sequence[dict[str, Any]]) -> float:
    training = sum(each.get("seconds") or 0.0 for each in results)
    return max(SECONDS_A_HEAD * heads, SHARE_OF_TRAINING * training)


def _kept(path: Path, header: dict[str, Any]) -> list[Cost]:
    try:
        held = read_json(path) if path.is_file() else {}
        same = all(held.get(name) == value for name, value in header.items())
        return [Cost(**each) for each in held["costs"]] if same else []
    except (LabError, AttributeError, KeyError, TypeError):
        # The file does not belong to this comparison: measure again.
        return []


# Tasks of a plan: pairs have no classes of their own.
TASKS = ("lm", "classification", "multilabel")
# Trees and bands are made for the frequencies of all classes, in some 150 bytes each.
MOST_CLASSES = 20_000_000
# Of each row, where a row has several.
LABELS = 5
# Heads are first measured at a size so many times smaller: it shows which can be at the asked one.
_SMALLER, _FEWEST = 16, 256
_LETTERS = 11
# Processes per core from which on times are not to be trusted.
BUSY = 1.5


@dataclass(frozen=True)
class PlannedHead(Cost):
    """A training step of a head at the size that was asked for."""

    head: str = ""  # its spec, as lastlayer compare --head takes it
    smaller: str = ""  # what it took with fewer classes, where it could not be measured

    def as_json(self) -> dict[str, Any]:
        """For JSON."""
        return {name: each for name, each in asdict(self).items() if name != "slug"}


def plan(
    classes: int,
    hidden: int,
    rows: int,
    device: str = "cpu",
    *,
    task: str = "lm",
    heads: Sequence[str] = (),
    seconds: float = 60.0,
    tell: Callable[[str], None] = lambda _: None,
) -> list[PlannedHead]:
    """A few steps of each head, the fastest first; those that could not be measured come last.

    Everything is float32, class frequencies follow Zipf's law, and ``rows`` is the batch size times
    the length. Without heads, all that suit the task are measured. A head that would take longer
    than what is left of ``seconds``, which are for all of them, has a reason instead of a time.
    """
    sizes: dict[str, Any] = {"classes": classes, "hidden": hidden, "rows": rows}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    whole("--classes", classes, least=2, most=MOST_CLASSES)
    whole("--hidden", hidden)
    whole("--rows", rows)
    one_of("--device", device, DEVICES[1:])
    one_of("--task", task, TASKS)
    suited = [each.recipe for each in catalogue().values() if task in each.tasks]
    every = [spec for recipe in suited for spec in (recipe.compared or (recipe.name,))]
    specs = parse_specs(list(heads) or every, task=task)
    place = torch.device(device)
    free = free_memory(place)
    if free is not None and 8 * hidden * (classes / _SMALLER + rows) > free:
        # Not even the parameters and their gradient fit.
        raise LabError(
            f"--classes, --hidden, --rows: expected a problem that fits into the "
            f"{free / 1e9:.3g} GB of free memory, got {classes:,} × {hidden:,} with {rows:,} rows"
        )
    counts = np.maximum(100 * classes * zipf_shares(classes), 1).astype(np.int64)
    needs = ClassData(hidden, counts, [f"{i:0{_LETTERS}d}" for i in range(_FEWEST)])
    shape, lengths = (1, rows), None
    if task == "multilabel":
        labels = min(LABELS, classes)
        shape, lengths = (rows, labels), np.full(rows, labels)
    meter = Meter(Problem(needs, shape, lengths, place), specs, seconds, [])
    smaller = classes // _SMALLER
    for size in [smaller] * (smaller >= _FEWEST) + [classes]:
        # What the smaller size took is not taken from the asked one.
        meter.left = seconds
        meter.at(size, lambda spec, n: tell(f"{spec.label} with {n:,} classes"))
    give_back()
    before = {each.slug: each.ms for each in meter.found if each.classes == smaller and each.ms}
    texts, found = {spec.slug: spec.text for spec in specs}, []
    for cost in (each for each in meter.found if each.classes == classes):
        took = ""
        if cost.reason and cost.slug in before:
            took = f"{metrics.STEP_MS.format(before[cost.slug])} with {smaller:,} classes"
        found.append(PlannedHead(**asdict(cost), head=texts[cost.slug], smaller=took))
    return sorted(found, key=lambda each: math.inf if each.ms is None else each.ms)


def render_plan(planned: Sequence[PlannedHead], console: Console) -> None:
    """A table, what could not be measured and why, and what the numbers are."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("head", no_wrap=True)
    for name in ("time", "20–80%", "memory", "parameters"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in planned:
        if each.ms is None:
            continue
        low, high = metrics.STEP_MS.format(each.low_ms), metrics.STEP_MS.format(each.high_ms)
        table.add_row(
            each.head,
            metrics.STEP_MS.format(each.ms),
            f"{low.removesuffix(' ms')}–{high}",
            metrics.MEMORY.format(each.peak_memory_mb),
            metrics.PARAMETERS.format(each.parameters),
        )
    console.print(table)
    for reason in dict.fromkeys(each.reason for each in planned if each.ms is None):
        console.print(Text(f"Not measured: {reason}"), soft_wrap=True)
        for each in planned:
            if each.ms is None and each.reason == reason:
                smaller = f" ({each.smaller})" if each.smaller else ""
                console.print(Text(f"    {each.head}{smaller}"), soft_wrap=True)
    text = (
        "Time and peak memory of a training step, measured here: forward and backward of the loss "
        "in float32, without backbone and optimiser (Adam adds two numbers per parameter), with "
        "class frequencies by Zipf's law."
    )
    console.print(Text(text, style="dim"))
    if (busy := load()) is not None and busy > BUSY:
        console.print(
            f"The machine is busy (load {busy:.1f} per core): these times are not to be trusted.",
            style="yellow", highlight=False,
        )  # fmt: skip
