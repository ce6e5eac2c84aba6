"""Numeric rows: svmlight, ARFF with labels by MULAN's XML, and precomputed hidden states."""

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data.files import (
    DataError,
    broken,
    files_by_part,
    lines,
    needed,
    opened,
    part_named,
    placed,
    plain_stem,
    plain_suffix,
    read_each,
    some,
)
from lastlayer.lab.data.rows import (
    Floats,
    LabelData,
    LabelPart,
    Lists,
    PairData,
    PairPart,
    SparseRows,
    label_data,
    label_lists,
    pair_data,
)
from lastlayer.lab.data.text import FirstCome, Reading

SVMLIGHT = (".svm", ".svmlight", ".libsvm")
ARFF = (".arff",)
STATES = (".npz", ".safetensors")
SUFFIXES = (*SVMLIGHT, *ARFF, *STATES)


def matrix_data(
    path: Path, kind: str, reading: Reading, task: str | None, label: str | None
) -> LabelData | PairData:
    """Read a file of one of these formats, or a folder with one for each part."""
    if task == "lm" or (task == "pairs" and kind not in STATES):
        what = f"{kind[1:]} has rows with labels, not text"
        raise broken(what, "give task='classification' or task='multilabel'")
    if kind in ARFF:
        return _arff_data(path, reading, task, label)
    return (_svmlight_data if kind in SVMLIGHT else _states_data)(path, reading, task)


def _described(path: Path, format_: str, reading: Reading) -> dict[str, Any]:
    return {"name": path.name, "source": str(path), "format": format_, "limit": reading.limit}


def _task_of(parts: Iterable[LabelPart], task: str | None) -> tuple[str, str]:
    """The task and the reason: classification if each row has one label, unless task is given."""
    one = all((np.diff(each.labels.offsets) == 1).all() for each in parts)
    if task == "classification" and not one:
        what = "expected one label in each row, got rows with none or several"
        raise broken(what, "give task='multilabel'")
    if task is not None:
        return task, "as asked"
    if one:
        return "classification", "one label per row"
    return "multilabel", "rows with no label or several"


_PAIRS = "expected labels with commas between them, then index:value pairs by rising index"


def _svmlight_data(path: Path, reading: Reading, task: str | None) -> LabelData:
    """Read svmlight with scikit-learn.

    Rows may have no labels. A first line of three numbers, the header of datasets in the extreme
    classification repository, is skipped. Indices start at 0 if a 0 occurs, else at 1.
    """
    names = FirstCome()
    files = files_by_part(path, SVMLIGHT)
    read = read_each(files, lambda file: _read_svmlight(file, names))
    used = [rows.indices for rows, _ in read.values() if len(rows.indices)]
    first = min(1, min((int(each.min()) for each in used), default=0))
    width = max((int(each.max()) + 1 - first for each in used), default=0)
    parts = {}
    for part, (rows, labels) in read.items():
        shifted = rows._replace(indices=rows.indices - first, width=width)
        parts[part] = LabelPart(shifted, labels)
    task, reason = _task_of(parts.values(), task)
    described = _described(path, "svmlight", reading)
    described |= {"task_reason": reason, "first_index": first}
    features = [str(i + first) for i in range(width)]
    return label_data(parts, features, list(names), described, reading, task=task)


def _read_svmlight(path: Path, names: FirstCome) -> tuple[SparseRows, Lists]:
    read = needed("sklearn.datasets").load_svmlight_file
    first = next((line for _, line in lines(path, "latin-1")), "").split()
    header = len(first) == 3 and all(word.isdecimal() for word in first)
    try:
        with opened(path) as stream:
            if header:
                stream.readline()
            found, labels = read(stream, dtype=np.float32, multilabel=True, zero_based=True)
    except ValueError:
        raise _bad_line(path, read, header) from None
    if not found.shape[0]:
        raise broken("an empty file: no rows", _PAIRS)
    if not np.isfinite(found.data).all():
        place = int(np.flatnonzero(~np.isfinite(found.data))[0])
        row = int(np.searchsorted(found.indptr, place, side="right"))
        what = f"row {row}: the value of index {found.indices[place]} is {found.data[place]}"
        raise broken(what, "leave it out or fill it in")
    for row, own in enumerate(labels, 1):
        if part := next((each for each in own if not float(each).is_integer()), None):
            what = f"row {row}: expected classes, got numbers such as {part:g}"
            raise broken(what, "write labels as whole numbers")
    lists = label_lists(([str(int(each)) for each in own] for own in labels), names)
    return SparseRows.of(found), lists


