"""Words with their vectors: neighbours, analogies, and files that other tools read."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._checks import check_int, check_tensor

# What a header or a word of the binary format can be at most; longer means another kind of file.
_MOST_NAME = 1 << 16


class Vectors:
    """Words and their vectors, as :func:`lastlayer.vectors.train` returns them.

    Args:
        words: one unique name per row.
        input: ``(n_words, dim)``: the vectors that are used, one per word.
        output: what the training compared them with: one row per word, or per node of a tree. None
            where it is not known, as after :meth:`load`.

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
            raise ValueError(f"input: expected floating rows, (n_words, dim), got {got}")
        if output is not None:
            check_tensor("output", output)
            if output.dim() != 2 or output.shape[1] != input.shape[1]:
                raise ValueError(
                    f"output: expected shape (n_rows, {input.shape[1]}), got {tuple(output.shape)}"
                )
        self.words, self.input, self.output = check_words(words), input, output
        if len(self.words) != len(input):
            raise ValueError(
                f"words: expected one word for each of {len(input)} rows, got {len(self.words)}"
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
                f"word: expected one of the {len(self)} words, got {word!r}; `word in vectors` asks"
            ) from None

    @cached_property
    def unit(self) -> Tensor:
        """The input vectors divided by their lengths, ``(n_words, dim)``; made at first use."""
        return torch.nn.functional.normalize(self.input, dim=1)

    def most_similar(self, word: str | Tensor, k: int = 10) -> list[tuple[str, float]]:
        """The ``k`` other words with the highest cosine similarity, and their similarities.

        Args:
            word: a word, or any vector of size ``dim``.
            k: how many; fewer where there are not as many words.
        """
        if isinstance(word, Tensor):
            if word.shape != (self.dim,):
                raise ValueError(f"word: expected shape ({self.dim},), got {tuple(word.shape)}")
            query = torch.nn.functional.normalize(word.to(self.input), dim=0)
            return self._nearest(query, (), k)
        row = self.id_of(word)
        return self._nearest(self.unit[row], (row,), k)

    def analogy(self, a: str, b: str, c: str, k: int = 1) -> list[tuple[str, float]]:
        """Words that are to ``c`` what ``b`` is to ``a``: nearest to b − a + c of unit length.

        Args:
            a: as in *Athens* is to
            b: *Greece* as
            c: *Oslo* is to the words returned.
            k: how many.
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
        """Write words and input vectors in word2vec's text format, or in its binary one.

        Both are read by gensim, spaCy, fastText's tools and others. Text keeps every bit; binary
        is float32, whatever the dtype. ``output`` is in neither: ``torch.save`` keeps it.

        Args:
            path: a file, which is replaced.
            binary: a quarter of the size, and read many times faster.
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(f"path: expected a file in an existing folder, got {path}")
        for word in self.words:
            if not word or word.split() != [word]:
                raise ValueError(
                    f"words: expected words without whitespace, which ends a word in these files, "
                    f"got {word!r}"
                )
        rows = self.input.detach().cpu()
        if not binary:
            # So many digits are enough to give the same float again.
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
        """Vectors from a file in word2vec's text or binary format, as float32.

        Args:
            path: what :meth:`save`, gensim or word2vec wrote.
            binary: which of the two it is.
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
        """``gensim.models.KeyedVectors`` with a copy of the input vectors. Needs gensim."""
        try:
            from gensim.models import KeyedVectors
        except ImportError as error:
            raise ImportError(
                "to_gensim needs the package gensim; install it with pip install gensim"
            ) from error
        made = KeyedVectors(self.dim)
        made.add_vectors(list(self.words), self.input.detach().cpu().float().numpy())
        return made

    @classmethod
    def from_gensim(cls, keyed_vectors: Any) -> Self:
        """From ``gensim.models.KeyedVectors``, such as ``model.wv``, by copy."""
        words = getattr(keyed_vectors, "index_to_key", None)
        rows = getattr(keyed_vectors, "vectors", None)
        if words is None or not isinstance(rows, np.ndarray):
            raise TypeError(
                "keyed_vectors: expected gensim.models.KeyedVectors, got "
                f"{type(keyed_vectors).__name__}; of a Word2Vec model give model.wv"
            )
        return cls(words, torch.from_numpy(rows.copy()))


def check_words(words: Any) -> tuple[str, ...]:
    """Unique strings."""
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
            f"path: expected a first line with the numbers of words and dimensions, got {path}"
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
        # Without the line break at its end a number may have lost digits.
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
            raise ValueError(f"path: expected words in UTF-8, got others in {path}") from None
        at = space + 1 + size
        rows[i] = np.frombuffer(rest, "<f4", dim, space + 1)
    if rest[at:].strip():
        raise ValueError(f"path: expected {n} words, got more in {path}")
    return words, rows
