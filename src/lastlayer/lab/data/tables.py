"""Tables with named columns: CSV, TSV, JSON lines, Parquet, Arrow, sets of a hub, marked text.

Which columns hold the text, the label or the features is given, or follows from their names and
values where that is safe; then so does the task.
"""

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data.files import (
    TEXT,
    DataError,
    broken,
    files_by_part,
    files_with,
    lines,
    opened,
    part_named,
    plain_suffix,
    text_blocks,
)  # fmt: skip
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
)  # fmt: skip
from lastlayer.lab.data.text import (
    END,
    FirstCome,
    IdStream,
    Reading,
    TextData,
    assemble,
    enough,
)  # fmt: skip

COMMA, TAB = (".csv",), (".tsv", ".tab")
JSON = (".jsonl", ".ndjson", ".jsonlines", ".json")
PARQUET, ARROW = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
SUFFIXES = (*COMMA, *TAB, *JSON, *PARQUET, *ARROW)
HUB = "hf:"
MARK = "__label__"

_TEXTS = (
    "text", "sentence", "review", "title", "content", "body", "document", "question", "comment",
    "message", "tweet", "description", "headline", "abstract", "utterance", "query",
)  # fmt: skip
_LABELS = (
    "label", "labels", "class", "classes", "category", "categories", "target", "targets", "tags",
    "topics", "topic", "genres", "genre", "intent", "sentiment", "y",
)  # fmt: skip
_ENDS_AS_LABEL = ("label", "labels", "class", "category")
_NO_FEATURES = ("id", "index", "split", "")
_SEPARATORS = ("|", ";", ",")
# Rows that tell the kind of a column.
_LOOKED_AT = 1000
# Seconds until the hub counts as out of reach. The package itself tries for half a minute.
_PATIENCE = 5
# What `save_to_disk` leaves in a folder.
_SAVED = ("dataset_dict.json", "state.json")


@dataclass
class Table:
    """Columns of the same length.

    Attributes:
        where: what an error calls it.
        columns: lists of values, or pyarrow's arrays.
        lines: of the rows in a file of text.
    """

    where: Path | str
    columns: dict[str, Any]
    lines: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self._lists: dict[str, list[Any]] = {}

    @property
    def n_rows(self) -> int:
        """How many rows there are."""
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def values(self, name: str) -> list[Any]:
        """The values of a column; None and empty texts are None."""
        if name not in self._lists:
            held = self.columns[name]
            found = held if isinstance(held, list) else held.to_pylist()
            self._lists[name] = [None if _is_missing(each) else each for each in found]
        return self._lists[name]

    def broken(self, row: int, what: str, remedy: str) -> DataError:
        """An error about a row."""
        if self.lines is not None:
            return broken(what, remedy, path=self.where, line=self.lines[row])
        return broken(f"row {row + 1}: {what}", remedy, path=self.where)

    def select(self, rows: Sequence[int]) -> "Table":
        """Some of the rows."""
        columns = {name: [self.values(name)[i] for i in rows] for name in self.columns}
        return Table(self.where, columns, [self.lines[i] for i in rows] if self.lines else None)


