"""Measures time and memory of a training step of each head for given numbers of classes.

Every head is built for the given size, with class frequencies by Zipf's law, and its loss is
computed forward and backward without backbone and optimiser. The cheapest head comes first, and all
heads share one time limit: a head that would exceed the time or the memory left gets a reason
instead of a cost. ``lastlayer compare`` measures around the number of classes of its data,
``lastlayer plan`` for a number that the user gives.
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
from lastlayer.lab.machine import (
    PeakMemory,
    free_memory,
    give_back,
    is_out_of_memory,
    load_per_core,
)
from lastlayer.lab.options import CLASS_TASKS, DEVICES, one_of, whole
from lastlayer.lab.records import COSTS_FILE, COSTS_SCHEMA, Cost, read_json, write_json
from lastlayer.lab.runs import Bench
from lastlayer.lab.specs import HeadSpec, catalogue, parse_specs
from lastlayer.lab.training import Stepper

# Time for measuring: seconds per head, or this share of the training time if that is more.
SECONDS_A_HEAD, SHARE_OF_TRAINING = 1.5, 0.05
# Ratio of successive numbers of classes, and how many of them are measured.
GROWTH, SIZES = 4, 4
# With fewer classes, a step costs little more than the overhead of its calls.
FEWEST_CLASSES = 64
# After one warm-up step, steps are timed until this time is used.
SAMPLED_SECONDS = 0.1
FEWEST_SAMPLES, MOST_SAMPLES = 2, 25
_MOST_OF_MEMORY = 0.5
# Without numbers, since the page groups sizes by the reason.
TOO_LONG = "it would have taken longer than what was left of the time for measuring"
TOO_LARGE = "it would have taken more than half of the free memory"
# Assumed copies of the weight (parameters, gradients, temporaries) if no peak was measured.
_COPIES = 4
# Extra draws with replacement, so that a row nearly always has enough distinct labels.
_SPARE_DRAWS, _SPARE_TIMES = 16, 4
# First private-use code point: words that contain one do not occur in data.
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
    """Generates data like that of the comparison for any number of classes."""

    needs: ClassData  # the class data of the comparison, from which heads are built
    shape: tuple[int, ...]  # of the targets of a step, (batch, length), or (rows, labels)
    # Number of labels of each row; None if each target is one class.
    lengths: NDArray[np.int64] | None
    device: torch.device  # of the generated tensors
    _made: dict[int, ClassData] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, needs: ClassData, feed: Feed, task: str, device: torch.device) -> "Problem":
        """The problem with the batch shape of a feed."""
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
        """The class data for this number of classes, from which heads are built."""
        if classes not in self._made:
            total = max(int(self.needs.counts.sum()), classes)
            counts = np.maximum(total * zipf_shares(classes), 1).astype(np.int64)
            words = Words(self.needs.spellings, classes)
            self._made[classes] = ClassData(self.width, counts, words)
        return self._made[classes]

    def body(self) -> GivenStates:
        """A backbone with random hidden states for a step."""
        rows = self.shape if self.lengths is None else self.shape[:1]
        draw = torch.Generator().manual_seed(0)
        hidden = torch.randn(*rows, self.width, generator=draw)
        return GivenStates(hidden.to(self.device))

    def batch(self, classes: int) -> Batch:
        """Random targets of a step, and random input tokens for heads that use the context."""
        draw = np.random.default_rng([0, classes])
        ends = np.cumsum(zipf_shares(classes))
        if self.lengths is None:
            inputs, target = (_drawn(draw, ends, self.shape) for _ in range(2))
            return Batch(self._tensor(inputs), self._tensor(target), self.rows)
        table = np.full(self.shape, PADDING, np.int64)
        for row, length in zip(table, self.lengths, strict=True):
            # The first distinct values of many draws are draws without replacement.
            many = _drawn(draw, ends, (_SPARE_TIMES * int(length) + _SPARE_DRAWS,))
            kept = list(dict.fromkeys(many.tolist()))[: int(length)]
            row[: len(kept)] = kept
        return Batch(None, self._tensor(table), self.rows)

    def _tensor(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def zipf_shares(classes: int) -> NDArray[np.float64]:
    """Class frequencies by Zipf's law, proportional to 1 / rank, with sum 1."""
    shares = 1.0 / np.arange(1, classes + 1)
    return np.asarray(shares / shares.sum())


def _drawn(
    draw: np.random.Generator, ends: NDArray[np.float64], shape: tuple[int, ...]
) -> NDArray[np.int64]:
    classes = np.searchsorted(ends, draw.random(shape), side="right")
    # The last end may be a little below 1.
    return np.minimum(classes, len(ends) - 1).astype(np.int64)


