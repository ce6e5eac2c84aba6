"""Documents as bags of words."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lastlayer.lab.data._ids import FirstCome, IdStream
from lastlayer.lab.data._rows import assemble_rows, three_parts
from lastlayer.lab.data.label_data import Integers, LabelData, LabelPart, SparseRows
from lastlayer.lab.data.vocabulary import choose

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
        """How often each word stands in each document."""
        ids = self._stream.finish()
        row = np.repeat(np.arange(len(self._offsets) - 1), np.diff(self._offsets))
        return _summed(row, ids.astype(np.int64), None, len(self._offsets) - 1, len(self._words))


def _summed(row: Integers, column: Integers, values: Any, n_rows: int, width: int) -> SparseRows:
    """Entries of the same row and column become one."""
    keys, first = np.unique(row * width + column, return_inverse=True)
    total = np.bincount(first, values, len(keys)).astype(np.float32)
    offsets = np.searchsorted(keys, np.arange(n_rows + 1) * width).astype(np.int64)
    return SparseRows(keys % width, offsets, total, width)


def labelled_bags(
    name: str,
    parts: dict[str, LabelPart],
    words: Sequence[str],
    label_names: Sequence[str],
    description: dict[str, Any],
    *,
    vocab_size: int | None,
    min_count: int | None,
    limit: int | None,
    where: str,
) -> LabelData:
    """Choose the words by the training part; what is left out counts as ``<unk>``.

    A feature is log(1 + count), and each row is divided by its length.
    """
    three = three_parts(parts, limit, where)
    counts = _word_counts(three["train"])
    vocabulary, table = choose(
        words, counts, vocab_size=vocab_size or MOST_WORDS, min_count=min_count
    )
    bags = {
        key: part._replace(features=_weighed(part, table, len(vocabulary)))
        for key, part in three.items()
    }
    return assemble_rows(
        name,
        bags,
        vocabulary.tokens,
        label_names,
        {**description, "limit": limit, "vocab_size": vocab_size, "min_count": min_count},
        where=where,
    )


def _sparse(part: LabelPart) -> SparseRows:
    if not isinstance(part.features, SparseRows):
        raise TypeError(f"features: expected SparseRows, got {type(part.features).__name__}")
    return part.features


def _word_counts(part: LabelPart) -> Integers:
    bag = _sparse(part)
    return np.bincount(bag.indices, bag.values, bag.width).astype(np.int64)


def _weighed(part: LabelPart, table: Any, width: int) -> SparseRows:
    bag = _sparse(part)
    n_rows = bag.shape[0]
    row = np.repeat(np.arange(n_rows), np.diff(bag.offsets))
    merged = _summed(row, table[bag.indices].astype(np.int64), bag.values, n_rows, width)
    values = np.log1p(merged.values)
    row = np.repeat(np.arange(n_rows), np.diff(merged.offsets))
    length = np.sqrt(np.bincount(row, values.astype(np.float64) ** 2, n_rows))
    return merged._replace(values=(values / length[row]).astype(np.float32))
