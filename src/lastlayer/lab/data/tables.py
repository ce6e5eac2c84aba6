"""Tables with named columns: CSV, TSV, JSON, Parquet, Arrow, datasets of the hub, fastText."""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from lastlayer.lab.data.files import (
    TEXT,
    DataError,
    broken,
    files_by_part,
    files_with,
    lines,
    needed,
    opened,
    part_named,
    plain_suffix,
    read_each,
    text_blocks,
)
from lastlayer.lab.data.text import Reading

COMMA, TAB = (".csv",), (".tsv", ".tab")
JSON = (".jsonl", ".ndjson", ".jsonlines", ".json")
PARQUET, ARROW = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
SUFFIXES = (*COMMA, *TAB, *JSON, *PARQUET, *ARROW)
HUB = "hf:"
MARK = "__label__"

# Timeout in seconds to reach the hub. The package itself tries for half a minute.
_PATIENCE = 5
# Files that `save_to_disk` writes into a folder.
_SAVED = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class Table:
    """Columns of the same length."""

    where: Path | str  # name in errors
    columns: dict[str, list[Any]]  # values by column; None if missing or empty
    lines: Sequence[int] | None = None  # line numbers of the rows, of text files

    @classmethod
    def of(
        cls,
        where: Path | str,
        names: Sequence[str],
        columns: Iterable[Iterable[Any]],
        numbers: Sequence[int] | None = None,
    ) -> "Table":
        """Build a table from columns; refuses tables without rows and repeated names."""
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            raise broken(f"two columns called {twice!r}", "rename one of them")
        values = [[None if _is_missing(each) else each for each in own] for own in columns]
        if not values or not values[0]:
            raise broken("an empty file: no rows", "give a file with rows in it")
        return cls(where, dict(zip(names, values, strict=True)), numbers)

    def broken(self, row: int, what: str, remedy: str) -> DataError:
        """An error about a row."""
        if self.lines is not None:
            return broken(what, remedy, path=self.where, line=self.lines[row])
        return broken(f"row {row + 1}: {what}", remedy, path=self.where)

    def select(self, rows: Sequence[int]) -> "Table":
        """A table of some of the rows."""
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        return Table(self.where, columns, [self.lines[i] for i in rows] if self.lines else None)


