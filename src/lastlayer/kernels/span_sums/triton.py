"""Sums over all spans of a text on CUDA, from tiles of scores that are made and forgotten."""

from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer.kernels._triton import cdiv, next_power_of_2
from lastlayer.kernels.span_sums import SpanParts
from lastlayer.kernels.span_sums._tiles_triton import walk

# Starts and ends of a tile.
SIDE = 64


class _Spans(NamedTuple):
    """What is the same in all passes, as the kernel takes it."""

    mask: Tensor | None
    target: Tensor
    # Of listed targets, where those of each block of starts begin.
    since: Tensor | None
    numbers: tuple[int, ...]
    grid: tuple[int, int]
    options: dict[str, int | bool]


def log_sums(parts: SpanParts, target: Tensor, n_types: int) -> Tensor:
    """As the reference's."""
    spans = _spans(parts, target, n_types)
    query, key, start_bias, end_bias, _ = (_whole(each) for each in parts)
    of_blocks = parts.query.new_empty(2, *spans.grid)
    walk[spans.grid](
        query, key, start_bias, end_bias, *spans[:3], None, None, of_blocks, None, None,
        *spans.numbers, **spans.options, ENDS=False, GRADIENT=False,
    )  # fmt: skip
    sums = of_blocks.logsumexp(-1)
    return torch.logaddexp(sums, torch.zeros_like(sums)).view(2, -1, n_types)


def gradients(
    parts: SpanParts, target: Tensor, found: Tensor, grad: Tensor, n_types: int
) -> list[Tensor | None]:
    """As the reference's."""
    spans = _spans(parts, target, n_types)
    n_texts, held, n, depth = parts.query.shape
    factors = found.contiguous(), grad.contiguous()
    query, key, start_bias, end_bias, _ = (_whole(each) for each in parts)
    starts, ends = (query, start_bias), (key, end_bias)
    made = []
    for own, other in ((starts, ends), (ends, starts)):
        of_vectors = parts.query.new_empty(n_texts, n_types, n, depth)
        of_bias = None if own[1] is None else torch.empty_like(own[1])
        walk[spans.grid](
            own[0], other[0], own[1], other[1], *spans[:3], *factors, None, of_vectors, of_bias,
            *spans.numbers, **spans.options, ENDS=own is ends, GRADIENT=True,
        )  # fmt: skip
        if held < n_types:
            of_vectors = of_vectors.sum(1, keepdim=True)
        made.append((of_vectors, of_bias))
    (of_query, of_start), (of_key, of_end) = made
    return [of_query, of_key, of_start, of_end]


def _whole(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.contiguous()


def _spans(parts: SpanParts, target: Tensor, n_types: int) -> _Spans:
    n_texts, held, n, depth = parts.query.shape
    blocks, listed = cdiv(n, SIDE), target.dtype != torch.bool
    since = None
    if listed:
        target = target.sort(-1).values
        since = _first_of_blocks(target, n_types, n, blocks)
    width = max(16, next_power_of_2(depth))
    return _Spans(
        None if parts.mask is None else parts.mask.contiguous().view(torch.uint8),
        target if listed else target.contiguous().view(torch.uint8),
        since,
        (n, depth, n_types, blocks, target.shape[-1]),
        (n_texts * n_types, blocks),
        {
            "SIDE": SIDE,
            "DEPTH": width,
            "EVEN": width == depth,
            "SHARED": held < n_types,
            "BIASED": parts.start_bias is not None,
            "MASKED": parts.mask is not None,
            "LISTED": listed,
            "num_warps": 4,
            "num_stages": 2,
            "enable_fp_fusion": True,
        },
    )


def _first_of_blocks(cells: Tensor, n_types: int, n: int, blocks: int) -> Tensor:
    """Where in the sorted cells of a text each block of starts of each type begins; the end too."""
    types = torch.arange(n_types + 1, device=cells.device).unsqueeze(-1)
    starts = torch.arange(0, blocks * SIDE, SIDE, device=cells.device)
    bounds = ((types * n + starts) * n).flatten()[: n_types * blocks + 1]
    bounds = bounds.expand(cells.shape[0], -1).contiguous()
    return torch.searchsorted(cells, bounds, out_int32=True)
