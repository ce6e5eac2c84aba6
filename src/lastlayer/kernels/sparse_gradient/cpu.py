"""Products with a sparse score gradient on the CPU: only vectors with a part in them are read.

To the rows of hidden, the class vectors of a row are added up. To the classes, the entries are
sorted by class, and each class that has any adds up its rows; a class belongs to one thread, so
that the order of a sum is fixed.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._arrays import as_rows
from lastlayer.kernels._threads import by_rows

# Numbers of half precision that are gathered and widened at a time.
_WIDENED = 1 << 20


def to_hidden(values: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
    """As the reference's."""
    dtype = accumulation_dtype(weight.dtype)
    out = torch.empty(values.shape[0], weight.shape[1], dtype=weight.dtype)
    values = values.detach().to(dtype)
    if weight.dtype == dtype:
        _run_to_hidden(values, classes, weight, out)
        return out
    step = max(1, _WIDENED // max(1, values.shape[1] * weight.shape[1]))
    for first in range(0, values.shape[0], step):
        part = slice(first, first + step)
        chosen = classes[part]
        vectors = weight[chosen.flatten()].to(dtype)
        places = torch.arange(chosen.numel()).view(chosen.shape)
        wide = torch.empty(chosen.shape[0], weight.shape[1], dtype=dtype)
        _run_to_hidden(values[part], places, vectors, wide)
        out[part] = wide
    return out


def add_to_weight_(
    values: Tensor, classes: Tensor, hidden: Tensor, weight_gradient: Tensor
) -> None:
    """As the reference's."""
    dtype = accumulation_dtype(hidden.dtype)
    flat = values.detach().to(dtype).flatten()
    entries = flat.nonzero().squeeze(-1)
    if not entries.numel() or not weight_gradient.numel():
        return
    ids, order = torch.sort(classes.flatten()[entries], stable=True)
    ids, counts = torch.unique_consecutive(ids, return_counts=True)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    entries = entries[order]
    sources = (entries // values.shape[1]).numpy(), flat[entries].numpy(), as_rows(hidden)
    total = weight_gradient.detach()
    if total.dtype == dtype:
        _run_to_weight(starts, ids, total, *sources)
        return
    step = max(1, _WIDENED // total.shape[1])
    for first in range(0, ids.shape[0], step):
        some = ids[first : first + step]
        wide = total[some].to(dtype)
        _run_to_weight(starts[first : first + step + 1], torch.arange(len(some)), wide, *sources)
        total[some] = wide.to(total.dtype)


def _run_to_hidden(values: Tensor, classes: Tensor, weight: Tensor, out: Tensor) -> None:
    if out.numel():
        numbers = values.shape[1] * weight.shape[1]
        arrays = (each.contiguous().numpy() for each in (values, classes))
        _to_hidden_rows(values.shape[0], numbers, *arrays, weight.detach().numpy(), out.numpy())


def _run_to_weight(
    starts: Tensor, ids: Tensor, out: Tensor, rows: object, values: object, hidden: object
) -> None:
    first, last = int(starts[0]), int(starts[-1])
    _to_weight_rows(
        last - first, out.shape[1], first, starts.numpy(), ids.numpy(), out.numpy(), rows, values,
        hidden,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _to_hidden(start, stop, values, classes, weight, out):
    for row in range(start, stop):
        total = out[row]
        total[:] = 0.0
        for slot in range(values.shape[1]):
            if values[row, slot] != 0.0:
                _add_scaled(total, values[row, slot], weight[classes[row, slot]])


@njit(nogil=True, cache=True)
def _to_weight(start, stop, offset, starts, ids, out, rows, values, hidden):
    """The classes whose entries start in a range: it is entries that threads share evenly."""
    total = np.empty(out.shape[1], out.dtype)
    group = np.searchsorted(starts, offset + start)
    while group < len(ids) and starts[group] < offset + stop:
        total[:] = 0.0
        for entry in range(starts[group], starts[group + 1]):
            _add_scaled(total, values[entry], hidden[rows[entry]])
        _add_scaled(out[ids[group]], total.dtype.type(1.0), total)
        group += 1


@njit(nogil=True, fastmath={"contract"})
def _add_scaled(total, factor, vector):
    for i in range(len(total)):
        total[i] += factor * vector[i]


_to_hidden_rows = by_rows(_to_hidden)
_to_weight_rows = by_rows(_to_weight)
