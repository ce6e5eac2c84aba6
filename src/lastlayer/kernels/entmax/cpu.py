"""entmax on the CPU: one read for the peaks of blocks, then only the blocks that matter.

README.md beside this file has the derivation. Kinds are those of _solve.py.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer._torch import in_dtype
from lastlayer.kernels._arrays import as_rows, empty_rows
from lastlayer.kernels._blocks import BLOCK, bits, find_peaks, room_for_peaks
from lastlayer.kernels._threads import by_rows
from lastlayer.kernels.entmax._any_alpha import powers_of, room_for_any, solve_any
from lastlayer.kernels.entmax._four_rows import (
    LONGEST,
    LONGEST_BACKWARD,
    backward_row,
    room_for_four,
    solve_short,
)

# Sums may be reordered and so vectorised; NaN and infinities keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
# The largest float32 that becomes 0 in a narrower dtype: half of its smallest number.
_ROUNDS_TO_ZERO = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}


def forward(scores: Tensor, alpha: float, row_alpha: Tensor | None) -> Tensor:
    """Probabilities of each row, in the dtype of ``scores``."""
    rows, (out, result) = as_rows(scores), empty_rows(scores)
    kind, alphas = _alphas(alpha, row_alpha)
    if rows.size:
        _forward_rows(*rows.shape, rows, out, alphas, kind)
    return in_dtype(result, scores.dtype)


def backward(probs: Tensor, grad: Tensor, alpha: float, row_alpha: Tensor | None) -> Tensor:
    """``s * (grad - <s, grad> / <s, 1>)`` with ``s = p ** (2 - alpha)`` on the support."""
    rows, upstream = as_rows(probs), as_rows(grad)
    upstream = upstream.astype(rows.dtype, copy=False)
    out, result = empty_rows(probs)
    if rows.size:
        kind, alphas = _alphas(alpha, row_alpha)
        if row_alpha is None and alpha == 1.0:
            kind = 3
        _backward_rows(*rows.shape, rows, bits(rows), upstream, out, alphas, kind)
    return in_dtype(result, grad.dtype)


def support(
    scores: Tensor,
    alpha: float,
    row_alpha: Tensor | None,
    max_support: int,
    wide: bool = False,
    shrink: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The non-zeros of each row in ascending order of class, padded with (0, class 0)."""
    if wide and scores.itemsize < 4:
        scores = scores.float()
    if shrink != 1.0:
        scores = scores * shrink
    rows = as_rows(scores)
    values = np.zeros((len(rows), max_support), rows.dtype)
    indices = np.zeros((len(rows), max_support), np.int64)
    size = np.zeros(len(rows), np.int64)
    if rows.size:
        kind, alphas = _alphas(alpha, row_alpha)
        too_small = _ROUNDS_TO_ZERO.get(scores.dtype, 0.0)
        _support_rows(*rows.shape, rows, values, indices, size, alphas, kind, too_small)
    batch = scores.shape[:-1]
    return (
        torch.from_numpy(values).view(*batch, max_support).to(scores.dtype),
        torch.from_numpy(indices).view(*batch, max_support),
        torch.from_numpy(size).view(batch),
    )


def _alphas(alpha: float, row_alpha: Tensor | None) -> tuple[int, np.ndarray]:
    if row_alpha is not None:
        return 0, row_alpha.detach().reshape(-1).double().contiguous().numpy()
    return _one_alpha(alpha)


@lru_cache(maxsize=64)
def _one_alpha(alpha: float) -> tuple[int, np.ndarray]:
    return {2.0: 1, 1.5: 2}.get(alpha, 0), np.array([alpha])


@njit(nogil=True, cache=True, fastmath=_FAST, error_model="numpy")
def _forward(start, stop, rows, out, alphas, kind):
    n = rows.shape[1]
    peaks = room_for_peaks(rows)
    probs = np.empty(n + BLOCK, rows.dtype)
    column = np.empty(n + 1, np.int32)
    short = kind > 0 and n <= LONGEST
    four = room_for_four(rows, n if short else 0)
    copies = room_for_any(n if kind == 0 else 0)
    row = start
    while row < stop:
        after = min(row + 4, stop)
        if short and solve_short(rows[row:after], out[row:after], four, kind):
            row = after
            continue
        for i in range(n):
            out[row, i] = 0.0
        state = find_peaks(rows, row, peaks)
        if state < 0 or not _alpha_of(alphas, row) >= 1.0:
            out[row] = math.nan
        elif state > 0 and short:
            solve_short(rows[row : row + 1], out[row : row + 1], four, kind)
        elif state > 0:
            alpha = _alpha_of(alphas, row)
            count = _solve(rows, row, peaks, probs, column, copies, alpha, kind)
            for i in range(count):
                out[row, column[i]] = probs[i]
        row += 1


