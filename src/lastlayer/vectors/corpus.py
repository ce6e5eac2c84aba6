"""Turns sentences into word ids and a vocabulary."""

from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lastlayer._checks import check_int


class Corpus(NamedTuple):
    """A text as word ids."""

    tokens: NDArray[np.int32]
    """Word ids of all sentences, concatenated; -1 ends a sentence."""
    words: tuple[str, ...]
    """The word of each id, the most frequent first."""


def encode(sentences: Iterable[Iterable[str]], *, min_count: int = 5) -> Corpus:
    """Turns sentences into word ids and a vocabulary; rare words are dropped.

    Sentences are read once, so that they may come from a generator, and take 4 bytes per word.
    ``numpy.save("text.npy", corpus.tokens)`` writes the ids to a file that
    ``numpy.load("text.npy", mmap_mode="r")`` maps into memory for :func:`lastlayer.vectors.train`.

    Args:
        sentences: an iterable of sentences, each an iterable of words.
        min_count: words that occur less often are removed from the sentences.

    Example:
        >>> from lastlayer import vectors
        >>> corpus = vectors.encode([["a", "b", "a"], ["c", "a", "b"]], min_count=2)
        >>> corpus.words, corpus.tokens.tolist()
        (('a', 'b'), [0, 1, 0, -1, 0, 1, -1])
    """
    least = check_int("min_count", min_count)
    if isinstance(sentences, (str, bytes)) or not hasattr(sentences, "__iter__"):
        raise TypeError(_expected(f"{type(sentences).__name__}"))
    ids: dict[str, int] = {}
    text = array("i")
    for number, sentence in enumerate(sentences):
        if isinstance(sentence, (str, bytes)) or not hasattr(sentence, "__iter__"):
            got = f"{type(sentence).__name__} at position {number}"
            raise TypeError(_expected(f"{got}; use sentence.split()"))
        for word in sentence:
            # Only new words are checked: whatever equals a known str is a valid word.
            known = ids.get(word)
            if known is None:
                _check_word(word, number)
                known = ids.setdefault(word, len(ids))
            text.append(known)
        text.append(-1)
    tokens = np.frombuffer(text, np.int32) if len(text) else np.empty(0, np.int32)
    counts = np.bincount(tokens[tokens >= 0], minlength=len(ids))
    order = np.argsort(-counts, kind="stable")[: int((counts >= least).sum())]
    if len(order) < 2:
        raise ValueError(
            f"sentences: expected at least 2 words that occur min_count={least} times, got "
            f"{len(order)} of {len(ids)} words; use more text or a smaller min_count"
        )
    # Rare words become -2. Ends of sentences index the last entry, and stay -1.
    renumbered = np.full(len(ids) + 1, -2, np.int32)
    renumbered[order] = np.arange(len(order), dtype=np.int32)
    renumbered[-1] = -1
    ids_with_rare = renumbered[tokens]
    names = list(ids)
    return Corpus(ids_with_rare[ids_with_rare != -2], tuple(names[i] for i in order))


def _expected(got: str) -> str:
    return f"sentences: expected an iterable of sentences, each an iterable of words, got {got}"


def _check_word(word: Any, sentence: int) -> None:
    if not isinstance(word, str):
        raise TypeError(
            f"sentences: expected words of type str, got {type(word).__name__} {word!r} in "
            f"sentence {sentence}; pass word ids as one integer array"
        )
