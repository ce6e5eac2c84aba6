"""The adaptive softmax: frequent classes at the top level, rare ones in clusters."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter, ParameterList
from torch.nn.functional import embedding, linear, pad

from lastlayer._checks import as_counts, check_ids, check_int
from lastlayer._torch import (
    accumulation_dtype,
    host_sync_allowed,
    in_autocast_dtype,
    in_dtype,
    is_exporting,
    without_autocast,
)
from lastlayer.fused.clusters import CLUSTERS, group_loss
from lastlayer.fused.cross_entropy import linear_cross_entropy
from lastlayer.fused.function import RowScale
from lastlayer.fused.prediction import (
    FEW_SCORES,
    Layer,
    all_log_probs,
    drawn_by,
    is_predictable,
    log_softmax,
    top_classes,
    write_log_probs,
)
from lastlayer.fused.scores import fits_one_cpu_product, row_chunks, wide_scores
from lastlayer.heads.base import all_in_dtype, init_uniform_
from lastlayer.heads.layout import (
    RankedHead,
    check_cutoffs,
    check_widths,
    cutoffs_from_counts,
    tail_widths,
)
from lastlayer.heads.recipes import Recipe
from lastlayer.kernels import products, selected

# From this many rows on, the bound of a cluster (`ceiling`) is computed before it is searched.
_ROWS_WORTH_A_BOUND = 8
# Classes per block of the Triton kernel.
_BLOCK = 128
# If the candidates would be more than this share of a cluster, the whole cluster is sorted.
_CANDIDATES = 1 / 4
# Maximum number of elements in a list of candidates.
_MOST_CANDIDATES = 1 << 26


class AdaptiveSoftmax(RankedHead):
    r"""Adaptive softmax: one softmax over frequent classes and clusters, and one in each cluster.

    .. math:: p_c = \mathrm{softmax}(W_0 h)_c \quad\text{or}\quad
              p_c = \mathrm{softmax}(W_0 h)_i \; \mathrm{softmax}(W_i P_i h)_c

    for a class at the top level, or one in cluster i. The projection :math:`P_i` maps to
    ``in_features / div_value ** i`` features, but never fewer than ``min_width``.

    Choose it if class frequencies are as skewed as those of words. A row needs only the top level,
    which is small, and the cluster of its target. Rare classes have fewer parameters.

    Cost: a training step takes three products of rows × in_features × top-level columns, and for
    each cluster three of its rows × its width × its classes: few rows for many classes. All
    clusters get a gradient in every step, zeros if they have no rows, as DDP requires. With label
    smoothing every row needs every cluster, so a step computes all small softmaxes on all rows.

    On a GPU there is one host sync per step, for the sizes of all clusters together, also inside
    ``torch.compile``. During CUDA graph capture there is none, and every cluster computes all rows.

    ``topk`` searches a cluster only for rows in which one of its classes may be as probable as the
    k-th best so far. ``sample`` draws a cluster first and evaluates only that one.

    Args:
        in_features: size of the hidden state.
        n_classes: number of classes; follows from counts.
        cutoffs: first place of each cluster, for classes by falling frequency: ``[2000, 10000]``
            leaves 2000 classes at the top level and makes two clusters. An empty list, ``[]``, is
            a plain softmax.
        counts: number of occurrences of each class, ``(n_classes,)``. Class ids may then be in any
            order. If no cutoffs are given, :func:`cutoffs_from_counts` chooses them for the device
            of the head.
        order: all classes, the most frequent first; from counts, or else 0, 1, 2, …. It decides
            which cluster a class is in; within a cluster classes are sorted by id.
        div_value: factor by which each cluster's vectors are narrower than the previous one's; at
            least 1.
        min_width: minimum width of a projection.
        head_bias: whether the top level has biases: one per class there, and one per cluster.
        label_smoothing, ignore_index, reduction, chunk_rows, device, dtype: as in ``FullSoftmax``.

    Example:
        >>> import torch
        >>> head = AdaptiveSoftmax(64, 5000, [100, 1000])
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
    _numbers_per_draw = 2
    _bias_name = "head_bias"

    recipes = (
        Recipe(
            "adaptive",
            "frequent classes first, clusters of rare ones",
            # Unlike torch's, with biases, so that the head can start at the class frequencies.
            defaults={"head_bias": True},
            from_data=lambda data, _given: {"counts": data.positive_counts()},
            filled=frozenset({"order"}),
            compared=("adaptive",),
            rank=21,
        ),
    )

    def __init__(
        self,
        in_features: int,
        n_classes: int | None = None,
        cutoffs: Sequence[int] | None = None,
        *,
        counts: Any = None,
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
                "cutoffs: expected the first place of each cluster, got None; give cutoffs such as "
                "[2000, 10000], or counts to choose them from"
            )
        starts = check_cutoffs(cutoffs, check_int("n_classes", n_classes))
        super().__init__(
            in_features, [*starts, int(n_classes)], order, label_smoothing=label_smoothing,
            ignore_index=ignore_index, reduction=reduction, chunk_rows=chunk_rows, device=device,
        )  # fmt: skip
        self.div_value, self.min_width = div_value, min_width
        # Start and end of each cluster, in places.
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
        """Reinitialises the parameters as ``nn.Linear`` does; completes ``to_empty`` after meta."""
        self._make_ready()
        for weight in (self.head_weight, *self.projections, *self.tails):
            init_uniform_(weight.shape[1], weight)
        init_uniform_(self.in_features, self.head_bias)

    @classmethod
    def from_torch(cls, softmax: torch.nn.AdaptiveLogSoftmaxWithLoss, **options: Any) -> Self:
        """Makes a head that shares the parameters of torch's adaptive softmax.

        Training one trains both. ``head(hidden, target)`` is the ``loss`` of torch's module,
        ``head.log_prob(hidden, target)`` its ``output``.

        Args:
            softmax: the module that owns the parameters.
            options: ``label_smoothing``, ``ignore_index``, ``reduction`` and ``chunk_rows``; all
                others follow from the module.

        Example:
            >>> theirs = torch.nn.AdaptiveLogSoftmaxWithLoss(64, 5000, [100, 1000])
            >>> AdaptiveSoftmax.from_torch(theirs).head_weight is theirs.head.weight
            True
        """
        if not isinstance(softmax, torch.nn.AdaptiveLogSoftmaxWithLoss):
            raise TypeError(
                "softmax: expected an nn.AdaptiveLogSoftmaxWithLoss, got "
                f"{type(softmax).__name__}; from_linear of FullSoftmax takes an nn.Linear"
            )
        taken = {"label_smoothing", "ignore_index", "reduction", "chunk_rows"}
        if wrong := sorted(options.keys() - taken):
            raise TypeError(
                f"{wrong[0]}: expected no such argument, since it follows from the module, got "
                f"{options[wrong[0]]!r}"
            )
        pairs: list[Any] = list(softmax.tail)
        widths = [first.out_features for first, _ in pairs]
        if 0 in widths:
            raise ValueError(
                "softmax: expected clusters of width 1 or more, got one of width 0: "
                f"in_features={softmax.in_features} is too small for div_value={softmax.div_value}"
            )
        # On meta, no memory is initialised for parameters that the module's replace at once.
        head = cls(
            softmax.in_features, softmax.n_classes, softmax.cutoffs[:-1], device="meta",
            div_value=softmax.div_value, min_width=min([8, *widths]),
            head_bias=softmax.head_bias, **options,
        )  # fmt: skip
        top: Any = softmax.head
        head.head_weight, head.head_bias = top.weight, top.bias
        head.projections = ParameterList([first.weight for first, _ in pairs])
        head.tails = ParameterList([second.weight for _, second in pairs])
        head.cutoffs = torch.tensor(head._starts, dtype=torch.int64, device=top.weight.device)
        return head

    def _scores_from_counts(self, counts: Any) -> Tensor:
        """Scores of top-level classes and of whole clusters: classes in clusters have no biases."""
        logs = super()._scores_from_counts(counts)
        of_clusters = [logs[a:b].logsumexp(0, keepdim=True) for a, b in self._clusters]
        return torch.cat([logs[: self._n_top], *of_clusters])

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The negative log-likelihood of the targets, with label smoothing if set."""
        self._check_hidden(hidden)
        target, ignored = self._target_and_ignored(hidden, target)
        options = self._starts, ignored, self.chunk_rows
        loss = group_loss(
            CLUSTERS, hidden, target, self.places, self.head_bias, self._weights(), options,
            self.reduction,
        )  # fmt: skip
        if not self.label_smoothing:
            return loss
        spread = self._spread_loss(hidden, target)
        return (1.0 - self.label_smoothing) * loss + self.label_smoothing * spread

    def _weights(self) -> list[Tensor]:
        """The top level's weight, then the projection and the class vectors of each cluster."""
        weights: list[Tensor] = [self.head_weight]
        # By index: torch 2.8 cannot compile zip of parameter lists.
        for i in range(len(self.tails)):
            weights += [self.projections[i], self.tails[i]]
        return weights

    def _spread_loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The reduced mean of -log p over all classes, which needs all clusters on all rows."""
        ids, n = torch.zeros_like(target), target.numel()
        # The column of a cluster counts once for each of its classes.
        times = hidden.new_ones(self.head_weight.shape[0], dtype=accumulation_dtype(hidden.dtype))
        for i, (first, last) in enumerate(self._clusters, self._n_top):
            times[i] = last - first
        counted = None
        if self.ignore_index is not None:
            counts = target != self.ignore_index
            ids, counted = torch.where(counts, ids, -1), counts.reshape(-1).to(times.dtype)
            # A NaN in an ignored row would reach the gradient of a projection.
            hidden = torch.where(counts.unsqueeze(-1), hidden, 0.0)
        factors = RowScale.of(counted, self.reduction, n).factors(hidden, n)
        share = factors.reshape(target.shape) / self.n_classes

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
        """An input embedding that shares the parameters of this head (tied embeddings)."""
        return AdaptiveEmbedding(self)

    def _score_tensors(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        return all_in_dtype(dtype, self.head_bias, *self._weights())

    def _goes_by_itself(self, rows: Tensor, chosen: Tensor) -> bool:
        few = chosen.shape[1] == 1 or rows.shape[0] * self.n_classes <= FEW_SCORES
        return few and not torch.is_grad_enabled() and _on_gpu(rows)

    def _chosen_log_prob(self, rows: Tensor, chosen: Tensor, *tensors: Any) -> Tensor:
        """On a GPU: of one class per row, or of any number if there are few scores."""
        if rows.shape[0] * self.n_classes <= FEW_SCORES:
            # Compute all classes: sorting rows by cluster takes longer and needs a host sync.
            made = rows.new_empty(rows.shape[0], self.n_classes, dtype=torch.float32)
            self._write_log_probs(made, rows, *tensors)
            return made.gather(-1, chosen)
        # The log-probability of one class per row is its negative loss.
        bias, *weights = tensors
        options, ids = (self._starts, None, self.chunk_rows), chosen.reshape(-1)
        return -group_loss(
            CLUSTERS, rows, ids, self.places, bias, weights, options, "none"
        ).unsqueeze(-1)

    def _write_log_probs(self, out: Tensor, rows: Tensor, *tensors: Any) -> None:
        if not _on_gpu(rows):
            # A CPU is faster on contiguous rows of a cluster.
            return super()._write_log_probs(out, rows, *tensors)
        (bias, first, *weights), n = tensors, self._n_top
        for part in row_chunks(rows, self.n_classes, self.chunk_rows, 1.0):
            some, into = rows[part], out[part]
            by_place = into if self.places is None else torch.empty_like(into)
            top = all_log_probs(some, Layer(first, bias))
            by_place[:, :n] = top[:, :n]
            for i, (start, last) in enumerate(self._clusters):
                projection, vectors = weights[2 * i : 2 * i + 2]
                write_log_probs(
                    by_place[:, start:last], linear(some, projection), Layer(vectors, None),
                    offset=top[:, n + i],
                )  # fmt: skip
            if self.places is not None:
                torch.index_select(by_place, -1, self.places, out=into)
        return None

    def _rows_log_prob(self, rows: Tensor, chosen: Tensor | None, *tensors: Any) -> Tensor:
        if chosen is not None and self._goes_by_itself(rows, chosen):
            return self._chosen_log_prob(rows, chosen, *tensors)
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
        """Log-probabilities of the top-level classes and of the clusters."""
        tensors: Any = all_in_dtype(rows.dtype, self.head_weight, self.head_bias)
        return log_softmax(wide_scores(rows, *tensors))

    def _inside_log_prob(self, cluster: int, rows: Tensor) -> Tensor:
        """Log-probabilities of the classes of a cluster, given the cluster."""
        tensors: Any = all_in_dtype(rows.dtype, self.projections[cluster], self.tails[cluster])
        return _inside(rows, *tensors)

    def _chunks(self, rows: Tensor, n_scores: int) -> list[slice]:
        return list(row_chunks(rows, n_scores, self.chunk_rows, self._copies))

    def _rows_topk(self, rows: Tensor, k: int) -> tuple[Tensor, ...]:
        # Which rows need a cluster depends on values: not exportable, and not worth the host time.
        if is_exporting() or fits_one_cpu_product(rows, self.n_classes, self.chunk_rows):
            return super()._rows_topk(rows, k)
        rows = in_autocast_dtype(rows)
        best_by = best_by_blocks if blocks_suit(self, rows, k) else best_by_clusters
        with without_autocast(rows):
            return best_by(self, rows, k)

    def _rows_sample(self, rows: Tensor, *uniform: Tensor) -> Tensor:
        """Draws a top-level class or a cluster, and then a class in the cluster."""
        first, second = uniform
        rows, n = in_autocast_dtype(rows), self._n_top
        with without_autocast(rows):
            chunks = self._chunks(rows, self.head_weight.shape[0])
            drawn = [drawn_by(self._top_log_prob(rows[part]), first[part]) for part in chunks]
            column = torch.cat(drawn)
            place = column.clone()
            for i, (start, last) in enumerate(self._clusters):
                asked = rows_where((column == n + i).any(-1))
                for part in self._chunks(rows[asked], last - start):
                    some = asked[part]
                    inside = drawn_by(self._inside_log_prob(i, rows[some]), second[some])
                    found = torch.where(inside < 0, -1, inside + start)
                    place[some] = torch.where(column[some] == n + i, found, place[some])
        return torch.where(place < 0, -1, self._classes_at(place.clamp(min=0)))

    def _fresh_buffer(self, name: str) -> Tensor | None:
        if name == "cutoffs":
            return torch.tensor(self._starts, dtype=torch.int64, device="cpu")
        return super()._fresh_buffer(name)

    def _check_state(self) -> None:
        super()._check_state()
        if not self.cutoffs.is_meta and self.cutoffs.tolist() != [*self._starts]:
            raise ValueError(f"cutoffs: expected {[*self._starts]}, got {self.cutoffs.tolist()}")

    def config(self) -> dict[str, Any]:
        return {**super().config(), "cutoffs": [*self._starts]}


def _on_gpu(rows: Tensor) -> bool:
    return rows.device.type == "cuda" and is_predictable(rows)


def _inside(rows: Tensor, projection: Tensor, vectors: Tensor) -> Tensor:
    """Log-probabilities of the classes of a cluster, given the cluster."""
    return torch.log_softmax(wide_scores(linear(rows, projection), vectors, None), -1)


def best_by_clusters(head: AdaptiveSoftmax, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of the k best classes of each row, best first.

    A cluster is searched only for rows in which one of its classes may be among the best.
    """
    best, n = [], head._n_top
    for part in head._chunks(rows, head.head_weight.shape[0]):
        top = head._top_log_prob(rows[part])
        values, columns = top_classes(top[:, :n], min(k, n))
        best.append((values, head._classes_at(columns), top[:, n:]))
    values, classes, clusters = map(torch.cat, zip(*best, strict=True))
    # -inf and -1 stand for classes that are still missing.
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
            # Sort ties by class id; a real class of probability 0 comes before padding.
            by_id = torch.where(of_classes < 0, head.n_classes, of_classes).argsort(-1)
            values[at], columns = top_classes(found.gather(-1, by_id), k)
            classes[at] = of_classes.gather(-1, by_id).gather(-1, columns)
    return values, classes


