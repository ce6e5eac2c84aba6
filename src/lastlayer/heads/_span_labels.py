"""Which spans are right: from lists, or from one bool a span. A tile at a time."""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lastlayer.heads._span_tiles import Tile


class TileLabels(Protocol):
    """Right spans of a tile, as the loss asks for them."""

    def hide(self, scores: Tensor) -> Tensor:
        """Sets the scores of right spans to -inf; returns what they were, and +inf elsewhere."""

    def log_sum(self, right: Tensor) -> Tensor:
        """The log of the sum of exp(-score) of what was hidden, ``(texts, types)``."""

    def pull(self, gradient: Tensor, right: Tensor, above: Tensor) -> None:
        """Subtracts exp(-score - above) at right spans, with ``above`` ``(texts, types)``."""


class SpanLabels(Protocol):
    """Right spans of all texts."""

    def of(self, tile: Tile, absent: Tensor) -> TileLabels:
        """Those of a tile, in which cells that are ``absent`` are no spans."""


def span_labels(target: Tensor, n_types: int, n: int) -> SpanLabels:
    """From bools ``(texts, types, n, n)``, or from what :func:`listed_cells` makes."""
    if target.dtype == torch.bool:
        return _DenseSpans(target)
    return _ListedSpans(target, n_types, n)


def listed_cells(spans: Tensor, n_types: int, n: int, mask: Tensor | None) -> Tensor:
    """Spans ``(texts, m, 3)`` as cells ``(type · n + start) · n + end``, each once.

    Padding, duplicates, and what has no score (at a masked token, or out of range) are -1. There
    is at least one entry, so that a sum over them has something to run over.
    """
    spans = torch.nn.functional.pad(spans, (0, 0, 0, 1), value=-1)
    kind, start, end = spans.unbind(-1)
    counts = (kind >= 0) & (kind < n_types) & (start >= 0) & (start <= end) & (end < n)
    if mask is not None:
        at = [mask.gather(1, torch.where(counts, each, 0)) for each in (start, end)]
        counts = counts & at[0] & at[1]
    cells = torch.where(counts, (kind * n + start) * n + end, -1).sort(-1).values
    first = torch.ones_like(cells[:, :1], dtype=torch.bool)
    return torch.where(torch.cat([first, cells[:, 1:] != cells[:, :-1]], 1), cells, -1)


class _ListedSpans:
    def __init__(self, cells: Tensor, n_types: int, n: int) -> None:
        self.listed, self.n_types = cells >= 0, n_types
        self.types = torch.where(self.listed, cells // (n * n), 0)
        self.starts, self.ends = cells // n % n, cells % n

    def of(self, tile: Tile, absent: Tensor) -> TileLabels:  # noqa: ARG002 — none is listed
        types, starts, ends = (each[tile.texts] for each in (self.types, self.starts, self.ends))
        inside = (starts >= tile.starts.start) & (starts < tile.starts.stop)
        inside &= self.listed[tile.texts]
        height = tile.starts.stop - tile.starts.start
        width = tile.ends.stop - tile.ends.start
        text = torch.arange(starts.shape[0], device=starts.device).unsqueeze(-1)
        row = (text * self.n_types + types) * height + starts - tile.starts.start
        # What is not in the tile points at its first cell, and will add 0 there.
        place = torch.where(inside, row * width + ends - tile.ends.start, 0)
        return _ListedInTile(place, inside, types, self.n_types)


class _ListedInTile(NamedTuple):
    place: Tensor
    inside: Tensor
    types: Tensor
    n_types: int

    def hide(self, scores: Tensor) -> Tensor:
        cells = scores.view(-1)
        right = torch.where(self.inside, cells[self.place], math.inf)
        hidden = torch.where(self.inside, -math.inf, 0.0).to(scores.dtype)
        cells.scatter_add_(0, self.place.view(-1), hidden.view(-1))
        return right

    def log_sum(self, right: Tensor) -> Tensor:
        kinds = torch.arange(self.n_types, device=right.device).unsqueeze(-1)
        of_type = self.types.unsqueeze(1) == kinds
        return torch.where(of_type, -right.unsqueeze(1), -math.inf).logsumexp(-1)

    def pull(self, gradient: Tensor, right: Tensor, above: Tensor) -> None:
        shares = (right + above.gather(1, self.types)).neg_().exp_().neg_()
        gradient.view(-1).scatter_add_(0, self.place.view(-1), shares.view(-1))


class _DenseSpans(NamedTuple):
    target: Tensor

    def of(self, tile: Tile, absent: Tensor) -> TileLabels:
        return _DenseInTile(self.target[tile.texts, :, tile.starts, tile.ends] & ~absent)


class _DenseInTile(NamedTuple):
    on: Tensor

    def hide(self, scores: Tensor) -> Tensor:
        right = torch.where(self.on, scores, math.inf)
        scores.masked_fill_(self.on, -math.inf)
        return right

    def log_sum(self, right: Tensor) -> Tensor:
        return right.neg().flatten(-2).logsumexp(-1)

    def pull(self, gradient: Tensor, right: Tensor, above: Tensor) -> None:
        gradient.sub_((right + above[..., None, None]).neg_().exp_())
