"""Predictions of each head for the same contexts or rows, prepared for the page.

Entries come from files that may have been edited, so malformed values are left out.
"""

import math
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from lastlayer.lab.results import Results

LONGEST = 40
EMPTY = "∅"
_NAMED = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\N{NO-BREAK SPACE}": "⍽", "\x7f": "␡"}
# Control, format, surrogate, private and unassigned characters, and separators.
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"}
# Most entries of a list. A path in a balanced tree over a million classes has twenty choices.
_MOST = 64
_WORDS_IN_OPTION, _NAMES_IN_OPTION = 4, 3

Entry = Mapping[str, Any]


def contexts(results: Results) -> list[dict[str, Any]]:
    """Contexts or rows with the predictions of the first finished run of each head."""
    found: dict[int, dict[str, Any]] = {}
    for summary in results.ranked:
        entries = next((run.explorer for run in summary.finished if run.explorer), ())
        for index, entry in enumerate(entries):
            see, say = (labels_seen, labels_said) if "labels" in entry else (text_seen, text_said)
            seen = see(entry)
            shown = found.setdefault(index, {**seen, "heads": []})
            if all(shown.get(key) == value for key, value in seen.items()):
                shown["heads"].append({"head": summary.title, **say(entry)})
    return [found[index] for index in sorted(found)]


def text_seen(entry: Entry) -> dict[str, Any]:
    """A context with its target, the same for every head."""
    words = [visible(token) for token in entry.get("context") or ()]
    target = visible(entry.get("target", ""))
    option = f"{' '.join(words[-_WORDS_IN_OPTION:])} → {target}"
    return {"context": words, "target": target, "option": option}


def text_said(entry: Entry) -> dict[str, Any]:
    """The predictions of one head for a context."""
    target = entry.get("target")
    top = [
        {"token": visible(each.get("token", "")), "p": _probability(each),
         "hit": each.get("token") == target}
        for each in _entries(entry, "top")
    ]  # fmt: skip
    path = [
        {"node": str(each.get("node", "")), "direction": str(each.get("direction", "")),
         "p": _probability(each)}
        for each in _entries(entry, "path")
    ]  # fmt: skip
    return {"top": top, "path": path, "target_p": _probability(entry, "target_p")}


def labels_seen(entry: Entry) -> dict[str, Any]:
    """A row with its labels, the same for every head."""
    dense = bool(entry.get("standardised"))
    features = [
        {"name": _named(each.get("name", "")), "value": _deviations(each.get("value"), dense)}
        for each in _entries(entry, "features")
    ]
    labels = [_named(each) for each in (entry.get("labels") or ())[:_MOST]]
    more = max(0, _count(entry, "n_labels") - len(labels))
    option = f"{_few([each['name'] for each in features])} → {_few(labels) or 'no label'}"
    return {"features": features, "labels": labels, "more": more, "option": option}


def labels_said(entry: Entry) -> dict[str, Any]:
    """The labels that one head predicts for a row."""
    counts = {name: _count(entry, f"n_{name}") for name in ("labels", "predicted", "found")}
    lists = {
        key: [
            {"token": _named(each.get("label", "")), "p": _probability(each),
             "hit": bool(each.get("right")), "predicted": bool(each.get("predicted"))}
            for each in _entries(entry, key)
        ]
        for key in ("top", "below")
    }  # fmt: skip
    return {**counts, **lists}


def _entries(entry: Entry, key: str) -> list[Entry]:
    """The first objects of a list."""
    listed = entry.get(key)
    listed = listed[:_MOST] if isinstance(listed, list | tuple) else ()
    return [each for each in listed if isinstance(each, Mapping)]


def _probability(entry: Entry, key: str = "p") -> float | None:
    value = entry.get(key)
    return float(value) if isinstance(value, int | float) and 0.0 <= value <= 1.0 else None


def _count(entry: Entry, key: str) -> int:
    value = entry.get(key)
    return max(0, value) if isinstance(value, int) else 0


def _few(names: list[str]) -> str:
    return ", ".join(names[:_NAMES_IN_OPTION]) + (", …" if len(names) > _NAMES_IN_OPTION else "")


def _deviations(value: Any, dense: bool) -> str:
    """The distance of a dense feature from its mean; empty for values of a bag of words."""
    if not dense or not isinstance(value, int | float) or not math.isfinite(value):
        return ""
    return f"{value:+.1f}σ".replace("-", "−")


def _named(name: object) -> str:
    r"""A name with visible signs for invisible characters, but single spaces between words kept.

    Example:
        >>> _named("science fiction"), _named(" "), _named("a\n")
        ('science fiction', '␣', 'a⏎')
    """
    return re.sub("(?<=[^␣])␣(?=[^␣])", " ", visible(name))


def visible(token: object, longest: int = LONGEST) -> str:
    r"""A token with visible signs for invisible characters.

    Example:
        >>> visible("a b\n"), visible(""), visible("\u200b"), visible("x" * 50, 5)
        ('a␣b⏎', '∅', '⟨U+200B⟩', 'xxxx…')
    """
    shown = "".join(_shown(c) for c in str(token)[: longest + 1]) or EMPTY
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def _shown(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if unicodedata.category(character) in _UNSEEN:
        return f"⟨U+{ord(character):04X}⟩"
    return "◌" + character if unicodedata.combining(character) else character
