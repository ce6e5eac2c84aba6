"""A folder of runs as values: what was asked, and what each run left behind."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lastlayer.lab.errors import LabError
from lastlayer.lab.families import title

FINISHED = "ok"
# Came to no result, and would not with more time.
FAILED = ("nan", "diverged", "out of memory", "error")
# Could still come to one.
OPEN = ("interrupted", "unfinished", "not started")

SCHEMA = 1
COSTS_FILE, COSTS_SCHEMA = "costs.json", 1
RATES_FILE = "rates.json"


@dataclass(frozen=True)
class HeadEntry:
    """A head that was asked for."""

    spec: str
    label: str
    slug: str
    family: str
    arguments: Mapping[str, Any]
    title: str = ""
    """What people call it; no two heads of a comparison have the same."""


@dataclass(frozen=True)
class Point:
    """A line of metrics.jsonl."""

    step: int
    seconds: float
    """Of training alone, without warm-up and evaluation."""
    values: Mapping[str, float]
    """What is finite of it."""


@dataclass(frozen=True)
class Run:
    """One head with one seed."""

    head: HeadEntry
    seed: int
    status: str
    reason: str
    numbers: Mapping[str, float]
    """Costs, such as ``steps`` and ``step_ms``; what is finite of them."""
    test: Mapping[str, float]
    """Quality on test data; what is finite of it."""
    calibration: tuple[Mapping[str, float], ...] = ()
    by_decile: tuple[Mapping[str, float], ...] = ()
    explorer: tuple[Mapping[str, Any], ...] = ()
    bias: str = ""
    """How the biases of the head have started."""
    train: tuple[Point, ...] = ()
    valid: tuple[Point, ...] = ()

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.head.slug}-s{self.seed}"

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.status == FINISHED

    @property
    def failed(self) -> bool:
        """Whether it can come to no result."""
        return self.status not in (FINISHED, *OPEN)


@dataclass(frozen=True)
class Comparison:
    """What ``lastlayer compare`` was asked for, and the runs it made."""

    folder: Path
    heads: tuple[HeadEntry, ...]
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    budget: Mapping[str, Any] = field(default_factory=dict)
    baseline: Mapping[str, Any] = field(default_factory=dict)
    """What the frequencies of classes alone reach."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    created: str = ""
    git: str | None = None

    @property
    def task(self) -> str:
        """``lm`` or ``multilabel``."""
        return str(self.data.get("task", "lm"))

    @property
    def n_classes(self) -> int | None:
        """How many classes there are to choose from, where it is known."""
        found = self.data.get("classes")
        return int(found) if isinstance(found, int | float) else None

    def runs_of(self, head: HeadEntry) -> tuple[Run, ...]:
        """Those of one head, in the order of seeds."""
        return tuple(run for run in self.runs if run.head.slug == head.slug)