def _is_missing(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def as_number(value: Any) -> float | None:
    """The value as a number, if it is one or a string of one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def is_table(path: Path, encoding: str) -> bool:
    """Whether a text file is a table: its first lines have equally many tabs, or labels."""
    first = [line for _, line in islice(lines(path, encoding), 20) if line.strip()]
    tabs = {line.count("\t") for line in first}
    marked = sum(line.startswith(MARK) for line in first)
    return (len(first) > 1 and len(tabs) == 1 and tabs != {0}) or 2 * marked > len(first)


def read_tables(path: Path, encoding: str) -> dict[str, Table]:
    """Read the table of each part, from a file or a folder with one file per part.

    In a single file a column ``split`` may contain the part of each row.
    """
    known = not path.is_dir() or files_with(path, SUFFIXES)
    files = files_by_part(path, SUFFIXES if known else TEXT)
    read = read_each(files, lambda file: _read(file, encoding))
    table = read["train"]
    if len(read) > 1 or "split" not in table.columns:
        return read
    rows: dict[str, list[int]] = {}
    for row, split in enumerate(table.columns["split"]):
        rows.setdefault(part_named(str(split or "")) or "train", []).append(row)
    return {part: table.select(own) for part, own in rows.items()}


def _read(file: Path, encoding: str) -> Table:
    kind = plain_suffix(file)
    if kind in JSON:
        return _read_json(file, encoding)
    try:
        if kind in (*PARQUET, *ARROW):
            table = _read_arrow(file)
            return Table.of(file, table.column_names, (each.to_pylist() for each in table.columns))
        return _read_separated(file, encoding)
    except (OSError, ValueError, KeyError, TypeError, NotImplementedError) as error:
        if isinstance(error, DataError):
            raise
        what = f"not a file of the kind {kind} ({str(error).splitlines()[0]})"
        raise broken(what, "check its content and its suffix") from None


def _read_arrow(file: Path) -> Any:
    with opened(file) as stream:
        if plain_suffix(file) in PARQUET:
            return needed("pyarrow.parquet").read_table(stream)
        ipc, content = needed("pyarrow.ipc"), stream.read()
    try:
        return ipc.open_file(content).read_all()
    except ValueError:
        return ipc.open_stream(content).read_all()


def _read_separated(file: Path, encoding: str) -> Table:
    """Read CSV or tab-separated values, all as strings, or fastText lines."""
    text = (f"{line}\n" for _, line in lines(file, encoding))
    first = next((line for line in text if line.strip()), "")
    kind = plain_suffix(file)
    if kind not in SUFFIXES and "\t" not in first:
        return _read_marked(file, encoding)
    if not first:
        raise broken("an empty file: no rows", "give a file with rows in it")
    arrow, reader = needed("pyarrow"), needed("pyarrow.csv")
    delimiters = ("\t", ",", ";", "|") if kind not in COMMA else (",", ";", "\t", "|")
    delimiter = next((each for each in delimiters if each in first), ",")
    names = next(csv.reader(chain([first], text), delimiter=delimiter))
    # A first line that contains a number or a sentence is not a header.
    has_header = not any(as_number(name) is not None or len(name.split()) > 5 for name in names)
    names = [n.strip() if has_header else f"column{i}" for i, n in enumerate(names, 1)]
    read = reader.ReadOptions(
        encoding=encoding, use_threads=False, column_names=names, skip_rows=int(has_header)
    )
    convert = reader.ConvertOptions(
        column_types=dict.fromkeys(names, arrow.string()), strings_can_be_null=False
    )
    failed: Exception | None = None
    # Tab-separated values are seldom quoted, and may begin with a quote character.
    for quote in ('"', False) if delimiter == "\t" else ('"',):
        parse = reader.ParseOptions(
            delimiter=delimiter, quote_char=quote, newlines_in_values=delimiter != "\t"
        )
        try:
            with opened(file) as stream:
                table = reader.read_csv(stream, read, parse, convert)
        except (ValueError, UnicodeError) as error:
            failed = error
        else:
            return Table.of(file, names, (each.to_pylist() for each in table.columns))
    # If the encoding is the cause, this raises an error with the position.
    for _ in text_blocks(file, encoding):
        pass
    told = str(failed).splitlines()[0][:160].removeprefix("CSV parse error: ")
    raise broken(told, "give as many values as there are columns in each row")


def _read_json(file: Path, encoding: str) -> Table:
    """Read JSON lines, or a JSON list of objects."""
    numbered = [(number, line) for number, line in lines(file, encoding) if line.strip()]
    whole = bool(numbered) and numbered[0][1].lstrip().startswith("[")
    line: int | None = None
    records: list[tuple[int, Any]] = []
    try:
        if whole:
            records = list(enumerate(json.loads("\n".join(text for _, text in numbered)), 1))
        else:
            for line, text in numbered:
                records.append((line, json.loads(text)))
    except ValueError as error:
        remedy = "give an object per line, or a list of objects"
        raise broken(f"not JSON ({error})", remedy, line=line) from None
    for number, each in records:
        if not isinstance(each, dict):
            what = f"expected an object, got {type(each).__name__}"
            raise broken(what, "give an object for each row", line=number)
    return _of_records(file, [each for _, each in records], [number for number, _ in records])


def _of_records(
    where: Path | str, records: list[dict[str, Any]], numbers: Sequence[int] | None
) -> Table:
    names = list(dict.fromkeys(name for each in records for name in each))
    return Table.of(where, names, ([each.get(n) for each in records] for n in names), numbers)


def _read_marked(file: Path, encoding: str) -> Table:
    """Read fastText lines, in which some words are labels: ``__label__sauce How much …``."""
    texts, labels, numbers = [], [], []
    for number, line in lines(file, encoding):
        if words := line.split():
            labels.append([word.removeprefix(MARK) for word in words if word.startswith(MARK)])
            texts.append(" ".join(word for word in words if not word.startswith(MARK)))
            numbers.append(number)
    if not any(labels):
        what = f"no labels: no word begins with {MARK}"
        raise broken(what, "add such labels, give a table with a column of labels, or task='lm'")
    return Table.of(file, ("text", "labels"), (texts, labels), numbers)


def read_hub(source: str, reading: Reading) -> tuple[dict[str, Table], str | None]:
    """Read a dataset of the Hugging Face hub or a local folder; returns tables and the column.

    The source is ``hf:name``, ``hf:name:config``, ``hf:name:config:column`` or ``hf:name::column``.
    With a limit only as many records are read as it requires.
    """
    name, *rest = source.removeprefix(HUB).split(":")
    if not name or len(rest) > 2:
        raise broken(
            "expected hf:name, hf:name:config or hf:name:config:column",
            "leave the config empty to name a column alone",
        )
    config, column = [*rest, "", ""][:2]
    splits = _hub_splits(name, config or None)
    # Some datasets have further splits, such as "unsupervised".
    tables: dict[str, Table] = {}
    for split, rows in splits.items():
        part = part_named(split)
        if part is None:
            continue
        features = getattr(rows, "features", None) or {}
        try:
            records = [_with_names(features, each) for each in islice(rows, reading.enough(part))]
        except Exception as error:  # a lost connection, or a damaged file
            raise _hub_failed(error) from error
        tables[part] = _of_records(f"{source} ({split})", records, None)
    if not tables:
        what = f"no split for training; it has {', '.join(map(repr, splits)) or 'none'}"
        raise broken(what, "give a dataset with a split 'train'")
    return tables, column or None


def _hub_splits(name: str, config: str | None) -> Mapping[str, Any]:
    package = needed("datasets", "hub")
    folder = Path(name).expanduser()
    if name.startswith((".", "/", "~")) and not folder.exists():
        raise broken("no such file or folder", "check the spelling")
    if not folder.exists() and not package.config.HF_HUB_OFFLINE:
        address = package.config.HF_ENDPOINT
        session = needed("huggingface_hub.utils", "hub").get_session()
        try:
            # One request, through the same proxies as later requests.
            session.head(address, timeout=_PATIENCE)
        except Exception as error:  # the HTTP client depends on the version of the hub's package
            what = f"no such folder, and {address} is out of reach ({error})"
            raise broken(what, "check the name and the connection") from error
    try:
        if any((folder / each).is_file() for each in _SAVED):
            made = package.load_from_disk(str(folder))
        else:
            known = str(folder) if folder.exists() else name
            made = package.load_dataset(known, config, streaming=True)
    except Exception as error:  # any error of the hub, the network or the dataset
        raise _hub_failed(error) from error
    return made if isinstance(made, Mapping) else {"train": made}


def _hub_failed(error: Exception) -> DataError:
    # The second line of a message lists the configs; later lines are examples in Python.
    told = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
    remedy = "check the name, its config and the connection"
    return broken(f"{type(error).__name__}: {told.rstrip('.')}", remedy)


def _with_names(features: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Replace labels stored as numbers by their names, if the dataset has names; -1 by None."""
    made = dict(row)
    for name, value in row.items():
        inner = getattr(features.get(name), "feature", features.get(name))
        name_of = getattr(inner, "int2str", None)
        if name_of is not None and value is not None:
            one = not isinstance(value, list)
            known = [name_of(each) for each in ([value] if one else value) if each != -1]
            made[name] = (known[0] if known else None) if one else known
    return made
