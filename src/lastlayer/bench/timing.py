"""Medians: by events around each call on CUDA, by wall clock on a CPU, competitors in turn."""

import gc
import importlib
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

import torch

Thunk = Callable[[], Any]
# The side of the two square matrices whose product is a limit, and their dtype.
_PRODUCT = {"cuda": (8192, torch.bfloat16), "cpu": (2048, torch.float32)}
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
class TakingTurns(ABC):
    """One sample of every competitor in turn, so that noise hits all of them alike.

    The order of a turn is drawn anew: a GPU that has just run hot, or cooled, is passed on to
    whoever comes next, and that must not always be the same one.

    Attributes:
        budget_s: timed seconds each competitor may use.
        fewest_samples: samples of a competitor whose single call uses up the budget.
        most_samples: samples after which a fast competitor is known well enough.
        sample_ms: calls faster than this are repeated within a sample.
        patience_s: a competitor whose first call takes longer is not called again.
    """

    budget_s: float
    fewest_samples: int = 3
    most_samples: int = 200
    sample_ms: float = 1.0
    patience_s: float = 10.0

    @abstractmethod
    def milliseconds(self, thunk: Thunk, repeats: int) -> float:
        """One sample: the mean of so many calls."""

    def time(self, thunks: Mapping[K, Thunk]) -> Iterator[tuple[K, Timing | Exception]]:
        """Warm all competitors up, then time them in turn until each has used its budget."""
        repeats: dict[K, int] = {}
        samples: dict[K, list[float]] = {}
        for key, thunk in thunks.items():
            try:
                first = self.milliseconds(thunk, 1)
                if first > 1e3 * self.patience_s:
                    samples[key] = [first]
                    continue
                repeats[key] = self._calls_a_sample(self.milliseconds(thunk, 1))
            except Exception as error:  # noqa: BLE001 — a competitor may fail in any way
                yield key, error
            else:
                samples[key] = []
        failed: dict[K, Exception] = {}
        order = random.Random(0)
        collecting = gc.isenabled()
        gc.disable()
        try:
            racing = list(repeats)
            while True:
                racing = [
                    key
                    for key in racing
                    if key not in failed and self._wants_more(samples[key], repeats[key])
                ]
                if not racing:
                    break
                for key in order.sample(racing, len(racing)):
                    try:
                        samples[key].append(self.milliseconds(thunks[key], repeats[key]))
                    except Exception as error:  # noqa: BLE001 — as above
                        failed[key] = error
        finally:
            if collecting:
                gc.enable()
        for key, timed in samples.items():
            yield key, failed[key] if key in failed else Timing.of(timed)

    def _calls_a_sample(self, milliseconds: float) -> int:
        return max(1, min(100, round(self.sample_ms / max(milliseconds, 1e-3))))

    def _wants_more(self, samples: list[float], repeats: int) -> bool:
        if len(samples) < self.fewest_samples:
            return True
        used_s = sum(samples) * repeats / 1e3
        return used_s < self.budget_s and len(samples) < self.most_samples


@dataclass(frozen=True)
class CpuTimer(TakingTurns):
    """Wall clock."""

    def milliseconds(self, thunk: Thunk, repeats: int) -> float:
        """One sample: the mean of so many calls."""
        start = time.perf_counter()
        for _ in range(repeats):
            thunk()
        return (time.perf_counter() - start) * 1e3 / repeats


@dataclass(frozen=True)
class CudaTurnsTimer(TakingTurns):
    """Device events around plain calls: for calls so long that the clocks change meanwhile.

    The L2 cache is cleared before each sample, which also lets the host get ahead of the device,
    as it is in the middle of a training step.
    """

    def milliseconds(self, thunk: Thunk, repeats: int) -> float:
        """One sample: the mean of so many calls."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _cache_sized_buffer().zero_()
        start.record()
        for _ in range(repeats):
            thunk()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / repeats


@cache
def _cache_sized_buffer() -> torch.Tensor:
    return torch.empty(2**28, dtype=torch.int8, device="cuda")


def standard_timer(device: torch.device, *, quick: bool) -> Timer:
    """The timer of calls from microseconds to a few milliseconds."""
    if device.type == "cuda":
        return CudaTimer(warmup_ms=10, rep_ms=20 if quick else 60)
    return CpuTimer(budget_s=0.1 if quick else 1.0)


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


def copy_tb_per_s(device: torch.device, buffer_bytes: int, timer: Timer) -> float:
    """Terabytes a second that a copy of a large buffer reads and writes."""
    source = torch.randint(2**31 - 1, (buffer_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    milliseconds = _time_of(lambda: target.copy_(source), timer)
    return tera_per_s(2 * source.numel() * source.element_size(), milliseconds)


def gemm_tflop_per_s(device: torch.device, timer: Timer, *, quick: bool) -> float:
    """Teraflops a second of the product of two large square matrices."""
    size, dtype = _PRODUCT[device.type]
    size //= 4 if quick else 1
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return tera_per_s(2 * size**3, _time_of(lambda: torch.mm(left, right, out=out), timer))


def _time_of(thunk: Thunk, timer: Timer) -> float:
    ((_, timing),) = timer.time({"limit": thunk})
    if isinstance(timing, Exception):
        raise timing
    return timing.median_ms


def tera_per_s(count: float, milliseconds: float) -> float:
    """Bytes as terabytes a second, operations as teraflops."""
    return count / milliseconds / 1e9
