"""The machine: its devices, its memory, and versions of packages.

On a GPU, peak memory of training is torch's peak of allocated memory. On a CPU it is the size of
parameters and buffers plus the peak growth of the process's resident memory after their creation:
Linux records that peak (``VmHWM``) and lets a process reset it. Free memory is returned to the
system first, since reuse of memory from earlier runs would not be seen. On other systems it is not
measured.
"""

import ctypes
import gc
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lastlayer.lab.errors import LabError

_PACKAGES = ("lastlayer", "torch", "numpy", "numba", "triton", "safetensors", "scipy")


def now() -> str:
    """The current time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that results depend on."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def device_record(device: torch.device) -> dict[str, Any]:
    """A description of the machine, for records."""
    shared = {
        "type": device.type,
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return {**shared, "name": found.name, "memory_mb": found.total_memory // 10**6}
    name = _of_linux("cpuinfo", "model name") or platform.processor() or platform.machine()
    return {**shared, "name": name}


def device_named(name: str) -> torch.device:
    """The device for ``auto``, ``cpu`` or ``cuda`` on this machine."""
    if name == "cuda" and not torch.cuda.is_available():
        raise LabError(
            f"--device: expected a CUDA GPU that torch can use, got none with torch "
            f"{torch.__version__}; use --device cpu"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def git_commit() -> str | None:
    """The commit of the current folder, with a + if it has uncommitted changes."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    made = subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10)
    return made.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _of_linux(file: str, name: str) -> str | None:
    """The value of ``name: value`` in a file below /proc; None on other systems."""
    try:
        lines = Path("/proc", file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _bytes(file: str, name: str) -> int | None:
    found = _of_linux(file, f"{name}:")
    return None if found is None else 1024 * int(found.split()[0])


def _held() -> int:
    """Bytes that this process has allocated and touched, in memory or swapped out."""
    return sum(_bytes("self/status", name) or 0 for name in ("RssAnon", "VmSwap"))


class PeakMemory:
    """Measures peak memory between ``start`` and ``stop``, without evaluation and checkpoints.

    Create it after the warm-up, so that memory for compiling does not count.
    """

    def __init__(self, device: torch.device, *modules: nn.Module) -> None:
        self._device = device
        self._peak: int | None = None
        tensors = [each for part in modules for each in (*part.parameters(), *part.buffers())]
        self._model = sum(each.numel() * each.element_size() for each in tensors)
        give_back()
        self._before = None if device.type == "cuda" else _bytes("self/status", "VmRSS")
        self._held_before = 0 if device.type == "cuda" else _held()

    def start(self) -> None:
        """Start or resume measuring."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._before is not None:
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                self._before = None

    def stop(self) -> None:
        """Pause measuring."""
        if self._device.type == "cuda":
            self._found(torch.cuda.max_memory_allocated(self._device))
            return
        highest = _bytes("self/status", "VmHWM")
        if highest is not None and self._before is not None:
            # The system may drop pages of files meanwhile, which would hide allocations.
            held = _held() - self._held_before
            self._found(self._model + max(0, highest - self._before, held))

    @property
    def megabytes(self) -> float | None:
        """The peak so far, in units of 10⁶ bytes; None where it cannot be measured."""
        return None if self._peak is None else self._peak / 1e6

    def _found(self, peak: int) -> None:
        self._peak = max(self._peak or 0, peak)


def give_back() -> None:
    """Return free memory to the system, where the allocator supports it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        # Only glibc has malloc_trim; on other systems memory is not measured anyway.
        return


# Messages of plain RuntimeErrors: torch's CPU allocator on Linux and on Windows, CUDA outside of
# torch's allocator, and cuBLAS.
_OUT_OF_MEMORY = (
    "can't allocate memory", "not enough memory: you tried to allocate",
    "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a CPU or GPU has no memory left.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("a shape is wrong"))
        (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in _OUT_OF_MEMORY)


def free_memory(device: torch.device) -> int | None:
    """Free bytes on a device; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if (free := _bytes("meminfo", "MemAvailable")) is not None:
        return free
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def load_per_core() -> float | None:
    """Load average per core; None if unknown."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return None
