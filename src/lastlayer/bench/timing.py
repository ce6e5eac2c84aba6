"""Medians: on CUDA by events around each call, on a CPU by interleaving the competitors."""

import gc
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

Thunk = Callable[[], Any]
# While a call this long runs, Python has asked for all of it.
_HOST_HIDES_BEHIND_MS = 2.0
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, 20th and 80th percentile, and how many samples.

    Attributes:
        eager_ms: the median when Python makes each call, where the others are of a graph that was
            captured once and replayed; None where they are of such calls themselves.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    eager_ms: float | None = None

    @classmethod
    def of(cls, milliseconds: list[float], eager_ms: float | None = None) -> "Timing":
        """Summarise samples."""
        ordered = sorted(milliseconds)
        last = len(ordered) - 1
        return cls(
            median_ms=statistics.median(ordered),
            p20_ms=ordered[round(0.2 * last)],
            p80_ms=ordered[round(0.8 * last)],
            samples=len(ordered),
            eager_ms=eager_ms,
        )


class Timer(Protocol):
    """Times several competitors; a competitor that raises yields its exception."""

    def time(self, thunks: Mapping[K, Thunk]) -> Iterator[tuple[K, Timing | Exception]]:
        """Yield each competitor's timing as soon as it is known."""


@dataclass(frozen=True)
class CudaTimer:
    """``triton.testing.do_bench``: device events, and the L2 cache cleared before each call.

    What is timed is the replay of a CUDA graph, so that a time says what the device needs and not
    how fast Python can ask for it; the time of plain calls is kept beside it. Long calls, where it
    makes no difference, and what cannot be captured are timed by plain calls alone.

    Attributes:
        warmup_ms: time spent on warming up.
        rep_ms: time spent on timed calls.
        fewest_samples: samples of a call so slow that more would take longer than ``rep_ms``.
    """

    warmup_ms: int
    rep_ms: int
    fewest_samples: int = 3

    def time(self, thunks: Mapping[K, Thunk]) -> Iterator[tuple[K, Timing | Exception]]:
        """Time one competitor after the other."""
        for key, thunk in thunks.items():
            try:
                yield key, self.time_one(thunk)
            except Exception as error:  # noqa: BLE001 — a competitor may fail in any way
                yield key, error

    def time_one(self, thunk: Thunk) -> Timing:
        """Time one competitor."""
        # Of a call this slow do_bench would make eight for one sample.
        if self.fewest_samples * _synchronized_ms(thunk) > self.rep_ms:
            return Timing.of([_synchronized_ms(thunk) for _ in range(self.fewest_samples)])
        eager = self._samples(thunk)
        slow = statistics.median(eager) > _HOST_HIDES_BEHIND_MS
        graph = None if slow else _captured(thunk)
        if graph is None:
            return Timing.of(eager)
        return Timing.of(self._samples(graph.replay), eager_ms=statistics.median(eager))

    def _samples(self, thunk: Thunk) -> list[float]:
        do_bench = importlib.import_module("triton.testing").do_bench
        return list(do_bench(thunk, warmup=self.warmup_ms, rep=self.rep_ms, return_mode="all"))


@dataclass(frozen=True)
class CpuTimer:
    """Wall clock, one sample of every competitor in turn, so that noise hits all of them alike.

    Attributes:
        budget_s: timed seconds each competitor may use.
        fewest_samples: samples of a competitor whose single call uses up the budget.
        most_samples: samples after which a fast competitor is known well enough.
        sample_ms: calls faster than this are repeated within a sample.
    """

    budget_s: float
    fewest_samples: int = 3
    most_samples: int = 200
    sample_ms: float = 1.0

    def time(self, thunks: Mapping[K, Thunk]) -> Iterator[tuple[K, Timing | Exception]]:
        """Warm all competitors up, then time them in turn until each has used its budget."""
        repeats: dict[K, int] = {}
        for key, thunk in thunks.items():
            try:
                repeats[key] = self._calls_a_sample(thunk)
            except Exception as error:  # noqa: BLE001 — a competitor may fail in any way
                yield key, error
        samples: dict[K, list[float]] = {key: [] for key in repeats}
        collecting = gc.isenabled()
        gc.disable()
        try:
            racing = list(repeats)
            for turn in itertools.count():
                racing = [key for key in racing if self._wants_more(samples[key], repeats[key])]
                if not racing:
                    break
                shift = turn % len(racing)
                for key in racing[shift:] + racing[:shift]:
                    samples[key].append(_milliseconds(thunks[key], repeats[key]))
        finally:
            if collecting:
                gc.enable()
        for key, milliseconds in samples.items():
            yield key, Timing.of(milliseconds)

    def _calls_a_sample(self, thunk: Thunk) -> int:
        thunk()
        return max(1, min(100, round(self.sample_ms / max(_milliseconds(thunk, 1), 1e-3))))

    def _wants_more(self, samples: list[float], repeats: int) -> bool:
        if len(samples) < self.fewest_samples:
            return True
        used_s = sum(samples) * repeats / 1e3
        return used_s < self.budget_s and len(samples) < self.most_samples


def _captured(thunk: Thunk) -> torch.cuda.CUDAGraph | None:
    """The work of a call as a graph; None where it waits for the device and cannot be captured."""
    if not torch.cuda.is_available():
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            thunk()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def _synchronized_ms(thunk: Thunk) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    thunk()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _milliseconds(thunk: Thunk, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        thunk()
    return (time.perf_counter() - start) * 1e3 / repeats


def copy_timing(device: torch.device, buffer_bytes: int, timer: Timer) -> tuple[Timing, int]:
    """Time a copy from one large buffer to another.

    Returns:
        The timing, and the bytes that one copy reads and writes.
    """
    source = torch.randint(2**31 - 1, (buffer_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    ((_, timing),) = timer.time({"copy": lambda: target.copy_(source)})
    if isinstance(timing, Exception):
        raise timing
    return timing, 2 * source.numel() * source.element_size()


def tb_per_s(moved_bytes: int, milliseconds: float) -> float:
    """Terabytes a second."""
    return moved_bytes / milliseconds / 1e9
