"""Tokens with their ids, the most frequent first."""

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data.errors import broken

UNKNOWN = "<unk>"
"""Stands for every token that the vocabulary leaves out; always in it."""
END = "<eos>"
"""Ends each line of text, each document, each file of source."""
_SCHEMA = 1


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens by falling count in the training part; equal counts are ordered by their spelling.

    Attributes:
        tokens: all of them; the id of a token is its place here.
        counts: how often each stands in the training part, int64. The count of ``<unk>`` is that of
            all tokens it replaces there.

    Example:
        >>> words = Vocabulary.from_counts({"a": 3, "b": 1, "c": 2}, min_count=2)
        >>> words.tokens, words.counts.tolist()
        (('a', 'c', '<unk>'), [3, 2, 1])
        >>> words.encode(["c", "b"]).tolist(), words.decode([0, 2])
        ([1, 2], ['a', '<unk>'])
    """

    tokens: tuple[str, ...]
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def from_counts(
        cls, counts: dict[str, int], *, vocab_size: int | None = None, min_count: int | None = None
    ) -> "Vocabulary":
        """The ``vocab_size`` most frequent tokens, of those that come ``min_count`` times or more.

        ``<unk>`` is one of the ``vocab_size``. Without ``min_count`` a token has to come twice,
        so that ``<unk>`` is learned from what comes once; but where the text brings an ``<unk>`` of
        its own, as PTB and WikiText do, once is enough.
        """
        names = list(counts)
        numbers = np.fromiter(counts.values(), np.int64, len(counts))
        chosen = choose(names, numbers, vocab_size=vocab_size, min_count=min_count)
        return chosen[0]

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each token."""
        return {token: i for i, token in enumerate(self.tokens)}

    @property
    def unknown(self) -> int:
        """The id of ``<unk>``."""
        return self.ids[UNKNOWN]

    def encode(self, tokens: Iterable[str]) -> NDArray[np.int32]:
        """Ids of tokens; that of ``<unk>`` for one that is not in here."""
        ids, unknown = self.ids, self.unknown
        return np.fromiter((ids.get(token, unknown) for token in tokens), np.int32)

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Tokens of ids."""
        return [self.tokens[int(i)] for i in ids]

    def save(self, path: Path | str) -> None:
        """Write JSON; the file appears whole or not at all."""
        content = {"schema": _SCHEMA, "tokens": self.tokens, "counts": self.counts.tolist()}
        write_whole(
            Path(path), json.dumps(content, ensure_ascii=False).encode("utf-8", _SURROGATES)
        )

    @classmethod
    def load(cls, path: Path | str, *, unknown: bool = True) -> "Vocabulary":
        """Read what :meth:`save` wrote; names of labels have no ``<unk>`` among them."""
        remedy = "give the vocabulary.json of a run"
        try:
            content = json.loads(Path(path).read_bytes().decode("utf-8", _SURROGATES))
            tokens, counts = content["tokens"], content["counts"]
            result = cls(tuple(tokens), np.asarray(counts, np.int64))
        except FileNotFoundError:
            raise broken("no such file", remedy, path=path) from None
        except (ValueError, KeyError, TypeError) as error:
            raise broken(f"not a vocabulary ({error})", remedy, path=path) from None
        alike = len(result.tokens) == len(result.counts) == len(result.ids)
        if not alike or (unknown and UNKNOWN not in result.ids):
            also = f", and {UNKNOWN}" if unknown else ""
            what = f"expected one count for each token and no token twice{also}"
            raise broken(what, remedy, path=path)
        return result


# Source code may hold lone surrogates in its strings.
_SURROGATES = "surrogatepass"


def choose(
    names: Sequence[str],
    counts: NDArray[np.int64],
    *,
    vocab_size: int | None,
    min_count: int | None,
) -> tuple[Vocabulary, NDArray[np.int32]]:
    """A vocabulary, and the id in it of each of the names."""
    own = _place_of_unknown(names)
    if min_count is None:
        min_count = 1 if own is not None and counts[own] else 2
    allowed = counts >= min_count
    if own is not None:
        allowed[own] = False
    candidates = np.flatnonzero(allowed)
    by_spelling = sorted(candidates.tolist(), key=names.__getitem__)
    candidates = np.array(by_spelling, np.int64)
    candidates = candidates[np.argsort(-counts[candidates], kind="stable")]
    if vocab_size is not None:
        candidates = candidates[: vocab_size - 1]
    left_out = int(counts.sum() - counts[candidates].sum())
    # Behind all tokens that come as often.
    place = int(np.searchsorted(-counts[candidates], -left_out, side="right"))
    chosen = [names[i] for i in candidates.tolist()]
    vocabulary = Vocabulary(
        (*chosen[:place], UNKNOWN, *chosen[place:]), np.insert(counts[candidates], place, left_out)
    )
    table = np.full(len(names), place, np.int32)
    table[candidates] = np.arange(len(candidates)) + (np.arange(len(candidates)) >= place)
    return vocabulary, table


def _place_of_unknown(names: Sequence[str]) -> int | None:
    try:
        return names.index(UNKNOWN)
    except ValueError:
        return None


def write_whole(path: Path, content: bytes) -> None:
    """A temporary file beside it takes its place when it is complete."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_vocabulary_options(vocab_size: Any, min_count: Any) -> None:
    """Whole numbers: room for ``<unk>`` and one token, and a count of at least 1."""
    for name, value, least in (("vocab_size", vocab_size, 2), ("min_count", min_count, 1)):
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}: expected an int or None, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
