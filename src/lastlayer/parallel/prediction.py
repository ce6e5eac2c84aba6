"""Predictions of heads whose classes are sharded over processes.

Every process has the rows of all processes and computes the log-probabilities of its own classes,
in the same chunks of rows. Only results are exchanged: the log-probabilities of chosen classes, the
k best classes, or draws.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from lastlayer._processes import Shares, all_gathered, sum_of_parts, summed, summed_part
from lastlayer._torch import without_autocast
from lastlayer.fused.prediction import drawn_by, top_classes
from lastlayer.fused.recompute import in_chunks
from lastlayer.fused.scores import row_chunks
from lastlayer.parallel.families import Family, chosen_here

# Buffers per chunk, in units of one number per row and class of this process.
_COPIES = 4.0


class Predictions:
    """Predictions of a head, given its family.

    ``rows`` are the rows of all processes, and ``of`` is the number of rows of each process. Each
    method except :meth:`log_probs_of` returns the results of this process's rows. ``of`` is None if
    all processes have the same rows: each then returns the results of all rows.
    """

    def __init__(self, family: Family) -> None:
        self._family, self._group = family, family.group
        self._order: Tensor | None = None

    def log_probs(self, rows: Tensor, of: Shares | None) -> Tensor:
        """Log-probabilities of all classes, ``(n, n_classes)``; differentiable."""
        classes = self._classes_of_all()
        found = [
            _AllColumns.apply(logs, classes, self._family, some, of is None)
            for _, some, logs in self._in_chunks(rows, of, self._family.log_probs)
        ]
        return torch.cat(found)

    def log_probs_of(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Log-probabilities of chosen classes ``(n, k)`` for all rows; differentiable.

        Backward recomputes the scores of each chunk of rows, and repeats its exchanges.
        """
        family = self._family
        with without_autocast(rows):
            found = family.log_probs_of(rows, chosen)
        if found is not None:
            return found
        tensors = family.tensors(rows.dtype)

        def of_chunk(rows: Tensor, columns: Tensor, *values: Tensor) -> Tensor:
            logs = family.log_probs(rows, dict(zip(tensors, values, strict=True)))
            return chosen_here(logs, columns)

        with without_autocast(rows):
            columns, chunks = self._columns_of(chosen), [*self._chunks(rows)]
            own = in_chunks(of_chunk, rows, [columns], [*tensors.values()], chunks)
        return sum_of_parts(own, self._group)

    def best(self, rows: Tensor, k: int, of: Shares | None) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids of the k best classes; ties go to the lower id."""
        found = []
        for _, some, (ranks, logs) in self._in_chunks(rows, of, self._family.ranks):
            values, classes = self._merged(ranks, logs, k)
            found.append((values[some], classes[some]))
        values, classes = map(torch.cat, zip(*found, strict=True))
        return values, classes

    def draw(self, rows: Tensor, uniform: Tensor, of: Shares | None) -> Tensor:
        """Class ids from uniform numbers ``(all rows, n_samples)``; -1 for fully masked rows."""
        drawn = [
            self._drawn(logs, uniform[part])[some]
            for part, some, logs in self._in_chunks(rows, of, self._family.log_probs)
        ]
        return torch.cat(drawn)

    def _chunks(self, rows: Tensor) -> Iterator[slice]:
        chunk_rows = getattr(self._family.head, "chunk_rows", "auto")
        return row_chunks(rows, self._family.scores_per_row, chunk_rows, _COPIES)

    def _in_chunks(
        self, rows: Tensor, of: Shares | None, function: Callable[..., Any]
    ) -> Iterator[tuple[slice, slice, Any]]:
        """Yields each chunk of rows, the own rows in it, and ``function(rows, tensors)``."""
        mine = slice(0, len(rows)) if of is None else of.mine
        tensors = self._family.tensors(rows.dtype)
        with without_autocast(rows):
            for part in self._chunks(rows):
                first, last = part.start, part.stop
                begin = min(max(first, mine.start), last)
                some = slice(begin - first, max(begin, min(last, mine.stop)) - first)
                yield part, some, function(rows[part], tensors)

    @property
    def _by_id(self) -> Tensor:
        """This process's columns, sorted by class id."""
        classes = self._family.classes
        if self._order is None or self._order.device != classes.device:
            self._order = classes.argsort()
        return self._order

    def _columns_of(self, classes: Tensor) -> Tensor:
        """Columns of classes in this process; -1 for classes of other processes."""
        order = self._by_id
        if not len(order):
            return torch.full_like(classes, -1)
        ids = self._family.classes[order]
        place = torch.searchsorted(ids, classes.contiguous()).clamp(max=len(order) - 1)
        return torch.where(ids[place] == classes, order[place], -1)

    def _classes_of_all(self) -> Tensor:
        """Class ids of each process's columns, ``(processes, most)``; padding is n_classes."""
        own = self._family.classes
        sizes = all_gathered(torch.tensor([len(own)], device=own.device), self._group)
        ids = own.new_full((int(sizes.max()),), self._family.head.n_classes)
        ids[: len(own)] = own
        return all_gathered(ids, self._group)

    def _merged(self, ranks: Tensor, logs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best classes of all processes, from the k best of each, and their ``logs``."""
        order, some = self._by_id, min(k, ranks.shape[1])
        best = ranks.new_full((len(ranks), k), -torch.inf)
        values = best if logs is ranks else torch.full_like(best, -torch.inf)
        classes = torch.full(best.shape, self._family.head.n_classes, device=logs.device)
        if some:
            best[:, :some], columns = top_classes(ranks[:, order], some)
            classes[:, :some] = self._family.classes[order][columns]
            if logs is not ranks:
                values[:, :some] = logs[:, order].gather(-1, columns)
        # Of several processes, in the order of class ids, to which ties go.
        every = [best, classes] if logs is ranks else [best, classes, values]
        every = [all_gathered(each, self._group).transpose(0, 1).flatten(1) for each in every]
        by_id = every[1].argsort(-1)
        every = [each.gather(-1, by_id) for each in every]
        best, columns = top_classes(every[0], k)
        values = best if logs is ranks else every[2].gather(-1, columns)
        return values, every[1].gather(-1, columns)

    def _drawn(self, logs: Tensor, uniform: Tensor) -> Tensor:
        """Inverse transform sampling: first the process, then a class of that process."""
        none = logs.new_full(logs.shape[:1], -torch.inf)
        own = logs.logsumexp(-1) if logs.shape[1] else none
        masses = all_gathered(own.double().exp(), self._group)
        ends, rank = masses.cumsum(0), torch.distributed.get_rank(self._group)
        number, end = uniform * ends[-1].unsqueeze(-1), ends[rank].unsqueeze(-1)
        begin = end - masses[rank].unsqueeze(-1)
        here = (number >= begin) & (number < end)
        if rank == len(masses) - 1:
            # Rounding can leave numbers beyond the last process.
            here |= number >= end
        drawn = torch.full(uniform.shape, -1, device=uniform.device)
        if logs.shape[1]:
            inside = ((number - begin) / masses[rank].unsqueeze(-1)).clamp(0.0, 1.0 - 2**-53)
            column = drawn_by(logs - own.unsqueeze(-1), torch.where(here, inside, 0.0))
            ids = self._family.classes[column.clamp(min=0)]
            drawn = torch.where(here & (column >= 0), ids, -1)
        return summed(drawn + 1, self._group) - 1


class _AllColumns(torch.autograd.Function):
    """Log-probabilities of all classes in the order of their ids, for the rows ``some``.

    In backward each process receives the gradients of its own classes from the processes that have
    the rows. With ``shared`` rows it has these gradients already.
    """

    @staticmethod
    def forward(
        ctx: Any, logs: Tensor, classes: Tensor, family: Family, some: slice, shared: bool
    ) -> Tensor:
        n, n_classes = len(logs), family.head.n_classes
        ctx.given = classes, family, some, shared, logs.shape
        padded = logs.new_full((n, classes.shape[1]), -torch.inf)
        padded[:, : logs.shape[1]] = logs
        made = logs.new_empty(some.stop - some.start, n_classes + 1)
        every = all_gathered(padded, family.group)
        for values, columns in zip(every, classes, strict=True):
            made[:, columns] = values[some]
        return made[:, :n_classes]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        classes, family, some, shared, (n, here) = ctx.given
        if shared:
            return grad[:, family.classes], None, None, None, None
        parts = grad.new_zeros(len(classes), n, classes.shape[1])
        parts[:, some] = pad(grad, (0, 1))[:, classes].transpose(0, 1)
        mine = summed_part(parts, family.group)[:, :here]
        return mine, None, None, None, None
