"""Binary cross entropy and the asymmetric loss on CUDA.

Forward and backward read each score once. A program sums a part of some rows in forward, and
processes one tile in backward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import (
    LOG2E,
    LOG_2,
    NONE,
    SCORES_A_PROGRAM,
    SMOOTHED,
    SOFT,
    approximate_log2,
    cdiv,
    in_rows,
    labels_of,
    load_labelled,
    mask_of,
    next_power_of_2,
    reciprocal,
    row_parts,
    tile_width,
)

# Integer powers up to this are products.
LARGEST_WHOLE = 7
# Scores per tile if labels may be fractional, which takes the loss of both sides: larger tiles need
# so many registers that few programs run at a time.
_SCORES_WITH_BOTH_SIDES = 1024


def forward(
    scores: Tensor, target: Tensor, mask: Tensor | None, gamma_negative: float,
    gamma_positive: float, margin: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    numbers, labels = (gamma_negative, gamma_positive, margin), labels_of(target)
    return _sums(in_rows(scores), labels, mask, numbers, True, None)


def slab_(
    scores: Tensor, gamma_negative: float, gamma_positive: float, margin: float,
    focus_gradient: bool, smoothing: float, row_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    """As the reference, but rows of scores must be contiguous."""
    numbers, kind = (gamma_negative, gamma_positive, margin), SMOOTHED if smoothing else NONE
    labels = kind.value, None
    return _sums(scores, labels, None, numbers, focus_gradient, row_scale, smoothing)[0]


def _sums(
    scores: Tensor, labels: tuple[int, Tensor | None], mask: Tensor | None,
    numbers: tuple[float, float, float], focus_gradient: bool, row_scale: Tensor | None,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Losses of rows, and which have a kept class; with a scale, scores become the gradient."""
    n_rows, n = scores.shape
    losses = torch.empty(n_rows, device=scores.device, dtype=torch.float32)
    masked = mask is not None
    counts = torch.empty(n_rows if masked else 0, device=scores.device, dtype=torch.bool)
    if not n_rows:
        return losses, counts
    numbers, constants = _options(scores, labels, mask, numbers)
    tiles = cdiv(n_rows, constants["ROWS"])
    span, parts = row_parts(tiles, n, constants["BLOCK"])
    sums, seen = losses, counts.view(torch.uint8)
    if parts > 1:
        sums = torch.empty((parts, n_rows), device=scores.device, dtype=torch.float32)
        seen = torch.empty_like(sums, dtype=torch.uint8) if masked else sums
    _sum_rows[(tiles, parts)](
        scores, labels[1], *mask_of(mask), row_scale, sums, seen, n_rows, n, span,
        scores.stride(0), 0 if labels[1] is None else labels[1].stride(0), smoothing, *numbers,
        GRADIENT=row_scale is not None, FOCUS=focus_gradient, **constants,
    )  # fmt: skip
    if parts > 1:
        _merge_parts[(n_rows,)](
            sums, seen, losses, counts.view(torch.uint8), n_rows, parts,
            PARTS=next_power_of_2(parts), MASKED=masked, num_warps=1,
        )  # fmt: skip
    return losses, counts


def backward(
    scores: Tensor, target: Tensor, mask: Tensor | None, gamma_negative: float,
    gamma_positive: float, margin: float, focus_gradient: bool, grad: Tensor,
) -> Tensor:  # fmt: skip
    scores, labels = in_rows(scores), labels_of(target)
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    n_rows, n = scores.shape
    if out.numel():
        grad = grad.reshape(-1) if grad.dim() > 1 else grad
        numbers = gamma_negative, gamma_positive, margin
        numbers, constants = _options(scores, labels, mask, numbers)
        grid = cdiv(n_rows, constants["ROWS"]), cdiv(n, constants["BLOCK"])
        _fill_gradient[grid](
            scores, labels[1], *mask_of(mask), grad, out, n_rows, n, scores.stride(0),
            labels[1].stride(0), grad.stride(0) if grad.numel() > 1 else 0, *numbers,
            FOCUS=focus_gradient, **constants,
        )  # fmt: skip
    return out


def _options(scores, labels, mask, numbers):
    """Powers and the margin as numeric arguments, and the constants of the kernels."""
    *gammas, margin = numbers
    whole = max(gammas) <= LARGEST_WHOLE and all(each == int(each) for each in gammas)
    negative, positive = (int(each) for each in gammas) if whole else (-1, -1)
    is_soft = labels[0] in (SOFT.value, SMOOTHED.value)
    both = is_soft and any(numbers)
    most = _SCORES_WITH_BOTH_SIDES if both else SCORES_A_PROGRAM
    width = tile_width(scores.shape[1], most)
    return numbers, dict(
        ROWS=most // width, BLOCK=width, MASKED=mask is not None, KIND=labels[0],
        PLAIN=not any(numbers), NEGATIVE=negative, POSITIVE=positive, MARGIN=margin != 0.0,
        NARROW=scores.element_size() < 4, num_warps=4,
    )  # fmt: skip


