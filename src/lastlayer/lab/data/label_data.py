"""Rows of features with any number of labels each, in three parts."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


class Lists(NamedTuple):
    """One list of ids a row: those of row i are ``indices[offsets[i] : offsets[i + 1]]``."""

    indices: Integers
    offsets: Integers

    @property
    def n_rows(self) -> int:
        """How many lists there are."""
        return len(self.offsets) - 1

    def select(self, rows: NDArray[Any]) -> "Lists":
        """The lists of some rows."""
        entries, offsets = entries_of(self.offsets, np.asarray(rows, np.int64))
        return Lists(self.indices[entries], offsets)


class SparseRows(NamedTuple):
    """Rows that are mostly zero, as CSR: numbers of row i at ``offsets[i] : offsets[i + 1]``."""

    indices: Integers
    offsets: Integers
    values: Floats
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, as of an array."""
        return len(self.offsets) - 1, self.width

    def select(self, rows: NDArray[Any]) -> "SparseRows":
        """Some of the rows, in that order."""
        entries, offsets = entries_of(self.offsets, np.asarray(rows, np.int64))
        return SparseRows(self.indices[entries], offsets, self.values[entries], self.width)

    def dense(self) -> Floats:
        """All rows as an array."""
        result = np.zeros(self.shape, np.float32)
        row = np.repeat(np.arange(self.shape[0]), np.diff(self.offsets))
        result[row, self.indices] = self.values
        return result


def entries_of(offsets: Integers, rows: Integers) -> tuple[Integers, Integers]:
    """Where the entries of some rows are, and the offsets of what is taken from there."""
    lengths = offsets[rows + 1] - offsets[rows]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    entries = np.arange(ends[-1]) + np.repeat(offsets[rows] - ends[:-1], lengths)
    return entries, ends


class LabelPart(NamedTuple):
    """Some rows: their features, and their labels."""

    features: SparseRows | Floats
    labels: Lists

    @property
    def n_rows(self) -> int:
        """How many rows there are."""
        return self.labels.n_rows

    def select(self, rows: NDArray[Any]) -> "LabelPart":
        """Some of the rows, in that order."""
        some = np.asarray(rows, np.int64)
        features = self.features
        taken = features.select(some) if isinstance(features, SparseRows) else features[some]
        return LabelPart(taken, self.labels.select(some))


@dataclass(frozen=True, eq=False)
class LabelData:
    """Rows to learn labels of.

    Attributes:
        name: what a table calls it.
        train: features ``(rows, n_features)``, a :class:`SparseRows` or a float32 array, and labels
            as :class:`Lists` of ascending ids.
        valid: what settings are chosen on.
        test: what is reported.
        feature_names: one for each column.
        label_names: the classes, by falling count in the training part.
        counts: in how many rows of the training part each label stands, int64.
        description: where it comes from and how it was read, for JSON.
        task: always ``"multilabel"``.
    """

    name: str
    train: LabelPart
    valid: LabelPart
    test: LabelPart
    feature_names: tuple[str, ...]
    label_names: tuple[str, ...]
    counts: Integers
    description: dict[str, Any]
    task: Literal["multilabel"] = "multilabel"

    @property
    def n_classes(self) -> int:
        """How many labels there are."""
        return len(self.label_names)

    @property
    def n_features(self) -> int:
        """How many columns the features have."""
        return len(self.feature_names)

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same rows in the same parts, and otherwise another one."""
        digest = hashlib.blake2b(digest_size=16)
        for name in (*self.feature_names, "", *self.label_names):
            digest.update(name.encode("utf-8", "surrogatepass") + b"\0")
        for part in (self.train, self.valid, self.test):
            features = part.features
            arrays = features[:3] if isinstance(features, SparseRows) else (features,)
            for array in (*arrays, *part.labels):
                kind = "<f4" if array.dtype.kind == "f" else "<i8"
                digest.update(array.size.to_bytes(8, "little"))
                digest.update(np.ascontiguousarray(array, kind).tobytes())
        return digest.hexdigest()
