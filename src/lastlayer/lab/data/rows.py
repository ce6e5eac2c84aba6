"""Rows of features with labels, and rows in pairs, in three parts; documents as bags of words."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data.files import broken
from lastlayer.lab.data.text import (
    PARTS,
    TENTH,
    FirstCome,
    IdStream,
    Reading,
    Vocabulary,
    choose,
    part_limit,
)  # fmt: skip

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
        return LabelPart(_chosen(self.features, some), self.labels.select(some))


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
        task: ``"classification"``, where each row has one label, or ``"multilabel"``.
        hidden: whether features are hidden states, which heads take as they are.
    """

    name: str
    train: LabelPart
    valid: LabelPart
    test: LabelPart
    feature_names: tuple[str, ...]
    label_names: tuple[str, ...]
    counts: Integers
    description: dict[str, Any]
    task: str = "multilabel"
    hidden: bool = False

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
        arrays = [
            array
            for part in (self.train, self.valid, self.test)
            for array in (*_arrays(part.features), *part.labels)
        ]
        return _digest((*self.feature_names, "", *self.label_names), arrays)


class PairPart(NamedTuple):
    """Some pairs: queries, the key of each, and a number that pairs share which belong together."""

    query: SparseRows | Floats
    key: SparseRows | Floats
    group: Integers

    @property
    def n_rows(self) -> int:
        """How many pairs there are."""
        return len(self.group)

    def select(self, rows: NDArray[Any]) -> "PairPart":
        """Some of the pairs, in that order."""
        some = np.asarray(rows, np.int64)
        return PairPart(_chosen(self.query, some), _chosen(self.key, some), self.group[some])


