"""Rows of features with labels, and pairs of rows, in three parts; documents as bags of words."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data.files import PARTS, broken, needed
from lastlayer.lab.data.text import (
    TENTH,
    FirstCome,
    IdStream,
    Reading,
    Vocabulary,
    choose,
    fingerprint,
)

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


class Lists(NamedTuple):
    """One list of ids per row; that of row i is ``indices[offsets[i] : offsets[i + 1]]``."""

    indices: Integers
    offsets: Integers

    @property
    def n_rows(self) -> int:
        return len(self.offsets) - 1

    def select(self, rows: NDArray[Any]) -> "Lists":
        entries, offsets = _entries(self.offsets, rows)
        return Lists(self.indices[entries], offsets)


class SparseRows(NamedTuple):
    """Sparse rows in CSR format; the entries of row i are at ``offsets[i] : offsets[i + 1]``."""

    indices: Integers
    offsets: Integers
    values: Floats
    width: int

    @classmethod
    def of(cls, rows: Any) -> "SparseRows":
        """Convert from a CSR array of scipy."""
        rows.eliminate_zeros()
        indices, offsets = (np.asarray(each, np.int64) for each in (rows.indices, rows.indptr))
        return cls(indices, offsets, np.asarray(rows.data, np.float32), rows.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.offsets) - 1, self.width

    def select(self, rows: NDArray[Any]) -> "SparseRows":
        entries, offsets = _entries(self.offsets, rows)
        return SparseRows(self.indices[entries], offsets, self.values[entries], self.width)

    def dense(self) -> Floats:
        result = np.zeros(self.shape, np.float32)
        row = np.repeat(np.arange(self.shape[0]), np.diff(self.offsets))
        result[row, self.indices] = self.values
        return result


Features = SparseRows | Floats


def _entries(offsets: Integers, rows: NDArray[Any]) -> tuple[Integers, Integers]:
    """Indices of the entries of the selected rows, and the offsets of the selection."""
    rows = np.asarray(rows, np.int64)
    lengths = offsets[rows + 1] - offsets[rows]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return np.arange(ends[-1]) + np.repeat(offsets[rows] - ends[:-1], lengths), ends


def _selected(features: Features, rows: NDArray[Any]) -> Features:
    return features.select(rows) if isinstance(features, SparseRows) else features[rows]


def _arrays(features: Features) -> tuple[NDArray[Any], ...]:
    return features[:3] if isinstance(features, SparseRows) else (features,)


class LabelPart(NamedTuple):
    """The features and labels of a part."""

    features: Features
    labels: Lists

    @property
    def n_rows(self) -> int:
        return self.labels.n_rows

    def select(self, rows: NDArray[Any]) -> "LabelPart":
        return LabelPart(_selected(self.features, rows), self.labels.select(rows))


class _Rows:
    """The base of data that consists of rows."""

    @property
    def sizes(self) -> dict[str, int]:
        """Rows of each part."""
        return {part: getattr(self, part).n_rows for part in PARTS}


@dataclass(frozen=True, eq=False)
class LabelData(_Rows):
    """Rows of features with labels."""

    name: str  # display name
    # Features (rows, n_features), a SparseRows or a float32 array, and labels as Lists of ascending
    # ids.
    train: LabelPart
    valid: LabelPart  # for the choice of settings
    test: LabelPart  # for reported results
    feature_names: tuple[str, ...]  # one per column
    label_names: tuple[str, ...]  # the classes, by falling count in the training part
    counts: Integers  # number of training rows with each label, int64
    description: dict[str, Any]  # source and options of reading, for JSON
    task: str = "multilabel"  # or "classification", if each row has one label
    hidden: bool = False  # whether features are hidden states, which need no backbone

    @property
    def n_classes(self) -> int:
        return len(self.label_names)

    @property
    def n_features(self) -> int:
        return len(self.feature_names)

    @property
    def vocabulary(self) -> Vocabulary:
        """The labels with their counts."""
        return Vocabulary(self.label_names, self.counts)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the rows of all parts."""
        parts = (self.train, self.valid, self.test)
        arrays = [each for part in parts for each in (*_arrays(part.features), *part.labels)]
        return fingerprint((*self.feature_names, "", *self.label_names), arrays)


