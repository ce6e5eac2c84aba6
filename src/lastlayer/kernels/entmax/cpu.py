"""entmax on the CPU: one pass finds the maximum of each block, then few blocks are read again.

README.md has the derivation. ``kind`` is 1 for sparsemax, 2 for alpha 1.5, and 0 for any alpha.
Short rows are solved four at once: the threshold of a row is a chain of dependent sums, and
interleaving the chains of four rows takes little longer than one.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._torch import in_dtype
from lastlayer.kernels._cpu import as_array, as_rows, by_rows, empty_array, empty_rows
from lastlayer.kernels._cpu_math import (
    BLOCK,
    FAST,
    exp,
    find_peaks,
    lanes_of,
    log,
    margins,
    pick_above,
    room_for_peaks,
    squares,
    top_of_rest,
    turn,
)

# Passed instead of indices and sizes if the result is dense.
_NO_LISTS = np.empty((0, 0), np.int64), np.empty(0, np.int64)
_NO_GRADIENT = np.empty(0, np.float64)
# The largest float32 that rounds to 0 in half precision: half of the smallest positive number.
_ROUNDS_TO_ZERO = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}


def forward(scores: Tensor, alpha: float, row_alpha: Tensor | None) -> Tensor:
    rows, (out, result) = as_rows(scores), empty_rows(scores)
    kind, alphas = _alphas(alpha, row_alpha)
    if rows.size:
        _solve_rows(*rows.shape, rows, out, *_NO_LISTS, alphas, kind, 0.0, False)
    return in_dtype(result, scores.dtype)


def log_(scores: Tensor, alpha: float) -> None:
    rows = as_rows(scores)
    if rows.size:
        kind, alphas = _one_alpha(alpha)
        _solve_rows(*rows.shape, rows, rows, *_NO_LISTS, alphas, kind, 0.0, True)


def backward(probs: Tensor, grad: Tensor, alpha: float, row_alpha: Tensor | None) -> Tensor:
    return _backward(probs, grad, *_alphas_of_slopes(alpha, row_alpha), _NO_GRADIENT)


def gradients(probs: Tensor, grad: Tensor, row_alpha: Tensor) -> tuple[Tensor, Tensor]:
    by_alpha = np.zeros(probs.shape[:-1], np.float64)
    made = _backward(probs, grad, *_alphas(0.0, row_alpha), by_alpha.reshape(-1))
    return made, in_dtype(torch.from_numpy(by_alpha), row_alpha.dtype)


def _backward(
    probs: Tensor, grad: Tensor, kind: int, alphas: NDArray[Any], by_alpha: NDArray[Any]
) -> Tensor:
    rows, upstream = as_rows(probs), as_rows(grad)
    upstream = upstream.astype(rows.dtype, copy=False)
    out, result = empty_rows(probs)
    if rows.size:
        _backward_rows(*rows.shape, rows, upstream, out, alphas, by_alpha, kind)
    return in_dtype(result, grad.dtype)


def forward_columns(scores: Tensor, alpha: float, row_alpha: Tensor | None) -> Tensor:
    """:func:`forward` for a view with its first dimension moved last, as is the result."""
    return _by_columns(_solve_columns, *_alphas(alpha, row_alpha), scores)


def backward_columns(probs: Tensor, grad: Tensor, alpha: float, row_alpha: Tensor | None) -> Tensor:
    """:func:`backward` for the results of :func:`forward_columns`."""
    return _by_columns(_backward_columns, *_alphas_of_slopes(alpha, row_alpha), probs, grad)


def _by_columns(
    run: Callable[..., None], kind: int, alphas: NDArray[Any], *tensors: Tensor
) -> Tensor:
    given = [as_array(each.movedim(-1, 0)) for each in tensors]
    into, made = empty_array(given[0].shape, tensors[0].dtype)
    if into.size:
        shape = len(into), into.size // len(into)
        matrices = [each.reshape(shape) for each in (*given, into)]
        run(*reversed(shape), *matrices, alphas, kind)
    return made.movedim(0, -1)


def support(
    scores: Tensor, alpha: float, row_alpha: Tensor | None, max_support: int, wide: bool = False,
    shrink: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
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
        _solve_rows(*rows.shape, rows, values, indices, size, alphas, kind, too_small, False)
    batch = scores.shape[:-1]
    return (
        torch.from_numpy(values).view(*batch, max_support).to(scores.dtype),
        torch.from_numpy(indices).view(*batch, max_support),
        torch.from_numpy(size).view(batch),
    )


# Entries of a tile of columns; a few tiles fit in the cache.
_IN_CACHE = 1 << 15


def _alphas(alpha: float, row_alpha: Tensor | None) -> tuple[int, np.ndarray]:
    if row_alpha is not None:
        return 0, as_array(row_alpha.detach(), torch.float64).reshape(-1)
    return _one_alpha(alpha)


def _alphas_of_slopes(alpha: float, row_alpha: Tensor | None) -> tuple[int, np.ndarray]:
    """As :func:`_alphas`, but kind 3 for softmax."""
    kind, alphas = _alphas(alpha, row_alpha)
    return (3 if row_alpha is None and alpha == 1.0 else kind), alphas


@lru_cache(maxsize=64)
def _one_alpha(alpha: float) -> tuple[int, np.ndarray]:
    return {2.0: 1, 1.5: 2}.get(alpha, 0), np.array([alpha])


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _solve_some(start, stop, rows, out, indices, size, alphas, kind, too_small, logs):
    """Writes dense probabilities, or their logarithms, to ``out``, which may be ``rows``.

    If ``size`` is not empty, only non-zeros are written, with their indices and number per row.
    """
    n, compact = rows.shape[1], len(size) > 0
    nothing = rows.dtype.type(-math.inf if logs else 0.0)
    peaks = room_for_peaks(rows)
    probs = np.empty(n + BLOCK, rows.dtype)
    column = np.empty(n + 1, np.int32)
    short = kind > 0 and n <= LONGEST and not logs
    # Four rows, padded with -inf to whole pairs of vectors.
    pair = 2 * lanes_of(rows.itemsize)
    four = np.full((4, (n + pair - 1) // pair * pair if short else 0), -np.inf, rows.dtype)
    # Copies of the distances of a row in float32, which is faster, and in float64.
    any_n = n + BLOCK if kind == 0 else 0
    copies = np.empty(any_n, np.float32), np.empty(any_n, np.float64)
    # Short rows are solved as for the dense result, so that both results are identical.
    dense = np.empty((4, n if short and compact else 0), rows.dtype)
    everywhere = np.arange(dense.shape[1])
    row = start
    while row < stop:
        after = min(row + 4, stop)
        into = dense[: after - row] if compact else out[row:after]
        if short and solve_short(rows[row:after], into, four, kind):
            if compact:
                for each in range(row, after):
                    one = into[each - row]
                    size[each] = _keep(one, everywhere, n, too_small, out, indices, each)
            row = after
            continue
        state, alpha = find_peaks(rows, row, peaks), alphas[row if len(alphas) > 1 else 0]
        if state < 0 or not alpha >= 1.0:
            out[row, :n] = math.nan
            if compact:
                size[row] = n
                for i in range(min(n, out.shape[1])):
                    indices[row, i] = i
        elif state > 0 and short:
            solve_short(rows[row : row + 1], into[:1], four, kind)
            if compact:
                size[row] = _keep(into[0], everywhere, n, too_small, out, indices, row)
        else:
            count = 0
            if state > 0:
                count = _solve(rows, row, peaks, probs, column, copies, alpha, kind)
            if compact:
                size[row] = _keep(probs, column, count, too_small, out, indices, row)
                count = 0
            else:
                out[row] = nothing
            if logs:
                _to_logs(probs, count)
            for i in range(count):
                out[row, column[i]] = probs[i]
        row += 1


@njit(nogil=True, fastmath=FAST)
def _to_logs(probs, count):
    for i in range(count):
        share = probs[i]
        probs[i] = log(share) if share > 0.0 else -math.inf


@njit(nogil=True)
def _keep(probs, column, count, too_small, values, indices, row):
    """Writes the probabilities above ``too_small`` that fit; returns how many there are in all."""
    room, kept = values.shape[1], 0
    for i in range(count):
        if probs[i] > too_small:
            if kept < room:
                values[row, kept] = probs[i]
                indices[row, kept] = column[i]
            kept += 1
    return kept


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _solve(rows, row, peaks, probs, column, copies, alpha, kind):
    """Writes the probabilities and columns of the candidates of a row; returns their number.

    ``probs`` has room for one block more than a row, for padding. The peaks are a part of the row,
    so their unknown bounds that of the row, see README.md.
    """
    n, peak, excess = rows.shape[1], peaks[-1], alpha - 1.0
    for block in range(len(peaks) - 1):
        probs[block] = peaks[block] - peak
    # Each call is inlined with a constant kind, which gives a specialised loop.
    if kind == 1:
        edge = start = _bound_margins(probs, len(peaks) - 1, 1)
    elif kind == 2:
        start = _bound_margins(probs, len(peaks) - 1, 2)
        edge = start + start
    else:
        bound, edge = bound_any(probs, copies[0], len(peaks) - 1, excess)
    count = 0
    for block in range(len(peaks) - 1):
        if peaks[block] - peak > edge:
            first = block * BLOCK
            stop = min(n, first + BLOCK)
            count = pick_above(rows, row, first, stop, peak, edge, probs, column, count)
    if kind == 1:
        _solve_margins(probs, count, start, 1)
    elif kind == 2:
        _solve_margins(probs, count, start, 2)
    else:
        solve_any(probs, copies, count, excess, bound)
    return count


@njit(nogil=True)
def _filled_up(x, count, step):
    """Pads ``x[:count]`` with -inf to a multiple of ``step``; returns the padded length."""
    full = (count + step - 1) // step * step
    for i in range(count, full):
        x[i] = -math.inf
    return full


@njit(nogil=True, forceinline=True, fastmath=FAST, error_model="numpy")
def _bound_margins(x, count, kind):
    """A lower bound on the threshold of a row of which ``x[:count]`` is a part."""
    least, slack = x.dtype.type(-1), x.dtype.type(_SLACK)
    return max(_climb(x, _filled_up(x, count, BLOCK), least, kind)[0] - slack, least)


@njit(nogil=True, forceinline=True, fastmath=FAST, error_model="numpy")
def _climb(x, count, threshold, kind):
    """The threshold, by Newton's method on the norm of the margins; sums of shares and slopes.

    The iteration approaches the threshold from below and never passes it. The norm is the sum of
    the margins for kind 1, and the Euclidean norm for kind 2. Each block is summed in the dtype of
    ``x``, in any order; the blocks are summed in float64.
    """
    real = x.dtype.type
    zero, one, scale = real(0), real(1), real(1.0 / kind)
    # Any positive margin times this is at least 1. Counting this way is vectorised, unlike a
    # comparison.
    large = real(1e30)
    while True:
        total, weight = 0.0, 0.0
        for first in range(0, count, BLOCK):
            part, slopes = zero, zero
            for i in range(BLOCK):
                margin = scale * x[first + i] - threshold
                margin = margin if margin > zero else zero
                part += margin if kind == 1 else margin * margin
                slopes += min(margin * large, one) if kind == 1 else margin
            total += part
            weight += slopes
        norm = total if kind == 1 else math.sqrt(total)
        following = real(threshold + (1.0 if kind == 1 else norm) * (norm - 1.0) / weight)
        if not following > threshold:
            return threshold, total, weight
        threshold = following


@njit(nogil=True, forceinline=True, fastmath=FAST, error_model="numpy")
def _solve_margins(x, count, start, kind):
    """Overwrites the distances ``x[:count]`` with probabilities, from a bound on the threshold."""
    real = x.dtype.type
    zero, scale = real(0), real(1.0 / kind)
    full = _filled_up(x, count, BLOCK)
    threshold, total, weight = _climb(x, full, start, kind)
    missing = real((1.0 - total) / weight)
    for first in range(0, full, BLOCK):
        for i in range(BLOCK):
            margin = scale * x[first + i] - threshold
            share = margin + missing if kind == 1 else margin * (margin + missing)
            share = share if share > zero else zero
            x[first + i] = share if margin > zero else zero


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _backward_some(start, stop, probs, grad, out, alphas, by_alpha, kind):
    """Writes the gradient; if ``by_alpha`` is not empty, also that of the alpha of each row."""
    n, zero = probs.shape[1], probs.dtype.type(0)
    column = np.empty(n + 1, np.int32)
    slopes = np.empty(n + 1, np.float64)
    logs, shares, upstream = np.empty((3, n + 1 if len(by_alpha) else 0), probs.dtype)
    for row in range(start, stop):
        if kind > 0 and n <= LONGEST_BACKWARD:
            backward_row(probs, grad, out, row, kind)
            continue
        for i in range(n):
            out[row, i] = 0.0
        count = pick_above(probs, row, 0, n, zero, zero, slopes, column, 0)
        excess = alphas[row if len(alphas) > 1 else 0] - 1.0
        if len(by_alpha) and count:
            for i in range(count):
                shares[i] = slopes[i]
                upstream[i] = grad[row, column[i]]
            by_alpha[row] = _alpha_row(shares[:count], upstream, logs, excess)
        _to_slopes(slopes, count, excess, kind)
        # For alpha > 2 one slope can be far larger than all others. Subtracting its gradient avoids
        # cancellation.
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


_solve_rows, _backward_rows = by_rows(_solve_some), by_rows(_backward_some)


@njit(nogil=True)
def _tile(matrix, columns):
    """Number of columns that are transposed together, and their length, padded to whole vectors."""
    lanes = lanes_of(matrix.itemsize)
    some = min(columns, max(lanes, _IN_CACHE // len(matrix)))
    return some, (len(matrix) + lanes - 1) // lanes * lanes


@by_rows
@njit(nogil=True, cache=True)
def _solve_columns(start, stop, matrix, out, alphas, kind):
    """Transposes a tile of columns into rows that fit in the cache, solves them, and back."""
    height = len(matrix)
    shape = some, _ = _tile(matrix, stop - start)
    rows, made = np.full(shape, -np.inf, matrix.dtype), np.empty(shape, matrix.dtype)
    no_lists, no_sizes = np.empty((0, 0), np.int64), np.empty(0, np.int64)
    for first in range(start, stop, some):
        n = min(some, stop - first)
        own = alphas[first : first + n] if len(alphas) > 1 else alphas
        turn(matrix, 0, first, rows, 0, 0, height, n)
        _solve_some(0, n, rows, made, no_lists, no_sizes, own, kind, 0.0, False)
        turn(made, 0, 0, out, 0, first, n, height)


@by_rows
@njit(nogil=True, cache=True)
def _backward_columns(start, stop, probs, grad, out, alphas, kind):
    height = len(probs)
    shape = some, _ = _tile(probs, stop - start)
    rows, grads = np.zeros(shape, probs.dtype), np.zeros(shape, probs.dtype)
    made = np.empty(shape, probs.dtype)
    no_gradient = np.empty(0, np.float64)
    for first in range(start, stop, some):
        n = min(some, stop - first)
        own = alphas[first : first + n] if len(alphas) > 1 else alphas
        turn(probs, 0, first, rows, 0, 0, height, n)
        turn(grad, 0, first, grads, 0, 0, height, n)
        _backward_some(0, n, rows, grads, made, own, no_gradient, kind)
        turn(made, 0, 0, out, 0, first, n, height)


@njit(nogil=True, error_model="numpy")
def _alpha_row(p, upstream, logs, excess):
    real = p.dtype.type
    entropy, shift = _logs_and_means(p, upstream, logs)
    lowest = p[0]
    for i in range(len(p)):
        lowest = min(lowest, p[i])
    given = p, upstream, logs, real(excess), real(shift)
    # The vectorised exponential supports arguments up to 80.
    if -excess * math.log(lowest) < 80.0:
        total, square, first, second = _alpha_sums(*given)
    else:
        total, square, first, second = _alpha_sums_far(*given)
    return (-second - excess * (square * first + entropy * second)) / total


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _logs_and_means(p, upstream, logs):
    """Writes the logarithms of the probabilities; returns entropy and mean upstream gradient."""
    for i in range(len(p)):
        logs[i] = log(p[i]) + p[i] * p.dtype.type(0.0)
    entropy, product = p.dtype.type(0.0), p.dtype.type(0.0)
    for i in range(len(p)):
        entropy -= p[i] * logs[i]
        product += p[i] * upstream[i]
    return entropy, product


def _compiled_alpha_sums(exponential):
    """Compiles the sums of p exp(x), p s, u log(p) and u s, for a given exponential.

    Here x is ``-excess * log(p)``, s is ``log(p)**2 * (exp(x) - 1 - x) / x**2``, and u is p times
    the upstream gradient less its mean.
    """

    @njit(nogil=True, fastmath=FAST, error_model="numpy")
    def sums(p, upstream, logs, excess, shift):
        zero, one, small = p.dtype.type(0.0), p.dtype.type(1.0), p.dtype.type(0.3)
        total, square, first, second = zero, zero, zero, zero
        for i in range(len(p)):
            x = -excess * logs[i]
            power = exponential(x)
            far = (power - one - x) / (x * x)
            remainder = _remainder_series(x) if x < small else far
            s = logs[i] * logs[i] * remainder
            u = p[i] * (upstream[i] - shift)
            total += p[i] * power
            square += p[i] * s
            first += u * logs[i]
            second += u * s
        return total, square, first, second

    return sums


_alpha_sums, _alpha_sums_far = _compiled_alpha_sums(exp), _compiled_alpha_sums(math.exp)


@njit(nogil=True, forceinline=True)
def _remainder_series(x):
    """``(exp(x) - 1 - x) / x**2`` for x up to 0.3, to float64 precision."""
    real = type(x)
    total = real(_SERIES[11])
    for k in range(10, -1, -1):
        total = total * x + real(_SERIES[k])
    return total


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _to_slopes(shares, count, excess, kind):
    """Overwrites p with ``p ** (2 - alpha)``."""
    if kind == 1:
        for i in range(count):
            shares[i] /= shares[i]
    elif kind == 2:
        for i in range(count):
            shares[i] = math.sqrt(shares[i])
    elif kind == 0 and excess > 1.0:
        # These may overflow to infinity, which the vectorised exponential does not support.
        for i in range(count):
            shares[i] **= 1.0 - excess
    elif kind == 0:
        for i in range(count):
            # The second term propagates NaN.
            shares[i] = exp((1.0 - excess) * log(shares[i])) + shares[i] * 0.0


_SERIES = tuple(1.0 / math.factorial(k + 2) for k in range(12))
# On longer rows it is faster to gather the candidates, and the support (measured with AVX-512).
LONGEST = 1024
LONGEST_BACKWARD = 1024


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def solve_short(rows, out, four, kind):
    """Writes the probabilities of one to four rows to ``out``; returns whether all are valid.

    If a row is empty or has a NaN or +inf, nothing is written. ``four`` is scratch memory.
    """
    last = len(rows) - 1
    second, third = min(1, last), min(2, last)
    (p0, sane0), (p1, sane1) = top_of_rest(rows, 0, 0), top_of_rest(rows, second, 0)
    (p2, sane2), (p3, sane3) = top_of_rest(rows, third, 0), top_of_rest(rows, last, 0)
    if not (sane0 and sane1 and sane2 and sane3 and min(p0, p1, p2, p3) > -math.inf):
        return False
    # Each call is inlined with a constant kind, which gives a specialised loop.
    if kind == 1:
        _solve_four(rows, 0, second, third, last, p0, p1, p2, p3, out, four, 1)
    else:
        _solve_four(rows, 0, second, third, last, p0, p1, p2, p3, out, four, 2)
    return True


@njit(nogil=True, forceinline=True, fastmath=FAST, error_model="numpy")
def _solve_four(rows, r0, r1, r2, r3, p0, p1, p2, p3, out, x, kind):
    """Writes the probabilities of four rows, which may be the same row, to ``out``.

    ``p0`` to ``p3`` are their maxima, which must be finite. The result of a row does not depend on
    the other rows.
    """
    scale = x.dtype.type(1.0 / kind)
    _centre(rows, r0, p0, x, 0, scale)
    _centre(rows, r1, p1, x, 1, scale)
    _centre(rows, r2, p2, x, 2, scale)
    _centre(rows, r3, p3, x, 3, scale)
    count = x.shape[1] // (2 * lanes_of(x.itemsize))
    start = x.dtype.type(-1)
    t0, t1, t2, t3 = start, start, start, start
    if kind == 1:
        c0, c1, c2, c3 = start, start, start, start
        while True:
            (a0, b0), (a1, b1) = margins(x, 0, count, t0), margins(x, 1, count, t1)
            (a2, b2), (a3, b3) = margins(x, 2, count, t2), margins(x, 3, count, t3)
            # A threshold is exact if its support is the one that it was computed from.
            if b0 == c0 and b1 == c1 and b2 == c2 and b3 == c3:
                break
            t0, t1 = _unless(b0 == c0, t0, a0, b0), _unless(b1 == c1, t1, a1, b1)
            t2, t3 = _unless(b2 == c2, t2, a2, b2), _unless(b3 == c3, t3, a3, b3)
            c0, c1, c2, c3 = b0, b1, b2, b3
    else:
        while True:
            (a0, b0), (a1, b1) = squares(x, 0, count, t0), squares(x, 1, count, t1)
            (a2, b2), (a3, b3) = squares(x, 2, count, t2), squares(x, 3, count, t3)
            f0, f1 = _following(t0, a0, b0), _following(t1, a1, b1)
            f2, f3 = _following(t2, a2, b2), _following(t3, a3, b3)
            if not (f0 > t0 or f1 > t1 or f2 > t2 or f3 > t3):
                break
            # A solved row keeps its threshold.
            t0, t1 = max(f0, t0), max(f1, t1)
            t2, t3 = max(f2, t2), max(f3, t3)
    _write(x, 0, out, r0, t0, a0, b0, kind)
    _write(x, 1, out, r1, t1, a1, b1, kind)
    _write(x, 2, out, r2, t2, a2, b2, kind)
    _write(x, 3, out, r3, t3, a3, b3, kind)


@njit(nogil=True, forceinline=True, fastmath=FAST)
def _centre(rows, row, top, x, four, scale):
    """Writes the distances of a row to its maximum, halved for kind 2."""
    for i in range(rows.shape[1]):
        x[four, i] = (rows[row, i] - top) * scale


@njit(nogil=True, forceinline=True, fastmath=FAST, error_model="numpy")
def _unless(solved, threshold, total, count):
    """The threshold at which ``count`` margins sum to 1; unchanged if the row is solved.

    The threshold never decreases, so the count never increases. Otherwise a score at the threshold
    could leave and enter the support forever, by rounding.
    """
    following = type(threshold)(threshold + (total - 1.0) / count)
    return threshold if solved else max(threshold, following)


@njit(nogil=True, forceinline=True, fastmath=FAST, error_model="numpy")
def _following(threshold, total, weight):
    """Newton's next threshold for alpha 1.5, which never passes the root."""
    norm = math.sqrt(total)
    return type(threshold)(threshold + norm * (norm - 1.0) / weight)