def _bad_line(path: Path, read: Any, header: bool) -> DataError:
    """An error for the first line that the reader rejects."""
    for number, line in islice(lines(path, "latin-1"), int(header), None):
        try:
            read(io.BytesIO(line.encode("latin-1")), multilabel=True, zero_based=True)
        except ValueError as error:
            told = str(error).splitlines()[0].rstrip(".") if str(error) else "malformed"
            return broken(f"{line[:40]!r}: {told}", _PAIRS, line=number)
    return broken("not svmlight", _PAIRS)


_POSITIVE = {"1", "1.0", "yes", "true", "y", "t"}
_NEGATIVE = {"0", "0.0", "no", "false", "n", "f"}
# Attributes with more values are assumed to be names of rows, and left out.
_MOST_VALUES = 100
_ENTRY = re.compile(
    r"""\s*(\d+)\s+('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,'"}]*[^,'"}\s])\s*(?:,|(?=}))"""
)


@dataclass(frozen=True)
class _Attribute:
    """An attribute of ARFF, which becomes one column, or one per value if it is nominal."""

    name: str  # of the attribute
    values: tuple[str, ...] | None  # of a nominal attribute; None for numbers
    is_date: bool = False  # dates are left out
    is_class: bool = False  # whether yes and no are two classes instead of a column of 1 and 0

    @cached_property
    def cells(self) -> dict[str, tuple[int, float]]:
        """Column and number for each value of a nominal attribute."""
        values = self.values or ()
        words = {value.lower() for value in values}
        if len(words) <= 2 and words <= _POSITIVE | _NEGATIVE and not self.is_class:
            return {value: (0, float(value.lower() in _POSITIVE)) for value in values}
        return {value: (i, 1.0) for i, value in enumerate(values)}

    @cached_property
    def columns(self) -> list[str]:
        """Names of the columns."""
        one = self.values is None or all(column == 0 for column, _ in self.cells.values())
        return [self.name] if one else [f"{self.name}={value}" for value in self.values or ()]

    def cell(self, value: str, line: int) -> tuple[int, float]:
        """Column and number for a value."""
        try:
            found = self.cells[value] if self.values else (0, float(value))
        except (KeyError, ValueError):
            found = 0, math.nan
        if math.isfinite(found[1]):
            return found
        what, remedy = f"expected a number for {self.name!r}, got {value!r}", "correct it"
        if value == "?":
            what = f"a missing value (?) of {self.name!r}"
            remedy = "fill it in or leave out the row"
        elif self.values is not None:
            what = f"{value!r} is no value of {self.name!r}"
            remedy = f"its header has {', '.join(self.values[:8])}"
        raise broken(what, remedy, line=line)


def _arff_lines(path: Path, encoding: str) -> Iterator[tuple[int, str]]:
    for number, line in lines(path, encoding):
        text = line.strip()
        if text and text[0] != "%":
            yield number, text


def _is_data(text: str) -> bool:
    return text.lower().startswith("@data")


def _attributes(path: Path, encoding: str) -> list[_Attribute]:
    """Read only the header with scipy, which supports neither sparse rows nor errors in rows."""
    arff = needed("scipy.io.arff")

    def read(text: str) -> tuple[Any, str]:
        try:
            return arff.loadarff(io.StringIO(text))[1], ""
        except (ValueError, NotImplementedError, StopIteration, OSError, IndexError) as error:
            return None, str(error).removesuffix(", sorry") or "malformed"

    header: list[tuple[int, str]] = []
    for number, text in _arff_lines(path, encoding):
        header.append((number, text))
        if _is_data(text):
            break
    else:
        raise broken("not ARFF: no line with @data", "give a file in ARFF")
    meta, told = read("\n".join(text for _, text in header))
    if told:
        alone = ((n, read(f"@relation r\n{text}\n@data\n")[1]) for n, text in header[1:-1])
        line, told = next(((n, own) for n, own in alone if own), (header[0][0], told))
        remedy = "expected @relation, then @attribute NAME numeric or {values}, then @data"
        raise broken(told, remedy, line=line)
    return [
        _Attribute(_unescaped(name), meta[name][1] if kind == "nominal" else None, kind == "date")
        for name, kind in zip(meta.names(), meta.types(), strict=True)
    ]


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def _entries(text: str, attributes: int, line: int) -> dict[int, str]:
    """The values of a dense row, or of a sparse one such as ``{0 1.5, 7 red}``, by attribute."""
    found: dict[int, str] = {}
    if text[0] != "{":
        quote = '"' if '"' in text and "'" not in text else "'"
        comma = "," if "," in text or "\t" not in text else "\t"
        row = next(csv.reader([text], delimiter=comma, quotechar=quote, escapechar="\\",
                              skipinitialspace=True))  # fmt: skip
        if len(row) != attributes:
            what = f"{'fewer' if len(row) < attributes else 'more'} values than attributes"
            remedy = f"give a value for each of {attributes} attributes"
            raise broken(f"{what} in {text[:40]!r}", remedy, line=line)
        return {c: value.strip() for c, value in enumerate(row)}
    place = 1
    while text[place:].strip() != "}":
        entry = _ENTRY.match(text, place)
        if entry is None or int(entry[1]) >= attributes or int(entry[1]) in found:
            what = f"malformed entry {text[place : place + 20]!r} of {attributes} attributes"
            remedy = "expected {index value, index value, …}, each index from 0 once"
            raise broken(what, remedy, line=line)
        value = entry[2][1:-1] if entry[2][0] in "'\"" else entry[2]
        found[int(entry[1])], place = _unescaped(value), entry.end()
    return found


