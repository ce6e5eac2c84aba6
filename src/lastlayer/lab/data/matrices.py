"""Rows of numbers: svmlight, ARFF with MULAN's names of labels, and hidden states you have."""

import io
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data.files import (
    DataError,
    broken,
    files_by_part,
    lines,
    opened,
    part_named,
    plain_stem,
    plain_suffix,
)  # fmt: skip
from lastlayer.lab.data.rows import (
    Floats,
    LabelData,
    LabelLists,
    LabelPart,
    Lists,
    PairData,
    PairPart,
    SparseRows,
    assemble_pairs,
    assemble_rows,
    three_parts,
)  # fmt: skip
from lastlayer.lab.data.text import FirstCome

SVMLIGHT = (".svm", ".svmlight", ".libsvm")
ARFF = (".arff",)
STATES = (".npz", ".safetensors")
_PAIRS = "expected labels with commas between them, then index:value pairs by rising index"
_POSITIVE = {"1", "1.0", "yes", "true", "y", "t"}
_NEGATIVE = {"0", "0.0", "no", "false", "n", "f"}
# A list of more values is taken for names of the rows.
_MOST_VALUES = 100
_ENTRY = re.compile(
    r"""\s*(\d+)\s+('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,'"}]*[^,'"}\s])\s*(?:,|(?=}))"""
)


def _task_of(labels: Iterable[Lists], task: str | None, what: str, where: str) -> tuple[str, str]:
    """One label in each row makes classes; what was asked for has to be there."""
    one = all((np.diff(each.offsets) == 1).all() for each in labels)
    if task == "classification" and not one:
        found = f"expected one label in each row, got rows with none or several {what}"
        raise broken(found, "give task='multilabel'", path=where)
    if task is not None:
        return task, "as asked"
    return ("classification", f"one label per row {what}") if one else (
        "multilabel", f"several labels per row, or none, {what}")  # fmt: skip


def svmlight_data(path: Path, *, limit: int | None, task: str | None) -> LabelData:
    """A file, or a folder with one for each part, through scikit-learn.

    Labels may be missing in a row. A first line of three numbers, as the sets of the extreme
    classification repository have, is skipped. Indices count from 0 where a 0 comes, else from 1.
    """
    names = FirstCome()
    files = files_by_part(path, SVMLIGHT)
    read = {part: _read_svmlight(file, names) for part, file in files.items()}
    used = [each.indices for each, _ in read.values() if len(each.indices)]
    first = min(1, min((int(each.min()) for each in used), default=0))
    width = max((int(each.max()) + 1 - first for each in used), default=0)
    parts = {
        part: LabelPart(rows._replace(indices=rows.indices - first, width=width), labels)
        for part, (rows, labels) in read.items()
    }
    where = str(path)
    task, reason = _task_of([labels for _, labels in read.values()], task, "before pairs", where)
    description = {
        "source": where, "format": "svmlight", "task_reason": reason, "first_index": first,
        "limit": limit,
    }  # fmt: skip
    features = [str(i + first) for i in range(width)]
    three = three_parts(parts, limit, where)
    return assemble_rows(
        path.name, three, features, list(names), description, task=task, where=where
    )


def _read_svmlight(path: Path, names: FirstCome) -> tuple[SparseRows, Lists]:
    try:
        reader = import_module("sklearn.datasets").load_svmlight_file
    except ImportError:
        what = "needs scikit-learn to read svmlight, which is not installed"
        raise broken(what, 'pip install "lastlayer[lab]"', path=path) from None
    first = next((line for _, line in lines(path, "latin-1")), "").split()
    header = len(first) == 3 and all(word.isdecimal() for word in first)
    try:
        with opened(path) as stream:
            if header:
                stream.readline()
            found, labels = reader(stream, dtype=np.float32, multilabel=True, zero_based=True)
    except ValueError:
        raise _bad_line(path, reader, header) from None
    if not found.shape[0]:
        raise broken("an empty file: no rows", _PAIRS, path=path)
    if not np.isfinite(found.data).all():
        place = int(np.flatnonzero(~np.isfinite(found.data))[0])
        row = int(np.searchsorted(found.indptr, place, side="right"))
        what = f"row {row}: the value of index {found.indices[place]} is {found.data[place]}"
        raise broken(what, "leave it out or fill it in", path=path)
    lists = LabelLists(names)
    for row, own in enumerate(labels, 1):
        for each in own:
            if not float(each).is_integer():
                what = f"row {row}: expected classes, got numbers such as {each:g}"
                raise broken(what, "labels of svmlight are whole numbers here", path=path)
        lists.add(str(int(each)) for each in own)
    return _compressed(found), lists.finish()


