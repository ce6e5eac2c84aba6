"""What a user sees of a call on a GPU: wall clock, the host's work included."""

import time
from dataclasses import dataclass

import torch

from lastlayer.bench.timing import TakingTurns, Thunk


@dataclass(frozen=True)
class CudaWallTimer(TakingTurns):
    """Wall clock around consecutive plain calls, from an idle device to an idle device.

    The host prepares a call while the device is busy with the one before, as in training, so that
    a time is the host's or the device's, whichever is longer, and both where the host has to wait.
    """

    def milliseconds(self, thunk: Thunk, repeats: int) -> float:
        """One sample: the mean of so many calls."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            thunk()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3 / repeats