@njit(nogil=True, cache=True, fastmath=_FAST, error_model="numpy")
def _support(start, stop, rows, values, indices, size, alphas, kind, too_small):
    n = rows.shape[1]
    peaks = room_for_peaks(rows)
    probs = np.empty(n + BLOCK, rows.dtype)
    column = np.empty(n + 1, np.int32)
    short = kind > 0 and n <= LONGEST
    four = room_for_four(rows, n if short else 0)
    copies = room_for_any(n if kind == 0 else 0)
    # Short rows are solved as for the dense result, so that both agree to the last bit.
    dense = np.empty((4, n if short else 0), rows.dtype)
    everywhere = np.arange(n if short else 0)
    row = start
    while row < stop:
        after = min(row + 4, stop)
        if short and solve_short(rows[row:after], dense[: after - row], four, kind):
            for each in range(row, after):
                one = dense[each - row]
                size[each] = _keep(one, everywhere, n, too_small, values, indices, each)
            row = after
            continue
        state = find_peaks(rows, row, peaks)
        if state < 0 or not _alpha_of(alphas, row) >= 1.0:
            size[row] = n
            values[row, :n] = math.nan
            for i in range(min(n, values.shape[1])):
                indices[row, i] = i
            row += 1
            continue
        if state > 0 and short:
            solve_short(rows[row : row + 1], dense[:1], four, kind)
            size[row] = _keep(dense[0], everywhere, n, too_small, values, indices, row)
        elif state > 0:
            alpha = _alpha_of(alphas, row)
            count = _solve(rows, row, peaks, probs, column, copies, alpha, kind)
            size[row] = _keep(probs, column, count, too_small, values, indices, row)
        row += 1


@njit(nogil=True)
def _keep(probs, column, count, too_small, values, indices, row):
    """Writes what is large enough, as far as there is room; says how many that would be."""
    room, kept = values.shape[1], 0
    for i in range(count):
        if probs[i] > too_small:
            if kept < room:
                values[row, kept] = probs[i]
                indices[row, kept] = column[i]
            kept += 1
    return kept


