"""What each head makes of the same contexts or rows, ready to be shown.

Entries come from files that anyone may have changed: what is not as it should be is left out.
"""

import math
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from lastlayer.lab.results import HeadSummary, Results

LONGEST = 40
_NAMED = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\N{NO-BREAK SPACE}": "⍽", "\x7f": "␡"}
# Control, format, surrogate, private and unassigned characters, and separators.
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"}
EMPTY = "∅"
# A path in a balanced tree over a million classes has twenty choices.
_MOST = 64
_WORDS_IN_OPTION, _NAMES_IN_OPTION = 4, 3


def contexts(results: Results) -> list[dict[str, Any]]:
    """Those of the first finished run of each head; all heads have the same ones."""
    found: dict[int, dict[str, Any]] = {}
    for summary in results.ranked:
        for index, entry in enumerate(_entries(summary)):
            of_labels = "labels" in entry
            seen = labels_seen(entry) if of_labels else text_seen(entry)
            shown = found.setdefault(index, {**seen, "heads": []})
            said = labels_said(entry) if of_labels else text_said(entry)
            if all(shown.get(key) == value for key, value in seen.items()):
                shown["heads"].append({"head": summary.title, **said})
    return [found[index] for index in sorted(found)]


def _entries(summary: HeadSummary) -> tuple[Mapping[str, Any], ...]:
    return next((run.explorer for run in summary.finished if run.explorer), ())


def text_seen(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A context, the same for every head."""
    words = [visible(token) for token in entry.get("context") or ()]
    target = visible(entry.get("target", ""))
    option = f"{' '.join(words[-_WORDS_IN_OPTION:])} → {target}"
    return {"context": words, "target": target, "option": option}


def text_said(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What one head expects next."""
    target = entry.get("target")
    top = [
        {"token": visible(each.get("token", "")), "p": probability(each.get("p")),
         "hit": each.get("token") == target}
        for each in mappings(entry.get("top"), _MOST)
    ]  # fmt: skip
    path = [
        {"node": str(each.get("node", "")), "direction": str(each.get("direction", "")),
         "p": probability(each.get("p"))}
        for each in mappings(entry.get("path"), _MOST)
    ]  # fmt: skip
    return {"top": top, "path": path, "target_p": probability(entry.get("target_p"))}


def labels_seen(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its labels, the same for every head."""
    units = bool(entry.get("standardised"))
    features = [
        {"name": named(each.get("name", "")), "value": _deviations(each.get("value"), units)}
        for each in mappings(entry.get("features"), _MOST)
    ]
    labels = [named(each) for each in (entry.get("labels") or ())[:_MOST]]
    more = max(0, count(entry.get("n_labels")) - len(labels))
    option = f"{_few([each['name'] for each in features])} → {_few(labels) or 'no label'}"
    return {"features": features, "labels": labels, "more": more, "option": option}


def labels_said(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The labels that one head gives it."""
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
    return ", ".join(names[:_NAMES_IN_OPTION]) + (", …" if len(names) > _NAMES_IN_OPTION else "")


def _deviations(value: Any, units: bool) -> str:
    """How far a dense feature is from its mean; values of a bag mean nothing to a reader."""
    if not units or not isinstance(value, int | float) or not math.isfinite(value):
        return ""
    return f"{value:+.1f}σ".replace("-", "−")


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


def visible(token: object, longest: int = LONGEST) -> str:
    r"""The token with a sign for each character that would not be seen.

    Example:
        >>> visible("a b\n"), visible(""), visible("\u200b"), visible("x" * 50, 5)
        ('a␣b⏎', '∅', '⟨U+200B⟩', 'xxxx…')
    """
    text = str(token)
    if not text:
        return EMPTY
    shown = "".join(_shown(c) for c in text[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def _shown(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if unicodedata.category(character) in _UNSEEN:
        return f"⟨U+{ord(character):04X}⟩"
    if unicodedata.combining(character):
        return "◌" + character
    return character
