"""The loss of entmax on CUDA.

From probabilities, one program per row reads them once. From scores with wide supports, it reads
the row once for each step of Newton's method, and twice more. With listed classes, a program
processes a few rows.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import cdiv, row_max, tile_width
from lastlayer.kernels.entmax.threshold import (
    ENTROPIES,
    advance,
    correction,
    entropy_and_slope,
    is_broken,
    kind_of,
    leap,
    per_class,
    polished,
    register_tile,
    row_sum,
    shares,
    solved_tile,
    tile,
    unsolved_row,
)

WIDEST_BLOCK = 4096
# Scores of a flat row that a program loads together. Programs are few and large, so that their rows
# stay in the L2 cache.
WIDEST_FLAT = 16384
# Additions per run. Equal scores round in the same direction at each addition, so sums are computed
# as sums of short runs.
RUN = tl.constexpr(8)


def forward_(
    probs: Tensor, scores: Tensor, target: Tensor, row_scale: Tensor | None, alpha: float,
    row_alpha: Tensor | None = None, slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    del row_alpha, slopes
    n_rows, n = probs.shape
    loss = torch.empty(n_rows, device=probs.device, dtype=torch.float32)
    if n_rows:
        block = tile_width(n, WIDEST_BLOCK, 32)
        _entmax_row[(n_rows,)](
            probs, scores, target, row_scale, loss, n, probs.stride(0), scores.stride(0), alpha,
            BLOCK=block, GRADIENT=row_scale is not None, KIND=ENTROPIES.get(alpha, 0),
            num_warps=max(1, block // 512),
        )  # fmt: skip
    return loss


@kernel
def _entmax_row(
    probs, scores, target, row_scale, loss, n, probs_row, scores_row, alpha,
    BLOCK: tl.constexpr, GRADIENT: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    probs += row * probs_row
    scores += row * scores_row
    right = tl.load(target + row)
    at_target = tl.load(scores + right).to(tl.float32)
    scale = 1.0
    if GRADIENT:
        scale = tl.load(row_scale + row).to(tl.float32)
        own = tl.load(probs + right).to(tl.float32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    given = tl.zeros((BLOCK,), dtype=tl.float32)
    prices = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, n, BLOCK):
        column = first + tl.arange(0, BLOCK)
        live = column < n
        shares = tl.load(probs + column, mask=live, other=0.0).to(tl.float32)
        present = shares != 0.0
        values = tl.load(scores + column, mask=live & present, other=0.0).to(tl.float32)
        lead = tl.where(present, values - at_target, 0.0)
        entropy, slope = entropy_and_slope(shares, alpha, KIND)
        sums += shares * lead + entropy
        given += shares
        prices += shares * (lead + slope)
        if GRADIENT:
            # Not a product if the scale is 0, since an ignored row may be NaN.
            gradient = tl.where(scale == 0.0, 0.0, shares * scale).to(probs.dtype.element_ty)
            tl.store(probs + column, gradient, mask=live & present & (column != right))
    # Corrects for rounded probabilities that do not sum to 1, see the reference.
    mass = tl.sum(given, 0)
    if GRADIENT:
        # A row whose probabilities are all 0 has zero gradient.
        short = tl.where((mass == 0.0) | (scale == 0.0), 0.0, (own - 1.0) * scale)
        tl.store(probs + right, short.to(probs.dtype.element_ty))
    price = tl.sum(prices, 0) / mass
    total = tl.sum(sums, 0)
    # If the loss overflows float32, the correction would be infinite as well.
    total = tl.where(total == float("inf"), total, total - (mass - 1.0) * price)
    # A masked target has infinite loss; NaN is kept.
    out = (at_target == -float("inf")) & (mass == mass)
    tl.store(loss + row, tl.where(out, float("inf"), total))


def flat_(scores: Tensor, target: Tensor, row_scale: Tensor | None, alpha: float) -> Tensor:
    """The loss of rows with wide supports, for an alpha with a positive :func:`kind_of`."""
    n_rows, n = scores.shape
    loss = torch.empty(n_rows, device=scores.device, dtype=torch.float32)
    if n_rows:
        block = tile_width(n, WIDEST_FLAT, 32)
        _flat_row[(n_rows,)](
            scores, target, row_scale, loss, n, scores.stride(0), BLOCK=block,
            GRADIENT=row_scale is not None, KIND=kind_of(alpha), num_warps=max(1, block // 512),
            enable_fp_fusion=False,  # ../entmax/threshold.py explains this
        )  # fmt: skip
    return loss


@triton.jit
def _distances(scores, first, n, origin, BLOCK: tl.constexpr):
    """A block of scores less the maximum, at most 0; -inf beyond the end."""
    column = first + tl.arange(0, BLOCK)
    values = tl.load(scores + column, mask=column < n, other=-float("inf")).to(tl.float32)
    return values - origin, column


@triton.jit
def _sums(scores, n, origin, at, BLOCK: tl.constexpr, KIND: tl.constexpr):
    totals = tl.zeros((BLOCK,), dtype=tl.float32)
    weights = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n, RUN * BLOCK):
        some = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(start, tl.minimum(start + RUN * BLOCK, n), BLOCK):
            distance, _ = _distances(scores, first, n, origin, BLOCK)
            probs, slope = shares(distance, at, 1.0, KIND)
            some += probs
            weights += slope
        totals += some
    return tl.sum(totals, 0), tl.sum(weights, 0)


@kernel
def _flat_row(
    scores, target, row_scale, loss, n, stride,
    BLOCK: tl.constexpr, GRADIENT: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    right = tl.load(target + row)
    at_target = tl.load(scores + right).to(tl.float32)
    peaks = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    for first in range(0, n, BLOCK):
        column = first + tl.arange(0, BLOCK)
        values = tl.load(scores + column, mask=column < n, other=-float("inf")).to(tl.float32)
        peaks = tl.maximum(peaks, values, propagate_nan=tl.PropagateNan.ALL)
    peak = row_max(peaks, 0)
    origin = tl.where(peak == -float("inf"), 0.0, peak)

    at = unsolved_row(peak, KIND)
    total, weight = _sums(scores, n, origin, at, BLOCK, KIND)
    # Far below the root a plain Newton step is best, since the norm is nearly linear there.
    at, low, high, go = advance(at, at, at, total, weight, 1.0, 0, KIND)
    if go:
        total, weight = _sums(scores, n, origin, at, BLOCK, KIND)
        at, go = leap(at, total, weight, KIND)
    trips = 0
    while go:
        total, weight = _sums(scores, n, origin, at, BLOCK, KIND)
        trips += 1
        at, low, high, go = advance(at, low, high, total, weight, 1.0, trips, KIND)
    missing = correction(total, weight, peak == float("inf"))

    scale = 1.0
    if GRADIENT:
        scale = tl.load(row_scale + row).to(tl.float32)
    # A row that is all -inf has zero gradient.
    one = tl.where(peak == -float("inf"), 0.0, 1.0)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    lead_of_peak = origin - at_target
    for start in range(0, n, RUN * BLOCK):
        some = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(start, tl.minimum(start + RUN * BLOCK, n), BLOCK):
            distance, column = _distances(scores, first, n, origin, BLOCK)
            probs, slope = shares(distance, at, 1.0, KIND)
            probs = polished(probs, slope, missing)
            lead = tl.where(probs != 0.0, distance + lead_of_peak, 0.0)
            if KIND == 1:
                entropy = 0.5 * probs * (1.0 - probs)
            elif KIND == 2:
                entropy = (4.0 / 3.0) * probs * (1.0 - tl.sqrt(probs))
            else:
                # (p - p^alpha) / (alpha (alpha - 1)) with the margin for p^(alpha - 1), and the
                # change by the last step to first order.
                margin = tl.maximum(tl.fma(distance, 1.0 / KIND, -at), 0.0)
                own = slope * margin
                entropy = own * (1.0 - margin) + (probs - own) * (1.0 - (1.0 + 1.0 / KIND) * margin)
                entropy = entropy * (KIND * KIND / (KIND + 1.0))
            some += probs * lead + entropy
            if GRADIENT:
                gradient = (probs - tl.where(column == right, one, 0.0)) * scale
                tl.store(scores + column, gradient.to(scores.dtype.element_ty), mask=column < n)
        sums += some
    row_loss = tl.sum(sums, 0)
    # A masked target has infinite loss; NaN is kept.
    out = (at_target == -float("inf")) & (row_loss == row_loss)
    tl.store(loss + row, tl.where(out, float("inf"), row_loss))


def listed(
    scores: Tensor, classes: Tensor, target: Tensor, target_scores: Tensor,
    row_scale: Tensor | None, class_weight: Tensor | None, alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n, k = classes.shape
    gradient = row_scale is not None
    loss = torch.empty(n, device=scores.device, dtype=torch.float32)
    values = torch.empty((n, k + 1) if gradient else 0, device=scores.device, dtype=torch.float32)
    entries = torch.empty(values.shape, device=scores.device, dtype=torch.int64)
    if n:
        width, rows, warps = register_tile(k)
        _list_rows[(cdiv(n, rows),)](
            scores.contiguous(), classes.contiguous(), target.contiguous(),
            target_scores.contiguous(), row_scale, class_weight, loss, values, entries, n, k,
            math.log(k), alpha, ROWS=rows, WIDTH=width, KIND=kind_of(alpha),
            ENTROPY=ENTROPIES.get(alpha, 0), GRADIENT=gradient, WEIGHTED=class_weight is not None,
            num_warps=warps, enable_fp_fusion=False,  # ../entmax/threshold.py explains this
        )  # fmt: skip
    return loss, values, entries


# Not specialised: chunks start at any row, and the length of lists is that of the longest one.
@kernel(
    do_not_specialize=["n", "k"],
    do_not_specialize_on_alignment=["target", "target_scores", "row_scale"],
)
def _list_rows(
    scores, classes, target, target_scores, row_scale, class_weight, loss, values, entries, n, k,
    log_k, alpha, ROWS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    ENTROPY: tl.constexpr, GRADIENT: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    AXIS: tl.constexpr = 0 if ROWS == 1 else 1
    row, slot, live = tile(n, k, ROWS, WIDTH)
    here = row < n
    place = per_class(row, AXIS) * k + slot
    listed = tl.load(classes + place, mask=live, other=-1)
    own = tl.load(scores + place, mask=live & (listed >= 0), other=-float("inf"))
    peak = row_max(own, AXIS)
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    excess = tl.zeros_like(peak) + (alpha - 1.0)
    distance = own - per_class(origin, AXIS)
    broken = is_broken(peak, excess, KIND)
    probs = solved_tile(distance, unsolved_row(peak, KIND), broken, log_k, excess, KIND, AXIS)

    right = tl.load(target + row, mask=here, other=0)
    at_target = tl.load(target_scores + row, mask=here, other=0.0)
    out = at_target == -float("inf")
    lead_of_peak = origin - tl.where(out, 0.0, at_target)
    lead = tl.where(probs == 0.0, 0.0, distance + per_class(lead_of_peak, AXIS))
    entropy, _ = entropy_and_slope(probs, alpha, ENTROPY)
    total = row_sum(probs * lead + entropy, AXIS)
    # A masked target has infinite loss; NaN is kept.
    total = tl.where(out & (total == total), float("inf"), total)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(class_weight + right, mask=here, other=0.0).to(tl.float32)
    tl.store(loss + row, total * weight, mask=here)
    if GRADIENT:
        scale = tl.load(row_scale + row, mask=here, other=0.0) * weight
        into = per_class(row, AXIS) * (k + 1) + slot
        tl.store(values + into, probs * per_class(scale, AXIS), mask=live)
        tl.store(entries + into, tl.maximum(listed, 0), mask=live)
        # A row whose probabilities are all 0 has zero gradient.
        last = row * (k + 1) + k
        tl.store(values + last, tl.where(row_sum(probs, AXIS) == 0.0, 0.0, -scale), mask=here)
        tl.store(entries + last, right, mask=here)
