"""Losses of rows of drawn classes on CUDA, and what surrounds them, in as few launches as can be.

A program takes a few rows, and holds one at a time. Rows that are too long for that are read in
pieces, and twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import LOG2E, cdiv, next_power_of_2, tile_width
from lastlayer.kernels.sampled_rows import parts_of_columns

# Columns that a program holds at once; longer rows are read twice.
MOST_HELD = 16_384
# Up to so many a program holds what is added to each column, and its id, for all of its rows; and
# the scores of the next row are on their way while it works on one.
MOST_KEPT = 8192
PIECE = 4096
MOST_WARPS = 16
WIDEST = 1024


def forward_(
    scores: Tensor, gradient: Tensor, first: Tensor, second: Tensor, columns: Tensor,
    offset: Tensor, ids: Tensor, target: Tensor, shift: Tensor | None, exact: Tensor | None,
    row_scale: Tensor | None, factor: float, n_exact: int, logistic: bool, drop_hits: bool,
    average: bool, adds: bool,
) -> None:  # fmt: skip
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
    parts = columns.shape[0] if columns.numel() else parts_of_columns(n, m)
    _rows[(parts,)](
        scores, gradient, first, second, columns, offset, ids, target, shift, exact, row_scale, n,
        cdiv(n, parts), m, target.shape[1], *numbers, BLOCK=block,
        KEPT=not apart and block <= MOST_KEPT, HEAD=n_exact > 0, COLUMNS=columns.numel() > 0,
        ADDS=adds, num_warps=max(1, min(MOST_WARPS, block // 256)), **options,
    )  # fmt: skip


@kernel
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


@kernel
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


def row_scale(hidden: Tensor, target: Tensor, mean: bool) -> Tensor:
    n, p = target.shape
    scale = torch.empty(n, device=hidden.device, dtype=torch.float32)
    if n:
        block = tile_width(n, 8192)
        # One program: rows are counted before the first of them gets its share.
        _scale[(1,)](
            target.contiguous(), scale, n, p, MEAN=mean, BLOCK=block,
            num_warps=max(1, min(16, block // 256)), enable_fp_fusion=True,
        )  # fmt: skip
    return scale


def start(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ids: Tensor,
    log_expected: Tensor, target_log_expected: Tensor | None, row_shift: Tensor | None,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (n, d), m = hidden.shape, ids.shape[0]
    device, dtype = hidden.device, hidden.dtype
    both = torch.empty(n + m, d, device=device, dtype=dtype)
    added = torch.empty(n + m, device=device, dtype=torch.float32)
    entries = torch.empty(m + n, device=device, dtype=torch.int32)
    clean, vectors, logits, offset = both[:n], both[n:], added[:n], added[n:]
    if n + m:
        _start[(m + n,)](
            hidden, weight, None if bias is None else bias.contiguous(), target.contiguous(),
            ids.contiguous(), log_expected.contiguous(), target_log_expected, row_shift, clean,
            vectors, logits, offset, entries, m, d, factor, hidden.stride(0), hidden.stride(1),
            weight.stride(0), weight.stride(1), BIASED=bias is not None,
            WEIGHTED=target_log_expected is not None, SHIFTED=row_shift is not None,
            WIDTH=tile_width(d, WIDEST), enable_fp_fusion=True,
        )  # fmt: skip
    return clean, vectors, logits, offset, entries


def finish_(
    first: Tensor, logits: Tensor, scale: Tensor, row_scale: Tensor | None, classes: Tensor,
    weight: Tensor, of_hidden: Tensor, factor: float, logistic: bool, with_target: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n = first.shape[0]
    losses, slopes = torch.empty(2, n, device=first.device, dtype=torch.float32).unbind()
    if n:
        _finish[(n,)](
            first, logits, scale, row_scale, classes, weight, of_hidden, losses, slopes,
            weight.shape[1], factor, weight.stride(0), weight.stride(1), LOGISTIC=logistic,
            WITH_TARGET=with_target, GRADIENT=row_scale is not None, HIDDEN=of_hidden.dim() == 2,
            WIDTH=tile_width(weight.shape[1], WIDEST), enable_fp_fusion=True,
        )  # fmt: skip
    return losses, slopes


@triton.jit
def _have_targets(target, row, n, p):
    counts = tl.zeros(row.shape, dtype=tl.int32)
    for place in range(p):
        chosen = tl.load(target + row.to(tl.int64) * p + place, mask=row < n, other=-1)
        counts = counts | (chosen >= 0).to(tl.int32)
    return counts


@kernel
def _scale(target, scale, n, p, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    share = 1.0
    if MEAN:
        totals = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(0, n, BLOCK):
            totals += _have_targets(target, start + tl.arange(0, BLOCK), n, p)
        share = 1.0 / tl.maximum(tl.sum(totals, 0), 1).to(tl.float32)
    for start in range(0, n, BLOCK):
        row = start + tl.arange(0, BLOCK)
        counts = _have_targets(target, row, n, p)
        tl.store(scale + row, counts.to(tl.float32) * share, mask=row < n)


@kernel
def _start(
    hidden, weight, bias, target, ids, log_expected, target_log_expected, row_shift, clean, vectors,
    logits, offset, entries, m, depth, factor, hidden_row, hidden_step, weight_row, weight_step,
    BIASED: tl.constexpr, WEIGHTED: tl.constexpr, SHIFTED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    if place < m:
        chosen = tl.load(ids + place)
        tl.store(entries + place, chosen.to(tl.int32))
        added = -tl.load(log_expected + place).to(tl.float32)
        if BIASED:
            level = factor * tl.load(bias + chosen).to(tl.float32)
            # A masked class has no mass, but it was drawn: -inf would say that it was not.
            added += tl.where(level == -float("inf"), -1e38, level)
        tl.store(offset + place, added)
        for start in range(0, depth, WIDTH):
            step = start + tl.arange(0, WIDTH)
            inside = step < depth
            source = weight + chosen * weight_row + step * weight_step
            vector = tl.load(source, mask=inside, other=0.0)
            into = vectors + place * depth + step
            tl.store(into, vector.to(vectors.dtype.element_ty), mask=inside)
    else:
        row = place - m
        given = tl.load(target + row)
        chosen = tl.where(given < 0, tl.load(ids, mask=m > 0, other=0), given)
        tl.store(entries + place, chosen.to(tl.int32))
        # A row without a target may hold anything, which must not come into a product.
        read = tl.where(given < 0, 0, depth)
        sums = tl.zeros((WIDTH,), dtype=tl.float32)
        for start in range(0, depth, WIDTH):
            step = start + tl.arange(0, WIDTH)
            state = tl.load(
                hidden + row * hidden_row + step * hidden_step, mask=step < read, other=0.0
            )
            source = weight + chosen * weight_row + step * weight_step
            vector = tl.load(source, mask=step < depth, other=0.0)
            sums += state.to(tl.float32) * vector.to(tl.float32)
            tl.store(clean + row * depth + step, state, mask=step < depth)
        logit = tl.sum(sums, 0)
        if BIASED:
            logit += tl.load(bias + chosen).to(tl.float32)
        logit *= factor
        if WEIGHTED:
            logit -= tl.load(target_log_expected + row).to(tl.float32)
        if SHIFTED:
            logit += tl.load(row_shift + row).to(tl.float32)
        tl.store(logits + row, logit)


@triton.jit
def _odds(others, logit):
    """Of the rest against the target; inf where that is masked, also if all others are."""
    return tl.where(logit == -float("inf"), float("inf"), others - logit)


@kernel
def _finish(
    first, logits, scale, row_scale, classes, weight, of_hidden, losses, slopes, depth, factor,
    weight_row, weight_step, LOGISTIC: tl.constexpr, WITH_TARGET: tl.constexpr,
    GRADIENT: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    others = tl.load(first + row)
    logit = tl.load(logits + row)
    if LOGISTIC:
        loss, slope = _softplus(-logit)
        loss += others
    elif WITH_TARGET:
        # The odds of the rest against the target: 1 - p is not what remains of 1.
        loss, slope = _softplus(_odds(others, logit))
    else:
        loss, slope = _odds(others, logit), 1.0
    share = tl.load(scale + row)
    tl.store(losses + row, tl.where(share == 0.0, 0.0, loss * share))
    push = 0.0
    if GRADIENT:
        weighed = tl.load(row_scale + row) * factor
        push = tl.where(weighed == 0.0, 0.0, -slope * weighed)
    tl.store(slopes + row, push)
    if HIDDEN:
        if push != 0.0:
            chosen = tl.load(classes + row).to(tl.int64)
            for start in range(0, depth, WIDTH):
                step = start + tl.arange(0, WIDTH)
                inside = step < depth
                source = weight + chosen * weight_row + step * weight_step
                vector = tl.load(source, mask=inside, other=0.0).to(tl.float32)
                into = of_hidden + row * depth + step
                total = tl.load(into, mask=inside, other=0.0) + push * vector
                tl.store(into, total, mask=inside)
