"""On CUDA: a program takes a piece of one row; scores are read once, and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import cdiv, next_power_of_2

# Scores that a program looks at together, and in all.
BLOCK = 2048
SHARE = 8 * BLOCK
LOG2E = tl.constexpr(1.4426950408889634)


def forward_(scores: Tensor, scale: Tensor | None, smoothing: float) -> Tensor:
    """As the reference's."""
    n_rows, n = scores.shape
    parts = max(1, cdiv(n, SHARE))
    losses = torch.empty(parts, n_rows, device=scores.device, dtype=torch.float32)
    if scores.numel():
        block = min(BLOCK, max(32, next_power_of_2(n)))
        _logistic[(n_rows, parts)](
            scores, scale, losses, n_rows, n, scores.stride(0), SHARE, smoothing, BLOCK=block,
            GRADIENT=scale is not None, SMOOTH=smoothing != 0.0, num_warps=max(1, block // 512),
            enable_fp_fusion=True,
        )  # fmt: skip
    else:
        losses.zero_()
    return losses.sum(0)


@triton.jit
def _logistic(
    scores, scale, losses, n_rows, n, stride, share, smoothing, BLOCK: tl.constexpr,
    GRADIENT: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    scores += row * stride
    stop = tl.minimum((part + 1) * share, n)
    factor = 1.0
    if GRADIENT:
        factor = tl.load(scale + row)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(part * share, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        live = column < stop
        values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
        power = tl.exp2(-tl.abs(values) * LOG2E)
        # log(1 + u) rounds 1 + u: a million labels that are right would count for nothing.
        series = power * (1.0 - power * (0.5 - power * (0.33333334 - power * 0.25)))
        total += tl.maximum(values, 0.0) + tl.where(power < 0.03, series, tl.log(1.0 + power))
        if SMOOTH:
            absent = values == -float("inf")
            total -= tl.where(absent, 0.0, values * smoothing)
        if GRADIENT:
            gradient = tl.where(values < 0.0, power, 1.0) / (1.0 + power)
            if SMOOTH:
                gradient = tl.where(absent, 0.0, gradient - smoothing)
            gradient *= factor
            tl.store(scores + column, gradient.to(scores.dtype.element_ty), mask=live)
    tl.store(losses + part * n_rows + row, tl.sum(total, 0))
