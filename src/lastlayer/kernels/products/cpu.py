"""Products with chosen classes on the CPU, which read only the vectors of these classes.

For the gradient of hidden each row sums its class vectors. For the gradient of the weight the
entries are sorted by class, and each class with entries sums its rows. A class belongs to one
thread, so that the result is deterministic.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._torch import accumulation_dtype, as_numpy, in_dtype
from lastlayer.kernels._cpu import WIDENED, as_array, as_rows, by_rows, empty_array, parts
from lastlayer.kernels._cpu_math import FAST, add_scaled, dot


def scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor) -> Tensor:
    dtype = accumulation_dtype(hidden.dtype)
    out, made = empty_array(classes.shape, dtype)
    numbers = classes.shape[1] * hidden.shape[1]
    biases = np.empty(0, out.dtype) if bias is None else as_array(bias, dtype)
    for part, places, vectors in _wide(classes, weight, dtype):
        if out.size:
            rows, ids = as_rows(hidden[part]), as_array(classes)[part]
            _dot_rows(len(rows), numbers, rows, vectors, places, biases, ids, out[part])
    return made


def _wide(
    classes: Tensor, weight: Tensor, dtype: torch.dtype
) -> Iterator[tuple[slice, NDArray[Any], NDArray[Any]]]:
    """Yields a slice of rows, the indices of their classes in a matrix, and that matrix.

    The matrix has the class vectors in ``dtype``: it is the weight, or a gathered and converted
    copy.
    """
    if weight.dtype == dtype:
        yield slice(None), as_array(classes), as_array(weight)
        return
    for part in parts((classes.shape[0], classes.shape[1] * weight.shape[1]), WIDENED):
        chosen = classes[part]
        places = torch.arange(chosen.numel()).view(chosen.shape)
        vectors = weight.detach()[chosen.flatten().clamp_min(0)].to(dtype)
        yield part, as_numpy(torch.where(chosen < 0, -1, places)), as_numpy(vectors)


@by_rows
@njit(nogil=True, cache=True)
def _dot_rows(start, stop, hidden, weight, places, bias, classes, scores):
    """``places`` are the rows of ``weight`` that hold the vectors of ``classes``."""
    for row in range(start, stop):
        for slot in range(places.shape[1]):
            place, score = places[row, slot], scores.dtype.type(0.0)
            if place >= 0:
                score = dot(hidden[row], weight[place])
                if len(bias):
                    score += bias[classes[row, slot]]
            scores[row, slot] = score


def to_hidden(values: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
    dtype = accumulation_dtype(weight.dtype)
    out = torch.empty(values.shape[0], weight.shape[1], dtype=weight.dtype)
    numbers = values.shape[1] * weight.shape[1]
    for part, places, vectors in _wide(classes, weight, dtype):
        wide = in_dtype(out[part], dtype)
        if wide.numel():
            some = as_numpy(values[part].detach().to(dtype).contiguous())
            _to_hidden_rows(len(some), numbers, some, places, vectors, as_numpy(wide))
        if wide.dtype != out.dtype:
            out[part] = wide
    return out


def add_to_weight_(
    values: Tensor, classes: Tensor, hidden: Tensor, weight_gradient: Tensor
) -> None:
    dtype = accumulation_dtype(hidden.dtype)
    flat = values.detach().to(dtype).flatten()
    entries = flat.nonzero().squeeze(-1)
    if not entries.numel() or not weight_gradient.numel():
        return
    ids, order = torch.sort(classes.flatten()[entries], stable=True)
    ids, counts = torch.unique_consecutive(ids, return_counts=True)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    entries = entries[order]
    sources = as_numpy(entries // values.shape[1]), as_numpy(flat[entries]), as_rows(hidden)
    total = weight_gradient.detach()
    if total.dtype == dtype:
        _run_to_weight(starts, ids, total, *sources)
        return
    for part in parts((ids.shape[0], total.shape[1]), WIDENED):
        some = ids[part]
        wide = total[some].to(dtype)
        ends = starts[part.start : part.stop + 1]
        _run_to_weight(ends, torch.arange(len(some)), wide, *sources)
        total[some] = wide.to(total.dtype)


def _run_to_weight(
    starts: Tensor, ids: Tensor, out: Tensor, rows: object, values: object, hidden: object
) -> None:
    first, last = int(starts[0]), int(starts[-1])
    _to_weight_rows(
        last - first, out.shape[1], first, as_numpy(starts), as_numpy(ids), as_numpy(out), rows,
        values, hidden,
    )  # fmt: skip


@by_rows
@njit(nogil=True, cache=True)
def _to_hidden_rows(start, stop, values, classes, weight, out):
    for row in range(start, stop):
        total = out[row]
        total[:] = 0.0
        for slot in range(values.shape[1]):
            if values[row, slot] != 0.0:
                add_scaled(total, values[row, slot], weight[classes[row, slot]])


@by_rows
@njit(nogil=True, cache=True)
def _to_weight_rows(start, stop, offset, starts, ids, out, rows, values, hidden):
    """Sums the classes whose first entry is in a range: threads share entries evenly."""
    total = np.empty(out.shape[1], out.dtype)
    group = np.searchsorted(starts, offset + start)
    while group < len(ids) and starts[group] < offset + stop:
        total[:] = 0.0
        for entry in range(starts[group], starts[group + 1]):
            add_scaled(total, values[entry], hidden[rows[entry]])
        add_scaled(out[ids[group]], total.dtype.type(1.0), total)
        group += 1


def scale_(values: Tensor, others: Sequence[Tensor], factor: Tensor) -> None:
    if factor.item() != 1.0:
        for each in (values, *others):
            each.mul_(factor)


def weighted_mean(losses: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    values = as_array(losses)
    loss, share = np.empty((), values.dtype), np.empty((), values.dtype)
    _weighted_mean(values, values[:0] if weights is None else as_array(weights), loss, share)
    return torch.from_numpy(loss), torch.from_numpy(share)


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _weighted_mean(losses, weights, loss, share):
    total, size = 0.0, float(len(losses))
    if len(weights):
        size = 0.0
        for i in range(len(losses)):
            # A loss of weight 0 may be NaN.
            total += losses[i] * weights[i] if weights[i] else 0.0
            size += weights[i]
    else:
        for i in range(len(losses)):
            total += losses[i]
    one = 1.0 / size if size != 0.0 else 0.0
    loss[()] = total * one
    share[()] = one
