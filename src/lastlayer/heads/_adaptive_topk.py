"""The best classes of an adaptive softmax, without the scores of all of them.

Cluster by cluster, opened only for the rows where one of its classes may be among the best. On
CUDA by blocks of classes: all clusters are looked at for all rows, and nothing waits for the
device; their products are small where vectors are narrow, and to ask which rows may leave a
cluster closed takes longer.
"""

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from lastlayer._torch import accumulation_dtype, host_sync_allowed, in_dtype
from lastlayer.heads.base import top_classes
from lastlayer.kernels import products, selected

if TYPE_CHECKING:
    from lastlayer.heads.adaptive import AdaptiveSoftmax

# From so many rows on it pays to look at all vectors of a cluster before it is opened.
_ROWS_WORTH_A_BOUND = 8
# Classes of a block, as the kernel has them.
_BLOCK = 128
# Where more than this part of a cluster is a candidate, all of it is sorted.
_CANDIDATES = 1 / 4
# Numbers that are held in one list of candidates.
_MOST_CANDIDATES = 1 << 26


def best_classes(head: "AdaptiveSoftmax", rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of the k best classes of each row, the best one first."""
    if blocks_suit(head, rows, k):
        return best_by_blocks(head, rows, k)
    best, n = [], head._n_top
    for part in head._chunks(rows, head.head_weight.shape[0]):
        top = head._top_log_prob(rows[part])
        values, columns = top_classes(top[:, :n], min(k, n))
        best.append((values, head._classes_at(columns), top[:, n:]))
    values, classes, clusters = map(torch.cat, zip(*best, strict=True))
    # What is missing is worse than any class.
    missing = 0, k - values.shape[1]
    values, classes = pad(values, missing, value=-torch.inf), pad(classes, missing, value=-1)
    for i, (start, last) in enumerate(head._clusters):
        some = opened(head, i, rows, clusters[:, i], values[:, -1])
        for part in head._chunks(rows[some], last - start):
            at = some[part]
            inside = head._inside_log_prob(i, rows[at]) + clusters[at, i : i + 1]
            found, columns = top_classes(inside, min(k, last - start))
            found = torch.cat([values[at], found], -1)
            of_classes = torch.cat([classes[at], head._classes_at(columns + start)], -1)
            # The lower class first where they are equal; a class of probability 0 before padding.
            by_id = torch.where(of_classes < 0, head.n_classes, of_classes).argsort(-1)
            values[at], columns = top_classes(found.gather(-1, by_id), k)
            classes[at] = of_classes.gather(-1, by_id).gather(-1, columns)
    return values, classes


def opened(
    head: "AdaptiveSoftmax", cluster: int, rows: Tensor, log_prob: Tensor, kth: Tensor
) -> Tensor:
    """The rows in which a class of the cluster may be better than the k-th best so far.

    ``log_prob`` is that of the cluster as a whole, ``(n,)``, and ``kth`` the k-th best, ``(n,)``.
    """
    # Not `>=`: a row of NaN is opened too.
    some = rows_where(~(log_prob < kth))
    if len(some) < _ROWS_WORTH_A_BOUND:
        return some
    most = log_prob[some] + ceiling(head.projections[cluster], head.tails[cluster], rows[some])
    return some[rows_where(~(most < kth[some]))]


def ceiling(projection: Tensor, vectors: Tensor, rows: Tensor) -> Tensor:
    r"""What no log-probability of a class, given its cluster, exceeds.

    The log of the normaliser is at least the mean score plus log n, and no score is further
    above the mean than :math:`\|z\| \max_j \|w_j - \bar w\|`.
    """
    narrow = linear(rows, in_dtype(projection, rows.dtype)).to(accumulation_dtype(rows.dtype))
    vectors = vectors.to(rows.dtype).to(narrow.dtype)
    mean = vectors.mean(0)
    squares = torch.linalg.vector_norm(vectors, dim=1).square()
    largest = squares.amax()
    apart = (squares - 2 * (vectors @ mean) + mean @ mean).amax().clamp(min=0)
    # Rounding is far below what is added for it.
    reach = (apart + 1e-5 * largest).sqrt() + 1e-4 * largest.sqrt()
    size = torch.linalg.vector_norm(narrow, dim=1)
    most: Tensor = size * reach + (1e-4 - math.log(len(vectors)))
    return most.clamp(max=0)


def rows_where(asked: Tensor) -> Tensor:
    """The rows that ask; all of them where the host cannot wait to know."""
    if host_sync_allowed(asked):
        return asked.nonzero().squeeze(-1)
    return torch.arange(asked.shape[0], device=asked.device)


def blocks_suit(head: "AdaptiveSoftmax", rows: Tensor, k: int) -> bool:
    """Whether there is a kernel for these rows, and clusters have far more than k blocks."""
    if selected("class_scores", rows.device.type, rows.dtype) != "triton":
        return False
    smallest = min((last - start for start, last in head._clusters), default=0)
    return k * _BLOCK <= smallest * _CANDIDATES


def best_by_blocks(head: "AdaptiveSoftmax", rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As :func:`best_classes`, by blocks of classes."""
    # Imported here: Triton is not on every machine.
    from lastlayer.kernels.search.triton import largest

    sizes = [last - start for start, last in head._clusters]
    # Of each row and cluster the candidates, and two numbers per block of the largest.
    of_each = k * _BLOCK + 2 * max(sizes) // _BLOCK
    candidates = len(sizes) * of_each + head.head_weight.shape[0]
    step = max(1, _MOST_CANDIDATES // candidates)
    found, n_top = [], head._n_top
    for some in rows.split(step):
        top = head._top_log_prob(some)
        values, places = _in_best_blocks(head, some, top[:, n_top:], k)
        near = torch.arange(n_top, device=rows.device).expand(len(some), -1)
        classes = head._classes_at(torch.cat([near, places], -1))
        found.append(largest(torch.cat([top[:, :n_top], values], -1), classes, k))
    values, classes = map(torch.cat, zip(*found, strict=True))
    return values, classes


def _in_best_blocks(
    head: "AdaptiveSoftmax", rows: Tensor, clusters: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and places ``(n, c * 128 k)`` of all classes in the best k blocks of each.

    ``clusters`` has the log-probabilities of the c clusters. Beyond the last class of a cluster
    the place is that, and the log-probability -inf.
    """
    from lastlayer.kernels.search.triton import largest, peaks_and_levels_

    n, c = clusters.shape
    vectors = [in_dtype(tail, rows.dtype) for tail in head.tails]
    narrow = [linear(rows, in_dtype(each, rows.dtype)) for each in head.projections]
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