def opened(
    head: AdaptiveSoftmax, cluster: int, rows: Tensor, log_prob: Tensor, kth: Tensor
) -> Tensor:
    """Rows in which a class of the cluster may be better than the k-th best so far.

    ``log_prob`` ``(n,)`` is that of the cluster as a whole, ``kth`` ``(n,)`` that of the k-th best.
    """
    # Not `>=`: rows with NaN are included.
    some = rows_where(~(log_prob < kth))
    if len(some) < _ROWS_WORTH_A_BOUND:
        return some
    most = log_prob[some] + ceiling(head.projections[cluster], head.tails[cluster], rows[some])
    return some[rows_where(~(most < kth[some]))]


def ceiling(projection: Tensor, vectors: Tensor, rows: Tensor) -> Tensor:
    r"""Upper bound of the log-probability of any class of a cluster, given the cluster.

    The log normaliser is at least the mean score plus log n, and no score exceeds the mean by more
    than :math:`\|z\| \max_j \|w_j - \bar w\|`.
    """
    narrow = linear(rows, in_dtype(projection, rows.dtype)).to(accumulation_dtype(rows.dtype))
    vectors = vectors.to(rows.dtype).to(narrow.dtype)
    mean = vectors.mean(0)
    squares = torch.linalg.vector_norm(vectors, dim=1).square()
    largest = squares.amax()
    apart = (squares - 2 * (vectors @ mean) + mean @ mean).amax().clamp(min=0)
    # The margins are far above rounding errors.
    reach = (apart + 1e-5 * largest).sqrt() + 1e-4 * largest.sqrt()
    size = torch.linalg.vector_norm(narrow, dim=1)
    most: Tensor = size * reach + (1e-4 - math.log(len(vectors)))
    return most.clamp(max=0)


