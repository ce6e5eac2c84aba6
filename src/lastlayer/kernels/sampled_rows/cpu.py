"""Losses of rows of drawn classes on the CPU: a row stays in the cache between its passes."""

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._torch import accumulation_dtype, as_numpy, in_dtype
from lastlayer.kernels._cpu import as_array, by_rows
from lastlayer.kernels._cpu_math import BLOCK, FAST, exp, largest, multiply


def forward_(
    scores: Tensor, gradient: Tensor, first: Tensor, second: Tensor, columns: Tensor,
    offset: Tensor, ids: Tensor, target: Tensor, shift: Tensor | None, exact: Tensor | None,
    row_scale: Tensor | None, factor: float, n_exact: int, logistic: bool, drop_hits: bool,
    average: bool, adds: bool,
) -> None:  # fmt: skip
    dtype = accumulation_dtype(scores.dtype)
    n, m = scores.shape
    wide = in_dtype(scores.detach(), dtype).contiguous()
    rows = as_numpy(wide)
    if n:
        _sampled_rows(
            n, 2 * m, rows, _lists(as_array(offset, dtype)), _lists(as_array(ids)),
            as_array(target),
            np.zeros(n, rows.dtype) if shift is None else as_array(shift, dtype),
            np.full(n, -math.inf, rows.dtype) if exact is None else as_array(exact, dtype),
            np.empty(0, rows.dtype) if row_scale is None else as_array(row_scale, dtype),
            as_numpy(first), as_numpy(second), factor, n_exact, logistic, drop_hits, average,
        )  # fmt: skip
    if row_scale is not None and gradient.data_ptr() != wide.data_ptr():
        gradient.copy_(wide)
    if row_scale is not None and columns.numel():
        columns = columns if adds else columns.zero_()
        columns[0] += wide.sum(0)


def _lists(values: NDArray[Any]) -> NDArray[Any]:
    """One list for all rows, or one for each, as a matrix."""
    return values if values.ndim == 2 else values.reshape(1, -1)


@by_rows
@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _sampled_rows(
    start, stop, scores, offset, ids, target, shift, exact, row_scale, first, second, factor,
    n_exact, logistic, drop_hits, average,
):  # fmt: skip
    m = scores.shape[1]
    real, lanes = scores.dtype.type, np.empty(BLOCK, scores.dtype)
    for row in range(start, stop):
        x = scores[row]
        added, named = offset[row if len(offset) > 1 else 0], ids[row if len(ids) > 1 else 0]
        for i in range(m):
            x[i] = x[i] * real(factor) + added[i]
        if drop_hits:
            for one in target[row]:
                for i in range(m):
                    x[i] = -np.inf if one >= 0 and named[i] == one else x[i]
        move = real(shift[row])
        if average:
            move -= real(math.log(max(1, _count(added, named, target[row], drop_hits, n_exact))))
        for i in range(n_exact, m):
            x[i] += move
        scale = real(row_scale[row] * factor) if len(row_scale) else real(0.0)
        if logistic:
            loss, slope = 0.0, 0.0
            for i in range(m):
                # e^-|x|: neither of both overflows.
                small = math.exp(-abs(x[i]))
                up = x[i] > real(0.0)
                loss += math.log1p(small) + (x[i] if up else real(0.0))
                share = (1.0 if up else small) / (1.0 + small)
                share = x[i] if math.isnan(x[i]) else share
                slope += share
                if len(row_scale):
                    x[i] = share * scale
            first[row], second[row] = loss, slope
            if scale == real(0.0) and len(row_scale):
                x[:] = real(0.0)
            continue
        peak = largest(x, lanes, -math.inf)
        origin = real(0.0) if peak == -math.inf else peak
        head, drawn, squares = _to_shares(x, n_exact, origin)
        total = head + drawn
        first[row] = origin + math.log(total) if total > 0.0 else -math.inf
        if math.isnan(total):
            first[row] = math.nan
        second[row] = drawn * drawn / squares if squares > 0.0 else 0.0
        if squares == 0.0 and drawn > 0.0:
            second[row] = 1.0
        if len(row_scale):
            everything = total + math.exp(exact[row] - origin)
            if scale == real(0.0):
                x[:] = real(0.0)
            else:
                multiply(x, scale / real(everything) if everything != 0.0 else real(0.0))


@njit(nogil=True)
def _count(added, ids, target, drop_hits, n_exact):
    """How many of the drawn columns count."""
    count = 0
    for i in range(n_exact, len(added)):
        hit = False
        if drop_hits:
            for one in target:
                hit |= ids[i] == one
        count += added[i] != -np.inf and not hit
    return count


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _to_shares(x, n_exact, origin):
    """In place; sums of the first columns and of the drawn ones, and of the latter's squares."""
    zero = x.dtype.type(0.0)
    for i in range(len(x)):
        x[i] = exp(x[i] - origin)
    head, drawn, squares = zero, zero, zero
    for i in range(n_exact):
        head += x[i]
    for i in range(n_exact, len(x)):
        drawn += x[i]
        squares += x[i] * x[i]
    return head, drawn, squares
