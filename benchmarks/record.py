"""One measurement as a line of JSON: the method, the case, the machine, the commit, the results."""

import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
OURS = "lastlayer"
FAMILIES = (
    "fused",
    "multilabel",
    "contrastive",
    "heads",
    "maps",
    "attention",
    "plain",
    "llama",
    "sweep",
)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One method on one case; values that were not measured are None.

    Attributes:
        run: name of the run, the same in all its records.
        commit: short hash of the source, with ``-dirty`` if it had local changes.
        source: the distribution that the method is from.
        computes: the function that it computes.
        median_ms: time of a plain eager call, host time included; with p20_ms and p80_ms.
        replayed_ms: time per call of a replayed CUDA graph; None if the call cannot be captured.
        baseline: label of the method by whose time the times of the case are divided.
        flop: floating-point operations that the problem needs, the same for all methods.
        bytes: the fewest bytes that the problem must read and write.
        gemm_tflop_per_s: rate of a large matrix product in the same run.
        copy_tb_per_s: bytes per second that a copy of a large buffer reads and writes.
        peak_bytes: peak memory beyond inputs and results (heads: and parameters; their gradients
            count).
        errors: errors against the float64 reference, by the name of the result.
        verified: whether all errors are within the tolerances; ``status`` is "ok" or the reason.
        scale: standard deviation of the scores, for maps; ``scores`` is the kind of scores, for
            fused losses; ``inputs`` describes the inputs.
        settings: settings of a head, such as cutoffs; ``parameters`` is its number of parameters.
        support_mean: mean number of classes with a probability above zero per row, for sparse
            functions.
    """

    run: str
    date: str
    quick: bool
    device: str
    device_type: str
    family: str
    section: str
    method: str
    source: str
    computes: str
    shape: tuple[int, ...]
    dtype: str
    direction: str
    verified: bool
    status: str
    commit: str | None = None
    threads: int | None = None
    python: str | None = None
    torch: str | None = None
    triton: str | None = None
    numba: str | None = None
    lastlayer: str | None = None
    seed: int | None = None
    source_version: str | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    samples: int = 0
    replayed_ms: float | None = None
    baseline: str | None = None
    flop: float | None = None
    bytes: float | None = None
    gemm_tflop_per_s: float | None = None
    copy_tb_per_s: float | None = None
    peak_bytes: int | None = None
    errors: dict[str, float | None] = field(default_factory=dict)
    scale: float | None = None
    scores: str | None = None
    inputs: str | None = None
    settings: str | None = None
    parameters: int | None = None
    support_mean: float | None = None
    support_max: int | None = None

    @property
    def label(self) -> str:
        """Source and method."""
        return f"{self.source} {self.method}"

    @property
    def is_ours(self) -> bool:
        """Whether the method is from this library."""
        return self.source == OURS

    @property
    def title(self) -> str:
        """The case in one line."""
        return title(*self.case[1:])

    @property
    def case(self) -> tuple[Any, ...]:
        """The key of the case, the same in all runs and on all machines."""
        kind = self.dtype, self.direction, self.scale, self.scores
        return self.family, self.section, self.shape, *kind

    def rate(self, milliseconds: float | None) -> float | None:
        """Tera-operations per second, or terabytes per second if the work is in bytes."""
        work = self.flop if self.flop is not None else self.bytes
        return work / milliseconds / 1e9 if work and milliseconds else None

    def of_limit(self, milliseconds: float | None) -> float | None:
        """The rate divided by the limit of the device: that of a matrix product, or of a copy."""
        rate = self.rate(milliseconds)
        limit = self.gemm_tflop_per_s if self.flop is not None else self.copy_tb_per_s
        return rate / limit if rate and limit else None


def title(
    section: str,
    shape: tuple[int, ...],
    dtype: str,
    direction: str,
    scale: float | None,
    scores: str | None,
) -> str:
    """A case in one line."""
    if len(shape) == 1:
        return f"{section} {shape[0]:,} classes"
    text = f"{section} {'×'.join(map(str, shape))} {dtype} {direction}"
    text += "" if scale is None else f", scale {scale:g}"
    return text + ("" if scores is None else f", {scores} scores")


def append(path: Path, record: Record) -> None:
    """Append one line, without empty fields; the file is created if needed."""
    values = {k: _finite(v) for k, v in asdict(record).items() if v is not None and v != {}}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def read(path: Path) -> list[Record]:
    """All records of a file, or of the ``*.jsonl`` files of a folder, in order.

    Lines of ``python -m benchmarks structure``, ``vectors`` and ``parallel`` are skipped.

    Raises:
        ValueError: if a line is not a record; the message names the file and the line.
    """
    if path.is_dir():
        return [record for each in sorted(path.glob("*.jsonl")) for record in read(each)]
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    parsed = (_parse(line, f"{path}:{number}") for number, line in lines if line.strip())
    return [record for record in parsed if record is not None]


def newest(records: Iterable[Record]) -> list[Record]:
    """The records of the newest run of each case on each device that was not quick, by date."""
    full = sorted((r for r in records if not r.quick), key=lambda r: r.date)
    run = {(r.device, r.case): r.run for r in full}
    return [r for r in full if r.run == run[r.device, r.case]]


def _parse(line: str, where: str) -> Record | None:
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected one JSON object, got {line[:60]!r}")
    if values.get("family") in ("structure", "vectors", "parallel"):
        return None
    if values.get("family") not in FAMILIES:
        families = ", ".join(FAMILIES)
        raise ValueError(f"{where}: expected a family of {families}, got {values.get('family')!r}")
    if "errors" not in values:
        values = _from_old(values)
    try:
        return Record(**values | {"shape": tuple(values.get("shape", ()))})
    except TypeError as error:
        raise ValueError(f"{where}: expected the fields of a record, got {error}") from error


def _from_old(values: dict[str, Any]) -> dict[str, Any]:
    """Converts an old record without a commit to the current fields.

    In these, ``median_ms`` is the replayed time if there is an ``eager_ms``, rates were stored
    instead of the work, and each error had its own field.
    """
    values = dict(values)
    median, eager = values.get("median_ms"), values.get("eager_ms")
    for count, rate in (("flop", "tflop_per_s"), ("bytes", "tb_per_s")):
        if values.get(rate) and median and count not in values:
            values[count] = round(values[rate] * median * 1e9)
    if eager is not None:
        values |= {"median_ms": eager, "replayed_ms": median, "p20_ms": None, "p80_ms": None}
    if values["family"] == "maps":
        values["baseline"] = None if values["section"] == "scales" else "torch softmax"
        names = {"error": "entries", "row_sum_error": "sums"}
        if values["direction"] != "forward":
            names["error"] = "gradient"
    else:
        names = {name: name.removesuffix("_error") for name in values if name.endswith("_error")}
        names["value_error"] = "log_prob"
    errors = {new: values.pop(old, None) for old, new in names.items()}
    values["errors"] = {name: error for name, error in errors.items() if error is not None}
    made = values.get("scores_made", values.get("inputs_made"))
    values |= {} if made is None else {"inputs": made}
    # Other fields can be computed from these, or are no longer used.
    known = {each.name for each in fields(Record)}
    return {name: value for name, value in values.items() if name in known}


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by None; the status names the error."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@cache
def version(distribution: str) -> str | None:
    """Version of a distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def now() -> str:
    """The current time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str | None:
    """Short hash of the checked-out commit, with ``-dirty`` if the code differs from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        code = "src", "benchmarks", "studies", ":!benchmarks/results"
        changed = git("status", "--porcelain", "--", *code)
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def environment(device: torch.device, *, quick: bool, at: str | None = None) -> dict[str, Any]:
    """The fields that all records of a run share; ``at`` is the commit if git is not available."""
    on_cpu = device.type == "cpu"
    return {
        "run": f"{now()} {os.getpid()}",
        "commit": at or commit(),
        "quick": quick,
        "device": _processor() if on_cpu else torch.cuda.get_device_name(device),
        "device_type": device.type,
        "threads": torch.get_num_threads() if on_cpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "numba": version("numba"),
        "lastlayer": version("lastlayer") or "unreleased",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
