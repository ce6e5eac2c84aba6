"""A context, and what a head expects next."""

from collections.abc import Mapping
from typing import Any

from lastlayer.lab.report._entries import mappings, probability
from lastlayer.lab.report.tokens import visible

# A path in a balanced tree over a million classes has twenty choices.
_LONGEST_PATH, _MOST = 64, 64
_IN_OPTION = 4


def seen(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What is the same for every head."""
    words = [visible(token) for token in entry.get("context") or ()]
    target = visible(entry.get("target", ""))
    option = f"{' '.join(words[-_IN_OPTION:])} → {target}"
    return {"context": words, "target": target, "option": option}


def said(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What one head said of it."""
    target = entry.get("target")
    top = [
        {"token": visible(each.get("token", "")), "p": probability(each.get("p")),
         "hit": each.get("token") == target}
        for each in mappings(entry.get("top"), _MOST)
    ]  # fmt: skip
    path = [
        {"node": str(each.get("node", "")), "direction": str(each.get("direction", "")),
         "p": probability(each.get("p"))}
        for each in mappings(entry.get("path"), _LONGEST_PATH)
    ]  # fmt: skip
    return {"top": top, "path": path, "target_p": probability(entry.get("target_p"))}
