"""A row with its labels, and those that a head gives it."""

import math
import re
from collections.abc import Mapping
from typing import Any

from lastlayer.lab.report._entries import count, mappings, probability
from lastlayer.lab.report.tokens import visible

_MOST = 64
_IN_OPTION = 3


def seen(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What is the same for every head."""
    units = bool(entry.get("standardised"))
    features = [
        {"name": named(each.get("name", "")), "value": _deviations(each.get("value"), units)}
        for each in mappings(entry.get("features"), _MOST)
    ]
    labels = [named(each) for each in (entry.get("labels") or ())[:_MOST]]
    more = max(0, count(entry.get("n_labels")) - len(labels))
    option = f"{_few([each['name'] for each in features])} → {_few(labels) or 'no label'}"
    return {"features": features, "labels": labels, "more": more, "option": option}


def said(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What one head said of it."""
    counts = {name: count(entry.get(f"n_{name}")) for name in ("labels", "predicted", "found")}
    lists = {
        key: [
            {"token": named(each.get("label", "")), "p": probability(each.get("p")),
             "hit": bool(each.get("right")), "predicted": bool(each.get("predicted"))}
            for each in mappings(entry.get(key), _MOST)
        ]
        for key in ("top", "below")
    }  # fmt: skip
    return {**counts, **lists}


def named(name: object) -> str:
    r"""A name as a reader can see it; single spaces between its words stay what they are.

    Example:
        >>> named("science fiction"), named(" "), named("a\n")
        ('science fiction', '␣', 'a⏎')
    """
    return re.sub("(?<=[^␣])␣(?=[^␣])", " ", visible(name))


def _few(names: list[str]) -> str:
    return ", ".join(names[:_IN_OPTION]) + (", …" if len(names) > _IN_OPTION else "")


def _deviations(value: Any, units: bool) -> str:
    """How far a dense feature is from its mean; values of a bag mean nothing to a reader."""
    if not units or not isinstance(value, int | float) or not math.isfinite(value):
        return ""
    return f"{value:+.1f}σ".replace("-", "−")