@triton.jit
def _log(x, NARROW: tl.constexpr):
    """The logarithm; for half-precision scores with an error of 2^-22, in two instructions."""
    if NARROW:
        return approximate_log2(x) * LOG_2
    else:
        return tl.log(x)


@triton.jit
def _log_one_plus(x, logarithm):
    """``log(1 + x)`` from the logarithm of the rounded sum ``1 + x``."""
    series = x * (1.0 - x * (0.5 - x * (0.33333334 - x * 0.25)))
    return tl.where(x < 0.03, series, logarithm)


@triton.jit
def _chances(z):
    """``exp(-abs(z))``, and the probabilities of right and wrong, each in full precision."""
    power = tl.exp2(-tl.abs(z) * LOG2E)
    large = reciprocal(1.0 + power)
    small = power * large
    return power, tl.where(z < 0.0, large, small), tl.where(z < 0.0, small, large)


@triton.jit
def _cross_entropies(value, label, KIND: tl.constexpr, NARROW: tl.constexpr):
    """The cross entropy of each class, and its slope."""
    if (KIND == SOFT) or (KIND == SMOOTHED):
        power, right, wrong = _chances(value)
        # A term of weight 0 is dropped, even if it is infinite.
        above = (1.0 - label) * tl.where(label < 1.0, value, 0.0)
        below = label * tl.where(label > 0.0, -value, 0.0)
        linear = tl.where(value > 0.0, above, below)
        slope = (1.0 - label) * wrong - label * right
    else:
        z = tl.where(label, -value, value)
        power, right, wrong = _chances(z)
        linear = tl.maximum(z, 0.0)
        slope = tl.where(label, -wrong, wrong)
    return linear + _log_one_plus(power, _log(1.0 + power, NARROW)), slope


@triton.jit
def _terms(value, positive, margin, MARGIN: tl.constexpr, NARROW: tl.constexpr):
    """Probabilities of right and wrong, ``wrong - margin``, 1 less that, and the cost."""
    z = tl.where(positive, -value, value)
    power, right, wrong = _chances(z)
    if MARGIN:
        shift = tl.where(positive, 0.0, margin)
        inside = wrong - shift
        rest = right + shift
        rest = tl.where(rest > 1.0, 1.0, rest)  # keeps NaN
        logarithm = _log(tl.where(positive, 1.0 + power, rest), NARROW)
        plain = tl.maximum(z, 0.0) + _log_one_plus(power, logarithm)
        # The series of -log(1 - x) near 0, where 1 - x would be rounded.
        series = inside * (1.0 + inside * (0.5 + inside * (0.33333334 + inside * 0.25)))
        cost = tl.where(positive, plain, tl.where(inside < 0.03, series, -logarithm))
    else:
        inside, rest = wrong, right
        cost = tl.maximum(z, 0.0) + _log_one_plus(power, _log(1.0 + power, NARROW))
    return right, wrong, inside, rest, cost


@triton.jit
def _times_power(number, x, WHOLE: tl.constexpr):
    if WHOLE & 1:
        number = number * x
    if WHOLE & 2:
        number = number * (x * x)
    if WHOLE & 4:
        square = x * x
        number = number * (square * square)
    return number


@triton.jit
def _focused(
    number, x, positive, gamma_negative, gamma_positive, NEGATIVE: tl.constexpr,
    POSITIVE: tl.constexpr,
):  # fmt: skip
    """``number`` times ``x`` to the power of positives or negatives."""
    if NEGATIVE < 0:
        gamma = tl.where(positive, gamma_positive, gamma_negative)
        made = number * tl.exp2(gamma * tl.log2(x))
    else:
        of_positives = _times_power(number, x, POSITIVE)
        made = tl.where(positive, of_positives, _times_power(number, x, NEGATIVE))
    return made


@triton.jit
def _side(
    value, weight, positive, gamma_negative, gamma_positive, margin, NEGATIVE: tl.constexpr,
    POSITIVE: tl.constexpr, MARGIN: tl.constexpr, NARROW: tl.constexpr, FOCUS: tl.constexpr,
):  # fmt: skip
    """The loss of one term of each label, and its slope; the compiler removes an unused one."""
    right, wrong, inside, rest, cost = _terms(value, positive, margin, MARGIN, NARROW)
    slope = wrong
    if MARGIN:
        slope = tl.where(positive, wrong, wrong * right * reciprocal(rest))
    if FOCUS:
        # If the cost is infinite, right is 0, and the product is dropped.
        more = tl.where(right > 0.0, right * cost, 0.0)
        if MARGIN:
            more = tl.where(positive, more, more * (wrong * reciprocal(inside)))
        slope += tl.where(positive, gamma_positive, gamma_negative) * more
    loss = _focused(cost, inside, positive, gamma_negative, gamma_positive, NEGATIVE, POSITIVE)
    slope = _focused(slope, inside, positive, gamma_negative, gamma_positive, NEGATIVE, POSITIVE)
    out = (inside <= 0.0) | (weight == 0.0)
    slope = tl.where(out, 0.0, weight * slope)
    return tl.where(out, 0.0, weight * loss), tl.where(positive, -slope, slope)


