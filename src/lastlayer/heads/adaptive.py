"""The adaptive softmax: frequent classes at the top, rare ones in clusters of fewer numbers."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter, ParameterList
from torch.nn.functional import linear

from lastlayer.fused import linear_cross_entropy
from lastlayer.fused._sparse_rows import can_wait
from lastlayer.heads._checks import check_count, check_generator, check_hidden, check_target
from lastlayer.heads._cutoffs import (
    check_cutoffs,
    check_widths,
    cutoffs_from_counts,
    tail_widths,
)
from lastlayer.heads._ranked import RankedHead, wide_dtype
from lastlayer.heads._sampling import check_drawn, draw_classes
from lastlayer.heads._scores import wide_scores
from lastlayer.heads._shares import Share, share_out
from lastlayer.heads._top import top_classes
from lastlayer.heads.base import TopK
from lastlayer.trees._checks import as_counts

__all__ = ["AdaptiveSoftmax", "cutoffs_from_counts"]

# From so many rows on it pays to look at all vectors of a cluster before it is opened.
_ROWS_WORTH_A_BOUND = 8


class AdaptiveSoftmax(RankedHead):
    r"""A softmax over frequent classes and clusters of rare ones, and a small one in each cluster.

    .. math:: p_c = \mathrm{softmax}(W_0 h)_c \quad\text{or}\quad
              p_c = \mathrm{softmax}(W_0 h)_i \; \mathrm{softmax}(W_i P_i h)_c

    for a class at the top, or one in cluster i. The projection :math:`P_i` leaves
    ``in_features / div_value ** i`` numbers, but never less than ``min_width``.

    Choose it where classes are as uneven as words are. A row touches the top, which is small,
    and the cluster of its target; rare classes get fewer parameters.

    Cost: a training step three products of rows × in_features × top, and three of the rows of
    each cluster × its width × its classes, which are few rows for many classes. On a GPU the host
    waits once a step, for the sizes of all clusters together. Inside ``torch.compile`` each
    cluster finds its rows on its own. All clusters have a gradient in every step, of zeros where
    no row asked for them, so that DDP has nothing to miss. With label smoothing every row needs
    every cluster: a step then costs as much as all small softmaxes on all rows.

    ``topk`` opens a cluster only for rows in which one of its classes may be as probable as the
    k-th best so far. ``sample`` draws a cluster first and opens only that.

    Args:
        in_features: how many numbers a hidden state has.
        counts: how often each class occurs, ``(n_classes,)``. Classes are then in any order, and
            cutoffs are chosen by :func:`cutoffs_from_counts` where none are given.
        cutoffs: where each cluster begins, in classes by falling frequency: ``[2000, 10000]``
            leaves 2000 classes at the top and makes two clusters. None at all, ``[]``, is a plain
            softmax.
        n_classes: how many classes there are; known from counts.
        order: all classes, the most frequent first; from counts, or else 0, 1, 2, …. It decides
            which cluster a class is in; inside a cluster classes stand by their ids.
        div_value: by how much each cluster is narrower than the one before; at least 1.
        min_width: the least width of a projection.
        head_bias: whether the top has biases.
        label_smoothing: how much of the target the loss spreads evenly over all classes.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".
        device: where the parameters are made.
        dtype: of the parameters.

    Example:
        >>> import torch
        >>> head = AdaptiveSoftmax(64, cutoffs=[100, 1000], n_classes=5000)
        >>> hidden, target = torch.randn(8, 64), torch.randint(5000, (8,))
        >>> head(hidden, target).backward()
        >>> [tuple(each.shape) for each in head.tails]
        [(900, 16), (4000, 8)]

    Reference:
        Grave, Joulin, Cissé, Grangier and Jégou, Efficient softmax approximation for GPUs, ICML
        2017, arXiv:1609.04309.
    """

    cutoffs: Tensor
    head_weight: Parameter
    head_bias: Parameter | None

    def __init__(
        self,
        in_features: int,
        *,
        counts: Any = None,
        cutoffs: Sequence[int] | None = None,
        n_classes: int | None = None,
        order: Any = None,
        div_value: float = 4.0,
        min_width: int = 8,
        head_bias: bool = False,
        label_smoothing: float = 0.0,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        chunk_rows: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count("in_features", in_features)
        check_widths(div_value, min_width)
        n_classes, starts, order = _layout(
            in_features, counts, cutoffs, n_classes, order, div_value, min_width
        )
        super().__init__(
            in_features,
            [*starts, n_classes],
            order,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            reduction=reduction,
            chunk_rows=chunk_rows,
            device=device,
        )
        self.div_value, self.min_width = div_value, min_width
        self._starts = starts
        self._n_top = self._groups[0][1]
        self._sizes = [last - first for first, last in self._groups[1:]]
        widths = tail_widths(in_features, len(starts), div_value, min_width)

        def empty(*shape: int) -> Parameter:
            return Parameter(torch.empty(*shape, device=device, dtype=dtype))

        n_columns = self._n_top + len(starts)
        self.head_weight = empty(n_columns, in_features)
        self.register_parameter("head_bias", empty(n_columns) if head_bias else None)
        self.projections = ParameterList([empty(width, in_features) for width in widths])
        self.tails = ParameterList(
            [empty(size, width) for size, width in zip(self._sizes, widths, strict=True)]
        )
        self.register_buffer("cutoffs", torch.tensor(starts, dtype=torch.int64, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh numbers, distributed as those of ``nn.Linear``."""
        for weight in (self.head_weight, *self.projections, *self.tails):
            bound = 1.0 / math.sqrt(weight.shape[1])
            torch.nn.init.uniform_(weight, -bound, bound)
        if self.head_bias is not None:
            bound = 1.0 / math.sqrt(self.in_features)
            torch.nn.init.uniform_(self.head_bias, -bound, bound)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Minus the log-probability of the targets, smoothed where asked for."""
        check_hidden(self, hidden)
        check_target(self, hidden, target)
        rows = hidden.reshape(-1, self.in_features)
        place = self._target_places(target.reshape(-1))
        shares = share_out(rows, place, self.cutoffs, self._starts, self.reduction == "mean")
        keep = 1.0 - self.label_smoothing
        top = self._loss(0, shares.top, keep)
        below = [self._loss(i, share, keep) for i, share in enumerate(shares.tails, 1)]
        if self.label_smoothing:
            top = top + self._spread(shares.top)
        if self.reduction != "none":
            return torch.stack([top, *below]).sum()
        return shares.together(top, below).reshape(target.shape)

    def _loss(self, softmax: int, share: Share, factor: float, **options: Any) -> Tensor:
        """Of one of the softmaxes, 0 being the top; one number, or one a row."""
        hidden, target, weight, ignore_index = share
        bias, vectors = self.head_bias, self.head_weight
        if softmax > 0:
            hidden = linear(hidden, self.projections[softmax - 1])
            bias, vectors = None, self.tails[softmax - 1]
        return linear_cross_entropy(
            hidden,
            vectors,
            target,
            bias,
            ignore_index=ignore_index,
            reduction="none" if self.reduction == "none" else "sum",
            row_weight=weight if factor == 1.0 else weight * factor,
            chunk_rows=self.chunk_rows,
            **options,
        )

    def _spread(self, share: Share) -> Tensor:
        """The part of the loss in which every class is a target: all clusters on all rows."""
        hidden, target = share.hidden, share.target
        anywhere = share._replace(target=torch.where(target < 0, target, 0))
        # The column of a cluster counts once for each of its classes.
        times = hidden.new_ones(self.head_weight.shape[0], dtype=wide_dtype(hidden))
        for i, size in enumerate(self._sizes):
            times[self._n_top + i] = size
        share_of_one = self.label_smoothing / self.n_classes
        total = self._loss(
            0, anywhere, share_of_one * len(times), label_smoothing=1.0, class_weight=times
        )
        for i, size in enumerate(self._sizes, 1):
            total = total + self._loss(i, anywhere, share_of_one * size, label_smoothing=1.0)
        return total

    def _top_log_prob(self, rows: Tensor) -> Tensor:
        """Of the classes at the top, and of each cluster."""
        dtype = rows.dtype
        bias = None if self.head_bias is None else self.head_bias.to(dtype)
        return torch.log_softmax(wide_scores(rows, self.head_weight.to(dtype), bias), -1)

    def _inside_log_prob(self, cluster: int, rows: Tensor) -> Tensor:
        """Of the classes of a cluster, given the cluster."""
        projection, vectors = self.projections[cluster], self.tails[cluster]
        narrow = linear(rows, projection.to(rows.dtype))
        return torch.log_softmax(wide_scores(narrow, vectors.to(rows.dtype), None), -1)

    def _rows_log_prob(self, rows: Tensor, chosen: Tensor | None = None) -> Tensor:
        top = self._top_log_prob(rows)
        n = self._n_top
        if chosen is None:
            parts = [top[:, :n]] + [
                top[:, n + i : n + i + 1] + self._inside_log_prob(i, rows)
                for i in range(len(self._sizes))
            ]
            return self._by_class(torch.cat(parts, -1))
        place = self._places_of(chosen).contiguous()
        cluster = torch.bucketize(place, self.cutoffs, right=True) - 1
        made = top.gather(-1, torch.where(cluster < 0, place, n + cluster))
        for i, (start, size) in enumerate(zip(self._starts, self._sizes, strict=True)):
            among = cluster == i
            asked = _rows_where(among.any(-1))
            inside = self._inside_log_prob(i, rows[asked])
            at_place = inside.gather(-1, (place[asked] - start).clamp(0, size - 1))
            made = made.index_add(0, asked, torch.where(among[asked], at_place, 0.0))
        return made

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> TopK:
        """The k most probable classes, exactly as a sort of all log-probabilities has them.

        A cluster is opened only for rows where it may hold one of them: no class in it is more
        probable than all of it, and, where its vectors are alike, none is much more probable than
        the others.

        Args:
            hidden: ``(*batch, in_features)``.
            k: from 1 to ``n_classes``.
        """
        check_hidden(self, hidden)
        check_count("k", k, most=self.n_classes)
        rows = self._operand(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            values, classes, clusters = self._best_at_the_top(rows, k)
            for i, size in enumerate(self._sizes):
                kth = values[:, k - 1] if values.shape[1] >= k else clusters.new_tensor(-torch.inf)
                opened = self._opened(i, rows, clusters[:, i], kth.expand(len(rows)))
                values, classes = _padded(values, classes, min(k, values.shape[1] + size))
                for part in self._chunks(rows[opened], size):
                    some = opened[part]
                    inside = self._inside_log_prob(i, rows[some]) + clusters[some, i : i + 1]
                    best, columns = top_classes(inside, min(k, size))
                    found = self._classes_at(columns + self._starts[i])
                    values[some], classes[some] = _merged(
                        values[some], classes[some], best, found, values.shape[1]
                    )
        shape = *hidden.shape[:-1], k
        return TopK(values.reshape(shape), classes.reshape(shape))

    def _opened(self, cluster: int, rows: Tensor, log_prob: Tensor, kth: Tensor) -> Tensor:
        """The rows in which a class of the cluster may be better than the k-th best so far."""
        # Not `>=`: a row of NaN is opened too.
        opened = _rows_where(~(log_prob < kth))
        if len(opened) < _ROWS_WORTH_A_BOUND:
            return opened
        most = log_prob[opened] + self._ceiling(cluster, rows[opened])
        return opened[_rows_where(~(most < kth[opened]))]

    def _ceiling(self, cluster: int, rows: Tensor) -> Tensor:
        r"""What no log-probability of a class, given the cluster, exceeds.

        The log of the normaliser is at least the mean score plus log n, and no score is further
        above the mean than :math:`\|z\| \max_j \|w_j - \bar w\|`.
        """
        projection, vectors = self.projections[cluster], self.tails[cluster]
        narrow = linear(rows, projection.to(rows.dtype)).to(wide_dtype(rows))
        vectors = vectors.to(rows.dtype).to(narrow.dtype)
        mean = vectors.mean(0)
        squares = torch.linalg.vector_norm(vectors, dim=1).square()
        largest = squares.amax()
        apart = (squares - 2 * (vectors @ mean) + mean @ mean).amax().clamp(min=0)
        # Rounding is far below what is added for it.
        reach = (apart + 1e-5 * largest).sqrt() + 1e-4 * largest.sqrt()
        size = torch.linalg.vector_norm(narrow, dim=1)
        ceiling: Tensor = size * reach + (1e-4 - math.log(len(vectors)))
        return ceiling.clamp(max=0)

    def _best_at_the_top(self, rows: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Values and classes of the best at the top, and the log-probabilities of clusters."""
        best = []
        for part in self._chunks(rows, self.head_weight.shape[0]):
            top = self._top_log_prob(rows[part])
            values, columns = top_classes(top[:, : self._n_top], min(k, self._n_top))
            best.append((values, self._classes_at(columns), top[:, self._n_top :]))
        values, classes, clusters = (torch.cat(each) for each in zip(*best, strict=True))
        return values, classes, clusters

    @torch.no_grad()
    def sample(
        self, hidden: Tensor, n_samples: int = 1, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Independent draws from the probabilities of each row, with replacement.

        First a class at the top or a cluster, then a class in the cluster.

        Args:
            hidden: ``(*batch, in_features)``.
            n_samples: draws a row.
            generator: where chance comes from, on the device of hidden; torch's own otherwise.

        Returns:
            Class ids ``(*batch, n_samples)``, int64. A row without probabilities, as a NaN
            makes it, is an error on a CPU and inside ``lastlayer.debug()``, and else all -1.
        """
        check_hidden(self, hidden)
        check_count("n_samples", n_samples)
        check_generator(generator, hidden)
        rows = self._operand(hidden)
        # All chance at once: what is drawn does not depend on the size of the chunks.
        first, second = torch.rand(
            2, rows.shape[0], n_samples, dtype=torch.float64, device=rows.device,
            generator=generator,
        )  # fmt: skip
        with torch.autocast(hidden.device.type, enabled=False):
            drawn = torch.cat(
                [
                    draw_classes(self._top_log_prob(rows[part]), first[part])
                    for part in self._chunks(rows, self.head_weight.shape[0])
                ]
            )
            place = drawn.clone()
            for i, some in self._rows_with(drawn, rows):
                inside = draw_classes(self._inside_log_prob(i, rows[some]), second[some])
                found = torch.where(inside < 0, -1, inside + self._starts[i])
                place[some] = torch.where(drawn[some] == self._n_top + i, found, place[some])
        classes = torch.where(place < 0, -1, self._classes_at(place.clamp(min=0)))
        classes = classes.reshape(*hidden.shape[:-1], n_samples)
        check_drawn(classes)
        return classes

    def _rows_with(self, drawn: Tensor, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each cluster with chunks of the rows that have drawn it."""
        for i, size in enumerate(self._sizes):
            asked = _rows_where((drawn == self._n_top + i).any(-1))
            for part in self._chunks(rows[asked], size):
                yield i, asked[part]

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "cutoffs": list(self._starts),
            "div_value": self.div_value,
            "min_width": self.min_width,
            "head_bias": self.head_bias is not None,
        }


