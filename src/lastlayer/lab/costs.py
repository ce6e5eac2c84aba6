"""What a step of each head costs at other numbers of classes than the data's own, measured.

Every head is built anew for a few numbers of classes, with the width and the rows of the comparison
and frequencies by Zipf's law, and its loss is made forward and backward without a model beneath.
The smallest size comes first and that of the data next, and at each the cheapest head is first:
all heads share one time, and where it or memory would not last, a reason is written instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lastlayer.lab import _cost_timing as timing
from lastlayer.lab._cost_problem import Problem
from lastlayer.lab._cost_timing import Stopwatch, free_memory
from lastlayer.lab._costs_reading import COSTS_FILE, COSTS_SCHEMA, Cost
from lastlayer.lab.errors import LabError
from lastlayer.lab.files import read_json, write_json
from lastlayer.lab.live import Watcher
from lastlayer.lab.memory import give_back
from lastlayer.lab.runs import Bench
from lastlayer.lab.specs import HeadSpec

# Of measuring, for each head; or this share of what was trained, where that is more.
SECONDS_A_HEAD, SHARE_OF_TRAINING = 1.5, 0.05
# Each number of classes is so many times the one before.
GROWTH, SIZES = 4, 4
# With fewer classes, no head costs more than its calls.
FEWEST_CLASSES = 64
# A step is made so often at least.
_CALLS = 1 + timing.FEWEST_SAMPLES
_MOST_OF_MEMORY = 0.5
# Without numbers: the page tells all sizes with the same reason together.
TOO_LONG = "it would have taken longer than what was left of the time for measuring"
TOO_LARGE = "it would have taken more than half of the free memory"
# Parameters, gradients and what is made on the way, where no peak was measured.
_COPIES = 4


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
    """Measures what the folder does not have yet, and writes it there.

    Args:
        bench: what the runs have shared.
        specs: the heads.
        results: of the runs.
        watching: hears how far it is.
        stopped: whether a person wants it to end.

    Returns:
        What costs.json holds.
    """
    task = bench.model.task
    problem = Problem.of(bench.needs, bench.feed, task, bench.device)
    own = bench.needs.n_classes
    header = {
        "schema": COSTS_SCHEMA,
        "task": task,
        "rows": problem.rows,
        "width": bench.needs.in_features,
        "own": own,
        "classes": sizes_around(own),
        "heads": [spec.text for spec in specs],
        "device": bench.record["device"],
        "frequencies": "Zipf: one over the rank",
        "what": "forward and backward of the loss, without model and optimiser",
    }
    book = _Book(bench.out / COSTS_FILE, header, len(specs))
    if not book.complete:
        spend = _seconds_for(len(specs), results)
        _Measuring(bench, problem, book, results, spend).go(specs, watching, stopped)
    return book.record


def _seconds_for(heads: int, results: Sequence[dict[str, Any]]) -> float:
    trained = sum(each.get("seconds") or 0.0 for each in results)
    return max(SECONDS_A_HEAD * heads, SHARE_OF_TRAINING * trained)


class _Book:
    """costs.json while it grows; what an earlier one with the same header has is kept."""

    def __init__(self, path: Path, header: dict[str, Any], heads: int) -> None:
        self._path, self._header = path, header
        self.total = heads * len(header["classes"])
        self.costs = _kept(path, header)

    @property
    def complete(self) -> bool:
        return len(self.costs) == self.total

    @property
    def record(self) -> dict[str, Any]:
        listed = [{k: v for k, v in asdict(each).items() if v is not None} for each in self.costs]
        return {**self._header, "complete": self.complete, "costs": listed}

    def has(self, spec: HeadSpec, classes: int) -> bool:
        return any((each.slug, each.classes) == (spec.slug, classes) for each in self.costs)

    def largest(self, spec: HeadSpec) -> Cost | None:
        """The last that was measured of a head."""
        timed = [each for each in self.costs if each.slug == spec.slug and each.ms is not None]
        return max(timed, key=lambda each: each.classes, default=None)

    def write(self) -> None:
        write_json(self._path, self.record)


def _kept(path: Path, header: dict[str, Any]) -> list[Cost]:
    try:
        held = read_json(path) if path.is_file() else {}
        same = all(held.get(name) == value for name, value in header.items())
        return [Cost(**each) for each in held["costs"]] if same else []
    except (LabError, AttributeError, KeyError, TypeError):
        # Whatever lies there is not ours, and is measured again.
        return []


class _Measuring:
    """Spends the time on as many heads and sizes as it lasts for."""

    def __init__(
        self,
        bench: Bench,
        problem: Problem,
        book: _Book,
        results: Sequence[dict[str, Any]],
        seconds: float,
    ) -> None:
        self._problem, self._book, self._device = problem, book, bench.device
        self._own, self._left = bench.needs.n_classes, seconds
        self._results = results
        self._making: dict[str, float] = {}
        self._watch = Stopwatch(bench.device)

    def go(self, specs: Sequence[HeadSpec], watching: Watcher, stopped: Callable[[], bool]) -> None:
        try:
            sizes = sizes_around(self._own)
            for classes in dict.fromkeys([sizes[0], self._own, *sizes]):
                for spec in self._cheapest_first(specs, classes):
                    if self._book.has(spec, classes):
                        continue
                    if stopped():
                        return
                    watching.measures(spec, classes, len(self._book.costs) / self._book.total)
                    self._book.costs.append(self._cost(spec, classes))
                # Killed from here on, it goes on with the next size.
                self._book.write()
        finally:
            self._book.write()
            give_back()

    def _cheapest_first(self, specs: Sequence[HeadSpec], classes: int) -> list[HeadSpec]:
        return sorted(specs, key=lambda each: self._seconds(each, classes))

    def _cost(self, spec: HeadSpec, classes: int) -> Cost:
        reason = self._too_long(spec, classes) or self._too_large(spec, classes)
        if reason:
            return Cost(spec.slug, classes, reason=reason)
        cost, seconds = self._watch.time(spec, self._problem, classes)
        if cost.ms is not None:
            self._left -= seconds
            # What is not steps: building the head, drawing targets.
            self._making[spec.slug] = max(0.0, seconds - 1e-3 * cost.ms * (1 + cost.samples))
        return cost

    def _seconds(self, spec: HeadSpec, classes: int) -> float:
        """Expected, as if everything grew with the number of classes; 0 where nothing is known."""
        known, making = [], 0.0
        trained = [r.get("step_ms") for r in self._results if r["slug"] == spec.slug]
        if steps := [ms for ms in trained if ms]:
            # The step of training is that of the head and more.
            known.append(min(steps) * classes / self._own)
        if (last := self._book.largest(spec)) is not None and last.ms is not None:
            known.append(last.ms * classes / last.classes)
            making = self._making.get(spec.slug, 0.0) * classes / last.classes
        return 1e-3 * _CALLS * min(known, default=0.0) + making

    def _too_long(self, spec: HeadSpec, classes: int) -> str:
        if self._seconds(spec, classes) <= self._left:
            return ""
        return TOO_LONG

    def _too_large(self, spec: HeadSpec, classes: int) -> str:
        free, last = free_memory(self._device), self._book.largest(spec)
        if free is None or last is None:
            return ""
        usual = 4e-6 * _COPIES * last.classes * self._problem.needs.in_features
        needed = 1e6 * (last.peak_memory_mb or usual) * classes / last.classes
        if needed <= _MOST_OF_MEMORY * free:
            return ""
        return TOO_LARGE
