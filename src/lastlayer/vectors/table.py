"""Word vectors: nearest neighbours, analogies, and the file formats of word2vec."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._checks import check_int, check_tensor

# Maximum bytes of a header or of a word in a binary file; more means another file format.
_MOST_NAME = 1 << 16


class Vectors:
    """Words and their vectors, as :func:`lastlayer.vectors.train` returns them.

    Args:
        words: unique words, one per row.
        input: the word vectors, ``(n_words, dim)``.
        output: the output vectors of the trained model: one row per word, or per node of a tree.
            None if unknown, as after :meth:`load`.

    Example:
        >>> import torch
        >>> from lastlayer import vectors
        >>> rows = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, -1.0]])
        >>> found = vectors.Vectors(["cat", "dog", "sky"], rows)
        >>> [(word, round(score, 2)) for word, score in found.most_similar("cat", k=2)]
        [('dog', 0.8), ('sky', 0.0)]
    """

    def __init__(self, words: Sequence[str], input: Tensor, output: Tensor | None = None) -> None:  # noqa: A002
        check_tensor("input", input)
        if input.dim() != 2 or not input.is_floating_point():
            got = f"{tuple(input.shape)} of {input.dtype}"
            raise ValueError(f"input: expected a floating (n_words, dim) tensor, got {got}")
        if output is not None:
            check_tensor("output", output)
            if output.dim() != 2 or output.shape[1] != input.shape[1]:
                raise ValueError(
                    f"output: expected shape (n_rows, {input.shape[1]}), got {tuple(output.shape)}"
                )
        self.words, self.input, self.output = check_words(words), input, output
        if len(self.words) != len(input):
            raise ValueError(
                f"words: expected one word per row, {len(input)}, got {len(self.words)}"
            )
        self._ids = {word: i for i, word in enumerate(self.words)}

    @property
    def dim(self) -> int:
        """Size of a vector."""
        return self.input.shape[1]

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._ids

    def __getitem__(self, word: str) -> Tensor:
        return self.input[self.id_of(word)]

    def __repr__(self) -> str:
        return f"Vectors(n_words={len(self)}, dim={self.dim})"

    def id_of(self, word: str) -> int:
        """The row of a word."""
        try:
            return self._ids[word]
        except (KeyError, TypeError):
            raise KeyError(
                f"word: expected one of the {len(self)} words, got {word!r}; check "
                "with `word in vectors`"
            ) from None

    @cached_property
    def unit(self) -> Tensor:
        """The input vectors normalised to length 1, ``(n_words, dim)``; computed at first use."""
        return torch.nn.functional.normalize(self.input, dim=1)

    def most_similar(self, word: str | Tensor, k: int = 10) -> list[tuple[str, float]]:
        """The ``k`` other words with the highest cosine similarity, and their similarities.

        Args:
            word: a word, or any vector of size ``dim``.
            k: number of words; fewer are returned if there are not enough.
        """
        if isinstance(word, Tensor):
            if word.shape != (self.dim,):
                raise ValueError(f"word: expected shape ({self.dim},), got {tuple(word.shape)}")
            query = torch.nn.functional.normalize(word.to(self.input), dim=0)
            return self._nearest(query, (), k)
        row = self.id_of(word)
        return self._nearest(self.unit[row], (row,), k)

    def analogy(self, a: str, b: str, c: str, k: int = 1) -> list[tuple[str, float]]:
        """The words that are to ``c`` what ``b`` is to ``a``: those nearest to b − a + c.

        Vectors are normalised to length 1 first.

        Args:
            a: for example *Athens*.
            b: for example *Greece*.
            c: for example *Oslo*, for which *Norway* is expected.
            k: number of words.
        """
        rows = [self.id_of(word) for word in (a, b, c)]
        first, second, third = self.unit[rows]
        query = torch.nn.functional.normalize(second - first + third, dim=0)
        return self._nearest(query, tuple(rows), k)

    def _nearest(self, query: Tensor, without: tuple[int, ...], k: int) -> list[tuple[str, float]]:
        k = check_int("k", k)
        similarity = self.unit @ query
        similarity[list(without)] = -torch.inf
        values, rows = similarity.topk(min(k, len(self) - len(set(without))))
        found = zip(rows.tolist(), values.tolist(), strict=True)
        return [(self.words[row], value) for row, value in found]

    def save(self, path: str | Path, *, binary: bool = False) -> None:
        """Write words and input vectors in word2vec's text or binary format.

        Both can be read by gensim, spaCy, fastText's tools and others. Text is exact; binary is
        float32, whatever the dtype. ``output`` is not saved; use ``torch.save`` for it.

        Args:
            path: the file to write; an existing one is replaced.
            binary: whether to use the binary format: a quarter of the size, and faster to read.
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(f"path: expected a file in an existing folder, got {path}")
        for word in self.words:
            if not word or word.split() != [word]:
                raise ValueError(
                    f"words: expected words without whitespace, which separates words in these "
                    f"files, got {word!r}"
                )
        rows = self.input.detach().cpu()
        if not binary:
            # With this many digits reading gives the same float.
            digits = " %.17g" if rows.dtype == torch.float64 else " %.9g"
            line = digits * self.dim + "\n"
            with path.open("w", encoding="utf-8", newline="\n") as file:
                file.write(f"{len(self)} {self.dim}\n")
                for word, row in zip(self.words, rows, strict=True):
                    file.write(word + line % tuple(row.tolist()))
            return
        numbers = rows.float().numpy().astype("<f4", copy=False)
        with path.open("wb") as out:
            out.write(f"{len(self)} {self.dim}\n".encode())
            for word, number in zip(self.words, numbers, strict=True):
                out.write(word.encode() + b" " + number.tobytes() + b"\n")

    @classmethod
    def load(cls, path: str | Path, *, binary: bool = False) -> Self:
        """Load vectors from a file in word2vec's text or binary format, as float32.

        Args:
            path: a file written by :meth:`save`, gensim or word2vec.
            binary: whether the file has the binary format.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"path: expected a file of word vectors, got {path}")
        with path.open("rb") as file:
            n, dim = _header(file, path)
            words, rows = (_read_binary if binary else _read_text)(file, path, n, dim)
            if file.read().strip():
                raise ValueError(f"path: expected {n} words, got more in {path}")
        return cls(words, torch.from_numpy(rows))

    def to_gensim(self) -> Any:
        """Copy the input vectors to ``gensim.models.KeyedVectors``. Needs gensim."""
        try:
            from gensim.models import KeyedVectors
        except ImportError as error:
            raise ImportError(
                "to_gensim needs the package gensim; install it with pip install gensim"
            ) from error
        result = KeyedVectors(self.dim)
        result.add_vectors(list(self.words), self.input.detach().cpu().float().numpy())
        return result

    @classmethod
    def from_gensim(cls, keyed_vectors: Any) -> Self:
        """Copy the vectors of ``gensim.models.KeyedVectors``, such as ``model.wv``."""
        words = getattr(keyed_vectors, "index_to_key", None)
        rows = getattr(keyed_vectors, "vectors", None)
        if words is None or not isinstance(rows, np.ndarray):
            raise TypeError(
                "keyed_vectors: expected gensim.models.KeyedVectors, got "
                f"{type(keyed_vectors).__name__}; for a Word2Vec model pass model.wv"
            )
        return cls(words, torch.from_numpy(rows.copy()))


def check_words(words: Any) -> tuple[str, ...]:
    """Checks for a sequence of unique strings."""
    if isinstance(words, (str, bytes)) or not hasattr(words, "__iter__"):
        raise TypeError(f"words: expected a sequence of words, got {type(words).__name__}")
    seen: set[str] = set()
    for word in (names := tuple(words)):
        if not isinstance(word, str):
            raise TypeError(f"words: expected words of type str, got {type(word).__name__}")
        if word in seen:
            raise ValueError(f"words: expected unique words, got {word!r} twice")
        seen.add(word)
    return names


def _header(file: BinaryIO, path: Path) -> tuple[int, int]:
    parts = file.readline(_MOST_NAME).split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or int(parts[1]) < 1:
        raise ValueError(
            f"path: expected a first line with the number of words and dimensions, got {path}"
        )
    return int(parts[0]), int(parts[1])


def _truncated(path: Path, n: int, found: int) -> ValueError:
    return ValueError(f"path: expected {n} words, got {found} in {path}, which is truncated")


def _read_text(
    file: BinaryIO, path: Path, n: int, dim: int
) -> tuple[list[str], NDArray[np.float32]]:
    words, rows = [], np.empty((n, dim), np.float32)
    for i in range(n):
        line = file.readline()
        # In a truncated last line the last number may have lost digits.
        if not line.endswith(b"\n"):
            raise _truncated(path, n, i)
        word, *numbers = line.split()
        if len(numbers) != dim:
            where = f"line {i + 2} of {path}"
            raise ValueError(f"path: expected {dim} numbers, got {len(numbers)} in {where}")
        try:
            rows[i] = numbers
            words.append(word.decode())
        except ValueError as error:
            raise ValueError(
                f"path: expected text, got {error} in line {i + 2} of {path}"
            ) from None
    return words, rows


def _read_binary(
    file: BinaryIO, path: Path, n: int, dim: int
) -> tuple[list[str], NDArray[np.float32]]:
    rest, at, size = file.read(), 0, 4 * dim
    words, rows = [], np.empty((n, dim), np.float32)
    for i in range(n):
        space = rest.find(b" ", at, at + _MOST_NAME)
        if space < 0 or space + 1 + size > len(rest):
            raise _truncated(path, n, i)
        try:
            # word2vec ends each vector with a line break, gensim does not.
            words.append(rest[at:space].lstrip(b"\n").decode())
        except UnicodeDecodeError:
            raise ValueError(
                f"path: expected words in UTF-8, got invalid bytes in {path}"
            ) from None
        at = space + 1 + size
        rows[i] = np.frombuffer(rest, "<f4", dim, space + 1)
    if rest[at:].strip():
        raise ValueError(f"path: expected {n} words, got more in {path}")
    return words, rows