def _layout(
    in_features: int,
    counts: Any,
    cutoffs: Sequence[int] | None,
    n_classes: int | None,
    order: Any,
    div_value: float,
    min_width: int,
) -> tuple[int, list[int], Any]:
    """The number of classes, the cutoffs and the order, from what of it was given."""
    if counts is None:
        if n_classes is None:
            raise ValueError(
                "n_classes: expected how many classes there are, got None; give n_classes with "
                "cutoffs, or counts, one number a class"
            )
        if cutoffs is None:
            raise ValueError(
                "cutoffs: expected where each cluster begins, got None; give cutoffs such as "
                "[2000, 10000], or counts to choose them from"
            )
        check_count("n_classes", n_classes)
        return n_classes, check_cutoffs(cutoffs, n_classes), order
    weights = as_counts(counts, n_classes)
    if order is None:
        order = np.argsort(-weights, kind="stable")
    if cutoffs is None:
        cutoffs = cutoffs_from_counts(
            weights, in_features, div_value=div_value, min_width=min_width
        )
    return len(weights), check_cutoffs(cutoffs, len(weights)), order


def _rows_where(asked: Tensor) -> Tensor:
    """The rows that ask; all of them where the host cannot wait to know."""
    if can_wait(asked):
        return asked.nonzero().squeeze(-1)
    return torch.arange(asked.shape[0], device=asked.device)


def _padded(values: Tensor, classes: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Lists of at least ``width``; what is missing is worse than any class."""
    missing = max(0, width - values.shape[1])
    pad = torch.nn.functional.pad
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
