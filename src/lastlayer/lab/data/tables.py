"""Tables with named columns: CSV, TSV, JSON, Parquet, Arrow, sets of a hub, marked text."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
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
    opened,
    part_named,
    plain_suffix,
    text_blocks,
)
from lastlayer.lab.data.text import enough

COMMA, TAB = (".csv",), (".tsv", ".tab")
JSON = (".jsonl", ".ndjson", ".jsonlines", ".json")
PARQUET, ARROW = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
SUFFIXES = (*COMMA, *TAB, *JSON, *PARQUET, *ARROW)
HUB = "hf:"
MARK = "__label__"

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
    columns = {name: table.column(i) for i, name in enumerate(table.column_names)}
    return _checked(Table(file, columns), table.column_names)


def _read_arrow(file: Path) -> Any:
    ipc = import_module("pyarrow.ipc")
    with opened(file) as stream:
        content = stream.read()
    try:
        return ipc.open_file(content).read_all()
    except ValueError:
        return ipc.open_stream(content).read_all()


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
    return as_number(name) is not None or len(name.split()) > 5


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


def as_number(value: Any) -> float | None:
    """The number that a value is or spells, if any."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
