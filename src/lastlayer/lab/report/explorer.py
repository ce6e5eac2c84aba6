"""Predictions of each head for the same contexts or rows, prepared for the page."""

import re
import unicodedata
from collections.abc import Mapping
from itertools import chain
from typing import Any

from lastlayer.lab.errors import LabError
from lastlayer.lab.results import Results

LONGEST = 40
EMPTY = "∅"
_NAMED = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\N{NO-BREAK SPACE}": "⍽", "\x7f": "␡"}
# Control, format, surrogate, private and unassigned characters, and separators.
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"}
_WORDS_IN_OPTION, _NAMES_IN_OPTION = 4, 3

Entry = Mapping[str, Any]


def contexts(results: Results) -> list[dict[str, Any]]:
    """Contexts or rows with the predictions of the first finished run of each head."""
    found: dict[int, dict[str, Any]] = {}
    firsts = [[run for run in s.finished if run.explorer][:1] for s in results.ranked]
    for run in chain.from_iterable(firsts):
        for index, entry in enumerate(run.explorer):
            see, say = (labels_seen, labels_said) if "labels" in entry else (text_seen, text_said)
            try:
                seen, said = see(entry), say(entry)
            except (KeyError, TypeError, ValueError) as error:
                raise LabError(
                    f"runs/{run.name}/result.json: expected predictions as a run writes them, got "
                    f"a changed file ({type(error).__name__}: {error}); make the run again"
                ) from error
            shown = found.setdefault(index, {**seen, "heads": []})
            if all(shown.get(key) == value for key, value in seen.items()):
                shown["heads"].append({"head": run.head.title, **said})
    return [found[index] for index in sorted(found)]


def text_seen(entry: Entry) -> dict[str, Any]:
    """A context with its target, the same for every head."""
    words, target = [visible(token) for token in entry["context"]], visible(entry["target"])
    option = f"{' '.join(words[-_WORDS_IN_OPTION:])} → {target}"
    return {"context": words, "target": target, "option": option}


def text_said(entry: Entry) -> dict[str, Any]:
    """The predictions of one head for a context."""
    top = [
        {"token": visible(each["token"]), "p": each["p"], "hit": each["token"] == entry["target"]}
        for each in entry["top"]
    ]
    return {"top": top, "path": entry.get("path") or [], "target_p": entry.get("target_p")}


def labels_seen(entry: Entry) -> dict[str, Any]:
    """A row with its labels, the same for every head."""
    features = [
        {"name": _named(each["name"]),
         "value": f"{each['value']:+.1f}σ".replace("-", "−") if entry["standardised"] else ""}
        for each in entry["features"]
    ]  # fmt: skip
    labels = [_named(each) for each in entry["labels"]]
    option = f"{_few([each['name'] for each in features])} → {_few(labels) or 'no label'}"
    more = entry["n_labels"] - len(labels)
    return {"features": features, "labels": labels, "more": more, "option": option}


def labels_said(entry: Entry) -> dict[str, Any]:
    """The labels that one head predicts for a row."""
    counts = {name: entry[f"n_{name}"] for name in ("labels", "predicted", "found")}
    lists = {
        key: [
            {"token": _named(each["label"]), "p": each["p"], "hit": each["right"],
             "predicted": each["predicted"]}
            for each in entry[key]
        ]
        for key in ("top", "below")
    }  # fmt: skip
    return {**counts, **lists}


def _few(names: list[str]) -> str:
    return ", ".join(names[:_NAMES_IN_OPTION]) + (", …" if len(names) > _NAMES_IN_OPTION else "")


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
