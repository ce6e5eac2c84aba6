"""svmlight with several labels: ``3,17 1:0.5 8:2 # remark``."""

from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lastlayer.lab.data._files import lines
from lastlayer.lab.data._ids import FirstCome
from lastlayer.lab.data._layout import files_by_part
from lastlayer.lab.data._rows import LabelLists, assemble_rows, three_parts
from lastlayer.lab.data.errors import broken
from lastlayer.lab.data.label_data import LabelData, LabelPart, Lists, SparseRows

SUFFIXES = (".svm", ".svmlight", ".libsvm")
_REMEDY = "expected labels with commas between them, then index:value pairs"


def svmlight_data(path: Path, *, encoding: str, limit: int | None) -> LabelData:
    """A file, or a folder with one for each part.

    Labels may be missing in a row. A first line of three numbers, as the sets of the extreme
    classification repository have, is skipped. Indices count from 0 where a 0 comes, else from 1.
    """
    names = FirstCome()
    files = files_by_part(path, SUFFIXES)
    read = {part: _read(file, encoding, names) for part, file in files.items()}
    used = [part.features for part in read.values() if len(part.features.indices)]
    base = min((int(some.indices.min()) for some in used), default=0)
    first = min(1, base)
    width = max((int(some.indices.max()) + 1 - first for some in used), default=0)
    parts = {
        part: LabelPart(_counted_from_zero(rows.features, first, width), rows.labels)
        for part, rows in read.items()
    }
    features = [str(i + first) for i in range(width)]
    description = {"source": str(path), "format": "svmlight", "first_index": first, "limit": limit}
    three = three_parts(parts, limit, str(path))
    return assemble_rows(path.name, three, features, list(names), description, where=str(path))


class _Read(NamedTuple):
    features: SparseRows
    labels: Lists


def _read(path: Path, encoding: str, names: FirstCome) -> _Read:
    labels = LabelLists(names)
    indices, values, offsets = array("q"), array("f"), [0]
    for number, line in lines(path, encoding):
        words = line.partition("#")[0].split()
        if not words or (number == 1 and _is_header(words)):
            continue
        own = [] if ":" in words[0] else [label for label in words.pop(0).split(",") if label]
        try:
            pairs = sorted((int(i), float(v)) for i, v in (word.split(":") for word in words))
        except ValueError:
            bad = next(word for word in words if not _is_pair(word))
            raise broken(f"malformed entry {bad!r}", _REMEDY, path=path, line=number) from None
        _check_pairs(pairs, path, number)
        labels.add(own)
        indices.extend([i for i, _ in pairs])
        values.extend([v for _, v in pairs])
        offsets.append(len(indices))
    if len(offsets) == 1:
        raise broken("an empty file: no rows", _REMEDY, path=path)
    rows = SparseRows(
        np.array(indices, np.int64), np.array(offsets, np.int64), np.array(values, np.float32), 0
    )
    return _Read(rows, labels.finish())


def _is_header(words: list[str]) -> bool:
    return len(words) == 3 and all(word.isdecimal() for word in words)


def _is_pair(word: str) -> bool:
    index, colon, value = word.partition(":")
    try:
        int(index), float(value)
    except ValueError:
        return False
    return bool(colon)


def _check_pairs(pairs: list[tuple[int, float]], path: Path, number: int) -> None:
    before = -1
    for index, value in pairs:
        if index < 0 or index == before:
            what = f"index {index} {'comes twice' if index >= 0 else 'is negative'}"
            raise broken(what, _REMEDY, path=path, line=number)
        if not np.isfinite(value):
            what = f"the value of index {index} is {value}"
            raise broken(what, "leave it out or fill it in", path=path, line=number)
        before = index


def _counted_from_zero(rows: SparseRows, first: int, width: int) -> SparseRows:
    return rows._replace(indices=rows.indices - first, width=width)
