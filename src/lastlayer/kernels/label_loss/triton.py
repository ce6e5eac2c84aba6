"""Binary cross entropy and the asymmetric loss on CUDA: a score is read once each way.

Forward a program sums a part of some rows; backward it reads and writes one tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import INTERPRETED, LOG2E, cdiv, in_rows, next_power_of_2, tile_width

# Scores that a program looks at together.
SCORES_A_PROGRAM = 2048
# Rows are cut into parts where there are fewer programs than this.
ENOUGH_PROGRAMS = 1024
# Powers up to here are products.
LARGEST_WHOLE = 7


def forward(
    scores: Tensor, target: Tensor, mask: Tensor | None, gamma_negative: float,
    gamma_positive: float, margin: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    numbers = gamma_negative, gamma_positive, margin
    return _sums(in_rows(scores), _labels_of(target), mask, *numbers, True, None)


def slab_(
    scores: Tensor, gamma_negative: float, gamma_positive: float, margin: float,
    focus_gradient: bool, row_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    """As the reference's; the numbers of a row of scores lie together."""
    numbers = gamma_negative, gamma_positive, margin
    return _sums(scores, None, None, *numbers, focus_gradient, row_scale)[0]


def _sums(
    scores: Tensor, labels: Tensor | None, mask: Tensor | None, gamma_negative: float,
    gamma_positive: float, margin: float, focus_gradient: bool, row_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Losses of rows, and which count; scores become the gradient where there is a scale."""
    n_rows, n = scores.shape
    losses = torch.empty(n_rows, device=scores.device, dtype=torch.float32)
    masked = mask is not None
    counts = torch.empty(n_rows if masked else 0, device=scores.device, dtype=torch.bool)
    if not n_rows:
        return losses, counts
    width = tile_width(n, SCORES_A_PROGRAM)
    height = SCORES_A_PROGRAM // width
    tiles, blocks = cdiv(n_rows, height), cdiv(n, width)
    parts = max(1, min(cdiv(ENOUGH_PROGRAMS, tiles), blocks // 4, 1024))
    span = cdiv(blocks, parts) * width
    parts = max(1, cdiv(n, span)) if span else 1
    sums, seen = losses, counts.view(torch.uint8)
    if parts > 1:
        sums = torch.empty((parts, n_rows), device=scores.device, dtype=torch.float32)
        seen = torch.empty_like(sums, dtype=torch.uint8) if masked else sums
    mask_view, mask_row, mask_column = _mask_of(mask)
    numbers, constants = _numbers(scores, labels, gamma_negative, gamma_positive, margin)
    _sum_rows[(tiles, parts)](
        scores, labels, mask_view, row_scale, sums, seen, n_rows, n, span, scores.stride(0),
        0 if labels is None else labels.stride(0), mask_row, mask_column, *numbers,
        ROWS=height, BLOCK=width, MASKED=masked, GRADIENT=row_scale is not None,
        FOCUS=focus_gradient, **constants, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    if parts > 1:
        _merge_parts[(n_rows,)](
            sums, seen, losses, counts.view(torch.uint8), n_rows, parts,
            PARTS=next_power_of_2(parts), MASKED=masked, num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip
    return losses, counts


def backward(
    scores: Tensor, target: Tensor, mask: Tensor | None, gamma_negative: float,
    gamma_positive: float, margin: float, focus_gradient: bool, grad: Tensor,
) -> Tensor:  # fmt: skip
    scores, labels = in_rows(scores), _labels_of(target)
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    n_rows, n = scores.shape
    if not out.numel():
        return out
    width = tile_width(n, SCORES_A_PROGRAM)
    height = SCORES_A_PROGRAM // width
    if grad.dim() > 1:
        grad = grad.reshape(-1)
    step = grad.stride(0) if grad.numel() > 1 else 0
    mask_view, mask_row, mask_column = _mask_of(mask)
    numbers, constants = _numbers(scores, labels, gamma_negative, gamma_positive, margin)
    _fill_gradient[(cdiv(n_rows, height), cdiv(n, width))](
        scores, labels, mask_view, grad, out, n_rows, n, scores.stride(0), labels.stride(0),
        mask_row, mask_column, step, *numbers,
        ROWS=height, BLOCK=width, MASKED=mask is not None, FOCUS=focus_gradient, **constants,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _labels_of(target):
    target = in_rows(target)
    return target.view(torch.uint8) if target.dtype == torch.bool else target


def _mask_of(mask):
    """A mask that was expanded is read where it is, by its strides."""
    return (None, 0, 0) if mask is None else (mask.view(torch.uint8), *mask.stride())


def _numbers(scores, labels, gamma_negative, gamma_positive, margin):
    """Powers and the margin as numbers, and what kernels are compiled for."""
    gammas = gamma_negative, gamma_positive
    whole = max(gammas) <= LARGEST_WHOLE and all(each == int(each) for each in gammas)
    negative, positive = (int(each) for each in gammas) if whole else (-1, -1)
    constants = {
        "LABELS": 0 if labels is None else 2 if labels.is_floating_point() else 1,
        "PLAIN": gammas == (0.0, 0.0) and margin == 0.0,
        "NEGATIVE": negative,
        "POSITIVE": positive,
        "MARGIN": margin != 0.0,
        "NARROW": scores.element_size() < 4,
    }
    return (gamma_negative, gamma_positive, margin), constants


@triton.jit
def _load_tile(
    scores, labels, mask, row, column, inside, stride, label_stride, mask_row, mask_column,
    LABELS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores, their labels (bool where they are 0 or 1), and which count."""
    value = tl.load(scores + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if LABELS == 0:
        label = inside & (column < 0)
    else:
        label = tl.load(labels + row * label_stride + column, mask=inside, other=0)
        if LABELS == 2:
            label = label.to(tl.float32)
        else:
            label = label != 0
    keep = inside
    if MASKED:
        place = row * mask_row + column * mask_column
        keep = keep & (tl.load(mask + place, mask=inside, other=0) != 0)
    return value, label, keep


@triton.jit
def _log(x, NARROW: tl.constexpr):
    """Where scores are in half precision to 22 bits behind the point, in two instructions."""
    if NARROW and not INTERPRETED:
        logarithm = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return logarithm * 0.6931471805599453
    else:
        return tl.log(x)


@triton.jit
def _log_one_plus(x, logarithm):
    """``log(1 + x)`` from the logarithm of what 1 + x was rounded to."""
    series = x * (1.0 - x * (0.5 - x * (0.33333334 - x * 0.25)))
    return tl.where(x < 0.03, series, logarithm)


@triton.jit
def _cross_entropies(value, label, SOFT: tl.constexpr, NARROW: tl.constexpr):
    if SOFT:
        # A term with the weight 0 has no part, however large it is.
        above = (1.0 - label) * tl.where(label < 1.0, value, 0.0)
        below = label * tl.where(label > 0.0, -value, 0.0)
        linear = tl.where(value > 0.0, above, below)
    else:
        linear = tl.maximum(tl.where(label, -value, value), 0.0)
    power = tl.exp2(-tl.abs(value) * LOG2E)
    return linear + _log_one_plus(power, _log(1.0 + power, NARROW))


@triton.jit
def _chances(z):
    """``exp(-abs(z))``, and the chances of being right and wrong, each with all its digits."""
    power = tl.exp2(-tl.abs(z) * LOG2E)
    large = 1.0 / (1.0 + power)
    small = power * large
    return power, tl.where(z < 0.0, large, small), tl.where(z < 0.0, small, large)


@triton.jit
def _slopes_of_cross_entropies(value, label, SOFT: tl.constexpr):
    if SOFT:
        _, right, wrong = _chances(value)
        slope = (1.0 - label) * wrong - label * right
    else:
        _, _, wrong = _chances(tl.where(label, -value, value))
        slope = tl.where(label, -wrong, wrong)
    return slope


@triton.jit
def _terms(value, positive, margin, MARGIN: tl.constexpr, NARROW: tl.constexpr):
    """Chances to be right and wrong, the second less the margin, 1 less that, and its cost."""
    z = tl.where(positive, -value, value)
    power, right, wrong = _chances(z)
    if MARGIN:
        shift = tl.where(positive, 0.0, margin)
        inside = wrong - shift
        rest = right + shift
        rest = tl.where(rest > 1.0, 1.0, rest)  # lets a NaN through
        logarithm = _log(tl.where(positive, 1.0 + power, rest), NARROW)
        plain = tl.maximum(z, 0.0) + _log_one_plus(power, logarithm)
        # -log(1 - x) near 0, where 1 - x is rounded.
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
    """``number`` times ``x`` to the power of its side."""
    if NEGATIVE < 0:
        gamma = tl.where(positive, gamma_positive, gamma_negative)
        made = number * tl.exp2(gamma * tl.log2(x))
    else:
        of_positives = _times_power(number, x, POSITIVE)
        made = tl.where(positive, of_positives, _times_power(number, x, NEGATIVE))
    return made


@triton.jit
def _losses_of_side(
    value, weight, positive, gamma_negative, gamma_positive, margin, NEGATIVE: tl.constexpr,
    POSITIVE: tl.constexpr, MARGIN: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    _, _, inside, _, cost = _terms(value, positive, margin, MARGIN, NARROW)
    loss = _focused(cost, inside, positive, gamma_negative, gamma_positive, NEGATIVE, POSITIVE)
    return tl.where((inside <= 0.0) | (weight == 0.0), 0.0, weight * loss)


@triton.jit
def _slopes_of_side(
    value, weight, positive, gamma_negative, gamma_positive, margin, NEGATIVE: tl.constexpr,
    POSITIVE: tl.constexpr, MARGIN: tl.constexpr, NARROW: tl.constexpr, FOCUS: tl.constexpr,
):  # fmt: skip
    right, wrong, inside, rest, cost = _terms(value, positive, margin, MARGIN, NARROW)
    slope = wrong
    if MARGIN:
        slope = tl.where(positive, wrong, wrong * right / rest)
    if FOCUS:
        # With an infinite cost there is no chance left to be right.
        more = tl.where(right > 0.0, right * cost, 0.0)
        if MARGIN:
            more = tl.where(positive, more, more * (wrong / inside))
        slope += tl.where(positive, gamma_positive, gamma_negative) * more
    slope = _focused(slope, inside, positive, gamma_negative, gamma_positive, NEGATIVE, POSITIVE)
    slope = tl.where((inside <= 0.0) | (weight == 0.0), 0.0, weight * slope)
    return tl.where(positive, -slope, slope)


@triton.jit
def _losses(
    value, label, keep, gamma_negative, gamma_positive, margin, LABELS: tl.constexpr,
    PLAIN: tl.constexpr, NEGATIVE: tl.constexpr, POSITIVE: tl.constexpr, MARGIN: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    SOFT: tl.constexpr = LABELS == 2
    if PLAIN:
        loss = _cross_entropies(value, label, SOFT, NARROW)
    elif SOFT:
        # The term with most of the label, and the other one where a label has two.
        positive = label > 0.5
        weight = tl.where(positive, label, 1.0 - label)
        loss = _losses_of_side(
            value, weight, positive, gamma_negative, gamma_positive, margin,
            NEGATIVE, POSITIVE, MARGIN, NARROW,
        )  # fmt: skip
        if tl.max(tl.max((keep & (weight < 1.0)).to(tl.int32), 1), 0) > 0:
            loss += _losses_of_side(
                value, 1.0 - weight, ~positive, gamma_negative, gamma_positive, margin,
                NEGATIVE, POSITIVE, MARGIN, NARROW,
            )  # fmt: skip
    else:
        loss = _losses_of_side(
            value,
            1.0,
            label,
            gamma_negative,
            gamma_positive,
            margin,
            NEGATIVE,
            POSITIVE,
            MARGIN,
            NARROW,
        )
    return tl.where(keep, loss, 0.0)


@triton.jit
def _slopes(
    value, label, keep, factor, gamma_negative, gamma_positive, margin, LABELS: tl.constexpr,
    PLAIN: tl.constexpr, NEGATIVE: tl.constexpr, POSITIVE: tl.constexpr, MARGIN: tl.constexpr,
    NARROW: tl.constexpr, FOCUS: tl.constexpr,
):  # fmt: skip
    SOFT: tl.constexpr = LABELS == 2
    if PLAIN:
        slope = _slopes_of_cross_entropies(value, label, SOFT)
    elif SOFT:
        positive = label > 0.5
        weight = tl.where(positive, label, 1.0 - label)
        slope = _slopes_of_side(
            value, weight, positive, gamma_negative, gamma_positive, margin,
            NEGATIVE, POSITIVE, MARGIN, NARROW, FOCUS,
        )  # fmt: skip
        if tl.max(tl.max((keep & (weight < 1.0)).to(tl.int32), 1), 0) > 0:
            slope += _slopes_of_side(
                value, 1.0 - weight, ~positive, gamma_negative, gamma_positive, margin,
                NEGATIVE, POSITIVE, MARGIN, NARROW, FOCUS,
            )  # fmt: skip
    else:
        slope = _slopes_of_side(
            value, 1.0, label, gamma_negative, gamma_positive, margin,
            NEGATIVE, POSITIVE, MARGIN, NARROW, FOCUS,
        )  # fmt: skip
    return tl.where(keep & (factor != 0.0), slope * factor, 0.0)


@kernel
def _sum_rows(
    scores, labels, mask, row_scale, sums, seen, n_rows, n, span, stride, label_stride, mask_row,
    mask_column, gamma_negative, gamma_positive, margin,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, GRADIENT: tl.constexpr,
    FOCUS: tl.constexpr, LABELS: tl.constexpr, PLAIN: tl.constexpr, NEGATIVE: tl.constexpr,
    POSITIVE: tl.constexpr, MARGIN: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    flat_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = flat_row[:, None]
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    counted = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    factor = tl.zeros((ROWS, 1), dtype=tl.float32)
    if GRADIENT:
        factor = tl.load(row_scale + row, mask=row < n_rows, other=0.0).to(tl.float32)
    stop = tl.minimum((part + 1) * span, n)
    for first in range(part * span, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        inside = (row < n_rows) & (column < stop)
        value, label, keep = _load_tile(
            scores, labels, mask, row, column, inside, stride, label_stride, mask_row, mask_column,
            LABELS, MASKED,
        )  # fmt: skip
        total += _losses(
            value, label, keep, gamma_negative, gamma_positive, margin,
            LABELS, PLAIN, NEGATIVE, POSITIVE, MARGIN, NARROW,
        )  # fmt: skip
        if MASKED:
            counted = counted | keep.to(tl.int32)
        if GRADIENT:
            slope = _slopes(
                value, label, keep, factor, gamma_negative, gamma_positive, margin,
                LABELS, PLAIN, NEGATIVE, POSITIVE, MARGIN, NARROW, FOCUS,
            )  # fmt: skip
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
    scores, labels, mask, grad, out, n_rows, n, stride, label_stride, mask_row, mask_column, step,
    gamma_negative, gamma_positive, margin,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, FOCUS: tl.constexpr,
    LABELS: tl.constexpr, PLAIN: tl.constexpr, NEGATIVE: tl.constexpr, POSITIVE: tl.constexpr,
    MARGIN: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows) & (column < n)
    factor = tl.load(grad + row * step, mask=row < n_rows, other=0.0).to(tl.float32)
    value, label, keep = _load_tile(
        scores, labels, mask, row, column, inside, stride, label_stride, mask_row, mask_column,
        LABELS, MASKED,
    )  # fmt: skip
    slope = _slopes(
        value, label, keep, factor, gamma_negative, gamma_positive, margin,
        LABELS, PLAIN, NEGATIVE, POSITIVE, MARGIN, NARROW, FOCUS,
    )  # fmt: skip
    tl.store(out + row * n + column, slope.to(out.dtype.element_ty), mask=inside)
