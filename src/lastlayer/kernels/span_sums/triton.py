"""Sums over all spans of a text on CUDA, from tiles of scores that are never stored.

A tile has the spans of 64 starts and 64 ends of one text and type. A program owns a block of
tokens, as starts or as ends, and loops over the blocks that form spans with them. Float32 products
are computed as three tf32 products, which is as precise.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import cdiv, next_power_of_2
from lastlayer.kernels.span_sums import SpanParts

# Starts and ends of a tile.
SIDE = 64


def log_sums(parts: SpanParts, target: Tensor, n_types: int) -> Tensor:
    given, numbers, grid, options = _spans(parts, target, n_types)
    query, key, start_bias, end_bias, _ = (_whole(each) for each in parts)
    of_blocks = parts.query.new_empty(2, *grid)
    _walk[grid](
        query, key, start_bias, end_bias, *given, None, None, of_blocks, None, None, *numbers,
        **options, ENDS=False, GRADIENT=False,
    )  # fmt: skip
    sums = of_blocks.logsumexp(-1)
    return torch.logaddexp(sums, torch.zeros_like(sums)).view(2, -1, n_types)


def gradients(
    parts: SpanParts, target: Tensor, found: Tensor, grad: Tensor, n_types: int
) -> list[Tensor | None]:
    given, numbers, grid, options = _spans(parts, target, n_types)
    n_texts, held, n, depth = parts.query.shape
    factors = found.contiguous(), grad.contiguous()
    query, key, start_bias, end_bias, _ = (_whole(each) for each in parts)
    starts, ends = (query, start_bias), (key, end_bias)
    made = []
    for own, other in ((starts, ends), (ends, starts)):
        of_vectors = parts.query.new_empty(n_texts, n_types, n, depth)
        of_bias = None if own[1] is None else torch.empty_like(own[1])
        _walk[grid](
            own[0], other[0], own[1], other[1], *given, *factors, None, of_vectors, of_bias,
            *numbers, **options, ENDS=own is ends, GRADIENT=True,
        )  # fmt: skip
        if held < n_types:
            of_vectors = of_vectors.sum(1, keepdim=True)
        made.append((of_vectors, of_bias))
    (of_query, of_start), (of_key, of_end) = made
    return [of_query, of_key, of_start, of_end]


def _whole(part: Tensor | None) -> Tensor | None:
    """``part``, contiguous, and viewed as bytes if it is bool."""
    if part is None:
        return None
    return part.contiguous().view(torch.uint8) if part.dtype == torch.bool else part.contiguous()


def _spans(
    parts: SpanParts, target: Tensor, n_types: int
) -> tuple[tuple[Tensor | None, ...], tuple[int, ...], tuple[int, int], dict[str, Any]]:
    """Arguments that all passes share: tensors, sizes, the grid, and options of the kernel."""
    n_texts, held, n, depth = parts.query.shape
    blocks, listed = cdiv(n, SIDE), target.dtype != torch.bool
    since = None
    # For listed targets: where the cells of each block of starts begin.
    if listed:
        target = target.sort(-1).values
        since = _first_of_blocks(target, n_types, n, blocks)
    width = max(16, next_power_of_2(depth))
    options = dict(
        SIDE=SIDE, DEPTH=width, EVEN=width == depth, SHARED=held < n_types,
        BIASED=parts.start_bias is not None, MASKED=parts.mask is not None, LISTED=listed,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return (
        (_whole(parts.mask), _whole(target), since),
        (n, depth, n_types, blocks, target.shape[-1]),
        (n_texts * n_types, blocks),
        options,
    )


def _first_of_blocks(cells: Tensor, n_types: int, n: int, blocks: int) -> Tensor:
    """Offsets into the sorted cells of each text, per type and block of starts, and their end."""
    types = torch.arange(n_types + 1, device=cells.device).unsqueeze(-1)
    starts = torch.arange(0, blocks * SIDE, SIDE, device=cells.device)
    bounds = ((types * n + starts) * n).flatten()[: n_types * blocks + 1]
    bounds = bounds.expand(cells.shape[0], -1).contiguous()
    return torch.searchsorted(cells, bounds, out_int32=True)


@kernel(do_not_specialize=["n", "blocks", "listed"])
def _walk(
    vectors, other_vectors, bias, other_bias, mask, target, since, found, grad, parts, of_vectors,
    of_bias, n, depth, n_types, blocks, listed, SIDE: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, SHARED: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr,
    LISTED: tl.constexpr, ENDS: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Writes the sums of a block of starts to ``parts``, or the gradients of a block of tokens.

    With ENDS the block owns ends.
    """
    pair, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_block, last_block = block, blocks
    if ENDS:
        # The last blocks have the most work, so they run first.
        block = blocks - 1 - block
        first_block, last_block = 0, block + 1
    text, kind = pair // n_types, pair % n_types
    held_by = text if SHARED else pair
    vectors += held_by * n * depth
    other_vectors += held_by * n * depth
    if MASKED:
        mask += text * n
    if LISTED:
        target += text * listed
        since += text * (n_types * blocks + 1) + kind * blocks
    else:
        target += pair * n * n

    own = block * SIDE + tl.arange(0, SIDE)
    own_tokens = _tokens(mask, own, n, MASKED)
    own_vectors = _vectors(vectors, own, n, depth, DEPTH, EVEN)
    if BIASED:
        own_bias = tl.load(bias + pair * n + own, mask=own < n, other=0.0)
    if GRADIENT:
        below, by = tl.load(found + pair), tl.load(grad + pair)
        above = tl.load(found + tl.num_programs(0) + pair)
        gradient = tl.zeros((SIDE, DEPTH), dtype=tl.float32)
        bias_gradient = tl.zeros((SIDE,), dtype=tl.float32)
    else:
        below = tl.full((SIDE,), -float("inf"), dtype=tl.float32)
        above = tl.full((SIDE,), -float("inf"), dtype=tl.float32)
        wrongs = tl.zeros((SIDE,), dtype=tl.float32)
        rights = tl.zeros((SIDE,), dtype=tl.float32)

    for step in range(first_block, last_block):
        other = step * SIDE + tl.arange(0, SIDE)
        others = _vectors(other_vectors, other, n, depth, DEPTH, EVEN)
        scores = tl.dot(own_vectors, tl.trans(others), input_precision="tf32x3")
        if BIASED:
            added = tl.load(other_bias + pair * n + other, mask=other < n, other=0.0)
            scores += own_bias[:, None] + added[None, :]
        if ENDS:
            start, end, starts = other[None, :], own[:, None], step
        else:
            start, end, starts = own[:, None], other[None, :], block
        live = own_tokens[:, None] & _tokens(mask, other, n, MASKED)[None, :] & (start <= end)
        first, last = 0, 1
        if LISTED:
            first, last = tl.load(since + starts), tl.load(since + starts + 1)
        right = _right(target, first, last, start, end, live, n, LISTED)
        wrong = live & (right == 0)
        if GRADIENT:
            weights = tl.where(wrong, tl.exp(scores - below) * by, 0.0)
            if first < last:
                weights = tl.where(right, -tl.exp(-scores - above) * by, weights)
            gradient = tl.dot(weights, others, gradient, input_precision="tf32x3")
            if BIASED:
                bias_gradient += tl.sum(weights, 1)
        else:
            below, wrongs = _grown(below, wrongs, tl.where(wrong, scores, -float("inf")))
            if first < last:
                above, rights = _grown(above, rights, tl.where(right, -scores, -float("inf")))

    if GRADIENT:
        number = tl.arange(0, DEPTH)
        place = (pair * n + own)[:, None] * depth + number[None, :]
        there = (own < n)[:, None] & (number < depth)[None, :]
        tl.store(of_vectors + place, gradient, mask=there)
        if BIASED:
            tl.store(of_bias + pair * n + own, bias_gradient, mask=own < n)
    else:
        parts += pair * blocks + block
        tl.store(parts, _log_sum(below, wrongs))
        tl.store(parts + tl.num_programs(0).to(tl.int64) * blocks, _log_sum(above, rights))


