"""The training step of one head at one number of classes: how long, and in how much memory."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from lastlayer.lab._cost_problem import Problem
from lastlayer.lab._costs_reading import Cost
from lastlayer.lab.errors import SpecError
from lastlayer.lab.memory import PeakMemory
from lastlayer.lab.specs import HeadSpec
from lastlayer.lab.training import Stepper

# A step is made once to warm up, and then until this time is used.
SAMPLED_SECONDS = 0.1
FEWEST_SAMPLES, MOST_SAMPLES = 2, 25


class Stopwatch:
    """Times steps, on a GPU by its own clock.

    Args:
        device: where steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # As large as a cache, which is cleared before each step. It is made first, so that it is
        # not counted as a head's memory.
        on_gpu = device.type == "cuda"
        self._buffer = torch.empty(2**28, dtype=torch.int8, device=device) if on_gpu else None
        self._rehearsed: set[str] = set()

    def time(self, spec: HeadSpec, problem: Problem, classes: int) -> tuple[Cost, float]:
        """What a step costs, and the seconds that it took to find out, without compilation.

        Whatever goes wrong with a head is the reason of a cost that has no time.
        """
        began = time.perf_counter()
        try:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                if spec.slug not in self._rehearsed:
                    # What a resumed comparison has not trained is imported and compiled here.
                    self._rehearsed.add(spec.slug)
                    self._ready(spec, problem, classes)[1]()
                    began = time.perf_counter()
                cost, compiling = self._time(spec, problem, classes)
        except Exception as error:  # noqa: BLE001 — a head of the user's may raise anything
            cost, compiling = Cost(spec.slug, classes, reason=_reason(error, spec)), 0.0
        return cost, time.perf_counter() - began - compiling

    def _milliseconds(self, step: Callable[[], None]) -> float:
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

    def _ready(
        self, spec: HeadSpec, problem: Problem, classes: int
    ) -> tuple[nn.Module, Callable[[], None]]:
        """The head, and what makes a step of it."""
        head = spec.build(problem.at(classes)).to(self._device).train()
        made = getattr(head, "n_classes", classes)
        if made != classes:
            raise SpecError(f"it has {made:,} classes, whatever it is built for")
        body, batch = problem.body(), problem.batch(classes)
        stepper = Stepper(body, head, lr=0.0, clip=1.0)
        learned = [*body.parameters(), *head.parameters()]

        def step() -> None:
            for each in learned:
                each.grad = None
            stepper.loss(batch).backward()

        return head, step

    def _time(self, spec: HeadSpec, problem: Problem, classes: int) -> tuple[Cost, float]:
        held = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0
        head, step = self._ready(spec, problem, classes)
        first = self._milliseconds(step)
        memory = PeakMemory(self._device, head)
        memory.start()
        samples: list[float] = []
        while len(samples) < FEWEST_SAMPLES or (
            len(samples) < MOST_SAMPLES and sum(samples) < 1e3 * SAMPLED_SECONDS
        ):
            samples.append(self._milliseconds(step))
        memory.stop()
        ordered, median, peak = sorted(samples), statistics.median(samples), memory.megabytes
        cost = Cost(
            slug=spec.slug,
            classes=classes,
            ms=median,
            low_ms=ordered[round(0.2 * (len(ordered) - 1))],
            high_ms=ordered[round(0.8 * (len(ordered) - 1))],
            samples=len(ordered),
            peak_memory_mb=None if peak is None else peak - held / 1e6,
        )
        return cost, max(0.0, first - median) / 1e3


def free_memory(device: torch.device) -> int | None:
    """Bytes that are left on a device; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        return int(found[0]) * 1024 if found else None
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _reason(error: Exception, spec: HeadSpec) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, SpecError):
        return text.removeprefix(f"--head {spec.text}: ")
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return f"out of memory: {text}"
    return f"{type(error).__name__}: {text}"
