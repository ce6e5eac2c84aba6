"""InfoNCE on a CPU: torch's vectorised operations on blocks of rows that fit in the cache."""

import math
from typing import Any

import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._torch import as_numpy
from lastlayer.kernels._cpu import as_array, as_rows, by_rows, empty_rows
from lastlayer.kernels._cpu_math import FAST, dot

# Scores per block of rows.
_NUMBERS = 1 << 18
# The largest scale S for which the exponentials of all numbers from -2S to 0 are normal numbers.
_LARGEST = 42.0
# A squared length between this and its inverse has neither overflowed nor underflowed.
_SMALLEST = 1e-30


def statistics_(
    scores: Tensor, scale: Tensor, own: int, query_groups: Tensor | None, key_groups: Tensor | None,
    positive: bool, bounded: bool, row_lse: Tensor, row_positive: Tensor, column_lse: Tensor,
    column_positive: Tensor,
) -> None:  # fmt: skip
    n, m = scores.shape
    row_positive.zero_()
    columns = column_lse.shape[0] > 0
    room = row_lse.new_empty(min(n, _rows(m)), m)
    one_exponential = bounded and float(scale) <= _LARGEST
    column_total = torch.zeros_like(column_lse) if columns else column_lse
    other_room = room if one_exponential else torch.empty_like(room)
    for first, part in _blocks(n, m):
        count = part.stop - part.start
        values = _scaled(_some(scores, part), scale, _some(room, slice(count)))
        start = own + first
        mine = _own(values, start)
        pulled = _some(row_positive, part)
        same = _same(query_groups, key_groups, part, start, positive)
        if same is not None and positive:
            # Multiplying by a mask would turn infinite scores that are not positives into NaN.
            hits = torch.where(same, values, 0.0)
            torch.sum(hits, 1, out=pulled)
            if column_positive.shape[0]:
                column_positive += hits.sum(0)
        else:
            pulled[: mine.shape[0]] = mine
            if same is not None:
                values.masked_fill_(same, -torch.inf)
        lse = _some(row_lse, part)
        if one_exponential:
            torch.sum(values.sub_(scale).exp_(), 1, out=lse).log_().add_(scale)
            if columns:
                column_total += values.sum(0)
            continue
        shares = other_room[:count]
        peak = _origin(values.amax(1)) if m else row_lse.new_zeros(count)
        torch.sub(values, peak.unsqueeze(1), out=shares).exp_()
        torch.sum(shares, 1, out=lse).log_().add_(peak)
        if columns:
            peak = _origin(torch.maximum(values.amax(0), column_lse))
            torch.sub(values, peak, out=shares).exp_()
            column_lse.sub_(peak).exp_().add_(shares.sum(0)).log_().add_(peak)
    if one_exponential and columns:
        column_lse.copy_(torch.logaddexp(column_lse, column_total.log_().add_(scale)))


def weights_(
    scores: Tensor, scale: Tensor, own: int, query_groups: Tensor | None, key_groups: Tensor | None,
    positive: bool, bounded: bool, row_lse: Tensor, row_push: Tensor, row_pull: Tensor,
    column_lse: Tensor, column_push: Tensor, column_pull: Tensor, out: Tensor,
) -> None:  # fmt: skip
    n, m = scores.shape
    columns = column_lse.shape[0] > 0
    room = row_lse.new_empty(min(n, _rows(m)), m)
    other_room = torch.empty_like(room) if columns else room
    one_exponential = bounded and columns and float(scale) <= _LARGEST
    by_column = column_push * torch.exp(scale - column_lse) if one_exponential else column_push
    for first, part in _blocks(n, m):
        here = slice(part.stop - part.start)
        values = _scaled(_some(scores, part), scale, _some(room, here))
        shares = _some(other_room, here)
        lse, push, pull = (_some(each, part) for each in (row_lse, row_push, row_pull))
        if one_exponential:
            by_row = push * torch.exp(scale - lse)
            torch.add(by_row.unsqueeze(1), by_column, out=shares).mul_(values.sub_(scale).exp_())
        else:
            torch.sub(values, lse.unsqueeze(1), out=shares).exp_()
            shares.mul_(push.unsqueeze(1))
            if columns:
                shares.addcmul_(values.sub_(column_lse).exp_(), by_column)
        start = own + first
        mine = _own(shares, start)
        same = _same(query_groups, key_groups, part, start, positive)
        if same is not None and positive:
            pulls = pull.unsqueeze(1)
            if column_pull.shape[0]:
                pulls = pulls + column_pull
            shares += torch.where(same, pulls, 0.0)
        else:
            mine += pull[: mine.shape[0]]
            if same is not None:
                shares.masked_fill_(same, 0.0)
        _some(out, part).copy_(shares)