@njit(nogil=True)
def _alpha_of(alphas, row):
    """The alpha of a row, or the one that all rows share."""
    return alphas[row] if len(alphas) > 1 else alphas[0]


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _solve(rows, row, peaks, probs, column, copies, alpha, kind):
    """Probabilities of the candidates, with their columns beside; says how many there are.

    ``probs`` has room for a block more than a row: it is filled up with what has no share.
    """
    n = rows.shape[1]
    peak = peaks[-1]
    edge = rows.dtype.type(-math.inf if alpha == 1.0 else -1.0 / (alpha - 1.0))
    count = 0
    for block in range(len(peaks) - 1):
        if peaks[block] - peak > edge:
            for i in range(block * BLOCK, min(n, (block + 1) * BLOCK)):
                # Written in any case: a branch would be guessed wrong half of the time.
                distance = rows[row, i] - peak
                probs[count] = distance
                column[count] = i
                count += distance > edge
    full = (count + BLOCK - 1) // BLOCK * BLOCK
    for i in range(count, full):
        probs[i] = -math.inf
    if kind == 1:
        _solve_sparsemax(probs, full)
    elif kind == 2:
        _solve_entmax15(probs, full)
    else:
        solve_any(probs, copies, count, alpha - 1.0)
    return count


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _solve_sparsemax(x, count):
    """Newton's method on the sum of the margins climbs to the threshold and never passes it.

    A block is summed in the dtype of ``x``, which may be reordered; blocks in float64.
    """
    zero, one = x.dtype.type(0), x.dtype.type(1)
    # Any margin times this is at least 1: a count that, unlike a comparison, is vectorised.
    large = x.dtype.type(1e30)
    threshold = x.dtype.type(-1)
    while True:
        total = 0.0
        weight = 0.0
        for first in range(0, count, BLOCK):
            part, members = zero, zero
            for i in range(BLOCK):
                margin = x[first + i] - threshold
                margin = margin if margin > zero else zero
                part += margin
                members += min(margin * large, one)
            total += part
            weight += members
        following = x.dtype.type(threshold + (total - 1.0) / weight)
        if not following > threshold:
            break
        threshold = following
    missing = x.dtype.type((1.0 - total) / weight)
    for first in range(0, count, BLOCK):
        for i in range(BLOCK):
            margin = x[first + i] - threshold
            share = margin + missing
            share = share if share > zero else zero
            x[first + i] = share if margin > zero else zero


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _solve_entmax15(x, count):
    """As :func:`_solve_sparsemax`, with the Euclidean norm of the margins in place of the sum."""
    zero, half = x.dtype.type(0), x.dtype.type(0.5)
    threshold = x.dtype.type(-1)
    while True:
        total = 0.0
        weight = 0.0
        for first in range(0, count, BLOCK):
            part, slopes = zero, zero
            for i in range(BLOCK):
                margin = half * x[first + i] - threshold
                margin = margin if margin > zero else zero
                part += margin * margin
                slopes += margin
            total += part
            weight += slopes
        norm = math.sqrt(total)
        following = x.dtype.type(threshold + norm * (norm - 1.0) / weight)
        if not following > threshold:
            break
        threshold = following
    missing = x.dtype.type((1.0 - total) / weight)
    for first in range(0, count, BLOCK):
        for i in range(BLOCK):
            margin = half * x[first + i] - threshold
            margin = margin if margin > zero else zero
            share = margin * (margin + missing)
            x[first + i] = share if share > zero else zero


@njit(nogil=True, cache=True, fastmath=_FAST, error_model="numpy")
def _backward(start, stop, probs, prob_bits, grad, out, alphas, kind):
    n = probs.shape[1]
    column = np.empty(n + 1, np.int32)
    slopes = np.empty(n + 1, np.float64)
    for row in range(start, stop):
        if kind > 0 and n <= LONGEST_BACKWARD:
            backward_row(probs, grad, out, row, kind)
            continue
        for i in range(n):
            out[row, i] = 0.0
        count = _pick_support(probs, prob_bits, row, slopes, column)
        _to_slopes(slopes, count, _alpha_of(alphas, row) - 1.0, kind)
        # Where alpha > 2 one slope can dwarf all others; measured from its gradient nothing
        # cancels.
        total, steepest, shift = 0.0, 0.0, 0.0
        for i in range(count):
            slope = slopes[i]
            total += slope
            if not slope <= steepest:
                steepest, shift = slope, grad[row, column[i]]
        mean = 0.0
        for i in range(count):
            mean += slopes[i] * (grad[row, column[i]] - shift)
        mean /= total if count else 1.0
        for i in range(count):
            out[row, column[i]] = slopes[i] * (grad[row, column[i]] - shift - mean)


@njit(nogil=True)
def _pick_support(probs, prob_bits, row, shares, column):
    """The probabilities of a row that are not 0, with their columns; says how many there are."""
    n = probs.shape[1]
    count = 0
    for first in range(0, n, BLOCK):
        if first + BLOCK <= n and _all_zero(prob_bits, row, first):
            continue
        for i in range(first, min(n, first + BLOCK)):
            shares[count] = probs[row, i]
            column[count] = i
            count += probs[row, i] != 0.0
    return count


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _to_slopes(shares, count, excess, kind):
    """``p ** (2 - alpha)`` in place of p."""
    if kind == 1:
        for i in range(count):
            shares[i] /= shares[i]
    elif kind == 2:
        for i in range(count):
            shares[i] = math.sqrt(shares[i])
    elif kind == 0:
        powers_of(shares, count, 1.0 - excess)


@njit(nogil=True)
def _all_zero(prob_bits, row, first):
    any_bit = prob_bits[row, first]
    for i in range(BLOCK):
        any_bit |= prob_bits[row, first + i]
    return any_bit == 0


_forward_rows = by_rows(_forward)
_support_rows = by_rows(_support)
_backward_rows = by_rows(_backward)
