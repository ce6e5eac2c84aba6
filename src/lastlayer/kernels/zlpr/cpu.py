"""ZLPR on the CPU: one pass over a row forward, one backward, in spans that stay in the cache.

Rows with an exponent above 60 take a second pass, with running maxima. Slabs use torch's vectorised
functions, on as many rows as fit the cache.
"""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._cpu import as_array, as_rows, by_rows, empty, empty_array, parts
from lastlayer.kernels._cpu_labels import (
    SPAN,
    allowed_in,
    between,
    hide,
    labelled_rows,
    mask_of,
    part_of,
    read_span,
)
from lastlayer.kernels._cpu_math import BLOCK, FAST, exp, largest, sum_of

# Numbers of a slab that fit the cache.
_IN_CACHE = 1 << 16
# exp of this, times any number of classes, does not overflow float32.
_FAR, _NEAR = 60.0, math.exp(-60.0)
_LARGE = math.exp(60.0)
# Arguments of the kernels if there are no lists.
_NO_CLASSES = np.empty(0, np.int64)
_NO_VALUES = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}


def forward(
    scores: Tensor, target: Tensor | None, lists: list[Tensor], values: Tensor | None,
    mask: Tensor | None, smoothing: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n_rows, dtype = scores.shape[0], accumulation_dtype(scores.dtype)
    losses, stats = empty_array((n_rows,), dtype)[0], empty_array((4, n_rows), dtype)[0]
    counts = np.empty(n_rows if mask is not None else 0, np.bool_)
    for part, *given in _rows_of(scores, target, lists, values, mask, smoothing):
        if part is None:
            _forward_rows(*given[0].shape, *given, losses, stats, counts)
            continue
        found = np.empty((4, len(given[0])), stats.dtype)
        _forward_rows(*given[0].shape, *given, losses[part], found, counts[part])
        stats[:, part] = found
    return torch.from_numpy(losses), torch.from_numpy(stats), torch.from_numpy(counts)


def backward(
    scores: Tensor, target: Tensor | None, lists: list[Tensor], values: Tensor | None,
    mask: Tensor | None, smoothing: float, stats: Tensor, grad: Tensor,
) -> Tensor:  # fmt: skip
    dtype = accumulation_dtype(scores.dtype)
    known, factors = as_array(stats), as_array(grad, dtype).reshape(-1)
    if scores.dtype == dtype:
        made, out = empty_array(scores.shape, dtype)
    else:
        out = empty(scores.shape, scores.dtype)
    for part, *given in _rows_of(scores, target, lists, values, mask, smoothing):
        found, some = known, factors
        if part is not None:
            found = np.ascontiguousarray(known[:, part])
            some = factors if len(factors) == 1 else factors[part]
        if scores.dtype == dtype:
            into = made if part is None else made[part]
        else:
            into = np.empty(given[0].shape, known.dtype)
        _backward_rows(*given[0].shape, *given, found, some, into)
        if scores.dtype != dtype:
            part_of(out, part).copy_(torch.from_numpy(into))
    return out


def _rows_of(scores, target, lists, values, mask, smoothing):
    """Yields a slice of rows (None for all), and the first arguments of the kernels for them."""
    dtype = accumulation_dtype(scores.dtype)
    if target is not None:
        for part, rows, labels, shown in labelled_rows(scores, target, mask):
            yield part, rows, shown, labels, _NO_CLASSES, _NO_VALUES[dtype], _NO_CLASSES, 0.0
        return
    rows, classes = as_rows(scores), as_array(lists[0]).reshape(-1)
    if len(lists) == 1:
        starts = np.arange(len(rows) + 1) * lists[0].shape[1]
    else:
        starts = as_array(lists[-1])
    # The dtype of an empty target tells whether labels are 0 and 1, or floating.
    hard = values is None and smoothing == 0.0
    none = np.empty((0, 0), np.uint8 if hard else rows.dtype)
    labels = np.ones(len(classes), rows.dtype) if values is None else as_array(values, dtype)
    yield None, rows, mask_of(mask), none, classes, labels, starts, smoothing


@njit(nogil=True, inline="always")
def _labels_of(row, target, scratch, classes, values, starts):
    """The labels of a row: of the target, or ``scratch`` with the labels of its list set."""
    if len(starts) == 0:
        return target[row]
    for place in range(starts[row], starts[row + 1]):
        if classes[place] >= 0:
            scratch[classes[place]] = values[place]
    return scratch


@njit(nogil=True)
def _clear(row, scratch, classes, starts, smoothing):
    if len(starts):
        for place in range(starts[row], starts[row + 1]):
            if classes[place] >= 0:
                scratch[classes[place]] = smoothing


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _forward_rows(
    start, stop, x, mask, target, classes, values, starts, smoothing, losses, stats, counts
):
    n = x.shape[1]
    hidden, floating = np.empty(SPAN, x.dtype), np.empty(SPAN, x.dtype)
    up, down, lanes = np.empty(SPAN, x.dtype), np.empty(SPAN, x.dtype), np.empty(BLOCK, x.dtype)
    scratch = np.full(n if len(starts) else 0, smoothing).astype(target.dtype)
    zero = x.dtype.type(0.0)
    for row in range(start, stop):
        labels_of_row = _labels_of(row, target, scratch, classes, values, starts)
        up_peak, down_peak = zero, zero
        for again in range(2):
            up_total, down_total, counted = 0.0, 0.0, 0
            far = False
            for first in range(0, n, SPAN):
                last = min(n, first + SPAN)
                scores, labels, n_allowed = read_span(
                    x[row, first:last], labels_of_row[first:last],
                    allowed_in(mask, row, first, last), hidden, floating,
                )  # fmt: skip
                counted += n_allowed
                if not again:
                    above, below = _sums(scores, labels)
                    far = far or above >= _LARGE or below >= _LARGE
                    up_total += above
                    down_total += below
                    continue
                _split(scores, labels, up, down)
                up_peak, up_total = _onto(up_peak, up_total, up[: last - first], labels, -1, lanes)
                down_peak, down_total = _onto(
                    down_peak, down_total, down[: last - first], labels, 1, lanes
                )
            if not far:
                break
        losses[row] = _log_one_plus(up_peak, up_total) + _log_one_plus(down_peak, down_total)
        stats[0, row], stats[1, row] = up_peak, up_total + math.exp(-up_peak)
        stats[2, row], stats[3, row] = down_peak, down_total + math.exp(-down_peak)
        if len(mask):
            counts[row] = counted > 0
        _clear(row, scratch, classes, starts, smoothing)


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _backward_rows(
    start, stop, x, mask, target, classes, values, starts, smoothing, stats, grad, out
):
    n = x.shape[1]
    real = x.dtype.type
    hidden, floating = np.empty(SPAN, x.dtype), np.empty(SPAN, x.dtype)
    up, down = np.empty(SPAN, x.dtype), np.empty(SPAN, x.dtype)
    scratch = np.full(n if len(starts) else 0, smoothing).astype(target.dtype)
    for row in range(start, stop):
        factor = grad[row if len(grad) > 1 else 0]
        if factor == 0:
            out[row] = 0.0
            continue
        labels_of_row = _labels_of(row, target, scratch, classes, values, starts)
        peaks = (stats[0, row], stats[2, row])
        factors = (real(factor / stats[1, row]), real(factor / stats[3, row]))
        for first in range(0, n, SPAN):
            last = min(n, first + SPAN)
            made = out[row, first:last]
            allowed = allowed_in(mask, row, first, last)
            scores, labels, _ = read_span(
                x[row, first:last], labels_of_row[first:last], allowed, hidden, floating
            )
            if peaks[0] == 0.0 and peaks[1] == 0.0:
                _slopes(scores, labels, factors, made)
            else:
                _split(scores, labels, up, down)
                _slopes_from(up, down, labels, peaks, factors, made)
            if len(allowed) and math.isnan(factors[0] + factors[1]):
                hide(allowed, made)
        _clear(row, scratch, classes, starts, smoothing)


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _sums(x, labels):
    """Both sums if all exponents are at most 60; otherwise one of them is at least exp(60)."""
    real = x.dtype.type
    zero, one, top, near = real(0.0), real(1.0), real(_FAR + 1.0), real(_NEAR)
    up, down = zero, zero
    if not between(labels):
        for i in range(len(x)):
            exponent = -x[i] if labels[i] != zero else x[i]
            # This comparison keeps NaN.
            power = exp(top if exponent > top else exponent)
            up += power * (one - labels[i])
            down += power * labels[i]
        return up, down
    far = zero
    for i in range(len(x)):
        small = exp(-abs(x[i]))
        large = one / (near if small < near else small)
        above, below = (small, large) if x[i] < zero else (large, small)
        up += above * (one - labels[i])
        down += below * labels[i]
        weight = labels[i] if x[i] < zero else one - labels[i]
        far += zero if weight == zero or small >= near else one
    # Sums that are NaN are returned unchanged.
    return (up, down) if far == zero or up + down != up + down else (real(2.0 * _LARGE), down)


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _slopes(x, labels, factors, out):
    """The gradient if no exponent is above 60."""
    real = x.dtype.type
    zero, one, near = real(0.0), real(1.0), real(_NEAR)
    left, right = factors
    if not between(labels):
        for i in range(len(x)):
            positive = labels[i] != zero
            power = exp(-x[i] if positive else x[i])
            out[i] = power * (-right if positive else left)
        return
    for i in range(len(x)):
        small = exp(-abs(x[i]))
        large = one / (near if small < near else small)
        above, below = (small, large) if x[i] < zero else (large, small)
        out[i] = above * (one - labels[i]) * left - below * labels[i] * right


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _split(x, labels, up, down):
    """The exponents of both sums; -inf if a class is not in the sum."""
    real = x.dtype.type
    never, zero, one = real(-math.inf), real(0.0), real(1.0)
    for i in range(len(x)):
        up[i] = x[i] if labels[i] < one else never
        down[i] = -x[i] if labels[i] > zero else never


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _onto(peak, total, x, labels, sign, lanes):
    """Adds a span to a sum relative to a running peak.

    The weights are the labels if ``sign`` > 0, else 1 - labels.
    """
    top = largest(x, lanes, 0.0)
    if top > peak:
        total *= math.exp(peak - top)
        peak = top
    one = x.dtype.type(1.0)
    for i in range(len(x)):
        weight = labels[i] if sign > 0 else one - labels[i]
        x[i] = weight * exp(_distance(x[i], peak))
    return peak, total + sum_of(x)


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _slopes_from(up, down, labels, peaks, factors, out):
    one = up.dtype.type(1.0)
    for i in range(len(out)):
        above = exp(_distance(up[i], peaks[0])) * (one - labels[i]) * factors[0]
        out[i] = above - exp(_distance(down[i], peaks[1])) * labels[i] * factors[1]


@njit(nogil=True)
def _distance(x, peak):
    # 0 for equal infinities, whose difference would be NaN.
    return np.float32(0) if x == peak else x - peak


@njit(nogil=True)
def _log_one_plus(peak, total):
    return peak + math.log(total + math.exp(-peak)) if peak > 0.0 else math.log1p(total)


def slab_sums(scores: Tensor, negated: bool) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(scores.dtype)
    n = scores.shape[0]
    above = scores.new_empty(n, dtype=dtype)
    below = scores.new_empty(n if negated else 0, dtype=dtype)
    if scores.shape[1] == 0:
        return above.fill_(-torch.inf), below.fill_(-torch.inf)
    for part in parts(scores.shape, _IN_CACHE):
        values = scores[part].to(dtype)
        above[part] = _logsumexp(values)
        if negated:
            below[part] = _logsumexp(_negated(values))
    return above, below


def slab_gradient_(scores: Tensor, scale: Tensor, above: Tensor, below: Tensor | None) -> None:
    for part in parts(scores.shape, _IN_CACHE):
        values = scores[part].to(above.dtype)
        gradient = (values - above[part].unsqueeze(-1)).exp_()
        if below is not None:
            gradient -= _negated(values).sub_(below[part].unsqueeze(-1)).exp_()
        torch.mul(gradient, scale[part].unsqueeze(-1), out=scores[part])


def _logsumexp(values: Tensor) -> Tensor:
    """logsumexp of each row; torch's function takes twice as long."""
    peak = values.amax(-1)
    origin = torch.where(peak == -torch.inf, 0.0, peak)
    return (values - origin.unsqueeze(-1)).exp_().sum(-1).log_().add_(origin)


def _negated(values: Tensor) -> Tensor:
    return torch.where(values == -torch.inf, values, -values)
