"""The loss of entmax on CUDA, with one pass over the scores.

In forward a program solves a row as entmax does, from the few blocks that can have probability, and
stores a list of these blocks and a few numbers. Backward reads only the scores of listed blocks.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import (
    block_width,
    cdiv,
    choose_blocks,
    chosen_columns,
    find_peaks,
    mean_of_losses,
    next_power_of_2,
    peaks_of_row,
    tile_width,
)
from lastlayer.kernels.entmax.threshold import (
    BOTH,
    ENTROPIES,
    WIDEST_IN_ONE_PROGRAM,
    bound_from_part,
    correction,
    entropy_and_slope,
    exp_remainder,
    group_and_warps,
    is_broken,
    kind_of,
    polished,
    row_sum,
    shares,
    solve_chosen,
    solve_tile,
)
from lastlayer.kernels.score_loss import NUMBERS, left

WIDEST_BLOCK, FEWEST_PROGRAMS = 4096, 2048
# Up to this many losses one program computes their mean in microseconds.
MOST_LOSSES = 1 << 18
# Positions in ``stats``, in units of rows: of the losses that a mean is taken of, and of the factor
# of its gradient.
_LOSS, _MEAN = NUMBERS - 1, tl.constexpr(NUMBERS)


def forward(
    scores: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int | None,
    alpha: float, row_alpha: Tensor | None, labels: bool, mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n_rows, n = scores.shape
    width = block_width(n)
    n_blocks = cdiv(n, width)
    loss = torch.empty(() if mean else n_rows, device=scores.device, dtype=torch.float32)
    stats, chosen = left(scores)
    target = target.view(torch.uint8) if target.dtype == torch.bool else target
    if n_rows:
        in_one = n <= WIDEST_IN_ONE_PROGRAM
        learned = row_alpha is not None
        _forward[(n_rows,)](
            scores, chosen if in_one else find_peaks(scores, None), chosen, target, class_weight,
            row_alpha, loss, stats, n_rows, n, scores.stride(0), math.log(n), n_blocks,
            chosen.shape[1], 0 if row_alpha is None else row_alpha.stride(0), alpha - 1.0,
            -1 if ignore_index is None else ignore_index,
            BLOCKS=next_power_of_2(n_blocks), WIDTH=width, **group_and_warps(n, width),
            BLOCK=tile_width(n, WIDEST_BLOCK, 32), KIND=0 if learned else kind_of(alpha),
            ENTROPY=4 if learned else ENTROPIES.get(alpha, 0), DENSE=target.dim() == 2,
            LABELS=labels, IN_ONE=in_one, WEIGHTED=class_weight is not None,
            IGNORES=ignore_index is not None, MEAN=mean,
            enable_fp_fusion=False,  # ../entmax/threshold.py says why
        )  # fmt: skip
    if mean and n_rows <= MOST_LOSSES:
        mean_of_losses(stats, _LOSS * n_rows, stats, loss, stats, NUMBERS * n_rows, n_rows)
    elif mean:
        weights, losses = stats[:n_rows], stats[_LOSS * n_rows : -1]
        size = weights.sum()
        stats[-1] = torch.where(size == 0, 0.0, size.reciprocal())
        loss = torch.where(weights == 0, 0.0, losses * weights).sum() * stats[-1]
    return loss, stats, chosen


@triton.jit
def _solve(
    scores, peaks, chosen, n, n_blocks, log_n, excess,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    IN_ONE: tl.constexpr,
):  # fmt: skip
    """Maximum, threshold, correction, norm, and number of chosen blocks of one row."""
    block = tl.arange(0, BLOCKS)
    if IN_ONE:
        peak_of = peaks_of_row(scores, scores, n, BLOCKS, WIDTH, False)
    else:
        peak_of = tl.load(peaks + block, mask=block < n_blocks, other=-float("inf"))
    peak = tl.max(peak_of, 0)
    broken = is_broken(peak, excess, KIND)
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    # Blocks whose peak is below the bound of the threshold have no probability.
    distance = peak_of - origin
    at = bound_from_part(distance, origin, log_n, excess, KIND)
    reachable, _ = shares(distance, at, excess, KIND)
    keep = tl.where(broken, 1.0, reachable) > 0.0
    count = choose_blocks(chosen, keep & (block < n_blocks), BLOCKS)
    if count <= GROUP:
        column, live = chosen_columns(chosen, 0, count, n, GROUP, WIDTH)
        values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
        at, total, weight = solve_tile(values - origin, at, log_n, excess, KIND, BOTH)
    else:
        at, total, weight = solve_chosen(
            scores, chosen, count, n, origin, at, log_n, excess, WIDTH, GROUP, KIND, not IN_ONE, 1.0
        )  # fmt: skip
    missing = correction(total, weight, broken)
    norm = tl.where(peak == -float("inf"), 0.0, 1.0)
    if KIND == 0:
        if excess > 1.0:
            norm = 0.0
            for first in range(0, count, GROUP):
                column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
                values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
                probs, slope = shares(values - origin, at, excess, KIND)
                norm += row_sum(polished(probs, slope, missing), BOTH)
    return origin, at, missing, norm, count


@triton.jit
def _probabilities(distance, at, missing, norm, excess, KIND: tl.constexpr):
    probs, slope = shares(distance, at, excess, KIND)
    probs = polished(probs, slope, missing)
    if KIND == 0:
        probs = probs / tl.where(norm == 0.0, 1.0, norm)
    return probs


@triton.jit
def _entropies(probs, excess, KIND: tl.constexpr):
    """The entropy of each class, and its derivative by alpha if KIND is 4 (any alpha)."""
    if KIND < 4:
        entropy, _ = entropy_and_slope(probs, excess + 1.0, KIND)
        return entropy, entropy
    else:
        # H = -p log(p) f(x) / alpha with f(x) = (exp(x) - 1) / x at x = (alpha - 1) log(p).
        logs = tl.log(tl.where(probs > 0.0, probs, 1.0))
        x = excess * logs
        remainder = exp_remainder(x)
        ratio = 1.0 + x * remainder
        share = 1.0 / (excess + 1.0)
        entropy = -probs * logs * ratio * share
        return entropy, -(entropy + probs * logs * logs * (ratio - remainder)) * share


@kernel
def _forward(
    scores, peaks, chosen, target, class_weight, alphas, losses, stats, n_rows, n, stride, log_n,
    n_blocks, most_blocks, alpha_stride, excess, ignored,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, ENTROPY: tl.constexpr, DENSE: tl.constexpr, LABELS: tl.constexpr,
    IN_ONE: tl.constexpr, WEIGHTED: tl.constexpr, IGNORES: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    chosen += row * most_blocks
    if ENTROPY == 4:
        excess = tl.load(alphas + row * alpha_stride).to(tl.float32) - 1.0
    origin, at, missing, norm, count = _solve(
        scores, peaks + row * n_blocks, chosen, n, n_blocks, log_n, excess,
        BLOCKS, WIDTH, GROUP, KIND, IN_ONE,
    )  # fmt: skip
    weight = 1.0
    share = 1.0
    if DENSE:
        target += row * n
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
        if LABELS:
            for first in range(0, n, BLOCK):
                column = first + tl.arange(0, BLOCK)
                sums += tl.load(target + column, mask=column < n, other=0).to(tl.float32)
            total = tl.sum(sums, 0)
            # A row without positives has weight 0.
            weight = tl.where(total == 0.0, 0.0, 1.0)
            share = 1.0 / tl.where(total == 0.0, 1.0, total)
            sums = tl.zeros((BLOCK,), dtype=tl.float32)
        moves = tl.zeros((BLOCK,), dtype=tl.float32)
        means = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, n, BLOCK):
            column = first + tl.arange(0, BLOCK)
            live = column < n
            distance = tl.load(scores + column, mask=live, other=-float("inf"))
            distance = distance.to(tl.float32) - origin
            wanted = tl.load(target + column, mask=live, other=0).to(tl.float32) * share
            probs = _probabilities(distance, at, missing, norm, excess, KIND)
            ours, move = _entropies(probs, excess, ENTROPY)
            theirs, their_move = _entropies(wanted, excess, ENTROPY)
            apart = probs - wanted
            sums += tl.where(apart == 0.0, 0.0, apart * distance) + ours - theirs
            moves += move - their_move
            if WEIGHTED:
                each = tl.load(class_weight + column, mask=live, other=0.0).to(tl.float32)
                means += wanted * each
        loss = tl.sum(sums, 0)
        by_alpha = tl.sum(moves, 0)
        if WEIGHTED:
            weight = tl.sum(means, 0)
    else:
        right = tl.load(target + row)
        known = (right >= 0) & (right < n)
        at_target = tl.load(scores + right, mask=known, other=float("nan")).to(tl.float32)
        lead_of_peak = origin - at_target
        sums = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
        moves = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
        for first in range(0, count, GROUP):
            column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
            values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
            probs = _probabilities(values - origin, at, missing, norm, excess, KIND)
            lead = tl.where(probs == 0.0, 0.0, (values - origin) + lead_of_peak)
            entropy, move = _entropies(probs, excess, ENTROPY)
            sums += probs * lead + entropy
            moves += move
        loss = row_sum(sums, BOTH)
        by_alpha = row_sum(moves, BOTH)
        # The loss of a masked target is infinite; NaN stays NaN.
        loss = tl.where((at_target == -float("inf")) & (loss == loss), float("inf"), loss)
        if WEIGHTED:
            weight = tl.load(class_weight + right, mask=known, other=float("nan")).to(tl.float32)
        if IGNORES:
            weight = tl.where(right == ignored, 0.0, weight)
    stats += row
    tl.store(stats, weight)
    tl.store(stats + n_rows, by_alpha)
    tl.store(stats + 2 * n_rows, origin)
    tl.store(stats + 3 * n_rows, at)
    tl.store(stats + 4 * n_rows, missing)
    tl.store(stats + 5 * n_rows, norm)
    tl.store(stats + 6 * n_rows, share)
    tl.store(stats + 7 * n_rows, count.to(tl.float32))
    # The loss of a row with weight 0 may be NaN.
    if MEAN:
        tl.store(stats + 8 * n_rows, tl.where(weight == 0.0, 0.0, loss))
    else:
        tl.store(losses + row, tl.where(weight == 0.0, 0.0, loss * weight))
        if row == 0:
            tl.store(stats + _MEAN * n_rows, 1.0)


def backward(
    scores: Tensor, target: Tensor, stats: Tensor, chosen: Tensor, factor: Tensor, alpha: float,
    row_alpha: Tensor | None, labels: bool,
) -> Tensor:  # fmt: skip
    del labels  # their factor is in stats
    n_rows, n = scores.shape
    gradient = torch.empty(n_rows, n, device=scores.device, dtype=scores.dtype)
    target = target.view(torch.uint8) if target.dtype == torch.bool else target
    # The upstream gradient of a sum is an expanded scalar.
    factor = factor.contiguous()
    if n_rows:
        width, block = block_width(n), tile_width(n, WIDEST_BLOCK, 32)
        n_blocks = cdiv(n, width)
        # If there are few rows, several programs share each row.
        parts = min(cdiv(n, block), cdiv(FEWEST_PROGRAMS, n_rows))
        learned = row_alpha is not None
        _backward[(n_rows * parts,)](
            scores, target, stats, chosen, factor, row_alpha, gradient, n_rows, n,
            scores.stride(0), chosen.shape[1], parts, cdiv(n_blocks, parts),
            row_alpha.stride(0) if row_alpha is not None else 0, alpha - 1.0,
            BLOCKS=next_power_of_2(n_blocks), WIDTH=width, **group_and_warps(n, width),
            BLOCK=block, KIND=0 if learned else kind_of(alpha), DENSE=target.dim() == 2,
            PER_ROW=factor.dim() == 1, LEARNED=learned, enable_fp_fusion=False,
        )  # fmt: skip
    return gradient


@kernel
def _backward(
    scores, target, stats, chosen, factor, alphas, gradient, n_rows, n, stride, most_blocks, parts,
    blocks_of_part, alpha_stride, excess,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, DENSE: tl.constexpr, PER_ROW: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // parts).to(tl.int64)
    first_block = (tl.program_id(0) % parts) * blocks_of_part
    scores += row * stride
    gradient += row * n
    chosen += row * most_blocks
    if LEARNED:
        excess = tl.load(alphas + row * alpha_stride).to(tl.float32) - 1.0
    scale = tl.load(factor + row).to(tl.float32) if PER_ROW else tl.load(factor).to(tl.float32)
    scale *= tl.load(stats + _MEAN * n_rows)
    stats += row
    scale *= tl.load(stats)
    origin = tl.load(stats + 2 * n_rows)
    at = tl.load(stats + 3 * n_rows)
    missing = tl.load(stats + 4 * n_rows)
    norm = tl.load(stats + 5 * n_rows)
    count = tl.load(stats + 7 * n_rows).to(tl.int32)
    # A row with factor 0 may contain NaN. A fully masked row has norm 0 and gradient 0.
    still = (scale == 0.0) | (norm == 0.0)
    share = 0.0
    if DENSE:
        target += row * n
        share = tl.load(stats + 6 * n_rows)

    start = 0
    stop = count
    if parts > 1:
        slot = tl.arange(0, BLOCKS)
        listed = tl.load(chosen + slot, mask=slot < count, other=BLOCKS).to(tl.int32)
        start = tl.sum((listed < first_block).to(tl.int32), 0)
        stop = tl.sum((listed < first_block + blocks_of_part).to(tl.int32), 0)
    low = first_block * WIDTH
    high = tl.minimum(low + blocks_of_part * WIDTH, n)
    if (stop - start < blocks_of_part) | still:
        for first in range(low, high, BLOCK):
            column = first + tl.arange(0, BLOCK)
            live = column < high
            slope = tl.zeros((BLOCK,), dtype=tl.float32)
            if DENSE:
                wanted = tl.load(target + column, mask=live, other=0).to(tl.float32)
                slope = tl.where(still, 0.0, -wanted * share * scale)
            tl.store(gradient + column, slope.to(gradient.dtype.element_ty), mask=live)
        # Other threads of this program write to the same places next.
        tl.debug_barrier()
    if still:
        stop = start
    for first in range(start, stop, GROUP):
        column, live = chosen_columns(chosen, first, stop, n, GROUP, WIDTH)
        values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
        slope = _probabilities(values - origin, at, missing, norm, excess, KIND)
        if DENSE:
            slope -= tl.load(target + column, mask=live, other=0).to(tl.float32) * share
        tl.store(gradient + column, (slope * scale).to(gradient.dtype.element_ty), mask=live)
    if not DENSE:
        # The target may be in no listed block.
        right = tl.load(target + row)
        here = (right >= low) & (right < high) & (still == 0)
        own = tl.load(scores + right, mask=here, other=0.0).to(tl.float32)
        slope = (_probabilities(own - origin, at, missing, norm, excess, KIND) - 1.0) * scale
        tl.debug_barrier()
        tl.store(gradient + right, slope.to(gradient.dtype.element_ty), mask=here)
