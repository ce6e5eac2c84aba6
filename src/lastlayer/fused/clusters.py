"""Softmaxes over groups of classes, losses and gradients together: clusters and bands.

*Clusters*, for the adaptive softmax: a top-level softmax over frequent classes and one column per
cluster, for all rows; and in each cluster a small softmax, for the rows whose target is in it.

*Bands*, for the differentiated softmax: one softmax over all classes, whose scores come from
several weights. Each is multiplied with its own slice of hidden.

Classes are ordered by *place*, and a group is a range of places. ``places`` maps classes to places;
None means that class c has place c.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lastlayer import kernels
from lastlayer._processes import Shards, local_part, shards_of
from lastlayer._torch import (
    accumulation_dtype,
    as_numpy,
    gradient_sum_dtype,
    host_sync_allowed,
    in_autocast_dtype,
    in_dtype,
    without_autocast,
)
from lastlayer.fused.cross_entropy import (
    PLAIN,
    WIDEST_TILED,
    cross_entropy_rows,
    run_tiles,
    tiles_or_slabs,
    tiles_suit,
)
from lastlayer.fused.function import Call, Engine, Result, RowScale, fused_loss, normalized_factors
from lastlayer.fused.rows import (
    NOT_SPREAD,
    SPREAD_SCHEMA,
    Chunk,
    LossAndGradients,
    Problem,
    Wanted,
    counted_rows,
    is_spread,
    masks_ignored_rows,
    run_chunks,
    scatter_rows,
    weight_sum_dtype,
)
from lastlayer.fused.scores import (
    LayerProducts,
    as_chunk,
    missing_columns,
    multiply,
    part_of,
    ranges,
    rows_at_a_time,
)
from lastlayer.kernels import empty

# Bands use the tiled kernels from this many scores on: below, the launches cost too much.
_TILED_SCORES = 1 << 29
# From this many scores on, a bias is a column of the weight, in vectors that stay aligned.
_BIAS_COLUMN_FROM, _BIAS_COLUMNS = 1 << 26, 8


def group_loss(
    engine: "GroupEngine",
    hidden: Tensor,
    target: Tensor,
    places: Tensor | None,
    bias: Tensor | None,
    weights: Sequence[Tensor],
    options: tuple[Any, int | None, int | str],
    reduction: str,
) -> Tensor:
    """The reduced negative log-likelihood of checked targets ``(*batch)``.

    ``engine`` is :data:`CLUSTERS` or :data:`BANDS`, which documents ``weights``. ``bias`` is that
    of the top level, or of all bands. ``options`` are the engine's own option, ``ignore_index`` and
    ``chunk_rows``. Weights of bands may be DTensors: places are then columns of this process.
    """
    spread = NOT_SPREAD
    if is_spread(weights[0]):
        # A process has a range of each band; its columns are these ranges concatenated.
        shards, sizes = shards_of(weights[0]), [each.shape[0] for each in weights]
        weights = [local_part(each) for each in weights]
        if shards.processes > 1:
            most = sum(-(-size // shards.processes) for size in sizes)
            here = sum(each.shape[0] for each in weights)
            spread = shards._replace(n_classes=sum(sizes), most=most, here=here)
    rows, ids = in_autocast_dtype(hidden), target
    if target.dim() != 1:
        rows, ids = rows.reshape(target.numel(), hidden.shape[-1]), target.reshape(-1)
    operands = rows, bias, *weights, ids, places
    loss = fused_loss(engine, operands, (*options[:2], str(options[2]), *spread), reduction)[0]
    return loss.reshape(target.shape) if reduction == "none" and target.dim() != 1 else loss


class Share(NamedTuple):
    """The rows of one cluster, as a slice of the top level's rows, and their targets in it."""

    part: slice
    target: Tensor
    inside: Tensor | None
    """Mask of the rows whose target is in the cluster; None for all."""


