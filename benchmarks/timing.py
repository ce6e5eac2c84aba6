"""Times of plain eager calls, competitors in turn, and of replayed CUDA graphs."""

import gc
import random
import statistics
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks import memory

Thunk = Callable[[], Any]
K = TypeVar("K", bound=Hashable)

# Longer calls hide the host's work anyway, and a graph of one needs memory for a second.
LONGEST_REPLAYED_MS = 20.0
_REPLAY_SAMPLES, _REPLAY_SAMPLE_MS = 10, 10.0
# Side and dtype of the two square matrices whose product is a limit, and bytes of the copy.
PRODUCT = {"cuda": (8192, torch.bfloat16), "cpu": (2048, torch.float32)}
COPIED = {"cuda": 2**32, "cpu": 2**28}


class Timing(NamedTuple):
    """Milliseconds per call: median, 20th and 80th percentile, and the number of samples."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> "Timing":
        """Summarise samples."""
        ordered = sorted(milliseconds)
        low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8))
        return cls(statistics.median(ordered), low, high, len(ordered))


@dataclass(frozen=True)
class Clock:
    """Wall clock around consecutive plain calls, from an idle device to an idle device.

    On a GPU the host prepares a call while the device runs the one before, as in a training loop,
    so a time is that of the host or of the device, whichever is longer, and both where a call makes
    the host wait. Competitors take turns, in a new random order each turn: a device that has just
    run hot is passed on to whoever comes next, and that must not always be the same one.

    Attributes:
        device: where calls run.
        budget_s: timed seconds that each competitor may use.
        fewest_samples: samples of a competitor whose single call uses up the budget.
        most_samples: samples after which a fast competitor is known well enough.
        sample_ms: calls faster than this are repeated within a sample.
        patience_s: a competitor whose first call takes longer is not called again.
    """

    device: torch.device
    budget_s: float
    fewest_samples: int = 5
    most_samples: int = 60
    sample_ms: float = 1.0
    patience_s: float = 2.0

    @classmethod
    def of(cls, device: torch.device, *, quick: bool) -> "Clock":
        """The clock of a run."""
        if device.type == "cuda":
            return cls(device, 0.1 if quick else 0.3, sample_ms=10.0)
        return cls(device, 0.1 if quick else 1.5)

    def milliseconds(self, thunk: Thunk, repeats: int) -> float:
        """One sample: the mean of so many calls."""
        _synchronize(self.device)
        start = time.perf_counter()
        for _ in range(repeats):
            thunk()
        _synchronize(self.device)
        return (time.perf_counter() - start) * 1e3 / repeats

    def time(self, thunks: Mapping[K, Thunk]) -> dict[K, Timing | Exception]:
        """Time all competitors; one that raises yields its exception."""
        results: dict[K, Timing | Exception] = {}
        samples: dict[K, list[float]] = {}
        repeats: dict[K, int] = {}
        for key, thunk in thunks.items():
            try:
                first = self.milliseconds(thunk, 1)
                if first > 1e3 * self.patience_s:
                    results[key] = Timing.of([first])
                    continue
                second = max(self.milliseconds(thunk, 1), 1e-3)
                repeats[key] = max(1, min(1000, round(self.sample_ms / second)))
                samples[key] = []
            except Exception as error:  # noqa: BLE001 — a competitor may fail in any way
                results[key] = error
        order = random.Random(0)
        with _without_garbage_collection():
            while racing := [k for k in samples if k not in results]:
                for key in order.sample(racing, len(racing)):
                    try:
                        samples[key].append(self.milliseconds(thunks[key], repeats[key]))
                    except Exception as error:  # noqa: BLE001 — as above
                        results[key] = error
                        continue
                    if self._is_known(samples[key], repeats[key]):
                        results[key] = Timing.of(samples[key])
        return results

    def _is_known(self, samples: list[float], repeats: int) -> bool:
        if len(samples) < self.fewest_samples:
            return False
        used_s = sum(samples) * repeats / 1e3
        return used_s >= self.budget_s or len(samples) >= self.most_samples

    def median_ms(self, thunk: Thunk) -> float:
        """Of one call alone."""
        timing = self.time({"": thunk})[""]
        if isinstance(timing, Exception):
            raise timing
        return timing.median_ms


def replayed_ms(calls: Sequence[Thunk], device: torch.device) -> float | None:
    """Time per call in replays of one CUDA graph that has all of these calls, by device events.

    None on a CPU, for long calls, and where the host waits for the device: such a call cannot be
    captured.

    Args:
        calls: the same call on several inputs, more than the cache of the device holds.
        device: where they run.
    """
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    graph = torch.cuda.CUDAGraph()
    try:
        # What is compiled, or made once for an optimiser, is there before anything is captured.
        calls[0]()
        slow = Clock(device, 0.0).milliseconds(calls[0], 1) > LONGEST_REPLAYED_MS
        if slow or _waits(calls[0]):
            return None
        if torch.cuda.memory_reserved(device) > torch.cuda.mem_get_info(device)[1] / 2:
            memory.release(device)
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except Exception:  # noqa: BLE001 — what cannot be captured fails in many ways
        _leave_capture(device, stream)
        return None
    graph.replay()
    once = Clock(device, 0.0).milliseconds(graph.replay, 3)
    repeats = max(1, min(1000, round(_REPLAY_SAMPLE_MS / max(once, 1e-3))))
    samples = [_events_ms(graph.replay, repeats) for _ in range(_REPLAY_SAMPLES)]
    return statistics.median(samples) / len(calls)


def copy_tb_per_s(clock: Clock, *, quick: bool) -> float:
    """Terabytes per second that a copy of a large buffer reads and writes."""
    size = COPIED[clock.device.type] // (4 if quick else 1)
    source = torch.randint(2**31 - 1, (size // 4,), dtype=torch.int32, device=clock.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock.median_ms(lambda: target.copy_(source)) / 1e9


def gemm_tflop_per_s(clock: Clock, *, quick: bool) -> float:
    """Tera-operations per second of the product of two large square matrices."""
    size, dtype = PRODUCT[clock.device.type]
    size //= 4 if quick else 1
    left, right = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / clock.median_ms(lambda: torch.mm(left, right, out=out)) / 1e9


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _events_ms(thunk: Thunk, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        thunk()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / repeats


def _waits(call: Thunk) -> bool:
    """Whether the host waits for the device: asked first, as not all code survives a capture."""
    torch.cuda.synchronize()
    # torch warns, once, that the mode is a prototype.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing" in str(error):
            return True
        raise
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def _leave_capture(device: torch.device, stream: torch.cuda.Stream) -> None:
    """A capture that fails leaves its stream current, and the generator to captures alone."""
    torch.cuda.synchronize()
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
