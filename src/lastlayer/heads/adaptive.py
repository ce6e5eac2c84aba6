"""The adaptive softmax: frequent classes at the top, rare ones in clusters of fewer numbers."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, ParameterList
from torch.nn.functional import linear

from lastlayer.heads._adaptive_layout import adaptive_layout
from lastlayer.heads._adaptive_loss import adaptive_loss
from lastlayer.heads._adaptive_sample import draw_by_cluster
from lastlayer.heads._adaptive_search import best_classes, chosen_log_prob
from lastlayer.heads._adaptive_smoothing import spread_loss
from lastlayer.heads._checks import check_count, check_generator, check_hidden, check_target
from lastlayer.heads._cutoffs import check_widths, cutoffs_from_counts, tail_widths
from lastlayer.heads._ranked import RankedHead
from lastlayer.heads._sampling import check_drawn
from lastlayer.heads._scores import wide_scores
from lastlayer.heads.adaptive_embedding import AdaptiveEmbedding
from lastlayer.heads.base import TopK

__all__ = ["AdaptiveSoftmax", "cutoffs_from_counts"]


class AdaptiveSoftmax(RankedHead):
    r"""A softmax over frequent classes and clusters of rare ones, and a small one in each cluster.

    .. math:: p_c = \mathrm{softmax}(W_0 h)_c \quad\text{or}\quad
              p_c = \mathrm{softmax}(W_0 h)_i \; \mathrm{softmax}(W_i P_i h)_c

    for a class at the top, or one in cluster i. The projection :math:`P_i` leaves
    ``in_features / div_value ** i`` numbers, but never less than ``min_width``.

    Choose it where classes are as uneven as words are. A row touches the top, which is small,
    and the cluster of its target; rare classes get fewer parameters.

    Cost: a training step three products of rows × in_features × top, and three of the rows of
    each cluster × its width × its classes, which are few rows for many classes. All clusters have
    a gradient in every step, of zeros where no row asked for them, so that DDP has nothing to
    miss. With label smoothing every row needs every cluster: a step then costs as much as all
    small softmaxes on all rows.

    On a GPU the host waits once a step, for the sizes of all clusters together; so it does inside
    ``torch.compile``. Products of segments with offsets on the device (``torch._grouped_mm``)
    would need clusters of one size and one width, which are what makes this head fast; and to give
    all rows to every cluster would multiply its work. Only while a CUDA graph is captured is that
    done, and nothing waits.

    ``topk`` opens a cluster only for rows in which one of its classes may be as probable as the
    k-th best so far. ``sample`` draws a cluster first and opens only that. ``embedding`` gives an
    input layer on the same parameters.

    Args:
        in_features: how many numbers a hidden state has.
        counts: how often each class occurs, ``(n_classes,)``. Classes are then in any order, and
            cutoffs are chosen by :func:`cutoffs_from_counts` where none are given, for the
            device that the head is made on.
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
        n_classes, starts, order = adaptive_layout(
            in_features, counts, cutoffs, n_classes, order, div_value, min_width, _cost_on(device)
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
        # The first and the last place of each cluster.
        self._clusters = self._groups[1:]
        self._n_top = self._groups[0][1]
        widths = tail_widths(in_features, len(starts), div_value, min_width)

        def empty(*shape: int) -> Parameter:
            return Parameter(torch.empty(*shape, device=device, dtype=dtype))

        n_columns = self._n_top + len(starts)
        self.head_weight = empty(n_columns, in_features)
        self.register_parameter("head_bias", empty(n_columns) if head_bias else None)
        self.projections = ParameterList([empty(width, in_features) for width in widths])
        self.tails = ParameterList(
            [empty(b - a, width) for (a, b), width in zip(self._clusters, widths, strict=True)]
        )
        self.register_buffer("cutoffs", torch.tensor(starts, dtype=torch.int64, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh numbers, distributed as those of ``nn.Linear``.

        A head that was made on the meta device is whole after ``to_empty`` and this.
        """
        self._fill_order()
        if not self.cutoffs.is_meta:
            self.cutoffs.copy_(torch.tensor([start for start, _ in self._clusters]))
        for weight in (self.head_weight, *self.projections, *self.tails):
            bound = 1.0 / math.sqrt(weight.shape[1])
            torch.nn.init.uniform_(weight, -bound, bound)
        if self.head_bias is not None:
            bound = 1.0 / math.sqrt(self.in_features)
            torch.nn.init.uniform_(self.head_bias, -bound, bound)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Minus the log-probability of the targets, smoothed where asked for."""
        check_hidden(self, hidden)
        target = check_target(self, hidden, target)
        rows, place = self._operand(hidden), self._target_places(target.reshape(-1)).contiguous()
        counts = None if self.ignore_index is None else place >= 0
        top = self.head_weight, self.head_bias
        clusters = list(zip(self.projections, self.tails, strict=True))
        how: dict[str, Any] = {"chunk_rows": self.chunk_rows, "reduction": self.reduction}
        smoothing = self.label_smoothing
        loss = adaptive_loss(rows, place, counts, top, clusters, factor=1.0 - smoothing, **how)
        if smoothing:
            loss = loss + spread_loss(rows, counts, top, clusters, factor=smoothing, **how)
        return loss.reshape(target.shape) if self.reduction == "none" else loss

    def embedding(self) -> AdaptiveEmbedding:
        """An input layer whose vectors are the class vectors of this head (tied embeddings).

        It has no parameters of its own; see :class:`AdaptiveEmbedding`.
        """
        return AdaptiveEmbedding(self)

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
        if chosen is not None:
            return chosen_log_prob(self, rows, self._places_of(chosen).contiguous())
        top, n = self._top_log_prob(rows), self._n_top
        inside = [
            top[:, n + i : n + i + 1] + self._inside_log_prob(i, rows)
            for i in range(len(self._clusters))
        ]
        return self._by_class(torch.cat([top[:, :n], *inside], -1))

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
            values, classes = best_classes(self, rows, k)
        shape = *hidden.shape[:-1], k
        return TopK(values.reshape(shape), classes.reshape(shape))

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
        with torch.autocast(hidden.device.type, enabled=False):
            classes = draw_by_cluster(self, rows, n_samples, generator)
        classes = classes.reshape(*hidden.shape[:-1], n_samples)
        check_drawn(classes)
        return classes

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "cutoffs": [start for start, _ in self._clusters],
            "div_value": self.div_value,
            "min_width": self.min_width,
            "head_bias": self.head_bias is not None,
        }


def _cost_on(device: torch.device | str | None) -> str:
    """Which of the costs suits a head on this device."""
    kind = torch.device(torch.get_default_device() if device is None else device).type
    return "cuda" if kind == "cuda" else "cpu"
