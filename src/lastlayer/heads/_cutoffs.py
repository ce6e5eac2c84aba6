"""Where the clusters of an adaptive softmax begin, and how wide they are."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lastlayer._checks import as_counts
from lastlayer.heads._checks import check_count

Reals = NDArray[np.float64]
# Beyond so many classes only some places are candidates for a cutoff: from one to the next 4 %.
_EVERY_PLACE, _RATIO = 256, 1.04

# What a step has where it is not said: a GPU has to be given many rows.
_ROWS, _CUDA_ROWS = 256, 8192


class MatrixCost(NamedTuple):
    r"""The time of a training step of small softmaxes, in microseconds.

    A call c for each of them, and the work of

    .. math:: g(k, B, d) = \alpha\,k d + \beta\,k B + \lambda\,k B d

    for k classes, B rows and d numbers a row. Of Grave et al. it has the call and the product;
    the other two terms are what few rows and narrow rows pay: the gradient of all weights is
    written whatever B is, and all scores are exponentiated whatever d is.

    Where ``overlap`` is true the host makes calls while the device works, and the step takes as
    long as the longer of the two; else one comes after the other.
    """

    call: float
    weight: float
    score: float
    product: float
    overlap: bool = False

    def work(self, k: Any, rows: Any, width: float) -> Any:
        """g, for numbers or arrays that broadcast."""
        return k * (self.weight * width + rows * (self.score + self.product * width))

    def step(self, softmaxes: int, work: float) -> float:
        """Of so many softmaxes with so much work together."""
        calls = self.call * softmaxes
        return max(calls, work) if self.overlap else calls + work


COSTS = {
    # Fitted to steps of `linear_cross_entropy` in float32 on one core of a server CPU, k from 500
    # to 40,000, B from 8 to 256 and d from 8 to 256. Most are within 15 %; beyond the cache the
    # truth is up to twice as much. Only ratios matter.
    "cpu": MatrixCost(call=800.0, weight=1.75e-3, score=2.6e-3, product=3.7e-5),
    # Of an H200 in bfloat16. What a small softmax takes on the device beside others is little
    # against what the host needs to launch it: steps with two clusters and with four were some
    # 1.2 ms a cluster apart. The rest is by rates: a weight that is read twice and a gradient that
    # is written, 6 bytes at 4.2 TB/s; what goes with two exponentials a score, as measured where
    # vectors are narrow; six operations a product at 600 TFLOP/s.
    "cuda": MatrixCost(1200.0, weight=1.4e-6, score=2.1e-6, product=1.0e-8, overlap=True),
}


def cutoffs_from_counts(
    counts: Any,
    in_features: int,
    *,
    div_value: float = 4.0,
    min_width: int = 8,
    rows: int | None = None,
    max_clusters: int = 4,
    top_share: float = 0.5,
    cost: MatrixCost | str = "cpu",
) -> list[int]:
    """The cutoffs with which an adaptive softmax is fastest, for classes by falling frequency.

    A step costs the top, with one more column for each cluster, on all rows; and each cluster,
    with its projection, on the share of the rows that it expects. All ways to cut the classes into
    a top and up to ``max_clusters`` clusters are compared by dynamic programming: exactly for up
    to 256 classes, and beyond that among places that are 4 % apart.

    The fastest layout alone would leave a few dozen classes at the top, and narrow vectors to
    everything else. So the top keeps at least ``top_share`` of all occurrences. And no cluster has
    fewer classes than its vectors have numbers.

    Args:
        counts: how often each class occurs, in any order.
        in_features: how many numbers a hidden state has.
        div_value: by how much each cluster is narrower than the one before.
        min_width: the least width of a projection.
        rows: how many rows a step has; without it 8,192 where ``cost`` is "cuda", and else 256.
        max_clusters: the most clusters.
        top_share: from 0 to 1.
        cost: the time of a small softmax: "cpu", "cuda", or the numbers of your own machine,
            which :class:`MatrixCost` explains.

    Returns:
        Where each cluster begins; empty where a plain softmax is fastest.

    Example:
        >>> zipf = [1 / rank for rank in range(1, 50_001)]
        >>> cutoffs = cutoffs_from_counts(zipf, 256)
        >>> 1 <= len(cutoffs) <= 4 and cutoffs == sorted(cutoffs)
        True
        >>> cutoffs_from_counts([1] * 100, 256)
        []
    """
    weights = as_counts(counts)
    check_count("in_features", in_features)
    check_widths(div_value, min_width)
    if rows is None:
        rows = _CUDA_ROWS if cost == "cuda" else _ROWS
    check_count("rows", rows)
    check_count("max_clusters", max_clusters)
    _check_share(top_share)
    cost = _checked_cost(cost)
    share = np.concatenate([[0.0], np.cumsum(np.sort(weights)[::-1])]) / weights.sum()
    places = _candidates(len(weights))
    widths = tail_widths(in_features, max_clusters, div_value, min_width)
    best = min(
        (
            _best_with(widths[:clusters], share[places], top_share, places, in_features, rows, cost)
            for clusters in range(min(max_clusters, len(weights) - 1) + 1)
        ),
        key=operator.itemgetter(0),
    )
    return best[1]


def _best_with(
    widths: Sequence[int],
    share: Reals,
    top_share: float,
    places: NDArray[np.int64],
    in_features: int,
    rows: int,
    cost: MatrixCost,
) -> tuple[float, list[int]]:
    """The least cost with a cluster of each width, and the cutoffs that have it.

    ``share`` is that of the classes before each of the places.
    """
    # What comes from each place on; the last cluster has to end at the last place.
    rest = np.full(len(places), np.inf)
    rest[-1] = 0.0
    following = []
    sizes = (places[None, :] - places[:, None]).astype(np.float64)
    expected = rows * (share[None, :] - share[:, None])
    for width in reversed(widths):
        projection = cost.product * expected * width * in_features
        step = cost.work(sizes, expected, width) + projection
        step = np.where(sizes >= width, step, np.inf) + rest[None, :]
        following.append(step.argmin(1))
        rest = step.min(1)
    total = cost.work(places + float(len(widths)), rows, in_features) + rest
    # At least one class at the top, and its share; rounding may leave the last sum short of 1.
    allowed = (places > 0) & ((share >= top_share) | (places == places[-1]))
    total = np.where(allowed, total, np.inf)
    place = int(total.argmin())
    cutoffs, least = [], cost.step(1 + len(widths), float(total[place]))
    for nearest in reversed(following):
        cutoffs.append(int(places[place]))
        place = int(nearest[place])
    return least, cutoffs


def _candidates(n: int) -> NDArray[np.int64]:
    """Places of cutoffs from 0 to n, both of them included."""
    if n <= _EVERY_PLACE:
        return np.arange(n + 1)
    steps = np.arange(int(np.log(n) / np.log(_RATIO)) + 1)
    return np.unique(np.concatenate([[0], (_RATIO**steps).astype(np.int64), [n]]))


def tail_widths(in_features: int, clusters: int, div_value: float, min_width: int) -> list[int]:
    """``in_features / div_value ** i`` for i = 1, 2, …, but at least ``min_width``.

    Never 0, with which a cluster would be uniform for ever; and never more than ``in_features``.
    """
    least = min(min_width, in_features)
    return [max(least, _narrowed(in_features, div_value, i)) for i in range(1, clusters + 1)]


def _narrowed(in_features: int, div_value: float, times: int) -> int:
    try:
        return int(in_features // div_value**times)
    except OverflowError:  # a power beyond all numbers
        return 0


def check_widths(div_value: Any, min_width: Any) -> None:
    """A divisor of at least 1, a width of at least 1."""
    if isinstance(div_value, bool) or not isinstance(div_value, (int, float)):
        raise TypeError(f"div_value: expected a number, got {type(div_value).__name__}")
    if not 1.0 <= div_value < np.inf:
        raise ValueError(
            f"div_value: expected a finite number of at least 1, got {div_value}; 1 leaves every "
            "cluster its full width"
        )
    check_count("min_width", min_width)


def _check_share(top_share: Any) -> None:
    if isinstance(top_share, bool) or not isinstance(top_share, (int, float)):
        raise TypeError(f"top_share: expected a number, got {type(top_share).__name__}")
    if not 0.0 <= top_share <= 1.0:
        raise ValueError(f"top_share: expected a number from 0 to 1, got {top_share}")


def _checked_cost(cost: Any) -> MatrixCost:
    if isinstance(cost, MatrixCost):
        return cost
    if isinstance(cost, str) and cost in COSTS:
        return COSTS[cost]
    raise ValueError(f"cost: expected one of {tuple(COSTS)} or a MatrixCost, got {cost!r}")