class Shares(NamedTuple):
    """The rows to compute, and their targets at the top level and in each cluster."""

    rows: Tensor | None
    """Indices into the batch, in the order of computation; None for all rows in order."""
    counts: Tensor | None
    """Mask of the rows that are not ignored; None for all."""
    target: Tensor
    """Column of each row's target at the top level: its place, or the column of its cluster."""
    tails: list[Share]
    """The rows of each cluster."""


def share_out(
    target: Tensor, places: Tensor | None, ignore_index: int | None, starts: Sequence[int]
) -> Shares:
    """Groups rows by cluster, given the first place of each cluster; removes ignored rows."""
    # Grouping needs a host sync for the sizes, which is not allowed during CUDA graph capture.
    way = in_segments if host_sync_allowed(target) else all_rows
    return way(target, places, ignore_index, starts)


def in_segments(
    target: Tensor, places: Tensor | None, ignore_index: int | None, starts: Sequence[int]
) -> Shares:
    """Rows sorted by place, and so by cluster; on a GPU with one host sync, for all sizes."""
    if not starts:
        kept, _ = counted_rows(target, ignore_index)
        target = target if kept is None else target[kept]
        return Shares(kept, None, _places_of(target, places), [])
    sort = _sorted_on_cpu if target.device.type == "cpu" else _sorted
    place, rows, ends = sort(target, places, ignore_index, starts)
    column, tails = place + 0, []
    for i, (start, (first, last)) in enumerate(zip(starts, pairwise(ends), strict=True)):
        column[first:last] = starts[0] + i
        inner = torch.as_tensor(place[first:last] - start)
        tails.append(Share(slice(first, last), inner, None))
    return Shares(torch.as_tensor(rows), None, torch.as_tensor(column), tails)


def _sorted_on_cpu(
    target: Tensor, places: Tensor | None, ignore_index: int | None, starts: Sequence[int]
) -> tuple[Any, Any, list[int]]:
    """:func:`_sorted` in numpy, which takes a fraction of torch's host time."""
    place = as_numpy(target)
    kept = None
    if ignore_index is not None and (place == ignore_index).any():
        kept = np.flatnonzero(place != ignore_index)
        place = place[kept]
    if places is not None:
        place = as_numpy(places)[place]
    rows = place.argsort(kind="stable")
    place = place[rows]
    ends = [*np.searchsorted(place, starts).tolist(), len(place)]
    return place, rows if kept is None else kept[rows], ends


def _sorted(
    target: Tensor, places: Tensor | None, ignore_index: int | None, starts: Sequence[int]
) -> tuple[Tensor, Tensor, list[int]]:
    """Sorted places, the row of each, and the bounds of each cluster's rows."""
    if ignore_index is None or (ignore_index < 0 and places is None):
        # Ignored rows are negative, and so sorted to the front.
        place = _places_of(target, places)
    else:
        counts = target != ignore_index
        place = torch.where(counts, _places_of(torch.where(counts, target, 0), places), -1)
    place, rows = kernels.touched_rows.sort_ids("auto", place)
    first, *ends = torch.searchsorted(place, _bounds(tuple(starts), place.device)).tolist()
    if first:
        place, rows = place[first:], rows[first:]
    return place, rows, [*(end - first for end in ends), len(place)]


@lru_cache(maxsize=64)
def _bounds(starts: tuple[int, ...], device: torch.device) -> Tensor:
    """First place of the top level and of each cluster; cached to save the copy to the device."""
    return torch.tensor([0, *starts], device=device)


def all_rows(
    target: Tensor, places: Tensor | None, ignore_index: int | None, starts: Sequence[int]
) -> Shares:
    """All rows for every cluster: shapes do not depend on values, as CUDA graphs require."""
    counts = None
    if ignore_index is not None:
        counts = target != ignore_index
        target = torch.where(counts, target, 0)
    place = _places_of(target, places)
    if not starts:
        return Shares(None, counts, place, [])
    cluster = torch.zeros_like(place)
    for start in starts:
        cluster += place >= start
    tails = []
    for i, start in enumerate(starts, 1):
        inside = cluster == i
        tails.append(Share(slice(None), torch.where(inside, place - start, 0), inside))
    column = torch.where(cluster > 0, starts[0] + cluster - 1, place)
    return Shares(None, counts, column, tails)