def rows_where(asked: Tensor) -> Tensor:
    """Indices of the rows where ``asked`` is true; all rows if no host sync is allowed."""
    if host_sync_allowed(asked):
        return asked.nonzero().squeeze(-1)
    return torch.arange(asked.shape[0], device=asked.device)


def blocks_suit(head: AdaptiveSoftmax, rows: Tensor, k: int) -> bool:
    """Whether there is a kernel for these rows, and clusters have far more than k blocks."""
    if selected("class_scores", rows.device.type, rows.dtype) != "triton":
        return False
    smallest = min((last - start for start, last in head._clusters), default=0)
    return k * _BLOCK <= smallest * _CANDIDATES


def best_by_blocks(head: AdaptiveSoftmax, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As ``best_by_clusters``, on CUDA: searches all clusters for all rows.

    There is no host sync after the first call, which copies the cutoffs to the device.
    """
    # Imported here: Triton is not installed on every machine.
    from lastlayer.kernels.search.triton import largest

    sizes = [last - start for start, last in head._clusters]
    # For each row and cluster: the candidates, and two numbers per block of the largest cluster.
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
    head: AdaptiveSoftmax, rows: Tensor, clusters: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and places ``(n, c * 128 k)`` in the k best blocks of each cluster.

    ``clusters`` has the log-probabilities of the c clusters. Entries beyond a cluster's last class
    have its last place and log-probability -inf.
    """
    from lastlayer.kernels.search.triton import largest, peaks_and_levels_

    n, c = clusters.shape
    vectors = [in_dtype(tail, rows.dtype) for tail in head.tails]
    narrow = [linear(rows, in_dtype(each, rows.dtype)) for each in head.projections]
    blocks = -(-max(map(len, vectors)) // _BLOCK)
    # Stacked by cluster; padding blocks have -inf, so they are chosen last.
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
    # Subtract first: scores may be large, and only their differences matter.
    log_probs = (scores - normaliser.unsqueeze(-1)) + clusters.t().unsqueeze(-1)
    log_probs = torch.where(there, log_probs, -torch.inf)
    places = torch.minimum(columns, sizes - 1) + starts
    return log_probs.transpose(0, 1).flatten(1), places.transpose(0, 1).flatten(1)


@lru_cache(maxsize=64)
def _bounds(clusters: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """First place and size of each cluster, ``(c, 1, 1)``; cached to save a copy to the device."""
    bounds = torch.tensor(clusters, device=device).view(-1, 2, 1, 1)
    return bounds[:, 0], bounds[:, 1] - bounds[:, 0]


class AdaptiveEmbedding(torch.nn.Module):
    r"""Input embedding that shares the class vectors of an adaptive softmax (tied embeddings).

    .. math:: e_c = w_c \quad\text{at the top level,}\qquad
              e_c = P_i^\top w_c \quad\text{in cluster } i

    The product of this vector with a hidden state is the class's score in its softmax. Made by
    :meth:`AdaptiveSoftmax.embedding`.

    Choose it for a language model with the same input and output vocabulary: it saves the input
    table, and rare words get gradients from both uses.

    The parameters belong to the head alone, and are not in the ``state_dict`` of this layer: a
    model must have the head among its modules too. Gradients of both uses add up in the head.

    Cost: one product of ids × the widths of all clusters × in_features, without a host sync.

    Args:
        head: the head that owns the vectors.

    Example:
        >>> import torch
        >>> from lastlayer.heads import AdaptiveSoftmax
        >>> head = AdaptiveSoftmax(64, 5000, [100, 1000])
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
        # In a tuple, so that the head does not become a submodule.
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
            # Concatenated, with zeros for all but one cluster: one product for all clusters.
            below = torch.cat(narrow, -1) @ torch.cat(list(head.projections))
            made = made + below.to(dtype)
        return made.reshape(*classes.shape, head.in_features)

    def extra_repr(self) -> str:
        return f"{self.head.n_classes}, {self.head.in_features}"
