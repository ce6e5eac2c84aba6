"""Measurements as JSON lines: one object a measurement, only ever appended."""

import json
import math
import os
import platform
from dataclasses import MISSING, asdict, dataclass, fields
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
    """One measurement; what could not be measured is None.

    Attributes:
        date: when it was made, UTC, ISO 8601.
        family: the family of functions, for example ``"maps"``.
        section: the part of the run: ``"shapes"``, ``"scales"`` or ``"widths"``.
        seed: what the inputs were drawn with.
        method: what was called.
        source: the distribution it comes from, and ``source_version`` its version.
        computes: the function it computes.
        implementation: which of our implementations ran.
        shape: sizes of the problem; for maps, rows and columns.
        scale: scores are drawn as scale · N(0, 1).
        median_ms: with p20_ms and p80_ms, of replays of a CUDA graph where eager_ms is given.
        eager_ms: the median of plain calls from Python, the host's work included.
        bytes: the fewest bytes the work must read and write.
        ratio_to_softmax: time over torch.softmax's time in the same case.
        ratio_to_ours: time over the time of our dense result for the same function.
        error: see :class:`lastlayer.bench.verify.Verdict`.
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
    scale: float | None
    direction: str
    median_ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    samples: int
    bytes: int
    tb_per_s: float | None
    copy_tb_per_s: float
    fraction_of_copy: float | None
    ratio_to_softmax: float | None
    ratio_to_ours: float | None
    error: float | None
    row_sum_error: float | None
    verified: bool
    status: str
    eager_ms: float | None = None


_FIELDS = {field.name for field in fields(Record)}
# A field added later gets a default, so that older files stay readable.
_REQUIRED = {field.name for field in fields(Record) if field.default is MISSING}


def _finite(value: Any) -> Any:
    # JSON has no NaN or infinity; the status says that an error was not finite.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append(path: Path, record: Record) -> None:
    """Add one line; the file is created where it does not exist."""
    line = json.dumps({name: _finite(value) for name, value in asdict(record).items()})
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read(path: Path) -> list[Record]:
    """All records of a file, in order.

    Raises:
        ValueError: a line is not a record; the message names file and line.
    """
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            records.append(_parse(line, f"{path}:{number}"))
    return records


def _parse(line: str, where: str) -> Record:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected one JSON object, got {line[:60]!r}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected one JSON object, got {line[:60]!r}")
    missing, unknown = sorted(_REQUIRED - set(values)), sorted(set(values) - _FIELDS)
    if missing or unknown:
        raise ValueError(f"{where}: not a record; missing fields {missing}, unknown {unknown}")
    values["shape"] = tuple(values["shape"])
    return Record(**values)


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
