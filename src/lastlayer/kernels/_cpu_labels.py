"""Reads scores with dense labels and a mask, for the CPU kernels of multi-label losses."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numba import njit
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._torch import accumulation_dtype, as_numpy
from lastlayer.kernels._cpu import WIDENED, as_array, as_rows, parts

# Scores per span, which fit in the cache. Sums within a span are added to totals in float64.
SPAN = 1024
_NO_MASK = np.empty((0, 0), np.uint8)
_WIDE = (torch.float32, torch.float64)

Rows = tuple[slice | None, NDArray[Any], NDArray[Any], NDArray[Any]]


def labelled_rows(scores: Tensor, target: Tensor, mask: Tensor | None) -> Iterator[Rows]:
    """Yields parts of the rows: a slice, and its scores, labels and mask.

    There is one part, with None as slice, unless half precision has to be widened.
    """
    whole = scores.dtype in _WIDE and (target.dtype in _WIDE or not target.is_floating_point())
    if whole:
        yield None, as_rows(scores), _labels_of(target, scores.dtype), mask_of(mask)
        return
    dtype = accumulation_dtype(scores.dtype)
    for part in parts(scores.shape, WIDENED):
        shown = mask_of(None if mask is None else mask[part])
        yield part, as_rows(scores[part]), _labels_of(target[part], dtype), shown


def part_of(tensor: Tensor, part: slice | None) -> Tensor:
    """The rows of a part; the tensor itself for None, since slicing costs microseconds."""
    return tensor if part is None else tensor[part]


def _labels_of(target: Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """Labels as ``dtype``, int64 or uint8: kernels are compiled for each dtype of labels."""
    if target.is_floating_point():
        return as_array(target, dtype)
    if target.dtype != torch.int64:
        target = target.bool().view(torch.uint8)
    return as_array(target)


def mask_of(mask: Tensor | None) -> NDArray[Any]:
    """The mask as uint8: one row per row of scores, a single row shared by all, or no rows."""
    if mask is None:
        return _NO_MASK
    shared = mask.shape[0] > 1 and mask.stride(0) == 0
    return as_numpy((mask[:1] if shared else mask).contiguous().view(torch.uint8))


@njit(nogil=True)
def allowed_in(mask, row, first, last):
    """The mask of a span; empty without a mask."""
    if len(mask) == 0:
        return mask.reshape(-1)
    return mask[row if len(mask) > 1 else 0][first:last]


@njit(nogil=True, error_model="numpy")
def read_span(x, target, allowed, values, labels):
    """Scores and labels of a span as floats, and the number of classes that are not masked.

    A masked class gets the score -inf and the label 0.
    """
    real = x.dtype.type
    n = len(x)
    if len(allowed) == 0:
        return x, _floating(target, labels), n
    nothing, zero = real(-np.inf), real(0.0)
    n_allowed = 0
    for i in range(n):
        labels[i] = target[i] if allowed[i] != 0 else zero
        values[i] = x[i] if allowed[i] != 0 else nothing
    for i in range(n):
        n_allowed += allowed[i]
    return values[:n], labels[:n], n_allowed


def _floating(target, labels):
    labels[: len(target)] = target
    return labels[: len(target)]


@overload(_floating)
def _compiled_floating(target, labels):
    if target.dtype == labels.dtype:
        return lambda target, labels: target  # noqa: ARG005 - numba wants the same arguments

    def compiled(target, labels):
        for i in range(len(target)):
            labels[i] = target[i]
        return labels[: len(target)]

    return compiled


@njit(nogil=True, fastmath={"reassoc", "contract"})
def between(labels):
    """Whether any label lies strictly between 0 and 1."""
    one = labels.dtype.type(1.0)
    total = labels.dtype.type(0.0)
    for i in range(len(labels)):
        total += labels[i] * (one - labels[i])
    return total > 0.0


@njit(nogil=True)
def hide(allowed, out):
    """Sets the gradient of masked classes to 0, for rows whose gradient is not finite."""
    for i in range(len(allowed)):
        if allowed[i] == 0:
            out[i] = 0.0
