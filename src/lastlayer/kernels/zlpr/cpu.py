"""ZLPR on the CPU: one pass over a row forward, one backward, in spans that stay in the cache."""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._arrays import as_rows, empty_rows
from lastlayer.kernels._blocks import BLOCK
from lastlayer.kernels._threads import by_rows
from lastlayer.kernels.zlpr._spans import fill, hide, log_one_plus, onto, split

# Scores between which sums go over to float64.
_SPAN = 1024


def forward(scores: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's."""
    return _forward(scores, mask, *_dense(scores, target))


def backward(
    scores: Tensor, target: Tensor, mask: Tensor | None, stats: Tensor, grad: Tensor
) -> Tensor:
    """As the reference's, from the stats of forward."""
    return _backward(scores, mask, stats, grad, *_dense(scores, target))


def forward_listed(
    scores: Tensor,
    classes: Tensor,
    _rows: Tensor,
    starts: Tensor,
    values: Tensor | None,
    mask: Tensor | None,
    smoothing: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's."""
    return _forward(scores, mask, *_lists(scores, classes, starts, values, smoothing))


def backward_listed(
    scores: Tensor,
    classes: Tensor,
    _rows: Tensor,
    starts: Tensor,
    values: Tensor | None,
    mask: Tensor | None,
    smoothing: float,
    stats: Tensor,
    grad: Tensor,
) -> Tensor:
    """As the reference's, from the stats of forward."""
    lists = _lists(scores, classes, starts, values, smoothing)
    return _backward(scores, mask, stats, grad, *lists)


def _dense(scores, target):
    dtype = accumulation_dtype(scores.dtype)
    target = target.to(dtype) if target.is_floating_point() else target.bool().view(torch.uint8)
    nothing = torch.empty(0, dtype=torch.int64).numpy()
    return (
        target.detach().contiguous().numpy(), nothing, torch.empty(0, dtype=dtype).numpy(),
        nothing, 0.0,
    )  # fmt: skip


def _lists(scores, classes, starts, values, smoothing):
    dtype = accumulation_dtype(scores.dtype)
    # An array of no labels says by its type what labels are: 0 and 1, or numbers.
    hard = values is None and smoothing == 0.0
    labels = torch.ones(len(classes), dtype=dtype) if values is None else values.detach().to(dtype)
    return (
        torch.empty((0, 0), dtype=torch.uint8 if hard else dtype).numpy(),
        classes.contiguous().numpy(), labels.contiguous().numpy(), starts.contiguous().numpy(),
        smoothing,
    )  # fmt: skip


def _mask_of(mask):
    """One row where all share it."""
    if mask is None:
        return torch.empty((0, 0), dtype=torch.uint8).numpy()
    shared = mask.shape[0] > 1 and mask.stride(0) == 0
    return (mask[:1] if shared else mask).contiguous().view(torch.uint8).numpy()


def _forward(scores, mask, *labels):
    rows = as_rows(scores)
    losses = torch.empty(len(rows), dtype=torch.from_numpy(rows[:0]).dtype)
    stats, counts = losses.new_empty((4, len(rows))), torch.empty(len(rows), dtype=torch.bool)
    _forward_rows(
        *rows.shape, rows, _mask_of(mask), *labels, losses.numpy(), stats.numpy(), counts.numpy()
    )
    return losses, stats, counts


def _backward(scores, mask, stats, grad, *labels):
    rows = as_rows(scores)
    out, result = empty_rows(scores)
    stats, grad = stats.detach().contiguous(), grad.detach().to(stats.dtype).contiguous()
    _backward_rows(*rows.shape, rows, _mask_of(mask), *labels, stats.numpy(), grad.numpy(), out)
    return result.to(scores.dtype)


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


@njit(nogil=True, cache=True, error_model="numpy")
def _forward_some(
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
            n_allowed, n_positive = split(
                x[row, first:last], labels[first:last], shown, up, down, up_weight, down_weight
            )
            counted += n_allowed
            up_peak, up_total = onto(up_peak, up_total, up[:k], up_weight[:k], lanes)
            if n_positive:
                down_peak, down_total = onto(
                    down_peak, down_total, down[:k], down_weight[:k], lanes
                )
        losses[row] = log_one_plus(up_peak, up_total) + log_one_plus(down_peak, down_total)
        stats[0, row], stats[1, row] = up_peak, up_total + math.exp(-up_peak)
        stats[2, row], stats[3, row] = down_peak, down_total + math.exp(-down_peak)
        counts[row] = counted > 0
        _clear(row, scratch, classes, starts, smoothing)


@njit(nogil=True, cache=True, error_model="numpy")
def _backward_some(
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
            _, n_positive = split(
                x[row, first:last], labels[first:last], shown, up, down, up_weight, down_weight
            )
            factors = (left, right if n_positive else real(0.0))
            fill(
                up[:k], down[:k], up_weight[:k], down_weight[:k], ends, factors,
                out[row, first:last],
            )  # fmt: skip
            if len(shown) and math.isnan(left + right):
                hide(shown, out[row, first:last])
        _clear(row, scratch, classes, starts, smoothing)


_forward_rows = by_rows(_forward_some)
_backward_rows = by_rows(_backward_some)
