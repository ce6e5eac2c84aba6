"""How much memory a call takes, and how much there is."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
_SYSTEM, _STATUS = Path("/proc/meminfo"), Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def free_bytes(device: torch.device) -> int | None:
    """Bytes that could be allocated now; None where this system does not say."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return _kilobytes(_SYSTEM, "MemAvailable")


def release(device: torch.device) -> None:
    """Give back device memory that nobody refers to any more."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def with_peak(call: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """A call's result, and the most bytes that were held during it beyond those held before.

    On CUDA these are bytes of tensors, as torch counts them. On Linux they are the peak of the
    resident memory of this process, which also counts what libraries allocate for themselves;
    None on other systems.
    """
    return _on_cuda(call, device) if device.type == "cuda" else _on_cpu(call)


def _on_cuda(call: Callable[[], T], device: torch.device) -> tuple[T, int]:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    return result, torch.cuda.max_memory_allocated(device) - before


def _on_cpu(call: Callable[[], T]) -> tuple[T, int | None]:
    if not _reset_peak():
        return call(), None
    before = _kilobytes(_STATUS, "VmRSS")
    result = call()
    peak = _kilobytes(_STATUS, "VmHWM")
    return result, None if before is None or peak is None else max(0, peak - before)


def _reset_peak() -> bool:
    """Make this moment's resident memory the peak; False where the system cannot."""
    try:
        # What malloc keeps for later would otherwise count as held before the call.
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text("5")
    except (OSError, AttributeError):
        return False
    return True


def _kilobytes(path: Path, name: str) -> int | None:
    """A line such as ``VmRSS: 12 kB`` of a file below /proc, in bytes."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key == name:
            return 1024 * int(value.split()[0])
    return None