@njit(nogil=True, forceinline=True, fastmath=FAST, error_model="numpy")
def _write(x, four, out, row, threshold, total, weight, kind):
    """Writes the probabilities of one row, after a last Newton step on them."""
    zero = x.dtype.type(0)
    missing = x.dtype.type((1.0 - total) / weight)
    for i in range(out.shape[1]):
        margin = x[four, i] - threshold
        share = max(margin + missing if kind == 1 else margin * (margin + missing), zero)
        out[row, i] = share if margin > zero else zero


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def backward_row(probs, grad, out, row, kind):
    """The Jacobian of a short row times its gradient, for kinds 1, 2 and 3 (softmax)."""
    zero = probs.dtype.type(0)
    n = probs.shape[1]
    # This loop only reads. A loop that also writes is vectorised only if its arrays do not overlap:
    # the order of its sums, and thereby the last bit, would depend on addresses.
    total, product = zero, zero
    for i in range(n):
        slope = _slope(probs[row, i], kind)
        total += slope
        product += slope * grad[row, i]
    mean = product / total if total != zero else zero
    for i in range(n):
        slope = _slope(probs[row, i], kind)
        out[row, i] = slope * (grad[row, i] - mean) if slope != zero else zero


@njit(nogil=True, forceinline=True, fastmath=FAST, error_model="numpy")
def _slope(share, kind):
    """``p ** (2 - alpha)``, 0 outside the support."""
    zero, one, large = type(share)(0), type(share)(1), type(share)(1e30)
    if kind == 1:
        # 1 on the support, as in _climb; the second term propagates NaN.
        return min(share * large, one) + share * zero
    return math.sqrt(share) if kind == 2 else share