class Meter:
    """Measures heads at one size after the other while time and memory last.

    ``seconds`` is the limit for all heads and sizes together. Results are appended to ``found``.
    """

    def __init__(
        self, problem: Problem, specs: Sequence[HeadSpec], seconds: float, found: list[Cost]
    ) -> None:
        self._problem, self._specs, self.left, self.found = problem, specs, seconds, found
        # Seconds to build the last head of each spec and its data.
        self._build_seconds: dict[str, float] = {}
        self._device = problem.device
        # Larger than a GPU's cache; zeroed before each step to clear the cache. Allocated first, so
        # that it is not counted as a head's memory.
        on_gpu = self._device.type == "cuda"
        self._buffer = torch.empty(2**28, dtype=torch.int8, device=self._device) if on_gpu else None

    def at(
        self,
        classes: int,
        tell: Callable[[HeadSpec, int], None] = lambda *_: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Measure each head that has no result at this size; it gets a time or a reason."""
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
        """Seconds and bytes, extrapolated linearly in the number of classes; 0 if unknown."""
        if last is None or last.ms is None:
            return 0.0, 0.0
        growth, usual = classes / last.classes, _COPIES * last.classes * self._problem.width
        seconds = 1e-3 * (1 + FEWEST_SAMPLES) * last.ms + self._build_seconds.get(last.slug, 0.0)
        return growth * seconds, growth * 1e6 * (last.peak_memory_mb or 4e-6 * usual)

    def time(self, spec: HeadSpec, classes: int) -> Cost:
        """The cost of a step; if the head raises an error, that is the reason for having none."""
        try:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                if spec.slug not in self._build_seconds:
                    # Import and compile before timing: after a resume nothing was trained yet.
                    self._ready(spec, classes)[1]()
                return self._time(spec, classes)
        except Exception as error:  # noqa: BLE001 — a head of the user's may raise anything
            return Cost(spec.slug, classes, reason=_reason(error, spec))

    def _time(self, spec: HeadSpec, classes: int) -> Cost:
        held = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0
        began = time.perf_counter()
        head, step = self._ready(spec, classes)
        self._build_seconds[spec.slug] = time.perf_counter() - began
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
        # Compiling in the first step of a size does not count against the limit.
        self.left -= time.perf_counter() - began - max(0.0, first - median) / 1e3
        return Cost(
            spec.slug, classes, median, low, high, len(samples),
            None if memory.megabytes is None else memory.megabytes - held / 1e6,
            sum(each.numel() for each in head.parameters()),
        )  # fmt: skip

    def _ready(self, spec: HeadSpec, classes: int) -> tuple[nn.Module, Callable[[], None]]:
        """The head, and a function that makes one step of it."""
        head = spec.build(self._problem.at(classes)).to(self._device).train()
        n_built = getattr(head, "n_classes", classes)
        if n_built != classes:
            raise SpecError(f"it always has {n_built:,} classes, whatever number it is built for")
        body, batch = self._problem.body(), self._problem.batch(classes)
        stepper = Stepper(body, head, lr=0.0, clip=1.0)
        learned = [*body.parameters(), *head.parameters()]

        def step() -> None:
            for each in learned:
                each.grad = None
            stepper.loss(batch).backward()

        return head, step

    def _milliseconds(self, step: Callable[[], None]) -> float:
        """Duration of a step in milliseconds, on a GPU by CUDA events."""
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
    """Numbers of classes to measure: up to two smaller than the data's own, it, and larger ones.

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
    """Measure the costs that are missing in costs.json; returns its content."""
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
        # The smallest size first, then that of the data. A resume continues with the next size.
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


# Trees and bands take about 150 bytes per class to build.
MOST_CLASSES = 20_000_000
# Labels per row, for multi-label heads.
LABELS = 5
# Heads are first measured with this many times fewer classes, if these are enough: it shows which
# heads can be measured at the given size.
_SMALLER, _FEWEST = 16, 256
_LETTERS = 11
# Load average per core above which times are unreliable.
BUSY = 1.5


@dataclass(frozen=True)
class PlannedHead(Cost):
    """The cost of a training step of a head at the given size."""

    head: str = ""  # its spec, for lastlayer compare --head
    smaller: str = ""  # its time with fewer classes, if it could not be measured at this size

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
    """Measure a few training steps of each head; the fastest come first, unmeasured ones last.

    Everything is float32, class frequencies follow Zipf's law, and ``rows`` is the batch size times
    the length. Without heads, all that suit the task are measured. ``seconds`` limits the time of
    all heads together; a head that would exceed the time left has a reason instead of a cost.
    """
    sizes: dict[str, Any] = {"classes": classes, "hidden": hidden, "rows": rows}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    whole("--classes", classes, least=2, most=MOST_CLASSES)
    whole("--hidden", hidden)
    whole("--rows", rows)
    one_of("--device", device, DEVICES[1:])
    one_of("--task", task, CLASS_TASKS)
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
        # Each size has the whole time limit.
        meter.left = seconds
        meter.at(size, lambda spec, n: tell(f"{spec.label} with {n:,} classes"))
    give_back()
    before = {each.slug: each.ms for each in meter.found if each.classes == smaller and each.ms}
    texts, planned = {spec.slug: spec.text for spec in specs}, []
    for cost in (each for each in meter.found if each.classes == classes):
        smaller_time = ""
        if cost.reason and cost.slug in before:
            smaller_time = f"{metrics.STEP_MS.format(before[cost.slug])} with {smaller:,} classes"
        planned.append(PlannedHead(**asdict(cost), head=texts[cost.slug], smaller=smaller_time))
    return sorted(planned, key=lambda each: math.inf if each.ms is None else each.ms)


def render_plan(planned: Sequence[PlannedHead], console: Console) -> None:
    """Print a table of the costs, the heads without one and why, and what was measured."""
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
        "Measured time and peak memory of a training step: forward and backward of the loss "
        "in float32, without backbone and optimiser (Adam adds two numbers per parameter), with "
        "class frequencies by Zipf's law."
    )
    console.print(Text(text, style="dim"))
    if (busy := load_per_core()) is not None and busy > BUSY:
        console.print(
            f"The machine is busy (load {busy:.1f} per core): these times are unreliable.",
            style="yellow", highlight=False,
        )  # fmt: skip
