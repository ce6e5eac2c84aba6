"""Cross entropy of rows on CUDA: one program per row, which reads it twice and writes it once.

The second read goes backwards: if a row is too long for the L2 cache, its end is still cached.
Written values are marked to be evicted first, which leaves the cache to values that are yet to be
read. If the normaliser is known, a program handles a part of one row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels import softmax_rows
from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import LOG2E, cdiv, expm1, in_rows, tanh, tile_width

# Scores that a program handles in one step.
WIDEST_BLOCK = 4096
NO_RANK = tl.constexpr(softmax_rows.NO_RANK)


def forward_(
    scores: Tensor, target: Tensor, target_scores: Tensor | None, row_scale: Tensor | None,
    class_weight: Tensor | None, smoothing: float, z_loss: float, softcap: float,
    temperature: float, statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    n_rows, n = scores.shape
    loss = torch.empty(n_rows, device=scores.device, dtype=torch.float32)
    lse = torch.empty_like(loss)
    kept = n_rows if statistics else 0
    entropy = loss.new_empty(kept)
    argmax, rank = target.new_empty(kept), target.new_empty(kept)
    if n_rows:
        block = tile_width(n, WIDEST_BLOCK, 32)
        _softmax_row[(n_rows,)](
            scores, target, target_scores, row_scale, class_weight,
            None if class_weight is None or not smoothing else class_weight.sum(), loss, lse,
            entropy, argmax, rank, n, scores.stride(0), smoothing, z_loss, softcap,
            1.0 / temperature, BLOCK=block, GRADIENT=row_scale is not None,
            WEIGHTED=class_weight is not None, SMOOTH=smoothing != 0.0, CAPPED=softcap != 0.0,
            STATISTICS=statistics, GIVEN=target_scores is not None, num_warps=max(1, block // 512),
        )  # fmt: skip
    return loss, lse, entropy, argmax, rank


@triton.jit
def _shaped(values, softcap, inverse_temperature, CAPPED: tl.constexpr):
    """Scores after the soft cap and the temperature, and their slope."""
    if CAPPED:
        bent = tanh(values / softcap)
        # -inf stays -inf: the cap would unmask a masked class.
        capped = tl.where(values == -float("inf"), values, bent * (softcap * inverse_temperature))
        return capped, (1.0 - bent * bent) * inverse_temperature
    else:
        return values * inverse_temperature, inverse_temperature


@triton.jit
def _one_row(
    scores, row, right, exact, share, counts, scale, class_weight, weight_sum, loss, lse, entropy,
    argmax, rank, n, smoothing, z_loss, softcap, inverse_temperature,
    BLOCK: tl.constexpr, GRADIENT: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr,
    CAPPED: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """The loss of a row times ``share``, and its gradient times ``scale``; 0 if not ``counts``."""
    if STATISTICS:
        rounded = tl.load(scores + right).to(tl.float32)

    peak = -float("inf")
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    smooth_sums = tl.zeros((BLOCK,), dtype=tl.float32)
    score_sums = tl.zeros((BLOCK,), dtype=tl.float32)
    higher = tl.zeros((BLOCK,), dtype=tl.int32)
    best = -float("inf")
    best_at = 0
    for first in range(0, n, BLOCK):
        column = first + tl.arange(0, BLOCK)
        live = column < n
        values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
        if STATISTICS:
            higher += (values > rounded).to(tl.int32)
            top, at = tl.max(values, 0, return_indices=True)
            best_at = tl.where(top > best, first + at, best_at)
            best = tl.maximum(best, top)
        values = tl.where(column == right, exact, values)
        values, _ = _shaped(values, softcap, inverse_temperature, CAPPED)
        grown = tl.maximum(peak, tl.max(values, 0))
        # While all values are -inf, subtract 0, not -inf, which would give NaN.
        origin = tl.where(grown == -float("inf"), 0.0, grown)
        shrink = tl.exp(peak - origin)
        shares = tl.exp2((values - origin) * LOG2E)
        sums = sums * shrink + shares
        if STATISTICS:
            present = tl.where(shares > 0.0, values, 0.0)
            score_sums = score_sums * shrink + shares * present
        if SMOOTH:
            present = tl.where(live, values, 0.0)
            if WEIGHTED:
                present *= tl.load(class_weight + column, mask=live, other=0.0).to(tl.float32)
            smooth_sums += present
        peak = grown
    total = tl.sum(sums, 0)
    # Kept apart from the maximum: if that is large, their sum would lose it to rounding.
    rest = tl.log(total)
    log_sum = peak + rest
    empty = log_sum == -float("inf")
    origin = tl.where(empty, 0.0, log_sum)
    top = tl.where(peak == -float("inf"), 0.0, peak)
    rest = tl.where(empty, 0.0, rest)

    at_target, slope_at_target = _shaped(exact, softcap, inverse_temperature, CAPPED)
    pull = 1.0 - smoothing
    weights = n * 1.0
    right_weight = 1.0
    if WEIGHTED:
        right_weight = tl.load(class_weight + right).to(tl.float32)
        pull *= right_weight
        if SMOOTH:
            weights = tl.load(weight_sum).to(tl.float32)
    spread = smoothing / n
    row_loss = pull * ((top - at_target) + rest) + z_loss * log_sum * log_sum
    push = pull + 2.0 * z_loss * origin
    if SMOOTH:
        row_loss += spread * (weights * log_sum - tl.sum(smooth_sums, 0))
        push += spread * weights
    # Fully masked rows have infinite loss.
    row_loss = tl.where(empty, float("inf"), row_loss) * share
    tl.store(loss + row, tl.where(counts, row_loss, 0.0))
    if lse is not None:
        tl.store(lse + row, log_sum)
    if STATISTICS:
        known = log_sum - tl.sum(score_sums, 0) / total
        tl.store(entropy + row, tl.where(empty, 0.0, known))
        tl.store(argmax + row, best_at)
        above = tl.sum(higher, 0).to(tl.int64)
        ranked = (log_sum == log_sum) & (at_target > -float("inf"))
        tl.store(rank + row, tl.where(ranked, above, NO_RANK))

    if GRADIENT:
        scale = tl.where(empty, 0.0, scale)
        # p - 1 from the exact score, by expm1 so that nothing cancels.
        gap = (at_target - top) - rest
        true = push * expm1(gap) + (push - pull)
        if SMOOTH:
            true -= spread * right_weight
        true *= scale * slope_at_target
        push *= scale
        spread *= scale
        last = (n - 1) // BLOCK * BLOCK
        for back in range(0, n, BLOCK):
            column = last - back + tl.arange(0, BLOCK)
            live = column < n
            values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
            values, slope = _shaped(values, softcap, inverse_temperature, CAPPED)
            gradient = tl.exp2((values - top) * LOG2E - rest * LOG2E) * push
            if SMOOTH:
                if WEIGHTED:
                    weight = tl.load(class_weight + column, mask=live, other=0.0).to(tl.float32)
                    gradient -= spread * weight
                else:
                    gradient -= spread
            gradient = tl.where(column == right, true, gradient * slope)
            gradient = tl.where(counts, gradient, 0.0).to(scores.dtype.element_ty)
            tl.store(scores + column, gradient, mask=live, eviction_policy="evict_first")


@kernel
def _softmax_row(
    scores, target, target_scores, row_scale, class_weight, weight_sum, loss, lse, entropy, argmax,
    rank, n, stride, smoothing, z_loss, softcap, inverse_temperature,
    BLOCK: tl.constexpr, GRADIENT: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr,
    CAPPED: tl.constexpr, STATISTICS: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    right = tl.load(target + row)
    if GIVEN:
        exact = tl.load(target_scores + row).to(tl.float32)
    else:
        exact = tl.load(scores + right).to(tl.float32)
    scale = 1.0
    if GRADIENT:
        scale = tl.load(row_scale + row).to(tl.float32)
    _one_row(
        scores, row, right, exact, 1.0, True, scale, class_weight, weight_sum, loss, lse, entropy,
        argmax, rank, n, smoothing, z_loss, softcap, inverse_temperature, BLOCK, GRADIENT,
        WEIGHTED, SMOOTH, CAPPED, STATISTICS,
    )  # fmt: skip


def reduced_(
    scores: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    ignore_index: int | None, mean: bool, gradient: bool, smoothing: float, z_loss: float,
    softcap: float, temperature: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (n_rows, n), hidden, weight = scores.shape, in_rows(hidden), in_rows(weight)
    masked, depth = ignore_index is not None, hidden.shape[1]
    loss = torch.empty(n_rows, device=scores.device, dtype=torch.float32)
    states = torch.empty(n_rows, depth, device=hidden.device, dtype=hidden.dtype)
    if n_rows:
        block = tile_width(n, WIDEST_BLOCK, 32)
        _reduced_row[(n_rows,)](
            scores, hidden, weight, bias, target, states, loss, n_rows, n, depth, scores.stride(0),
            hidden.stride(0), weight.stride(0), ignore_index, smoothing, z_loss, softcap,
            1.0 / temperature, BLOCK=block, DEPTH=tile_width(depth, 1024, 32), MEAN=mean,
            GRADIENT=gradient, MASKED=masked, BIASED=bias is not None,
            ROUNDED=scores.dtype != torch.float32, SMOOTH=smoothing != 0.0, CAPPED=softcap != 0.0,
            num_warps=max(1, block // 512),
        )  # fmt: skip
    return loss, states


@kernel(do_not_specialize=["n_rows"])
def _reduced_row(
    scores, hidden, weight, bias, target, states, loss, n_rows, n, depth, stride, hidden_row,
    weight_row, ignored, smoothing, z_loss, softcap, inverse_temperature,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, MEAN: tl.constexpr, GRADIENT: tl.constexpr,
    MASKED: tl.constexpr, BIASED: tl.constexpr, ROUNDED: tl.constexpr, SMOOTH: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    right = tl.load(target + row)
    counts, share = tl.full((), 1, tl.int1), 1.0
    if MASKED:
        counts = right != ignored
        right = tl.where(counts, right, 0)
    if MEAN:
        size = n_rows * 1.0
        if MASKED:
            total = tl.zeros((DEPTH,), dtype=tl.float32)
            for first in range(0, n_rows, DEPTH):
                some = first + tl.arange(0, DEPTH)
                other = tl.load(target + some, mask=some < n_rows, other=ignored)
                total += tl.where(other == ignored, 0.0, 1.0)
            size = tl.maximum(tl.sum(total, 0), 1.0)
        share = 1.0 / size
    products = tl.zeros((DEPTH,), dtype=tl.float32)
    for first in range(0, depth, DEPTH):
        step = first + tl.arange(0, DEPTH)
        inside = step < depth
        # Hidden states of ignored rows may be NaN, so they are not read.
        read = tl.where(counts, inside, False)
        state = tl.load(hidden + row * hidden_row + step, mask=read, other=0.0)
        tl.store(states + row * depth + step, state, mask=inside)
        if ROUNDED:
            vector = tl.load(weight + right * weight_row + step, mask=inside, other=0.0)
            products += state.to(tl.float32) * vector.to(tl.float32)
    if ROUNDED:
        exact = tl.sum(products, 0)
        if BIASED:
            exact += tl.load(bias + right).to(tl.float32)
    else:
        exact = tl.load(scores + right).to(tl.float32)
    _one_row(
        scores, row, right, exact, share, counts, share, None, None, loss, None, None, None, None,
        n, smoothing, z_loss, softcap, inverse_temperature, BLOCK, GRADIENT, False, SMOOTH, CAPPED,
        False,
    )  # fmt: skip


def gradient_(
    scores: Tensor, target: Tensor, true: Tensor, lse: Tensor, push: Tensor, softcap: float,
    temperature: float,
) -> None:  # fmt: skip
    n_rows, n = scores.shape
    if scores.numel():
        block = tile_width(n, WIDEST_BLOCK, 32)
        _gradient[(n_rows, cdiv(n, block))](
            scores, target, true, lse, push, n, scores.stride(0), softcap, 1.0 / temperature,
            WIDTH=block, CAPPED=softcap != 0.0, num_warps=max(1, block // 512),
        )  # fmt: skip


@kernel
def _gradient(
    scores, target, true, lse, push, n, stride, softcap, inverse_temperature,
    WIDTH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = column < n
    place = scores + row * stride + column
    values = tl.load(place, mask=live, other=0.0).to(tl.float32)
    slope = inverse_temperature
    if CAPPED:
        bent = tanh(values / softcap)
        # -inf stays -inf: the cap would unmask a masked class.
        values = tl.where(values == -float("inf"), values, bent * softcap)
        slope = (1.0 - bent * bent) * inverse_temperature
    power = (values * inverse_temperature - tl.load(lse + row)) * LOG2E
    gradient = tl.exp2(power) * (tl.load(push + row) * slope)
    gradient = tl.where(column == tl.load(target + row), tl.load(true + row), gradient)
    tl.store(place, gradient.to(scores.dtype.element_ty), mask=live)
