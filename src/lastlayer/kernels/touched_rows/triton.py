"""Sums of the entries of each class on CUDA, without atomics: the order of a sum is fixed."""

import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import cdiv, next_power_of_2
from lastlayer.kernels.touched_rows._slots_triton import slots_

__all__ = ["forward", "slots_"]

# Entries that a program adds up together.
GROUP = 16
WIDEST = 256


def forward(
    columns: Tensor,
    column_biases: Tensor,
    slopes: Tensor,
    hidden: Tensor,
    order: Tensor,
    starts: Tensor,
    factor: Tensor,
    to_weight: bool,
    to_bias: bool,
) -> tuple[Tensor, Tensor]:
    """As the reference's."""
    groups, depth = starts.shape[0] - 1, hidden.shape[1]
    weight = slopes.new_empty((groups, depth) if to_weight else 0)
    bias = slopes.new_empty(groups if to_bias else 0)
    width = min(WIDEST, max(16, next_power_of_2(depth)))
    if groups:
        _sums[(groups, cdiv(depth, width) if to_weight else 1)](
            columns.contiguous(), column_biases, slopes.contiguous(), hidden, order, starts,
            factor, weight, bias, order.shape[0] - slopes.numel(), max(1, slopes.shape[1]), depth,
            hidden.stride(0), hidden.stride(1), GROUP=GROUP, WIDTH=width, WEIGHT=to_weight,
            BIAS=to_bias, enable_fp_fusion=True,
        )  # fmt: skip
    return weight, bias


@triton.jit
def _sums(
    columns, column_biases, slopes, hidden, order, starts, factor, weight, bias, c, q, depth,
    hidden_row, hidden_step, GROUP: tl.constexpr, WIDTH: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    scale = tl.load(factor).to(tl.float32)
    start = tl.load(starts + group)
    stop = tl.load(starts + group + 1)
    step = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = step < depth
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    level = tl.zeros((GROUP,), dtype=tl.float32)
    for first in range(start, stop, GROUP):
        place = first + tl.arange(0, GROUP)
        live = place < stop
        entry = tl.load(order + place, mask=live, other=0).to(tl.int64)
        drawn = live & (entry < c)
        scaled = live & (entry >= c)
        slope = tl.load(slopes + (entry - c), mask=scaled, other=0.0)
        if BIAS:
            level += slope + tl.load(column_biases + entry, mask=drawn, other=0.0)
        if WEIGHT:
            vectors = tl.load(
                columns + entry[:, None] * depth + step[None, :],
                mask=drawn[:, None] & inside[None, :],
                other=0.0,
            )
            states = tl.load(
                hidden + ((entry - c) // q)[:, None] * hidden_row + step[None, :] * hidden_step,
                mask=scaled[:, None] & inside[None, :],
                other=0.0,
            )
            total += tl.sum(vectors + states.to(tl.float32) * slope[:, None], 0)
    if WEIGHT:
        tl.store(weight + group * depth + step, total * scale, mask=inside)
    if BIAS:
        if tl.program_id(1) == 0:
            tl.store(bias + group, tl.sum(level, 0) * scale)