def _bad_line(path: Path, reader: Any, header: bool) -> DataError:
    """For the first line that the reader does not take."""
    for number, line in islice(lines(path, "latin-1"), int(header), None):
        try:
            reader(io.BytesIO(line.encode("latin-1")), multilabel=True, zero_based=True)
        except ValueError as error:
            told = str(error).splitlines()[0].rstrip(".") if str(error) else "malformed"
            return broken(f"{line[:40]!r}: {told}", _PAIRS, path=path, line=number)
    return broken("not svmlight", _PAIRS, path=path)


class Attribute(NamedTuple):
    """A column of ARFF: its name, and its values where they are a list, None for numbers."""

    name: str
    values: tuple[str, ...] | None
    used: bool = True

    @property
    def table(self) -> Floats | None:
        """Numbers for each value of a list: 1 or 0 for a yes and a no, else a column for each."""
        if self.values is None:
            return None
        words = {value.lower() for value in self.values}
        if len(words) <= 2 and words <= _POSITIVE | _NEGATIVE:
            return np.array([[value.lower() in _POSITIVE] for value in self.values], np.float32)
        return np.eye(len(self.values), dtype=np.float32)

    def number(self, value: str) -> float:
        """Itself, or its place in the list; NaN where it is no value of the column."""
        try:
            return float(self.values.index(value)) if self.values else float(value)
        except ValueError:
            return math.nan

    def broken(self, value: str, path: Path, line: int) -> DataError:
        """What is wrong with a value."""
        what, remedy = f"expected a number for {self.name!r}, got {value!r}", "correct it"
        if value == "?":
            what = f"a missing value (?) of {self.name!r}"
            remedy = "fill it in or leave out the row"
        elif self.values is not None:
            what = f"{value!r} is no value of {self.name!r}"
            remedy = f"its header has {', '.join(self.values[:8])}"
        return broken(what, remedy, path=path, line=line)


class Arff(NamedTuple):
    """Numbers of all columns, themselves or the place of the value: an array, or a sparse one."""

    attributes: tuple[Attribute, ...]
    rows: Any


def read_arff(path: Path, encoding: str) -> Arff:
    """Header and dense rows through scipy, which takes no sparse ones: those are read here."""
    header: list[tuple[int, str]] = []
    rows: list[tuple[int, str]] = []
    held = header
    for number, line in lines(path, encoding):
        text = line.strip()
        if text and text[0] != "%":
            held.append((number, text))
            held = rows if text.lower().startswith("@data") else held
    if held is header:
        raise broken("not ARFF: no line with @data", "give a file in ARFF", path=path)
    if not rows:
        raise broken("an empty file: no rows after @data", "add some", path=path)
    begins = "\n".join(text for _, text in header) + "\n"
    attributes = _header(path, header)
    kinds = {text[0] == "{" for _, text in rows}
    if len(kinds) > 1:
        what = "sparse rows and dense ones in one file"
        raise broken(what, "give rows of one kind", path=path)
    if kinds == {True}:
        return Arff(attributes, _sparse(path, rows, attributes))
    return Arff(attributes, _dense(path, begins, rows, attributes))


