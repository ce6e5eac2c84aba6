"""The files of a comparison: written atomically, and read into dataclasses.

If the process is killed at any moment, either the old or the new file is there.
"""

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any, TypeVar

from lastlayer.lab.errors import LabError
from lastlayer.lab.families import title

if sys.platform != "win32":
    import fcntl

LOCK = ".lock"


def finite(value: Any) -> Any:
    """Replace NaN and infinity by None, since JSON does not support them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder; its file replaces ``path`` at the end."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
    except BaseException:
        if temporary.is_file():
            temporary.unlink()
        raise
    temporary.replace(path)


def write_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write a file atomically, also in case of a power cut."""
    with replacing(path) as new, new.open("w", encoding="utf-8", errors=errors) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Write JSON; infinite numbers and NaN become null."""
    write_text(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LabError(f"'{path}': expected a file, got none there") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise LabError(f"'{path}': expected JSON, got a broken file ({error})") from error
    if not isinstance(value, dict):
        raise LabError(f"'{path}': expected a JSON object, got {type(value).__name__}")
    return value


class JsonLines:
    """Appends to a file of JSON lines; every line is flushed."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        """Append after the first ``keep`` bytes; the rest of the file is removed."""
        self._file = path.open("a+b")
        self._file.truncate(keep)
        self._file.seek(0, os.SEEK_END)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self._file.tell()

    def append(self, record: dict[str, Any]) -> None:
        """Append one record."""
        self._file.write(json.dumps(finite(record), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Lock:
    """A lock, so that only one process at a time works in a folder.

    The system releases it when the process dies for any reason; the next process reuses the file.
    On systems without such locks, such as Windows, it does nothing.

    Raises:
        LabError: another process holds the lock.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._file: IO[str] | None = None
        while sys.platform != "win32" and self._file is None:
            file = self._path.open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another"
                file.close()
                raise LabError(
                    f"--out: expected a folder that no other process works on, got '{folder}', on "
                    f"which process {holder} does; wait for it, or choose another --out"
                ) from None
            except OSError:
                # Some network file systems have no locks.
                file.close()
                return
            # The former holder may have removed the file since it was opened.
            if self._path.exists() and self._path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                self._file = file
                file.truncate(0)
                file.write(f"{os.getpid()}\n")
                file.flush()
            else:
                file.close()

    def release(self) -> None:
        """Release the lock and remove its file."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def check_writable(folder: Path, *, option: str = "--out") -> None:
    """Create the folder and write a file into it, so that errors are raised before training."""
    probe = folder / ".probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"lastlayer")
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise LabError(
            f"{option}: expected a folder that can be written, got '{folder}': {reason}"
        ) from error


FROM_PYTHON = "lastlayer.lab.compare"
"""The recorded command of a comparison from Python."""
STARTED = "class frequencies"
"""The recorded initialisation of biases, if the head supports it."""
# Statuses of runs that may still finish.
OPEN = ("interrupted", "unfinished", "not started")

SCHEMA = 1
COSTS_FILE, COSTS_SCHEMA = "costs.json", 1
RATES_FILE = "rates.json"

_Record = TypeVar("_Record")


def from_json(kind: type[_Record], record: Mapping[str, Any]) -> _Record:
    """A dataclass from a JSON object; unknown fields are ignored."""
    known = (each.name for each in fields(kind) if each.init)  # type: ignore[arg-type]
    return kind(**{name: record[name] for name in known if record.get(name) is not None})


@dataclass(frozen=True)
class HeadEntry:
    """A head of a comparison."""

    spec: str
    label: str = ""
    slug: str = ""
    family: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    """Display name, unique within a comparison."""


@dataclass(frozen=True)
class Point:
    """A line of metrics.jsonl."""

    step: int
    seconds: float  # training time, without warm-up and evaluation
    values: Mapping[str, float]  # its finite values


@dataclass(frozen=True)
class Run:
    """One head with one seed."""

    head: HeadEntry
    seed: int
    status: str
    reason: str
    numbers: Mapping[str, float]  # finite costs, such as ``steps`` and ``step_ms``
    test: Mapping[str, float]  # finite metrics on test data
    calibration: tuple[Mapping[str, float], ...] = ()
    by_decile: tuple[Mapping[str, float], ...] = ()
    explorer: tuple[Mapping[str, Any], ...] = ()
    bias: str = ""  # how the biases of the head were initialised
    train: tuple[Point, ...] = ()
    valid: tuple[Point, ...] = ()

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.head.slug}-s{self.seed}"

    @property
    def finished(self) -> bool:
        """Whether it was trained and tested."""
        return self.status == "ok"

    @property
    def failed(self) -> bool:
        """Whether it ended without a result."""
        return self.status not in ("ok", *OPEN)


@dataclass(frozen=True)
class Comparison:
    """The settings of a comparison, and its runs."""

    folder: Path
    heads: tuple[HeadEntry, ...]
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    budget: Mapping[str, Any] = field(default_factory=dict)
    baseline: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of predicting the class frequencies."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str] = ()
    created: str = ""
    git: str | None = None

    @property
    def task(self) -> str:
        """One of ``lm``, ``classification``, ``multilabel`` and ``pairs``."""
        return str(self.data.get("task", "lm"))

    @property
    def n_classes(self) -> int | None:
        """Number of classes, if known."""
        found = self.data.get("classes")
        return int(found) if isinstance(found, int | float) else None

    @property
    def from_python(self) -> bool:
        """Whether it was made by :func:`lastlayer.lab.compare`, with arguments, not options."""
        return list(self.command[:1]) == [FROM_PYTHON]


def read_comparison(folder: Path) -> Comparison:
    """Read the folder of a comparison, finished or not."""
    folder = Path(folder)
    path = folder / "compare.json"
    if not path.is_file():
        raise LabError(
            f"folder: expected one that `lastlayer compare --out` wrote, with a compare.json, "
            f"got '{folder}'; give the folder above runs/"
        )
    asked = read_json(path)
    if asked.get("schema", SCHEMA) != SCHEMA:
        raise LabError(
            f"'{path}': expected schema {SCHEMA}, got {asked['schema']!r}; read it with the "
            "version of lastlayer that wrote it"
        )
    heads, seeds = _heads(asked.get("heads") or ()), tuple(map(int, asked.get("seeds", ())))
    runs = tuple(_read_run(folder / "runs", head, seed) for head in heads for seed in seeds)
    made = {**asked, "folder": folder, "heads": heads, "seeds": seeds, "runs": runs}
    return from_json(Comparison, made)


def _heads(entries: Sequence[Mapping[str, Any]]) -> tuple[HeadEntry, ...]:
    heads = []
    for entry in entries:
        head = from_json(HeadEntry, {**entry, "spec": str(entry.get("spec", ""))})
        label, slug = head.label or head.spec, head.slug or head.spec
        heads.append(replace(head, label=label, slug=slug, title=title(head.family, label)))
    often = Counter(head.title for head in heads)
    # A user's class may have the same name as one of ours.
    return tuple(
        replace(head, title=f"{head.title} [{head.spec}]") if often[head.title] > 1 else head
        for head in heads
    )


def _read_run(runs: Path, head: HeadEntry, seed: int) -> Run:
    folder = runs / f"{head.slug}-s{seed}"
    path, lines = folder / "result.json", read_lines(folder / "metrics.jsonl")
    result = read_json(path) if path.is_file() else {}
    test = result.get("test") or {}
    reached = [_numbers(line) for line in lines]
    # Progress of a run without a result.
    latest = {
        name: max(line[key] for line in reached if key in line)
        for key, name in (("step", "steps"), ("seconds", "seconds"), ("tokens", "tokens"))
        if any(key in line for line in reached)
    }
    return Run(
        head=head,
        seed=seed,
        status=result.get("status") or ("unfinished" if folder.is_dir() else "not started"),
        reason=result.get("reason") or "",
        numbers=_numbers(result) or latest,
        test=_numbers(test),
        calibration=tuple(map(_numbers, test.get("calibration") or ())),
        by_decile=tuple(map(_numbers, test.get("by_decile") or ())),
        explorer=tuple(each for each in result.get("explorer") or () if isinstance(each, dict)),
        bias=result.get("bias") or "",
        train=_points(lines, "train"),
        valid=_points(lines, "valid"),
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; after a kill its last line may be incomplete."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise LabError(f"'{path}' line {number}: expected JSON, got {line[:60]!r}") from error
    return [each for each in found if isinstance(each, dict)]


def _points(lines: list[dict[str, Any]], kind: str) -> tuple[Point, ...]:
    """Points of one kind, by step; the last one counts if a step is repeated."""
    last: dict[int, Point] = {}
    for line in lines:
        values = _numbers(line)
        if line.get("kind") == kind and {"step", "seconds"} <= values.keys():
            last[int(values["step"])] = Point(int(values["step"]), values["seconds"], values)
    return tuple(last[step] for step in sorted(last))


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among the values."""
    return {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


@dataclass(frozen=True)
class Cost:
    """A training step of one head at one number of classes, forward and backward."""

    slug: str
    classes: int
    ms: float | None = None  # median milliseconds; None if not measured
    low_ms: float | None = None  # 20th percentile
    high_ms: float | None = None  # 80th percentile
    samples: int = 0  # number of timed steps
    # Of the head and its step; None if it could not be measured.
    peak_memory_mb: float | None = None
    parameters: int | None = None
    reason: str = ""  # why it was not measured


@dataclass(frozen=True)
class Costs:
    """All measured costs, and the sizes of the problem."""

    rows: int  # rows per step
    width: int  # size of the hidden state
    own: int  # the number of classes of the data
    found: tuple[Cost, ...]


def read_rates(folder: Path) -> dict[str, dict[str, Any]]:
    """Learning rates that were tried, by the slug of the head; empty if the rate was given."""
    path = folder / RATES_FILE
    held = read_json(path) if path.is_file() else {}
    return {slug: found for slug, found in held.items() if isinstance(found, dict)}


def read_costs(folder: Path) -> Costs | None:
    """Read costs.json in the folder of a comparison; None if there is no such file."""
    path = folder / COSTS_FILE
    if not path.is_file():
        return None
    held = read_json(path)
    if held.get("schema") != COSTS_SCHEMA:
        raise LabError(
            f"'{path}': expected schema {COSTS_SCHEMA}, got {held.get('schema')!r}; read it with "
            "the version of lastlayer that wrote it, or delete it"
        )
    try:
        return from_json(Costs, {**held, "found": tuple(from_json(Cost, c) for c in held["costs"])})
    except (KeyError, TypeError, AttributeError) as error:
        raise LabError(
            f"'{path}': expected a file of `lastlayer compare`, got {type(error).__name__}: "
            f"{error}; delete it"
        ) from error


def told_of(data: dict[str, Any]) -> list[str]:
    """Lines for the terminal about inferred properties of the data: task, columns and notes."""
    described = data["description"]
    task = f"Task: {data['task']}"
    if described.get("task_reason", "as asked") != "as asked":
        task += f" ({described['task_reason']}; --task sets another one)"
    lines = [task]
    columns = {
        use: [names] if isinstance(names, str) else names
        for use, names in (described.get("columns") or {}).items()
    }
    if columns:
        found = (
            f"{use} from {', '.join(names[:6])}{', …' * (len(names) > 6)}"
            for use, names in columns.items()
        )
        lines.append(f"Columns: {'; '.join(found)}")
    return [*lines, *(f"Note: {each}." for each in described.get("notes", ()))]
