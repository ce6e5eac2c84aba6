"""Where and with what a comparison was made."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lastlayer.lab.errors import LabError

_PACKAGES = ("lastlayer", "torch", "numpy", "numba", "triton", "safetensors", "scipy")


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that numbers depend on."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def device_record(device: torch.device) -> dict[str, Any]:
    """The machine in words."""
    shared = {
        "type": device.type,
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return {**shared, "name": found.name, "memory_mb": found.total_memory // 10**6}
    return {**shared, "name": _processor()}


def device_named(name: str) -> torch.device:
    """The device that ``auto``, ``cpu`` or ``cuda`` means here."""
    if name == "cuda" and not torch.cuda.is_available():
        raise LabError(
            f"--device: expected a CUDA GPU that torch can use, got none with torch "
            f"{torch.__version__}; use --device cpu"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def git_commit() -> str | None:
    """Of the folder that the command was given in, with a + where it has changes."""
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


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