def _scipy(text: str) -> tuple[Any, str]:
    """What scipy makes of a file, or why it makes nothing of it."""
    try:
        return import_module("scipy.io.arff").loadarff(io.StringIO(text)), ""
    except IndexError:
        return None, "fewer values than attributes"
    except (ValueError, NotImplementedError, StopIteration, OSError) as error:
        return None, str(error).removesuffix(", sorry") or "malformed"


def _header(path: Path, header: list[tuple[int, str]]) -> tuple[Attribute, ...]:
    found, told = _scipy("\n".join(text for _, text in header))
    if told:
        alone = ((n, _scipy(f"@relation r\n{text}\n@data\n")[1]) for n, text in header[1:-1])
        line, told = next(((n, own) for n, own in alone if own), (header[0][0], told))
        remedy = "expected @relation, then @attribute NAME numeric or {values}, then @data"
        raise broken(told, remedy, path=path, line=line)
    meta = found[1]
    return tuple(
        Attribute(_unescaped(name), meta[name][1] if kind == "nominal" else None, kind != "date")
        for name, kind in zip(meta.names(), meta.types(), strict=True)
    )


def _dense(
    path: Path, begins: str, rows: list[tuple[int, str]], attributes: Sequence[Attribute]
) -> Floats:
    # Scipy takes from the first row which quotes there are: those with some come first.
    rows = sorted(rows, key=lambda row: "'" not in row[1] and '"' not in row[1])
    texts = [text for _, text in rows]
    read, told = _scipy(begins + "\n".join(texts))
    if told:
        number, text = rows[
            bisect_left(
                range(1, len(rows)),
                True,
                key=lambda n: _scipy(begins + "\n".join(texts[:n]))[1] != "",
            )
        ]
        remedy = "give a number, or a value of the header's list, for each attribute"
        raise broken(f"{told} in {text[:40]!r}", remedy, path=path, line=number)
    found = read[0]
    result = np.zeros((len(found), len(attributes)), np.float32)
    for c, each in enumerate(attributes):
        column = found[found.dtype.names[c]]
        if each.values is not None:
            places = {value.encode(): float(i) for i, value in enumerate(each.values)}
            result[:, c] = [places.get(value, np.nan) for value in column.tolist()]
        elif each.used:
            result[:, c] = column
        missing = np.flatnonzero(~np.isfinite(result[:, c]))
        if len(missing):
            raise each.broken("?", path, rows[missing[0]][0])
    return result[np.argsort([number for number, _ in rows])]


def _sparse(path: Path, rows: list[tuple[int, str]], attributes: Sequence[Attribute]) -> Any:
    """Rows ``{0 1.5, 7 red}``; entries that are left out are 0, or the first value."""
    indices, values, offsets = list[int](), list[float](), [0]
    for number, text in rows:
        place, own = 1, dict[int, float]()
        while text[place:].strip() != "}":
            entry = _ENTRY.match(text, place)
            if entry is None or int(entry[1]) >= len(attributes) or int(entry[1]) in own:
                what = (
                    f"malformed entry {text[place : place + 20]!r} of {len(attributes)} attributes"
                )
                remedy = "expected {index value, index value, …}, each index from 0 once"
                raise broken(what, remedy, path=path, line=number)
            c, value, place = int(entry[1]), _unquoted(entry[2]), entry.end()
            own[c] = attributes[c].number(value) if attributes[c].used else 0.0
            if not math.isfinite(own[c]):
                raise attributes[c].broken(value, path, number)
        indices += own.keys()
        values += own.values()
        offsets.append(len(indices))
    made = import_module("scipy.sparse").csr_array(
        (np.array(values, np.float32), indices, offsets), (len(rows), len(attributes))
    )
    made.sort_indices()
    return made


