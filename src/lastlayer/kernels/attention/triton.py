"""Attention with entmax weights in Triton, which skips blocks of keys with zero weights."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import (
    LOG2E,
    LOG_2,
    approximate_log2,
    cdiv,
    next_power_of_2,
    philox,
)
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

# How far a sum may be from 1 before the last steps, which reduce the error to a power of it. The
# keys are the kind and whether the dtype is half precision. The slope of sparsemax jumps from 0 to
# 1, so its gradient needs the exact support. Any other alpha up to 1.5 has the last number in half
# precision; in float32 and above 1.5 it is solved to the rounding of sums. With 0.01, gradients of
# one large score among many equal ones were off by 1.4%, with 0.001 by less than rounding.
_NEAR = {(2, True): 0.5, (1, True): 1e-5, (2, False): 0.03, (1, False): 2e-6}
_NEAR_OTHERS = 1e-3
# How much too high a guess may be, as a fraction of its distance from the largest score.
_SLACK = tl.constexpr(0.25)
_LOWEST = tl.constexpr(-3.0e38)
# Arguments that differ between batches; kernels are not specialised for their values.
_CHANGING = ("n", "m", "heads", "group", "tiles", "n_blocks", "left", "right", "offset")
# Safeguards: the maximum numbers of steps by the model, and of all steps.
_MODEL_TRIPS, _TRIPS = tl.constexpr(6), tl.constexpr(60)


class Tiles(NamedTuple):
    """Queries and keys per block, and the numbers of warps and stages of the four kernels."""

    rows: int
    columns: int
    solve: tuple[int, int] = (4, 2)
    attend: tuple[int, int] = (4, 3)
    of_query: tuple[int, int] = (4, 3)
    of_key: tuple[int, int] = (4, 3)


# By the larger of the head sizes of keys and values, padded to a power of two.
_TILES = {
    64: Tiles(64, 64),
    128: Tiles(128, 64, (8, 2), (8, 3), (8, 3), (8, 2)),
    256: Tiles(64, 32, (4, 2), (4, 2), (4, 2), (4, 2)),
}
_TILES_FLOAT32 = Tiles(32, 32, (4, 2), (4, 2), (4, 2), (4, 2))


class _Plan(NamedTuple):
    """How a problem is launched: kind, tiles, tolerance of sums, and constants of each kernel."""

    kind: int
    tiles: Tiles
    near: float
    solve: dict[str, int]
    attend: dict[str, int]
    of_query: dict[str, int]
    of_key: dict[str, int]


@functools.cache
def _planned(kind: int, mask: int, dtype: torch.dtype, depth: int, wide: int) -> _Plan:
    padded, padded_wide = (max(16, next_power_of_2(each)) for each in (depth, wide))
    half = dtype != torch.float32
    tiles = _TILES[max(64, padded, padded_wide)] if half else _TILES_FLOAT32
    shared = dict(
        ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=padded, WIDE=padded_wide,
        EVEN=padded == depth and padded_wide == wide, MASK=mask, KIND=kind,
        # Other kinds use the loops of ../entmax/threshold.py, which explains this.
        enable_fp_fusion=kind in (1, 2),
    )  # fmt: skip
    settings = (shared | dict(num_warps=warps, num_stages=stages) for warps, stages in tiles[2:])
    return _Plan(kind, tiles, _NEAR.get((kind, half), _NEAR_OTHERS if half else 0.0), *settings)


def _plan(p: Problem) -> _Plan:
    kind = 0 if p.head_alpha is not None else kind_of(p.alpha)
    mask = 0 if p.mask is None else 1 if p.mask.dtype == torch.bool else 2
    return _planned(kind, mask, p.query.dtype, p.query.shape[3], p.value.shape[3])


def kept_shapes(p: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of ``numbers`` and ``blocks`` of :class:`Kept`."""
    plan = _plan(p)
    batch, heads, n, _ = p.query.shape
    blocks = cdiv(n, plan.tiles.rows), cdiv(max(1, p.key.shape[2]), plan.tiles.columns)
    return (1 if plan.kind in (1, 2) else 4, batch, heads, n), (batch, heads, *blocks)


def mixed_dtype(p: Problem) -> torch.dtype:
    """The dtype of ``mixed`` of :class:`Kept`.

    For alpha > 2 slopes grow without bound as weights approach 0, and multiply its rounding error.
    """
    steep = p.head_alpha is not None or p.alpha > 2.0
    return torch.float32 if steep else p.query.dtype


def _lists(blocks: Tensor, more: int = 0) -> Tensor:
    """Memory for lists of block indices; the last dimension is ``more`` longer than in blocks."""
    *rows, n = blocks.shape
    dtype = torch.int16 if max(rows[-1], n) < 1 << 15 else torch.int32
    return blocks.new_empty((*rows, n + more), dtype=dtype)


