"""Short calls are timed as graphs, long ones in turns."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from lastlayer.bench.timing import K, Thunk, Timer, Timing

# As long as this a call hides the host's work, and heats the device.
_LONG_MS = 2.0


@dataclass(frozen=True)
class ByLength:
    """Times competitors by what the fastest of them needs.

    Attributes:
        short: for calls that are over before the host could ask for the next.
        long: for calls that change the clocks of the device.
    """

    short: Timer
    long: Timer

    def time(self, thunks: Mapping[K, Thunk]) -> Iterator[tuple[K, Timing | Exception]]:
        """Yield each competitor's timing as soon as it is known."""
        fastest = min(map(_milliseconds, thunks.values()), default=0.0)
        yield from (self.long if fastest > _LONG_MS else self.short).time(thunks)


def _milliseconds(thunk: Thunk) -> float:
    """Of the better of two calls; infinite where it raises, which the timer then tells."""
    best = float("inf")
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        try:
            thunk()
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 — a competitor may fail in any way
            return float("inf")
        best = min(best, (time.perf_counter() - start) * 1e3)
    return best
