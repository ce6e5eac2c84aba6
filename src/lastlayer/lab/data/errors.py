"""What is wrong with data, in words that say how to put it right."""

from pathlib import Path


class DataError(ValueError):
    """Data that cannot be used. The message names the file, the place, and the remedy."""


def broken(
    what: str, remedy: str, *, path: Path | str | None = None, line: int | None = None
) -> DataError:
    """``file:line: what is wrong; what to do``."""
    place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
    return DataError(f"{place}{what}; {remedy}")