def forward(p: Problem, keeps: bool) -> tuple[Tensor, Kept | None]:
    """The output, and what backward needs, or None unless ``keeps``.

    Programs with the last queries of all heads are launched first: with causal attention they have
    the most keys.
    """
    plan, (batch, heads, n, _) = _plan(p), p.query.shape
    out = p.query.new_empty(batch, heads, n, p.value.shape[-1])
    mixed = torch.empty_like(out, dtype=mixed_dtype(p)) if keeps else out
    shape, grid = kept_shapes(p)
    numbers = out.new_empty(shape, dtype=torch.float32)
    blocks = out.new_empty(grid, dtype=torch.uint8)
    # For each block of queries two counts, and the blocks of keys that may have weights.
    lists = _lists(blocks, 2)
    launched = batch * heads, grid[2]
    shared, sizes = _shared(p), _sizes(p, blocks)
    _solve[launched](
        p.query, p.key, *shared, numbers, lists, blocks, plan.near, *sizes, **plan.solve
    )
    _attend[launched](
        p.query, p.key, p.value, *shared, numbers, lists, out, mixed, blocks, *sizes, KEEPS=keeps,
        **plan.attend,
    )  # fmt: skip
    return out, Kept(mixed, numbers, blocks) if keeps else None


def backward(p: Problem, kept: Kept, grad: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of query, key, value and ``head_alpha``, and None; None if not ``wanted``."""
    _, to_key, to_value, to_alpha, _ = wanted
    (batch, heads, n, _), (_, key_heads, m, _) = p.query.shape, p.key.shape
    if grad.stride(3) != 1:
        grad = grad.contiguous()
    plan, lists = _plan(p), _lists(kept.blocks)
    of_query, of_key, of_value = (
        torch.empty_like(each, memory_format=torch.contiguous_format) for each in p[:3]
    )
    # The first is the mean of each row, which both kernels need; the second is alpha's gradient.
    mean = kept.numbers.new_empty(2 if to_alpha else 1, batch, heads, n)
    given = *_shared(p), grad, mean, kept.numbers, kept.blocks, lists
    strides = *_sizes(p, kept.blocks), *grad.stride()[:3]
    _query_gradient[(batch * heads, kept.blocks.shape[2])](
        p.query, p.key, p.value, *given, kept.mixed, of_query, *strides,
        TO_ALPHA=to_alpha, **plan.of_query,
    )  # fmt: skip
    if (to_key or to_value) and m:
        _key_gradient[(batch * key_heads, kept.blocks.shape[3])](
            p.query, p.key, p.value, *given, of_key, of_value, *strides,
            **plan.of_key,
        )  # fmt: skip
    of_alpha = mean[1].sum(-1) if to_alpha else None
    made = of_query, of_key, of_value, of_alpha
    return [each if asked else None for each, asked in zip(made, wanted, strict=False)] + [None]


def _shared(p: Problem) -> tuple[Tensor | None, ...]:
    """Tensor arguments that all kernels share."""
    alphas = None if p.head_alpha is None else p.head_alpha.float().contiguous()
    mask = p.mask
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    return alphas, mask, p.seed, p.first, p.stop, p.place


def _sizes(p: Problem, blocks: Tensor) -> tuple[int | float, ...]:
    """Numeric arguments that all kernels share."""
    excess = 0.0 if p.head_alpha is not None else p.alpha - 1.0
    mask = (0, 0, 0, 0) if p.mask is None else p.mask.stride()
    return (
        p.query.shape[2], p.key.shape[2], p.query.shape[1], p.query.shape[1] // p.key.shape[1],
        p.query.shape[3], p.value.shape[3], blocks.shape[2], blocks.shape[3], p.scale, excess,
        p.left, p.right, p.offset, p.dropout, *p.query.stride(), *p.key.stride(),
        *p.value.stride(), *mask,
    )  # fmt: skip


@triton.jit
def _seen(row, n, m, first, stop, place, left, right, offset):
    """The first key that each query sees, and one past the last."""
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
def _walk(row, low, high, n, m, COLUMNS: tl.constexpr, MASK: tl.constexpr):
    """The range of blocks that any query sees, and the range of blocks that all queries see."""
    some = low < high
    begin = tl.maximum(tl.min(tl.where(some, low, m), 0), 0) // COLUMNS
    end = tl.maximum((tl.max(tl.where(some, high, 0), 0) + COLUMNS - 1) // COLUMNS, begin)
    whole, stop = end, end
    if MASK == 0:
        whole = (tl.max(tl.where(row < n, low, 0), 0) + COLUMNS - 1) // COLUMNS
        whole = tl.minimum(tl.maximum(whole, begin), end)
        stop = tl.minimum(tl.maximum(tl.min(tl.where(row < n, high, m), 0), 0) // COLUMNS, end)
        stop = tl.maximum(whole, stop)
    return begin, end, whole, stop


@triton.jit
def _block(trip, begin, whole, stop, EDGE: tl.constexpr):
    """The block at step ``trip`` of a loop over the blocks at both ends, or over those between."""
    if EDGE:
        return tl.where(begin + trip < whole, begin + trip, stop + trip - (whole - begin))
    else:
        return whole + trip


@triton.jit
def _load(base, row, row_stride, step, step_stride, n, size, INSIDE: tl.constexpr,
          EVEN: tl.constexpr):  # fmt: skip
    """Rows of a matrix, (rows, steps); 0 outside of the matrix."""
    place = base + row[:, None].to(tl.int64) * row_stride + step[None, :] * step_stride
    if INSIDE and EVEN:
        return tl.load(place)
    elif EVEN:
        return tl.load(place, mask=(row < n)[:, None], other=0.0)
    else:
        return tl.load(place, mask=(row < n)[:, None] & (step < size)[None, :], other=0.0)


@triton.jit
def _product(left, right):
    """The product in float32; float32 operands are split into three products in TF32."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def _scores(states, keys, row, column, low, high, mask, mask_row, mask_column, n, m, scale, unit,
            EDGE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """The scores of a block, (queries, keys), in units of thresholds; -inf if masked.

    Unless there is an additive mask, the caller has to multiply them by ``unit``.
    """
    made = _product(states, tl.trans(keys))
    if EDGE:
        allowed = (column[None, :] >= low[:, None]) & (column[None, :] < high[:, None])
        if MASK > 0:
            # A transposed mask has wide columns.
            place = mask + column[None, :].to(tl.int64) * mask_column
            place += row[:, None].to(tl.int64) * mask_row
            there = (row < n)[:, None] & (column < m)[None, :]
            if MASK == 1:
                allowed = allowed & (tl.load(place, mask=there, other=0) != 0)
            else:
                added = tl.load(place, mask=there, other=0.0).to(tl.float32)
                made = (made * scale + added) * (unit / scale)
        made = tl.where(allowed, made, -float("inf"))
    return made


@triton.jit
def _kept_share(seed, head, row, column, n, m, dropout):
    """The dropout factors of the weights of a block: 0 or ``1 / (1 - dropout)``."""
    entry = (head * n + row[:, None]) * m + column[None, :]
    word, _, _, _ = philox(entry, tl.load(seed), entry * 0)
    # 24 bits, so that it is below 1 in float32.
    uniform = (word >> 8).to(tl.float32) * (1.0 / 16777216.0)
    factor = 1.0 / tl.where(dropout < 1.0, 1.0 - dropout, 1.0)
    return tl.where(uniform >= dropout, factor, 0.0)


@triton.jit
def _margins(made, unit, at):
    """Scores less a threshold, at least 0; 0 if either is NaN."""
    return tl.maximum(made * unit - at, 0.0)


@triton.jit
def _bend(squares, sums, count):
    """``1 / kappa`` of the power law in README.md, from the three sums of margins."""
    safe = tl.where(sums > 0.0, sums, 1.0)
    return 1.0 - 0.5 * count * squares / (safe * safe)


@triton.jit
def _by_power_law(squares, sums, bend, KIND: tl.constexpr):
    """The distance of the threshold above the guess with these sums, by the model of README.md.

    Also returns the factor by which margins shrink along the way, and the sum that becomes 1.
    """
    total = squares if KIND == 2 else sums
    safe = tl.where(sums > 0.0, sums, 1.0)
    bend = tl.minimum(tl.maximum(bend, -0.5), 0.5)
    bend = tl.where(tl.abs(bend) < 1e-3, 1e-3, bend)
    logs = tl.log(tl.maximum(total, 1e-6))
    power = bend if KIND == 2 else bend / (1.0 - bend)
    factor = tl.exp(-power * logs)
    return 0.5 * squares / safe * (1.0 - factor) / bend, factor, total


@triton.jit
def _by_tangent(squares, sums, count, KIND: tl.constexpr):
    """A Newton step on the sum; it never leads above the threshold, from any start."""
    if KIND == 2:
        norm = tl.sqrt(squares)
        return (norm - 1.0) * norm / tl.where(sums > 0.0, sums, 1.0)
    else:
        return (sums - 1.0) / tl.where(count > 0.0, count, 1.0)


@triton.jit
def _shares(distance, at, excess, KIND: tl.constexpr, NARROW: tl.constexpr):
    """``shares`` of ../entmax/threshold.py; any alpha with fast functions in half precision."""
    if KIND == 0 and NARROW:
        # With this alpha as with the softmax, weights differ by less than rounding.
        excess = tl.maximum(excess, 1e-6)
        ratio = distance * (excess * tl.exp(tl.minimum(-excess * at, 50.0)))
        grown = tl.maximum(1.0 + ratio, 0.0)
        # Near 1 the fast logarithm has a large relative error.
        series = ratio * (1.0 - ratio * (0.5 - ratio * 0.33333334))
        logs = tl.where(tl.abs(ratio) < 0.01, series, approximate_log2(grown) * LOG_2)
        power = LOG2E / excess
        probs = tl.exp2(logs * power + at * LOG2E)
        slope = tl.exp2(logs * (power - LOG2E) + at * LOG2E)
        return probs, tl.where(grown > 0.0, slope, 0.0)
    else:
        return shares(distance, at, excess, KIND)


@triton.jit
def _positive(values):
    return tl.where(values > 0.0, 1.0, 0.0)


@kernel(do_not_specialize=_CHANGING)
def _solve(
    query, key, alphas, mask, seed, first, stop, place, numbers, lists, blocks, near, n, m, heads,
    group, depth, wide, tiles, n_blocks, scale, excess, left, right, offset, dropout, q_batch,
    q_head, q_row, q_step, k_batch, k_head, k_row, k_step, v_batch, v_head, v_row, v_step,
    mask_batch, mask_head, mask_row, mask_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    FAST: tl.constexpr = KIND == 1 or KIND == 2
    NARROW: tl.constexpr = query.dtype.element_ty != tl.float32
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(0).to(tl.int64)
    batch, own = head // heads, head % heads
    row = tile * ROWS + tl.arange(0, ROWS)
    step = tl.arange(0, DEPTH)
    key += batch * k_batch + own // group * k_head
    if MASK > 0:
        mask += batch * mask_batch + own * mask_head
    if alphas is not None:
        excess = tl.load(alphas + head) - 1.0
    excess += tl.zeros((ROWS,), dtype=tl.float32)
    # The list is preceded by two counts.
    lists += (head * tiles + tile) * (n_blocks + 2) + 2
    blocks += (head * tiles + tile) * n_blocks
    for start in range(0, n_blocks, 256):
        clear = start + tl.arange(0, 256)
        tl.store(blocks + clear, tl.zeros((256,), dtype=tl.uint8), mask=clear < n_blocks)
    states = _load(
        query + batch * q_batch + own * q_head, row, q_row, step, q_step, n, depth, False, EVEN
    )
    low, high = _seen(row, n, m, first, stop, place, left, right, offset)
    begin, end, whole, ends = _walk(row, low, high, n, m, COLUMNS, MASK)
    edges = whole - begin + end - ends
    unit = scale / KIND if FAST else scale
    times = 1.0 if MASK == 2 else unit

    # The first pass over all keys finds the largest score, and a guess at the threshold.
    peak = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    at = tl.full((ROWS,), _LOWEST, dtype=tl.float32)
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    sums = tl.zeros((ROWS,), dtype=tl.float32)
    count = tl.zeros((ROWS,), dtype=tl.float32)
    for part in tl.static_range(2):
        for trip in range(edges if part == 0 else ends - whole):
            column = _block(trip, begin, whole, ends, part == 0) * COLUMNS + tl.arange(0, COLUMNS)
            keys = _load(key, column, k_row, step, k_step, m, depth, part == 1, EVEN)
            made = _scores(
                states, keys, row, column, low, high, mask, mask_row, mask_column, n, m, scale,
                unit, part == 0, MASK,
            )  # fmt: skip
            if FAST:
                peak = tl.maximum(peak, tl.max(made, 1) * times)
                raised = tl.maximum(at, peak - 1.0)
                fade = tl.exp(-2.0 * sums / tl.maximum(squares, 1e-30) * (raised - at))
                margin = tl.maximum(
                    made * times - raised[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL
                )
                squares = squares * fade + tl.sum(margin * margin, 1)
                sums = sums * fade + tl.sum(margin, 1)
                # For a guess, the largest margin replaces the third sum of _bend.
                safe = tl.where(sums > 0.0, sums, 1.0)
                bend = 0.5 * squares / (safe * tl.maximum(peak - raised, 1e-6))
                rise, factor, total = _by_power_law(squares, sums, bend, KIND)
                above = total > 1.0
                at = raised + tl.where(above, tl.minimum(rise, 0.9 * (peak - raised)), 0.0)
                shrunk = tl.where(above, 1.0 / total, 1.0)
                factor = tl.where(above, factor, 1.0)
                if KIND == 2:
                    squares, sums = squares * shrunk, sums * shrunk / factor
                else:
                    squares, sums = squares * shrunk * factor, sums * shrunk
            else:
                made = tl.where(made != made, float("inf"), made * times)
                peak = tl.maximum(peak, tl.max(made, 1))

    # The second pass computes the sums at the guess, and lists blocks that may have weights.
    trips = 0
    listed = 0
    listed_edges = 0
    total = tl.zeros((ROWS,), dtype=tl.float32)
    weight = tl.zeros((ROWS,), dtype=tl.float32)
    lowest = -tl.log(tl.maximum(m, 1).to(tl.float32)) + tl.zeros((ROWS,), dtype=tl.float32)
    highest = tl.zeros((ROWS,), dtype=tl.float32)
    origin = peak
    if FAST:
        broken = (peak == float("inf")) | (at != at) | (sums != sums)
        live = (low < high) & (peak > -float("inf")) & (broken == 0)
        at = tl.where(live, at, float("inf"))
    else:
        broken = is_broken(peak, excess, KIND)
        live = (low < high) & (peak > -float("inf")) & (broken == 0)
        origin = tl.where(live, peak, float("inf"))
        at = unsolved_row(highest, KIND)
        highest = at
    searching = True
    while searching:
        squares = tl.zeros((ROWS,), dtype=tl.float32)
        sums = tl.zeros((ROWS,), dtype=tl.float32)
        count = tl.zeros((ROWS,), dtype=tl.float32)
        # Scores below the bound have no weight, unless the guess proves to be far too high.
        bound = tl.where(live, at - _SLACK * (peak - at), float("inf")) if FAST else at
        listed = 0
        for part in tl.static_range(2):
            for trip in range(edges if part == 0 else ends - whole):
                block = _block(trip, begin, whole, ends, part == 0)
                column = block * COLUMNS + tl.arange(0, COLUMNS)
                keys = _load(key, column, k_row, step, k_step, m, depth, part == 1, EVEN)
                made = _scores(
                    states, keys, row, column, low, high, mask, mask_row, mask_column, n, m, scale,
                    unit, part == 0, MASK,
                )  # fmt: skip
                if FAST:
                    margin = _margins(made, times, at[:, None])
                    squares += tl.sum(margin * margin, 1)
                    sums += tl.sum(margin, 1)
                    count += tl.sum(_positive(margin), 1)
                    some = tl.max(made, 1) * times > bound
                else:
                    distance = made * times - origin[:, None]
                    probs, slope = _shares(distance, at[:, None], excess[:, None], KIND, NARROW)
                    squares += tl.sum(probs, 1)
                    sums += tl.sum(slope, 1)
                    some = tl.max(probs, 1) > 0.0
                tl.store(lists + listed, block.to(lists.dtype.element_ty))
                listed += tl.max(some.to(tl.int32), 0)
            if part == 0:
                listed_edges = listed
        if FAST:
            certain = at + _by_tangent(squares, sums, count, KIND)
            proven = (bound <= certain) | (live == 0)
            at = tl.where(proven, at, certain)
            trips += 1
            searching = (tl.min(proven.to(tl.int32), 0) == 0) & (trips < _MODEL_TRIPS)
        else:
            searching = False
    tl.debug_barrier()

    # Further passes over the listed blocks.
    going = live
    # Above alpha 1.5 slopes at the edge of the support are too steep for the last step.
    loose = tl.where(excess <= 0.5, near, 0.0)
    if FAST:
        rise, _, total = _by_power_law(squares, sums, _bend(squares, sums, count), KIND)
        going = live & (tl.abs(total - 1.0) > near)
        if KIND == 1:
            # The slopes of sparsemax jump, so its last step is a tangent, exact for this support.
            rise = tl.where(going, rise, _by_tangent(squares, sums, count, KIND))
        at = tl.where(live, at + tl.minimum(rise, 0.9 * (peak - at)), at)
        trips = 0
    else:
        total, weight = squares, sums
        if KIND > 0:
            following, going = leap(at, total, weight, KIND)
        else:
            following, lowest, highest, going = advance(
                at, lowest, highest, total, weight, excess, trips, KIND
            )
        going = going & live & (tl.abs(total - 1.0) > loose)
        at = tl.where(going, following, at)
    unsolved = tl.max(going.to(tl.int32), 0) > 0
    while unsolved:
        squares = tl.zeros((ROWS,), dtype=tl.float32)
        sums = tl.zeros((ROWS,), dtype=tl.float32)
        count = tl.zeros((ROWS,), dtype=tl.float32)
        for part in tl.static_range(2):
            for trip in range(
                0 if part == 0 else listed_edges, listed_edges if part == 0 else listed
            ):
                column = tl.load(lists + trip).to(tl.int32) * COLUMNS + tl.arange(0, COLUMNS)
                keys = _load(key, column, k_row, step, k_step, m, depth, part == 1, EVEN)
                made = _scores(
                    states, keys, row, column, low, high, mask, mask_row, mask_column, n, m, scale,
                    unit, part == 0, MASK,
                )  # fmt: skip
                if FAST:
                    margin = _margins(made, times, at[:, None])
                    squares += tl.sum(margin * margin, 1)
                    sums += tl.sum(margin, 1)
                    count += tl.sum(_positive(margin), 1)
                else:
                    distance = made * times - origin[:, None]
                    probs, slope = _shares(distance, at[:, None], excess[:, None], KIND, NARROW)
                    squares += tl.sum(probs, 1)
                    sums += tl.sum(slope, 1)
        trips += 1
        if FAST:
            rise, _, total = _by_power_law(squares, sums, _bend(squares, sums, count), KIND)
            tangent = _by_tangent(squares, sums, count, KIND)
            rise = tl.where((KIND == 1) | (trips > _MODEL_TRIPS), tangent, rise)
            following = at + tl.minimum(rise, 0.9 * (peak - at))
            further = (tl.abs(total - 1.0) > near) & (trips < _TRIPS)
            if KIND == 1:
                # After the first step tangents lead upwards, until rounding stops them.
                further = further & ((following > at) | ((following < at) & (trips == 1)))
            at = tl.where(going, following, at)
            going = going & further
        else:
            total, weight = tl.where(going, squares, total), tl.where(going, sums, weight)
            following, lowest, highest, further = advance(
                at, lowest, highest, total, weight, excess, trips, KIND
            )
            going = going & further & (tl.abs(total - 1.0) > loose)
            at = tl.where(going, following, at)
        unsolved = tl.max(going.to(tl.int32), 0) > 0

    tl.store(lists - 2, listed_edges.to(lists.dtype.element_ty))
    tl.store(lists - 1, listed.to(lists.dtype.element_ty))
    rows_there = row < n
    numbers += head * n + row
    # NaN marks a row whose result is NaN.
    tl.store(numbers, tl.where(broken, float("nan"), at if FAST else origin), mask=rows_there)
    if not FAST:
        every = tl.num_programs(0).to(tl.int64) * n
        tl.store(numbers + every, at, mask=rows_there)
        missing = correction(total, weight, live == 0)
        tl.store(numbers + 2 * every, tl.where(live, missing, 0.0), mask=rows_there)


@kernel(do_not_specialize=_CHANGING)
def _attend(
    query, key, value, alphas, mask, seed, first, stop, place, numbers, lists, out, mixed, blocks,
    n, m, heads, group, depth, wide, tiles, n_blocks, scale, excess, left, right, offset, dropout,
    q_batch, q_head, q_row, q_step, k_batch, k_head, k_row, k_step, v_batch, v_head, v_row, v_step,
    mask_batch, mask_head, mask_row, mask_column,
    KEEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    WIDE: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    FAST: tl.constexpr = KIND == 1 or KIND == 2
    NARROW: tl.constexpr = query.dtype.element_ty != tl.float32
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(0).to(tl.int64)
    every = tl.num_programs(0).to(tl.int64) * n
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
    lists += (head * tiles + tile) * (n_blocks + 2) + 2
    listed_edges = tl.load(lists - 2).to(tl.int32)
    listed = tl.load(lists - 1).to(tl.int32)
    states = _load(
        query + batch * q_batch + own * q_head, row, q_row, step, q_step, n, depth, False, EVEN
    )
    low, high = _seen(row, n, m, first, stop, place, left, right, offset)
    unit = scale / KIND if FAST else scale
    times = 1.0 if MASK == 2 else unit
    there = row < n
    origin, at, missing, _ = _rows_again(numbers, head * n + row, there, every, KIND)
    broken = origin != origin
    outputs = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    means = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    reached = tl.zeros((ROWS,), dtype=tl.float32)
    sloped = tl.zeros((ROWS,), dtype=tl.float32)
    for part in tl.static_range(2):
        for trip in range(0 if part == 0 else listed_edges, listed_edges if part == 0 else listed):
            block = tl.load(lists + trip).to(tl.int32)
            column = block * COLUMNS + tl.arange(0, COLUMNS)
            keys = _load(key, column, k_row, step, k_step, m, depth, part == 1, EVEN)
            vectors = _load(value, column, v_row, wide_step, v_step, m, wide, part == 1, EVEN)
            made = _scores(
                states, keys, row, column, low, high, mask, mask_row, mask_column, n, m, scale,
                unit, part == 0, MASK,
            )  # fmt: skip
            if FAST:
                slope = _margins(made, times, origin[:, None])
                probs = slope
                if KIND == 2:
                    probs = slope * slope
                else:
                    slope = _positive(slope)
            else:
                distance = made * times - origin[:, None]
                probs, slope = _shares(distance, at[:, None], excess[:, None], KIND, NARROW)
                probs, slope = _finished(
                    probs, slope, missing[:, None], excess[:, None], KIND, NARROW
                )
                if KIND == 0 and NARROW:
                    # A mean of values needs the same steep slopes in numerator and denominator.
                    rounded = slope.to(vectors.dtype).to(tl.float32)
                    slope = tl.where((excess > 1.0)[:, None], rounded, slope)
            in_rows = tl.sum(slope, 1)
            reached += tl.sum(probs, 1)
            sloped += in_rows
            # 0: backward skips the block; 1: all queries see all keys; 2: needs comparisons.
            some = tl.max((in_rows > 0.0).to(tl.int32), 0)
            tl.store(blocks + block, (some * (2 - part)).to(tl.uint8))
            if seed is not None:
                share = _kept_share(seed, head, row, column, n, m, dropout)
                probs, slope = probs * share, slope * share
            outputs += _product(probs.to(vectors.dtype), vectors)
            if FAST or KEEPS:
                means += _product(slope.to(vectors.dtype), vectors)
    numbers += head * n + row
    if FAST:
        # The last step, on the output.
        missing = tl.where(sloped > 0.0, (1.0 - reached) / sloped, 0.0)
        outputs += missing[:, None] * means
        if KEEPS:
            tl.store(numbers, origin - missing / KIND, mask=there)
    else:
        # For alpha > 2 slopes are steep at the edge of the support; the last step may overshoot.
        steep = (excess > 1.0) & (reached != 0.0)
        factor = tl.where(steep, 1.0 / tl.where(reached == 0.0, 1.0, reached), 1.0)
        outputs = outputs * factor[:, None]
        if KEEPS:
            tl.store(numbers + 3 * every, factor, mask=there)
    outputs = tl.where(broken[:, None], float("nan"), outputs)
    into = head * n * wide + row[:, None].to(tl.int64) * wide + wide_step[None, :]
    inside = there[:, None] & (wide_step < wide)[None, :]
    tl.store(out + into, outputs.to(out.dtype.element_ty), mask=inside)
    if KEEPS:
        means = means / tl.where(sloped == 0.0, 1.0, sloped)[:, None]
        means = tl.where(broken[:, None], float("nan"), means)
        tl.store(mixed + into, means.to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def _finished(probs, slope, missing, excess, KIND: tl.constexpr, NARROW: tl.constexpr):
    """Weights after the last Newton step, and their slopes ``p ** (2 - alpha)``."""
    probs = polished(probs, slope, missing)
    if KIND == 0 or NARROW:
        # The last step may change the weights too much to use their slopes from before it.
        base = tl.where(probs != 0.0, probs, 1.0)
        if NARROW:
            # The minimum matters for alpha > 2 only: more would not fit in float16.
            slope = tl.minimum(tl.exp2((1.0 - excess) * approximate_log2(base)), 60000.0)
        else:
            slope = tl.exp((1.0 - excess) * tl.log(base))
    return probs, tl.where(probs != 0.0, slope, 0.0)


@triton.jit
def _rows_again(numbers, place, there, every, KIND: tl.constexpr):
    """The numbers of rows saved by forward: the threshold for kinds 1 and 2, else all four."""
    first = tl.load(numbers + place, mask=there, other=float("inf"))
    if KIND == 1 or KIND == 2:
        return first, first, first, first
    else:
        at = tl.load(numbers + every + place, mask=there, other=0.0)
        missing = tl.load(numbers + 2 * every + place, mask=there, other=0.0)
        return first, at, missing, tl.load(numbers + 3 * every + place, mask=there, other=1.0)


@triton.jit
def _weights_again(
    made, times, first, at, missing, factor, excess, KIND: tl.constexpr, NARROW: tl.constexpr
):  # fmt: skip
    """Recomputes weights and slopes from the saved numbers of their rows."""
    if KIND == 1 or KIND == 2:
        slope = _margins(made, times, first)
        if KIND == 2:
            return slope * slope, slope
        else:
            return slope, _positive(slope)
    else:
        probs, slope = _shares(made * times - first, at, excess, KIND, NARROW)
        probs, slope = _finished(probs, slope, missing, excess, KIND, NARROW)
        if KIND == 0:
            # The slopes of the weights after their multiplication by factor.
            slope = slope * tl.exp((1.0 - excess) * tl.log(factor))
        return probs * factor, slope


@triton.jit
def _listed(flags, stride, number, into, wanted, WIDTH: tl.constexpr):
    """Writes the indices of the flags that equal ``wanted``; returns their number."""
    found = 0
    for start in range(0, number, WIDTH):
        place = start + tl.arange(0, WIDTH)
        own = tl.load(flags + place * stride, mask=place < number, other=0) == wanted
        order = tl.cumsum(own.to(tl.int32), 0)
        tl.store(into + found + order - 1, place.to(into.dtype.element_ty), mask=own)
        found += tl.max(order, 0)
    return found


@kernel(do_not_specialize=_CHANGING)
def _query_gradient(
    query, key, value, alphas, mask, seed, first, stop, place, grad, mean, numbers, blocks, lists,
    mixed, out, n, m, heads, group, depth, wide, tiles, n_blocks, scale, excess, left, right,
    offset, dropout, q_batch, q_head, q_row, q_step, k_batch, k_head, k_row, k_step, v_batch,
    v_head, v_row, v_step, mask_batch, mask_head, mask_row, mask_column, g_batch, g_head, g_row,
    TO_ALPHA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    WIDE: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(0).to(tl.int64)
    every = tl.num_programs(0).to(tl.int64) * n
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
    lists += (head * tiles + tile) * n_blocks
    flags = blocks + (head * tiles + tile) * n_blocks
    listed_edges = _listed(flags, 1, n_blocks, lists, 2, 256)
    listed = listed_edges + _listed(flags, 1, n_blocks, lists + listed_edges, 1, 256)
    tl.debug_barrier()
    states = _load(
        query + batch * q_batch + own * q_head, row, q_row, step, q_step, n, depth, False, EVEN
    )
    low, high = _seen(row, n, m, first, stop, place, left, right, offset)
    unit = scale / KIND if KIND == 1 or KIND == 2 else scale
    times = 1.0 if MASK == 2 else unit
    upstream = _load(
        grad + batch * g_batch + own * g_head, row, g_row, wide_step, 1, n, wide, False, EVEN
    )
    average = tl.sum(
        upstream.to(tl.float32)
        * _load(mixed + head * n * wide, row, wide, wide_step, 1, n, wide, False, EVEN),
        1,
    )
    there = row < n
    tl.store(mean + head * n + row, average, mask=there)
    origin, at, missing, factor = _rows_again(numbers, head * n + row, there, every, KIND)
    centre = tl.zeros((ROWS,), dtype=tl.float32)
    entropy = tl.zeros((ROWS,), dtype=tl.float32)
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    firsts = tl.zeros((ROWS,), dtype=tl.float32)
    seconds = tl.zeros((ROWS,), dtype=tl.float32)
    slopes = tl.zeros((ROWS,), dtype=tl.float32)
    sums = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
    # The derivatives of weights with respect to alpha sum to 0, so the mean can be subtracted,
    # which avoids cancellation. The mean needs another pass.
    for walk in tl.static_range(2 if TO_ALPHA else 1):
        for part in tl.static_range(2):
            for trip in range(
                0 if part == 0 else listed_edges, listed_edges if part == 0 else listed
            ):
                column = tl.load(lists + trip).to(tl.int32) * COLUMNS + tl.arange(0, COLUMNS)
                keys = _load(key, column, k_row, step, k_step, m, depth, part == 1, EVEN)
                vectors = _load(value, column, v_row, wide_step, v_step, m, wide, part == 1, EVEN)
                made = _scores(
                    states, keys, row, column, low, high, mask, mask_row, mask_column, n, m, scale,
                    unit, part == 0, MASK,
                )  # fmt: skip
                probs, slope = _weights_again(
                    made, times, origin[:, None], at[:, None], missing[:, None], factor[:, None],
                    excess[:, None], KIND, query.dtype.element_ty != tl.float32,
                )  # fmt: skip
                of_weights = _product(upstream, tl.trans(vectors))
                if seed is not None:
                    of_weights *= _kept_share(seed, head, row, column, n, m, dropout)
                if TO_ALPHA and walk == 0:
                    centre += tl.sum(probs * of_weights, 1)
                else:
                    of_scores = slope * (of_weights - average[:, None])
                    sums += _product(of_scores.to(keys.dtype), keys)
                    if TO_ALPHA:
                        square, one, two = alpha_terms(
                            probs, of_weights, centre[:, None], excess[:, None]
                        )
                        logs = tl.log(tl.where(probs != 0.0, probs, 1.0))
                        entropy -= tl.sum(probs * logs, 1)
                        powers = tl.exp((1.0 - excess)[:, None] * logs)
                        slopes += tl.sum(tl.where(probs != 0.0, powers, 0.0), 1)
                        squares += tl.sum(square, 1)
                        firsts += tl.sum(one, 1)
                        seconds += tl.sum(two, 1)
    into = out + head * n * depth + row[:, None].to(tl.int64) * depth + step[None, :]
    sums = tl.where((average != average)[:, None], float("nan"), sums * scale)
    tl.store(into, sums.to(out.dtype.element_ty), mask=there[:, None] & (step < depth)[None, :])
    if TO_ALPHA:
        made = alpha_gradient(squares, firsts, seconds, entropy, slopes, excess)
        tl.store(mean + every + head * n + row, made, mask=there)


@kernel(do_not_specialize=_CHANGING)
def _key_gradient(
    query, key, value, alphas, mask, seed, first, stop, place, grad, mean, numbers, blocks, lists,
    of_key, of_value, n, m, heads, group, depth, wide, tiles, n_blocks, scale, excess, left, right,
    offset, dropout, q_batch, q_head, q_row, q_step, k_batch, k_head, k_row, k_step, v_batch,
    v_head, v_row, v_step, mask_batch, mask_head, mask_row, mask_column, g_batch, g_head, g_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
    EVEN: tl.constexpr, MASK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    pair = tl.program_id(0).to(tl.int64)
    key_heads = heads // group
    batch, own_key = pair // key_heads, pair % key_heads
    every = tl.num_programs(0).to(tl.int64) * group * n
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    step, wide_step = tl.arange(0, DEPTH), tl.arange(0, WIDE)
    keys = _load(
        key + batch * k_batch + own_key * k_head, column, k_row, step, k_step, m, depth, False, EVEN
    )
    vectors = _load(
        value + batch * v_batch + own_key * v_head, column, v_row, wide_step, v_step, m, wide,
        False, EVEN,
    )  # fmt: skip
    unit = scale / KIND if KIND == 1 or KIND == 2 else scale
    times = 1.0 if MASK == 2 else unit
    of_keys = tl.zeros((COLUMNS, DEPTH), dtype=tl.float32)
    of_vectors = tl.zeros((COLUMNS, WIDE), dtype=tl.float32)
    for member in range(group):
        own = own_key * group + member
        head = batch * heads + own
        part_excess = excess
        if alphas is not None:
            part_excess = tl.load(alphas + head) - 1.0
        part_excess += tl.zeros((ROWS,), dtype=tl.float32)
        masked = mask
        if MASK > 0:
            masked = mask + batch * mask_batch + own * mask_head
        into = lists + (head * n_blocks + block) * tiles
        flags = blocks + head * tiles * n_blocks + block
        listed_edges = _listed(flags, n_blocks, tiles, into, 2, 256)
        listed = listed_edges + _listed(flags, n_blocks, tiles, into + listed_edges, 1, 256)
        tl.debug_barrier()
        for part in tl.static_range(2):
            for trip in range(
                0 if part == 0 else listed_edges, listed_edges if part == 0 else listed
            ):
                row = tl.load(into + trip).to(tl.int32) * ROWS + tl.arange(0, ROWS)
                states = _load(
                    query + batch * q_batch + own * q_head, row, q_row, step, q_step, n, depth,
                    False, EVEN,
                )  # fmt: skip
                upstream = _load(
                    grad + batch * g_batch + own * g_head, row, g_row, wide_step, 1, n, wide, False,
                    EVEN,
                )  # fmt: skip
                average = tl.load(mean + head * n + row, mask=row < n, other=0.0)
                origin, at, missing, factor = _rows_again(
                    numbers, head * n + row, row < n, every, KIND
                )
                low, high = row, row
                if part == 0:
                    low, high = _seen(row, n, m, first, stop, place, left, right, offset)
                made = _scores(
                    states, keys, row, column, low, high, masked, mask_row, mask_column, n, m,
                    scale, unit, part == 0, MASK,
                )  # fmt: skip
                probs, slope = _weights_again(
                    made, times, origin[:, None], at[:, None], missing[:, None], factor[:, None],
                    part_excess[:, None], KIND, query.dtype.element_ty != tl.float32,
                )  # fmt: skip
                of_weights = _product(upstream, tl.trans(vectors))
                if seed is not None:
                    share = _kept_share(seed, head, row, column, n, m, dropout)
                    probs = probs * share
                    of_weights = of_weights * share
                of_vectors += _product(tl.trans(probs.to(upstream.dtype)), upstream)
                of_scores = slope * (of_weights - average[:, None])
                of_keys += _product(tl.trans(of_scores.to(states.dtype)), states)
        tl.debug_barrier()
    there = (column < m)[:, None]
    into_keys = of_key + pair * m * depth + column[:, None].to(tl.int64) * depth + step[None, :]
    made_keys = (of_keys * scale).to(of_key.dtype.element_ty)
    tl.store(into_keys, made_keys, mask=there & (step < depth)[None, :])
    place_out = pair * m * wide + column[:, None].to(tl.int64) * wide + wide_step[None, :]
    made_vectors = of_vectors.to(of_value.dtype.element_ty)
    tl.store(of_value + place_out, made_vectors, mask=there & (wide_step < wide)[None, :])