def _places_of(classes: Tensor, places: Tensor | None) -> Tensor:
    return classes if places is None else places[classes]


class _Given(NamedTuple):
    """Inputs of an engine, without ignored rows, in the dtype of the products.

    ``factors`` are the factors of each row's gradient, None if no gradient is wanted. ``wanted``
    says which of hidden, bias and each weight need a gradient. ``dtypes`` are those of the
    gradients of the weights.
    """

    hidden: Tensor
    bias: Tensor | None
    weights: list[Tensor]
    factors: Tensor | None
    wanted: Sequence[bool]
    dtypes: list[torch.dtype]
    chunk_rows: int | str
    shares: Shares
    shards: Shards | None


# The loss of each row; the gradients of hidden, bias and each weight, None if not wanted.
_Computed = tuple[Tensor, list[Tensor | None]]


class GroupEngine(Engine):
    """Operands: hidden, bias, weights; target, places. The first option is the engine's own."""

    n_constants = 2

    def starts(self, option: Any) -> Sequence[int]:  # noqa: ARG002 - for clusters
        """The first place of each cluster."""
        return ()

    @abstractmethod
    def run(self, given: _Given, option: Any) -> _Computed:
        """Losses and gradients of the given rows; ``option`` is the engine's own option."""

    def compute(self, call: Call) -> Result:
        operands, options, reduction, wanted, upstream = call
        hidden, bias, *weights, target, places = operands
        option, ignore_index, chunk_rows, *spread = options
        shards = Shards(*spread) if spread[0] else None
        with without_autocast(hidden):
            n, dtype, known = hidden.shape[0], hidden.dtype, None
            starts, work = self.starts(option), n * sum([weight.numel() for weight in weights])
            if not starts and shards is None and masks_ignored_rows(hidden, work, ignore_index):
                target, hidden, counts, known = kernels.products.row_factors(
                    "auto", target, hidden, None, ignore_index, reduction == "mean"
                )
                shares = Shares(None, None, _places_of(target, places), [])
            else:
                shares = share_out(target, places, ignore_index, starts)
                counts = shares.counts
            rows = shares.rows
            if rows is not None:
                hidden = hidden.index_select(0, rows)
                upstream = None if upstream is None else upstream.index_select(0, rows)
            if counts is not None and known is None:
                # A NaN in an ignored row would reach the gradients as 0 · NaN.
                hidden = torch.where(counts.unsqueeze(-1), hidden, 0.0)
                counts = counts.to(accumulation_dtype(dtype))
            scale = RowScale.of(counts, reduction, hidden.shape[0])
            factors = size = None
            if call.makes_gradients:
                factors = known
                if known is None or upstream is not None:
                    factors = scale.factors(hidden, hidden.shape[0], upstream)
                factors, size = normalized_factors(factors, dtype)
            given = _Given(
                hidden, None if bias is None else in_dtype(bias, dtype),
                [in_dtype(weight, dtype) for weight in weights], factors,
                wanted if factors is not None else (False,) * len(wanted),
                [gradient_sum_dtype(weight.dtype) for weight in weights], as_chunk(chunk_rows),
                shares, shards,
            )  # fmt: skip
            losses, made = self.run(given, option)
            loss = scale.reduce(losses, reduction)
            loss = loss if shards is None else shards.sum(loss)
            if rows is not None:
                loss = scatter_rows(loss, rows, n) if reduction == "none" else loss
                made[0] = None if made[0] is None else scatter_rows(made[0], rows, n)
            if made[1] is not None:
                made[1] = in_dtype(made[1], gradient_sum_dtype(bias.dtype))
        return Result(loss, made, (), size)


