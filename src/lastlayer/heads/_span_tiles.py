"""Scores of spans, a tile at a time: some texts, some starts, and all ends from there on."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer.kernels.span_sums import SpanParts

# Scores that are held at a time. On a CPU a tile stays near its cache.
_SPANS = {"cuda": 1 << 25, "cpu": 1 << 19}
_LOW_SPANS = {"cuda": 1 << 23, "cpu": 1 << 17}
# Fewer starts than that make thin products; rather take fewer texts.
_STARTS = 64


class Tile(NamedTuple):
    """Spans that start in ``starts`` and end in ``ends``, of all types."""

    texts: slice
    starts: slice
    ends: slice


def tiles(n_texts: int, n_types: int, n: int, n_spans: int) -> Iterator[Tile]:
    """Tiles of at most ``n_spans`` scores, or of one start of one text; in order of texts, starts.

    No span ends before it starts, so a tile has no ends before its first start: about half of the
    square is never made.
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
    """Cells that end before they start, or at which there is no token; broadcasts to the scores."""
    place = torch.arange(tile.ends.stop, device=parts.query.device)
    backward = place[tile.starts].unsqueeze(-1) > place[tile.ends]
    if parts.mask is None:
        return backward
    absent = ~parts.mask[tile.texts].unsqueeze(1)
    return backward | absent[..., tile.starts].unsqueeze(-1) | absent[..., tile.ends].unsqueeze(-2)


def spans_at_a_time(chunk_spans: int | str, device: torch.device) -> int:
    """How many scores a tile has, from what the user said."""
    if isinstance(chunk_spans, int):
        return chunk_spans
    kind = "cpu" if device.type == "cpu" else "cuda"
    return (_SPANS if chunk_spans == "auto" else _LOW_SPANS)[kind]


def check_chunk_spans(chunk_spans: Any) -> None:
    """A whole number of at least 1, "auto" or "low"."""
    if isinstance(chunk_spans, str) and chunk_spans in ("auto", "low"):
        return
    if not isinstance(chunk_spans, int) or isinstance(chunk_spans, bool):
        raise TypeError(
            "chunk_spans: expected an int, 'auto' or 'low', got "
            f"{type(chunk_spans).__name__} {chunk_spans!r}"
        )
    if chunk_spans < 1:
        raise ValueError(f"chunk_spans: expected at least 1, got {chunk_spans}")
