"""What is read from an explorer's entries: files that anyone may have changed."""

from collections.abc import Mapping
from typing import Any


def probability(value: Any) -> float | None:
    """A number from 0 to 1, or None."""
    if isinstance(value, int | float) and 0.0 <= value <= 1.0:
        return float(value)
    return None


def mappings(value: Any, most: int) -> list[Mapping[str, Any]]:
    """The first objects of a list."""
    listed = value if isinstance(value, list | tuple) else ()
    return [each for each in listed[:most] if isinstance(each, Mapping)]


def count(value: Any) -> int:
    """A whole number from 0 on; 0 for anything else."""
    return max(0, value) if isinstance(value, int) else 0