def _arff_data(path: Path, reading: Reading, task: str | None, label: str | None) -> LabelData:
    """Read ARFF; ``label`` is the XML with label names, or the attribute with the classes."""
    files = files_by_part(path, ARFF)
    headers = read_each(files, lambda file: _attributes(file, reading.encoding))
    attributes, first = headers["train"], files["train"]
    for part, found in headers.items():
        if found != attributes:
            what = "its attributes are not those of the training file"
            raise broken(what, f"compare it with {first.name}", path=files[part])
    own = None if label and label.lower().endswith(".xml") else _class_of(attributes, label, first)
    if own is None:
        xml = Path(label) if label else _xml_beside(first)
        labels = _label_columns(attributes, _label_names(xml), first, xml)
        names, reason = [attributes[c].name for c in labels], f"labels by name in {xml.name}"
    else:
        attributes[own] = replace(attributes[own], is_class=True)
        labels, names = [own], list(attributes[own].values or ())
        reason = f"one label per row in the attribute {attributes[own].name!r}"
    rest = [c for c in range(len(attributes)) if c not in labels]
    features = [
        c for c in rest
        if not attributes[c].is_date and len(attributes[c].values or ()) <= _MOST_VALUES
    ]  # fmt: skip
    parts = read_each(
        files, lambda file: _arff_part(file, reading.encoding, attributes, labels, features)
    )
    if task == "classification" or own is not None:
        task = _task_of(parts.values(), task)[0]
    left_out = [attributes[c].name for c in rest if c not in features]
    described = _described(path, "ARFF", reading)
    described |= {"task_reason": reason, "left_out": left_out}
    columns = [name for c in features for name in attributes[c].columns]
    return label_data(parts, columns, names, described, reading, task=task or "multilabel")


def _class_of(attributes: Sequence[_Attribute], label: str | None, arff: Path) -> int | None:
    """The attribute with the classes: the given one, or without an XML one with a usual name."""
    place = {each.name: c for c, each in enumerate(attributes)}
    if label is None:
        called = [c for name, c in place.items() if name.lower() in ("class", "label", "target")]
        alone = len(called) == 1 and not any(arff.parent.glob("*.xml"))
        return called[0] if alone and attributes[called[0]].values else None
    if label not in place:
        what = f"no attribute {label!r}; there are {some(place)}"
        raise broken(what, "give another label, or the XML file of the labels", path=arff)
    if attributes[place[label]].values is None:
        what = f"expected a list of values for the attribute {label!r}, got numbers"
        raise broken(what, "give another label", path=arff)
    return place[label]


def _xml_beside(arff: Path) -> Path:
    """The XML file with the same name, without the word for the part, or the only XML file."""
    beside = {xml.stem.lower(): xml for xml in sorted(arff.parent.glob("*.xml"))}
    words = [w for w in plain_stem(arff).split("-") if part_named(w) is None]
    for stem in (plain_stem(arff), "-".join(words), *words[:1]):
        if stem in beside:
            return beside[stem]
    if len(beside) == 1:
        return beside.popitem()[1]
    what = (
        f"expected an XML file with the names of the labels beside it, got {len(beside) or 'none'}"
    )
    name = "-".join(words)
    remedy = f"name it {name}.xml, or give label='PATH', or label='NAME' of the class attribute"
    raise broken(what, remedy, path=arff)


