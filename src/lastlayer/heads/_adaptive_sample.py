"""Draws from an adaptive softmax: a class at the top or a cluster, then a class in the cluster."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lastlayer.heads._adaptive_search import rows_where
from lastlayer.heads._sampling import draw_classes

if TYPE_CHECKING:
    from lastlayer.heads.adaptive import AdaptiveSoftmax


def draw_by_cluster(
    head: "AdaptiveSoftmax", rows: Tensor, n_samples: int, generator: torch.Generator | None
) -> Tensor:
    """Class ids ``(n, n_samples)``; -1 in a row without probabilities."""
    # All chance at once: what is drawn does not depend on the size of the chunks.
    first, second = torch.rand(
        2, rows.shape[0], n_samples, dtype=torch.float64, device=rows.device, generator=generator
    )
    drawn = torch.cat(
        [
            draw_classes(head._top_log_prob(rows[part]), first[part])
            for part in head._chunks(rows, head.head_weight.shape[0])
        ]
    )
    place = drawn.clone()
    for i, some in _rows_of_clusters(head, drawn, rows):
        inside = draw_classes(head._inside_log_prob(i, rows[some]), second[some])
        found = torch.where(inside < 0, -1, inside + head._clusters[i][0])
        place[some] = torch.where(drawn[some] == head._n_top + i, found, place[some])
    return torch.where(place < 0, -1, head._classes_at(place.clamp(min=0)))


def _rows_of_clusters(
    head: "AdaptiveSoftmax", drawn: Tensor, rows: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Each cluster with chunks of the rows that have drawn it."""
    for i, (start, last) in enumerate(head._clusters):
        asked = rows_where((drawn == head._n_top + i).any(-1))
        for part in head._chunks(rows[asked], last - start):
            yield i, asked[part]
