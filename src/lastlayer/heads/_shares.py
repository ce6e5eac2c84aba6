"""Which rows go to which softmax, where each row has a target in one of several clusters.

Two ways to the same losses. :func:`in_segments` sorts the rows by place; the host waits once,
for all sizes together. :func:`all_rows` gives all rows to every cluster, those of others with a
factor of 0: shapes do not depend on values, as a CUDA graph needs it.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer._torch import host_sync_allowed


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
    hidden: Tensor, place: Tensor, row_scale: Tensor | None, starts: Sequence[int]
) -> Shares:
    """By the way that suits: in segments, unless the host cannot know their sizes.

    Args:
        hidden: ``(n, d)``.
        place: of each target, ``(n,)``; -1 for a row that does not count.
        row_scale: ``(n,)``, what the gradient of each row's loss is multiplied by; None where none
            is wanted.
        starts: the first place of each cluster.
    """
    way = in_segments if host_sync_allowed(place) else all_rows
    return way(hidden, place, row_scale, starts)


def in_segments(
    hidden: Tensor, place: Tensor, row_scale: Tensor | None, starts: Sequence[int]
) -> Shares:
    """Rows sorted by place, and so by cluster; those that do not count left out."""
    place, rows = place.sort(stable=True)
    # The end of those that do not count, and of the top and each cluster.
    ends = [*torch.searchsorted(place, _bounds(tuple(starts), place.device)).tolist(), len(place)]
    if ends[0]:
        place, rows = place[ends[0] :], rows[ends[0] :]
    hidden = hidden.index_select(0, rows)
    row_scale = None if row_scale is None else row_scale.index_select(0, rows)
    segments = [slice(a - ends[0], b - ends[0]) for a, b in pairwise(ends[1:])]
    column, tails = place, []
    if starts:
        column = place.clone()
    for i, (part, start) in enumerate(zip(segments, starts, strict=True)):
        column[part] = starts[0] + i
        scale = None if row_scale is None else row_scale[part]
        tails.append(Share(part, place[part] - start, scale, None))
    return Shares(hidden, column, row_scale, tails, rows)


@lru_cache(maxsize=64)
def _bounds(starts: tuple[int, ...], device: torch.device) -> Tensor:
    """Where the top begins, and each cluster; kept, as it takes a copy to the device."""
    return torch.tensor([0, *starts], device=device)


def all_rows(
    hidden: Tensor, place: Tensor, row_scale: Tensor | None, starts: Sequence[int]
) -> Shares:
    """All rows for every cluster."""
    counts = place >= 0
    cluster = torch.zeros_like(place)
    for start in starts:
        cluster += place >= start
    # A NaN in a row that does not count would reach the gradients, times a factor of 0.
    hidden = torch.where(counts.unsqueeze(-1), hidden, 0.0)
    place = torch.where(counts, place, 0)
    tails = []
    for i, start in enumerate(starts, 1):
        inside = cluster == i
        scale = None if row_scale is None else torch.where(inside, row_scale, 0.0)
        tails.append(Share(slice(None), torch.where(inside, place - start, 0), scale, inside))
    column = place
    if starts:
        # Classes first, then one for each cluster.
        column = torch.where(cluster > 0, starts[0] + cluster - 1, place)
    return Shares(hidden, column, row_scale, tails, None)
