"""One measurement: where it was made, what was measured, and what came out."""

import json
import math
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where and with what a run was made.

    Attributes:
        run: the run's own name, the same in all its records.
        quick: whether the run used few shapes and repeats.
        device: the name of the GPU or processor.
        device_type: ``"cuda"`` or ``"cpu"``.
        threads: threads that torch used; None on a GPU.
    """

    run: str
    quick: bool
    device: str
    device_type: str
    threads: int | None
    python: str
    torch: str
    triton: str | None
    numba: str | None
    lastlayer: str


@dataclass(frozen=True, kw_only=True)
class Record(Environment):
    """One measurement; what could not be measured is None. Families add what they measure.

    Attributes:
        date: when it was made, UTC, ISO 8601.
        family: the family of functions, for example ``"maps"``.
        section: the part of the run, for example ``"shapes"``.
        seed: what the inputs were drawn with.
        method: what was called.
        source: the distribution it comes from, and ``source_version`` its version.
        computes: the function it computes.
        implementation: which of our implementations ran.
        shape: sizes of the problem; for maps, rows and columns.
        median_ms: with p20_ms and p80_ms, of replays of a CUDA graph where eager_ms is given.
        eager_ms: the median of plain calls from Python, the host's work included.
        ratio_to_ours: time over the time of our main result for the same function.
        verified: whether the result was right.
        status: ``"ok"``, or what is wrong.
    """

    date: str
    family: str
    section: str
    seed: int
    method: str
    source: str
    source_version: str | None
    computes: str
    implementation: str | None
    shape: tuple[int, ...]
    dtype: str
    direction: str
    median_ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    samples: int
    ratio_to_ours: float | None
    verified: bool
    status: str
    eager_ms: float | None = None

    @property
    def size(self) -> str:
        """The sizes of the problem, for example 8192×32768."""
        return "×".join(str(extent) for extent in self.shape)

    @property
    def label(self) -> str:
        """Source and method."""
        return f"{self.source} {self.method}"

    @property
    def case(self) -> str:
        """What it was measured on, in one line."""
        return f"{self.size} {self.dtype} {self.direction}"

    @property
    def part(self) -> tuple[str, ...]:
        """What part of a run it belongs to: of each, the newest run counts."""
        return self.section, self.dtype, self.direction

    @property
    def is_ours(self) -> bool:
        """Whether this library was measured."""
        return self.source == "lastlayer"


def _finite(value: Any) -> Any:
    # JSON has no NaN or infinity; the status says that an error was not finite.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append(path: Path, record: Record) -> None:
    """Add one line; the file is created where it does not exist."""
    line = json.dumps({name: _finite(value) for name, value in asdict(record).items()})
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


@cache
def version(distribution: str) -> str | None:
    """The version of an installed distribution, None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment(device: torch.device, *, quick: bool) -> Environment:
    """Describe this machine and the packages that matter for a timing."""
    on_cpu = device.type == "cpu"
    return Environment(
        run=f"{now()} {os.getpid()}",
        quick=quick,
        device=_processor_name() if on_cpu else torch.cuda.get_device_name(device),
        device_type=device.type,
        threads=torch.get_num_threads() if on_cpu else None,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=version("triton"),
        numba=version("numba"),
        lastlayer=version("lastlayer") or "unreleased",
    )


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
