"""What the columns of a table are for, and so the task; and data made of them.

Columns of text, of the label or of features are given, or follow from their names and values where
that is safe.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data.files import DataError, broken
from lastlayer.lab.data.rows import (
    Bags,
    LabelData,
    LabelLists,
    LabelPart,
    PairData,
    PairPart,
    assemble_pairs,
    assemble_rows,
    grouped,
    labelled_bags,
    sparse_rows,
    three_parts,
    weigh_bags,
)
from lastlayer.lab.data.tables import Table, as_number
from lastlayer.lab.data.text import END, FirstCome, IdStream, Reading, TextData, assemble, enough

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
# Rows that tell the kind of a column.
_LOOKED_AT = 1000


@dataclass(frozen=True)
class Columns:
    """Which columns are used for what, and which task that makes."""

    task: str
    reason: str
    text: tuple[str, ...] = ()
    label: str | None = None
    features: tuple[str, ...] = ()
    separator: str | None = None

    @property
    def described(self) -> dict[str, Any]:
        """For JSON."""
        found = {"text": list(self.text), "label": self.label, "features": list(self.features)}
        return {"task_reason": self.reason, "columns": {k: v for k, v in found.items() if v}}


def choose_columns(
    table: Table, task: str | None, text: str | None, label: str | None, features: str | None
) -> Columns:
    """What was asked for, and the obvious rest; ``table`` is that of the training part."""
    asked = {"text": _listed(text), "label": _listed(label), "features": _listed(features)}
    for option, names in asked.items():
        for name in names:
            if name not in table.columns:
                raise _no_column(table, name, option)
    kinds = {name: _kind(table.values(name)[:_LOOKED_AT]) for name in table.columns}
    labels = asked["label"][:1]
    if not labels and task not in ("lm", "pairs"):
        taken = {*asked["text"], *asked["features"], "split"}
        labels = _guessed_label(table, {n: k for n, k in kinds.items() if n not in taken}, task)
    rest = {name: kind for name, kind in kinds.items() if name not in (*labels, "split")}
    texts, numbers = asked["text"], asked["features"]
    if not texts and not numbers:
        texts = _guessed_texts(rest, task)
    if not texts and not numbers and labels:
        numbers = [
            name
            for name, kind in rest.items()
            if kind in ("number", "vector") and not _is_named(name, _NO_FEATURES)
        ]
    return _with_task(table, task, texts, labels, numbers)


def _listed(names: str | None) -> list[str]:
    return [name.strip() for name in names.split(",")] if names else []


def _no_column(table: Table, name: str, option: str) -> DataError:
    known = list(table.columns)
    near = get_close_matches(name.lower(), [each.lower() for each in known], 1, 0.5)
    hint = next((each for each in known if near and each.lower() == near[0]), None)
    some = ", ".join(map(repr, known[:12])) + (", …" if len(known) > 12 else "")
    remedy = f"did you mean {hint!r}? " if hint else ""
    what = f"no column {name!r}; there are {some}"
    return broken(what, f"{remedy}give another {option}", path=table.where)


def _kind(values: list[Any]) -> str:
    """What a column holds: text, name, number, list, vector, or other."""
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
    few = [n for n, kind in usable.items() if _is_class(kind, table.values(n))]
    if len(few) == 1:
        return few
    if few or task is not None:
        there = ", ".join(map(repr, few or table.columns))
        what = f"no column is surely the label; {'it may be' if few else 'there are'} {there}"
        remedy = "give label='NAME'" + ("" if task else ", or task='lm' for its text alone")
        raise broken(what, remedy, path=table.where)
    return []


def _is_class(kind: str, values: list[Any]) -> bool:
    """Whether few values come often; a list of names is a set of labels."""
    if kind == "list":
        return True
    known = [each for each in values if each is not None]
    if kind not in ("name", "number") or any(isinstance(each, list) for each in known):
        return False
    if kind == "number" and not all(float(each).is_integer() for each in known):
        return False
    return 2 <= len({*known}) <= len(known) // 4


def _guessed_texts(kinds: dict[str, str], task: str | None) -> list[str]:
    """Columns with the name of a text, else all that read as one."""
    by_kind = [name for name, kind in kinds.items() if kind == "text"]
    if task == "pairs":
        return by_kind
    strings = [name for name, kind in kinds.items() if kind in ("text", "name", "other")]
    by_name = [name for known in _TEXTS for name in strings if name.lower() == known]
    return by_name if by_name and len(by_kind) != 2 else by_kind or by_name


def _with_task(
    table: Table, task: str | None, texts: list[str], labels: list[str], features: list[str]
) -> Columns:
    label = labels[0] if labels else None
    separator = None
    if (texts and features) or (label and task in ("lm", "pairs")):
        what = "text and features" if texts and features else f"label and task='{task}'"
        raise broken(f"{what}: expected one of them, got both", "leave one out", path=table.where)
    if label and task != "classification":
        separator = _separator(table.values(label))
    if task is None:
        task, reason = _inferred(table, texts, label, separator, features)
    else:
        reason = "as asked"
    there = ", ".join(map(repr, table.columns))
    if task in ("classification", "multilabel"):
        if label is None:
            what = f"{task} needs a column of labels; there are {there}"
            raise broken(what, "give label='NAME'", path=table.where)
        if not texts and not features:
            what = f"no column of text or of numbers beside {label!r}; there are {there}"
            raise broken(what, "give text='NAME' or features='NAME,…'", path=table.where)
    elif not texts:
        what = f"no column of text; there are {there}"
        raise broken(
            what, "give text='NAME', or label='NAME' for rows of numbers", path=table.where
        )
    if task == "pairs" and len(texts) != 2:
        found = ", ".join(map(repr, texts))
        what = f"pairs need two columns of text, got {found}; there are {there}"
        raise broken(what, "give text='NAME,NAME'", path=table.where)
    if task in ("lm", "pairs"):
        return Columns(task, reason, tuple(texts))
    return Columns(task, reason, tuple(texts), label, tuple(features), separator)


def _inferred(
    table: Table, texts: list[str], label: str | None, separator: str | None, features: list[str]
) -> tuple[str, str]:
    if label:
        lists = any(isinstance(each, list) and len(each) != 1 for each in table.values(label))
        if lists:
            return "multilabel", f"lists of labels in the column {label!r}"
        if separator:
            return "multilabel", f"labels with {separator!r} between them in the column {label!r}"
        return "classification", f"one label per row in the column {label!r}"
    if len(texts) == 2:
        return "pairs", f"two columns of text, {texts[0]!r} and {texts[1]!r}, and no label"
    if len(texts) == 1 and not features:
        return "lm", f"one column of text, {texts[0]!r}, and no label"
    there = ", ".join(map(repr, table.columns))
    what = f"no column of labels, and {len(texts)} of text; there are {there}"
    raise broken(what, "give text='NAME' and label='NAME'", path=table.where)


def _separator(values: list[Any]) -> str | None:
    """What stands between several labels of a row: its pieces come more often than the wholes."""
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
    name: str,
    tables: dict[str, Table],
    columns: Columns,
    described: dict[str, Any],
    reading: Reading,
    *,
    where: str,
) -> TextData | LabelData | PairData:
    """Data from tables; rows without a text, or without a class, are left out and counted."""
    if "train" not in tables:
        what = f"rows of {' and '.join(sorted(tables))}, and none for training"
        raise broken(what, "give a file for training too", path=where)
    for table in tables.values():
        wanted = (*columns.text, *columns.features, *([columns.label] if columns.label else ()))
        for column in wanted:
            if column not in table.columns:
                option = "text" if column in columns.text else "label"
                raise _no_column(table, column, option)
    described = {**described, **columns.described}
    if columns.task == "lm":
        numbers = reading.numbers()
        streams = {part: IdStream(numbers) for part in tables}
        empty = 0
        for part, table in tables.items():
            most = enough(part, reading.limit)
            for text in _texts(table, columns.text):
                if most is not None and streams[part].length >= most:
                    break
                empty += not text
                streams[part].add([*reading.cut(text), END] if text else ())
        if empty:
            described |= {"left_out": empty, "notes": _left_out(empty, "text")}
        ids = {part: each.finish(enough(part, reading.limit)) for part, each in streams.items()}
        return assemble(name, list(numbers), ids, described, reading, where=where)
    if columns.task == "pairs":
        return _pairs(name, tables, columns, described, reading, where=where)
    return _labelled(name, tables, columns, described, reading, where=where)


def _texts(table: Table, names: Sequence[str]) -> Iterator[str]:
    """The text of each row, of several columns with spaces between them."""
    columns = [table.values(name) for name in names]
    for row, cells in enumerate(zip(*columns, strict=True)):
        for name, cell in zip(names, cells, strict=True):
            if cell is not None and not isinstance(cell, str):
                what = f"expected a text in the column {name!r}, got {type(cell).__name__}"
                raise table.broken(row, what, "give another text")
        yield " ".join(cell for cell in cells if cell)


def _labelled(
    name: str, tables: dict[str, Table], columns: Columns, described: dict[str, Any],
    reading: Reading, *, where: str,
) -> LabelData:  # fmt: skip
    words, classes = FirstCome(), FirstCome()
    bags: dict[str, tuple[Bags, LabelLists]] = {}
    parts: dict[str, LabelPart] = {}
    empty = unlabelled = 0
    for part, table in tables.items():
        bag, lists = bags[part] = Bags(words), LabelLists(classes)
        labels = _labels(table, columns)
        texts = [reading.cut(text) for text in _texts(table, columns.text)]
        kept = []
        for row, own in enumerate(labels):
            if columns.text and not texts[row]:
                empty += 1
            elif not own and columns.task == "classification":
                unlabelled += 1
            else:
                kept.append(row)
                lists.add(own)
                bag.add(texts[row] if columns.text else ())
        if columns.features:
            parts[part] = LabelPart(_numbers(table, columns.features)[kept], lists.finish())
    notes = _left_out(empty, "text") + _left_out(unlabelled, "label")
    described |= {"left_out": empty + unlabelled} | ({"notes": notes} if notes else {})
    if not columns.features:
        return labelled_bags(
            name, bags, words, list(classes), described, reading, task=columns.task, where=where
        )
    three = three_parts(parts, reading.limit, where)
    names = _feature_names(tables["train"], columns.features)
    return assemble_rows(
        name, three, names, list(classes), {**described, "limit": reading.limit},
        task=columns.task, where=where,
    )  # fmt: skip


def _left_out(rows: int, what: str) -> list[str]:
    if not rows:
        return []
    return [
        f"{rows:,} row{'s' * (rows != 1)} without a {what} {'is' if rows == 1 else 'are'} left out"
    ]


def _labels(table: Table, columns: Columns) -> list[list[str]]:
    """The labels of each row; classification takes one alone."""
    name, mark = str(columns.label), columns.separator
    made: list[list[str]] = []
    kinds: dict[str, tuple[int, Any]] = {}
    for row, value in enumerate(table.values(name)):
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
        _check_classes(table, name, made)
    return made


def _check_classes(table: Table, name: str, labels: list[list[str]]) -> None:
    """Numbers with a fraction measure something: they are no classes."""
    found = [(row, as_number(own[0]), own[0]) for row, own in enumerate(labels) if own]
    fractions = [
        (row, text)
        for row, value, text in found
        if value is not None and math.isfinite(value) and not value.is_integer()
    ]
    if fractions and all(value is not None for _, value, _ in found):
        row, text = fractions[0]
        what = f"expected classes in the column {name!r}, got numbers such as {text}"
        raise table.broken(row, what, "give another label, or round them to classes")


def _numbers(table: Table, names: Sequence[str]) -> NDArray[np.float32]:
    """Columns of numbers, and of lists of as many numbers each, side by side."""
    made = []
    for name in names:
        values = table.values(name)
        widths = {len(each) for each in values if isinstance(each, list)}
        if len(widths) > 1:
            what = f"lists of {min(widths)} to {max(widths)} numbers in the column {name!r}"
            raise broken(what, "give as many in each row", path=table.where)
        rows = []
        for row, each in enumerate(values):
            cells = each if isinstance(each, list) else [each]
            found = [as_number(cell) for cell in cells]
            good = len(cells) == (widths or {1}).copy().pop()
            if not good or any(cell is None or not math.isfinite(cell) for cell in found):
                told = "nothing" if each is None else repr(each)[:40]
                what = f"expected a number in the column {name!r}, got {told}"
                raise table.broken(row, what, "fill it in, or give other features")
            rows.append(found)
        made.append(np.array(rows, np.float32))
    return np.concatenate(made, 1)


def _feature_names(table: Table, names: Sequence[str]) -> list[str]:
    made: list[str] = []
    for name in names:
        first = table.values(name)[0]
        inner = range(len(first)) if isinstance(first, list) else None
        made += [name] if inner is None else [f"{name}[{i}]" for i in inner]
    return made


def _pairs(
    name: str, tables: dict[str, Table], columns: Columns, described: dict[str, Any],
    reading: Reading, *, where: str,
) -> PairData:  # fmt: skip
    words = FirstCome()
    held: dict[str, tuple[Bags, Bags]] = {}
    texts: list[tuple[str, str]] = []
    sizes: dict[str, int] = {}
    empty = 0
    for part, table in tables.items():
        left, right = held[part] = Bags(words), Bags(words)
        before = len(texts)
        sides = (_texts(table, [column]) for column in columns.text)
        for one, other in zip(*sides, strict=True):
            cut = reading.cut(one), reading.cut(other)
            if not all(cut):
                empty += 1
                continue
            left.add(cut[0])
            right.add(cut[1])
            texts.append((one, other))
        sizes[part] = len(texts) - before
    group = grouped([one for one, _ in texts], [other for _, other in texts])
    parts, first = {}, 0
    for part, (left, right) in held.items():
        own = group[first : first + sizes[part]]
        parts[part] = PairPart(left.finish(), right.finish(), own)
        first += sizes[part]
    three = three_parts(parts, reading.limit, where)
    train = [sparse_rows(each) for each in three["train"][:2]]
    vocabulary, weigh = weigh_bags(train, words, reading)
    made = {
        part: PairPart(weigh(sparse_rows(p.query)), weigh(sparse_rows(p.key)), p.group)
        for part, p in three.items()
    }
    notes = _left_out(empty, "text")
    described |= {"words": len(vocabulary), "left_out": empty, **reading.described}
    described |= {"notes": notes} if notes else {}
    words_of = vocabulary.tokens
    return assemble_pairs(name, made, described, feature_names=words_of, shared=True, where=where)
