"""Scores of chosen classes on the CPU: class vectors are read where they are."""

import torch
from numba import njit
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._arrays import as_rows
from lastlayer.kernels._threads import by_rows

# Sums may be reordered and so vectorised; NaN and infinities keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
# Numbers of half precision that are gathered and widened at a time.
_WIDENED = 1 << 20


def forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor) -> Tensor:
    """As the reference's."""
    dtype = accumulation_dtype(hidden.dtype)
    scores = torch.empty(classes.shape, dtype=dtype)
    if weight.dtype == dtype:
        _run(hidden, weight, classes, scores)
    else:
        step = max(1, _WIDENED // max(1, classes.shape[1] * hidden.shape[1]))
        for first in range(0, hidden.shape[0], step):
            part = slice(first, first + step)
            chosen = classes[part]
            vectors = weight[chosen.flatten().clamp_min(0)].to(dtype)
            places = torch.arange(chosen.numel()).view(chosen.shape)
            places = torch.where(chosen < 0, -1, places)
            _run(hidden[part], vectors, places, scores[part])
    if bias is None:
        return scores
    return scores.add_(torch.where(classes < 0, 0.0, bias.detach()[classes.clamp_min(0)]))


def _run(hidden: Tensor, weight: Tensor, classes: Tensor, scores: Tensor) -> None:
    if scores.numel():
        numbers = classes.shape[1] * hidden.shape[1]
        vectors, places = weight.detach().numpy(), classes.contiguous().numpy()
        _dot_rows(hidden.shape[0], numbers, as_rows(hidden), vectors, places, scores.numpy())


@njit(nogil=True, cache=True)
def _dots(start, stop, hidden, weight, classes, scores):
    for row in range(start, stop):
        for slot in range(classes.shape[1]):
            chosen = classes[row, slot]
            scores[row, slot] = _dot(hidden[row], weight[chosen]) if chosen >= 0 else 0.0


@njit(nogil=True, fastmath=_FAST)
def _dot(left, right):
    total = left.dtype.type(0.0)
    for i in range(len(left)):
        total += left[i] * right[i]
    return total


_dot_rows = by_rows(_dots)
