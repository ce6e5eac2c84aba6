"""Attention with entmax weights in Triton: blocks of keys that nobody looks at are passed over."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import cdiv, next_power_of_2, philox
from lastlayer.kernels.attention import Kept, Problem
from lastlayer.kernels.entmax.threshold import (
    advance,
    alpha_gradient,
    alpha_terms,
    correction,
    is_broken,
    kind_of,
    leap,
    polished,
    shares,
    unsolved_row,
)

# Up to this size of heads a program holds the larger blocks.
_NARROW = 128


def _blocks(p: Problem) -> tuple[int, int, int, int]:
    """Queries and keys of a block, and the sizes that heads are padded to."""
    depth, wide = (max(16, next_power_of_2(each.shape[-1])) for each in (p.query, p.value))
    rows, columns = (64, 64) if max(depth, wide) <= _NARROW else (32, 32)
    return rows, columns, depth, wide


def block_shape(p: Problem) -> tuple[int, int, int, int]:
    """That of :attr:`Kept.blocks`."""
    rows, columns, _, _ = _blocks(p)
    batch, heads, n, _ = p.query.shape
    return batch, heads, cdiv(n, rows), cdiv(max(1, p.key.shape[2]), columns)


def forward(p: Problem, keeps: bool) -> tuple[Tensor, Kept | None]:
    """The output, and what backward needs where it ``keeps`` that."""
    batch, heads, n, _ = p.query.shape
    size = p.value.shape[-1]
    out = p.query.new_empty(batch, heads, n, size)
    mixed = out.new_empty(out.shape if keeps else (0,), dtype=torch.float32)
    numbers = mixed.new_empty(4, batch, heads, n)
    blocks = torch.zeros(block_shape(p), dtype=torch.uint8, device=out.device)
    tiles = blocks.shape[2]
    _forward[(tiles, batch * heads)](
        p.query, p.key, p.value, *_shared(p), out, mixed, numbers, blocks, *_sizes(p, blocks),
        out.stride(0), out.stride(1), out.stride(2), KEEPS=keeps, **_options(p),
    )  # fmt: skip
    return out, Kept(mixed, numbers, blocks) if keeps else None


def backward(p: Problem, kept: Kept, grad: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    """Of query, key, value and the alpha of each head; None where not ``wanted``."""
    to_query, to_key, to_value, to_alpha, _ = wanted
    (batch, heads, n, _), (_, key_heads, m, _) = p.query.shape, p.key.shape
    grad = grad.contiguous()
    mean = (kept.mixed * grad).sum(-1)
    of_query = of_key = of_value = of_alpha = None
    if to_query or to_alpha:
        of_query = torch.empty_like(p.query, memory_format=torch.contiguous_format)
        of_rows = mean.new_empty((batch, heads, n) if to_alpha else (0,))
        _query_gradient[(kept.blocks.shape[2], batch * heads)](
            p.query, p.key, p.value, *_shared(p), grad, mean, kept.numbers, kept.blocks, of_query,
            of_rows, *_sizes(p, kept.blocks), TO_ALPHA=to_alpha, **_options(p),
        )  # fmt: skip
        of_alpha = of_rows.sum(-1) if to_alpha else None
    if to_key or to_value:
        of_key = torch.empty_like(p.key, memory_format=torch.contiguous_format)
        of_value = torch.empty_like(p.value, memory_format=torch.contiguous_format)
        if m:
            _key_gradient[(kept.blocks.shape[3], batch * key_heads)](
                p.query, p.key, p.value, *_shared(p), grad, mean, kept.numbers, kept.blocks,
                of_key, of_value, *_sizes(p, kept.blocks), **_options(p),
            )  # fmt: skip
    made = of_query, of_key, of_value, of_alpha
    return [each if asked else None for each, asked in zip(made, wanted, strict=False)] + [None]


def _shared(p: Problem) -> tuple[Tensor | None, ...]:
    """Pointers that all kernels take."""
    alphas = None if p.head_alpha is None else p.head_alpha.float().contiguous()
    mask = p.mask
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    return alphas, mask, p.seed, p.first, p.stop, p.place


def _sizes(p: Problem, blocks: Tensor) -> tuple[int | float, ...]:
    """Numbers that all kernels take."""
    excess = 0.0 if p.head_alpha is not None else p.alpha - 1.0
    mask = (0, 0, 0, 0) if p.mask is None else p.mask.stride()
    return (
        p.query.shape[2], p.key.shape[2], p.query.shape[1], p.query.shape[1] // p.key.shape[1],
        p.query.shape[3], p.value.shape[3], blocks.shape[2], blocks.shape[3], p.scale, excess,
        p.left, p.right, p.offset, p.dropout, *p.query.stride(), *p.key.stride(),
        *p.value.stride(), *mask,
    )  # fmt: skip


def _options(p: Problem) -> dict[str, int | bool]:
    rows, columns, depth, wide = _blocks(p)
    mask = 0 if p.mask is None else 1 if p.mask.dtype == torch.bool else 2
    return dict(
        ROWS=rows, COLUMNS=columns, DEPTH=depth, WIDE=wide, MASK=mask,
        KIND=0 if p.head_alpha is not None else kind_of(p.alpha), num_warps=4,
        # Loops end when sums say so, and every thread must see the same sums.
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _seen(row, n, m, first, stop, place, left, right, offset):
    """The first key that each query may look at, and one past the last."""
    low = tl.zeros_like(row)
    high = tl.where(row < n, m, 0)
    at = row + offset
    if first is not None:
        low = tl.load(first + row, mask=row < n, other=0)
        high = tl.load(stop + row, mask=row < n, other=0)
        at = tl.load(place + row, mask=row < n, other=0)
    if left >= 0:
        low = tl.maximum(low, at - left)
    if right >= 0:
        high = tl.minimum(high, at + right + 1)
    return low, high


@triton.jit
def _load(base, row, row_stride, step, step_stride, n, size):
    """Rows of a matrix, (rows, steps), 0 where there are none."""
    place = base + row[:, None].to(tl.int64) * row_stride + step[None, :] * step_stride
    return tl.load(place, mask=(row < n)[:, None] & (step < size)[None, :], other=0.0)


@triton.jit
def _product(left, right):
    """In float32; float32 operands are not rounded to TF32."""
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _scores(
    query, keys, row, column, low, high, mask, mask_row, mask_column, n, m, scale,
    MASK: tl.constexpr,
):  # fmt: skip
    """Of a block, -inf where a query may not look; NaN becomes inf, as rows tell it by that."""
    made = _product(query, tl.trans(keys)) * scale
    allowed = (column[None, :] >= low[:, None]) & (column[None, :] < high[:, None])
    if MASK > 0:
        there = (row < n)[:, None] & (column < m)[None, :]
        place = mask + row[:, None].to(tl.int64) * mask_row + column[None, :] * mask_column
        if MASK == 1:
            allowed = allowed & (tl.load(place, mask=there, other=0) != 0)
        else:
            made += tl.load(place, mask=there, other=0.0).to(tl.float32)
    made = tl.where(made != made, float("inf"), made)
    return tl.where(allowed, made, -float("inf"))


@triton.jit
def _distance(made, origin, broken):
    """How far scores lie below the largest of their row; in broken rows nothing counts."""
    return tl.where(broken[:, None], -float("inf"), made - origin[:, None])


@triton.jit
def _finished(probs, slope, missing, excess, KIND: tl.constexpr):
    """Weights after the last step, and their slopes ``p ** (2 - alpha)``."""
    probs = polished(probs, slope, missing[:, None])
    if KIND == 0:
        # The last step may be too long for slopes from before it.
        slope = tl.exp((1.0 - excess)[:, None] * tl.log(tl.where(probs != 0.0, probs, 1.0)))
    return probs, tl.where(probs != 0.0, slope, 0.0)


@triton.jit
def _kept_share(seed, head, row, column, n, m, dropout):
    """What dropout multiplies weights by."""
    entry = (head * n + row[:, None]) * m + column[None, :]
    word, _, _, _ = philox(entry, tl.load(seed), entry * 0)
    uniform = word.to(tl.float32) * (1.0 / 4294967296.0)
    return tl.where(uniform >= dropout, 1.0 / (1.0 - dropout), 0.0)


@kernel
def _forward(
    query, key, value, alphas, mask, seed, first, stop, place, out, mixed, numbers, blocks,
    n, m, heads, group, depth, wide, tiles, n_blocks, scale, excess, left, right, offset, dropout,
    q_batch, q_head, q_row, q_step, k_batch, k_head, k_row, k_step, v_batch, v_head, v_row, v_step,
    mask_batch, mask_head, mask_row, mask_column, out_batch, out_head, out_row,
    KEEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    WIDE: tl.constexpr, MASK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch, own = head // heads, head % heads
    row = tile * ROWS + tl.arange(0, ROWS)
    step, wide_step = tl.arange(0, DEPTH), tl.arange(0, WIDE)
    key += batch * k_batch + own // group * k_head
    value += batch * v_batch + own // group * v_head
    if MASK > 0:
        mask += batch * mask_batch + own * mask_head
    if alphas is not None:
        excess = tl.load(alphas + head) - 1.0
    excess += tl.zeros((ROWS,), dtype=tl.float32)
    blocks += (head * tiles + tile) * n_blocks
    states = _load(query + batch * q_batch + own * q_head, row, q_row, step, q_step, n, depth)
    low, high = _seen(row, n, m, first, stop, place, left, right, offset)
    begin = tl.maximum(tl.min(tl.where(low < high, low, m), 0), 0) // COLUMNS
    end = (tl.max(tl.where(low < high, high, 0), 0) + COLUMNS - 1) // COLUMNS

    peak = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    for block in range(begin, end):
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        keys = _load(key, column, k_row, step, k_step, m, depth)
        made = _scores(
            states, keys, row, column, low, high, mask, mask_row, mask_column, n, m, scale, MASK
        )
        peak = tl.maximum(peak, tl.max(made, 1))
    broken = is_broken(peak, excess, KIND)
    origin = tl.where((peak == -float("inf")) | broken, 0.0, peak)

    at = unsolved_row(origin, KIND)
    lowest = at * 0.0 - tl.log(tl.maximum(m, 1).to(tl.float32))
    highest = at
    total = tl.zeros((ROWS,), dtype=tl.float32)
    weight = tl.zeros((ROWS,), dtype=tl.float32)
    for block in range(begin, end):
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        keys = _load(key, column, k_row, step, k_step, m, depth)
        made = _scores(
            states, keys, row, column, low, high, mask, mask_row, mask_column, n, m, scale, MASK
        )
        probs, slope = shares(_distance(made, origin, broken), at[:, None], excess[:, None], KIND)
        total += tl.sum(probs, 1)
        weight += tl.sum(slope, 1)
        # The unknown only rises from here: a block without a share now never gets one.
        tl.store(blocks + block, (tl.max(tl.max(probs, 1), 0) > 0.0).to(tl.uint8))
    trips = 0
    if KIND > 0:
        at, go = leap(at, total, weight, KIND)
    else:
        at, lowest, highest, go = advance(at, lowest, highest, total, weight, excess, trips, KIND)
    unsolved = tl.max(go.to(tl.int32), 0) > 0
    tl.debug_barrier()
    while unsolved:
        total = tl.zeros((ROWS,), dtype=tl.float32)
        weight = tl.zeros((ROWS,), dtype=tl.float32)
        for block in range(begin, end):
            if tl.load(blocks + block) != 0:
                column = block * COLUMNS + tl.arange(0, COLUMNS)
                keys = _load(key, column, k_row, step, k_step, m, depth)
                made = _scores(
                    states,
                    keys,
                    row,
                    column,
                    low,
                    high,
                    mask,
                    mask_row,
                    mask_column,
                    n,
                    m,
                    scale,
                    MASK,
                )
                probs, slope = shares(
                    _distance(made, origin, broken), at[:, None], excess[:, None], KIND
                )
                total += tl.sum(probs, 1)
                weight += tl.sum(slope, 1)
        trips += 1
        at, lowest, highest, go = advance(at, lowest, highest, total, weight, excess, trips, KIND)
        unsolved = tl.max(go.to(tl.int32), 0) > 0

    missing = correction(total, weight, broken)
    outputs = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    means = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    reached = tl.zeros((ROWS,), dtype=tl.float32)
    sloped = tl.zeros((ROWS,), dtype=tl.float32)
    for block in range(begin, end):
        if tl.load(blocks + block) != 0:
            column = block * COLUMNS + tl.arange(0, COLUMNS)
            keys = _load(key, column, k_row, step, k_step, m, depth)
            made = _scores(
                states, keys, row, column, low, high, mask, mask_row, mask_column, n, m, scale, MASK
            )
            probs, slope = shares(
                _distance(made, origin, broken), at[:, None], excess[:, None], KIND
            )
            probs, slope = _finished(probs, slope, missing, excess, KIND)
            reached += tl.sum(probs, 1)
            sloped += tl.sum(slope, 1)
            # Of the final threshold: what backward passes over.
            tl.store(
                blocks + block, (tl.max(tl.max((probs != 0.0).to(tl.int32), 1), 0)).to(tl.uint8)
            )
            if seed is not None:
                share = _kept_share(seed, head, row, column, n, m, dropout)
                probs, slope = probs * share, slope * share
            vectors = _load(value, column, v_row, wide_step, v_step, m, wide)
            outputs += _product(probs.to(vectors.dtype), vectors)
            if KEEPS:
                means += _product(slope.to(vectors.dtype), vectors)
    # Where alpha > 2 slopes are steep at the edge of the support, and the last step overshoots.
    factor = tl.where(
        (excess > 1.0) & (reached != 0.0), 1.0 / tl.where(reached == 0.0, 1.0, reached), 1.0
    )
    outputs = outputs * factor[:, None]
    # A row without a result has no block that counts.
    outputs = tl.where(broken[:, None], float("nan"), outputs)
    into = out + batch * out_batch + own * out_head
    there = (row < n)[:, None] & (wide_step < wide)[None, :]
    place_out = row[:, None].to(tl.int64) * out_row + wide_step[None, :]
    tl.store(into + place_out, outputs.to(out.dtype.element_ty), mask=there)
    if KEEPS:
        means = means / tl.where(sloped == 0.0, 1.0, sloped)[:, None]
        means = tl.where(broken[:, None], float("nan"), means)
        into = mixed + head * n * wide
        tl.store(into + row[:, None].to(tl.int64) * wide + wide_step[None, :], means, mask=there)
        rows_there = row < n
        every = tl.num_programs(1).to(tl.int64) * n
        numbers += head * n + row
        tl.store(numbers, tl.where(broken, float("inf"), origin), mask=rows_there)
        tl.store(numbers + every, at, mask=rows_there)
        tl.store(numbers + 2 * every, missing, mask=rows_there)
        tl.store(numbers + 3 * every, factor, mask=rows_there)


@triton.jit
def _again(
    states, keys, vectors, upstream, mean, origin, at, missing, factor, row, column, low, high,
    mask, mask_row, mask_column, seed, head, n, m, scale, excess, dropout, MASK: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Weights of a block, those that dropout leaves, and gradients of weights and scores."""
    made = _scores(
        states, keys, row, column, low, high, mask, mask_row, mask_column, n, m, scale, MASK
    )
    broken = origin == float("inf")
    probs, slope = shares(
        _distance(made, tl.where(broken, 0.0, origin), broken), at[:, None], excess[:, None], KIND
    )
    probs, slope = _finished(probs, slope, missing, excess, KIND)
    if KIND == 0:
        # The slope of weights that are divided in the end.
        slope = slope * tl.exp((1.0 - excess) * tl.log(factor))[:, None]
    probs = probs * factor[:, None]
    of_weights = _product(upstream, tl.trans(vectors))
    used = probs
    if seed is not None:
        share = _kept_share(seed, head, row, column, n, m, dropout)
        used = probs * share
        of_weights = of_weights * share
    of_scores = tl.where(slope != 0.0, slope * (of_weights - mean[:, None]), 0.0)
    of_scores = tl.where(broken[:, None], float("nan"), of_scores)
    return probs, used, of_weights, of_scores


