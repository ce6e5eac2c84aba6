"""Losses of rows of drawn classes on CUDA: a program takes a few rows, and holds one at a time."""

import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import cdiv, next_power_of_2
from lastlayer.kernels.sampled_rows import parts_of_columns
from lastlayer.kernels.sampled_rows._columns_triton import LOG2E, _counts, _softplus
from lastlayer.kernels.sampled_rows._long_triton import _long_rows

# Columns that a program holds at once; longer rows are read twice.
MOST_HELD = 16_384
# Up to so many a program holds what is added to each column, and its id, for all of its rows; and
# the scores of the next row are on their way while it works on one.
MOST_KEPT = 8192
PIECE = 4096
MOST_WARPS = 16


def forward_(
    scores: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    columns: Tensor,
    offset: Tensor,
    ids: Tensor,
    target: Tensor,
    shift: Tensor | None,
    exact: Tensor | None,
    row_scale: Tensor | None,
    factor: float,
    n_exact: int,
    logistic: bool,
    drop_hits: bool,
    average: bool,
    adds: bool,
) -> None:
    """As the reference's."""
    n, m = scores.shape
    if not n:
        if columns.numel() and not adds:
            columns.zero_()
        return
    offset, ids, target = offset.contiguous(), ids.contiguous(), target.contiguous()
    block = max(16, next_power_of_2(m))
    apart = offset.dim() == 2
    numbers = n_exact, factor, scores.stride(0), gradient.stride(0), m if apart else 0
    options = dict(
        LOGISTIC=logistic, HITS=drop_hits, AVERAGE=average, SHIFTED=shift is not None,
        EXACT=exact is not None, GRADIENT=row_scale is not None, enable_fp_fusion=True,
    )  # fmt: skip
    if block > MOST_HELD:
        _long_rows[(n,)](
            scores, gradient, first, second, offset, ids, target, shift, exact, row_scale, m,
            target.shape[1], *numbers, BLOCK=PIECE, num_warps=16, **options,
        )  # fmt: skip
        if columns.numel():
            sums = gradient.sum(0, dtype=columns.dtype)
            columns = columns if adds else columns.zero_()
            columns[0] += sums
        return
    parts = columns.shape[0] if columns.numel() else parts_of_columns(n, m, "cuda")
    _rows[(parts,)](
        scores, gradient, first, second, columns, offset, ids, target, shift, exact, row_scale, n,
        cdiv(n, parts), m, target.shape[1], *numbers, BLOCK=block,
        KEPT=not apart and block <= MOST_KEPT, HEAD=n_exact > 0, COLUMNS=columns.numel() > 0,
        ADDS=adds, num_warps=max(1, min(MOST_WARPS, block // 256)), **options,
    )  # fmt: skip


@triton.jit
def _rows(
    scores, gradient, first, second, columns, offset, ids, target, shift, exact, row_scale, n,
    each, m, p, n_exact, factor, score_row, gradient_row, column_row,
    BLOCK: tl.constexpr, KEPT: tl.constexpr, LOGISTIC: tl.constexpr, HITS: tl.constexpr,
    AVERAGE: tl.constexpr, SHIFTED: tl.constexpr, EXACT: tl.constexpr, GRADIENT: tl.constexpr,
    HEAD: tl.constexpr, COLUMNS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < m
    drawn = column >= n_exact
    begin = part * each
    stop = tl.minimum(begin + each, n)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    if KEPT:
        kept_offset = tl.load(offset + column, mask=live, other=-float("inf")).to(tl.float32)
        if HITS:
            kept_ids = tl.load(ids + column, mask=live, other=-1)
        there = column < tl.where(begin < stop, m, 0)
        ahead = tl.load(scores + begin * score_row + column, mask=there, other=0.0)
    for row in range(begin, stop):
        if KEPT:
            values = ahead
            there = column < tl.where(row + 1 < stop, m, 0)
            ahead = tl.load(scores + (row + 1) * score_row + column, mask=there, other=0.0)
            added = kept_offset
            keep = added > -float("inf")
            if HITS:
                for place in range(p):
                    keep = keep & (kept_ids != tl.load(target + row * p + place))
        else:
            values = tl.load(scores + row * score_row + column, mask=live, other=0.0)
            own = row * column_row
            added, keep = _counts(column, m, offset + own, ids + own, target + row * p, p, HITS)
        move = 0.0
        if SHIFTED:
            move = tl.load(shift + row).to(tl.float32)
        scale = 0.0
        if GRADIENT:
            scale = tl.load(row_scale + row).to(tl.float32) * factor
        outside = -float("inf")
        if EXACT:
            outside = tl.load(exact + row).to(tl.float32)
        if AVERAGE:
            counted = (keep & drawn) if HEAD else keep
            left = tl.sum(counted.to(tl.int32), 0)
            move -= tl.log(tl.maximum(left, 1).to(tl.float32))
        x = values.to(tl.float32) * factor + added
        x += tl.where(drawn, move, 0.0) if HEAD else move
        x = tl.where(keep, x, -float("inf"))
        if LOGISTIC:
            losses, slopes = _softplus(x)
            tl.store(first + row, tl.sum(losses, 0))
            tl.store(second + row, tl.sum(slopes, 0))
            slopes *= scale
        else:
            peak = tl.max(x, 0)
            # With nothing but -inf there is no difference to take.
            origin = tl.where(peak == -float("inf"), 0.0, peak)
            shares = tl.exp2((x - origin) * LOG2E)
            total = tl.sum(shares, 0)
            of_draws, drawn_total = shares, total
            if HEAD:
                of_draws = tl.where(drawn, shares, 0.0)
                drawn_total = tl.sum(of_draws, 0)
            squares = tl.sum(of_draws * of_draws, 0)
            tl.store(first + row, origin + tl.log(total))
            ess = tl.where(squares == 0.0, 0.0, drawn_total * drawn_total / squares)
            tl.store(second + row, ess)
            everything = total + tl.exp(outside - origin)
            slopes = shares * (scale / tl.where(everything == 0.0, 1.0, everything))
        if GRADIENT:
            slopes = tl.where(scale == 0.0, 0.0, slopes)
            if COLUMNS:
                sums += slopes
            # The gradient may lie where the scores are, and be narrower: all have been read.
            tl.debug_barrier()
            place = gradient + row * gradient_row + column
            tl.store(place, slopes.to(gradient.dtype.element_ty), mask=live)
    if COLUMNS:
        place = columns + part * m + column
        if ADDS:
            sums += tl.load(place, mask=live, other=0.0)
        tl.store(place, sums, mask=live)
