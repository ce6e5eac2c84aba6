"""Recorded settings as lines of a table."""

from collections.abc import Mapping
from typing import Any


def flat(group: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Settings within settings, by their path; what was not set is left out.

    What ``description`` repeats of the group that it is in is left out as well.

    Example:
        >>> flat({"name": "a", "description": {"name": "a", "types": 3}, "limit": None})
        {'name': 'a', 'types': 3}
    """
    found: dict[str, Any] = {}
    for key, value in group.items():
        if key == "description" and isinstance(value, Mapping):
            found |= {k: v for k, v in flat(value, before).items() if k not in found}
        elif isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}.")
        elif value is not None and value != "":
            found[f"{before}{key}"] = value
    return found


def plain(value: Any) -> str:
    """A setting as text.

    Example:
        >>> plain(True), plain(12000), plain(0.001), plain([1, 2])
        ('yes', '12,000', '0.001', '1, 2')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value)
    return str(value)
