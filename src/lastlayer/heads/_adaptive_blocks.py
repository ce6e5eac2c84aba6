"""The best classes of an adaptive softmax on CUDA, from the best blocks of each cluster.

All clusters are looked at for all rows, and nothing waits for the device: their products are small
where vectors are narrow, and to ask which rows may leave a cluster closed takes longer.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from lastlayer.heads._scores import wide_scores
from lastlayer.kernels import products, selected

if TYPE_CHECKING:
    from lastlayer.heads.adaptive import AdaptiveSoftmax

# Classes of a block, as the kernel has them.
_BLOCK = 128
# Where more than this part of a cluster is a candidate, all of it is sorted.
_CANDIDATES = 1 / 4
# Numbers that are held in one list of candidates.
_MOST_CANDIDATES = 1 << 26


def blocks_suit(head: "AdaptiveSoftmax", rows: Tensor, k: int) -> bool:
    """Whether there is a kernel for these rows, and clusters have far more than k blocks."""
    if selected("class_scores", rows.device.type, rows.dtype) != "triton":
        return False
    smallest = min((last - start for start, last in head._clusters), default=0)
    return k * _BLOCK <= smallest * _CANDIDATES


def best_by_blocks(head: "AdaptiveSoftmax", rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of the k best classes of each row, the best one first."""
    sizes = [last - start for start, last in head._clusters]
    # Of each row and cluster the candidates, and two numbers a block of the largest.
    of_each = k * _BLOCK + 2 * max(sizes) // _BLOCK
    candidates = len(sizes) * of_each + head.head_weight.shape[0]
    step = max(1, _MOST_CANDIDATES // candidates)
    found = [_best(head, some, k) for some in rows.split(step)]
    values, classes = (torch.cat(each) for each in zip(*found, strict=True))
    return values, classes


def _best(head: "AdaptiveSoftmax", rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    # Imported here: Triton is not on every machine.
    from lastlayer.kernels.search.triton import largest

    dtype, n_top = rows.dtype, head._n_top
    bias = None if head.head_bias is None else head.head_bias.to(dtype)
    top = torch.log_softmax(wide_scores(rows, head.head_weight.to(dtype), bias), -1)
    values, places = _in_best_blocks(head, rows, top[:, n_top:], k)
    near = torch.arange(n_top, device=rows.device).expand(len(rows), -1)
    classes = head._classes_at(torch.cat([near, places], -1))
    return largest(torch.cat([top[:, :n_top], values], -1), classes, k)


def _in_best_blocks(
    head: "AdaptiveSoftmax", rows: Tensor, clusters: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and places ``(n, c * 128 k)`` of all classes in the best k blocks of each.

    ``clusters`` has the log-probabilities of the c clusters. Beyond the last class of a cluster
    the place is that, and the log-probability -inf.
    """
    from lastlayer.kernels.search.triton import largest, peaks_and_levels_

    n, c = clusters.shape
    vectors = [tail.to(rows.dtype) for tail in head.tails]
    narrow = [linear(rows, projection.to(rows.dtype)) for projection in head.projections]
    blocks = -(-max(map(len, vectors)) // _BLOCK)
    # One below the other, filled up with blocks that nobody takes.
    peaks, levels = rows.new_full((2, c, n, blocks), -torch.inf, dtype=torch.float32).unbind()
    for i in range(c):
        peaks_and_levels_(narrow[i], vectors[i], peaks[i], levels[i])
    normaliser = torch.logsumexp(levels, -1)
    best = largest(peaks.flatten(0, 1), None, k)[1].view(c, n, k, 1)
    columns = (best * _BLOCK + torch.arange(_BLOCK, device=rows.device)).flatten(2)
    starts, sizes = _bounds(tuple(head._clusters), rows.device)
    there = columns < sizes
    asked = torch.where(there, columns, -1)
    scores = torch.stack([
        products.scores("auto", narrow[i], vectors[i], None, asked[i]) for i in range(c)
    ])  # fmt: skip
    # In this order: scores may be large, and only their differences matter.
    log_probs = (scores - normaliser.unsqueeze(-1)) + clusters.t().unsqueeze(-1)
    log_probs = torch.where(there, log_probs, -torch.inf)
    places = torch.minimum(columns, sizes - 1) + starts
    return log_probs.transpose(0, 1).flatten(1), places.transpose(0, 1).flatten(1)


@lru_cache(maxsize=64)
def _bounds(clusters: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The first place of each cluster and its size, ``(c, 1, 1)``; kept, as it takes a copy."""
    bounds = torch.tensor(clusters, device=device).view(-1, 2, 1, 1)
    return bounds[:, 0], bounds[:, 1] - bounds[:, 0]
