"""Lists of the positive labels of each row, without duplicates, and reductions over each list.

Lists are padded, or concatenated with offsets, and are kept in that form: padded ones need neither
gathers nor segment sums. Both are sorted within each row, so that duplicates are adjacent; the
first of them in the input counts.
"""

from typing import Any

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._checks import check_device, check_tensor
from lastlayer._labels import check_positives
from lastlayer._torch import values_are_checked

# Elements of hidden states gathered at a time.
_GATHERED = {"cuda": 1 << 24, "cpu": 1 << 20}


class Lists:
    """The entries of all rows: ``(n, m)`` for padded lists, ``(k,)`` for lists with offsets.

    Attributes:
        classes: int64, negative for entries that do not count (padding, duplicates).
        absent: bool, True for entries that do not count.
        values: the label of each entry; None if all have the label ``on``.
        on: the label of all entries if ``values`` is None.
        rows: the row of each entry, ascending; None for padded lists.
    """

    def __init__(
        self,
        classes: Tensor,
        values: Tensor | None,
        on: float,
        rows: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> None:
        self.classes, self.absent, self.values, self.on = classes, classes < 0, values, on
        self.rows, self._starts = rows, starts

    def flat(self) -> tuple[Any, ...]:
        """Flattened classes, rows, start of each row, and labels (None if all are 1)."""
        labels = self.values
        if labels is None and self.on != 1.0:
            labels = torch.full_like(self.classes, self.on, dtype=torch.float64)
        if self.rows is not None:
            return self.classes, self.rows, self._starts, labels
        n, m = self.classes.shape
        starts = torch.arange(n + 1, device=self.classes.device) * m
        rows = torch.arange(n, device=self.classes.device).unsqueeze(-1).expand(n, m).reshape(-1)
        labels = None if labels is None else labels.reshape(-1)
        return self.classes.reshape(-1), rows, starts, labels

    def labels(self, dtype: torch.dtype) -> Tensor | None:
        """Labels that broadcast to the entries; None where all are 1."""
        if self.values is not None:
            return self.values.to(dtype)
        # A CPU scalar tensor works with tensors on any device.
        return None if self.on == 1.0 else torch.tensor(self.on, dtype=dtype, device="cpu")

    def positive(self, dtype: torch.dtype) -> Tensor:
        """1 for entries with a label above 0, else 0."""
        if self.values is None:
            return torch.ones_like(self.classes, dtype=dtype)
        return (self.values > 0).to(dtype)

    def scores(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The score of each entry in full precision; undefined for entries that do not count."""
        if self.rows is None:
            made: Tensor = kernels.products.scores("auto", hidden, weight, bias, self.classes)
            return made
        step = max(1, _GATHERED.get(hidden.device.type, 1 << 20) // max(1, hidden.shape[1]))
        parts = zip(self.rows.split(step), self.classes.split(step), strict=True)
        some = [
            kernels.products.scores("auto", hidden[rows], weight, bias, classes.unsqueeze(-1))
            for rows, classes in parts
        ]
        return torch.cat(some).squeeze(-1)

    def of_rows(self, numbers: Tensor) -> Tensor:
        """One value per row, ``(n,)``, in a shape that broadcasts to the entries."""
        return numbers.unsqueeze(-1) if self.rows is None else numbers[self.rows]

    def places(self, columns: Tensor, stride: int) -> Tensor:
        """Flat positions of columns in a matrix whose rows are ``stride`` apart, ``(entries,)``."""
        if self.rows is not None:
            return torch.add(columns, self.rows, alpha=stride)
        n = columns.shape[0]
        starts = torch.arange(0, n * stride, stride, device=columns.device)
        return (columns + starts.unsqueeze(-1)).view(-1)

    def sum(self, terms: Tensor) -> Tensor:
        """The sum of the terms over the entries of each row that count, ``(n,)``."""
        terms = terms.masked_fill(self.absent, 0.0)
        return terms.sum(-1) if self.rows is None else self._reduced(terms, "sum", 0.0)

    def logsumexp(self, terms: Tensor) -> Tensor:
        """The logsumexp over the entries of each row that count; -inf if there are none."""
        terms = terms.masked_fill(self.absent, -torch.inf)
        if self.rows is None:
            return terms.logsumexp(-1)
        peak = self._reduced(terms, "max", -torch.inf)
        origin = torch.where(peak.isinf(), 0.0, peak)
        total = self._reduced(torch.exp(terms - origin[self.rows]), "sum", 0.0)
        return torch.log(total) + origin

    def _reduced(self, terms: Tensor, how: str, of_none: float) -> Tensor:
        starts = self._starts
        if starts is None or terms.shape[0] == 0:
            n = 0 if starts is None else starts.shape[0] - 1
            return terms.new_full((n,), of_none)
        # Unlike index_add, it is deterministic.
        return torch.segment_reduce(terms, how, offsets=starts, unsafe=True, initial=of_none)

    def dense(self, first: Tensor, like: Tensor, others: float) -> Tensor:
        """Dense labels for some rows, in the shape of ``like``; ``others`` for unlisted classes.

        ``first`` is the index of the first of these rows, ``(1,)``; a tensor needs no host sync.
        """
        n, n_classes = like.shape
        # The additional last element takes the entries of other rows.
        labels = like.new_full((n * n_classes + 1,), others)
        if n:
            place = self.places(self.classes, n_classes) - first * n_classes
            inside = (place >= 0) & (place < n * n_classes) & ~self.absent.view(-1)
            place = torch.where(inside, place, n * n_classes)
            if self.values is None:
                labels.scatter_(0, place, self.on)
            else:
                labels.scatter_(0, place, self.values.to(labels.dtype).view(-1))
        return labels[:-1].view(n, n_classes)


def check_lists(
    hidden: Tensor,
    n_classes: int,
    positives: Any,
    offsets: Any,
    values: Any,
    ignore_index: Any,
    label_smoothing: Any,
    of: str = "hidden",
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Checked positives, offsets and values for :func:`sorted_lists`.

    ``of`` is the name of the argument ``hidden`` in errors. Values are detached.
    """
    check_tensor("positives", positives)
    check_device("positives", positives, hidden, of)
    batch = hidden.shape[:-1]
    n = batch.numel()
    positives, offsets = check_positives(
        positives, offsets, values, batch, n_classes, ignore_index, label_smoothing
    )
    values = None if values is None else values.detach()
    if offsets is None and len(batch) != 1:
        positives = positives.reshape(n, positives.shape[-1])
        values = None if values is None else values.reshape(positives.shape)
    return positives, offsets, values


def sorted_lists(
    positives: Tensor,
    offsets: Tensor | None,
    values: Tensor | None,
    n: int,
    n_classes: int,
    ignore_index: int | None,
    label_smoothing: float,
) -> Lists:
    """The lists of ``n`` rows, sorted within each row by one sort.

    Ids out of range, which are not checked on a GPU, do not count.
    """
    on = 1.0 - label_smoothing
    listed = positives
    padding_is_positive = ignore_index is not None and ignore_index >= 0
    if offsets is not None or padding_is_positive or not values_are_checked(positives):
        counts = (positives >= 0) & (positives < n_classes)
        if padding_is_positive:
            counts &= positives != ignore_index
        listed = torch.where(counts, positives, -1)
    if offsets is None:
        classes, order = listed.sort(stable=True)
        each_once_(classes)
        return Lists(classes, None if values is None else values.gather(-1, order), on)
    place = torch.arange(positives.shape[0], device=positives.device)
    rows = torch.searchsorted(offsets, place, right=True) - 1
    inside = (rows >= 0) & (rows < n) & (listed >= 0)
    rows = rows.clamp(0, max(0, n - 1))
    # Entries that do not count sort after the last class of their row, so `rows` stays valid.
    first = rows * (n_classes + 1)
    key = first + torch.where(inside, listed, n_classes)
    # Sorting int32 takes half as many passes.
    narrow = n * (n_classes + 1) <= torch.iinfo(torch.int32).max
    key, order = (key.int() if narrow else key).sort(stable=True)
    classes = key.long() - first
    if key.shape[0] > 1:
        classes[1:].masked_fill_(key[1:] == key[:-1], -1)
    classes.masked_fill_(classes >= n_classes, -1)
    return Lists(classes, None if values is None else values[order], on, rows, offsets)


def padded_lists(
    positives: Tensor, offsets: Tensor, values: Tensor | None, padding: int
) -> tuple[Tensor, Tensor | None]:
    """Concatenated lists as ``(rows, longest)``, with their values; the host waits for the longest.

    Args:
        positives: checked, ``(k,)``.
        offsets: checked, ``(rows + 1,)``.
        values: ``(k,)``, 0 where lists are padded.
        padding: the id that pads lists.
    """
    lengths = offsets.diff()
    n = lengths.shape[0]
    shape = n, int(lengths.max()) if n else 0
    row = torch.repeat_interleave(torch.arange(n, device=offsets.device), lengths)
    place = torch.arange(positives.shape[0], device=offsets.device) - offsets[row]
    ids = positives.new_full(shape, padding)
    ids[row, place] = positives
    if values is None:
        return ids, None
    told = values.new_zeros(shape)
    told[row, place] = values
    return ids, told


def each_once_(ordered: Tensor) -> None:
    """Sets all but the first of equal neighbours in the last dimension to -1, in place."""
    m = ordered.shape[-1]
    if m > 1:
        later = ordered.narrow(-1, 1, m - 1)
        later.masked_fill_(later == ordered.narrow(-1, 0, m - 1), -1)