def _unquoted(text: str) -> str:
    return _unescaped(text[1:-1] if text[0] in "'\"" else text)


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def arff_data(
    path: Path, *, encoding: str, limit: int | None, label: str | None, task: str | None
) -> LabelData:
    """A file or a folder with parts.

    ``label`` is the XML with the names of labels, or an attribute whose values are the classes.
    """
    files = files_by_part(path, ARFF)
    read = {part: read_arff(file, encoding) for part, file in files.items()}
    attributes, first, where = read["train"].attributes, files["train"], str(path)
    for part, found in read.items():
        if found.attributes != attributes:
            what = "its attributes are not those of the training file"
            raise broken(what, f"compare it with {first.name}", path=files[part])
    own = None if label and label.lower().endswith(".xml") else _class_of(attributes, label, first)
    if own is None:
        xml = Path(label) if label else _xml_beside(first)
        labels = _label_columns(attributes, label_names(xml), first, xml)
        names, reason = [attributes[c].name for c in labels], f"labels by name in {xml.name}"
    else:
        labels, names = [own], list(attributes[own].values or ())
        reason = f"one label per row in the attribute {attributes[own].name!r}"
    rest = [c for c in range(len(attributes)) if c not in labels]
    left_out = [c for c in rest if not _is_feature(attributes[c])]
    features = [c for c in rest if c not in left_out]
    parts = {
        part: _arff_part(found, labels, features, own, files[part]) for part, found in read.items()
    }
    if task == "classification" or own is not None:
        task = _task_of([p.labels for p in parts.values()], task, "of the file", where)[0]
    description = {
        "source": where, "format": "ARFF", "task_reason": reason, "limit": limit,
        "left_out": [attributes[c].name for c in left_out],
    }  # fmt: skip
    columns = [name for c in features for name in _feature_names(attributes[c])]
    return assemble_rows(
        path.name, three_parts(parts, limit, where), columns, names, description,
        task=task or "multilabel", where=where,
    )  # fmt: skip


def _is_feature(each: Attribute) -> bool:
    return each.used and len(each.values or ()) <= _MOST_VALUES


def _feature_names(each: Attribute) -> list[str]:
    table = each.table
    one = table is None or table.shape[1] == 1
    return [each.name] if one else [f"{each.name}={value}" for value in each.values or ()]


def _class_of(attributes: Sequence[Attribute], label: str | None, arff: Path) -> int | None:
    """The attribute with the classes: the one asked for, or one called so where no XML is there."""
    place = {each.name: c for c, each in enumerate(attributes)}
    if label is None:
        called = [c for name, c in place.items() if name.lower() in ("class", "label", "target")]
        beside = any(arff.parent.glob("*.xml"))
        return (
            called[0] if len(called) == 1 and not beside and attributes[called[0]].values else None
        )
    if label not in place:
        some = ", ".join(map(repr, list(place)[:8])) + (", …" if len(place) > 8 else "")
        what = f"no attribute {label!r}; there are {some}"
        raise broken(what, "give another label, or the XML file of the labels", path=arff)
    if attributes[place[label]].values is None:
        what = f"expected a list of values for the attribute {label!r}, got numbers"
        raise broken(what, "give another label", path=arff)
    return place[label]


def _xml_beside(arff: Path) -> Path:
    """Of the same name, without the word for the part; or the only one there."""
    beside = sorted(arff.parent.glob("*.xml"))
    words = [w for w in plain_stem(arff).split("-") if part_named(w) is None]
    for stem in (plain_stem(arff), "-".join(words), *words[:1]):
        for xml in beside:
            if xml.stem.lower() == stem:
                return xml
    if len(beside) == 1:
        return beside[0]
    found = "none" if not beside else f"{len(beside)}"
    what = f"expected an XML file with the names of the labels beside it, got {found}"
    name = "-".join(words)
    remedy = f"name it {name}.xml, or give label='PATH', or label='NAME' of the class attribute"
    raise broken(what, remedy, path=arff)


