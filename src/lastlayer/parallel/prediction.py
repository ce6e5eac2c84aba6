"""Predictions of heads whose classes are spread: each process has the columns of its own.

Rows are those of all processes, in the same chunks everywhere. A process computes the
log-probabilities of its classes; what is sent is what was asked for: those of chosen classes, the
best k, or the draws.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lastlayer._processes import all_gathered, summed
from lastlayer._torch import without_autocast
from lastlayer.fused.prediction import drawn_by, top_classes
from lastlayer.fused.scores import row_chunks
from lastlayer.parallel.families import Family

# Numbers held for each row and class of this process.
_COPIES = 4.0


class Predictions:
    """Of a family of heads; each method gives the results of the rows ``mine`` among all."""

    def __init__(self, family: Family) -> None:
        self._family, self._group = family, family.group
        self._order: Tensor | None = None

    def log_probs(self, rows: Tensor, mine: slice) -> Tensor:
        """Of all classes, ``(n, n_classes)``."""
        found = [self._all_columns(logs)[some] for _, some, logs in self._in_chunks(rows, mine)]
        return torch.cat(found)

    def log_probs_of(self, rows: Tensor, chosen: Tensor, mine: slice) -> Tensor:
        """Of chosen classes ``(all rows, k)``."""
        found = []
        for part, some, logs in self._in_chunks(rows, mine):
            column = self._columns_of(chosen[part])
            values = logs.new_zeros(column.shape)
            if logs.shape[1]:
                values = torch.where(column < 0, 0.0, logs.gather(-1, column.clamp(min=0)))
            found.append(summed(values, self._group)[some])
        return torch.cat(found)

    def best(self, rows: Tensor, k: int, mine: slice) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids of the k best classes; of equal ones the lower id first."""
        found = []
        for _, some, logs in self._in_chunks(rows, mine):
            values, classes = self._merged(logs, k)
            found.append((values[some], classes[some]))
        values, classes = map(torch.cat, zip(*found, strict=True))
        return values, classes

    def draw(self, rows: Tensor, uniform: Tensor, mine: slice) -> Tensor:
        """Class ids from numbers in [0, 1), ``(all rows, n_samples)``; -1 for none."""
        drawn = [
            self._drawn(logs, uniform[part])[some]
            for part, some, logs in self._in_chunks(rows, mine)
        ]
        return torch.cat(drawn)

    def _in_chunks(self, rows: Tensor, mine: slice) -> Iterator[tuple[slice, slice, Tensor]]:
        """Some rows, which of them are mine, and log-probabilities of this process's classes."""
        head: Any = self._family.head
        most = max(shard.most for shard in self._family.shards)
        chunk_rows = getattr(head, "chunk_rows", "auto")
        with without_autocast(rows):
            for part in row_chunks(rows, most, chunk_rows, _COPIES):
                first, last = part.start, part.stop
                begin = min(max(first, mine.start), last)
                some = slice(begin - first, max(begin, min(last, mine.stop)) - first)
                yield part, some, self._family.log_probs(rows[part])

    @property
    def _by_id(self) -> Tensor:
        """This process's columns in the order of their classes."""
        classes = self._family.classes
        if self._order is None or self._order.device != classes.device:
            self._order = classes.argsort()
        return self._order

    def _columns_of(self, classes: Tensor) -> Tensor:
        """Columns of this process, negative for classes of others."""
        order = self._by_id
        if not len(order):
            return torch.full_like(classes, -1)
        ids = self._family.classes[order]
        place = torch.searchsorted(ids, classes.contiguous()).clamp(max=len(order) - 1)
        return torch.where(ids[place] == classes, order[place], -1)

    def _all_columns(self, logs: Tensor) -> Tensor:
        """Log-probabilities of all classes, in their order, from those of each process."""
        n_classes, own = self._family.head.n_classes, self._family.classes
        sizes = all_gathered(torch.tensor([len(own)], device=logs.device), self._group)
        most = int(sizes.max())
        padded = logs.new_full((len(logs), most), -torch.inf)
        padded[:, : len(own)] = logs
        ids = torch.full((most,), n_classes, device=logs.device)
        ids[: len(own)] = own
        made = logs.new_empty(len(logs), n_classes + 1)
        every, places = all_gathered(padded, self._group), all_gathered(ids, self._group)
        for some, columns in zip(every, places, strict=True):
            made[:, columns] = some
        return made[:, :n_classes]

    def _merged(self, logs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best of all processes, each of which sends its own k best."""
        order, some = self._by_id, min(k, logs.shape[1])
        values = logs.new_full((len(logs), k), -torch.inf)
        classes = torch.full(values.shape, self._family.head.n_classes, device=logs.device)
        if some:
            values[:, :some], columns = top_classes(logs[:, order], some)
            classes[:, :some] = self._family.classes[order][columns]
        values, classes = (
            all_gathered(each, self._group).transpose(0, 1).flatten(1) for each in (values, classes)
        )
        by_id = classes.argsort(-1)
        values, columns = top_classes(values.gather(-1, by_id), k)
        return values, classes.gather(-1, by_id).gather(-1, columns)

    def _drawn(self, logs: Tensor, uniform: Tensor) -> Tensor:
        """By the cumulated probabilities of processes, and of the classes in one of them."""
        none = logs.new_full(logs.shape[:1], -torch.inf)
        own = logs.logsumexp(-1) if logs.shape[1] else none
        masses = all_gathered(own.double().exp(), self._group)
        ends, rank = masses.cumsum(0), torch.distributed.get_rank(self._group)
        number, end = uniform * ends[-1].unsqueeze(-1), ends[rank].unsqueeze(-1)
        begin = end - masses[rank].unsqueeze(-1)
        here = (number >= begin) & (number < end)
        if rank == len(masses) - 1:
            # What rounding has left beyond the last one.
            here |= number >= end
        drawn = torch.full(uniform.shape, -1, device=uniform.device)
        if logs.shape[1]:
            inside = ((number - begin) / masses[rank].unsqueeze(-1)).clamp(0.0, 1.0 - 2**-53)
            column = drawn_by(logs - own.unsqueeze(-1), torch.where(here, inside, 0.0))
            ids = self._family.classes[column.clamp(min=0)]
            drawn = torch.where(here & (column >= 0), ids, -1)
        return summed(drawn + 1, self._group) - 1
