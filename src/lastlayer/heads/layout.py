"""Groups of classes by frequency: the base class of heads with groups, and how to choose groups."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, combinations_with_replacement, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._checks import (
    as_counts,
    as_permutation,
    check_choice,
    check_chunk,
    check_int,
    check_real,
)
from lastlayer._torch import as_numpy
from lastlayer.fused.cross_entropy import cross_entropy_numbers
from lastlayer.heads.base import ScoredHead

Reals = NDArray[np.float64]
Integers = NDArray[np.int64]
# Above this many classes only some places are candidates for a cutoff; they are 4 % apart.
_EVERY_PLACE, _RATIO = 256, 1.04
# Default batch size per step: a GPU needs many rows.
_ROWS, _CUDA_ROWS = 256, 8192
VARIANTS = ("slices", "projections")
_MOST_BANDS = 4
# Band widths are multiples of in_features / _PARTS; bands end at one of about _PLACES places.
_PARTS, _PLACES = 16, 40


class RankedHead(ScoredHead):
    """Base class of heads that order classes by *place*; a group of classes is a range of places.

    ``order`` has the class at each place and ``places`` the place of each class. Both are None if
    class c is at place c. Within a group classes are sorted by id.
    """

    order: Tensor | None
    places: Tensor | None

    def __init__(
        self,
        in_features: int,
        ends: Sequence[int],
        order: Any,
        *,
        label_smoothing: float,
        chunk_rows: int | str,
        device: torch.device | str | None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, ends[-1], **options)
        check_chunk(chunk_rows)
        cross_entropy_numbers(label_smoothing, 0.0, None, 1.0)
        self.chunk_rows, self.label_smoothing = chunk_rows, label_smoothing
        # Start and end of each group, in places.
        self._groups = tuple(pairwise([0, *ends]))
        by_place = None
        if order is not None:
            given = as_permutation("order", order, self.n_classes)
            given = np.concatenate([np.sort(given[a:b]) for a, b in self._groups])
            if (given != np.arange(self.n_classes)).any():
                by_place = torch.from_numpy(given)
        device = torch.get_default_device() if device is None else torch.device(device)
        self.register_buffer("order", None if by_place is None else by_place.to(device))
        self.register_buffer("places", None if by_place is None else by_place.argsort().to(device))
        # On the meta device buffers hold no values; keep the order until they are filled.
        self._order_to_come = by_place if device.type == "meta" else None

    def _fresh_buffer(self, name: str) -> Tensor | None:
        order = self._order_to_come
        if order is None or name not in ("order", "places"):
            return super()._fresh_buffer(name)
        return order if name == "order" else order.argsort()

    def _places_of(self, classes: Tensor) -> Tensor:
        return classes if self.places is None else self.places[classes]

    def _classes_at(self, places: Tensor) -> Tensor:
        return places if self.order is None else self.order[places]

    def _by_class(self, by_place: Tensor) -> Tensor:
        """Columns by place to columns by class."""
        return by_place if self.places is None else by_place.index_select(-1, self.places)

    def _scores_from_counts(self, counts: Any) -> Tensor:
        logs = super()._scores_from_counts(counts)
        return logs if self.order is None else logs[self.order.cpu()]

    def _check_state(self) -> None:
        self._check_order(self.order, self.places)

    def _check_order(self, order: Any, places: Any) -> None:
        for name, each in (("order", order), ("places", places)):
            # torch reports a wrong shape itself.
            if type(each) is not Tensor or each.is_meta or each.shape != (self.n_classes,):
                return
            if each.dtype != torch.int64:
                raise ValueError(f"{name}: expected torch.int64, got {each.dtype}")
        by_place = as_permutation("order", order, self.n_classes)
        if (as_numpy(places.cpu()) != by_place.argsort()).any():
            raise ValueError(
                "places: expected the inverse permutation of order, got another one; load order "
                "and places from the same head"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self.order is not None:
            self._check_order(*(state_dict.get(prefix + name) for name in ("order", "places")))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def config(self) -> dict[str, Any]:
        order = self.order
        if order is not None and self._is_unfilled("order"):
            order = self._order_to_come
        return {**super().config(), "order": order}

    def extra_repr(self) -> str:
        sizes = {"in_features": self.in_features, "n_classes": self.n_classes}
        return self._shown(sizes | self.config())

    def _saved_config(self, config: dict[str, Any]) -> dict[str, Any]:
        # The order is saved as part of the state.
        return {**config, "order": config["order"] is not None}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        if not isinstance(config["order"], bool):
            return cls(**config)
        head = cls(**{**config, "order": None})
        if config["order"]:
            head.order, head.places = (torch.arange(head.n_classes) for _ in range(2))
        return head


class MatrixCost(NamedTuple):
    r"""Cost model of a training step with several small softmaxes, in microseconds.

    Each softmax costs a constant time c per call, plus

    .. math:: g(k, B, d) = \alpha\,k d + \beta\,k B + \lambda\,k B d

    for k classes, B rows and d features. The call and the product terms are those of Grave et
    al. The other two matter if there are few rows or few features: the gradient of all weights is
    written for any B, and all scores are exponentiated for any d.

    If ``overlap`` is true, the host launches calls while the device computes, and a step takes the
    longer of the two times; otherwise their sum.
    """

    call: float
    weight: float
    score: float
    product: float
    overlap: bool = False

    def work(self, k: Any, rows: Any, width: float) -> Any:
        """Computes g, for numbers or arrays that broadcast."""
        return k * (self.weight * width + rows * (self.score + self.product * width))

    def step(self, softmaxes: int, work: float) -> float:
        """Time of a step with this many softmaxes and this much work in total."""
        calls = self.call * softmaxes
        return max(calls, work) if self.overlap else calls + work


COSTS = {
    # Fitted to steps of `linear_cross_entropy` in float32 on one core of a server CPU. Most are
    # within 15 %; beyond the cache the actual time is up to twice as long. Only ratios matter.
    "cpu": MatrixCost(call=800.0, weight=1.75e-3, score=2.6e-3, product=3.7e-5),
    # For an H200 in bfloat16. A small softmax mostly takes the host time of its launches, about
    # 1.2 ms. The other terms follow from rates: a weight that is read twice and a gradient that is
    # written, 6 bytes at 4.2 TB/s; two exponentials per score; six operations per product at
    # 600 TFLOP/s.
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
    """Chooses the cutoffs that make an adaptive softmax fastest, for classes by falling frequency.

    A step costs the top-level softmax, with one more column per cluster, on all rows; and each
    cluster, with its projection, on the rows whose target is expected in it. All ways to cut the
    classes into a top level and up to ``max_clusters`` clusters are compared by dynamic
    programming: exactly for up to 256 classes, and above that among places that are 4 % apart.

    The fastest layout alone would leave a few dozen classes at the top level, and narrow vectors
    for all others. So the top level gets at least ``top_share`` of all occurrences, and no cluster
    has fewer classes than its vectors have features.

    Args:
        counts: number of occurrences of each class, in any order.
        in_features: size of the hidden state.
        div_value: factor by which each cluster's vectors are narrower than the previous one's.
        min_width: minimum width of a projection.
        rows: batch size of a step; by default 8,192 if ``cost`` is "cuda", otherwise 256.
        max_clusters: maximum number of clusters.
        top_share: minimum share of all occurrences at the top level, from 0 to 1.
        cost: cost model of a small softmax: "cpu", "cuda", or a :class:`MatrixCost` of your
            machine.

    Returns:
        First place of each cluster; empty if a plain softmax is fastest.

    Example:
        >>> zipf = [1 / rank for rank in range(1, 50_001)]
        >>> cutoffs = cutoffs_from_counts(zipf, 256)
        >>> 1 <= len(cutoffs) <= 4 and cutoffs == sorted(cutoffs)
        True
        >>> cutoffs_from_counts([1] * 100, 256)
        []
    """
    weights = as_counts(counts)
    in_features = check_int("in_features", in_features)
    check_widths(div_value, min_width)
    rows = check_int("rows", (_CUDA_ROWS if cost == "cuda" else _ROWS) if rows is None else rows)
    max_clusters = check_int("max_clusters", max_clusters)
    check_real("top_share", top_share, "a number from 0 to 1", lambda x: 0.0 <= x <= 1.0)
    if isinstance(cost, str) and cost in COSTS:
        cost = COSTS[cost]
    if not isinstance(cost, MatrixCost):
        raise ValueError(f"cost: expected one of {tuple(COSTS)} or a MatrixCost, got {cost!r}")
    n = len(weights)
    places = np.arange(n + 1)
    if n > _EVERY_PLACE:
        steps = np.arange(int(np.log(n) / np.log(_RATIO)) + 1)
        places = np.unique(np.concatenate([[0], (_RATIO**steps).astype(np.int64), [n]]))
    share = _shares_before(weights)[places]
    widths = tail_widths(in_features, max_clusters, div_value, min_width)
    sizes = (places[None, :] - places[:, None]).astype(np.float64)
    expected = rows * (share[None, :] - share[:, None])
    # At least one class at the top level, and its share; rounding may leave the last sum below 1.
    allowed = (places > 0) & ((share >= top_share) | (places == places[-1]))
    best: tuple[float, list[int]] = (math.inf, [])
    for clusters in range(min(max_clusters, n - 1) + 1):
        # Least cost from each place on; the last cluster must end at the last place.
        rest = np.where(places == places[-1], 0.0, np.inf)
        following = []
        for width in reversed(widths[:clusters]):
            projection = cost.product * expected * width * in_features
            step = cost.work(sizes, expected, width) + projection
            step = np.where(sizes >= width, step, np.inf) + rest[None, :]
            following.append(step.argmin(1))
            rest = step.min(1)
        total = cost.work(places + float(clusters), rows, in_features) + rest
        total = np.where(allowed, total, np.inf)
        place = int(total.argmin())
        least, cutoffs = cost.step(1 + clusters, float(total[place])), []
        for nearest in reversed(following):
            cutoffs.append(int(places[place]))
            place = int(nearest[place])
        if least < best[0]:
            best = least, cutoffs
    return best[1]


def _shares_before(weights: Reals) -> Reals:
    """Share of all occurrences of the 0, 1, 2, … most frequent classes."""
    summed: Reals = np.concatenate([[0.0], np.cumsum(np.sort(weights)[::-1])]) / weights.sum()
    return summed


def tail_widths(in_features: int, clusters: int, div_value: float, min_width: int) -> list[int]:
    """``in_features / div_value ** i``, i = 1, 2, …; at least ``min(min_width, in_features)``."""
    widths = []
    for i in range(1, clusters + 1):
        try:
            narrowed = int(in_features // div_value**i)
        except OverflowError:  # a power beyond all numbers
            narrowed = 0
        widths.append(max(narrowed, min(min_width, in_features)))
    return widths


def check_widths(div_value: Any, min_width: Any) -> None:
    """Checks a divisor of at least 1 and a width of at least 1."""
    expected = "a finite number of at least 1 (1 keeps every cluster at full width)"
    check_real("div_value", div_value, expected, lambda x: 1.0 <= x < math.inf)
    check_int("min_width", min_width)


def check_cutoffs(cutoffs: Any, n_classes: int) -> list[int]:
    """Checks strictly increasing places from 1 to n_classes - 1."""
    expected = f"strictly increasing places from 1 to {n_classes - 1}, below n_classes"
    if isinstance(cutoffs, (str, bytes)) or not hasattr(cutoffs, "__iter__"):
        raise TypeError(f"cutoffs: expected a list of {expected}, got {type(cutoffs).__name__}")
    places: list[int] = []
    for i, each in enumerate(cutoffs):
        place = check_int(f"cutoffs: position {i}", each, least=None)
        if not max(places, default=0) < place < n_classes:
            after = f" after {places[-1]}" if places else ""
            raise ValueError(f"cutoffs: expected {expected}, got {place} at position {i}{after}")
        places.append(place)
    return places


def bands_from_counts(
    counts: Any, in_features: int, n_parameters: int, *, variant: str = "slices"
) -> list[tuple[int, int]]:
    r"""Chooses bands for a parameter budget, for classes by falling frequency.

    Of all layouts that fit the budget, it picks the one with the largest mean log width over
    occurrences, :math:`\sum_b p_b \log d_b`. Doubling the width is then worth the same for a class
    of any width. Candidates are one to four bands of non-increasing width, which end at about 40
    places on a geometric scale. In "slices" widths are multiples of a sixteenth of in_features and
    sum to in_features; in "projections" they are in_features, half of it, a quarter, and so on
    down to 8.

    Args:
        counts: number of occurrences of each class, in any order.
        in_features: size of the hidden state.
        n_parameters: maximum number of parameters of the class vectors, including the projections
            and without biases.
        variant: as in :class:`DifferentiatedSoftmax`.

    Returns:
        ``[(classes, width), …]``, for the classes in order of falling counts: unless your class ids
        are sorted that way, pass ``order=counts.argsort(descending=True)`` to the head.

    Example:
        >>> zipf = [1 / rank for rank in range(1, 10_001)]
        >>> bands = bands_from_counts(zipf, 128, 10_000 * 32)
        >>> sum(width for _, width in bands), sum(classes for classes, _ in bands)
        (128, 10000)
        >>> sum(classes * width for classes, width in bands) <= 10_000 * 32
        True
    """
    weights = as_counts(counts)
    in_features = check_int("in_features", in_features)
    n_parameters = check_int("n_parameters", n_parameters)
    check_choice("variant", variant, VARIANTS)
    n, share = len(weights), _shares_before(weights)
    best: tuple[float, list[tuple[int, int]]] | None = None
    fewest = math.inf
    for bands in range(1, min(_MOST_BANDS, n) + 1):
        ends = _ends(n, bands)
        sizes, shares = np.diff(ends, axis=1), np.diff(share[ends], axis=1)
        for widths in _widths(in_features, bands, variant):
            projections = in_features * sum(widths) if variant == "projections" else 0
            parameters = sizes @ np.array(widths) + projections
            fewest = min(fewest, int(parameters.min()))
            worth = np.where(parameters <= n_parameters, shares @ np.log(widths), -np.inf)
            i = int(worth.argmax())
            if worth[i] > -np.inf and (best is None or worth[i] > best[0]):
                best = float(worth[i]), list(zip(sizes[i].tolist(), widths, strict=True))
    if best is None:
        raise ValueError(
            f"n_parameters: expected at least {fewest} for {n} classes and "
            f"in_features={in_features}, got {n_parameters}; raise the budget"
        )
    return best[1]


def _ends(n: int, bands: int) -> Integers:
    """All layouts ``(layouts, bands + 1)``: the ends of the bands, from 0 to n."""
    inner = np.unique(np.geomspace(1, n, _PLACES).astype(np.int64))
    layouts = [(0, *cuts, n) for cuts in combinations(inner[inner < n].tolist(), bands - 1)]
    return np.array(layouts, dtype=np.int64).reshape(-1, bands + 1)


def _widths(in_features: int, bands: int, variant: str) -> Iterator[Sequence[int]]:
    """All non-increasing widths of this many bands."""
    if variant == "projections":
        halves = [in_features]
        while halves[-1] // 2 >= 8:
            halves.append(halves[-1] // 2)
        yield from combinations(halves, bands)
        return
    unit = max(1, in_features // _PARTS)
    total = in_features // unit
    for parts in combinations_with_replacement(range(total, 0, -1), bands):
        if sum(parts) == total:
            # The first band, of the most frequent classes, gets the remainder.
            yield [parts[0] * unit + in_features % unit, *(part * unit for part in parts[1:])]
