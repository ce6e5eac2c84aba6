"""Sums over all spans of a text on CUDA, from tiles of scores that are made and forgotten."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

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


def log_sums(
    query: Tensor,
    key: Tensor,
    start_bias: Tensor | None,
    end_bias: Tensor | None,
    mask: Tensor | None,
    target: Tensor,
    n_types: int,
) -> Tensor:
    """As the reference's."""
    spans = _spans(query, start_bias, mask, target, n_types)
    parts = query.new_empty(2, *spans.grid)
    walk[spans.grid](
        query.contiguous(), key.contiguous(), _whole(start_bias), _whole(end_bias), *spans[:3],
        None, None, parts, None, None, *spans.numbers, **spans.options, ENDS=False, GRADIENT=False,
    )  # fmt: skip
    sums = parts.logsumexp(-1)
    return torch.logaddexp(sums, torch.zeros_like(sums)).view(2, query.shape[0], n_types)


def gradients(
    query: Tensor,
    key: Tensor,
    start_bias: Tensor | None,
    end_bias: Tensor | None,
    mask: Tensor | None,
    target: Tensor,
    found: Tensor,
    grad: Tensor,
    n_types: int,
) -> list[Tensor | None]:
    """As the reference's."""
    spans = _spans(query, start_bias, mask, target, n_types)
    n_texts, shared, n, depth = query.shape
    factors = found.contiguous(), grad.contiguous()
    starts = query.contiguous(), _whole(start_bias)
    ends = key.contiguous(), _whole(end_bias)
    made = []
    for own, other in ((starts, ends), (ends, starts)):
        of_vectors = query.new_empty(n_texts, n_types, n, depth)
        of_bias = None if own[1] is None else torch.empty_like(own[1])
        walk[spans.grid](
            own[0], other[0], own[1], other[1], *spans[:3], *factors, None, of_vectors, of_bias,
            *spans.numbers, **spans.options, ENDS=own is ends, GRADIENT=True,
        )  # fmt: skip
        if shared < n_types:
            of_vectors = of_vectors.sum(1, keepdim=True)
        made.append((of_vectors, of_bias))
    (of_query, of_start), (of_key, of_end) = made
    return [of_query, of_key, of_start, of_end]


def _whole(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _spans(
    query: Tensor, bias: Tensor | None, mask: Tensor | None, target: Tensor, n_types: int
) -> _Spans:
    n_texts, shared, n, depth = query.shape
    blocks, listed = triton.cdiv(n, SIDE), target.dtype != torch.bool
    since = None
    if listed:
        target = target.sort(-1).values
        since = _first_of_blocks(target, n_types, n, blocks)
    width = max(16, triton.next_power_of_2(depth))
    return _Spans(
        None if mask is None else mask.contiguous().view(torch.uint8),
        target if listed else target.contiguous().view(torch.uint8),
        since,
        (n, depth, n_types, blocks, target.shape[-1]),
        (n_texts * n_types, blocks),
        {
            "SIDE": SIDE,
            "DEPTH": width,
            "EVEN": width == depth,
            "SHARED": shared < n_types,
            "BIASED": bias is not None,
            "MASKED": mask is not None,
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
