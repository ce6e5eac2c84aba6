"""Tokens become numbers as they are read: in memory first, in a file where they are many."""

import tempfile
from array import array
from collections.abc import Iterable
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data.text_data import Ids

# 256 MB of ids stay in memory; more go to a file that is mapped.
MEMORY_TOKENS = 2**26
# So many are renumbered at a time.
_CHUNK = 2**22


class FirstCome(dict[str, int]):
    """Numbers tokens in the order in which they come first."""

    def __missing__(self, token: str) -> int:
        number = self[token] = len(self)
        return number


class IdStream:
    """Grows by blocks of tokens; what memory does not hold goes to a file without a name."""

    def __init__(self, numbers: FirstCome) -> None:
        self._number = numbers.__getitem__
        self._ids = array("i")
        self._file: IO[bytes] | None = None
        self.length = 0

    def add(self, tokens: Iterable[str]) -> None:
        """Append a block."""
        before = len(self._ids)
        self._ids.extend(map(self._number, tokens))
        self.length += len(self._ids) - before
        if len(self._ids) >= MEMORY_TOKENS:
            self._spill()

    def _spill(self) -> None:
        if self._file is None:
            # The system frees its space when the last map of it is gone.
            self._file = tempfile.TemporaryFile(prefix="lastlayer-")  # noqa: SIM115
        self._ids.tofile(self._file)
        self._ids = array("i")

    def finish(self, most: int | None = None) -> Ids:
        """All ids, or the first ``most``: an array, or a memory map that can be written to."""
        length = self.length if most is None else min(most, self.length)
        if self._file is None:
            return np.frombuffer(self._ids, np.int32)[:length]
        self._spill()
        self._file.flush()
        file: Any = self._file
        with file:
            # The map has a handle of its own.
            return np.memmap(file, np.int32, "r+", shape=(self.length,))[:length]


def counted(ids: Ids, n: int) -> NDArray[np.int64]:
    """How often each number comes."""
    counts = np.zeros(n, np.int64)
    for first in range(0, len(ids), _CHUNK):
        counts += np.bincount(ids[first : first + _CHUNK], minlength=n)
    return counts


def renumber(ids: Ids, table: NDArray[np.int32]) -> Ids:
    """In place of each id, what the table has there."""
    for first in range(0, len(ids), _CHUNK):
        ids[first : first + _CHUNK] = table[ids[first : first + _CHUNK]]
    return ids