def _label_names(xml: Path) -> list[str]:
    """The names in ``<labels><label name="…"/></labels>``, at any depth."""
    remedy = 'expected <labels><label name="…"/></labels>'
    try:
        root = ET.fromstring(xml.read_bytes())
    except OSError as error:
        remedy = "check the path and its permissions"
        raise broken(f"cannot be read ({error.strerror})", remedy, path=xml) from None
    except ET.ParseError as error:
        raise broken(f"not XML ({error})", remedy, path=xml) from None
    found = [e.get("name") for e in root.iter() if e.tag.rpartition("}")[2] == "label"]
    names = [_unescaped(name) for name in found if name is not None]
    if not names or len(names) != len(found):
        raise broken(f"{len(names)} names of labels", remedy, path=xml)
    return names


def _label_columns(
    attributes: Sequence[_Attribute], names: list[str], arff: Path, xml: Path
) -> list[int]:
    place = {each.name: c for c, each in enumerate(attributes)}
    if missing := [name for name in names if name not in place]:
        what = f"{len(missing)} of its {len(names)} labels are no attributes of {arff.name}"
        raise broken(f"{what}: {some(missing, 3)}", "give the XML file of this set", path=xml)
    labels = sorted({place[name] for name in names})
    for each in (attributes[c] for c in labels):
        if len(each.columns) > 1:
            what = f"the label {each.name!r} has the values {', '.join((each.values or ())[:4])}"
            raise broken(what, "a label is 0 or 1", path=arff)
    return labels


def _arff_part(
    path: Path, encoding: str, attributes: Sequence[_Attribute], labels: list[int],
    features: list[int],
) -> LabelPart:  # fmt: skip
    """Read the columns of labels and features; sparse rows stay sparse if all defaults are 0."""
    starts: dict[int, int] = {}
    n_labels = width = 0
    for c in (*labels, *features):
        starts[c], width = width, width + len(attributes[c].columns)
        n_labels = width if c in labels else n_labels
    # Values that a sparse row omits are 0, or the first value of a nominal attribute.
    values = {c: attributes[c].values for c in starts}
    defaults = {c: v[0] for c, v in values.items() if v and attributes[c].cells[v[0]][1]}
    columns, numbers, offsets = list[int](), list[float](), [0]
    kinds = set[bool]()
    all_lines = _arff_lines(path, encoding)
    for _, text in all_lines:
        if _is_data(text):
            break
    for line, text in all_lines:
        kinds.add(text[0] == "{")
        for c, value in {**defaults, **_entries(text, len(attributes), line)}.items():
            if c in starts:
                column, number = attributes[c].cell(value, line)
                columns.append(starts[c] + column)
                numbers.append(number)
        offsets.append(len(columns))
    if not kinds:
        raise broken("an empty file: no rows after @data", "add rows")
    if len(kinds) > 1:
        raise broken("sparse rows and dense ones in one file", "give rows of one kind")
    rows = needed("scipy.sparse").csr_array(
        (np.array(numbers, np.float32), columns, offsets), (len(offsets) - 1, width)
    )
    rows.sort_indices()
    marked = SparseRows.of(rows[:, :n_labels])
    if (marked.values != 1).any():
        place = int((marked.values != 1).argmax())
        name = attributes[labels[marked.indices[place]]].name
        what = f"the label {name!r} is {marked.values[place]:g} in a row"
        raise broken(what, "a label is 0 or 1")
    made = rows[:, n_labels:]
    dense = kinds == {False} or defaults
    return LabelPart(made.toarray() if dense else SparseRows.of(made), Lists(*marked[:2]))