class PairPart(NamedTuple):
    """Queries, the key of each, and the group of each pair; pairs of a group belong together."""

    query: Features
    key: Features
    group: Integers

    @property
    def n_rows(self) -> int:
        return len(self.group)

    def select(self, rows: NDArray[Any]) -> "PairPart":
        return PairPart(_selected(self.query, rows), _selected(self.key, rows), self.group[rows])


@dataclass(frozen=True, eq=False)
class PairData(_Rows):
    """Pairs of rows, a query and its key."""

    name: str  # display name
    # Queries and keys, each a SparseRows or a float32 array, and groups: pairs of one group are not
    # negatives of each other.
    train: PairPart
    valid: PairPart  # for the choice of settings
    test: PairPart  # for reported results
    feature_names: tuple[str, ...]  # of queries, and of keys if they are shared
    widths: tuple[int, int]  # number of features of queries and of keys
    shared: bool  # whether both have the same features, so that one encoder is enough
    description: dict[str, Any]  # source and options of reading, for JSON
    task: Literal["pairs"] = "pairs"

    @property
    def n_classes(self) -> int:
        """Number of keys of the training part."""
        return self.train.n_rows

    @property
    def counts(self) -> Integers:
        """Each key occurs once."""
        return np.ones(self.n_classes, np.int64)

    @property
    def vocabulary(self) -> Vocabulary:
        """Keys have no names."""
        return Vocabulary((), np.zeros(0, np.int64))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the pairs of all parts."""
        parts = (self.train, self.valid, self.test)
        return fingerprint((), [a for p in parts for each in p[:2] for a in _arrays(each)])


def mixed_rows(n: int) -> Integers:
    """A pseudo-random order of rows that is the same on every machine."""
    # The finaliser of splitmix64: numpy's own generators may change with its version.
    x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable").astype(np.int64)


Part = TypeVar("Part", LabelPart, PairPart)


def three_parts(parts: dict[str, Part], reading: Reading) -> dict[str, Part]:
    """Split missing parts off the training rows, a fixed random tenth each; apply the limit."""
    train, result = parts["train"], dict(parts)
    rows, each = mixed_rows(train.n_rows), train.n_rows // TENTH
    for part in ("test", "valid"):
        if part not in parts:
            rows, taken = rows[: len(rows) - each], rows[len(rows) - each :]
            result[part] = train.select(np.sort(taken))
            result["train"] = train.select(np.sort(rows))
    for part in PARTS:
        n_rows, most = result[part].n_rows, reading.most(part)
        if most is not None and n_rows > most:
            result[part] = result[part].select(np.sort(mixed_rows(n_rows)[:most]))
        if not n_rows:
            total = sum(each.n_rows for each in parts.values())
            what = f"too short: the {part} part has none of {total} rows"
            raise broken(what, "give at least 10 rows, or files of your own for all three parts")
    return result


def label_data(
    parts: dict[str, LabelPart],
    feature_names: Sequence[str],
    label_names: Sequence[str],
    described: dict[str, Any],
    reading: Reading,
    *,
    task: str,
    hidden: bool = False,
) -> LabelData:
    """Build data with labels by falling count; checks that it has classes to learn."""
    parts, n = three_parts(parts, reading), len(label_names)
    counts = np.bincount(parts["train"].labels.indices, minlength=n)
    if n < 2:
        raise broken(f"one class: {n} label{'s' * (n != 1)} in all", f"{task} needs at least two")
    if not counts.any():
        raise broken("no row of the training part has a label", "check the labels")
    if task == "classification" and np.count_nonzero(counts) < 2:
        what = f"one class: the training part has only {label_names[int(counts.argmax())]!r}"
        raise broken(what, "give rows of at least two classes")
    if task == "classification" and counts.max() == 1:
        what = f"each of the {np.count_nonzero(counts):,} classes of the training part occurs once"
        raise broken(what, "give another label: this one numbers or names the rows")
    if not feature_names:
        raise broken("no features", "give rows with at least one")
    order = np.array(sorted(range(n), key=lambda i: (-counts[i], label_names[i])))
    place, ordered = np.argsort(order), dict[str, LabelPart]()
    for part in PARTS:
        labels = parts[part].labels
        row = np.repeat(np.arange(labels.n_rows), np.diff(labels.offsets))
        ids = place[labels.indices]
        renumbered = Lists(ids[np.lexsort((ids, row))], labels.offsets)
        ordered[part] = parts[part]._replace(labels=renumbered)
    notes = list(described.get("notes", ()))
    few = {"once": int((counts == 1).sum()), "never": int((counts == 0).sum())}
    if told := [f"{rare:,} {often}" for often, rare in few.items() if rare]:
        notes.append(f"of {n:,} classes, the training part has {' and '.join(told)}; all are kept")
    description = {
        "task": task, "classes": n, "features": len(feature_names),
        "rows": {part: each.n_rows for part, each in ordered.items()},
        **described, **({"notes": notes} if notes else {}),
    }  # fmt: skip
    return LabelData(
        described["name"], **ordered, feature_names=tuple(feature_names),
        label_names=tuple(label_names[i] for i in order), counts=counts[order].astype(np.int64),
        description=description, task=task, hidden=hidden,
    )  # fmt: skip


def pair_data(
    parts: dict[str, PairPart],
    described: dict[str, Any],
    reading: Reading,
    *,
    feature_names: Sequence[str] = (),
    shared: bool,
) -> PairData:
    """Build pairs; checks that there are several keys to choose from."""
    parts = three_parts(parts, reading)
    train = parts["train"]
    if len(np.unique(train.group)) < 2:
        raise broken("one class: all pairs belong together", "give pairs that differ")
    widths = train.query.shape[1], train.key.shape[1]
    description = {
        "task": "pairs", "classes": train.n_rows, "features": list(dict.fromkeys(widths)),
        "rows": {part: parts[part].n_rows for part in PARTS}, **described,
    }  # fmt: skip
    return PairData(
        described["name"], train, parts["valid"], parts["test"], tuple(feature_names), widths,
        shared, description,
    )  # fmt: skip


def label_lists(rows: Iterable[Iterable[str]], names: FirstCome) -> Lists:
    """The labels of each row as ids; repeated labels of a row count once."""
    ids = [sorted({names[label] for label in row}) for row in rows]
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    return Lists(np.fromiter(chain.from_iterable(ids), np.int64, offsets[-1]), offsets)


# Default size of the vocabulary of bags of words.
MOST_WORDS = 20_000


def word_lists(documents: Iterable[Sequence[str]], words: FirstCome) -> SparseRows:
    """The words of each document in order, each with the value 1; :func:`weigher` sums them."""
    stream, offsets = IdStream(words), [0]
    for document in documents:
        stream.add(document)
        offsets.append(stream.length)
    ids = stream.finish().astype(np.int64)
    return SparseRows(ids, np.array(offsets), np.ones(len(ids), np.float32), len(words))


def weigher(
    train: Sequence[Features], words: FirstCome, reading: Reading
) -> tuple[Vocabulary, Callable[[Features], SparseRows]]:
    """The vocabulary of the training part, and a function from word lists to features.

    A feature is log(1 + count), and each row is divided by its norm; words outside of the
    vocabulary count as ``<unk>``.
    """
    sparse, names = needed("scipy.sparse"), list(words)
    counts = sum(np.bincount(_arrays(each)[0], minlength=len(names)) for each in train)
    vocabulary, table = choose(
        names, np.asarray(counts, np.int64), reading.vocab_size or MOST_WORDS, reading.min_count
    )

    def weigh(found: Features) -> SparseRows:
        ids, offsets, values = _arrays(found)
        shape = len(offsets) - 1, len(vocabulary)
        rows = sparse.csr_array((values.astype(np.float64), table[ids], offsets), shape)
        rows.sum_duplicates()
        rows.data = np.log1p(rows.data)
        lengths = import_module("scipy.sparse.linalg").norm(rows, axis=1)
        rows.data /= np.repeat(lengths, np.diff(rows.indptr))
        return SparseRows.of(rows)

    return vocabulary, weigh


def labelled_words(
    parts: dict[str, LabelPart],
    words: FirstCome,
    label_names: Sequence[str],
    described: dict[str, Any],
    reading: Reading,
    *,
    task: str,
) -> LabelData:
    """Build bags of words with labels; the vocabulary is that of the training part."""
    three = three_parts(parts, reading)
    vocabulary, weigh = weigher([three["train"].features], words, reading)
    made = {part: each._replace(features=weigh(each.features)) for part, each in three.items()}
    described = {**described, **reading.described}
    return label_data(made, vocabulary.tokens, label_names, described, reading, task=task)