class _Clusters(GroupEngine):
    """The adaptive softmax; its option is the first place of each cluster.

    Weights are that of the top level, ``(classes and clusters, d)``, and then for each cluster a
    projection ``(width, d)`` and the class vectors ``(size, width)``.
    """

    name = "cluster_loss"
    schema = "int[] starts, int? ignore_index, str chunk_rows" + SPREAD_SCHEMA

    def starts(self, option: Any) -> Sequence[int]:
        return option  # type: ignore[no-any-return]

    def run(self, given: _Given, option: Any) -> _Computed:
        del option
        hidden, bias, weights, factors, wanted, dtypes, chunk_rows, shares, _ = given
        in_order = shares.rows is not None
        shapes = hidden.shape, None, *(weight.shape for weight in weights)
        hidden, weights = _in_aligned_widths(hidden, weights)
        rows = [hidden[share.part] for share in shares.tails]
        seen = [torch.mm(a, b.t()) for a, b in zip(rows, weights[1::2], strict=True)]
        memory = _shared_memory([hidden, *seen], [weights[0], *weights[2::2]], chunk_rows)
        problem = Problem(
            hidden, weights[0], bias, shares.target, factors, None,
            Wanted(wanted[0], wanted[2], wanted[1]), dtypes[0],
        )  # fmt: skip
        top = softmax(problem, chunk_rows, memory, in_order)
        made = [top.hidden, top.bias, top.weight]
        for i, (part, target, inside) in enumerate(shares.tails):
            projection, vectors = weights[2 * i + 1 : 2 * i + 3]
            of_projection, of_vectors = wanted[2 * i + 3 : 2 * i + 5]
            row_scale = None if factors is None else factors[part]
            if inside is not None and row_scale is not None:
                row_scale = torch.where(inside, row_scale, 0.0)
            problem = Problem(
                seen[i], vectors, None, target, row_scale, None,
                Wanted(wanted[0] or of_projection, of_vectors), dtypes[2 * i + 2],
            )  # fmt: skip
            below = softmax(problem, chunk_rows, memory, in_order)
            loss = below.loss if inside is None else torch.where(inside, below.loss, 0.0)
            top.loss[part].add_(loss)
            if top.hidden is not None and below.hidden is not None:
                some = top.hidden[part]
                torch.addmm(some, below.hidden, projection, out=some)
            slope = below.hidden if of_projection else None
            made.append(None if slope is None else _product(slope, rows[i], dtypes[2 * i + 1]))
            made.append(below.weight)
        return top.loss, [
            each if each is None or shape is None or each.shape == shape
            else each[: shape[0], : shape[1]].contiguous()
            for each, shape in zip(made, shapes, strict=True)
        ]  # fmt: skip