def _is_missing(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


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


def is_table(path: Path, encoding: str) -> bool:
    """Whether a file of text is a table: its first lines all have as many tabs, or bear labels."""
    first = [line for _, line in islice(lines(path, encoding), 20) if line.strip()]
    tabs = {line.count("\t") for line in first}
    marked = sum(line.startswith(MARK) for line in first)
    return (len(first) > 1 and len(tabs) == 1 and tabs != {0}) or 2 * marked > len(first)


def read_tables(path: Path, encoding: str) -> dict[str, Table]:
    """The table of each part, of a file or of a folder with one for each.

    In a single file a column ``split`` may say which part a row is in.
    """
    known = not path.is_dir() or files_with(path, SUFFIXES)
    files = files_by_part(path, SUFFIXES if known else TEXT)
    read = {part: _read(file, encoding) for part, file in files.items()}
    if list(read) != ["train"] or "split" not in read["train"].columns:
        return read
    table = read["train"]
    named = [part_named(str(each or "")) or "train" for each in table.values("split")]
    parts = dict.fromkeys(named)
    if len(parts) == 1:
        return {named[0]: table}
    return {p: table.select([i for i, each in enumerate(named) if each == p]) for p in parts}


def _read(file: Path, encoding: str) -> Table:
    kind = plain_suffix(file)
    if kind in JSON:
        return _read_json(file, encoding)
    if kind not in SUFFIXES:
        first = next((line for _, line in lines(file, encoding) if line.strip()), "")
        if "\t" not in first:
            return _read_marked(file, encoding)
    try:
        if kind in PARQUET:
            with opened(file) as stream:
                table = import_module("pyarrow.parquet").read_table(stream)
        elif kind in ARROW:
            table = _read_arrow(file)
        else:
            return _read_separated(file, encoding)
    except ImportError:
        what = f"needs pyarrow to read {kind}, which is not installed"
        raise broken(what, 'pip install "lastlayer[lab]"', path=file) from None
    except (OSError, ValueError, KeyError, TypeError, NotImplementedError) as error:
        if isinstance(error, DataError):
            raise
        what = f"not a file of the kind {kind} ({str(error).splitlines()[0]})"
        raise broken(what, "check what wrote it, and its suffix", path=file) from None
    names = _label_names(table.schema.metadata)
    columns = {name: table.column(i) for i, name in enumerate(table.column_names)}
    for name in names.keys() & columns.keys():
        columns[name] = [_named(names[name], each) for each in columns[name].to_pylist()]
    return _checked(Table(file, columns), table.column_names)


def _read_arrow(file: Path) -> Any:
    ipc = import_module("pyarrow.ipc")
    with opened(file) as stream:
        content = stream.read()
    try:
        return ipc.open_file(content).read_all()
    except ValueError:
        return ipc.open_stream(content).read_all()


def _label_names(metadata: Mapping[bytes, bytes] | None) -> dict[str, list[str]]:
    """The names of classes that the datasets package keeps beside their numbers."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        inner = {name: each.get("feature", each) for name, each in features.items()}
        return {name: each["names"] for name, each in inner.items() if "names" in each}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _named(names: list[str], value: Any) -> Any:
    """The names of numbers; rows whose labels are kept secret have -1."""
    if isinstance(value, list):
        return [names[each] for each in value if each != -1]
    return None if value is None or value == -1 else names[value]


def _read_separated(file: Path, encoding: str) -> Table:
    """CSV, or values between tabs; all values are texts here."""
    arrow, reader = import_module("pyarrow"), import_module("pyarrow.csv")
    text = (f"{line}\n" for _, line in lines(file, encoding))
    first = next((line for line in text if line.strip()), "")
    if not first:
        raise broken("an empty file: no rows", "give a file with rows in it", path=file)
    delimiter = "\t" if "\t" in first and plain_suffix(file) not in COMMA else ","
    if delimiter == "," and "," not in first:
        delimiter = next((each for each in (";", "\t", "|") if each in first), ",")
    names = next(csv.reader(chain([first], text), delimiter=delimiter))
    has_header = not any(_is_value(name) for name in names)
    names = (
        [n.strip() for n in names] if has_header else [f"column{i + 1}" for i in range(len(names))]
    )
    options = {
        "read_options": reader.ReadOptions(
            encoding=encoding, use_threads=False, column_names=names, skip_rows=int(has_header)
        ),
        "convert_options": reader.ConvertOptions(
            column_types=dict.fromkeys(names, arrow.string()), strings_can_be_null=False
        ),
    }
    quotes: list[Any] = ['"', False] if delimiter == "\t" else ['"']
    for quote in quotes:
        # Values between tabs seldom have quotes around them, and may begin with one.
        parse = reader.ParseOptions(
            delimiter=delimiter, quote_char=quote, newlines_in_values=delimiter != "\t"
        )
        try:
            with opened(file) as stream:
                table = reader.read_csv(stream, parse_options=parse, **options)
            break
        except (ValueError, UnicodeError) as error:
            if quote is quotes[-1]:
                # Where it is a matter of the encoding, that names the place.
                for _ in text_blocks(file, encoding):
                    pass
                told = str(error).splitlines()[0][:160].removeprefix("CSV parse error: ")
                remedy = "give as many values as there are columns in each row"
                raise broken(told, remedy, path=file) from None
    columns = {name: table.column(i) for i, name in enumerate(names)}
    return _checked(Table(file, columns), names)


def _is_value(name: str) -> bool:
    """Whether what should be the name of a column is a value: a number, or a sentence."""
    return _number(name) is not None or len(name.split()) > 5


def _checked(table: Table, names: Sequence[str]) -> Table:
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise broken(f"two columns called {twice!r}", "rename one of them", path=table.where)
    if not table.n_rows:
        raise broken("an empty file: no rows", "give a file with rows in it", path=table.where)
    return table


def _read_json(file: Path, encoding: str) -> Table:
    """An object a line, or a list of objects."""
    records: list[tuple[int, Any]] = []
    numbered = ((number, line) for number, line in lines(file, encoding) if line.strip())
    first = next(numbered, None)
    if first is not None and first[1].lstrip().startswith("["):
        try:
            held = json.loads("\n".join([first[1], *(line for _, line in numbered)]))
            records = list(enumerate(held, 1))
        except ValueError as error:
            remedy = "give an object a line, or a list of objects"
            raise broken(f"not JSON ({error})", remedy, path=file) from None
    elif first is not None:
        for number, line in chain([first], numbered):
            try:
                records.append((number, json.loads(line)))
            except ValueError as error:
                remedy = "give an object a line, or a list of objects"
                raise broken(f"not JSON ({error})", remedy, path=file, line=number) from None
    for number, each in records:
        if not isinstance(each, dict):
            what = f"expected an object, got {type(each).__name__}"
            raise broken(what, "give an object for each row", path=file, line=number)
    return _of_records(file, [each for _, each in records], [number for number, _ in records])


def _of_records(
    where: Path | str, records: list[dict[str, Any]], numbers: Sequence[int] | None
) -> Table:
    names = list(dict.fromkeys(name for each in records for name in each))
    table = Table(where, {n: [each.get(n) for each in records] for n in names}, numbers)
    if not names:
        raise broken("an empty file: no rows", "give a file with rows in it", path=where)
    return table


def _read_marked(file: Path, encoding: str) -> Table:
    """Lines of words, some of which are labels: fastText's ``__label__sauce How much …``."""
    texts, labels, numbers = [], [], []
    for number, line in lines(file, encoding):
        if words := line.split():
            labels.append([word.removeprefix(MARK) for word in words if word.startswith(MARK)])
            texts.append(" ".join(word for word in words if not word.startswith(MARK)))
            numbers.append(number)
    if not any(labels):
        what = f"no labels: no word begins with {MARK}"
        remedy = "mark labels so, or give a table with a column of labels; or task='lm'"
        raise broken(what, remedy, path=file)
    return Table(file, {"text": texts, "labels": labels}, numbers)


def read_hub(source: str, limit: int | None) -> tuple[dict[str, Table], str | None]:
    """The tables of a set of the Hugging Face hub, or of a folder like one, and the column named.

    The source is ``hf:name``, ``hf:name:config``, ``hf:name:config:column`` or ``hf:name::column``.
    No more is read than a limit of tokens or rows can need.
    """
    name, *rest = source.removeprefix(HUB).split(":")
    if not name or len(rest) > 2:
        raise DataError(
            f"{source}: expected hf:name, hf:name:config or hf:name:config:column; "
            "leave the config empty to name a column alone"
        )
    config, column = [*rest, "", ""][:2]
    splits = _hub_splits(source, name, config or None)
    # Sets have splits such as "unsupervised" beside the three.
    tables: dict[str, Table] = {}
    for split, rows in splits.items():
        part = part_named(split)
        if part is None:
            continue
        features = getattr(rows, "features", None) or {}
        try:
            records = [_with_names(features, each) for each in islice(rows, enough(part, limit))]
        except Exception as error:  # a connection that breaks, a file of the set that is damaged
            raise _hub_failed(source, error) from error
        tables[part] = _of_records(f"{source} ({split})", records, None)
    if not tables:
        what = f"no split for training; it has {', '.join(map(repr, splits)) or 'none'}"
        raise broken(what, "give a set with a split 'train'", path=source)
    return tables, column or None


def _hub_splits(source: str, name: str, config: str | None) -> Mapping[str, Any]:
    try:
        package = import_module("datasets")
    except ImportError:
        what = "needs the datasets package, which is not installed"
        raise broken(what, 'pip install "lastlayer[hub]"', path=source) from None
    folder = Path(name).expanduser()
    if name.startswith((".", "/", "~")) and not folder.exists():
        raise broken("no such file or folder", "check the spelling", path=source)
    if not folder.exists() and not package.config.HF_HUB_OFFLINE:
        address = package.config.HF_ENDPOINT
        try:
            # One request, through the same proxies as those that follow.
            import_module("huggingface_hub.utils").get_session().head(address, timeout=_PATIENCE)
        except Exception as error:  # each version of the hub's package has its own client
            what = f"no such folder, and {address} is out of reach ({error})"
            raise broken(what, "check the name and the connection", path=source) from error
    try:
        if any((folder / each).is_file() for each in _SAVED):
            made = package.load_from_disk(str(folder))
        else:
            known = str(folder) if folder.exists() else name
            made = package.load_dataset(known, config, streaming=True)
    except Exception as error:  # whatever the hub, the network and the set raise
        raise _hub_failed(source, error) from error
    return made if isinstance(made, Mapping) else {"train": made}


def _hub_failed(source: str, error: Exception) -> DataError:
    # The second line of a message names the configs; what follows are examples in Python.
    told = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
    remedy = "check the name, its config and the connection"
    return broken(f"{type(error).__name__}: {told.rstrip('.')}", remedy, path=source)


def _with_names(features: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """With the names of labels that the set keeps as numbers, where it has names."""
    made = dict(row)
    for name, value in row.items():
        inner = getattr(features.get(name), "feature", features.get(name))
        name_of = getattr(inner, "int2str", None)
        if name_of is not None and value is not None:
            one = not isinstance(value, list)
            known = [name_of(each) for each in ([value] if one else value) if each != -1]
            made[name] = (known[0] if known else None) if one else known
    return made


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
    if known and all(_number(each) is not None for each in known):
        return "number"
    if known and all(isinstance(each, str) for each in known):
        words = sum(len(each.split()) for each in known) / len(known)
        letters = sum(map(len, known)) / len(known)
        return "text" if words >= 3 or letters >= 24 else "name"
    return "other" if known else "empty"


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


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
        for part, table in tables.items():
            most = enough(part, reading.limit)
            for text in _texts(table, columns.text):
                if most is not None and streams[part].length >= most:
                    break
                streams[part].add([*reading.cut(text), END])
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
                what = f"expected names or ids in the column {name!r}, got {each!r}"
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
    found = [(row, _number(own[0]), own[0]) for row, own in enumerate(labels) if own]
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
            found = [_number(cell) for cell in cells]
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
