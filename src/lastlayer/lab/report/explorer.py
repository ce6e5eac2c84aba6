"""What each head expects after the same contexts, ready to be shown."""

from collections.abc import Mapping
from typing import Any

from lastlayer.lab.report.tokens import visible
from lastlayer.lab.results import HeadSummary, Results

# A path in a balanced tree over a million classes has twenty choices.
_LONGEST_PATH = 64


def contexts(results: Results) -> list[dict[str, Any]]:
    """The contexts of the first finished run of each head; all heads have the same ones."""
    found: dict[int, dict[str, Any]] = {}
    for summary in results.ranked:
        for index, entry in enumerate(_entries(summary)):
            words = [visible(token) for token in entry.get("context") or ()]
            target = visible(entry.get("target", ""))
            shown = found.setdefault(index, {"context": words, "target": target, "heads": []})
            if (shown["context"], shown["target"]) == (words, target):
                shown["heads"].append(_expectation(summary.title, entry))
    return [found[index] for index in sorted(found)]


def _entries(summary: HeadSummary) -> tuple[Mapping[str, Any], ...]:
    return next((run.explorer for run in summary.finished if run.explorer), ())


def _expectation(title: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    target = entry.get("target")
    top = [
        {"token": visible(each.get("token", "")), "p": _number(each.get("p")),
         "hit": each.get("token") == target}
        for each in entry.get("top") or ()
    ]  # fmt: skip
    path = [
        {"node": str(each.get("node", "")), "direction": str(each.get("direction", "")),
         "p": _number(each.get("p"))}
        for each in (entry.get("path") or ())[:_LONGEST_PATH]
    ]  # fmt: skip
    return {"head": title, "top": top, "path": path, "target_p": _number(entry.get("target_p"))}


def _number(value: Any) -> float | None:
    if isinstance(value, int | float) and 0.0 <= value <= 1.0:
        return float(value)
    return None
