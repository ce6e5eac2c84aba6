"""ARFF, dense and sparse, as columns of numbers."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data._arff_header import Attribute, attribute, split_values, unquoted
from lastlayer.lab.data._files import lines
from lastlayer.lab.data.errors import DataError, broken
from lastlayer.lab.data.label_data import Floats, SparseRows

_BLOCK = 2**10
# Rows with the numbers of their lines.
Block = list[tuple[int, str]]


class Column(NamedTuple):
    """An attribute, and the number for each of its values where they are a list."""

    attribute: Attribute
    codes: dict[str, float] | None

    def takes(self, value: str) -> bool:
        """Whether it is a value of this column."""
        if self.codes is not None:
            return value in self.codes
        try:
            return math.isfinite(float(value))
        except ValueError:
            return False


class Arff(NamedTuple):
    """Numbers of all columns: themselves, or the place of the value in its list."""

    attributes: tuple[Attribute, ...]
    rows: Floats | SparseRows


def read_arff(path: Path, encoding: str) -> Arff:
    """Read all of it; a column that is not ``used`` is left as zeros."""
    numbered = lines(path, encoding)
    attributes = _header(path, numbered)
    columns = [Column(each, _codes(each)) for each in attributes]
    dense: list[Floats] = []
    sparse: list[SparseRows] = []
    for block in _blocks(numbered):
        kinds = {text[0] == "{" for _, text in block}
        if len(kinds) > 1 or (sparse if kinds == {False} else dense):
            what = "sparse rows and dense ones in one file"
            raise broken(what, "give rows of one kind", path=path, line=block[0][0])
        if kinds == {True}:
            sparse.append(_sparse(path, block, columns))
        else:
            dense.append(_dense(path, block, columns))
    if not dense and not sparse:
        raise broken("an empty file: no rows after @data", "add some", path=path)
    return Arff(attributes, np.concatenate(dense) if dense else _joined(sparse))


def _blocks(numbered: Iterator[tuple[int, str]]) -> Iterator[Block]:
    block: Block = []
    for number, line in numbered:
        text = line.strip()
        if text and text[0] != "%":
            block.append((number, text))
        if len(block) == _BLOCK:
            yield block
            block = []
    if block:
        yield block


def _joined(parts: Sequence[SparseRows]) -> SparseRows:
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return SparseRows(
        np.concatenate([part.indices for part in parts]),
        np.concatenate([[0], np.cumsum(lengths)]),
        np.concatenate([part.values for part in parts]),
        parts[0].width,
    )


def _header(path: Path, numbered: Iterator[tuple[int, str]]) -> tuple[Attribute, ...]:
    attributes: list[Attribute] = []
    for number, line in numbered:
        text = line.strip()
        word = text.split(maxsplit=1)[0].lower() if text else "%"
        if word == "@data":
            if not attributes:
                what = "no @attribute before @data"
                raise broken(what, "add a header", path=path, line=number)
            return tuple(attributes)
        if word == "@attribute":
            try:
                attributes.append(attribute(text))
            except DataError as error:
                raise DataError(f"{path}:{number}: {error}") from None
        elif word != "@relation" and not word.startswith("%"):
            what = f"expected @relation, @attribute or @data, got {text[:40]!r}"
            raise broken(what, "give a file in ARFF", path=path, line=number)
    raise broken("not ARFF: no line with @data", "give a file in ARFF", path=path)


def _codes(each: Attribute) -> dict[str, float] | None:
    """The number for each value; None where values are numbers themselves."""
    if each.values is None:
        return None
    return {value: float(i) for i, value in enumerate(each.values)}


def _dense(path: Path, block: Block, columns: Sequence[Column]) -> Floats:
    """A block of rows ``1.5,red,0``."""
    cells = [split_values(text) for _, text in block]
    for (number, _), row in zip(block, cells, strict=True):
        if len(row) != len(columns):
            what = f"{len(row)} values for {len(columns)} attributes"
            raise broken(what, "give one for each", path=path, line=number)
    result = np.zeros((len(block), len(columns)), np.float32)
    numbers = [number for number, _ in block]
    for c, (column, values) in enumerate(zip(columns, zip(*cells, strict=True), strict=True)):
        if column.attribute.used:
            result[:, c] = _numbers(path, column, values, numbers)
    return result


def _sparse(path: Path, block: Block, columns: Sequence[Column]) -> SparseRows:
    """A block of rows ``{0 1.5, 7 red}``; entries that are left out are 0, or the first value."""
    # For each column the entries in it: which one, its text, and its line.
    met: dict[int, tuple[list[int], list[str], list[int]]] = {}
    offsets, indices = [0], list[int]()
    for number, text in block:
        row = sorted(_pairs(path, number, text, len(columns)))
        for c, value in row:
            places, values, numbers = met.setdefault(c, ([], [], []))
            places.append(len(indices))
            values.append(value)
            numbers.append(number)
            indices.append(c)
        offsets.append(len(indices))
    result = np.zeros(len(indices), np.float32)
    for c, (places, values, numbers) in met.items():
        if columns[c].attribute.used:
            result[places] = _numbers(path, columns[c], values, numbers)
    ids = np.array(indices, np.int64)
    return SparseRows(ids, np.array(offsets, np.int64), result, len(columns))


def _pairs(path: Path, number: int, text: str, n: int) -> list[tuple[int, str]]:
    remedy = "expected {index value, index value, …}"
    if not text.endswith("}"):
        raise broken("a sparse row without its }", remedy, path=path, line=number)
    inside = text[1:-1].strip()
    pairs: dict[int, str] = {}
    for pair in split_values(inside, keep_quotes=True) if inside else []:
        index, _, value = pair.partition(" ")
        if not index.isdecimal() or not value.strip():
            raise broken(f"malformed entry {pair!r}", remedy, path=path, line=number)
        c = int(index)
        if c >= n or c in pairs:
            what = f"index {c} {'comes twice' if c in pairs else f'of {n} attributes'}"
            raise broken(what, "indices count from 0", path=path, line=number)
        pairs[c] = unquoted(value)
    return list(pairs.items())


def _numbers(
    path: Path, column: Column, values: Sequence[str], numbers: Sequence[int]
) -> NDArray[np.float64]:
    codes = column.codes
    try:
        if codes is not None:
            return np.array([codes[value] for value in values])
        found = np.array(values, np.str_).astype(np.float64)
        if np.isfinite(found).all():
            return found
    except (KeyError, ValueError):
        pass
    raise _bad_value(path, column, values, numbers)


def _bad_value(
    path: Path, column: Column, values: Sequence[str], numbers: Sequence[int]
) -> DataError:
    """For the first value that is not one of this column's."""
    place = next(i for i, value in enumerate(values) if not column.takes(value))
    name, value = column.attribute.name, values[place]
    if value == "?":
        what, remedy = f"a missing value (?) of {name!r}", "fill it in or leave out the row"
    elif column.codes is None:
        what, remedy = f"expected a number for {name!r}, got {value!r}", "correct it"
    else:
        some = ", ".join(list(column.codes)[:8])
        what, remedy = f"{value!r} is no value of {name!r}", f"its header has {some}"
    return broken(what, remedy, path=path, line=numbers[place])
