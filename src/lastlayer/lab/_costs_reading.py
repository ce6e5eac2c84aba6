"""costs.json as values: what a step of each head takes at several numbers of classes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastlayer.lab._reading import read_object
from lastlayer.lab.errors import LabError

COSTS_FILE, COSTS_SCHEMA = "costs.json", 1


@dataclass(frozen=True)
class Cost:
    """Of one head at one number of classes.

    Attributes:
        slug: the head's name in folders.
        classes: how many.
        ms: median milliseconds of forward and backward; None where it was not measured.
        low_ms: 20th percentile.
        high_ms: 80th percentile.
        samples: how many steps were timed.
        peak_memory_mb: of the head and its step; None where it could not be measured.
        reason: why it was not measured, else empty.
    """

    slug: str
    classes: int
    ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    samples: int = 0
    peak_memory_mb: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Costs:
    """All that was measured, and with what.

    Attributes:
        rows: in a step.
        width: of a hidden state.
        own: the number of classes of the data.
        found: in the order in which they were measured.
    """

    rows: int
    width: int
    own: int
    found: tuple[Cost, ...]


def read_costs(folder: Path) -> Costs | None:
    """What lies in the folder of a comparison; None in one from before there was such a file.

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
        reason=str(entry.get("reason") or ""),
        **{name: None if entry.get(name) is None else float(entry[name]) for name in numbers},
    )