def label_names(xml: Path) -> list[str]:
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
    attributes: Sequence[Attribute], names: list[str], arff: Path, xml: Path
) -> list[int]:
    place = {each.name: c for c, each in enumerate(attributes)}
    missing = [name for name in names if name not in place]
    if missing:
        some = ", ".join(map(repr, missing[:3])) + (", …" if len(missing) > 3 else "")
        what = f"{len(missing)} of its {len(names)} labels are no attributes of {arff.name}: {some}"
        raise broken(what, "give the XML file of this set", path=xml)
    labels = sorted({place[name] for name in names})
    for each in (attributes[c] for c in labels):
        if each.table is not None and each.table.shape[1] > 1:
            what = f"the label {each.name!r} has the values {', '.join((each.values or ())[:4])}"
            raise broken(what, "a label is 0 or 1", path=arff)
    return labels


def _arff_part(
    found: Arff, labels: list[int], features: list[int], own: int | None, path: Path
) -> LabelPart:
    """Features, and labels that are 1; or the place of the value of the attribute ``own``."""
    rows, tables = found.rows, {c: found.attributes[c].table for c in (*labels, *features)}
    # What a sparse row leaves out is the first value: 0, unless a list says otherwise.
    plain = all(t is None or (t.shape[1] == 1 and not t[0, 0]) for t in tables.values())
    if not isinstance(rows, np.ndarray) and (not plain or own is not None):
        rows = rows.toarray()
    if isinstance(rows, np.ndarray):
        codes = rows.astype(np.int64)
        columns = {c: rows[:, [c]] if t is None else t[codes[:, c]] for c, t in tables.items()}
        made: Any = np.concatenate([rows[:, :0], *(columns[c] for c in features)], 1)
        if own is not None:
            return LabelPart(made, Lists(codes[:, own], np.arange(len(rows) + 1)))
        sparse = import_module("scipy.sparse").csr_array
        marked = _compressed(sparse(np.concatenate([columns[c] for c in labels], 1)))
    else:
        made, marked = _compressed(rows[:, features]), _compressed(rows[:, labels])
    if (marked.values != 1).any():
        place = int((marked.values != 1).argmax())
        name = found.attributes[labels[marked.indices[place]]].name
        what = f"the label {name!r} is {marked.values[place]:g} in a row"
        raise broken(what, "a label is 0 or 1", path=path)
    return LabelPart(made, Lists(marked.indices, marked.offsets))


def _compressed(rows: Any) -> SparseRows:
    rows.eliminate_zeros()
    indices, offsets = (np.asarray(each, np.int64) for each in (rows.indices, rows.indptr))
    return SparseRows(indices, offsets, np.asarray(rows.data, np.float32), rows.shape[1])


def states_data(path: Path, *, limit: int | None, task: str | None) -> LabelData | PairData:
    """Hidden states that a model of yours has made: ``hidden`` with ``target``, which heads take.

    ``target`` is ``(n,)``, or ``(n, p)`` padded with negative numbers for several labels; an
    optional ``n_classes`` counts classes that never come too. ``query`` and ``key`` are pairs.
    """
    files = files_by_part(path, STATES)
    read = {part: _read_arrays(file) for part, file in files.items()}
    described = {"source": str(path), "format": plain_suffix(files["train"])[1:], "limit": limit}
    if {"query", "key"} <= read["train"].keys() and task in (None, "pairs"):
        pairs = {part: _pair_part(held, files[part]) for part, held in read.items()}
        held_out = three_parts(pairs, limit, str(path))
        described["task_reason"] = "arrays 'query' and 'key'" if task is None else "as asked"
        return assemble_pairs(path.name, held_out, described, shared=False, where=str(path))
    parts = {part: _state_part(held, files[part]) for part, held in read.items()}
    widths = {part: each.features.shape[1] for part, each in parts.items()}
    if len({*widths.values()}) > 1:
        what = f"hidden: expected one size in all parts, got {widths}"
        raise broken(what, "use states of the same model", path=path)
    ids = np.unique(np.concatenate([each.labels.indices for each in parts.values()]))
    if "n_classes" in read["train"]:
        n = int(read["train"]["n_classes"])
        if len(ids) and ids[-1] >= n:
            what = f"target: expected classes below n_classes = {n:,}, got {ids[-1]:,}"
            raise broken(what, "correct one of them", path=path)
        ids = np.arange(n)
    parts = {
        part: each._replace(
            labels=each.labels._replace(indices=np.searchsorted(ids, each.labels.indices))
        )
        for part, each in parts.items()
    }
    lists = [each.labels for each in parts.values()]
    task, reason = _task_of(lists, task, "in 'target'", str(path))
    described |= {"task_reason": reason, "hidden_states": True}
    names = [str(i) for i in range(widths["train"])]
    three = three_parts(parts, limit, str(path))
    return assemble_rows(
        path.name, three, names, [str(i) for i in ids], described, task=task, hidden=True,
        where=str(path),
    )  # fmt: skip


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        if plain_suffix(path) == ".npz":
            with np.load(path, allow_pickle=False) as held:
                return {name: held[name] for name in held.files}
        # Through torch: numpy has no bfloat16.
        tensors = import_module("safetensors.torch").load_file(str(path))
        made = {
            n: each.float() if each.is_floating_point() else each for n, each in tensors.items()
        }
        return {name: each.numpy() for name, each in made.items()}
    except ImportError:
        what = "needs safetensors, which is not installed"
        raise broken(what, 'pip install "lastlayer[lab]"', path=path) from None
    except Exception as error:  # noqa: BLE001 - zip, numpy and safetensors have kinds of their own
        what = f"not a file of the kind {plain_suffix(path)} ({str(error).splitlines()[0]})"
        raise broken(what, "save arrays hidden and target in one", path=path) from None


