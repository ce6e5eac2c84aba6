"""From scores to spans, a tile at a time."""

import math
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer.heads._span_tiles import Tile, not_spans, tile_scores, tiles
from lastlayer.heads._top import top_classes
from lastlayer.kernels.span_sums import SpanParts


class Span(NamedTuple):
    """A span that was found in a text, whose tokens are ``tokens[start : end + 1]``."""

    type: int
    """Which of the head's types."""
    start: int
    """Its first token."""
    end: int
    """Its last token, itself included."""
    score: float
    """Its score, above the threshold."""


class _Found(NamedTuple):
    """Text, start, end and type, ``(k, 4)``, and the scores, ``(k,)``."""

    places: Tensor
    scores: Tensor


def decoded(
    parts: SpanParts, n_types: int, threshold: float, max_spans: int | None, n_spans: int
) -> list[list[Span]]:
    """For each text the spans with scores above the threshold, by start, end and type.

    Of more than ``max_spans`` the best; of equal ones those that come first.
    """
    n_texts, n = parts.query.shape[0], parts.query.shape[2]
    spans: list[list[Span]] = [[] for _ in range(n_texts)]
    for _, of_texts in groupby(tiles(n_texts, n_types, n, n_spans), key=lambda tile: tile.texts):
        if max_spans is None:
            found = [_all_above(parts, tile, threshold) for tile in of_texts]
        else:
            found = [_best_above(parts, of_texts, threshold, max_spans)]
        for places, scores in found:
            for (text, start, end, kind), score in zip(
                places.tolist(), scores.tolist(), strict=True
            ):
                spans[text].append(Span(kind, start, end, score))
    return [sorted(each, key=lambda span: (span.start, span.end, span.type)) for each in spans]


def _scores(parts: SpanParts, tile: Tile) -> Tensor:
    """``(texts, starts, ends, types)``: the cells of a text in the order of start, end, type."""
    scores = tile_scores(parts, tile)
    # A NaN is above no threshold, but would take the place of a span among the best.
    scores = scores.masked_fill_(not_spans(parts, tile) | scores.isnan(), -math.inf)
    return scores.permute(0, 2, 3, 1)


def _all_above(parts: SpanParts, tile: Tile, threshold: float) -> _Found:
    scores = _scores(parts, tile)
    at = (scores > threshold).nonzero()
    first = [tile.texts.start, tile.starts.start, tile.ends.start, 0]
    return _Found(at + torch.tensor(first, device=at.device), scores[at.unbind(-1)])


def _best_above(
    parts: SpanParts, of_texts: Iterable[Tile], threshold: float, max_spans: int
) -> _Found:
    """Of the tiles of some texts: what was best so far competes with the best of each tile."""
    best = _Found(torch.empty(0), torch.empty(0))
    for tile in of_texts:
        places, scores = _best_of_tile(_scores(parts, tile), tile, max_spans)
        if best.scores.numel():
            # Earlier starts come first, so that of equal scores they stay.
            places = torch.cat([best.places, places], 1)
            scores = torch.cat([best.scores, scores], 1)
        scores, order = top_classes(scores, min(max_spans, scores.shape[1]))
        best = _Found(places.gather(1, order.unsqueeze(-1).expand(*order.shape, 4)), scores)
    above = best.scores > threshold
    return _Found(best.places[above], best.scores[above])


def _best_of_tile(scores: Tensor, tile: Tile, max_spans: int) -> _Found:
    width, n_types = scores.shape[2:]
    cells = scores.flatten(1)
    values, cell = top_classes(cells, min(max_spans, cells.shape[1]))
    text = torch.arange(tile.texts.start, tile.texts.stop, device=cell.device)
    start, end = cell // (width * n_types), cell // n_types % width
    places = (
        text.unsqueeze(-1).expand_as(cell),
        start + tile.starts.start,
        end + tile.ends.start,
        cell % n_types,
    )
    return _Found(torch.stack(places, -1), values)