@triton.jit
def _losses_and_slopes(
    value, label, keep, gamma_negative, gamma_positive, margin, KIND: tl.constexpr,
    PLAIN: tl.constexpr, NEGATIVE: tl.constexpr, POSITIVE: tl.constexpr, MARGIN: tl.constexpr,
    NARROW: tl.constexpr, FOCUS: tl.constexpr,
):  # fmt: skip
    if PLAIN:
        loss, slope = _cross_entropies(value, label, KIND, NARROW)
    elif (KIND == SOFT) or (KIND == SMOOTHED):
        # The larger term of each label, and the other one if a label of the tile has two terms.
        positive = label > 0.5
        weight = tl.where(positive, label, 1.0 - label)
        loss, slope = _side(
            value, weight, positive, gamma_negative, gamma_positive, margin,
            NEGATIVE, POSITIVE, MARGIN, NARROW, FOCUS,
        )  # fmt: skip
        if tl.max(tl.max((keep & (weight < 1.0)).to(tl.int32), 1), 0) > 0:
            more_loss, more_slope = _side(
                value, 1.0 - weight, ~positive, gamma_negative, gamma_positive, margin,
                NEGATIVE, POSITIVE, MARGIN, NARROW, FOCUS,
            )  # fmt: skip
            loss += more_loss
            slope += more_slope
    else:
        loss, slope = _side(
            value, 1.0, label, gamma_negative, gamma_positive, margin,
            NEGATIVE, POSITIVE, MARGIN, NARROW, FOCUS,
        )  # fmt: skip
    return loss, slope


@kernel
def _sum_rows(
    scores, labels, mask, mask_row, mask_column, row_scale, sums, seen, n_rows, n, span, stride,
    label_stride, smoothing, gamma_negative, gamma_positive, margin,
    GRADIENT: tl.constexpr, FOCUS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, KIND: tl.constexpr, PLAIN: tl.constexpr, NEGATIVE: tl.constexpr,
    POSITIVE: tl.constexpr, MARGIN: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    flat_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = flat_row[:, None]
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    counted = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    if GRADIENT:
        factor = tl.load(row_scale + row, mask=row < n_rows, other=0.0).to(tl.float32)
    stop = tl.minimum((part + 1) * span, n)
    for first in range(part * span, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        inside = (row < n_rows) & (column < stop)
        value, label, keep, _ = load_labelled(
            scores, labels, mask, row, column, inside, stride, label_stride, mask_row, mask_column,
            smoothing, KIND, MASKED,
        )  # fmt: skip
        loss, slope = _losses_and_slopes(
            value, label, keep, gamma_negative, gamma_positive, margin,
            KIND, PLAIN, NEGATIVE, POSITIVE, MARGIN, NARROW, FOCUS,
        )  # fmt: skip
        total += tl.where(keep, loss, 0.0)
        if MASKED:
            counted = counted | keep.to(tl.int32)
        if GRADIENT:
            slope = tl.where(keep & (factor != 0.0), slope * factor, 0.0)
            place = scores + row * stride + column
            tl.store(place, slope.to(scores.dtype.element_ty), mask=inside)
    place = part.to(tl.int64) * n_rows + flat_row
    tl.store(sums + place, tl.sum(total, 1), mask=flat_row < n_rows)
    if MASKED:
        tl.store(seen + place, tl.max(counted, 1).to(tl.uint8), mask=flat_row < n_rows)


@kernel
def _merge_parts(
    sums, seen, losses, counts, n_rows, parts, PARTS: tl.constexpr, MASKED: tl.constexpr
):
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    place = part.to(tl.int64) * n_rows + row
    tl.store(losses + row, tl.sum(tl.load(sums + place, mask=part < parts, other=0.0), 0))
    if MASKED:
        found = tl.load(seen + place, mask=part < parts, other=0)
        tl.store(counts + row, tl.max(found.to(tl.int32), 0).to(tl.uint8))


@kernel
def _fill_gradient(
    scores, labels, mask, mask_row, mask_column, grad, out, n_rows, n, stride, label_stride, step,
    gamma_negative, gamma_positive, margin,
    FOCUS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    KIND: tl.constexpr, PLAIN: tl.constexpr, NEGATIVE: tl.constexpr, POSITIVE: tl.constexpr,
    MARGIN: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows) & (column < n)
    factor = tl.load(grad + row * step, mask=row < n_rows, other=0.0).to(tl.float32)
    value, label, keep, _ = load_labelled(
        scores, labels, mask, row, column, inside, stride, label_stride, mask_row, mask_column,
        0.0, KIND, MASKED,
    )  # fmt: skip
    _, slope = _losses_and_slopes(
        value, label, keep, gamma_negative, gamma_positive, margin,
        KIND, PLAIN, NEGATIVE, POSITIVE, MARGIN, NARROW, FOCUS,
    )  # fmt: skip
    slope = tl.where(keep & (factor != 0.0), slope * factor, 0.0)
    tl.store(out + row * n + column, slope.to(out.dtype.element_ty), mask=inside)
