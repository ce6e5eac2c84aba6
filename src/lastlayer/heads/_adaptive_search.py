"""Classes of an adaptive softmax from the clusters that can hold them alone."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from lastlayer._torch import accumulation_dtype, host_sync_allowed
from lastlayer.heads._adaptive_blocks import best_by_blocks, blocks_suit
from lastlayer.heads._top import top_classes

if TYPE_CHECKING:
    from lastlayer.heads.adaptive import AdaptiveSoftmax

# From so many rows on it pays to look at all vectors of a cluster before it is opened.
_ROWS_WORTH_A_BOUND = 8


def chosen_log_prob(head: "AdaptiveSoftmax", rows: Tensor, place: Tensor) -> Tensor:
    """Log-probabilities of the classes at places ``(n, k)``; differentiable."""
    top = head._top_log_prob(rows)
    cluster = torch.bucketize(place, head.cutoffs, right=True) - 1
    made = top.gather(-1, torch.where(cluster < 0, place, head._n_top + cluster))
    for i, (start, last) in enumerate(head._clusters):
        among = cluster == i
        asked = rows_where(among.any(-1))
        inside = head._inside_log_prob(i, rows[asked])
        at_place = inside.gather(-1, place[asked].clamp(start, last - 1) - start)
        made = made.index_add(0, asked, torch.where(among[asked], at_place, 0.0))
    return made


def best_classes(head: "AdaptiveSoftmax", rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of the k best classes of each row, the best one first."""
    if blocks_suit(head, rows, k):
        return best_by_blocks(head, rows, k)
    values, classes, clusters = _best_at_the_top(head, rows, k)
    for i, (start, last) in enumerate(head._clusters):
        size = last - start
        kth = values[:, k - 1] if values.shape[1] >= k else clusters.new_tensor(-torch.inf)
        some = opened(head, i, rows, clusters[:, i], kth.expand(len(rows)))
        values, classes = _padded(values, classes, min(k, values.shape[1] + size))
        for part in head._chunks(rows[some], size):
            at = some[part]
            inside = head._inside_log_prob(i, rows[at]) + clusters[at, i : i + 1]
            best, columns = top_classes(inside, min(k, size))
            found = head._classes_at(columns + start)
            values[at], classes[at] = _merged(values[at], classes[at], best, found, values.shape[1])
    return values, classes


def _best_at_the_top(
    head: "AdaptiveSoftmax", rows: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Values and classes of the best at the top, and the log-probabilities of clusters."""
    best, n = [], head._n_top
    for part in head._chunks(rows, head.head_weight.shape[0]):
        top = head._top_log_prob(rows[part])
        values, columns = top_classes(top[:, :n], min(k, n))
        best.append((values, head._classes_at(columns), top[:, n:]))
    values, classes, clusters = (torch.cat(each) for each in zip(*best, strict=True))
    return values, classes, clusters


def opened(
    head: "AdaptiveSoftmax", cluster: int, rows: Tensor, log_prob: Tensor, kth: Tensor
) -> Tensor:
    """The rows in which a class of the cluster may be better than the k-th best so far.

    Args:
        head: the head.
        cluster: which one.
        rows: all of them, ``(n, in_features)``.
        log_prob: of the cluster as a whole, ``(n,)``.
        kth: the k-th best so far, ``(n,)``.
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
    narrow = linear(rows, projection.to(rows.dtype)).to(accumulation_dtype(rows.dtype))
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


def _padded(values: Tensor, classes: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Lists of at least ``width``; what is missing is worse than any class."""
    missing = max(0, width - values.shape[1])
    return pad(values, (0, missing), value=-torch.inf), pad(classes, (0, missing), value=-1)


def _merged(
    values: Tensor, classes: Tensor, more: Tensor, of_classes: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The best k of two lists a row, the lower class first where they are equal."""
    classes = torch.cat([classes, of_classes], -1)
    # Padding last: a class of probability 0 goes before it.
    by_id = torch.where(classes < 0, torch.iinfo(classes.dtype).max, classes).argsort(-1)
    values, columns = top_classes(torch.cat([values, more], -1).gather(-1, by_id), k)
    return values, classes.gather(-1, by_id).gather(-1, columns)
