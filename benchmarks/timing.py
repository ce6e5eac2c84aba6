"""Measures times of plain eager calls and of replayed CUDA graphs, and peak memory."""

import ctypes
import gc
import random
import statistics
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

Thunk = Callable[[], Any]
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

# Host time is hidden in longer calls anyway, and their graph needs as much memory again.
LONGEST_REPLAYED_MS = 20.0
_REPLAY_SAMPLES, _REPLAY_SAMPLE_MS = 10, 10.0
# Size and dtype of the two square matrices of the product, and bytes of the copy, for the limits.
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

    On a GPU the host prepares a call while the device runs the previous one, as in a training loop.
    So a time is the host time or the device time, whichever is longer, or their sum if a call makes
    the host wait. Competitors take turns, in a new random order each turn, since a device that has
    just become hot slows down the next one.

    Attributes:
        device: device of the calls.
        budget_s: timed seconds per competitor.
        fewest_samples: minimum number of samples, even if they exceed the budget.
        most_samples: maximum number of samples, for fast competitors.
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
        """One sample: the mean time of ``repeats`` calls."""
        _synchronize(self.device)
        start = time.perf_counter()
        for _ in range(repeats):
            thunk()
        _synchronize(self.device)
        return (time.perf_counter() - start) * 1e3 / repeats

    def time(self, thunks: Mapping[K, Thunk]) -> dict[K, Timing | Exception]:
        """Time all competitors; if one raises, its result is the exception."""
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
        gc.disable()
        while racing := [k for k in samples if k not in results]:
            for key in order.sample(racing, len(racing)):
                try:
                    samples[key].append(self.milliseconds(thunks[key], repeats[key]))
                except Exception as error:  # noqa: BLE001 — as above
                    results[key] = error
                    continue
                if self._is_known(samples[key], repeats[key]):
                    results[key] = Timing.of(samples[key])
        gc.enable()
        return results

    def _is_known(self, samples: list[float], repeats: int) -> bool:
        if len(samples) < self.fewest_samples:
            return False
        used_s = sum(samples) * repeats / 1e3
        return used_s >= self.budget_s or len(samples) >= self.most_samples


def replayed_ms(calls: Sequence[Thunk], device: torch.device) -> float | None:
    """Time per call in replays of one CUDA graph of all of these calls, by device events.

    None on a CPU, for long calls, and if the host waits for the device: such a call cannot be
    captured.

    Args:
        calls: the same call on several inputs, larger than the cache of the device.
        device: device of the calls.
    """
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    graph = torch.cuda.CUDAGraph()
    try:
        # Compilation and the state of an optimiser must not happen during the capture.
        calls[0]()
        slow = Clock(device, 0.0).milliseconds(calls[0], 1) > LONGEST_REPLAYED_MS
        if slow or _waits(calls[0]):
            return None
        if torch.cuda.memory_reserved(device) > torch.cuda.mem_get_info(device)[1] / 2:
            release(device)
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except Exception:  # noqa: BLE001 — a capture can fail in many ways
        _leave_capture(device, stream)
        return None
    graph.replay()
    once = Clock(device, 0.0).milliseconds(graph.replay, 3)
    repeats = max(1, min(1000, round(_REPLAY_SAMPLE_MS / max(once, 1e-3))))
    samples = []
    for _ in range(_REPLAY_SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(float(start.elapsed_time(end)) / repeats)
    return statistics.median(samples) / len(calls)


def limits(clock: Clock, *, quick: bool) -> dict[str, float]:
    """Rates of the device: the product of two square matrices, and the copy of a large buffer."""
    smaller = 4 if quick else 1
    size, dtype = PRODUCT[clock.device.type]
    size //= smaller
    left, right = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    count = COPIED[clock.device.type] // smaller // 4
    source = torch.randint(2**31 - 1, (count,), dtype=torch.int32, device=clock.device)
    target = torch.empty_like(source)
    found = {}
    for name, work, thunk in (
        ("gemm_tflop_per_s", 2 * size**3, lambda: torch.mm(left, right, out=out)),
        ("copy_tb_per_s", 2 * source.nbytes, lambda: target.copy_(source)),
    ):
        timing = clock.time({name: thunk})[name]
        if isinstance(timing, Exception):
            raise timing
        found[name] = work / timing.median_ms / 1e9
    return found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _waits(call: Thunk) -> bool:
    """Whether the host waits for the device; tested first, since a failed capture can do harm."""
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
    """Restore the stream and the generator, which a failed capture leaves in capture mode."""
    torch.cuda.synchronize()
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())


def free_bytes(device: torch.device) -> int | None:
    """Bytes that could be allocated now; None if the system does not report them."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return _proc_bytes("meminfo", "MemAvailable")


def release(device: torch.device) -> None:
    """Free cached device memory that is no longer in use."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def with_peak(call: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """A call's result, and its peak memory in bytes, beyond the memory in use before.

    On CUDA this is the memory of tensors, as counted by torch. On Linux it is the resident memory
    of this process, which includes allocations of libraries; None on other systems.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - held
    if not reset_peak():
        return call(), None
    before = _proc_bytes("self/status", "VmRSS")
    result = call()
    peak = _proc_bytes("self/status", "VmHWM")
    return result, None if before is None or peak is None else max(0, peak - before)


def reset_peak() -> bool:
    """Reset the peak to the current resident memory; False if the system cannot."""
    try:
        # Memory cached by malloc would otherwise count as in use before the call.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return False
    return True


def _proc_bytes(file: str, name: str) -> int | None:
    """The value in bytes of a line such as ``VmRSS: 12 kB`` of a file in /proc."""
    try:
        lines = Path("/proc", file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = (line.split() for line in lines if line.startswith(f"{name}:"))
    return next((1024 * int(value) for _, value, *_ in found), None)
