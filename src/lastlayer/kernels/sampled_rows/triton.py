"""Losses of rows of drawn classes on CUDA, and what surrounds them, in as few launches as can be.

A program takes a few rows, and holds one at a time. Rows that are too long for that are read in
pieces, and twice.

Where all rows share their draws and have one target each, a step is :class:`OneTarget`: one kernel
draws and gathers, one turns scores into losses and slopes, one adds up; README.md.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import (
    LOG2E,
    LOG_2,
    alias_draw,
    cdiv,
    log_of_other_weights,
    log_of_others,
    next_power_of_2,
    philox,
    rank_of_bits,
    share_of_rank,
    tile_width,
)
from lastlayer.kernels.rng import ALIAS, GIVEN, LOG_UNIFORM, UNIFORM
from lastlayer.kernels.sampled_rows import Draws, parts_of_columns

# Columns that a program holds at once; longer rows are read twice.
MOST_HELD = 16_384
# Up to so many a program holds what is added to each column, and its id, for all of its rows; and
# the scores of the next row are on their way while it works on one.
MOST_KEPT = 8192
PIECE = 4096
MOST_WARPS = 16
WIDEST = 1024
# Numbers that a program adds up together.
ADDED = 4096
_GIVEN, _UNIFORM = tl.constexpr(GIVEN), tl.constexpr(UNIFORM)
_LOG_UNIFORM, _ALIAS = tl.constexpr(LOG_UNIFORM), tl.constexpr(ALIAS)


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
    strides = scores.stride(0), gradient.stride(0), m if apart else 0
    numbers = n_exact, factor, *strides, 0, 0, 0, m
    options = dict(
        LOGISTIC=logistic, HITS=drop_hits, AVERAGE=average, SHIFTED=shift is not None,
        EXACT=exact is not None, GRADIENT=row_scale is not None, enable_fp_fusion=True,
    )  # fmt: skip
    if block > MOST_HELD:
        _long_rows[(n,)](
            scores, gradient, first, second, offset, ids, target, shift, exact, row_scale,
            *_NO_ENDING, m, target.shape[1], *numbers, BLOCK=PIECE, num_warps=16,
            **_GENERAL, **options,
        )  # fmt: skip
        if columns.numel():
            sums = gradient.sum(0, dtype=columns.dtype)
            columns = columns if adds else columns.zero_()
            columns[0] += sums
        return
    parts = columns.shape[0] if columns.numel() else parts_of_columns(n, m)
    _rows[(parts,)](
        scores, gradient, first, second, columns, offset, ids, target, shift, exact, row_scale,
        *_NO_ENDING, n, cdiv(n, parts), m, target.shape[1], *numbers, BLOCK=block,
        KEPT=not apart and block <= MOST_KEPT, HEAD=n_exact > 0, COLUMNS=columns.numel() > 0,
        ADDS=adds, num_warps=max(1, min(MOST_WARPS, block // 256)), **_GENERAL, **options,
    )  # fmt: skip


# What the kernels take for rows with one target beside the others, which have none of it.
_NO_ENDING = (None,) * 2
_GENERAL = dict(ONE=False, WITH_TARGET=False, PUSH=False, MEAN=False)


@kernel
def _rows(
    scores, gradient, first, second, columns, offset, ids, target, shift, exact, row_scale,
    numbers, push, n, each, m, p, n_exact, factor, score_row, gradient_row, column_row, row0,
    n_rows, share_at, c,
    BLOCK: tl.constexpr, KEPT: tl.constexpr, LOGISTIC: tl.constexpr, HITS: tl.constexpr,
    AVERAGE: tl.constexpr, SHIFTED: tl.constexpr, EXACT: tl.constexpr, GRADIENT: tl.constexpr,
    HEAD: tl.constexpr, COLUMNS: tl.constexpr, ADDS: tl.constexpr, ONE: tl.constexpr,
    WITH_TARGET: tl.constexpr, PUSH: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    share = 1.0
    if ONE:
        # All in one scratch, see OneTarget.
        offset = first
        exact = first + m + row0
        shift = exact + n_rows
        row_scale = shift + n_rows
        columns = first + m + 4 * n_rows
        if MEAN:
            share = tl.load(first + share_at)
        first = row_scale + n_rows
        second += row0
        target += row0
    column = tl.arange(0, BLOCK)
    live = column < m
    drawn = column >= n_exact
    begin = part * each
    stop = tl.minimum(begin + each, n)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    if KEPT:
        kept_offset = tl.load(offset + column, mask=live, other=-float("inf")).to(tl.float32)
        if HITS:
            kept_ids = tl.load(ids + column, mask=column < c, other=-1)
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
            added, keep = _counts(column, m, c, offset + own, ids + own, target + row * p, p, HITS)
        move = 0.0
        if SHIFTED:
            move = tl.load(shift + row).to(tl.float32)
        scale = 0.0
        if GRADIENT:
            scale = tl.load(row_scale + row).to(tl.float32) * share * factor
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
            others = tl.sum(losses, 0)
            result = tl.sum(slopes, 0)
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
            others = origin + tl.log(total)
            result = tl.where(squares == 0.0, 0.0, drawn_total * drawn_total / squares)
            everything = total + tl.exp(outside - origin)
            slopes = shares * (scale / tl.where(everything == 0.0, 1.0, everything))
        if ONE:
            _end_row(
                others, result, scale, factor, row, row0, exact, row_scale, first, second, numbers,
                push, c, LOGISTIC, WITH_TARGET, GRADIENT, PUSH,
            )  # fmt: skip
        else:
            tl.store(first + row, others)
            tl.store(second + row, result)
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
def _counts(column, m, c, offset, ids, target, p, HITS: tl.constexpr):
    """What is added to each column, and which of them count."""
    live = column < m
    added = tl.load(offset + column, mask=live, other=-float("inf")).to(tl.float32)
    keep = added > -float("inf")
    if HITS:
        named = tl.load(ids + column, mask=column < c, other=-1)
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
    scores, gradient, first, second, offset, ids, target, shift, exact, row_scale, numbers, push, m,
    p, n_exact, factor, score_row, gradient_row, column_row, row0, n_rows, share_at, c,
    BLOCK: tl.constexpr, LOGISTIC: tl.constexpr, HITS: tl.constexpr, AVERAGE: tl.constexpr,
    SHIFTED: tl.constexpr, EXACT: tl.constexpr, GRADIENT: tl.constexpr, ONE: tl.constexpr,
    WITH_TARGET: tl.constexpr, PUSH: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    share = 1.0
    if ONE:
        offset = first
        exact = first + m + row0
        shift = exact + n_rows
        row_scale = shift + n_rows
        if MEAN:
            share = tl.load(first + share_at)
        first = row_scale + n_rows
        second += row0
        target += row0
    scores += row * score_row
    gradient += row * gradient_row
    offset += row * column_row
    ids += row * column_row
    move = 0.0
    if SHIFTED:
        move = tl.load(shift + row).to(tl.float32)
    scale = 0.0
    if GRADIENT:
        scale = tl.load(row_scale + row).to(tl.float32) * share * factor
    full_scale = scale
    target += row * p
    dead = scale == 0.0
    outside = -float("inf")
    if EXACT:
        outside = tl.load(exact + row).to(tl.float32)
    if AVERAGE:
        lefts = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(0, m, BLOCK):
            column = start + tl.arange(0, BLOCK)
            added, keep = _counts(column, m, c, offset, ids, target, p, HITS)
            lefts += (keep & (column >= n_exact)).to(tl.int32)
        move -= tl.log(tl.maximum(tl.sum(lefts, 0), 1).to(tl.float32))
    if LOGISTIC:
        all_losses = tl.zeros((BLOCK,), dtype=tl.float32)
        all_slopes = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, m, BLOCK):
            column = start + tl.arange(0, BLOCK)
            added, keep = _counts(column, m, c, offset, ids, target, p, HITS)
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
        others = tl.sum(all_losses, 0)
        result = tl.sum(all_slopes, 0)
    else:
        peak = -float("inf")
        totals = tl.zeros((BLOCK,), dtype=tl.float32)
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
        squares = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, m, BLOCK):
            column = start + tl.arange(0, BLOCK)
            added, keep = _counts(column, m, c, offset, ids, target, p, HITS)
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
        others = origin + tl.log(total)
        result = tl.where(of_all == 0.0, 0.0, of_draws_sum * of_draws_sum / of_all)
        if GRADIENT:
            everything = total + tl.exp(outside - origin)
            scale /= tl.where(everything == 0.0, 1.0, everything)
            for start in range(0, m, BLOCK):
                column = start + tl.arange(0, BLOCK)
                added, keep = _counts(column, m, c, offset, ids, target, p, HITS)
                x = _logits(scores, column, m, added, keep, n_exact, factor, move)
                slopes = tl.exp2((x - origin) * LOG2E) * scale
                slopes = tl.where(dead, 0.0, slopes)
                tl.debug_barrier()
                slopes = slopes.to(gradient.dtype.element_ty)
                tl.store(gradient + column, slopes, mask=column < m)
    if ONE:
        _end_row(
            others, result, full_scale, factor, row, row0, exact, row_scale, first, second, numbers,
            push, c, LOGISTIC, WITH_TARGET, GRADIENT, PUSH,
        )  # fmt: skip
    else:
        tl.store(first + row, others)
        tl.store(second + row, result)


@triton.jit
def _odds(others, logit):
    """Of the rest against the target; inf where that is masked, also if all others are."""
    return tl.where(logit == -float("inf"), float("inf"), others - logit)


@triton.jit
def _end_row(
    others, result, scale, factor, row, row0, logits, row_scale, losses, second, numbers, push, c,
    LOGISTIC: tl.constexpr, WITH_TARGET: tl.constexpr, GRADIENT: tl.constexpr, PUSH: tl.constexpr,
):  # fmt: skip
    """The loss of a row from its target and from what its draws add up to, and what follows."""
    logit = tl.load(logits + row)
    if LOGISTIC:
        loss, slope = _softplus(-logit)
        loss += others
        tl.store(second + row, 0.0)
    else:
        if WITH_TARGET:
            # The odds of the rest against the target: 1 - p is not what remains of 1.
            loss, slope = _softplus(_odds(others, logit))
        else:
            loss, slope = _odds(others, logit), 1.0
        tl.store(second + row, result)
    counted = tl.load(row_scale + row)
    tl.store(losses + row, tl.where(counted == 0.0, 0.0, loss * counted))
    if GRADIENT:
        pull = tl.where(scale == 0.0, 0.0, -slope * scale)
        tl.store(numbers + c + row0 + row, pull)
        if PUSH:
            both = (result - slope) * (scale / factor)
            tl.store(push + row0 + row, tl.where(scale == 0.0, 0.0, both))


class OneTarget:
    """A step of rows against draws that all share, with one target each, around its products.

    ``clean`` is hidden with 0 in rows without a target, ``vectors`` those of the classes drawn;
    both are padded by 0 to sizes that suit a GPU's products. ``entries`` are the classes of draws
    and rows, int32, where a row without a target has the first draw's. ``numbers`` get the
    gradients of the scores of entries, summed over rows: the first m only where biases ask for it.
    Scratch holds, one after the other, what is added to the columns (m); logits of targets, what is
    added to their draws, weights and losses (n each); sums of columns; and 1 / the rows that count.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
        row_shift: Tensor | None, draws: Draws, factor: float, mean: bool, to_bias: bool,
        chunk: int, upstream: Tensor | None, rule: tuple[bool, ...],
    ) -> None:  # fmt: skip
        (n, d), m, device, dtype = hidden.shape, draws.m, hidden.device, hidden.dtype
        self.n, self.d, self.m, self.draws = n, d, m, draws
        self.target, self.weight, self.factor, self.rule = target, weight, factor, rule
        step = 16 // dtype.itemsize
        self.columns, self.width = -(-m // step) * step, -(-d // step) * step
        self.parts = parts_of_columns(min(n, chunk), self.columns) if to_bias else 0
        if to_bias and self.columns > MOST_HELD:
            self.parts = 1
        self.share_at = self.columns + 4 * n + self.parts * self.columns
        self.clean = torch.empty((n, self.width), device=device, dtype=dtype)
        self.vectors = torch.empty((self.columns, self.width), device=device, dtype=dtype)
        self.scratch = torch.empty(self.share_at + 1, device=device, dtype=torch.float32)
        self.entries = torch.empty(m + n, device=device, dtype=torch.int32)
        self.numbers = torch.empty(m + n, device=device, dtype=torch.float32)
        self.ess = torch.empty(n, device=device, dtype=torch.float32)
        kind, number = draws.kind, 0.0
        if kind == UNIFORM:
            number = math.log(draws.n_classes)
        elif kind == LOG_UNIFORM:
            number = math.log2(draws.n_classes + 1)
        elif draws.second is not None:
            number = draws.second.shape[0].bit_length() - 1
        _start[(self.columns + n + 1,)](
            hidden, weight, bias, target, row_shift, draws.first, draws.second, draws.third,
            draws.of_targets, draws.shift, upstream, self.clean, self.vectors, self.scratch,
            self.entries, n, m, self.columns, d, self.width, self.share_at, draws.n_classes,
            draws.less, factor, hidden.stride(0), hidden.stride(1), weight.stride(0),
            weight.stride(1), KIND=kind, NUMBER=number, CORRECTS=draws.corrects,
            TARGETS=draws.targets, MEAN=mean, WIDTH=tile_width(self.width, WIDEST),
            # Products and sums stay apart, or ranks would be rounded differently from a CPU's.
            enable_fp_fusion=kind != LOG_UNIFORM,
        )  # fmt: skip

    def rows(
        self, scores: Tensor, gradient: Tensor, row0: int, push: Tensor | None, n_exact: int,
        mean: bool, wanted: bool,
    ) -> None:  # fmt: skip
        """Scores of some rows to their gradient and losses."""
        n, m = scores.shape[0], self.columns
        logistic, with_target, drop_hits, average = self.rule
        block, ending = max(16, next_power_of_2(m)), (self.numbers, push)
        numbers = (
            m, 1, n_exact, self.factor, scores.stride(0), gradient.stride(0), 0, row0, self.n,
            self.share_at, self.m,
        )  # fmt: skip
        options = dict(
            LOGISTIC=logistic, HITS=drop_hits, AVERAGE=average, SHIFTED=True,
            EXACT=with_target and not logistic, GRADIENT=wanted, ONE=True, WITH_TARGET=with_target,
            PUSH=push is not None, MEAN=mean, enable_fp_fusion=True,
        )  # fmt: skip
        if block > MOST_HELD:
            _long_rows[(n,)](
                scores, gradient, self.scratch, self.ess, None, self.entries, self.target, None,
                None, None, *ending, *numbers, BLOCK=PIECE, num_warps=16, **options,
            )  # fmt: skip
            if self.parts:
                first = self.share_at - m
                sums, more = self.scratch[first : first + m], gradient.sum(0, dtype=torch.float32)
                sums.add_(more) if row0 else sums.copy_(more)
            return
        parts = self.parts or parts_of_columns(n, m)
        _rows[(parts,)](
            scores, gradient, self.scratch, self.ess, None, None, self.entries, self.target, None,
            None, None, *ending, n, cdiv(n, parts), *numbers, BLOCK=block, KEPT=block <= MOST_KEPT,
            HEAD=n_exact > 0, COLUMNS=self.parts > 0, ADDS=row0 > 0,
            num_warps=max(1, min(MOST_WARPS, block // 256)), **options,
        )  # fmt: skip

    def losses(self) -> Tensor:
        """Of each row."""
        first = self.columns + 3 * self.n
        return self.scratch[first : first + self.n]

    def share(self) -> Tensor:
        """1 / the number of rows that count."""
        return self.scratch[self.share_at]

    def total(self, loss: Tensor | None, of_hidden: Tensor | None, bias: bool) -> None:
        """Adds up the losses of all rows, and where ``bias`` is wanted the sums of columns.

        What targets pull is added to the gradient of hidden.
        """
        draws, m, n, weight = self.draws, self.m, self.n, self.weight
        columns, rows = min(128, next_power_of_2(m)), 0 if of_hidden is None else n
        sums = cdiv(m, columns) if bias else 0
        _total[(1 + sums + rows,)](
            self.scratch, self.numbers, loss, draws.first, weight, self.target, of_hidden, n,
            self.columns, m, self.share_at, self.parts, sums, self.d, self.width, weight.stride(0),
            weight.stride(1), BLOCK=tile_width(n, ADDED, 128), COLUMNS=columns,
            PARTS=ADDED // columns, WIDTH=tile_width(self.d, WIDEST), COUNTS=draws.counts,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit
def _drawn(place, first, second, n_classes, KIND: tl.constexpr, NUMBER: tl.constexpr):
    """The class of draw ``place``."""
    if KIND == _GIVEN:
        chosen = tl.load(first + place)
    else:
        a, b, c, d = philox(place // 2, tl.load(first), tl.load(first + 1))
        odd = place % 2 == 1
        upper, lower = tl.where(odd, c, a), tl.where(odd, d, b)
        if KIND == _UNIFORM:
            chosen = ((upper * n_classes + ((lower * n_classes) >> 32)) >> 32).to(tl.int64)
        elif KIND == _LOG_UNIFORM:
            chosen = rank_of_bits(upper, lower, n_classes, NUMBER)
            if second is not None:
                chosen = tl.load(second + chosen)
        else:
            chosen = alias_draw(second, upper.to(tl.int64), lower.to(tl.int64), place >= 0, NUMBER)
    return chosen


@triton.jit
def _log_q(chosen, third, OTHERS: tl.constexpr, KIND: tl.constexpr, NUMBER: tl.constexpr):
    """The log-probability of a class by its sampler, or of all other classes together."""
    if KIND == _ALIAS:
        own = tl.load(third + chosen)
        if OTHERS:
            made = log_of_other_weights(own, NUMBER + 32)
        else:
            made = tl.log(own.to(tl.float64)) - (NUMBER + 32) * LOG_2
    else:
        if KIND == _UNIFORM:
            share = tl.exp(0.0 * chosen.to(tl.float64) - NUMBER)
        elif third is not None:
            share = share_of_rank(tl.load(third + chosen), NUMBER)
        else:
            share = share_of_rank(chosen, NUMBER)
        if OTHERS:
            made = log_of_others(share)
        else:
            made = tl.log(share)
    return made


@kernel
def _start(
    hidden, weight, bias, target, row_shift, first, second, third, of_targets, shift, upstream,
    clean, vectors, scratch, entries, n, m, columns, depth, width, share_at, n_classes, less,
    factor, hidden_row, hidden_step, weight_row, weight_step, KIND: tl.constexpr,
    NUMBER: tl.constexpr, CORRECTS: tl.constexpr, TARGETS: tl.constexpr, MEAN: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    if place < columns:
        added = -float("inf")
        chosen = place * 0
        # A column that pads the product has nothing.
        read = tl.where(place < m, depth, 0)
        if place < m:
            chosen = _drawn(place, first, second, n_classes, KIND, NUMBER)
            tl.store(entries + place, chosen.to(tl.int32))
            added = -less
            if KIND == _GIVEN:
                added -= tl.load(second + place).to(tl.float32)
            elif CORRECTS:
                added -= _log_q(chosen, third, False, KIND, NUMBER).to(tl.float32)
            if bias is not None:
                level = factor * tl.load(bias + chosen).to(tl.float32)
                # A masked class has no mass, but it was drawn: -inf would say that it was not.
                added += tl.where(level == -float("inf"), -1e38, level)
        tl.store(scratch + place, added)
        for start in range(0, width, WIDTH):
            step = start + tl.arange(0, WIDTH)
            source = weight + chosen * weight_row + step * weight_step
            vector = tl.load(source, mask=step < read, other=0.0)
            into = vectors + place * width + step
            tl.store(into, vector.to(vectors.dtype.element_ty), mask=step < width)
    elif place < columns + n:
        row = place - columns
        given = tl.load(target + row)
        chosen = given
        if given < 0:
            chosen = _drawn(place * 0, first, second, n_classes, KIND, NUMBER)
        tl.store(entries + m + row, chosen.to(tl.int32))
        # A row without a target may hold anything, which must not come into a product.
        read = tl.where(given < 0, 0, depth)
        sums = tl.zeros((WIDTH,), dtype=tl.float32)
        for start in range(0, width, WIDTH):
            step = start + tl.arange(0, WIDTH)
            state = tl.load(
                hidden + row * hidden_row + step * hidden_step, mask=step < read, other=0.0
            )
            source = weight + chosen * weight_row + step * weight_step
            vector = tl.load(source, mask=step < read, other=0.0)
            sums += state.to(tl.float32) * vector.to(tl.float32)
            tl.store(clean + row * width + step, state, mask=step < width)
        logit = tl.sum(sums, 0)
        if bias is not None:
            logit += tl.load(bias + chosen).to(tl.float32)
        logit *= factor
        move = 0.0
        if of_targets is not None:
            logit -= tl.load(of_targets + row).to(tl.float32)
        elif TARGETS == 1:
            logit -= _log_q(chosen, third, False, KIND, NUMBER).to(tl.float32) + less
        elif TARGETS == 2:
            move = _log_q(chosen, third, True, KIND, NUMBER).to(tl.float32)
        if shift is not None:
            move += tl.load(shift + row).to(tl.float32)
        if row_shift is not None:
            added = tl.load(row_shift + row).to(tl.float32)
            logit += added
            move += added
        counted = tl.where(given < 0, 0.0, 1.0)
        if upstream is not None:
            counted = tl.where(given < 0, 0.0, tl.load(upstream + row).to(tl.float32))
        scratch += columns
        tl.store(scratch + row, logit)
        tl.store(scratch + n + row, move)
        tl.store(scratch + 2 * n + row, counted)
    else:
        share = 1.0
        if MEAN:
            totals = tl.zeros((1024,), dtype=tl.int32)
            for start in range(0, n, 1024):
                row = start + tl.arange(0, 1024)
                totals += (tl.load(target + row, mask=row < n, other=-1) >= 0).to(tl.int32)
            share = 1.0 / tl.maximum(tl.sum(totals, 0), 1).to(tl.float32)
        tl.store(scratch + share_at, share)


@kernel
def _total(
    scratch, numbers, loss, counter, weight, target, of_hidden, n, columns, m, share_at, parts,
    sums, depth, hidden_row, weight_row, weight_step, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    if part == 0:
        if loss is not None:
            totals = tl.zeros((BLOCK,), dtype=tl.float32)
            for start in range(0, n, BLOCK):
                row = start + tl.arange(0, BLOCK)
                totals += tl.load(scratch + columns + 3 * n + row, mask=row < n, other=0.0)
            tl.store(loss, tl.sum(totals, 0) * tl.load(scratch + share_at))
        if COUNTS:
            # All has been drawn.
            tl.atomic_add(counter + 1, tl.full((), 1, tl.int64))
    elif part <= sums:
        column = (part - 1) * COLUMNS + tl.arange(0, COLUMNS)
        levels = tl.zeros((PARTS, COLUMNS), dtype=tl.float32)
        for start in range(0, parts, PARTS):
            some = start + tl.arange(0, PARTS)
            place = scratch + columns + 4 * n + some[:, None] * columns + column[None, :]
            there = (some < parts)[:, None] & (column < m)[None, :]
            levels += tl.load(place, mask=there, other=0.0)
        tl.store(numbers + column, tl.sum(levels, 0), mask=column < m)
    elif of_hidden is not None:
        row = (part - 1 - sums).to(tl.int64)
        pull = tl.load(numbers + m + row)
        # A row that does not count reads no vector.
        if pull != 0.0:
            chosen = tl.load(target + row)
            for start in range(0, depth, WIDTH):
                step = start + tl.arange(0, WIDTH)
                inside = step < depth
                source = weight + chosen * weight_row + step * weight_step
                vector = tl.load(source, mask=inside, other=0.0).to(tl.float32)
                into = of_hidden + row * hidden_row + step
                before = tl.load(into, mask=inside, other=0.0)
                tl.store(into, before + pull * vector, mask=inside)
