"""Rows that are too long to be held by a program: they are read in pieces, and twice."""

import triton
import triton.language as tl

from lastlayer.kernels.sampled_rows._columns_triton import LOG2E, _counts, _logits, _softplus


@triton.jit
def _long_rows(
    scores, gradient, first, second, offset, ids, target, shift, exact, row_scale, m, p, n_exact,
    factor, score_row, gradient_row, column_row,
    BLOCK: tl.constexpr, LOGISTIC: tl.constexpr, HITS: tl.constexpr, AVERAGE: tl.constexpr,
    SHIFTED: tl.constexpr, EXACT: tl.constexpr, GRADIENT: tl.constexpr,
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
    dead = scale == 0.0
    outside = -float("inf")
    if EXACT:
        outside = tl.load(exact + row).to(tl.float32)
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
                slopes = tl.where(dead, 0.0, slopes * scale)
                # The gradient may lie where the scores are, and be narrower.
                tl.debug_barrier()
                slopes = slopes.to(gradient.dtype.element_ty)
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
                slopes = tl.where(dead, 0.0, slopes)
                tl.debug_barrier()
                slopes = slopes.to(gradient.dtype.element_ty)
                tl.store(gradient + column, slopes, mask=column < m)
