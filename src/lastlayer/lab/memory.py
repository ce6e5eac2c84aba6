"""Peak memory of training.

On a GPU it is what torch has allocated at most. On a CPU it is what parameters and buffers take,
and by how much the resident memory of the process has grown at most since they were made: Linux
keeps that peak (``VmHWM``) and lets a process reset it. Free memory is given back to the system
first, so that what earlier runs left behind is not reused unseen. Elsewhere it is not measured.
"""

import ctypes
import gc
from pathlib import Path

import torch
from torch import nn

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures between ``start`` and ``stop``; evaluation and checkpoints are left out.

    Make it when the model is warm: what was compiled until then does not count.

    Args:
        device: of the model.
        modules: the model.
    """

    def __init__(self, device: torch.device, *modules: nn.Module) -> None:
        self._device = device
        self._peak: int | None = None
        tensors = [each for part in modules for each in (*part.parameters(), *part.buffers())]
        self._model = sum(each.numel() * each.element_size() for each in tensors)
        give_back()
        self._before = None if device.type == "cuda" else _resident("VmRSS")

    def start(self) -> None:
        """Training goes on."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._before is not None:
            try:
                _RESET.write_text("5")
            except OSError:
                self._before = None

    def stop(self) -> None:
        """Something else comes."""
        if self._device.type == "cuda":
            self._found(torch.cuda.max_memory_allocated(self._device))
            return
        highest = _resident("VmHWM")
        if highest is not None and self._before is not None:
            self._found(self._model + max(0, highest - self._before))

    @property
    def megabytes(self) -> float | None:
        """The peak so far, in units of 10⁶ bytes; None where it cannot be measured."""
        return None if self._peak is None else self._peak / 1e6

    def _found(self, peak: int) -> None:
        self._peak = max(self._peak or 0, peak)


def _resident(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith(f"{name}:")]
    return int(found[0][1]) * 1024 if found else None


def give_back() -> None:
    """Free memory goes back to the system, where the allocator can do that."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        # Only glibc has it; elsewhere memory is not measured anyway.
        return
