"""The loss of entmax from its probabilities on the CPU, in one pass over the non-zeros.

README.md has the derivation. ``kind`` is 1 for alpha 2, 2 for 1.5, 3 for 1, 4 for one alpha per
row, and 0 otherwise. For listed classes Numba solves for the probabilities, and torch computes the
rest.
"""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._cpu import WIDENED, as_array, by_rows, empty_array, parts
from lastlayer.kernels._cpu_math import (
    BLOCK,
    FAST,
    is_zero,
    multiply,
    pick_above,
    sum_of,
    sum_of_distances,
    top_of_rest,
)
from lastlayer.kernels.entmax_rows._listed import loss_of_listed


def forward_(
    probs: Tensor, scores: Tensor, target: Tensor, row_scale: Tensor | None, alpha: float,
    row_alpha: Tensor | None = None, slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    dtype = accumulation_dtype(probs.dtype)
    loss, made = empty_array((probs.shape[0],), dtype)
    none = loss[:0]
    per_row = (
        as_array(target, dtype if target.dim() == 2 else None),
        none if row_scale is None else as_array(row_scale, dtype), loss,
        none if row_alpha is None else as_array(row_alpha, dtype),
        none if slopes is None else as_array(slopes),
    )  # fmt: skip
    if probs.dtype == scores.dtype == dtype and probs.is_contiguous() and scores.is_contiguous():
        _run(as_array(probs), as_array(scores), per_row, alpha)
        return made
    for part in parts(probs.shape, WIDENED):
        wide = [
            each[part].to(dtype, memory_format=torch.contiguous_format, copy=True)
            for each in (probs, scores)
        ]
        _run(
            as_array(wide[0]), as_array(wide[1]), tuple([each[part] for each in per_row]), alpha
        )  # fmt: skip
        if row_scale is not None:
            probs[part] = wide[0]
    return made


def _run(
    rows: NDArray[Any], values: NDArray[Any], per_row: tuple[NDArray[Any], ...], alpha: float
) -> None:
    if rows.size:
        kind = 4 if len(per_row[3]) else {2.0: 1, 1.5: 2, 1.0: 3}.get(alpha, 0)
        if per_row[0].ndim == 2:
            _dense_rows(*rows.shape, rows, values, *per_row, alpha, kind)
        else:
            _forward_rows(*rows.shape, rows, values, *per_row, alpha, kind)


@by_rows
@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _forward_rows(
    start, stop, probs, scores, target, row_scale, loss, alphas, slopes, alpha, kind
):  # fmt: skip
    n = probs.shape[1]
    real = probs.dtype.type
    # The non-zeros, and their columns.
    shares, column = np.empty(n + 1, probs.dtype), np.empty(n + 1, np.int32)
    values = np.empty(n, probs.dtype)
    for row in range(start, stop):
        right = target[row]
        base = scores[row, right]
        share_of_target = probs[row, right]
        scale = row_scale[row] if len(row_scale) else real(1.0)
        order = np.float64(alphas[row]) if len(alphas) else alpha
        leads, entropy, mass, bend = 0.0, 0.0, 0.0, 0.0
        count = pick_above(probs, row, 0, n, real(0.0), real(0.0), shares, column, 0)
        for i in range(count):
            values[i] = scores[row, column[i]]
        for first in range(0, count, BLOCK):
            last = min(count, first + BLOCK)
            part = shares[first:last]
            leads += sum_of_distances(part, values[first:last], base)
            made, more = _sum_entropy(part, order, kind)
            entropy += made
            bend += more
            mass += sum_of(part)
        if len(row_scale):
            for i in range(count):
                probs[row, column[i]] = shares[i] * scale
        if len(slopes):
            slopes[row] = -(entropy + bend) / order
        if len(row_scale):
            # A row whose probabilities are all 0 has zero gradient.
            short = real(0.0) if mass == 0.0 else share_of_target - real(1.0)
            probs[row, right] = short * scale
            if scale == 0.0:
                # Not a product, since an ignored row may be NaN.
                probs[row] = 0.0
        # Corrects for rounded probabilities that do not sum to 1, see the reference.
        price = (leads + order * entropy) / mass - 1.0 / order
        # If the loss overflows the dtype, the correction would be infinite as well.
        total = leads if leads == math.inf else leads + entropy - (mass - 1.0) * price
        # A masked target has infinite loss; NaN is kept.
        loss[row] = math.inf if base == -math.inf and not math.isnan(mass) else total


@by_rows
@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _dense_rows(
    start, stop, probs, scores, target, row_scale, loss, alphas, slopes, alpha, kind
):  # fmt: skip
    """For distributions as target: ``<p - y, scores> + H(p) - H(y)``."""
    n = probs.shape[1]
    real = probs.dtype.type
    for row in range(start, stop):
        peak, _ = top_of_rest(scores, row, 0)
        origin = peak if -math.inf < peak < math.inf else real(0.0)
        order = np.float64(alphas[row]) if len(alphas) else alpha
        total, mass, apart_entropy, bend = 0.0, 0.0, 0.0, 0.0
        for first in range(0, n, BLOCK):
            if is_zero(probs, row, first) and is_zero(target, row, first):
                continue
            part, wanted = probs[row, first : first + BLOCK], target[row, first : first + BLOCK]
            values = scores[row, first : first + BLOCK]
            made, more = _sum_entropy(part, order, kind)
            theirs, their_more = _sum_entropy(wanted, order, kind)
            apart_entropy += made - theirs
            bend += more - their_more
            mass += sum_of(part)
            gap = real(0.0)
            for i in range(len(part)):
                apart = part[i] - wanted[i]
                product = apart * (values[i] - origin)
                gap += real(0.0) if apart == real(0.0) else product
                part[i] = apart
            total += gap
        loss[row] = total + apart_entropy
        if len(slopes):
            slopes[row] = -(apart_entropy + bend) / order
        if len(row_scale):
            # Ignored rows may be NaN, and fully masked rows have zero gradient.
            if row_scale[row] == 0.0 or mass == 0.0:
                probs[row] = 0.0
            else:
                multiply(probs[row], row_scale[row])


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _sum_entropy(part, alpha, kind):
    """The entropy of a block; for kind 4 also the second sum in its derivative by alpha."""
    real = part.dtype.type
    one, total = real(1.0), real(0.0)
    if kind == 1:
        for i in range(len(part)):
            total += part[i] * (one - part[i])
        return real(0.5) * total, real(0.0)
    if kind == 2:
        for i in range(len(part)):
            total += part[i] * (one - real(math.sqrt(part[i])))
        return real(4.0 / 3.0) * total, real(0.0)
    if kind == 4:
        # -p log(p) f(x) / alpha with f(x) = (exp(x) - 1) / x at x = (alpha - 1) log(p).
        bend = real(0.0)
        for i in range(len(part)):
            if part[i] != 0.0:
                log = math.log(part[i])
                x = (alpha - 1.0) * log
                remainder = _exp_remainder(x)
                ratio = 1.0 + x * remainder
                total -= part[i] * log * ratio
                bend += part[i] * log * log * (ratio - remainder)
        return real(total / alpha), bend
    for i in range(len(part)):
        if part[i] != 0.0:
            log = math.log(part[i])
            total -= part[i] * (log if kind == 3 else math.expm1((alpha - 1.0) * log))
    return total if kind == 3 else total / real(alpha * (alpha - 1.0)), real(0.0)


@njit(nogil=True, error_model="numpy")
def _exp_remainder(x):
    """``(exp(x) - 1 - x) / x**2``, by a series near 0."""
    if abs(x) >= 0.3:
        return (math.expm1(x) - x) / (x * x)
    total, term = 0.0, 0.5
    for k in range(3, 17):
        total += term
        term *= x / k
    return total


listed = partial(loss_of_listed, "cpu")
