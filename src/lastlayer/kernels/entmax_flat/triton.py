"""One program a row, which it reads once for each step of Newton's method, and twice besides."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import next_power_of_2, row_max
from lastlayer.kernels.entmax._solve import (
    advance,
    correction,
    leap,
    polished,
    shares,
    unsolved_row,
)

# Scores that a program looks at together: few large programs, whose rows stay in the L2 cache.
WIDEST_BLOCK = 16384
KINDS = {2.0: 1, 1.5: 2}


def forward_(scores: Tensor, target: Tensor, row_scale: Tensor | None, alpha: float) -> Tensor:
    """As the reference's."""
    n_rows, n = scores.shape
    loss = torch.empty(n_rows, device=scores.device, dtype=torch.float32)
    if n_rows:
        block = min(WIDEST_BLOCK, max(32, next_power_of_2(n)))
        _flat_row[(n_rows,)](
            scores, target, row_scale, loss, n, scores.stride(0), BLOCK=block,
            GRADIENT=row_scale is not None, KIND=KINDS[alpha], num_warps=max(1, block // 512),
            enable_fp_fusion=False,  # ../entmax/_solve.py says why
        )  # fmt: skip
    return loss


@triton.jit
def _distances(scores, first, n, origin, BLOCK: tl.constexpr):
    """How far a block of scores lies from the maximum, at most 0; -inf beyond the end."""
    column = first + tl.arange(0, BLOCK)
    values = tl.load(scores + column, mask=column < n, other=-float("inf")).to(tl.float32)
    return values - origin, column


@triton.jit
def _sums(scores, n, origin, at, BLOCK: tl.constexpr, KIND: tl.constexpr):
    totals = tl.zeros((BLOCK,), dtype=tl.float32)
    weights = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, n, BLOCK):
        distance, _ = _distances(scores, first, n, origin, BLOCK)
        probs, slope = shares(distance, at, 1.0, KIND)
        totals += probs
        weights += slope
    return tl.sum(totals, 0), tl.sum(weights, 0)


@triton.jit
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
    # From far below a plain step of Newton's is best: the norm is nearly a straight line there.
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
    # A row of nothing but -inf has nothing to move.
    one = tl.where(peak == -float("inf"), 0.0, 1.0)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    lead_of_peak = origin - at_target
    for first in range(0, n, BLOCK):
        distance, column = _distances(scores, first, n, origin, BLOCK)
        probs, slope = shares(distance, at, 1.0, KIND)
        probs = polished(probs, slope, missing)
        lead = tl.where(probs != 0.0, distance + lead_of_peak, 0.0)
        if KIND == 1:
            entropy = 0.5 * probs * (1.0 - probs)
        else:
            entropy = (4.0 / 3.0) * probs * (1.0 - tl.sqrt(probs))
        sums += probs * lead + entropy
        if GRADIENT:
            gradient = (probs - tl.where(column == right, one, 0.0)) * scale
            tl.store(scores + column, gradient.to(scores.dtype.element_ty), mask=column < n)
    row_loss = tl.sum(sums, 0)
    # A target that is out of the running cannot be met; a NaN stays one.
    out = (at_target == -float("inf")) & (row_loss == row_loss)
    tl.store(loss + row, tl.where(out, float("inf"), row_loss))
