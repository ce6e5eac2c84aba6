"""Which rows go to which softmax, where each row has a target in one of several clusters.

Two ways to the same losses. :func:`in_segments` sorts the rows by cluster; the host waits once,
for all sizes together. :func:`all_rows` gives all rows to every cluster, those of others with a
factor of 0: shapes do not depend on values, as a CUDA graph needs it.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer.fused._sparse_rows import can_wait


class Share(NamedTuple):
    """The rows of one cluster, as a part of those of the top, and their targets in it."""

    part: slice
    target: Tensor
    row_scale: Tensor | None
    # Which of them are really in the cluster; None for all.
    inside: Tensor | None


class Shares(NamedTuple):
    """What goes to the top, which every row passes, and to each of the clusters below."""

    hidden: Tensor
    column: Tensor
    row_scale: Tensor | None
    tails: list[Share]
    # The row of the batch that each of them is, None where they are all in their order.
    rows: Tensor | None


def share_out(
    hidden: Tensor,
    place: Tensor,
    cluster: Tensor,
    row_scale: Tensor | None,
    starts: Sequence[int],
) -> Shares:
    """By the way that suits: in segments, unless the host cannot know their sizes.

    Args:
        hidden: ``(n, d)``.
        place: of each target, ``(n,)``.
        cluster: of each target, ``(n,)``: 0 for the top itself, 1, 2, … below, -1 for a row that
            does not count.
        row_scale: ``(n,)``, what the gradient of each row's loss is multiplied by; None where none
            is wanted.
        starts: the first place of each cluster.
    """
    way = in_segments if can_wait(place) else all_rows
    return way(hidden, place, cluster, row_scale, starts)


def in_segments(
    hidden: Tensor,
    place: Tensor,
    cluster: Tensor,
    row_scale: Tensor | None,
    starts: Sequence[int],
) -> Shares:
    """Rows sorted by cluster, those that do not count left out."""
    cluster, rows = cluster.sort(stable=True)
    ends_of = torch.arange(-1, len(starts) + 1, device=place.device)
    ends: list[int] = torch.searchsorted(cluster, ends_of, right=True).tolist()
    ignored = ends[0]
    cluster, rows = cluster[ignored:], rows[ignored:]
    hidden, place = hidden.index_select(0, rows), place[rows]
    row_scale = None if row_scale is None else row_scale[rows]
    segments = [slice(a - ignored, b - ignored) for a, b in pairwise(ends[1:])]
    tails = [
        Share(part, place[part] - start, None if row_scale is None else row_scale[part], None)
        for part, start in zip(segments, starts, strict=True)
    ]
    return Shares(hidden, _column(place, cluster, starts), row_scale, tails, rows)


def all_rows(
    hidden: Tensor,
    place: Tensor,
    cluster: Tensor,
    row_scale: Tensor | None,
    starts: Sequence[int],
) -> Shares:
    """All rows for every cluster."""
    counts = cluster >= 0
    # A NaN in a row that does not count would reach the gradients, times a factor of 0.
    hidden = torch.where(counts.unsqueeze(-1), hidden, 0.0)
    place = torch.where(counts, place, 0)
    tails = []
    for i, start in enumerate(starts, 1):
        inside = cluster == i
        scale = None if row_scale is None else torch.where(inside, row_scale, 0.0)
        tails.append(Share(slice(None), torch.where(inside, place - start, 0), scale, inside))
    return Shares(hidden, _column(place, cluster, starts), row_scale, tails, None)


def _column(place: Tensor, cluster: Tensor, starts: Sequence[int]) -> Tensor:
    """Of the top: classes first, then one for each cluster."""
    if not starts:
        return place
    return torch.where(cluster > 0, starts[0] + cluster - 1, place)