def unit_rows_(rows: Tensor, out: Tensor, normalize: bool) -> None:
    if not normalize:
        out.copy_(rows)
        return
    given = as_rows(rows)
    made, result = (None, out) if _is_wide(out, given) else empty_rows(rows)
    _unit_rows(*given.shape, given, as_array(out) if made is None else made)
    if made is not None:
        out.copy_(result)


def row_gradients_(
    rows: Tensor, gradient: Tensor, factor: Tensor, normalize: bool, out: Tensor, along: Tensor
) -> None:
    given, slope = as_rows(rows), as_array(gradient, along.dtype)
    made, result = (None, out) if _is_wide(out, given) else empty_rows(rows)
    into = as_array(out) if made is None else made
    _gradient_rows(*given.shape, given, slope, factor.item(), normalize, into, as_numpy(along))
    if made is not None:
        out.copy_(result)


def _is_wide(out: Tensor, rows: NDArray[Any]) -> bool:
    """Whether a kernel can write its result for ``rows`` directly to ``out``."""
    return out.itemsize == rows.itemsize and out.is_contiguous()


@by_rows
@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _unit_rows(start, stop, rows, out):
    for row in range(start, stop):
        inverse = _inverse_length(rows[row])
        for i in range(rows.shape[1]):
            out[row, i] = rows[row, i] * inverse


@by_rows
@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _gradient_rows(start, stop, rows, gradient, factor, normalize, out, along):
    real = rows.dtype.type
    factor = real(factor)
    for row in range(start, stop):
        inverse = _inverse_length(rows[row]) if normalize else real(1.0)
        together = real(0.0)
        for i in range(rows.shape[1]):
            together += (rows[row, i] * inverse) * (gradient[row, i] * factor)
        along[row] = together
        back = together * inverse if normalize else real(0.0)
        for i in range(rows.shape[1]):
            slope = gradient[row, i] * factor
            out[row, i] = (slope - rows[row, i] * back) * inverse


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _inverse_length(x):
    real, squares = x.dtype.type, dot(x, x)
    if _SMALLEST < squares < 1.0 / _SMALLEST:
        return real(1.0 / math.sqrt(squares))
    # The squares overflowed or underflowed, or the row is all zeros.
    size, total = 0.0, 0.0
    for i in range(len(x)):
        size = max(size, abs(float(x[i])))
    if size == 0.0:
        return real(squares)
    for i in range(len(x)):
        part = x[i] / size
        total += part * part
    return real(1.0 / (size * math.sqrt(total)))


def _some(values: Tensor, part: slice) -> Tensor:
    """``values[part]``, without slicing if that is all of ``values``, since it costs host time."""
    return values if part.stop - (part.start or 0) == values.shape[0] else values[part]


def _scaled(scores: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """``scores * scale`` in the dtype of ``out``, which may be wider."""
    if scores.dtype == out.dtype:
        return torch.mul(scores, scale, out=out)
    return out.copy_(scores).mul_(scale)


def _rows(m: int) -> int:
    return max(8, _NUMBERS // max(1, m))


def _blocks(n: int, m: int) -> list[tuple[int, slice]]:
    step = _rows(m)
    return [(first, slice(first, min(n, first + step))) for first in range(0, n, step)]


def _own(values: Tensor, start: int) -> Tensor:
    """A view of the entries of own keys; it is shorter than the rows if the columns end before."""
    return values[:, min(start, values.shape[1]) :].diagonal()


def _same(
    query_groups: Tensor | None, key_groups: Tensor | None, part: slice, start: int, own: bool
) -> Tensor | None:
    """Which keys have the group of each query; the entries of own keys are set to ``own``."""
    if query_groups is None or key_groups is None:
        return None
    same = query_groups[part].unsqueeze(1) == key_groups
    _own(same, start).fill_(own)
    return same


def _origin(peak: Tensor) -> Tensor:
    return peak.masked_fill_(peak == -torch.inf, 0.0)
