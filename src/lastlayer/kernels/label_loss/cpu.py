"""Binary cross entropy and the asymmetric loss on the CPU, which reads rows in spans."""

import math
from functools import cache

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from torch import Tensor

from lastlayer._torch import accumulation_dtype, as_numpy, in_dtype
from lastlayer.kernels._cpu import WIDENED, as_array, by_rows, empty, empty_array, parts
from lastlayer.kernels._cpu_labels import (
    SPAN,
    allowed_in,
    between,
    hide,
    labelled_rows,
    part_of,
    read_span,
)
from lastlayer.kernels._cpu_math import FAST, exp, log, log1p, one_plus

# Integer powers up to this are products.
_LARGEST_WHOLE = 7


def forward(
    scores: Tensor, target: Tensor, mask: Tensor | None, gamma_negative: float,
    gamma_positive: float, margin: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n_rows = scores.shape[0]
    losses = torch.empty(n_rows, dtype=accumulation_dtype(scores.dtype))
    counts = torch.empty(n_rows if mask is not None else 0, dtype=torch.bool)
    numbers = _numbers(gamma_negative, gamma_positive, margin, scores.dtype)
    for part, rows, labels, shown in labelled_rows(scores, target, mask):
        made = as_numpy(part_of(losses, part)), as_numpy(part_of(counts, part))
        _forward_rows(*rows.shape, rows, labels, shown, *numbers, *made)
    return losses, counts


def backward(
    scores: Tensor, target: Tensor, mask: Tensor | None, gamma_negative: float,
    gamma_positive: float, margin: float, focus_gradient: bool, grad: Tensor,
) -> Tensor:  # fmt: skip
    dtype = accumulation_dtype(scores.dtype)
    grad = in_dtype(grad.detach(), dtype).reshape(-1).contiguous()
    out = empty(scores.shape, scores.dtype)
    numbers = _numbers(gamma_negative, gamma_positive, margin, scores.dtype)
    for part, rows, labels, shown in labelled_rows(scores, target, mask):
        wide = scores.dtype == dtype
        made = part_of(out, part) if wide else torch.empty(rows.shape, dtype=dtype)
        factors = grad if grad.shape[0] == 1 else part_of(grad, part)
        _backward_rows(
            *rows.shape, rows, labels, shown, *numbers, focus_gradient, as_numpy(factors),
            as_numpy(made),
        )  # fmt: skip
        if not wide:
            part_of(out, part).copy_(made)
    return out


def slab_(
    scores: Tensor, gamma_negative: float, gamma_positive: float, margin: float,
    focus_gradient: bool, smoothing: float, row_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    dtype = accumulation_dtype(scores.dtype)
    losses, made = empty_array((scores.shape[0],), dtype)
    factors = losses[:0] if row_scale is None else as_array(row_scale, dtype)
    numbers = _numbers(gamma_negative, gamma_positive, margin, scores.dtype)
    options = smoothing, *numbers, focus_gradient
    if scores.dtype == dtype and scores.is_contiguous():
        _slab_rows(*scores.shape, as_array(scores), *options, factors, losses)
        return made
    for part in parts(scores.shape, WIDENED):
        wide = scores[part].to(dtype, memory_format=torch.contiguous_format, copy=True)
        _slab_rows(*wide.shape, as_numpy(wide), *options, factors[part], losses[part])
        if row_scale is not None:
            scores[part] = wide
    return made


@cache
def _numbers(gamma_negative, gamma_positive, margin, dtype):
    """Whether the loss is the cross entropy; powers, as integers if possible; and the margin."""
    gammas = gamma_negative, gamma_positive
    real = np.float64 if dtype == torch.float64 else np.float32
    whole = all(each <= _LARGEST_WHOLE and each == int(each) for each in gammas)
    kind = int if whole else real
    return not any(gammas) and not margin, tuple(map(kind, gammas)), real(margin)


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _forward_rows(start, stop, x, target, mask, plain, gammas, margin, losses, counts):
    n = x.shape[1]
    values, floating = np.empty(SPAN, x.dtype), np.empty(SPAN, x.dtype)
    for row in range(start, stop):
        total, counted = 0.0, 0
        for first in range(0, n, SPAN):
            last = min(n, first + SPAN)
            allowed = allowed_in(mask, row, first, last)
            scores, labels, n_allowed = read_span(
                x[row, first:last], target[row, first:last], allowed, values, floating
            )
            counted += n_allowed
            total += _loss(scores, labels, plain, gammas, margin)
        losses[row] = total
        if len(mask):
            counts[row] = counted > 0


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _backward_rows(start, stop, x, target, mask, plain, gammas, margin, focus_gradient, grad, out):
    n = x.shape[1]
    real = x.dtype.type
    focus = real(1.0) if focus_gradient else real(0.0)
    slopes = (real(gammas[0]) * focus, real(gammas[1]) * focus)
    values, floating = np.empty(SPAN, x.dtype), np.empty(SPAN, x.dtype)
    for row in range(start, stop):
        factor = grad[row if len(grad) > 1 else 0]
        if factor == 0:
            out[row] = 0.0
            continue
        for first in range(0, n, SPAN):
            last = min(n, first + SPAN)
            made = out[row, first:last]
            allowed = allowed_in(mask, row, first, last)
            scores, labels, _ = read_span(
                x[row, first:last], target[row, first:last], allowed, values, floating
            )
            _slope(scores, labels, plain, gammas, slopes, margin, factor, made, values)
            if len(allowed) and not math.isfinite(factor):
                hide(allowed, made)


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _slab_rows(
    start, stop, x, smoothing, plain, gammas, margin, focus_gradient, row_scale, losses
):  # fmt: skip
    """Losses for equal labels, 0 for a score of -inf; scores become their gradient."""
    real = x.dtype.type
    focus = real(1.0) if focus_gradient else real(0.0)
    slopes = (real(gammas[0]) * focus, real(gammas[1]) * focus)
    labels, made = np.zeros(SPAN, x.dtype), np.empty(SPAN, x.dtype)
    values = np.empty(SPAN, x.dtype)
    for row in range(start, stop):
        total = 0.0
        for first in range(0, x.shape[1], SPAN):
            scores = x[row, first : first + SPAN]
            own, into = labels[: len(scores)], made[: len(scores)]
            if smoothing != 0.0:
                for i in range(len(scores)):
                    own[i] = real(0.0) if scores[i] == -np.inf else real(smoothing)
            total += _loss(scores, own, plain, gammas, margin)
            if len(row_scale) and row_scale[row] == 0:
                scores[:] = 0.0
            elif len(row_scale):
                _slope(scores, own, plain, gammas, slopes, margin, row_scale[row], into, values)
                scores[:] = into
        losses[row] = total


@njit(nogil=True, error_model="numpy")
def _loss(x, labels, plain, gammas, margin):
    """The loss of a span of a row."""
    if plain:
        return _cross_entropy(x, labels)
    total = _loss_of_side(x, labels, False, gammas, margin)
    return total + _loss_of_side(x, labels, True, gammas, margin) if between(labels) else total


@njit(nogil=True, error_model="numpy")
def _slope(x, labels, plain, gammas, slopes, margin, factor, out, room):
    """Writes the slope of a span times ``factor`` to ``out``; scratch ``room`` may share x."""
    if plain:
        _slope_of_cross_entropy(x, labels, factor, out)
        return
    _slope_of_side(x, labels, False, gammas, slopes, margin, factor, out)
    if between(labels):
        _slope_of_side(x, labels, True, gammas, slopes, margin, factor, room)
        for i in range(len(out)):
            out[i] += room[i]


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _cross_entropy(x, labels):
    real = x.dtype.type
    zero, one = real(0.0), real(1.0)
    total = zero
    for i in range(len(x)):
        label, value = labels[i], x[i]
        # A term of weight 0 is dropped, even if it is infinite.
        above = (one - label) * (value if label < one else zero)
        below = label * (-value if label > zero else zero)
        total += (above if value > zero else below) + log1p(exp(-abs(value)))
    return total


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _slope_of_cross_entropy(x, labels, factor, out):
    one = x.dtype.type(1.0)
    for i in range(len(x)):
        power = exp(-abs(x[i]))
        large = one / (one + power)
        small = power * large
        wrong, right = (small, large) if x[i] < 0 else (large, small)
        out[i] = ((one - labels[i]) * wrong - labels[i] * right) * factor


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _loss_of_side(x, labels, other, gammas, margin):
    """Sums the larger term of each label, or the ``other`` one."""
    real = x.dtype.type
    zero, one, half = real(0.0), real(1.0), real(0.5)
    total = zero
    for i in range(len(x)):
        positive = (labels[i] > half) != other
        weight = labels[i] if positive else one - labels[i]
        _, _, inside, _, cost = _terms(-x[i] if positive else x[i], positive, margin)
        loss = weight * cost * _power(inside, positive, gammas)
        total += zero if inside <= zero or weight == zero else loss
    return total


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _slope_of_side(x, labels, other, gammas, slopes, margin, factor, out):
    real = x.dtype.type
    zero, one, half = real(0.0), real(1.0), real(0.5)
    for i in range(len(x)):
        positive = (labels[i] > half) != other
        weight = labels[i] if positive else one - labels[i]
        right, wrong, inside, rest, cost = _terms(-x[i] if positive else x[i], positive, margin)
        # Without a margin, wrong / inside and right / rest are 1. If the cost is infinite, right is
        # 0, and the product is dropped.
        more = right * cost if right > zero else zero
        if margin > zero:
            more = more if positive else more * (wrong / inside)
            wrong = wrong if positive else wrong * (right / rest)
        slope = wrong + (slopes[1] if positive else slopes[0]) * more
        slope *= _power(inside, positive, gammas) * factor
        scale = -weight if positive else weight
        out[i] = zero if inside <= zero or weight == zero else scale * slope


@njit(nogil=True, forceinline=True, fastmath=FAST, error_model="numpy")
def _terms(z, positive, margin):
    """Probabilities of right and wrong, ``wrong - margin``, 1 less that, and the cost."""
    zero, one = np.float32(0), np.float32(1)
    power = exp(-abs(z))
    total, lost = one_plus(power)
    large = one / total
    small = power * large
    right, wrong = (large, small) if z < zero else (small, large)
    shift = zero if positive else margin
    rest = right + shift
    rest = one if rest > one else rest
    logarithm = log(rest if shift > zero else total)
    plain = (z if z > zero else zero) + (logarithm + lost * large)
    cost = -logarithm if shift > zero else plain
    # The vectorised logarithm of NaN is an arbitrary number.
    return right, wrong, wrong - shift, rest, z if z != z else cost


def _power(x, positive, gammas):
    """``x`` to the power of positives or negatives, for x from 0 to 1."""
    return x ** gammas[int(positive)]


@overload(_power, jit_options={"fastmath": FAST, "error_model": "numpy", "forceinline": True})
def _compiled_power(x, positive, gammas):
    if not isinstance(gammas.dtype, types.Integer):

        def of_number(x, positive, gammas):
            gamma = gammas[1] if positive else gammas[0]
            return exp(gamma * log(x if x > 0 else np.float32(1)))

        return of_number

    def of_integer(x, positive, gammas):
        return _product(x, gammas[1]) if positive else _product(x, gammas[0])

    return of_integer


@njit(nogil=True, forceinline=True, fastmath=FAST)
def _product(x, gamma):
    one = np.float32(1)
    square = x * x
    product = x if gamma & 1 else one
    product *= square if gamma & 2 else one
    return product * (square * square if gamma & 4 else one)