@dataclass(frozen=True, eq=False)
class PairData:
    """Pairs of rows, of which each query has to find its key.

    Attributes:
        name: what a table calls it.
        train: queries and keys, each a :class:`SparseRows` or a float32 array, and groups: pairs
            of one are no negatives of each other.
        valid: what settings are chosen on.
        test: what is reported.
        feature_names: of queries; of keys too where they are shared.
        widths: columns of queries and of keys.
        shared: whether both have the same features, so that one encoder serves both.
        description: where it comes from and how it was read, for JSON.
        task: always ``"pairs"``.
    """

    name: str
    train: PairPart
    valid: PairPart
    test: PairPart
    feature_names: tuple[str, ...]
    widths: tuple[int, int]
    shared: bool
    description: dict[str, Any]
    task: Literal["pairs"] = "pairs"

    @property
    def n_classes(self) -> int:
        """How many keys the training part has."""
        return self.train.n_rows

    @property
    def counts(self) -> Integers:
        """Each key comes once."""
        return np.ones(self.n_classes, np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same pairs in the same parts, and otherwise another one."""
        parts = (self.train, self.valid, self.test)
        return _digest((), [a for p in parts for each in p[:2] for a in _arrays(each)])


def _arrays(features: SparseRows | Floats) -> tuple[NDArray[Any], ...]:
    return features[:3] if isinstance(features, SparseRows) else (features,)


def _digest(names: Iterable[str], arrays: Iterable[NDArray[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        digest.update(name.encode("utf-8", "surrogatepass") + b"\0")
    for array in arrays:
        kind = "<f4" if array.dtype.kind == "f" else "<i8"
        digest.update(array.size.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array, kind).tobytes())
    return digest.hexdigest()


def _chosen(features: SparseRows | Floats, rows: Integers) -> SparseRows | Floats:
    return features.select(rows) if isinstance(features, SparseRows) else features[rows]


class LabelLists:
    """Grows by one list of labels a row; each label counts once in it."""

    def __init__(self, names: FirstCome) -> None:
        self._names = names
        self._indices: list[int] = []
        self._offsets = [0]

    def add(self, labels: Iterable[str]) -> None:
        """Append a row."""
        self._indices.extend(sorted({self._names[label] for label in labels}))
        self._offsets.append(len(self._indices))

    def finish(self) -> Lists:
        """All rows."""
        return Lists(np.array(self._indices, np.int64), np.array(self._offsets, np.int64))


def mixed_rows(n: int) -> Integers:
    """Rows in an order that looks random and is the same on every machine."""
    # The finaliser of splitmix64: numpy's own generators may change with its version.
    x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable").astype(np.int64)


Part = TypeVar("Part", LabelPart, PairPart)


def three_parts(parts: dict[str, Part], limit: int | None, where: str) -> dict[str, Part]:
    """Cut missing parts from the training rows, a tenth each, mixed; then keep to the limit."""
    if "train" not in parts:
        what = f"rows of {' and '.join(sorted(parts))}, and none for training"
        raise broken(what, "give a file for training too", path=where)
    train = parts["train"]
    rows, each = np.arange(train.n_rows), train.n_rows // TENTH
    result = dict(parts)
    if any(part not in parts for part in PARTS):
        rows = mixed_rows(train.n_rows)
    for part in reversed(PARTS):
        if part not in result:
            rows, taken = rows[: len(rows) - each], rows[len(rows) - each :]
            result[part] = train.select(np.sort(taken))
    result["train"] = train.select(np.sort(rows))
    for part in PARTS:
        most = part_limit(part, limit)
        if most is not None and result[part].n_rows > most:
            some = np.sort(mixed_rows(result[part].n_rows)[:most])
            result[part] = result[part].select(some)
        if not result[part].n_rows:
            total = sum(each.n_rows for each in parts.values())
            what = f"too short: the {part} part has none of {total} rows"
            remedy = "give at least 10 rows, or files of your own for all three parts"
            raise broken(what, remedy, path=where)
    return result


_FEW = ((1, "once"), (0, "never"))


def assemble_rows(
    name: str,
    parts: dict[str, LabelPart],
    feature_names: Sequence[str],
    label_names: Sequence[str],
    description: dict[str, Any],
    *,
    task: str = "multilabel",
    hidden: bool = False,
    where: str,
) -> LabelData:
    """Order the labels by falling count, and check that there is something to learn."""
    counts = np.bincount(parts["train"].labels.indices, minlength=len(label_names))
    if len(label_names) < 2:
        what = f"one class: {len(label_names)} label{'s' * (len(label_names) != 1)} in all"
        raise broken(what, f"{task} needs at least two", path=where)
    if not counts.any():
        raise broken("no row of the training part has a label", "check the labels", path=where)
    if task == "classification" and np.count_nonzero(counts) < 2:
        what = f"one class: the training part has {label_names[int(counts.argmax())]!r} alone"
        raise broken(what, "give rows of at least two classes", path=where)
    if not feature_names:
        raise broken("no features", "give rows with at least one", path=where)
    order = np.array(sorted(range(len(counts)), key=lambda i: (-counts[i], label_names[i])))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    ordered = {part: _renumbered(parts[part], place) for part in PARTS}
    notes = list(description.get("notes", ()))
    if few := [f"{n:,} {often}" for t, often in _FEW if (n := int((counts == t).sum()))]:
        found = f"of {len(counts):,} classes, the training part has {' and '.join(few)}"
        notes.append(f"{found}; all are kept")
    return LabelData(
        name=name,
        train=ordered["train"],
        valid=ordered["valid"],
        test=ordered["test"],
        feature_names=tuple(feature_names),
        label_names=tuple(label_names[i] for i in order),
        counts=counts[order].astype(np.int64),
        description={
            "name": name,
            "task": task,
            "classes": len(label_names),
            "features": len(feature_names),
            "rows": {part: ordered[part].n_rows for part in PARTS},
            **description,
            **({"notes": notes} if notes else {}),
        },
        task=task,
        hidden=hidden,
    )


def _renumbered(part: LabelPart, place: Integers) -> LabelPart:
    labels = part.labels
    row = np.repeat(np.arange(labels.n_rows), np.diff(labels.offsets))
    indices = place[labels.indices]
    return part._replace(labels=Lists(indices[np.lexsort((indices, row))], labels.offsets))


def assemble_pairs(
    name: str,
    parts: dict[str, PairPart],
    description: dict[str, Any],
    *,
    feature_names: Sequence[str] = (),
    shared: bool,
    where: str,
) -> PairData:
    """Check that there are several keys to choose from."""
    train = parts["train"]
    if len(np.unique(train.group)) < 2:
        raise broken("one class: all pairs belong together", "give pairs that differ", path=where)
    return PairData(
        name=name,
        train=train,
        valid=parts["valid"],
        test=parts["test"],
        feature_names=tuple(feature_names),
        widths=(train.query.shape[1], train.key.shape[1]),
        shared=shared,
        description={
            "name": name,
            "task": "pairs",
            "classes": train.n_rows,
            "features": list(dict.fromkeys((train.query.shape[1], train.key.shape[1]))),
            "rows": {part: parts[part].n_rows for part in PARTS},
            **description,
        },
    )


def grouped(query: Sequence[str], key: Sequence[str]) -> Integers:
    """A number for each pair: the same where the key is, or the query where more of them are."""
    numbers = [np.unique(np.asarray(each), return_inverse=True)[1] for each in (query, key)]
    return min(numbers, key=lambda each: int(each.max(initial=0))).astype(np.int64)


# Words that a bag tells apart, unless a size is given.
MOST_WORDS = 20_000


class Bags:
    """Grows by one document at a time; counts the words of each."""

    def __init__(self, words: FirstCome) -> None:
        self._words = words
        self._stream = IdStream(words)
        self._offsets = [0]

    def add(self, words: Iterable[str]) -> None:
        """Append a document."""
        self._stream.add(words)
        self._offsets.append(self._stream.length)

    def finish(self) -> SparseRows:
        """How often each word stands in each document; all documents of all bags are in by then."""
        ids = self._stream.finish()
        row = np.repeat(np.arange(len(self._offsets) - 1), np.diff(self._offsets))
        return _summed(row, ids.astype(np.int64), None, len(self._offsets) - 1, len(self._words))


def _summed(row: Integers, column: Integers, values: Any, n_rows: int, width: int) -> SparseRows:
    """Entries of the same row and column become one."""
    keys, first = np.unique(row * width + column, return_inverse=True)
    total = np.bincount(first, values, len(keys)).astype(np.float32)
    offsets = np.searchsorted(keys, np.arange(n_rows + 1) * width).astype(np.int64)
    return SparseRows(keys % width, offsets, total, width)


def weigh_bags(
    train: Sequence[SparseRows], words: FirstCome, reading: Reading
) -> tuple[Vocabulary, Callable[[SparseRows], SparseRows]]:
    """Words by their counts in the training part, and what makes features of a bag of counts.

    A feature is log(1 + count), and each row is divided by its length; what is left out counts as
    ``<unk>``.
    """
    counts = sum(np.bincount(bag.indices, bag.values, len(words)) for bag in train)
    vocabulary, table = choose(
        list(words), np.asarray(counts, np.int64), vocab_size=reading.vocab_size or MOST_WORDS,
        min_count=reading.min_count,
    )  # fmt: skip
    width = len(vocabulary)

    def weigh(bag: SparseRows) -> SparseRows:
        n_rows = bag.shape[0]
        row = np.repeat(np.arange(n_rows), np.diff(bag.offsets))
        merged = _summed(row, table[bag.indices].astype(np.int64), bag.values, n_rows, width)
        values = np.log1p(merged.values)
        row = np.repeat(np.arange(n_rows), np.diff(merged.offsets))
        length = np.sqrt(np.bincount(row, values.astype(np.float64) ** 2, n_rows))
        return merged._replace(values=(values / length[row]).astype(np.float32))

    return vocabulary, weigh


def labelled_bags(
    name: str,
    bags: dict[str, tuple[Bags, LabelLists]],
    words: FirstCome,
    label_names: Sequence[str],
    description: dict[str, Any],
    reading: Reading,
    *,
    task: str = "multilabel",
    where: str,
) -> LabelData:
    """Rows of bags of words; words are chosen by the training part."""
    parts = {part: LabelPart(bag.finish(), lists.finish()) for part, (bag, lists) in bags.items()}
    three = three_parts(parts, reading.limit, where)
    vocabulary, weigh = weigh_bags([sparse_rows(three["train"].features)], words, reading)
    made = {k: p._replace(features=weigh(sparse_rows(p.features))) for k, p in three.items()}
    description = {**description, **reading.described}
    return assemble_rows(
        name, made, vocabulary.tokens, label_names, description, task=task, where=where
    )


def sparse_rows(features: SparseRows | Floats) -> SparseRows:
    """The same, where they are sparse."""
    if not isinstance(features, SparseRows):
        raise TypeError(f"features: expected SparseRows, got {type(features).__name__}")
    return features