class _Bands(GroupEngine):
    """The differentiated softmax; its option is the label smoothing.

    Weights are the class vectors of each band, ``(size, width)``; hidden has the slices of all
    bands side by side. All bands share one normaliser.
    """

    name = "band_loss"
    schema = "float label_smoothing, int? ignore_index, str chunk_rows" + SPREAD_SCHEMA

    def run(self, given: _Given, option: Any) -> _Computed:
        hidden, bias, weights, factors, wanted, dtypes, chunk_rows, shares, shards = given
        if not option and shards is None and _narrow_bands(given):
            return _run_bands_by_tiles(given)
        if _has_bias_columns(given):
            return self._with_bias_columns(given, option)
        target, n = shares.target, hidden.shape[0]
        layer = LayerProducts(weights, bias, n)
        step = rows_at_a_time(
            chunk_rows, hidden, layer.n_classes if shards is None else shards.most
        )
        row_loss = cross_entropy_rows(None, option, *PLAIN[1:])
        if shards is not None:
            # Imported here: most programs do not need it.
            from lastlayer.fused.spread import SPREAD_LOSSES

            row_loss = SPREAD_LOSSES["cross_entropy"](shards, None, option, *PLAIN[1:])
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        of_bias: Tensor | None = None
        totals = [
            empty(weight.shape, weight_sum_dtype(hidden, step, dtype), weight.device)
            if of_weight else None
            for weight, of_weight, dtype in zip(weights, wanted[2:], dtypes, strict=True)
        ]  # fmt: skip
        memory, losses = layer.memory(min(n, step), hidden.dtype), []
        for first in range(0, max(1, n), step):
            part = slice(first, min(n, first + step))
            rows, ids = part_of(hidden, part), part_of(target, part)
            scores = layer.scores_into(memory, rows)
            exact = partial(_exact, layer, rows, bias)
            some_factors = None if factors is None else part_of(factors, part)
            chunk = Chunk(ids, exact, some_factors, hidden.shape[1])
            losses.append(row_loss(scores, chunk).loss)
            if factors is None:
                continue
            if wanted[1]:
                some = scores.sum(0, dtype=accumulation_dtype(scores.dtype))
                of_bias = some if of_bias is None else of_bias.add_(some)
            gradient = layer.padded(part_of(memory, slice(part.stop - first)))
            if of_hidden is not None:
                layer.hidden_gradient(part_of(of_hidden, part), gradient)
            layer.weight_gradient(totals, gradient, rows, adds=first > 0)
        of_weights = [
            None if total is None else in_dtype(total, dtype)
            for total, dtype in zip(totals, dtypes, strict=True)
        ]
        loss = losses[0] if len(losses) == 1 else torch.cat(losses)
        return loss, [of_hidden, of_bias, *of_weights]

    def _with_bias_columns(self, given: _Given, option: Any) -> _Computed:
        """The bias becomes a column of the weights, and each slice of hidden gets a 1.

        A GPU adds a bias within a product only if the result is contiguous. The scores of a band
        are some columns of a buffer, so torch would first write the bias to them and then read it
        again. The gradient of the bias is now a column, too, without another pass over the scores.
        """
        hidden, bias, weights, wanted = given.hidden, given.bias, given.weights, given.wanted
        widths = [weight.shape[1] for weight in weights]
        more = [_BIAS_COLUMNS - width % _BIAS_COLUMNS for width in widths]
        columns = ranges(weight.shape[0] for weight in weights)
        one, wider, slices = hidden.new_zeros(len(hidden), _BIAS_COLUMNS), [], []
        one[:, 0] = 1.0
        for weight, column, width, extra, part in zip(
            weights, columns, widths, more, ranges(widths), strict=True
        ):
            wide = pad(weight, (0, extra))
            wide[:, width] = bias[column]  # type: ignore[index]
            wider.append(wide)
            slices += [hidden[:, part], one[:, :extra]]
        of_weights = [each or wanted[1] for each in wanted[2:]]
        losses, (of_hidden, _, *totals) = self.run(
            given._replace(
                hidden=torch.cat(slices, 1), bias=None, weights=wider,
                wanted=(wanted[0], False, *of_weights),
            ),
            option,
        )  # fmt: skip
        of_bias = None
        if of_hidden is not None:
            parts = ranges(each.shape[1] for each in wider)
            some = zip(parts, widths, strict=True)
            of_hidden = torch.cat([of_hidden[:, p.start : p.start + w] for p, w in some], 1)
        if wanted[1]:
            of_bias = torch.cat([
                each[:, width]
                for each, width in zip(totals, widths, strict=True)
                if each is not None
            ])  # fmt: skip
        return losses, [of_hidden, of_bias, *(
            None if total is None or not asked else total[:, :width].contiguous()
            for total, asked, width in zip(totals, wanted[2:], widths, strict=True)
        )]  # fmt: skip


CLUSTERS, BANDS = _Clusters(), _Bands()


