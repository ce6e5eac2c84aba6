"""ZLPR on the CPU: one pass over a row forward, one backward, in spans that stay in the cache.

Slabs take torch's vectorised functions, on as many rows as a cache holds.
"""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn.functional import logsigmoid

from lastlayer._torch import accumulation_dtype, in_dtype
from lastlayer.kernels._cpu import as_rows, by_rows, empty_rows, parts
from lastlayer.kernels._cpu_math import BLOCK, FAST, exp, largest

# Scores between which sums go over to float64.
_SPAN = 1024
# Numbers of a slab that a cache holds.
_IN_CACHE = 1 << 16
# In the place of lists and of a mask where there are none.
_NO_CLASSES, _NO_MASK = np.empty(0, np.int64), np.empty((0, 0), np.uint8)
_NO_VALUES = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}


def forward(
    scores: Tensor, target: Tensor | None, lists: list[Tensor], values: Tensor | None,
    mask: Tensor | None, smoothing: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows, labels = as_rows(scores), _labels(scores, target, lists, values, smoothing)
    losses = torch.empty(len(rows), dtype=accumulation_dtype(scores.dtype))
    stats, counts = losses.new_empty((4, len(rows))), torch.empty(len(rows), dtype=torch.bool)
    _forward_rows(
        *rows.shape, rows, _mask_of(mask), *labels, losses.numpy(), stats.numpy(), counts.numpy()
    )
    return losses, stats, counts


def backward(
    scores: Tensor, target: Tensor | None, lists: list[Tensor], values: Tensor | None,
    mask: Tensor | None, smoothing: float, stats: Tensor, grad: Tensor,
) -> Tensor:  # fmt: skip
    rows, labels = as_rows(scores), _labels(scores, target, lists, values, smoothing)
    out, result = empty_rows(scores)
    stats, grad = stats.detach().contiguous(), in_dtype(grad.detach(), stats.dtype).contiguous()
    _backward_rows(*rows.shape, rows, _mask_of(mask), *labels, stats.numpy(), grad.numpy(), out)
    return in_dtype(result, scores.dtype)


def _labels(scores, target, lists, values, smoothing):
    """A target, classes, values and starts of lists, and the label of other classes."""
    dtype = accumulation_dtype(scores.dtype)
    if target is not None:
        if target.is_floating_point():
            target = in_dtype(target.detach(), dtype)
        else:
            target = target.bool().view(torch.uint8)
        return target.contiguous().numpy(), _NO_CLASSES, _NO_VALUES[dtype], _NO_CLASSES, 0.0
    classes, _, starts = lists
    # An array of no labels says by its type what labels are: 0 and 1, or numbers.
    hard = values is None and smoothing == 0.0
    labels = torch.ones(len(classes), dtype=dtype) if values is None else values.detach().to(dtype)
    return (
        torch.empty((0, 0), dtype=torch.uint8 if hard else dtype).numpy(),
        *(each.contiguous().numpy() for each in (classes, labels, starts)),
        smoothing,
    )


def _mask_of(mask):
    """One row where all share it."""
    if mask is None:
        return _NO_MASK
    shared = mask.shape[0] > 1 and mask.stride(0) == 0
    return (mask[:1] if shared else mask).contiguous().view(torch.uint8).numpy()


@njit(nogil=True, inline="always")
def _labels_of(row, target, scratch, classes, values, starts):
    """The labels of a row: its own, or those of its list on top of what the others have."""
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
    up, down, up_weight, down_weight = np.empty((4, _SPAN), x.dtype)
    lanes = np.empty(BLOCK, x.dtype)
    scratch = np.full(n if len(starts) else 0, smoothing).astype(target.dtype)
    zero = x.dtype.type(0.0)
    for row in range(start, stop):
        labels = _labels_of(row, target, scratch, classes, values, starts)
        up_peak, down_peak, up_total, down_total, counted = zero, zero, 0.0, 0.0, 0
        for first in range(0, n, _SPAN):
            last = min(n, first + _SPAN)
            k = last - first
            shown = mask[row if len(mask) > 1 else 0, first:last] if len(mask) else mask[:, 0]
            n_allowed, n_positive = _split(
                x[row, first:last], labels[first:last], shown, up, down, up_weight, down_weight
            )
            counted += n_allowed
            up_peak, up_total = _onto(up_peak, up_total, up[:k], up_weight[:k], lanes)
            if n_positive:
                down_peak, down_total = _onto(
                    down_peak, down_total, down[:k], down_weight[:k], lanes
                )
        losses[row] = _log_one_plus(up_peak, up_total) + _log_one_plus(down_peak, down_total)
        stats[0, row], stats[1, row] = up_peak, up_total + math.exp(-up_peak)
        stats[2, row], stats[3, row] = down_peak, down_total + math.exp(-down_peak)
        counts[row] = counted > 0
        _clear(row, scratch, classes, starts, smoothing)


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _backward_rows(
    start, stop, x, mask, target, classes, values, starts, smoothing, stats, grad, out
):
    n = x.shape[1]
    real = x.dtype.type
    up, down, up_weight, down_weight = np.empty((4, _SPAN), x.dtype)
    scratch = np.full(n if len(starts) else 0, smoothing).astype(target.dtype)
    for row in range(start, stop):
        if grad[row] == 0:
            out[row] = 0.0
            continue
        labels = _labels_of(row, target, scratch, classes, values, starts)
        ends = (stats[0, row], stats[2, row])
        left, right = real(grad[row] / stats[1, row]), real(grad[row] / stats[3, row])
        for first in range(0, n, _SPAN):
            last = min(n, first + _SPAN)
            k = last - first
            shown = mask[row if len(mask) > 1 else 0, first:last] if len(mask) else mask[:, 0]
            _, n_positive = _split(
                x[row, first:last], labels[first:last], shown, up, down, up_weight, down_weight
            )
            factors = (left, right if n_positive else real(0.0))
            _fill(
                up[:k], down[:k], up_weight[:k], down_weight[:k], ends, factors,
                out[row, first:last],
            )  # fmt: skip
            if len(shown) and math.isnan(left + right):
                _hide(shown, out[row, first:last])
        _clear(row, scratch, classes, starts, smoothing)


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _split(x, labels, allowed, up, down, up_weight, down_weight):
    """Exponents and weights of the two sums; how many classes count, and how many positives."""
    real = x.dtype.type
    never, none, one = real(-math.inf), real(0.0), real(1.0)
    n_allowed, n_positive = 0, 0
    if len(allowed) == 0:
        for i in range(len(x)):
            label = real(labels[i])
            up[i] = x[i] if label < one else never
            down[i] = -x[i] if label > none else never
            up_weight[i], down_weight[i] = one - label, label
            n_positive += label > none
        return len(x), n_positive
    for i in range(len(x)):
        keep = allowed[i] != 0
        label = real(labels[i]) if keep else none
        up[i] = x[i] if keep and label < one else never
        down[i] = -x[i] if label > none else never
        up_weight[i], down_weight[i] = one - label, label
        n_positive += label > none
        n_allowed += keep
    return n_allowed, n_positive


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _sum_from(x, weight, peak):
    zero = x.dtype.type(0.0)
    total = zero
    for i in range(len(x)):
        # The same infinity twice is a distance of 0.
        total += weight[i] * exp(zero if x[i] == peak else x[i] - peak)
    return total


@njit(nogil=True)
def _onto(peak, total, x, weight, lanes):
    """A sum and its origin, with a span added."""
    top = largest(x, lanes, 0.0)
    if top > peak:
        total *= math.exp(peak - top)
        peak = top
    return peak, total + _sum_from(x, weight, peak)


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _fill(up, down, up_weight, down_weight, ends, factors, out):
    zero = up.dtype.type(0.0)
    for i in range(len(up)):
        out[i] = up_weight[i] * exp(zero if up[i] == ends[0] else up[i] - ends[0]) * factors[0]
    if factors[1] != zero:
        for i in range(len(up)):
            share = exp(zero if down[i] == ends[1] else down[i] - ends[1])
            out[i] -= down_weight[i] * share * factors[1]


@njit(nogil=True)
def _hide(allowed, out):
    """Classes that do not count have no gradient in a row that has no number either."""
    for i in range(len(out)):
        out[i] = out[i] if allowed[i] != 0 else 0.0


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
        minus = None if below is None else _negated(values)
        gradient = (values - above[part].unsqueeze(-1)).exp_()
        if minus is not None and below is not None:
            gradient -= minus.sub_(below[part].unsqueeze(-1)).exp_()
        torch.mul(gradient, scale[part].unsqueeze(-1), out=values)
        if values.data_ptr() != scores[part].data_ptr():
            scores[part] = values


def _logsumexp(values: Tensor) -> Tensor:
    """That of each row; torch's own takes twice as long."""
    peak = values.amax(-1)
    origin = torch.where(peak == -torch.inf, 0.0, peak)
    return (values - origin.unsqueeze(-1)).exp_().sum(-1).log_().add_(origin)


def _negated(values: Tensor) -> Tensor:
    return torch.where(values == -torch.inf, values, -values)


def logistic_slab_(scores: Tensor, scale: Tensor | None, smoothing: float) -> Tensor:
    dtype = accumulation_dtype(scores.dtype)
    losses = scores.new_empty(scores.shape[0], dtype=dtype)
    for part in parts(scores.shape, _IN_CACHE):
        values = scores[part].to(dtype)
        loss = logsigmoid(-values).sum(-1).neg_()
        absent = values == -torch.inf if smoothing else None
        if absent is not None:
            loss -= smoothing * values.masked_fill(absent, 0.0).sum(-1)
        losses[part] = loss
        if scale is None:
            continue
        gradient = values.sigmoid()
        if absent is not None:
            gradient.sub_(smoothing).masked_fill_(absent, 0.0)
        scores[part] = gradient.mul_(scale[part].unsqueeze(-1))
    return losses
