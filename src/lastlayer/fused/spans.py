r"""The engine of ZLPR over all spans of a text, without the full matrix of span scores.

A row is one text and one type. Its loss is :math:`\log(1 + A) + \log(1 + B)`, where :math:`A` is
the sum of :math:`e^s` over negative spans and :math:`B` the sum of :math:`e^{-s}` over positive
ones. Scores are computed in tiles: some texts, some starts, and all ends from the first start on.
A first pass over the tiles computes both sums. A second pass recomputes each tile but the last,
and the score gradients :math:`e^{s}/(1 + A)` and :math:`-e^{-s}/(1 + B)`, from which it updates the
gradients of the vectors. On CUDA :mod:`lastlayer.kernels.span_sums` does this without storing
tiles, for vectors of up to 64 elements.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._torch import values_are_checked, without_autocast
from lastlayer.fused.function import Call, Engine, Result, RowScale, empty_gradients, fused_loss
from lastlayer.fused.label_lists import each_once_
from lastlayer.fused.scores import spans_at_a_time
from lastlayer.kernels.span_sums import SpanParts

# Tiles have at least this many starts, and rather fewer texts: thin products are slow.
_STARTS = 64
# Longer vectors need more shared memory than some devices have.
_WIDEST = 64


class Tile(NamedTuple):
    """Spans that start in ``starts`` and end in ``ends``, of all types."""

    texts: slice
    starts: slice
    ends: slice


def tiles(n_texts: int, n_types: int, n: int, n_spans: int) -> Iterator[Tile]:
    """Tiles of at most ``n_spans`` scores, or of one start of one text; in order of texts, starts.

    No span ends before it starts, so a tile has no ends before its first start. About half of all
    (start, end) pairs are never computed.
    """
    texts = max(1, n_spans // (n_types * n * min(n, _STARTS)))
    starts = max(1, n_spans // (n_types * n * min(texts, max(1, n_texts))))
    for text in range(0, n_texts, texts):
        for start in range(0, n, starts):
            yield Tile(
                slice(text, min(n_texts, text + texts)),
                slice(start, min(n, start + starts)),
                slice(start, n),
            )


def tile_scores(parts: SpanParts, tile: Tile) -> Tensor:
    """Scores of all cells of a tile, ``(texts, types, starts, ends)``."""
    query = parts.query[tile.texts, :, tile.starts]
    scores = query @ parts.key[tile.texts, :, tile.ends].mT
    if parts.start_bias is None or parts.end_bias is None:
        return scores
    start_bias = parts.start_bias[tile.texts, :, tile.starts].unsqueeze(-1)
    return (scores + start_bias).add_(parts.end_bias[tile.texts, :, tile.ends].unsqueeze(-2))


def not_spans(parts: SpanParts, tile: Tile) -> Tensor:
    """Cells that end before they start or lie at a masked token; broadcasts to the scores."""
    place = torch.arange(tile.ends.stop, device=parts.query.device)
    backward = place[tile.starts].unsqueeze(-1) > place[tile.ends]
    if parts.mask is None:
        return backward
    absent = ~parts.mask[tile.texts].unsqueeze(1)
    return backward | absent[..., tile.starts].unsqueeze(-1) | absent[..., tile.ends].unsqueeze(-2)


def span_loss(
    parts: SpanParts, target: Tensor, n_types: int, reduction: str, chunk_spans: int | str
) -> Tensor:
    """The reduced loss; with "none" that of each text and type, ``(texts, types)``.

    ``parts`` are float32 or float64. ``target`` is checked: bools ``(texts, types, n, n)``, or
    int64 lists of (type, start, end), ``(texts, m, 3)``, in which negative types are padding. The
    mean is over the types of all texts that have a token.
    """
    if target.dtype != torch.bool:
        target = _listed_cells(target, n_types, parts.query.shape[2], parts.mask)
    n_spans = spans_at_a_time(chunk_spans, parts.query)
    return fused_loss(SPANS, (*parts, target), (n_types, n_spans), reduction)[0]


def _listed_cells(spans: Tensor, n_types: int, n: int, mask: Tensor | None) -> Tensor:
    """Spans ``(texts, m, 3)`` as sorted cell indices ``(type · n + start) · n + end``.

    Padding, duplicates, and spans without a score (at a masked token, or out of range) are -1.
    There is at least one entry, so that reductions over the entries are defined.
    """
    if not spans.shape[1]:
        return spans.new_full((spans.shape[0], 1), -1)
    kind, start, end = spans.unbind(-1)
    counts = kind >= 0
    if not values_are_checked(spans):
        counts = counts & (kind < n_types) & (start >= 0) & (start <= end) & (end < n)
    if mask is not None:
        ends = [mask.gather(1, torch.where(counts, each, 0)) for each in (start, end)]
        counts = counts & ends[0] & ends[1]
    cells = torch.add(end, torch.add(start, kind, alpha=n), alpha=n)
    cells = torch.where(counts, cells, -1).sort(-1).values
    each_once_(cells)
    return cells


class _SpansEngine(Engine):
    """Operands: query, key, start_bias, end_bias; mask, target.

    With ``reduction="none"`` the forward pass saves the two sums of all rows; backward gets them
    after the operands.
    """

    name = "span_loss"
    schema = "int n_types, int n_spans"
    n_constants = 2
    what = "the fused loss of spans"
    instead = "lastlayer.zlpr_loss on what head.scores(hidden) returns"

    def compute(self, call: Call) -> Result:
        operands, options, reduction, wanted, upstream = call
        parts, target, found = SpanParts(*operands[:5]), operands[5], None
        if len(operands) > 6:
            found = operands[6]
        n_types, n_spans = options
        n_rows = parts.query.shape[0] * n_types
        with without_autocast(parts.query):
            divisor: Tensor | float = 1.0
            if reduction == "mean":
                # Texts without a token have loss 0.
                divisor = float(n_rows)
                if parts.mask is not None:
                    divisor = parts.mask.any(-1).sum() * n_types
            scale, factors = RowScale(None, divisor), None
            if call.makes_gradients:
                factors = scale.factors(parts.query, n_rows, upstream).view(-1, n_types)
            found, made = _sums_and_gradients(parts, target, n_types, n_spans, found, factors)
            loss = scale.reduce(found.sum(0) if reduction == "none" else found, reduction)
        if reduction == "none" and upstream is None:
            return Result(loss, (found,))
        pieces = [each if need else None for each, need in zip(made, wanted, strict=True)]
        return Result(loss, pieces)

    def fake(self, call: Call) -> Result:
        query, n_types = call.operands[0], call.options[0]
        gradients = empty_gradients(call.operands, call.wanted)
        if call.reduction != "none":
            return Result(query.new_empty(()), gradients)
        loss = query.new_empty(query.shape[0], n_types)
        sums = query.new_empty(2, query.shape[0], n_types)
        return Result(loss, (sums,) if call.upstream is None else gradients)


SPANS = _SpansEngine()
# Gradients of query, key and the two biases; None if absent or not wanted.
_Gradients = list[Tensor | None]


def _kernels_suit(query: Tensor) -> bool:
    """Whether the kernels support these vectors. They need TF32, and so sm_80."""
    return (
        query.device.type == "cuda"
        and kernels.available()["triton"] is None
        and query.dtype == torch.float32
        and query.shape[-1] <= _WIDEST
        and query.numel() > 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _sums_and_gradients(
    parts: SpanParts,
    target: Tensor,
    n_types: int,
    n_spans: int,
    found: Tensor | None,
    factors: Tensor | None,
) -> tuple[Tensor, _Gradients]:
    """``log(1 + A)`` and ``log(1 + B)`` of each row, ``(2, texts, types)``; and the gradients.

    The sums are computed unless given as ``found``; the gradients only if ``factors`` are given.
    """
    query, key, start_bias = parts[:3]
    if _kernels_suit(query):
        # Imported here: Triton may not be installed.
        from lastlayer.kernels.span_sums import triton as span_sums

        if found is None:
            found = span_sums.log_sums(parts, target, n_types)
        if factors is None:
            return found, [None] * 4
        return found, span_sums.gradients(parts, target, found, factors, n_types)
    n_texts, shared, n, _ = query.shape
    every = list(tiles(n_texts, n_types, n, n_spans))
    held: tuple[Tensor, _RightSpans] | None = None
    if found is None:
        found = query.new_zeros(2, n_texts, n_types)
        for tile in every:
            scores, right = held = _cells(parts, tile, target, n_types)
            added = torch.stack([scores.flatten(-2).logsumexp(-1), right.log_sum(n_types)])
            found[:, tile.texts] = torch.logaddexp(found[:, tile.texts], added)
    if factors is None:
        return found, [None] * 4
    totals: _Gradients = [
        None if each is None else torch.zeros_like(each) for each in parts[:4]
    ] if len(every) != 1 else [None] * 4  # fmt: skip
    for tile in reversed(every):
        texts, starts, ends = tile
        scores, right = held or _cells(parts, tile, target, n_types)
        held = None
        below, above = found[:, texts].unbind()
        scores = scores.sub_(below[..., None, None]).exp_()
        right.pull_(scores, above)
        scores *= factors[texts, :, None, None]
        of_biases: _Gradients = [None, None]
        if start_bias is not None:
            of_biases = [scores.sum(-1), scores.sum(-2)]
        if shared < n_types:
            scores = scores.sum(1, keepdim=True)
        made = scores @ key[texts, :, ends], scores.mT @ query[texts, :, starts], *of_biases
        if len(every) == 1:
            return found, list(made)
        for total, part, places in zip(totals, made, (starts, ends, starts, ends), strict=True):
            if total is not None and part is not None:
                total[texts, :, places] += part
    return found, totals


def _cells(
    parts: SpanParts, tile: Tile, target: Tensor, n_types: int
) -> tuple[Tensor, "_RightSpans"]:
    """The scores of a tile's negative spans, -inf elsewhere, and those of its positive spans."""
    absent = not_spans(parts, tile)
    scores = tile_scores(parts, tile).contiguous().masked_fill_(absent, -math.inf)
    if target.dtype == torch.bool:
        on = target[tile.texts, :, tile.starts, tile.ends] & ~absent
        right = torch.where(on, scores, math.inf)
        scores.masked_fill_(on, -math.inf)
        return scores, _RightSpans(right)
    cells, n = target[tile.texts], parts.query.shape[2]
    texts, _, height, width = scores.shape
    types, starts, ends = cells // (n * n), cells // n % n, cells % n
    inside = (cells >= 0) & (starts >= tile.starts.start) & (starts < tile.starts.stop)
    types = torch.where(inside, types, 0)
    text = torch.arange(texts, device=cells.device).unsqueeze(-1)
    row = (text * n_types + types) * height + starts - tile.starts.start
    # Spans outside the tile point at its first cell, and add 0 there.
    place = torch.where(inside, row * width + ends - tile.ends.start, 0)
    flat = scores.view(-1)
    right = torch.where(inside, flat[place], math.inf)
    hidden = torch.zeros_like(right).masked_fill_(inside, -math.inf)
    flat.scatter_add_(0, place.view(-1), hidden.view(-1))
    return scores, _RightSpans(right, place, types)


class _RightSpans(NamedTuple):
    """Scores of the positive spans of a tile, for all cells or as a list; +inf for other cells."""

    scores: Tensor
    place: Tensor | None = None
    """Flat index of each listed span in the tile."""
    types: Tensor | None = None

    def log_sum(self, n_types: int) -> Tensor:
        """The log of the sum of exp(-score), ``(texts, types)``."""
        if self.types is None:
            return self.scores.neg().flatten(-2).logsumexp(-1)
        kinds = torch.arange(n_types, device=self.scores.device).unsqueeze(-1)
        of_type = self.types.unsqueeze(1) == kinds
        return torch.where(of_type, -self.scores.unsqueeze(1), -math.inf).logsumexp(-1)

    def pull_(self, gradient: Tensor, above: Tensor) -> None:
        """Subtracts exp(-score - above) at positive spans; ``above`` is ``(texts, types)``."""
        if self.place is None or self.types is None:
            gradient.sub_((self.scores + above[..., None, None]).neg_().exp_())
        else:
            shares = (self.scores + above.gather(1, self.types)).neg_().exp_().neg_()
            gradient.view(-1).scatter_add_(0, self.place.view(-1), shares.view(-1))
