"""On CUDA: a program takes a piece of one row; scores are read once, and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import cdiv, next_power_of_2

# Scores that a program looks at together, and in all where it only sums.
BLOCK = 2048
SHARE = 16 * BLOCK
LOG2E = tl.constexpr(1.4426950408889634)


def sums(scores: Tensor, negated: bool) -> tuple[Tensor, Tensor]:
    """As the reference's."""
    n_rows, n = scores.shape
    parts = max(1, cdiv(n, SHARE))
    above = torch.empty(parts, n_rows, device=scores.device, dtype=torch.float32)
    below = torch.empty_like(above) if negated else above.new_empty(0)
    if scores.numel():
        block = _block(n)
        _sums[(n_rows, parts)](
            scores, above, below, n_rows, n, scores.stride(0), SHARE, BLOCK=block, NEGATED=negated,
            num_warps=_warps(block), enable_fp_fusion=True,
        )  # fmt: skip
    else:
        above.fill_(-torch.inf)
        below.fill_(-torch.inf)
    return above.logsumexp(0), below.logsumexp(0) if negated else below


def gradient_(scores: Tensor, scale: Tensor, above: Tensor, below: Tensor | None) -> None:
    """As the reference's."""
    n_rows, n = scores.shape
    if scores.numel():
        block = _block(n)
        _gradient[(n_rows, cdiv(n, block))](
            scores, scale, above, below, n, scores.stride(0), BLOCK=block,
            NEGATED=below is not None, num_warps=_warps(block), enable_fp_fusion=True,
        )  # fmt: skip


def _block(n: int) -> int:
    return min(BLOCK, max(32, next_power_of_2(n)))


def _warps(block: int) -> int:
    return max(1, block // 512)


@triton.jit
def _sums(
    scores, above, below, n_rows, n, stride, share, BLOCK: tl.constexpr, NEGATED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    scores += row * stride
    stop = tl.minimum((part + 1) * share, n)
    peak = tl.full((), -float("inf"), dtype=tl.float32)
    floor = peak
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    reverse = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(part * share, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        values = tl.load(scores + column, mask=column < stop, other=-float("inf")).to(tl.float32)
        peak, total = _added(values, peak, total)
        if NEGATED:
            floor, reverse = _added(_negated(values), floor, reverse)
    tl.store(above + part * n_rows + row, peak + tl.log(tl.sum(total, 0)))
    if NEGATED:
        tl.store(below + part * n_rows + row, floor + tl.log(tl.sum(reverse, 0)))


@triton.jit
def _added(values, peak, total):
    """The running maximum, and sums of exponentials relative to it."""
    grown = tl.maximum(peak, tl.max(values, 0))
    # -inf everywhere so far: nothing to scale, and no difference of infinities.
    origin = tl.where(grown == -float("inf"), 0.0, grown) * LOG2E
    shrink = tl.exp2(peak * LOG2E - origin)
    return grown, total * shrink + tl.exp2(values * LOG2E - origin)


@triton.jit
def _negated(values):
    return tl.where(values == -float("inf"), values, -values)


@triton.jit
def _gradient(scores, scale, above, below, n, stride, BLOCK: tl.constexpr, NEGATED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < n
    place = scores + row * stride + column
    values = tl.load(place, mask=live, other=-float("inf")).to(tl.float32)
    gradient = tl.exp2((values - tl.load(above + row)) * LOG2E)
    if NEGATED:
        gradient -= tl.exp2((_negated(values) - tl.load(below + row)) * LOG2E)
    gradient *= tl.load(scale + row)
    tl.store(place, gradient.to(scores.dtype.element_ty), mask=live)
