"""Words as symbols, and the distinct n-grams among them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# The bytes of UTF-8, the marks of a word, and what a window sees after the end of a word.
BEGIN, END, AFTER = 256, 257, 258
N_SYMBOLS = 259

_Ids = npt.NDArray[np.int32]


class Grams(NamedTuple):
    """The windows of one width over some words."""

    symbols: _Ids
    """The distinct ones, ``(n_distinct, width)``."""
    windows: _Ids
    """Which of them each window is, ``(n_windows,)``, one word after the other."""


class Spelled(NamedTuple):
    """Some words. A window of each width begins at every symbol of a word."""

    starts: _Ids
    """Where the windows of each word begin, ``(n_words,)``."""
    grams: tuple[Grams, ...]
    """One a width."""


def check_spellings(name: str, spellings: Any, known: Sequence[str] = ()) -> tuple[str, ...]:
    """Words that are not empty, each of them once, none of them known."""
    if isinstance(spellings, (str, bytes)) or not hasattr(spellings, "__iter__"):
        raise TypeError(f"{name}: expected a list of strings, got {type(spellings).__name__}")
    words = tuple(spellings)
    if not words:
        raise ValueError(f"{name}: expected at least one class, got an empty list")
    place = {word: i for i, word in enumerate(known)}
    for i, word in enumerate(words):
        if not isinstance(word, str):
            raise TypeError(
                f"{name}: expected strings, got {type(word).__name__} {word!r} at position {i}"
            )
        if not word:
            raise ValueError(f"{name}: expected words of a letter or more, got '' at position {i}")
        if word in place:
            first = place[word]
            new = first - len(known)
            where = f"as class {first} already" if new < 0 else f"at position {new}"
            raise ValueError(
                f"{name}: expected each word once, got {word!r} {where} and at position {i}"
            )
        place[word] = len(known) + i
        _check_encodes(name, word, i)
    return words


def _check_encodes(name: str, word: str, position: int) -> None:
    try:
        word.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: expected text that UTF-8 can write, got {word!r} at position {position}: "
            f"{error.reason}"
        ) from error


def spell(words: Sequence[str], widths: Sequence[int], max_length: int) -> Spelled:
    """The n-grams of each width, with the marks; of a long word of its first bytes alone."""
    texts = [word.encode()[:max_length] for word in words]
    lengths = np.array([len(text) + 2 for text in texts])
    ends = lengths.cumsum()
    starts = ends - lengths
    symbols = np.full(ends[-1], -1, dtype=np.int64)
    symbols[starts], symbols[ends - 1] = BEGIN, END
    symbols[symbols < 0] = np.frombuffer(b"".join(texts), dtype=np.uint8)
    end_of_word = ends.repeat(lengths)
    grams = _grams(symbols, end_of_word, max(widths))
    return Spelled(starts.astype(np.int32), tuple(grams[width - 1] for width in widths))


def _grams(
    symbols: npt.NDArray[np.int64], end_of_word: npt.NDArray[np.int64], most: int
) -> list[Grams]:
    """Of the widths 1 to ``most``, each from the one before: a code never outgrows its integer."""
    place = np.arange(len(symbols))
    columns, found = [symbols], []
    rank = np.zeros_like(symbols)
    for width in range(1, most + 1):
        _, first, rank = np.unique(
            rank * N_SYMBOLS + columns[-1], return_index=True, return_inverse=True
        )
        distinct = np.stack([column[first] for column in columns], -1)
        found.append(Grams(distinct.astype(np.int32), rank.astype(np.int32)))
        later = np.minimum(place + width, len(symbols) - 1)
        columns.append(np.where(place + width < end_of_word, symbols[later], AFTER))
    return found


def chunk_bounds(n_words: int, chunk: int) -> list[tuple[int, int]]:
    """First and last of about equal chunks, none larger than ``chunk``."""
    n_chunks = -(-n_words // chunk)
    cuts = [n_words * i // n_chunks for i in range(n_chunks + 1)]
    return list(pairwise(cuts))
