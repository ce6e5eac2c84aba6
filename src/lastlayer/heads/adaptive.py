"""The adaptive softmax: frequent classes at the top, rare ones in clusters of shorter vectors."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter, ParameterList
from torch.nn.functional import embedding, linear

from lastlayer._checks import as_counts, check_ids, check_int
from lastlayer._torch import accumulation_dtype, in_autocast_dtype, in_dtype, without_autocast
from lastlayer.fused.clusters import CLUSTERS, group_loss
from lastlayer.fused.cross_entropy import linear_cross_entropy
from lastlayer.fused.function import RowScale
from lastlayer.fused.scores import row_chunks, wide_scores
from lastlayer.heads._adaptive_topk import best_classes, rows_where
from lastlayer.heads._ranked import RankedHead
from lastlayer.heads.base import draw_classes, log_softmax
from lastlayer.heads.layout import check_cutoffs, check_widths, cutoffs_from_counts, tail_widths
from lastlayer.heads.recipes import Recipe


class AdaptiveSoftmax(RankedHead):
    r"""A softmax over frequent classes and clusters of rare ones, and a small one in each cluster.

    .. math:: p_c = \mathrm{softmax}(W_0 h)_c \quad\text{or}\quad
              p_c = \mathrm{softmax}(W_0 h)_i \; \mathrm{softmax}(W_i P_i h)_c

    for a class at the top, or one in cluster i. The projection :math:`P_i` leaves
    ``in_features / div_value ** i`` features, but never fewer than ``min_width``.

    Choose it where classes are as uneven as words are. A row touches the top, which is small,
    and the cluster of its target; rare classes get fewer parameters.

    Cost: a training step is three products of rows × in_features × top, and three of the rows of
    each cluster × its width × its classes, which are few rows for many classes. All clusters have
    a gradient in every step, of zeros where they have no rows, as DDP needs it. With label
    smoothing every row needs every cluster: a step then costs as much as all small softmaxes on
    all rows.

    On a GPU the host waits once per step, for the sizes of all clusters together, also inside
    ``torch.compile``. While a CUDA graph is captured nothing waits, and every cluster computes all
    rows.

    ``topk`` opens a cluster only for rows in which one of its classes may be as probable as the
    k-th best so far. ``sample`` draws a cluster first and opens only that.

    Args:
        in_features: size of the hidden state.
        counts: how often each class occurs, ``(n_classes,)``. Classes are then in any order, and
            cutoffs are chosen by :func:`cutoffs_from_counts` where none are given, for the
            device that the head is made on.
        cutoffs: where each cluster begins, in classes by falling frequency: ``[2000, 10000]``
            leaves 2000 classes at the top and makes two clusters. An empty list, ``[]``, is a
            plain softmax.
        n_classes: number of classes; known from counts.
        order: all classes, the most frequent first; from counts, or else 0, 1, 2, …. It decides
            which cluster a class is in; inside a cluster classes are sorted by id.
        div_value: by how much each cluster is narrower than the one before; at least 1.
        min_width: least width of a projection.
        head_bias: whether the top has biases: one per class there, and one per cluster.
        label_smoothing, ignore_index, reduction, chunk_rows, device, dtype: as of
            :class:`FullSoftmax`.

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
    # One for a class at the top or a cluster, one for a class in the cluster.
    _numbers_per_draw = 2

    recipes = (
        Recipe(
            "adaptive",
            "frequent classes first, clusters of rare ones",
            from_data=lambda data, _given: {"counts": data.positive_counts()},
            filled=frozenset({"order"}),
            compared=("adaptive",),
            rank=21,
        ),
    )

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
        in_features = check_int("in_features", in_features)
        check_widths(div_value, min_width)
        if counts is not None:
            weights = as_counts(counts, n_classes)
            n_classes = len(weights)
            order = np.argsort(-weights, kind="stable") if order is None else order
            if cutoffs is None:
                made_on = torch.get_default_device() if device is None else torch.device(device)
                cutoffs = cutoffs_from_counts(
                    weights, in_features, div_value=div_value, min_width=min_width,
                    cost="cuda" if made_on.type == "cuda" else "cpu",
                )  # fmt: skip
        if n_classes is None:
            raise ValueError(
                "n_classes: expected the number of classes, got None; give n_classes with "
                "cutoffs, or counts, one number per class"
            )
        if cutoffs is None:
            raise ValueError(
                "cutoffs: expected where each cluster begins, got None; give cutoffs such as "
                "[2000, 10000], or counts to choose them from"
            )
        starts = check_cutoffs(cutoffs, check_int("n_classes", n_classes))
        super().__init__(
            in_features, [*starts, int(n_classes)], order, label_smoothing=label_smoothing,
            ignore_index=ignore_index, reduction=reduction, chunk_rows=chunk_rows, device=device,
        )  # fmt: skip
        self.div_value, self.min_width = div_value, min_width
        # The first and the last place of each cluster.
        self._clusters, self._starts = self._groups[1:], tuple(starts)
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
        """Fresh parameters, distributed as those of ``nn.Linear``.

        A head that was made on the meta device is whole after ``to_empty`` and this.
        """
        self._fill_order()
        if not self.cutoffs.is_meta:
            self.cutoffs.copy_(torch.tensor(self._starts))
        for weight in (self.head_weight, *self.projections, *self.tails):
            bound = 1.0 / math.sqrt(weight.shape[1])
            torch.nn.init.uniform_(weight, -bound, bound)
        if self.head_bias is not None:
            bound = 1.0 / math.sqrt(self.in_features)
            torch.nn.init.uniform_(self.head_bias, -bound, bound)

    @torch.no_grad()
    def init_bias_from_counts(self, counts: Any) -> None:
        """Start at the frequencies of classes at the top, and of each cluster as a whole.

        Classes inside a cluster have no biases: at the hidden state 0 they are alike.

        Args:
            counts: how often each class occurs, ``(n_classes,)``; a count of 0 counts as a half.
        """
        if self.head_bias is None:
            raise ValueError(
                "init_bias_from_counts: expected a head with biases, got AdaptiveSoftmax with "
                "head_bias=False; make it with head_bias=True"
            )
        logs = self._log_frequencies(counts)
        of_clusters = [logs[a:b].logsumexp(0, keepdim=True) for a, b in self._clusters]
        self.head_bias.copy_(torch.cat([logs[: self._n_top], *of_clusters]))

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Minus the log-probability of the targets, smoothed where asked for."""
        self._check_hidden(hidden)
        target = self._check_target(hidden, target)
        options = self._starts, self.ignore_index, self.chunk_rows
        loss = group_loss(
            CLUSTERS, hidden, target, self.places, self.head_bias, self._weights(), options,
            self.reduction,
        )  # fmt: skip
        if not self.label_smoothing:
            return loss
        spread = self._spread_loss(hidden, target)
        return (1.0 - self.label_smoothing) * loss + self.label_smoothing * spread

    def _weights(self) -> list[Tensor]:
        """That of the top; of each cluster the projection and the class vectors."""
        pairs = zip(self.projections, self.tails, strict=True)
        return [self.head_weight, *(each for pair in pairs for each in pair)]

    def _spread_loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Minus the mean log-probability of all classes, reduced: all clusters on all rows."""
        ids, n = torch.zeros_like(target), target.numel()
        # The column of a cluster counts once for each of its classes.
        times = hidden.new_ones(self.head_weight.shape[0], dtype=accumulation_dtype(hidden.dtype))
        for i, (first, last) in enumerate(self._clusters, self._n_top):
            times[i] = last - first
        counted = None
        if self.ignore_index is not None:
            counts = target != self.ignore_index
            ids, counted = torch.where(counts, ids, -1), counts.reshape(-1).to(times.dtype)
            # A NaN in a row that does not count would reach the gradient of a projection.
            hidden = torch.where(counts.unsqueeze(-1), hidden, 0.0)
        share = RowScale.of(counted, self.reduction, n).factors(hidden, n) / self.n_classes
        share = share.reshape(target.shape)

        def spread(rows: Tensor, vectors: Tensor, bias: Tensor | None, **more: Any) -> Tensor:
            return linear_cross_entropy(
                rows, vectors, ids, bias, ignore_index=None if counted is None else -1,
                reduction="none" if self.reduction == "none" else "sum", label_smoothing=1.0,
                row_weight=share * vectors.shape[0], chunk_rows=self.chunk_rows, **more,
            )  # fmt: skip

        total = spread(hidden, self.head_weight, self.head_bias, class_weight=times)
        for projection, vectors in zip(self.projections, self.tails, strict=True):
            total = total + spread(linear(hidden, projection), vectors, None)
        return total

    def embedding(self) -> "AdaptiveEmbedding":
        """An input layer on the parameters of this head (tied embeddings)."""
        return AdaptiveEmbedding(self)

    def _score_tensors(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        bias = None if self.head_bias is None else in_dtype(self.head_bias, dtype)
        return bias, *(in_dtype(weight, dtype) for weight in self._weights())

    def _rows_log_prob(self, rows: Tensor, chosen: Tensor | None, *tensors: Any) -> Tensor:
        bias, *weights = tensors
        top, n = log_softmax(wide_scores(rows, weights[0], bias)), self._n_top
        clusters = list(zip(self._clusters, weights[1::2], weights[2::2], strict=True))
        if chosen is None:
            inside = [
                top[:, n + i : n + i + 1] + _inside(rows, projection, vectors)
                for i, (_, projection, vectors) in enumerate(clusters)
            ]
            return self._by_class(torch.cat([top[:, :n], *inside], -1))
        place = self._places_of(chosen).contiguous()
        cluster = torch.bucketize(place, self.cutoffs, right=True) - 1
        made = top.gather(-1, torch.where(cluster < 0, place, n + cluster))
        for i, ((start, last), projection, vectors) in enumerate(clusters):
            among = cluster == i
            asked = rows_where(among.any(-1))
            at_place = place[asked].clamp(start, last - 1) - start
            found = _inside(rows[asked], projection, vectors).gather(-1, at_place)
            made = made.index_add(0, asked, torch.where(among[asked], found, 0.0))
        return made

    def _top_log_prob(self, rows: Tensor) -> Tensor:
        """Of the classes at the top, and of each cluster."""
        bias = None if self.head_bias is None else in_dtype(self.head_bias, rows.dtype)
        return log_softmax(wide_scores(rows, in_dtype(self.head_weight, rows.dtype), bias))

    def _inside_log_prob(self, cluster: int, rows: Tensor) -> Tensor:
        """Of the classes of a cluster, given the cluster."""
        projection, vectors = self.projections[cluster], self.tails[cluster]
        return _inside(rows, in_dtype(projection, rows.dtype), in_dtype(vectors, rows.dtype))

    def _chunks(self, rows: Tensor, n_scores: int) -> list[slice]:
        return list(row_chunks(rows, n_scores, self.chunk_rows, self._copies))

    def _rows_topk(self, rows: Tensor, k: int) -> tuple[Tensor, ...]:
        with without_autocast(rows):
            return best_classes(self, in_autocast_dtype(rows), k)

    def _rows_sample(self, rows: Tensor, *uniform: Tensor) -> Tensor:
        """A class at the top or a cluster by one number, a class in the cluster by another."""
        first, second = uniform
        rows, n = in_autocast_dtype(rows), self._n_top
        with without_autocast(rows):
            chunks = self._chunks(rows, self.head_weight.shape[0])
            drawn = [draw_classes(self._top_log_prob(rows[part]), first[part]) for part in chunks]
            column = torch.cat(drawn)
            place = column.clone()
            for i, (start, last) in enumerate(self._clusters):
                asked = rows_where((column == n + i).any(-1))
                for part in self._chunks(rows[asked], last - start):
                    some = asked[part]
                    inside = draw_classes(self._inside_log_prob(i, rows[some]), second[some])
                    found = torch.where(inside < 0, -1, inside + start)
                    place[some] = torch.where(column[some] == n + i, found, place[some])
        return torch.where(place < 0, -1, self._classes_at(place.clamp(min=0)))

    def _check_state(self) -> None:
        super()._check_state()
        if not self.cutoffs.is_meta and self.cutoffs.tolist() != [*self._starts]:
            raise ValueError(f"cutoffs: expected {[*self._starts]}, got {self.cutoffs.tolist()}")

    def config(self) -> dict[str, Any]:
        return {**super().config(), "cutoffs": [*self._starts]}


def _inside(rows: Tensor, projection: Tensor, vectors: Tensor) -> Tensor:
    """Log-probabilities of the classes of a cluster, given the cluster."""
    return torch.log_softmax(wide_scores(linear(rows, projection), vectors, None), -1)


class AdaptiveEmbedding(torch.nn.Module):
    r"""Vectors of classes, looked up in an adaptive softmax: the two are tied.

    .. math:: e_c = w_c \quad\text{at the top,}\qquad e_c = P_i^\top w_c \quad\text{in cluster } i

    It is the vector whose product with a hidden state is the score of the class in its softmax.
    Made by :meth:`AdaptiveSoftmax.embedding`.

    Choose it for a language model whose words come in and go out: it saves the input table, and
    rare words learn from both ends.

    The parameters belong to the head alone, and are not in the ``state_dict`` of this layer: a
    model must have the head among its modules too. Gradients of both uses add up in the head.

    Cost: a product of ids × the widths of all clusters × in_features, and no wait for the device.

    Args:
        head: whose vectors they are.

    Example:
        >>> import torch
        >>> from lastlayer.heads import AdaptiveSoftmax
        >>> head = AdaptiveSoftmax(64, cutoffs=[100, 1000], n_classes=5000)
        >>> embedding = head.embedding()
        >>> embedding(torch.tensor([[3, 4999, 100]])).shape
        torch.Size([1, 3, 64])
        >>> len(embedding.state_dict())
        0

    Reference:
        Baevski and Auli, Adaptive input representations for neural language modeling, ICLR 2019,
        arXiv:1809.10853.
    """

    def __init__(self, head: AdaptiveSoftmax) -> None:
        super().__init__()
        # In a tuple: as an attribute of its own the head would be a part of this module.
        self._tied = (head,)

    @property
    def head(self) -> AdaptiveSoftmax:
        """The head that owns the vectors."""
        return self._tied[0]

    def forward(self, classes: Tensor) -> Tensor:
        """Vectors ``(*batch, in_features)`` of class ids ``(*batch)``, in the dtype of the head."""
        head = self.head
        classes = check_ids(
            "classes", classes, None, head.n_classes, like=head.head_weight, of="the head"
        )
        place = head._places_of(classes.reshape(-1))
        n, dtype = head._n_top, head.head_weight.dtype
        at_top = (place < n).unsqueeze(-1)
        made = torch.where(at_top, embedding(place.clamp(max=n - 1), head.head_weight), 0.0)
        if head._clusters:
            narrow = []
            for (first, last), vectors in zip(head._clusters, head.tails, strict=True):
                inside = ((place >= first) & (place < last)).unsqueeze(-1)
                found = embedding(place.clamp(first, last - 1) - first, vectors)
                narrow.append(torch.where(inside, found, 0.0))
            # Side by side, all but one of them 0: one product for all clusters.
            below = torch.cat(narrow, -1) @ torch.cat(list(head.projections))
            made = made + below.to(dtype)
        return made.reshape(*classes.shape, head.in_features)

    def extra_repr(self) -> str:
        """Sizes, as ``nn.Embedding`` shows them."""
        return f"{self.head.n_classes}, {self.head.in_features}"