def _states_data(path: Path, reading: Reading, task: str | None) -> LabelData | PairData:
    """Read precomputed hidden states: arrays ``hidden`` and ``target``, or ``query`` and ``key``.

    ``target`` is ``(n,)``, or ``(n, p)`` padded with negative numbers for several labels; an
    optional ``n_classes`` also counts classes that never occur. ``query`` and ``key`` are pairs.
    """
    files = files_by_part(path, STATES)
    arrays = cache(_read_arrays)
    with placed(files["train"]):
        first = arrays(files["train"])
    described = _described(path, plain_suffix(files["train"])[1:], reading)
    if {"query", "key"} <= first.keys() and task in (None, "pairs"):
        pairs = read_each(files, lambda file: _pair_part(arrays(file)))
        described["task_reason"] = "arrays 'query' and 'key'" if task is None else "as asked"
        return pair_data(pairs, described, reading, shared=False)
    parts = read_each(files, lambda file: _state_part(arrays(file)))
    widths = {part: each.features.shape[1] for part, each in parts.items()}
    if len({*widths.values()}) > 1:
        what = f"hidden: expected one size in all parts, got {widths}"
        raise broken(what, "use states of the same model")
    ids = np.unique(np.concatenate([each.labels.indices for each in parts.values()]))
    if "n_classes" in first:
        n = int(first["n_classes"])
        if len(ids) and ids[-1] >= n:
            what = f"target: expected classes below n_classes = {n:,}, got {ids[-1]:,}"
            raise broken(what, "correct one of them")
        ids = np.arange(n)
    for part, (hidden, labels) in parts.items():
        numbered = labels._replace(indices=np.searchsorted(ids, labels.indices))
        parts[part] = LabelPart(hidden, numbered)
    task, reason = _task_of(parts.values(), task)
    described |= {"task_reason": reason, "hidden_states": True}
    columns = [str(i) for i in range(widths["train"])]
    return label_data(
        parts, columns, [str(i) for i in ids], described, reading, task=task, hidden=True
    )


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    is_npz = plain_suffix(path) == ".npz"
    safetensors = None if is_npz else needed("safetensors.torch")
    try:
        if safetensors is None:
            with np.load(path, allow_pickle=False) as held:
                return dict(held)
        # Through torch: numpy has no bfloat16.
        tensors = safetensors.load_file(str(path)).items()
        return {n: (t.float() if t.is_floating_point() else t).numpy() for n, t in tensors}
    except Exception as error:  # noqa: BLE001 - zip, numpy and safetensors have kinds of their own
        what = f"not a file of the kind {plain_suffix(path)} ({str(error).splitlines()[0]})"
        raise broken(what, "save arrays hidden and target in one") from None


def _array(held: dict[str, NDArray[Any]], name: str) -> NDArray[Any]:
    if name not in held:
        there = ", ".join(f"{n!r} {e.shape}" for n, e in held.items()) or "none"
        what = f"no array {name!r}; there are {there}"
        raise broken(what, "give hidden (n, d) and target (n,), or query and key")
    return held[name]


def _matrix(held: dict[str, NDArray[Any]], name: str) -> Floats:
    found = _array(held, name)
    if found.ndim != 2 or found.dtype.kind not in "fiu":
        what = f"{name}: expected numbers of shape (n, d), got {found.dtype} {found.shape}"
        raise broken(what, "flatten batch and length into rows")
    made = np.ascontiguousarray(found, np.float32)
    if not np.isfinite(made).all():
        row = int(np.flatnonzero(~np.isfinite(made).all(1))[0])
        raise broken(f"{name}: row {row} is not finite", "leave it out")
    return made


def _state_part(held: dict[str, NDArray[Any]]) -> LabelPart:
    hidden, target = _matrix(held, "hidden"), _array(held, "target")
    if target.dtype.kind not in "iu" or target.ndim not in (1, 2):
        what = (
            f"target: expected integers of shape (n,) or (n, p), got {target.dtype} {target.shape}"
        )
        raise broken(what, "give ids of classes")
    if len(target) != len(hidden):
        what = f"target: expected {len(hidden):,} rows as hidden has, got {len(target):,}"
        raise broken(what, "give one for each hidden state")
    table = np.sort(target.reshape(len(target), -1).astype(np.int64), 1)
    # Negative numbers are padding, and a repeated label in a row counts once.
    there = (table >= 0) & (np.diff(table, prepend=-1) != 0)
    if target.ndim == 1:
        kept = there[:, 0]
        hidden, table, there = hidden[kept], table[kept], there[kept]
    offsets = np.concatenate([[0], np.cumsum(there.sum(1))])
    return LabelPart(hidden, Lists(table[there], offsets))


def _pair_part(held: dict[str, NDArray[Any]]) -> PairPart:
    query, key = _matrix(held, "query"), _matrix(held, "key")
    if len(query) != len(key):
        what = f"key: expected {len(query):,} rows as query has, got {len(key):,}"
        raise broken(what, "key i belongs to query i")
    return PairPart(query, key, np.arange(len(query)))
