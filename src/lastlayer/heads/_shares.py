"""Which rows go to which softmax, where each row has a target in one of several clusters.

Two ways to the same losses. :func:`in_segments` sorts the rows by cluster; the host waits once,
for all sizes together. :func:`with_the_rest_ignored` gives all rows to every cluster and ignores
those of others: shapes do not depend on values, as torch.compile and CUDA graphs need it.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer.fused._sparse_rows import can_wait
from lastlayer.heads._ranked import IGNORED


class Share(NamedTuple):
    """Rows of one softmax, their targets in it, and what each row counts."""

    hidden: Tensor
    target: Tensor
    weight: Tensor
    # None: every row counts.
    ignore_index: int | None = None


class Shares(NamedTuple):
    """What goes to the top, which every row passes, and to each of the clusters below."""

    top: Share
    tails: list[Share]
    # From the losses of the top and of each cluster to those of all rows.
    together: Callable[[Tensor, list[Tensor]], Tensor]


def share_out(
    hidden: Tensor, place: Tensor, cutoffs: Tensor, starts: Sequence[int], mean: bool
) -> Shares:
    """By the way that suits: in segments, unless the host cannot know their sizes.

    Args:
        hidden: ``(n, d)``.
        place: of each target, ``(n,)``; :data:`IGNORED` for a row that does not count.
        cutoffs: the first place of each cluster, ``(clusters,)``, on the device of hidden.
        starts: the same numbers, known to the host.
        mean: each row counts as one part of all that count.
    """
    waits = not torch.compiler.is_compiling() and can_wait(place)
    way = in_segments if waits else with_the_rest_ignored
    return way(hidden, place, cutoffs, starts, mean)


def in_segments(
    hidden: Tensor, place: Tensor, cutoffs: Tensor, starts: Sequence[int], mean: bool
) -> Shares:
    """Rows sorted by cluster, those that do not count left out."""
    n = place.shape[0]
    ends_of = torch.arange(-1, len(starts) + 1, device=place.device)
    cluster, rows = _clusters(place, cutoffs).sort(stable=True)
    ends: list[int] = torch.searchsorted(cluster, ends_of, right=True).tolist()
    ignored, *ends = ends
    rows = rows[ignored:]
    ends = [end - ignored for end in ends]
    hidden, place = hidden.index_select(0, rows), place[rows]
    counted = n - ignored
    weight = _full(hidden, counted, 1.0 / max(1, counted) if mean else 1.0)
    segments = [slice(a, b) for a, b in pairwise(ends)]
    tails = [
        Share(hidden[part], place[part] - start, weight[part])
        for part, start in zip(segments, starts, strict=True)
    ]

    def together(top: Tensor, below: list[Tensor]) -> Tensor:
        losses = top + torch.cat([top.new_zeros(ends[0]), *below])
        return losses.new_zeros(n).index_copy(0, rows, losses)

    return Shares(Share(hidden, _column(place, cluster[ignored:], starts), weight), tails, together)


def with_the_rest_ignored(
    hidden: Tensor, place: Tensor, cutoffs: Tensor, starts: Sequence[int], mean: bool
) -> Shares:
    """All rows for every cluster."""
    cluster = _clusters(place, cutoffs)
    counts = cluster >= 0
    # A NaN in a row that does not count would reach the gradient of a projection.
    hidden = torch.where(counts.unsqueeze(-1), hidden, 0.0)
    weight = _full(hidden, place.shape[0], 1.0)
    if mean:
        weight = weight / counts.sum().clamp(min=1)
    tails = [
        Share(hidden, torch.where(cluster == i, place - start, IGNORED), weight, IGNORED)
        for i, start in enumerate(starts, 1)
    ]

    def together(top: Tensor, below: list[Tensor]) -> Tensor:
        for losses in below:
            top = top + losses
        return top

    return Shares(Share(hidden, _column(place, cluster, starts), weight, IGNORED), tails, together)


def _clusters(place: Tensor, cutoffs: Tensor) -> Tensor:
    """0 for the top itself, 1, 2, … below, -1 for rows that do not count."""
    return torch.where(place < 0, -1, torch.bucketize(place.contiguous(), cutoffs, right=True))


def _column(place: Tensor, cluster: Tensor, starts: Sequence[int]) -> Tensor:
    """Of the top: classes first, then one for each cluster. Ignored rows stay what they are."""
    if not starts:
        return place
    return torch.where(cluster > 0, starts[0] + cluster - 1, place)


def _full(hidden: Tensor, n: int, value: float) -> Tensor:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return hidden.new_full((n,), value, dtype=wide)
