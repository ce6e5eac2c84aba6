"""Losses of rows of drawn classes on CUDA: a program a row, which holds a row that is not long."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
# Columns that a program holds at once; longer rows are read twice.
MOST_HELD = 16_384
PIECE = 4096


def forward_(
    scores: Tensor,
    gradient: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """As the reference's."""
    n, m = scores.shape
    first, second = torch.empty(2, n, device=scores.device, dtype=torch.float32).unbind()
    held = max(16, triton.next_power_of_2(m)) <= MOST_HELD
    block = max(16, triton.next_power_of_2(m)) if held else PIECE
    if n:
        _rows[(n,)](
            scores, gradient, offset.contiguous(), ids.contiguous(), target.contiguous(), shift,
            exact, row_scale, first, second, m, target.shape[1], n_exact, factor,
            scores.stride(0), gradient.stride(0), 0 if offset.dim() == 1 else m,
            BLOCK=block, HELD=held, LOGISTIC=logistic, HITS=drop_hits, AVERAGE=average,
            SHIFTED=shift is not None, EXACT=exact is not None, GRADIENT=row_scale is not None,
            num_warps=max(1, min(16, block // 256)), enable_fp_fusion=True,
        )  # fmt: skip
    return first, second


@triton.jit
def _counts(column, m, offset, ids, target, p, HITS: tl.constexpr):
    """What is added to each column, and which of them count."""
    live = column < m
    added = tl.load(offset + column, mask=live, other=-float("inf")).to(tl.float32)
    keep = added > -float("inf")
    if HITS:
        named = tl.load(ids + column, mask=live, other=-1)
        for place in range(p):
            keep = keep & (named != tl.load(target + place))
    return added, keep


@triton.jit
def _logits(scores, column, m, added, keep, n_exact, factor, move):
    values = tl.load(scores + column, mask=column < m, other=0.0).to(tl.float32)
    values = values * factor + added + tl.where(column >= n_exact, move, 0.0)
    return tl.where(keep, values, -float("inf"))


@triton.jit
def _softplus(values):
    """log(1 + e^x) and its slope, without overflow."""
    small = tl.exp2(-tl.abs(values) * LOG2E)
    above = 1.0 + small
    # Rounding in 1 + e is made up for, so that many small terms do not add up to nothing.
    step = above - 1.0
    log = tl.where(step == 0.0, small, tl.log(above) * (small / tl.where(step == 0.0, 1.0, step)))
    slope = tl.where(values >= 0.0, 1.0, small) / above
    return log + tl.maximum(values, 0.0), tl.where(values == values, slope, values)


@triton.jit
def _rows(
    scores, gradient, offset, ids, target, shift, exact, row_scale, first, second, m, p, n_exact,
    factor, score_row, gradient_row, column_row,
    BLOCK: tl.constexpr, HELD: tl.constexpr, LOGISTIC: tl.constexpr, HITS: tl.constexpr,
    AVERAGE: tl.constexpr, SHIFTED: tl.constexpr, EXACT: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * score_row
    gradient += row * gradient_row
    offset += row * column_row
    ids += row * column_row
    target += row * p
    move = 0.0
    if SHIFTED:
        move = tl.load(shift + row).to(tl.float32)
    scale = 0.0
    if GRADIENT:
        scale = tl.load(row_scale + row).to(tl.float32) * factor
    outside = -float("inf")
    if EXACT:
        outside = tl.load(exact + row).to(tl.float32)

    if HELD:
        column = tl.arange(0, BLOCK)
        added, keep = _counts(column, m, offset, ids, target, p, HITS)
        drawn = column >= n_exact
        if AVERAGE:
            left = tl.sum((keep & drawn).to(tl.int32), 0)
            move -= tl.log(tl.maximum(left, 1).to(tl.float32))
        x = _logits(scores, column, m, added, keep, n_exact, factor, move)
        if LOGISTIC:
            losses, slopes = _softplus(x)
            tl.store(first + row, tl.sum(losses, 0))
            tl.store(second + row, tl.sum(slopes, 0))
            if GRADIENT:
                slopes = (slopes * scale).to(gradient.dtype.element_ty)
                tl.store(gradient + column, slopes, mask=column < m)
        else:
            peak = tl.max(x, 0)
            # With nothing but -inf there is no difference to take.
            origin = tl.where(peak == -float("inf"), 0.0, peak)
            shares = tl.exp2((x - origin) * LOG2E)
            total = tl.sum(shares, 0)
            of_draws = tl.where(drawn, shares, 0.0)
            sums = tl.sum(of_draws, 0)
            squares = tl.sum(of_draws * of_draws, 0)
            tl.store(first + row, origin + tl.log(total))
            tl.store(second + row, tl.where(squares == 0.0, 0.0, sums * sums / squares))
            if GRADIENT:
                everything = total + tl.exp(outside - origin)
                slopes = shares * (scale / tl.where(everything == 0.0, 1.0, everything))
                slopes = slopes.to(gradient.dtype.element_ty)
                tl.store(gradient + column, slopes, mask=column < m)
    else:
        if AVERAGE:
            lefts = tl.zeros((BLOCK,), dtype=tl.int32)
            for start in range(0, m, BLOCK):
                column = start + tl.arange(0, BLOCK)
                added, keep = _counts(column, m, offset, ids, target, p, HITS)
                lefts += (keep & (column >= n_exact)).to(tl.int32)
            move -= tl.log(tl.maximum(tl.sum(lefts, 0), 1).to(tl.float32))
        if LOGISTIC:
            all_losses = tl.zeros((BLOCK,), dtype=tl.float32)
            all_slopes = tl.zeros((BLOCK,), dtype=tl.float32)
            for start in range(0, m, BLOCK):
                column = start + tl.arange(0, BLOCK)
                added, keep = _counts(column, m, offset, ids, target, p, HITS)
                x = _logits(scores, column, m, added, keep, n_exact, factor, move)
                losses, slopes = _softplus(x)
                all_losses += losses
                all_slopes += slopes
                if GRADIENT:
                    slopes = (slopes * scale).to(gradient.dtype.element_ty)
                    tl.store(gradient + column, slopes, mask=column < m)
            tl.store(first + row, tl.sum(all_losses, 0))
            tl.store(second + row, tl.sum(all_slopes, 0))
        else:
            peak = -float("inf")
            totals = tl.zeros((BLOCK,), dtype=tl.float32)
            sums = tl.zeros((BLOCK,), dtype=tl.float32)
            squares = tl.zeros((BLOCK,), dtype=tl.float32)
            for start in range(0, m, BLOCK):
                column = start + tl.arange(0, BLOCK)
                added, keep = _counts(column, m, offset, ids, target, p, HITS)
                x = _logits(scores, column, m, added, keep, n_exact, factor, move)
                grown = tl.maximum(peak, tl.max(x, 0))
                origin = tl.where(grown == -float("inf"), 0.0, grown)
                shrink = tl.exp(peak - origin)
                shares = tl.exp2((x - origin) * LOG2E)
                of_draws = tl.where(column >= n_exact, shares, 0.0)
                totals = totals * shrink + shares
                sums = sums * shrink + of_draws
                squares = squares * (shrink * shrink) + of_draws * of_draws
                peak = grown
            origin = tl.where(peak == -float("inf"), 0.0, peak)
            total = tl.sum(totals, 0)
            of_all = tl.sum(squares, 0)
            of_draws_sum = tl.sum(sums, 0)
            tl.store(first + row, origin + tl.log(total))
            ess = tl.where(of_all == 0.0, 0.0, of_draws_sum * of_draws_sum / of_all)
            tl.store(second + row, ess)
            if GRADIENT:
                everything = total + tl.exp(outside - origin)
                scale /= tl.where(everything == 0.0, 1.0, everything)
                for start in range(0, m, BLOCK):
                    column = start + tl.arange(0, BLOCK)
                    added, keep = _counts(column, m, offset, ids, target, p, HITS)
                    x = _logits(scores, column, m, added, keep, n_exact, factor, move)
                    slopes = tl.exp2((x - origin) * LOG2E) * scale
                    slopes = slopes.to(gradient.dtype.element_ty)
                    tl.store(gradient + column, slopes, mask=column < m)