@triton.jit
def _rows_again(grad, mean, numbers, head, row, wide_step, n, wide, every):
    """What is known of rows: upstream gradients and five numbers."""
    upstream = _load(grad + head * n * wide, row, wide, wide_step, 1, n, wide)
    place, there = head * n + row, row < n
    average = tl.load(mean + place, mask=there, other=0.0)
    origin = tl.load(numbers + place, mask=there, other=0.0)
    at = tl.load(numbers + every + place, mask=there, other=0.0)
    missing = tl.load(numbers + 2 * every + place, mask=there, other=0.0)
    factor = tl.load(numbers + 3 * every + place, mask=there, other=1.0)
    return upstream, average, origin, at, missing, factor


@kernel
def _query_gradient(
    query, key, value, alphas, mask, seed, first, stop, place, grad, mean, numbers, blocks, out,
    of_rows, n, m, heads, group, depth, wide, tiles, n_blocks, scale, excess, left, right, offset,
    dropout, q_batch, q_head, q_row, q_step, k_batch, k_head, k_row, k_step, v_batch, v_head, v_row,
    v_step, mask_batch, mask_head, mask_row, mask_column, TO_ALPHA: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
    MASK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    every = tl.num_programs(1).to(tl.int64) * n
    batch, own = head // heads, head % heads
    row = tile * ROWS + tl.arange(0, ROWS)
    step, wide_step = tl.arange(0, DEPTH), tl.arange(0, WIDE)
    key += batch * k_batch + own // group * k_head
    value += batch * v_batch + own // group * v_head
    if MASK > 0:
        mask += batch * mask_batch + own * mask_head
    if alphas is not None:
        excess = tl.load(alphas + head) - 1.0
    excess += tl.zeros((ROWS,), dtype=tl.float32)
    blocks += (head * tiles + tile) * n_blocks
    states = _load(query + batch * q_batch + own * q_head, row, q_row, step, q_step, n, depth)
    low, high = _seen(row, n, m, first, stop, place, left, right, offset)
    upstream, average, origin, at, missing, factor = _rows_again(
        grad, mean, numbers, head, row, wide_step, n, wide, every
    )
    sums = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
    centre = tl.zeros((ROWS,), dtype=tl.float32)
    if TO_ALPHA:
        # The derivatives of weights by alpha sum to 0: measured from the mean nothing cancels.
        for block in range(n_blocks):
            if tl.load(blocks + block) != 0:
                column = block * COLUMNS + tl.arange(0, COLUMNS)
                keys = _load(key, column, k_row, step, k_step, m, depth)
                vectors = _load(value, column, v_row, wide_step, v_step, m, wide)
                probs, _, of_weights, _ = _again(
                    states, keys, vectors, upstream, average, origin, at, missing, factor, row,
                    column, low, high, mask, mask_row, mask_column, seed, head, n, m, scale, excess,
                    dropout, MASK, KIND,
                )  # fmt: skip
                centre += tl.sum(probs * of_weights, 1)
    entropy = tl.zeros((ROWS,), dtype=tl.float32)
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    firsts = tl.zeros((ROWS,), dtype=tl.float32)
    seconds = tl.zeros((ROWS,), dtype=tl.float32)
    slopes = tl.zeros((ROWS,), dtype=tl.float32)
    for block in range(n_blocks):
        if tl.load(blocks + block) != 0:
            column = block * COLUMNS + tl.arange(0, COLUMNS)
            keys = _load(key, column, k_row, step, k_step, m, depth)
            vectors = _load(value, column, v_row, wide_step, v_step, m, wide)
            probs, _, of_weights, of_scores = _again(
                states, keys, vectors, upstream, average, origin, at, missing, factor, row, column,
                low, high, mask, mask_row, mask_column, seed, head, n, m, scale, excess, dropout,
                MASK, KIND,
            )  # fmt: skip
            sums += _product(of_scores.to(keys.dtype), keys)
            if TO_ALPHA:
                square, one, two = alpha_terms(probs, of_weights, centre[:, None], excess[:, None])
                logs = tl.log(tl.where(probs != 0.0, probs, 1.0))
                entropy -= tl.sum(probs * logs, 1)
                slopes += tl.sum(
                    tl.where(probs != 0.0, tl.exp((1.0 - excess)[:, None] * logs), 0.0), 1
                )
                squares += tl.sum(square, 1)
                firsts += tl.sum(one, 1)
                seconds += tl.sum(two, 1)
    there = (row < n)[:, None] & (step < depth)[None, :]
    into = out + head * n * depth + row[:, None].to(tl.int64) * depth + step[None, :]
    sums = tl.where((origin == float("inf"))[:, None], float("nan"), sums * scale)
    tl.store(into, sums.to(out.dtype.element_ty), mask=there)
    if TO_ALPHA:
        made = alpha_gradient(squares, firsts, seconds, entropy, slopes, excess)
        tl.store(of_rows + head * n + row, made, mask=row < n)


@kernel
def _key_gradient(
    query, key, value, alphas, mask, seed, first, stop, place, grad, mean, numbers, blocks, of_key,
    of_value, n, m, heads, group, depth, wide, tiles, n_blocks, scale, excess, left, right, offset,
    dropout, q_batch, q_head, q_row, q_step, k_batch, k_head, k_row, k_step, v_batch, v_head, v_row,
    v_step, mask_batch, mask_head, mask_row, mask_column, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr, MASK: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    key_heads = heads // group
    batch, own_key = pair // key_heads, pair % key_heads
    every = tl.num_programs(1).to(tl.int64) * group * n
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    step, wide_step = tl.arange(0, DEPTH), tl.arange(0, WIDE)
    keys = _load(key + batch * k_batch + own_key * k_head, column, k_row, step, k_step, m, depth)
    vectors = _load(
        value + batch * v_batch + own_key * v_head, column, v_row, wide_step, v_step, m, wide
    )
    of_keys = tl.zeros((COLUMNS, DEPTH), dtype=tl.float32)
    of_vectors = tl.zeros((COLUMNS, WIDE), dtype=tl.float32)
    for member in range(group):
        own = own_key * group + member
        head = batch * heads + own
        part = excess
        if alphas is not None:
            part = tl.load(alphas + head) - 1.0
        part += tl.zeros((ROWS,), dtype=tl.float32)
        masked = mask
        if MASK > 0:
            masked = mask + batch * mask_batch + own * mask_head
        for tile in range(tiles):
            if tl.load(blocks + (head * tiles + tile) * n_blocks + block) != 0:
                row = tile * ROWS + tl.arange(0, ROWS)
                states = _load(
                    query + batch * q_batch + own * q_head, row, q_row, step, q_step, n, depth
                )
                low, high = _seen(row, n, m, first, stop, place, left, right, offset)
                upstream, average, origin, at, missing, factor = _rows_again(
                    grad, mean, numbers, head, row, wide_step, n, wide, every
                )
                _, used, _, of_scores = _again(
                    states, keys, vectors, upstream, average, origin, at, missing, factor, row,
                    column, low, high, masked, mask_row, mask_column, seed, head, n, m, scale, part,
                    dropout, MASK, KIND,
                )  # fmt: skip
                of_vectors += _product(tl.trans(used.to(upstream.dtype)), upstream)
                of_keys += _product(tl.trans(of_scores.to(states.dtype)), states)
    there = (column < m)[:, None]
    into = of_key + pair * m * depth + column[:, None].to(tl.int64) * depth + step[None, :]
    made = (of_keys * scale).to(of_key.dtype.element_ty)
    tl.store(into, made, mask=there & (step < depth)[None, :])
    into = of_value + pair * m * wide + column[:, None].to(tl.int64) * wide + wide_step[None, :]
    made = of_vectors.to(of_value.dtype.element_ty)
    tl.store(into, made, mask=there & (wide_step < wide)[None, :])
