"""Vectors of length 1, and what a gradient by them is by the vectors themselves."""

import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import next_power_of_2


def unit_rows_(rows: Tensor, out: Tensor, normalize: bool) -> None:
    """As the reference's."""
    n, depth = rows.shape
    if n and depth:
        width = max(16, next_power_of_2(depth))
        _unit_row[(n,)](
            rows, out, depth, rows.stride(0), rows.stride(1), WIDTH=width, NORMALIZE=normalize,
            num_warps=_warps(width), enable_fp_fusion=True,
        )  # fmt: skip


def row_gradients_(
    rows: Tensor, gradient: Tensor, factor: Tensor, normalize: bool, out: Tensor, along: Tensor
) -> None:
    """As the reference's; ``gradient``, ``out`` and ``along`` are contiguous."""
    n, depth = rows.shape
    if n and depth:
        width = max(16, next_power_of_2(depth))
        _row_gradient[(n,)](
            rows, gradient, factor, out, along, depth, rows.stride(0), rows.stride(1), WIDTH=width,
            NORMALIZE=normalize, num_warps=_warps(width), enable_fp_fusion=True,
        )  # fmt: skip


def _warps(width: int) -> int:
    return min(16, max(1, width // 256))


@triton.jit
def _length(values, inside):
    """1 over the length of a row, and 0 for a row of zeros; squares are kept in range."""
    size = tl.max(tl.where(inside, tl.abs(values), 0.0), 0)
    safe = tl.where(size == 0.0, 1.0, size)
    scaled = values / safe
    length = tl.sqrt(tl.sum(scaled * scaled, 0))
    return tl.where(size == 0.0, 0.0, 1.0 / (safe * length))


@triton.jit
def _unit_row(
    rows, out, depth, row_stride, step_stride, WIDTH: tl.constexpr, NORMALIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, WIDTH)
    inside = step < depth
    place = rows + row * row_stride + step * step_stride
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if NORMALIZE:
        values *= _length(values, inside)
    tl.store(out + row * depth + step, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row_gradient(
    rows, gradient, factor, out, along, depth, row_stride, step_stride, WIDTH: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, WIDTH)
    inside = step < depth
    place = rows + row * row_stride + step * step_stride
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(gradient + row * depth + step, mask=inside, other=0.0).to(tl.float32)
    slope *= tl.load(factor).to(tl.float32)
    if NORMALIZE:
        inverse = _length(values, inside)
        values *= inverse
    together = tl.sum(values * slope, 0)
    tl.store(along + row, together)
    if NORMALIZE:
        slope = (slope - values * together) * inverse
    tl.store(out + row * depth + step, slope.to(out.dtype.element_ty), mask=inside)