# For any alpha: with L the logarithm of the largest probability, c = alpha - 1 and d the distance
# to the maximum, p = exp(L + log1p(c d exp(-c L)) / c), which becomes softmax as c goes to 0.

# Below this excess the result equals softmax.
_LEAST_EXCESS = 1e-12
# How close a sum must be to 1 for a result in float32, and in float64. The last step, on the
# probabilities, reduces the error to about its square.
_NEAR_32, _NEAR_64 = 1e-5, 1e-9
_FEW_TRIPS, _MANY_TRIPS = 12, 400
# Slack of the bound from a part of a row, for rounding.
_SLACK = 1e-6
# Candidates per inner loop: loops of this fixed length are vectorised.
_STEP = 16


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def bound_any(x, narrow, count, excess):
    """A bound on the unknown from a part of a row, and the distance up to which shares are 0."""
    if excess < _LEAST_EXCESS:
        return 0.0, x.dtype.type(-math.inf)
    bound = 0.0
    # For a larger excess, float32 is too coarse for the steep slopes at the edge of the support.
    if excess <= 1.0:
        full = _filled_up(x, count, _STEP)
        for i in range(full):
            narrow[i] = x[i]
        log_top, total, _ = _newton(narrow, full, excess, 0.0, _NEAR_32, _FEW_TRIPS)
        if abs(total - 1.0) <= _NEAR_32:
            bound = min(log_top + _SLACK + 1.01 * _NEAR_32, 0.0)
    return bound, x.dtype.type(-math.exp(excess * bound) / excess)


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def solve_any(x, room, count, excess, start):
    """Overwrites the distances ``x[:count]`` to the maximum of a row with probabilities.

    The first iterations, from ``start``, are in float32. ``x`` and the two scratch arrays ``room``
    are long enough to be padded to a multiple of ``_STEP``.
    """
    narrow, wide = room
    full = _filled_up(x, count, _STEP)
    for i in range(full):
        narrow[i] = x[i]
        wide[i] = x[i]
    start, _, _ = _newton(narrow, full, excess, start, _NEAR_32, _FEW_TRIPS)
    within = _NEAR_32 if x.itemsize == 4 else _NEAR_64
    if excess > 1.0:
        # Slopes are steep at the edge of the support, so the last step leaves a larger error.
        within *= within
    log_top, total, weight = _newton(wide, full, excess, start, within, _MANY_TRIPS)
    _finish(x, wide, full, excess, log_top, (1.0 - total) / weight)


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _newton(x, count, excess, start, within, trips):
    """Newton's method on the logarithm of the sum, within a bracket that some steps bisect.

    Returns the logarithm of the largest probability, and the sums of shares and slopes there.
    """
    low, high = -math.log(count), 0.0
    # For alpha > 2 slopes are steep at the edge of the support, and Newton steps may go wrong.
    every = 4 if excess > 1.0 else 12
    log_top, total, weight = start, 1.0, 1.0
    for trip in range(1, trips + 1):
        total, weight = _sums(x, count, log_top, excess)
        if abs(total - 1.0) <= within:
            break
        if total < 1.0:
            low = max(low, log_top)
        else:
            high = min(high, log_top)
        following = log_top - math.log(total) * total / weight
        if trip % every == 0 or not low < following < high:
            following = 0.5 * (low + high)
        if not low < following < high:
            # The bracket is closed; at its upper end the whole support is present.
            following = high
        if following == log_top:
            break
        log_top = following
    return log_top, total, weight


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _scale(log_top, excess):
    # Without the minimum, 0 * inf would exclude the maximum itself for a very large alpha.
    return excess * math.exp(min(-excess * log_top, 80.0))


