"""Cross entropy of rows on the CPU: a pass for the peak, one for the sums, one for the gradient.

A row stays in the cache between passes. README.md has the derivation.
"""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._cpu import WIDENED, as_array, by_rows, parts
from lastlayer.kernels._cpu_math import (
    BLOCK,
    FAST,
    exp,
    find_peaks,
    largest,
    room_for_peaks,
    sum_of,
    sum_of_distances,
    tanh_and_slope,
)
from lastlayer.kernels.softmax_rows import NO_RANK

# Scores that are summed in float32 before they are added to a float64 total. They and their
# intermediate results fit the L1 cache.
_SPAN = 1024


def forward_(
    scores: Tensor, target: Tensor, target_scores: Tensor | None, row_scale: Tensor | None,
    class_weight: Tensor | None, smoothing: float, z_loss: float, softcap: float,
    temperature: float, statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = accumulation_dtype(scores.dtype)
    n_rows, n = scores.shape
    real = np.float64 if dtype == torch.float64 else np.float32
    kept, nothing = n_rows if statistics else 0, np.empty(0, real)
    # numpy arrays cost less host time than tensors and their views as arrays.
    loss, lse, entropy = np.empty(n_rows, real), np.empty(n_rows, real), np.empty(kept, real)
    argmax, rank = np.empty(kept, np.int64), np.empty(kept, np.int64)
    exact = nothing if target_scores is None else as_array(target_scores, dtype)
    scale = nothing if row_scale is None else as_array(row_scale, dtype)
    per_row = as_array(target), exact, loss, lse, entropy, argmax, rank, scale
    shared = (
        nothing if class_weight is None else as_array(class_weight, dtype),
        float(n) if class_weight is None else float(class_weight.double().sum()),
        smoothing, z_loss, softcap, temperature,
    )  # fmt: skip
    if scores.dtype == dtype and scores.is_contiguous():
        _forward_rows(n_rows, n, as_array(scores), *per_row, *shared)
    else:
        for part in parts((n_rows, n), WIDENED):
            wide = scores[part].to(dtype, memory_format=torch.contiguous_format, copy=True)
            some = wide.shape[0]
            _forward_rows(some, n, as_array(wide), *[each[part] for each in per_row], *shared)
            if row_scale is not None:
                scores[part] = wide
    tensor = torch.from_numpy
    return tensor(loss), tensor(lse), tensor(entropy), tensor(argmax), tensor(rank)


@by_rows
@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _forward_rows(
    start, stop, rows, target, exact, loss, lse, entropy, argmax, rank, row_scale,
    weights, weight_sum, smoothing, z_loss, softcap, temperature,
):  # fmt: skip
    n = rows.shape[1]
    real = rows.dtype.type
    peaks = room_for_peaks(rows)
    capped, smooth, weighted = softcap != 0.0, smoothing != 0.0, len(weights) > 0
    values, slopes = np.empty(_SPAN, rows.dtype), np.empty(_SPAN, rows.dtype)
    shares, lanes = np.empty(_SPAN, rows.dtype), np.empty(BLOCK, rows.dtype)
    # With a soft cap the gradient pass needs the scores again, for the slopes.
    keep_shares = len(row_scale) > 0 and not capped
    inverse = real(1.0 / temperature)
    for row in range(start, stop):
        x = rows[row]
        right = target[row]
        rounded = x[right]
        if len(entropy):
            state = find_peaks(rows, row, peaks)
            argmax[row] = _first_of_largest(x, peaks, state)
            rank[row] = _count_above(x, rounded)
        if len(exact):
            x[right] = exact[row]
        peak, at_target, slope = largest(x, lanes, -math.inf), float(x[right]), 1.0 / temperature
        if capped:
            bent = math.tanh(at_target / softcap)
            slope *= 1.0 - bent * bent
            # -inf stays -inf: the cap would unmask a masked class.
            at_target = softcap * bent if at_target != -math.inf else -math.inf
            peak = real(softcap * math.tanh(peak / softcap)) if peak != -math.inf else peak
        # A row that is all -inf has no finite difference.
        origin = real(0.0) if peak == -math.inf else peak

        # The sums exclude the target, so that 1 - p is computed without cancellation.
        others, mixed, above_all = 0.0, 0.0, 0.0
        for first in range(0, n, _SPAN):
            span = x[first : first + _SPAN]
            if capped:
                span = _bent(span, real(softcap), values, slopes)
            part = _shares_of(span, origin, inverse, shares)
            if first <= right < first + len(span):
                part[right - first] = 0.0
            others += sum_of(part)
            if len(entropy):
                mixed += sum_of_distances(part, span, origin)
            if smooth:
                above_all += _sum_weighted(weights[first : first + _SPAN], span, origin)
            if keep_shares:
                for i in range(len(part)):
                    span[i] = part[i]
        distance = (at_target - origin) / temperature
        share = math.exp(distance)
        total = others + share
        if total == 0.0:
            # Fully masked rows have infinite loss and zero gradient.
            loss[row], lse[row] = math.inf, -math.inf
            if len(entropy):
                entropy[row], rank[row] = 0.0, NO_RANK
            if len(row_scale):
                x[:] = 0.0
            else:
                x[right] = rounded
            continue
        log_total = math.log(total)
        log_sum = origin / temperature + log_total

        right_weight = float(weights[right]) if weighted else 1.0
        pull = (1.0 - smoothing) * right_weight
        spread = smoothing / n
        more = 2.0 * z_loss * log_sum
        cost = math.log1p(others / share) if others < share else log_total - distance
        cost = pull * cost + z_loss * log_sum * log_sum
        if smooth:
            cost += spread * (weight_sum * log_total - above_all / temperature)
            more += spread * weight_sum
        loss[row], lse[row] = cost, log_sum
        if len(entropy):
            if share > 0.0:
                mixed += share * (at_target - origin)
            entropy[row] = log_total - mixed / (total * temperature)
            if math.isnan(total) or at_target == -math.inf:
                rank[row] = NO_RANK

        if len(row_scale) == 0:
            x[right] = rounded
            continue
        scale = float(row_scale[row])
        push = pull + more
        factor = real(push * scale / (total * temperature))
        lift = spread * scale / temperature
        for first in range(0, n, _SPAN):
            span = x[first : first + _SPAN]
            part = span
            if capped:
                bent_span = _bent(span, real(softcap), values, slopes)
                part = _shares_of(bent_span, origin, inverse, shares)
            _fill_gradient(part, factor, real(lift), weights[first : first + _SPAN])
            if capped:
                _multiply(part, slopes, span)
        true = more - push * (others / total) - spread * right_weight
        x[right] = true * slope * scale


@njit(nogil=True, error_model="numpy")
def _first_of_largest(x, peaks, state):
    """The first index of the maximum; NaN counts as the maximum, as in torch."""
    if state < 0:
        for i in range(len(x)):
            if math.isnan(x[i]):
                return i
    for block in range(len(peaks) - 1):
        if peaks[block] == peaks[-1]:
            for i in range(block * BLOCK, min(len(x), (block + 1) * BLOCK)):
                if x[i] == peaks[-1]:
                    return i
    return 0


@njit(nogil=True)
def _count_above(x, floor):
    count = 0
    for i in range(len(x)):
        count += x[i] > floor
    return count


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _bent(span, softcap, values, slopes):
    """Scores after the soft cap; writes their slopes to ``slopes``. -inf stays, with slope 0."""
    real = span.dtype.type
    inverse, zero, least = real(1.0) / softcap, real(0.0), real(-math.inf)
    for i in range(len(span)):
        bent, slope = tanh_and_slope(span[i] * inverse)
        out = span[i] == least
        values[i] = least if out else softcap * bent
        slopes[i] = zero if out else slope
    return values[: len(span)]


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _shares_of(span, origin, inverse, shares):
    for i in range(len(span)):
        shares[i] = exp((span[i] - origin) * inverse)
    return shares[: len(span)]


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _sum_weighted(weights, span, origin):
    """The weighted sum of distances to the peak; weights of 1 if ``weights`` is empty."""
    total = span.dtype.type(0.0)
    if len(weights):
        for i in range(len(span)):
            total += weights[i] * (span[i] - origin)
    else:
        for i in range(len(span)):
            total += span[i] - origin
    return total


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _fill_gradient(part, factor, lift, weights):
    """Overwrites shares with the gradient: that of lse, minus that of label smoothing."""
    if len(weights):
        for i in range(len(part)):
            part[i] = part[i] * factor - lift * weights[i]
    else:
        for i in range(len(part)):
            part[i] = part[i] * factor - lift


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _multiply(left, right, out):
    for i in range(len(left)):
        out[i] = left[i] * right[i]


def gradient_(
    scores: Tensor, target: Tensor, true: Tensor, lse: Tensor, push: Tensor, softcap: float,
    temperature: float,
) -> None:  # fmt: skip
    dtype, (n_rows, n) = lse.dtype, scores.shape
    per_row = as_array(target), *(as_array(each, dtype) for each in (true, lse, push))
    if scores.dtype == dtype and scores.is_contiguous():
        _gradient_rows(n_rows, n, as_array(scores), *per_row, softcap, temperature)
        return
    for part in parts((n_rows, n), WIDENED):
        wide = scores[part].to(dtype, memory_format=torch.contiguous_format, copy=True)
        some = [each[part] for each in per_row]
        _gradient_rows(wide.shape[0], n, as_array(wide), *some, softcap, temperature)
        scores[part] = wide


@by_rows
@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _gradient_rows(start, stop, rows, target, true, lse, push, softcap, temperature):
    n, capped = rows.shape[1], softcap != 0.0
    real = rows.dtype.type
    values, slopes = np.empty(_SPAN, rows.dtype), np.empty(_SPAN, rows.dtype)
    shares, inverse = np.empty(_SPAN, rows.dtype), real(1.0 / temperature)
    for row in range(start, stop):
        x = rows[row]
        origin, factor = real(lse[row] * temperature), real(push[row] / temperature)
        for first in range(0, n, _SPAN):
            span = x[first : first + _SPAN]
            some = _bent(span, real(softcap), values, slopes) if capped else span
            part = _shares_of(some, origin, inverse, shares)
            _fill_gradient(part, factor, real(0.0), part[:0])
            if capped:
                _multiply(part, slopes, span)
            else:
                for i in range(len(part)):
                    span[i] = part[i]
        if target[row] >= 0:
            x[target[row]] = true[row]