def _has_bias_columns(given: _Given) -> bool:
    """Whether the products are so large that a bias as a column of the weights is faster."""
    hidden, n_classes = given.hidden, sum([weight.shape[0] for weight in given.weights])
    return (
        given.bias is not None
        and given.shards is None
        and bool(hidden.is_cuda)
        and hidden.itemsize == 2
        and hidden.shape[0] * n_classes >= _BIAS_COLUMN_FROM
    )


def _narrow_bands(given: _Given) -> list[bool]:
    """Which bands the tiled kernels support; empty if none, or if the problem is too small."""
    widths = [weight.shape[1] for weight in given.weights]
    scores = given.hidden.shape[0] * sum([weight.shape[0] for weight in given.weights])
    if scores < _TILED_SCORES:
        return []
    suit = tiles_suit(given.hidden[:, : min(widths)], PLAIN, given.chunk_rows, Wanted())
    return [0 < width <= WIDEST_TILED for width in widths] if suit else []


def _run_bands_by_tiles(given: _Given) -> _Computed:
    """Computes bands on a GPU in half precision, without storing the scores of narrow bands.

    Each band first computes the logsumexp of its own classes. From the logsumexp over all bands,
    each computes its gradients; wide bands recompute their scores for that, in chunks of rows.
    """
    # Imported here: Triton may not be installed.
    from lastlayer.kernels.linear_softmax.triton import gradient_of_classes, mix_of_rows

    hidden, bias, weights, factors, wanted, dtypes, chunk_rows, shares, _ = given
    n = hidden.shape[0]
    # Sorted by target, the rows whose target is in a tile of classes are contiguous.
    target, order = kernels.touched_rows.sort_ids("auto", shares.target)
    hidden = hidden.index_select(0, order)
    layer = LayerProducts(weights, bias, n)
    exact = _exact(layer, hidden, bias, target.unsqueeze(-1)).squeeze(-1)
    bands: list[Any] = []
    for i, narrow in enumerate(_narrow_bands(given)):
        column, rows = layer.columns[i], hidden[:, layer.parts[i]]
        some = None if bias is None else bias[column]
        if narrow:
            bands.append(mix_of_rows(rows, weights[i], some, 0.0, 1.0, wanted[0]))
        else:
            local = target - column.start
            bands.append(_WideBand(rows, weights[i], some, local, exact, chunk_rows))
    lse = torch.cat([band.lse for band in bands]).logsumexp(0)
    # Fully masked rows have infinite loss and zero gradient.
    masked = lse == -torch.inf
    loss = torch.where(masked, torch.inf, lse - exact)
    losses, of_bias = torch.empty_like(loss).index_copy_(0, order, loss), None
    if factors is None:
        return losses, [None] * (2 + len(weights))
    scale = factors.index_select(0, order).masked_fill_(masked, 0.0)
    lse.masked_fill_(masked, 0.0)
    known = torch.stack([lse, scale, scale])
    of_hidden = torch.empty_like(hidden) if wanted[0] else None
    if wanted[1]:
        of_bias = lse.new_zeros(layer.n_classes)
    made: list[Tensor | None] = []
    for band, weight, column, part, of_weight, dtype in zip(
        bands, weights, layer.columns, layer.parts, wanted[2:], dtypes, strict=True
    ):
        own_bias = None if of_bias is None else of_bias[column]
        own_hidden = None if of_hidden is None else of_hidden[:, part]
        if isinstance(band, _WideBand):
            made.append(band.gradients(lse, scale, own_hidden, own_bias, dtype, of_weight))
            continue
        local = target - column.start
        if own_hidden is not None:
            shares_of = torch.exp(band.lse - lse).unsqueeze(-1)
            mean = band.mean_vector.mul_(shares_of).sum(0)
            # In float32: the two nearly cancel for rows with a small loss.
            inside = (local >= 0) & (local < weight.shape[0])
            right = weight[local.clamp(0, weight.shape[0] - 1)] * inside.unsqueeze(-1)
            own_hidden.copy_(mean.sub_(right).mul_(scale.unsqueeze(-1)))
        total = None
        if of_weight or own_bias is not None:
            total = empty(weight.shape, dtype, weight.device)
            some = None if bias is None else bias[column]
            gradient_of_classes(
                hidden[:, part], weight, some, local, known, 0.0, 1.0, total, own_bias, False, True
            )
        made.append(total if of_weight else None)
    if of_hidden is not None:
        of_hidden = torch.empty_like(of_hidden).index_copy_(0, order, of_hidden)
    return losses, [of_hidden, of_bias, *made]