@njit(nogil=True, forceinline=True, fastmath={"contract"}, error_model="numpy")
def _share(distance, log_top, scale, reciprocal):
    """A probability and its slope. Selects instead of branches, so that loops are vectorised."""
    number = type(distance)
    ratio = distance * scale
    inside = ratio > number(-1)
    ratio = ratio if inside else number(0)
    grown = number(1) + ratio
    slope = number(1) / grown
    # log1p(ratio): the rounding error of 1 + ratio is added back.
    power = (log(grown) + (ratio - (grown - number(1))) * slope) * reciprocal
    share = exp(log_top + power) if inside else number(0)
    return share, share * slope


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _sums(x, count, log_top, excess):
    number = x.dtype.type
    total, weight = 0.0, 0.0
    at = number(log_top)
    if excess < _LEAST_EXCESS:
        for i in range(count):
            total += exp(at + x[i])
        return total, total
    scale, reciprocal = number(_scale(log_top, excess)), number(1.0 / excess)
    for first in range(0, count, _STEP):
        part, slopes = number(0), number(0)
        for i in range(first, first + _STEP):
            share, slope = _share(x[i], at, scale, reciprocal)
            part += share
            slopes += slope
        total += part
        weight += slopes
    return total, weight


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _finish(x, wide, count, excess, log_top, missing):
    """A last step on the probabilities, which corrects the rounding of the unknown."""
    if excess < _LEAST_EXCESS:
        for i in range(count):
            x[i] = exp(log_top + wide[i]) * (1.0 + missing)
        return
    scale, reciprocal = _scale(log_top, excess), 1.0 / excess
    norm = 0.0
    for first in range(0, count, _STEP):
        for i in range(first, first + _STEP):
            share, slope = _share(wide[i], log_top, scale, reciprocal)
            share = max(share + slope * missing, 0.0)
            wide[i] = share
            norm += share
    # For alpha > 2 slopes are steep at the edge of the support, and the step may overshoot.
    factor = 1.0 / norm if excess > 1.0 else 1.0
    for i in range(count):
        x[i] = wide[i] * factor