def _array(held: dict[str, NDArray[Any]], name: str, path: Path) -> NDArray[Any]:
    if name not in held:
        there = ", ".join(f"{n!r} {e.shape}" for n, e in held.items()) or "none"
        what = f"no array {name!r}; there are {there}"
        raise broken(what, "give hidden (n, d) and target (n,), or query and key", path=path)
    return held[name]


def _matrix(held: dict[str, NDArray[Any]], name: str, path: Path) -> Floats:
    found = _array(held, name, path)
    if found.ndim != 2 or found.dtype.kind not in "fiu":
        what = f"{name}: expected numbers of shape (n, d), got {found.dtype} {found.shape}"
        raise broken(what, "flatten batch and length into rows", path=path)
    made = np.ascontiguousarray(found, np.float32)
    if not np.isfinite(made).all():
        row = int(np.flatnonzero(~np.isfinite(made).all(1))[0])
        raise broken(f"{name}: row {row} is not finite", "leave it out", path=path)
    return made


def _state_part(held: dict[str, NDArray[Any]], path: Path) -> LabelPart:
    hidden, target = _matrix(held, "hidden", path), _array(held, "target", path)
    if target.dtype.kind not in "iu" or target.ndim not in (1, 2):
        what = (
            f"target: expected integers of shape (n,) or (n, p), got {target.dtype} {target.shape}"
        )
        raise broken(what, "give ids of classes", path=path)
    if len(target) != len(hidden):
        what = f"target: expected {len(hidden):,} rows as hidden has, got {len(target):,}"
        raise broken(what, "give one for each hidden state", path=path)
    table = np.sort(target.reshape(len(target), -1).astype(np.int64), 1)
    # Negative numbers are padding, and a label that comes twice in a row counts once.
    there = (table >= 0) & (np.diff(table, prepend=-1) != 0)
    if target.ndim == 1:
        kept = there[:, 0]
        hidden, table, there = hidden[kept], table[kept], there[kept]
    offsets = np.concatenate([[0], np.cumsum(there.sum(1))])
    return LabelPart(hidden, Lists(table[there], offsets))


def _pair_part(held: dict[str, NDArray[Any]], path: Path) -> PairPart:
    query, key = _matrix(held, "query", path), _matrix(held, "key", path)
    if len(query) != len(key):
        what = f"key: expected {len(query):,} rows as query has, got {len(key):,}"
        raise broken(what, "key i belongs to query i", path=path)
    return PairPart(query, key, np.arange(len(query)))
