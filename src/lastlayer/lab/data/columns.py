"""Chooses the columns of a table and the task, and builds the data.

Columns of text, label and features are given, or inferred from names and values if unambiguous.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data.files import DataError, broken, some
from lastlayer.lab.data.rows import (
    LabelData,
    LabelPart,
    PairData,
    PairPart,
    label_data,
    label_lists,
    labelled_words,
    pair_data,
    three_parts,
    weigher,
    word_lists,
)
from lastlayer.lab.data.tables import Table, as_number
from lastlayer.lab.data.text import END, FirstCome, IdStream, Reading, TextData, language_data

_TEXTS = (
    "text", "sentence", "review", "title", "content", "body", "document", "question", "comment",
    "message", "tweet", "description", "headline", "abstract", "utterance", "query",
)  # fmt: skip
_LABELS = (
    "label", "labels", "class", "classes", "category", "categories", "target", "targets", "tags",
    "topics", "topic", "genres", "genre", "intent", "sentiment", "y",
)  # fmt: skip
_ENDS_AS_LABEL = ("label", "labels", "class", "category")
_NO_FEATURES = ("id", "index", "split", "", "unnamed: 0")
_SEPARATORS = ("|", ";", ",")
# Number of rows from which the kind of a column is inferred.
_LOOKED_AT = 1000


@dataclass(frozen=True)
class Columns:
    """The task, why it was inferred, and the columns of text, label and features."""

    task: str
    reason: str
    text: tuple[str, ...] = ()
    label: str | None = None
    features: tuple[str, ...] = ()
    separator: str | None = None

    @property
    def described(self) -> dict[str, Any]:
        found = {"text": list(self.text), "label": self.label, "features": list(self.features)}
        return {"task_reason": self.reason, "columns": {k: v for k, v in found.items() if v}}


def choose_columns(
    table: Table, task: str | None, text: str | None, label: str | None, features: str | None
) -> Columns:
    """Choose columns and task: as given, or inferred from ``table``, that of the training part."""
    texts, labels, numbers = (_listed(names) for names in (text, label, features))
    for option, names in (("text", texts), ("label", labels), ("features", numbers)):
        _check_there(table, names, option)
    kinds = {name: _kind(values[:_LOOKED_AT]) for name, values in table.columns.items()}
    if not labels and task not in ("lm", "pairs"):
        taken = {*texts, *numbers, "split"}
        labels = _guessed_label(table, {n: k for n, k in kinds.items() if n not in taken}, task)
    rest = {name: kind for name, kind in kinds.items() if name not in (*labels[:1], "split")}
    if not texts and not numbers:
        texts = _guessed_texts(rest, task)
    if not texts and not numbers and labels:
        numbers = [
            name
            for name, kind in rest.items()
            if kind in ("number", "vector") and not _is_named(name, _NO_FEATURES)
        ]
    return _with_task(table, task, texts, labels[0] if labels else None, numbers)


def _listed(names: str | None) -> list[str]:
    return [name.strip() for name in names.split(",")] if names else []


def _check_there(table: Table, names: Sequence[str], option: str) -> None:
    for name in names:
        if name not in table.columns:
            known = {each.lower(): each for each in table.columns}
            near = get_close_matches(name.lower(), known, 1, 0.5)
            hint = f"did you mean {known[near[0]]!r}? " if near else ""
            what = f"no column {name!r}; there are {some(table.columns, 12)}"
            raise broken(what, f"{hint}give another {option}", path=table.where)


def _kind(values: list[Any]) -> str:
    """The kind of a column: text, name, number, list, vector, empty or other."""
    known = [each for each in values if each is not None]
    if known and all(isinstance(each, list) for each in known):
        inner = [each for some in known for each in some]
        vectors = inner and all(isinstance(each, float) for each in inner)
        return "vector" if vectors else "list"
    if known and all(isinstance(each, bool) for each in known):
        return "name"
    if known and all(as_number(each) is not None for each in known):
        return "number"
    if known and all(isinstance(each, str) for each in known):
        words = sum(len(each.split()) for each in known) / len(known)
        letters = sum(map(len, known)) / len(known)
        return "text" if words >= 3 or letters >= 24 else "name"
    return "other" if known else "empty"


def _is_named(name: str, known: Sequence[str]) -> bool:
    """Whether the name or its last word is one of these."""
    return name.lower() in known or re.split(r"[^a-z0-9]+", name.lower())[-1] in known


def _guessed_label(table: Table, kinds: dict[str, str], task: str | None) -> list[str]:
    usable = {name: kind for name, kind in kinds.items() if kind not in ("empty", "vector")}
    by_name = [n for known in _LABELS for n in usable if n.lower() == known]
    by_name += [n for n in usable if _is_named(n, _ENDS_AS_LABEL)]
    if by_name:
        return by_name[:1]
    few = [n for n, kind in usable.items() if _is_class(kind, table.columns[n])]
    if len(few) == 1:
        return few
    if few or task is not None:
        there = f"it may be {some(few)}" if few else f"there are {some(table.columns)}"
        what = f"the column of the label is unclear; {there}"
        remedy = "give label='NAME'" + ("" if task else ", or task='lm' for its text alone")
        raise broken(what, remedy)
    return []


def _is_class(kind: str, values: list[Any]) -> bool:
    """Whether a column has few distinct values, each repeated, or lists of labels."""
    if kind == "list":
        return True
    known = [each for each in values if each is not None]
    if kind not in ("name", "number") or any(isinstance(each, list) for each in known):
        return False
    if kind == "number" and not all(float(each).is_integer() for each in known):
        return False
    return 2 <= len({*known}) <= len(known) // 4


def _guessed_texts(kinds: dict[str, str], task: str | None) -> list[str]:
    """Columns with a name that is usual for text, else all that look like text."""
    by_kind = [name for name, kind in kinds.items() if kind == "text"]
    if task == "pairs":
        return by_kind
    strings = [name for name, kind in kinds.items() if kind in ("text", "name", "other")]
    by_name = [name for known in _TEXTS for name in strings if name.lower() == known]
    return by_name if by_name and len(by_kind) != 2 else by_kind or by_name


def _with_task(
    table: Table, task: str | None, texts: list[str], label: str | None, features: list[str]
) -> Columns:
    """The columns with their task; raises an error that says which column is missing."""

    def refuse(what: str, remedy: str) -> DataError:
        return broken(f"{what}; there are {some(table.columns)}", remedy)

    if (texts and features) or (label and task in ("lm", "pairs")):
        what = "text and features" if texts and features else f"label and task='{task}'"
        raise broken(f"{what}: expected one of them, got both", "leave one out")
    separator = None
    if label and task != "classification":
        separator = _separator(table.columns[label])
    reason = "as asked"
    if task is None:
        task, reason = _inferred(table, texts, label, separator, features)
        if not task:
            what = f"no column of labels, and {len(texts)} of text"
            raise refuse(what, "give text='NAME' and label='NAME'")
    if task in ("classification", "multilabel"):
        if label is None:
            raise refuse(f"{task} needs a column of labels", "give label='NAME'")
        if not texts and not features:
            what = f"no column of text or of numbers beside {label!r}"
            raise refuse(what, "give text='NAME' or features='NAME,…'")
        return Columns(task, reason, tuple(texts), label, tuple(features), separator)
    if not texts:
        raise refuse("no column of text", "give text='NAME', or label='NAME' for rows of numbers")
    if task == "pairs" and len(texts) != 2:
        raise refuse(f"pairs need two columns of text, got {some(texts)}", "give text='NAME,NAME'")
    return Columns(task, reason, tuple(texts))


def _inferred(
    table: Table, texts: list[str], label: str | None, separator: str | None, features: list[str]
) -> tuple[str, str]:
    """The inferred task and the reason; empty if the columns are ambiguous."""
    if label:
        values = table.columns[label]
        if any(isinstance(each, list) and len(each) != 1 for each in values):
            return "multilabel", f"lists of labels in the column {label!r}"
        if separator:
            return "multilabel", f"labels with {separator!r} between them in the column {label!r}"
        return "classification", f"one label per row in the column {label!r}"
    if len(texts) == 2:
        return "pairs", f"two columns of text, {texts[0]!r} and {texts[1]!r}, and no label"
    if len(texts) == 1 and not features:
        return "lm", f"one column of text, {texts[0]!r}, and no label"
    return "", ""


def _separator(values: list[Any]) -> str | None:
    """The separator of several labels in a cell; splitting by it leaves fewer distinct values."""
    known = [each for each in values if isinstance(each, str)]
    for mark in _SEPARATORS:
        joined = [each for each in known if mark in each]
        if len(joined) < 2:
            continue
        pieces = {piece.strip() for each in known for piece in each.split(mark)}
        if len(pieces) < len({*known}):
            return mark
    return None


def table_data(
    tables: dict[str, Table], columns: Columns, described: dict[str, Any], reading: Reading
) -> TextData | LabelData | PairData:
    """Build data from tables; rows without a text or a class are left out and counted."""
    if "train" not in tables:
        what = f"there are rows for {' and '.join(sorted(tables))}, but none for training"
        raise broken(what, "give a file for training too")
    for table in tables.values():
        _check_there(table, columns.text, "text")
        _check_there(table, columns.features, "features")
        _check_there(table, [columns.label] if columns.label else [], "label")
    described = {**described, **columns.described}
    if columns.task == "lm":
        return _language(tables, columns, described, reading)
    if columns.task == "pairs":
        return _pairs(tables, columns, described, reading)
    return _labelled(tables, columns, described, reading)


def _texts(table: Table, names: Sequence[str]) -> Iterator[str]:
    """The text of each row; texts of several columns are joined with spaces."""
    columns = [table.columns[name] for name in names]
    for row, cells in enumerate(zip(*columns, strict=True)):
        for name, cell in zip(names, cells, strict=True):
            if cell is not None and not isinstance(cell, str):
                what = f"expected a text in the column {name!r}, got {type(cell).__name__}"
                raise table.broken(row, what, "give another text")
        yield " ".join(cell for cell in cells if cell)


def _left_out(**rows: int) -> dict[str, Any]:
    """The number of rows without a text or a label, for the description, and notes on them."""
    notes = [
        f"{n:,} row{'s' * (n != 1)} without a {what} {'is' if n == 1 else 'are'} left out"
        for what, n in rows.items()
        if n
    ]
    return {"left_out": sum(rows.values())} | ({"notes": notes} if notes else {})


def _language(
    tables: dict[str, Table], columns: Columns, described: dict[str, Any], reading: Reading
) -> TextData:
    numbers, ids, empty = reading.numbers(), {}, 0
    for part, table in tables.items():
        most, stream = reading.enough(part), IdStream(numbers)
        for text in _texts(table, columns.text):
            if most is not None and stream.length >= most:
                break
            empty += not text
            stream.add([*reading.cut(text), END] if text else ())
        ids[part] = stream.finish(most)
    described |= _left_out(text=empty) if empty else {}
    return language_data(list(numbers), ids, described, reading)


def _labelled(
    tables: dict[str, Table], columns: Columns, described: dict[str, Any], reading: Reading
) -> LabelData:
    words, classes = FirstCome(), FirstCome()
    parts, names = dict[str, LabelPart](), dict[str, list[str]]()
    empty = unlabelled = 0
    for part, table in tables.items():
        labels, kept = _labels(table, columns), []
        texts = [reading.cut(text) for text in _texts(table, columns.text)]
        for row, own in enumerate(labels):
            if columns.text and not texts[row]:
                empty += 1
            elif not own and columns.task == "classification":
                unlabelled += 1
            else:
                kept.append(row)
        lists = label_lists((labels[row] for row in kept), classes)
        if columns.features:
            names[part], numbers = _numbers(table, columns.features)
            parts[part] = LabelPart(numbers[kept], lists)
        else:
            parts[part] = LabelPart(word_lists((texts[row] for row in kept), words), lists)
    described |= _left_out(text=empty, label=unlabelled)
    if not columns.features:
        return labelled_words(parts, words, list(classes), described, reading, task=columns.task)
    described |= {"limit": reading.limit}
    return label_data(parts, names["train"], list(classes), described, reading, task=columns.task)


def _pairs(
    tables: dict[str, Table], columns: Columns, described: dict[str, Any], reading: Reading
) -> PairData:
    words, empty = FirstCome(), 0
    rows: dict[str, list[tuple[str, str]]] = {}
    for part, table in tables.items():
        texts = list(zip(*(_texts(table, [column]) for column in columns.text), strict=True))
        rows[part] = [(one, other) for one, other in texts if one.strip() and other.strip()]
        empty += len(texts) - len(rows[part])
    # Pairs belong to one group if they share the key, or the query if queries repeat more often.
    sides = [[pair[side] for own in rows.values() for pair in own] for side in (0, 1)]
    numbered = [np.unique(np.asarray(each), return_inverse=True)[1] for each in sides]
    groups = min(numbered, key=lambda each: int(each.max(initial=0))).astype(np.int64)
    parts: dict[str, PairPart] = {}
    for part, own in rows.items():
        query, key = (word_lists((reading.cut(p[s]) for p in own), words) for s in (0, 1))
        parts[part] = PairPart(query, key, groups[: len(own)])
        groups = groups[len(own) :]
    three = three_parts(parts, reading)
    vocabulary, weigh = weigher(three["train"][:2], words, reading)
    made = {part: PairPart(weigh(p.query), weigh(p.key), p.group) for part, p in three.items()}
    described |= {"words": len(vocabulary), **_left_out(text=empty), **reading.described}
    return pair_data(made, described, reading, feature_names=vocabulary.tokens, shared=True)


def _labels(table: Table, columns: Columns) -> list[list[str]]:
    """The labels of each row; classification takes one alone."""
    name, mark = str(columns.label), columns.separator
    made: list[list[str]] = []
    kinds: dict[str, tuple[int, Any]] = {}
    for row, value in enumerate(table.columns[name]):
        if value is None:
            several: list[Any] = []
        elif mark and isinstance(value, str):
            several = [piece.strip() for piece in value.split(mark) if piece.strip()]
        else:
            several = value if isinstance(value, list) else [value]
        for each in several:
            fitting = isinstance(each, str | int) or (isinstance(each, float) and each.is_integer())
            if not fitting:
                what = f"expected names or ids in the column {name!r}, got {repr(each)[:60]}"
                raise table.broken(row, what, "give another label")
            kind = "names" if isinstance(each, str) else "numbers"
            kinds.setdefault(kind, (row, each))
        if columns.task == "classification" and len(several) > 1:
            what = f"expected one label in the column {name!r}, got {len(several)}"
            raise table.broken(row, what, "give task='multilabel'")
        made.append([str(int(e)) if isinstance(e, float) else str(e) for e in several])
    if len(kinds) > 1:
        (_, one), (row, other) = sorted(kinds.values(), key=lambda found: found[0])
        what = f"mixed types in the column {name!r}: {one!r} before, and here {other!r}"
        raise table.broken(row, what, "write all labels as names, or all as numbers")
    if columns.task == "classification":
        # Numbers with a fraction are measurements, not classes.
        found = [(row, as_number(own[0])) for row, own in enumerate(made) if own]
        fractions = (row for row, n in found if n is not None and math.isfinite(n) and n % 1)
        if all(value is not None for _, value in found) and (row := next(fractions, -1)) >= 0:
            what = f"expected classes in the column {name!r}, got numbers such as {made[row][0]}"
            raise table.broken(row, what, "give another label, or round them to classes")
    return made


def _numbers(table: Table, names: Sequence[str]) -> tuple[list[str], NDArray[np.float32]]:
    """Names and values of numeric columns, and of columns of lists with a fixed length."""
    made, named = [], list[str]()
    for name in names:
        values = table.columns[name]
        widths = {len(each) for each in values if isinstance(each, list)}
        if len(widths) > 1:
            what = f"lists of {min(widths)} to {max(widths)} numbers in the column {name!r}"
            raise broken(what, "give the same number in each row", path=table.where)
        rows, width = [], max(widths, default=1)
        for row, each in enumerate(values):
            found = [as_number(cell) for cell in (each if isinstance(each, list) else [each])]
            if len(found) != width or not all(n is not None and math.isfinite(n) for n in found):
                told = "nothing" if each is None else repr(each)[:40]
                what = f"expected a number in the column {name!r}, got {told}"
                raise table.broken(row, what, "fill it in, or give other features")
            rows.append(found)
        named += [f"{name}[{i}]" for i in range(width)] if widths else [name]
        made.append(np.array(rows, np.float32))
    return named, np.concatenate(made, 1)