def read_comparison(folder: Path) -> Comparison:
    """Everything in a folder that ``lastlayer compare`` wrote, or is still writing.

    Raises:
        LabError: it is no such folder, or a file in it is broken.
    """
    folder = Path(folder)
    path = folder / "compare.json"
    if not path.is_file():
        raise LabError(
            f"folder: expected one that `lastlayer compare --out` wrote, with a compare.json, "
            f"got '{folder}'; give the folder above runs/"
        )
    asked = read_object(path)
    if asked.get("schema", SCHEMA) != SCHEMA:
        raise LabError(
            f"'{path}': expected schema {SCHEMA}, got {asked['schema']!r}; read it with the "
            "version of lastlayer that wrote it"
        )
    heads = _heads(asked.get("heads") or ())
    seeds = tuple(int(seed) for seed in asked.get("seeds", ()))
    return Comparison(
        folder=folder,
        heads=heads,
        seeds=seeds,
        runs=tuple(_read_run(folder / "runs", head, seed) for head in heads for seed in seeds),
        **{
            key: _mapping(asked.get(key))
            for key in ("data", "model", "budget", "baseline", "settings", "device", "versions")
        },
        command=tuple(str(word) for word in asked.get("command") or ()),
        created=str(asked.get("created") or ""),
        git=asked.get("git"),
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, where a kill may have cut the last line short.

    Raises:
        LabError: another line is broken.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise LabError(f"'{path}' line {number}: expected JSON, got {line[:60]!r}") from error
        if isinstance(value, dict):
            found.append(value)
    return found


def _read_run(runs: Path, head: HeadEntry, seed: int) -> Run:
    folder = runs / f"{head.slug}-s{seed}"
    result_path = folder / "result.json"
    lines = read_lines(folder / "metrics.jsonl")
    result = read_object(result_path) if result_path.is_file() else {}
    test = _mapping(result.get("test"))
    status = result.get("status") or ("unfinished" if folder.is_dir() else "not started")
    numbers = _finite(result) or _latest(lines)
    return Run(
        head=head,
        seed=seed,
        status=str(status),
        reason=str(result.get("reason") or ""),
        numbers=numbers,
        test=_finite(test),
        calibration=tuple(_finite(_mapping(bin_)) for bin_ in test.get("calibration") or ()),
        by_decile=tuple(_finite(_mapping(part)) for part in test.get("by_decile") or ()),
        explorer=tuple(_mapping(entry) for entry in result.get("explorer") or ()),
        bias=str(result.get("bias") or ""),
        train=_points(lines, "train"),
        valid=_points(lines, "valid"),
    )


def _points(lines: list[dict[str, Any]], kind: str) -> tuple[Point, ...]:
    """Those of one kind, in the order of steps; a step that was repeated counts once."""
    last: dict[int, Point] = {}
    for line in lines:
        values = _finite(line)
        if line.get("kind") == kind and "step" in values and "seconds" in values:
            step = int(values["step"])
            last[step] = Point(step, values["seconds"], values)
    return tuple(last[step] for step in sorted(last))


def _latest(lines: list[dict[str, Any]]) -> Mapping[str, float]:
    """How far a run without a result has come."""
    reached = [_finite(line) for line in lines]
    keys = ("step", "seconds", "tokens")
    newest = {key: max((r[key] for r in reached if key in r), default=None) for key in keys}
    return {
        {"step": "steps"}.get(key, key): value for key, value in newest.items() if value is not None
    }


def _heads(entries: Sequence[Any]) -> tuple[HeadEntry, ...]:
    heads = [_head(_mapping(entry)) for entry in entries]
    often = Counter(head.title for head in heads)
    # A class of the user's may be called as one of ours.
    return tuple(
        replace(head, title=f"{head.title} [{head.spec}]") if often[head.title] > 1 else head
        for head in heads
    )


def _head(entry: Mapping[str, Any]) -> HeadEntry:
    spec = str(entry.get("spec", ""))
    label, family = str(entry.get("label") or spec), str(entry.get("family") or "")
    return HeadEntry(
        spec=spec,
        label=label,
        slug=str(entry.get("slug") or spec),
        family=family,
        arguments=_mapping(entry.get("arguments")),
        title=title(family, label),
    )


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the values; NaN and infinity are written as null, or as Python does."""
    return {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object.

    Raises:
        LabError: it is broken, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LabError(f"'{path}': expected JSON, got a broken file ({error})") from error
    if not isinstance(value, dict):
        raise LabError(f"'{path}': expected a JSON object, got {type(value).__name__}")
    return value


@dataclass(frozen=True)
class Cost:
    """A training step of one head at one number of classes.

    Attributes:
        slug: the head's name in folders.
        classes: how many.
        ms: median milliseconds of forward and backward; None where it was not measured.
        low_ms: 20th percentile.
        high_ms: 80th percentile.
        samples: how many steps were timed.
        peak_memory_mb: of the head and its step; None where it could not be measured.
        parameters: of the head.
        reason: why it was not measured, else empty.
    """

    slug: str
    classes: int
    ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    samples: int = 0
    peak_memory_mb: float | None = None
    parameters: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class Costs:
    """All that was measured, and with what.

    Attributes:
        rows: in a step.
        width: size of the hidden state.
        own: the number of classes of the data.
        found: in the order in which they were measured.
    """

    rows: int
    width: int
    own: int
    found: tuple[Cost, ...]


def read_rates(folder: Path) -> dict[str, dict[str, Any]]:
    """Learning rates that were tried, by the slug of the head; none where they were given.

    Raises:
        LabError: the file is broken.
    """
    path = folder / RATES_FILE
    held = read_object(path) if path.is_file() else {}
    return {slug: found for slug, found in held.items() if isinstance(found, dict)}


def read_costs(folder: Path) -> Costs | None:
    """What costs.json in the folder of a comparison holds; None where there is no such file.

    Raises:
        LabError: the file is broken.
    """
    path = folder / COSTS_FILE
    if not path.is_file():
        return None
    held = read_object(path)
    if held.get("schema") != COSTS_SCHEMA:
        raise LabError(
            f"'{path}': expected schema {COSTS_SCHEMA}, got {held.get('schema')!r}; read it with "
            "the version of lastlayer that wrote it, or delete it"
        )
    try:
        return Costs(
            rows=int(held["rows"]),
            width=int(held["width"]),
            own=int(held["own"]),
            found=tuple(_cost(each) for each in held["costs"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LabError(
            f"'{path}': expected what `lastlayer compare` wrote, got {type(error).__name__}: "
            f"{error}; delete it"
        ) from error


def _cost(entry: Mapping[str, Any]) -> Cost:
    numbers = ("ms", "low_ms", "high_ms", "peak_memory_mb")
    return Cost(
        slug=str(entry["slug"]),
        classes=int(entry["classes"]),
        samples=int(entry.get("samples") or 0),
        parameters=None if entry.get("parameters") is None else int(entry["parameters"]),
        reason=str(entry.get("reason") or ""),
        **{name: None if entry.get(name) is None else float(entry[name]) for name in numbers},
    )
