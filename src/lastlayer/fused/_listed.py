"""The few labels of each row that are listed, one by one, and sums over those of a row.

Lists come padded, or one after the other with offsets, and stay so: what is padded needs neither
gathers nor sums over segments. Both are sorted within their rows, so that duplicates stand
together; of these the first that was given counts.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer import kernels

# Numbers of hidden states that are gathered at a time.
_GATHERED = {"cuda": 1 << 24, "cpu": 1 << 20}


class Listed(ABC):
    """Entries of all rows; any shape that :meth:`of_rows` fits.

    Attributes:
        classes: int64, -1 where an entry does not count.
        values: the label of each entry, or one number for all; None where all are 1.
    """

    classes: Tensor
    values: Tensor | None

    @abstractmethod
    def scores(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The score of each entry in full precision; anything where it does not count."""

    @abstractmethod
    def of_rows(self, numbers: Tensor) -> Tensor:
        """One number a row, ``(n,)``, as entries can be multiplied with it."""

    @abstractmethod
    def row_starts(self, stride: int) -> Tensor:
        """Where the row of each entry starts if rows are so far apart."""

    def sum(self, terms: Tensor) -> Tensor:
        """One number a row: the sum of the terms of its entries that count."""
        return self._sum(torch.where(self.classes < 0, 0.0, terms))

    def logsumexp(self, terms: Tensor) -> Tensor:
        """One number a row; -inf where no entry counts."""
        return self._logsumexp(torch.where(self.classes < 0, -torch.inf, terms))

    @abstractmethod
    def _sum(self, terms: Tensor) -> Tensor: ...

    @abstractmethod
    def _logsumexp(self, terms: Tensor) -> Tensor: ...


class PaddedLists(Listed):
    """Entries ``(n, m)``."""

    def __init__(self, classes: Tensor, values: Tensor | None) -> None:
        self.classes, self.values = classes, values

    def scores(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = kernels.products.scores("auto", hidden, weight, bias, self.classes)
        return found

    def of_rows(self, numbers: Tensor) -> Tensor:
        return numbers.unsqueeze(-1)

    def row_starts(self, stride: int) -> Tensor:
        n = self.classes.shape[0]
        starts = torch.arange(0, n * stride, stride, device=self.classes.device)
        return starts.unsqueeze(-1)

    def _sum(self, terms: Tensor) -> Tensor:
        return terms.sum(-1)

    def _logsumexp(self, terms: Tensor) -> Tensor:
        return terms.logsumexp(-1)


class FlatLists(Listed):
    """Entries ``(k,)`` in the order of their rows, which start at ``starts`` ``(n + 1,)``."""

    def __init__(
        self, classes: Tensor, values: Tensor | None, rows: Tensor, starts: Tensor
    ) -> None:
        self.classes, self.values = classes, values
        self._rows, self._starts = rows, starts

    def scores(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        step = max(1, _GATHERED.get(hidden.device.type, 1 << 20) // max(1, hidden.shape[1]))
        parts = zip(self._rows.split(step), self.classes.split(step), strict=True)
        some = [
            kernels.products.scores("auto", hidden[rows], weight, bias, classes.unsqueeze(-1))
            for rows, classes in parts
        ]
        return torch.cat(some).squeeze(-1)

    def of_rows(self, numbers: Tensor) -> Tensor:
        return numbers[self._rows]

    def row_starts(self, stride: int) -> Tensor:
        return self._rows * stride

    def _sum(self, terms: Tensor) -> Tensor:
        return self._reduced(terms, "sum", 0.0)

    def _logsumexp(self, terms: Tensor) -> Tensor:
        peak = self._reduced(terms, "max", -torch.inf)
        origin = torch.where(peak.isinf(), 0.0, peak)
        total = self._reduced(torch.exp(terms - origin[self._rows]), "sum", 0.0)
        return torch.log(total) + origin

    def _reduced(self, terms: Tensor, how: str, of_none: float) -> Tensor:
        if terms.shape[0] == 0:
            return terms.new_full((self._starts.shape[0] - 1,), of_none)
        # Unlike index_add, it adds in the same order each time.
        return torch.segment_reduce(terms, how, offsets=self._starts, unsafe=True, initial=of_none)


class GivenLists(NamedTuple):
    """Lists as they were given, checked: see :func:`lastlayer.losses._positives.positive_lists`."""

    positives: Tensor
    offsets: Tensor | None
    values: Tensor | None
    ignore_index: int
    smoothing: float

    def listed(self, n: int, n_classes: int) -> Listed:
        """In order, with one sort. Ids out of range, which a GPU does not check, do not count."""
        return self._padded(n, n_classes) if self.offsets is None else self._flat(n, n_classes)

    def _padded(self, n: int, n_classes: int) -> Listed:
        shape = n, self.positives.shape[-1]
        given = self.positives.reshape(shape)
        classes, order = torch.where(self._counts(given, n_classes), given, -1).sort(stable=True)
        classes[:, 1:].masked_fill_(classes[:, 1:] == classes[:, :-1], -1)
        if self.values is None:
            return PaddedLists(classes, self._label_of_all())
        return PaddedLists(classes, self.values.reshape(shape).gather(-1, order))

    def _flat(self, n: int, n_classes: int) -> Listed:
        given, starts = self.positives, self.offsets
        if starts is None:
            raise RuntimeError("offsets: expected where rows start, got None")
        place = torch.arange(given.shape[0], device=given.device)
        rows = torch.searchsorted(starts, place, right=True) - 1
        counts = self._counts(given, n_classes) & (rows >= 0) & (rows < n)
        rows = rows.clamp(0, max(0, n - 1))
        # What does not count comes behind the last class of its row, so that `rows` stays.
        first = rows * (n_classes + 1)
        key = first + torch.where(counts, given, n_classes)
        # Half the passes of a sort.
        narrow = n * (n_classes + 1) <= torch.iinfo(torch.int32).max
        key, order = (key.int() if narrow else key).sort(stable=True)
        classes = key.long() - first
        classes[1:].masked_fill_(key[1:] == key[:-1], -1)
        classes.masked_fill_((classes < 0) | (classes >= n_classes), -1)
        values = self._label_of_all() if self.values is None else self.values[order]
        return FlatLists(classes, values, rows, starts)

    def _counts(self, given: Tensor, n_classes: int) -> Tensor:
        counts = (given >= 0) & (given < n_classes)
        if 0 <= self.ignore_index < n_classes:
            counts &= given != self.ignore_index
        return counts

    def _label_of_all(self) -> Tensor | None:
        # On the CPU wherever the rest is: torch takes it as a number.
        if not self.smoothing:
            return None
        return torch.tensor(1.0 - self.smoothing, dtype=torch.float64, device="cpu")