class _WideBand:
    """One band whose scores are stored, for one chunk of rows at a time.

    Targets are relative to the band; those outside its range belong to other bands.
    """

    def __init__(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        exact: Tensor,
        chunk_rows: int | str,
    ) -> None:
        n, size = rows.shape[0], weight.shape[0]
        self._rows, self._weight, self._exact = rows, weight, exact
        inside = (target >= 0) & (target < size)
        self._target = torch.where(inside, target, -1)
        self._layer = LayerProducts([weight], bias, n)
        self._step = rows_at_a_time(chunk_rows, rows, size)
        self._memory = self._layer.memory(min(n, self._step), rows.dtype)
        lses = []
        for part in self._chunks():
            scores = self._layer.scores_into(self._memory, rows[part])
            # The kernel replaces the score of the target by `known`. If the target is in another
            # band, class 0 stands in for it, with its own score.
            known = torch.where(inside[part], exact[part], scores[:, 0].float())
            _, lse, *_ = kernels.softmax_rows.forward_(
                "auto", scores, self._target[part].clamp(min=0), known, None, None, *PLAIN, False
            )
            lses.append(lse)
        self.lse = torch.cat(lses).unsqueeze(0)

    def _chunks(self) -> list[slice]:
        n = self._rows.shape[0]
        return [slice(a, min(n, a + self._step)) for a in range(0, max(1, n), self._step)]

    def gradients(
        self,
        lse: Tensor,
        scale: Tensor,
        of_hidden: Tensor | None,
        of_bias: Tensor | None,
        dtype: torch.dtype,
        of_weight: bool,
    ) -> Tensor | None:
        """Returns the gradient of the weight; writes those of hidden and bias in place."""
        layer, total, chunks = self._layer, None, self._chunks()
        if of_weight:
            sum_dtype = weight_sum_dtype(self._rows, self._step, dtype)
            total = empty(self._weight.shape, sum_dtype, self._weight.device)
        for part in chunks:
            memory = self._memory[: part.stop - part.start]
            if len(chunks) == 1:
                scores = layer.scores_in(memory)
            else:
                scores = layer.scores_into(memory, self._rows[part])
            own, push = lse[part], scale[part]
            true = push * torch.expm1(self._exact[part] - own)
            kernels.softmax_rows.gradient_(
                "auto", scores, self._target[part], true, own, push, 0.0, 1.0
            )
            if of_bias is not None:
                of_bias += scores.sum(0, dtype=of_bias.dtype)
            gradient = layer.padded(memory)
            if of_hidden is not None:
                layer.hidden_gradient(of_hidden[part], gradient)
            if total is not None:
                layer.weight_gradient([total], gradient, self._rows[part], adds=part.start > 0)
        return None if total is None else in_dtype(total, dtype)