@triton.jit
def _vectors(vectors, place, n, depth, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    """The vectors of tokens, 0 beyond the text."""
    number = tl.arange(0, DEPTH)
    there = (place < n)[:, None]
    if not EVEN:
        there = there & (number < depth)[None, :]
    return tl.load(vectors + place[:, None] * depth + number[None, :], mask=there, other=0.0)


@triton.jit
def _tokens(mask, place, n, MASKED: tl.constexpr):
    """Mask of the places that hold a token."""
    there = place < n
    if MASKED:
        there = there & (tl.load(mask + place, mask=there, other=0) != 0)
    return there


@triton.jit
def _right(target, first, last, start, end, live, n, LISTED: tl.constexpr):
    """Mask of the live cells that are right spans."""
    if LISTED:
        right = live & (start < 0)
        for entry in range(first, last):
            cell = tl.load(target + entry)
            right = right | ((start == cell // n % n) & (end == cell % n))
        return right & live
    else:
        return live & (tl.load(target + start.to(tl.int64) * n + end, mask=live, other=0) != 0)


@triton.jit
def _grown(peak, total, values):
    """Adds values to the running maximum and sum of exponentials of each row."""
    grown = tl.maximum(peak, tl.max(values, 1))
    # While all values are -inf, subtract 0, not -inf, which would give NaN.
    origin = tl.where(grown == -float("inf"), 0.0, grown)
    added = tl.sum(tl.exp(values - origin[:, None]), 1)
    return grown, total * tl.exp(peak - origin) + added


@triton.jit
def _log_sum(peak, total):
    highest = tl.max(peak, 0)
    origin = tl.where(highest == -float("inf"), 0.0, highest)
    return origin + tl.log(tl.sum(total * tl.exp(peak - origin), 0))