def _exact(layer: LayerProducts, rows: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """The scores of targets ``(rows, 1)`` in full precision, each from its own band."""
    starts, sizes = _band_bounds(tuple([(a.start, a.stop) for a in layer.columns]), target.device)
    # The target relative to each band, -1 if it is in another one.
    local = target.view(1, -1) - starts
    local = torch.where((local >= 0) & (local < sizes), local, -1).unsqueeze(-1)
    total: Any = None
    for i, (weight, part) in enumerate(zip(layer.weights, layer.parts, strict=True)):
        some = None if bias is None else bias[layer.columns[i]]
        found = kernels.products.scores("auto", rows[:, part], weight, some, local[i])
        total = found if total is None else total.add_(found)
    made: Tensor = total
    return made


@lru_cache(maxsize=64)
def _band_bounds(
    columns: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """First place and size of each band, ``(bands, 1)``; cached to save the copy to the device."""
    bounds = torch.tensor(columns, device=device)
    return bounds[:, :1].contiguous(), (bounds[:, 1:] - bounds[:, :1])


def _in_aligned_widths(hidden: Tensor, weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Hidden and weights, padded with zero columns to aligned widths."""
    n, top = hidden.shape[0], weights[0]
    more = missing_columns(top, n)
    below = [missing_columns(vectors, n) for vectors in weights[2::2]]
    if not more and not any(below):
        return hidden, weights
    wider = [pad(top, (0, more))]
    for projection, vectors, some in zip(weights[1::2], weights[2::2], below, strict=True):
        wider += [pad(projection, (0, more, 0, some)), pad(vectors, (0, some))]
    return pad(hidden, (0, more)), wider


def _product(gradient: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient.T @ rows`` in ``dtype``."""
    if dtype == rows.dtype:
        return torch.mm(gradient.t(), rows)
    # On a GPU no product of float16 has a bfloat16 result, nor the reverse: convert from float32.
    shape = gradient.shape[1], rows.shape[1]
    made = rows.new_empty(shape, dtype=accumulation_dtype(rows.dtype))
    return in_dtype(multiply(made, gradient.t(), rows), dtype)


def _shared_memory(
    rows: Sequence[Tensor], weights: Sequence[Tensor], chunk_rows: int | str
) -> Tensor | None:
    """A buffer that all softmaxes reuse for their scores; None on a GPU or in half precision.

    Allocating memory for each small softmax would take longer than its product.
    """
    if rows[0].device.type != "cpu" or rows[0].itemsize < 4:
        return None
    sizes = [
        some.shape[0] * weight.shape[0]
        for some, weight in zip(rows, weights, strict=True)
        if some.shape[0] <= rows_at_a_time(chunk_rows, some, weight.shape[0])
    ]
    return empty((max(sizes, default=0),), rows[0].dtype)


def softmax(
    problem: Problem, chunk_rows: int | str, memory: Tensor | None, in_order: bool
) -> LossAndGradients:
    """One softmax: all scores at once in the shared ``memory``, or by tiles, slabs or chunks.

    ``in_order`` says that rows are sorted by their targets.
    """
    hidden, weight, bias, target, row_scale, _, wanted, *_ = problem
    n, n_classes = hidden.shape[0], weight.shape[0]
    if memory is None or n * n_classes > memory.shape[0]:
        if tiles_suit(hidden, PLAIN, chunk_rows, wanted):
            return run_tiles(problem, PLAIN, in_order)
        return _softmax_in_chunks(problem, chunk_rows)
    scores = memory.as_strided((n, n_classes), (n_classes, 1))
    if bias is None:
        torch.mm(hidden, weight.t(), out=scores)
    else:
        torch.addmm(bias, hidden, weight.t(), out=scores)
    loss, *_ = kernels.softmax_rows.forward_(
        "auto", scores, target, None, row_scale if wanted.any else None, None, *PLAIN, False
    )  # fmt: skip
    of_hidden = torch.mm(scores, weight) if wanted.hidden else None
    of_weight = torch.mm(scores.t(), hidden) if wanted.weight else None
    return LossAndGradients(loss, (), of_hidden, of_weight, scores.sum(0) if wanted.bias else None)


def _softmax_in_chunks(problem: Problem, chunk_rows: int | str) -> LossAndGradients:
    rows = rows_at_a_time(chunk_rows, problem.hidden, problem.weight.shape[0])
    made = tiles_or_slabs(problem, PLAIN, chunk_rows, rows)
    return run_chunks(cross_entropy_rows(None, *PLAIN), problem, rows) if made is None else made
