"""Backward of entmax on CUDA: the probabilities are read whole, the gradient on the support only.

Narrow rows are held in registers. Wide rows take two kernels, as they do forward: one streams the
probabilities, writes zeros and leaves two sums a block; the other finishes the blocks that have
any support.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import (
    block_width,
    cdiv,
    choose_blocks,
    chosen_columns,
    next_power_of_2,
)
from lastlayer.kernels.entmax._solve import per_class
from lastlayer.kernels.entmax._tiles import as_alpha, as_rows, register_tile, tile

WIDEST_IN_REGISTERS = 8192
SCORES_A_PROGRAM = 4096
GROUP_SCORES = 1024


def backward(probs: Tensor, grad: Tensor, alpha: float, row_alpha: Tensor | None) -> Tensor:
    """``s * (grad - <s, grad> / <s, 1>)`` with ``s = p ** (2 - alpha)`` on the support."""
    out = torch.empty_like(grad, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    probs, grad = as_rows(probs), as_rows(grad)
    kind, excess, per_row = as_alpha(alpha, row_alpha)
    if per_row is None and alpha == 1.0:
        kind = 3
    n_rows, n = probs.shape
    alphas = probs if per_row is None else per_row
    if n <= WIDEST_IN_REGISTERS:
        width, rows, warps = register_tile(n)
        _backward_in_registers[(cdiv(n_rows, rows),)](
            probs, grad, out, alphas, excess, n_rows, n, probs.stride(0), grad.stride(0),
            ROWS=rows, WIDTH=width, KIND=kind, PER_ROW=per_row is not None, num_warps=warps,
            enable_fp_fusion=True,
        )  # fmt: skip
        return out
    width = block_width(n)
    n_blocks = cdiv(n, width)
    sums = torch.empty(2, n_rows, n_blocks, device=probs.device, dtype=torch.float32)
    blocks = max(1, SCORES_A_PROGRAM // width)
    tiles = cdiv(n_blocks, blocks)
    _backward_sums[(n_rows * tiles,)](
        probs, grad, out, sums, alphas, excess, n_rows, n, probs.stride(0), grad.stride(0),
        tiles, n_blocks, BLOCKS=blocks, WIDTH=width, KIND=kind, PER_ROW=per_row is not None,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    chosen = torch.empty(n_rows, n_blocks, device=probs.device, dtype=torch.int32)
    _backward_of_chosen[(n_rows,)](
        probs, grad, out, sums, chosen, alphas, excess, n_rows, n, probs.stride(0),
        grad.stride(0), n_blocks, BLOCKS=next_power_of_2(n_blocks), WIDTH=width,
        GROUP=max(1, GROUP_SCORES // width), KIND=kind, PER_ROW=per_row is not None,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out


@triton.jit
def _slopes(probs, excess, KIND: tl.constexpr):
    """``p ** (2 - alpha)`` on the support, 0 elsewhere. Kind 3 is softmax."""
    if KIND == 1:
        slope = probs * 0.0 + 1.0
    elif KIND == 2:
        slope = tl.sqrt(probs)
    elif KIND == 3:
        slope = probs
    else:
        slope = tl.exp((1.0 - excess) * tl.log(tl.where(probs == 0.0, 1.0, probs)))
    return tl.where(probs == 0.0, 0.0, slope)


@triton.jit
def _backward_in_registers(
    probs, grad, out, alphas, excess, n_rows, n, probs_stride, grad_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    AXIS: tl.constexpr = 0 if ROWS == 1 else 1
    row, column, live = tile(n_rows, n, ROWS, WIDTH)
    place = per_class(row, AXIS)
    p = tl.load(probs + place * probs_stride + column, mask=live, other=0.0).to(tl.float32)
    inside = p != 0.0
    g = tl.load(grad + place * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    if PER_ROW:
        excess = per_class(tl.load(alphas + row, mask=row < n_rows, other=1.0) - 1.0, AXIS)
    slope = _slopes(p, excess, KIND)
    if KIND == 0:
        # Where alpha > 2 one slope can dwarf all others; from its gradient on nothing cancels.
        steepest = slope == per_class(tl.max(slope, AXIS), AXIS)
        shift = tl.sum(tl.where(steepest, g, 0.0), AXIS) / tl.sum(steepest.to(tl.float32), AXIS)
        g -= per_class(shift, AXIS)
    weight = tl.sum(slope, AXIS)
    mean = tl.sum(slope * g, AXIS) / tl.where(weight == 0.0, 1.0, weight)
    product = tl.where(inside, slope * (g - per_class(mean, AXIS)), 0.0)
    tl.store(out + place * n + column, product.to(out.dtype.element_ty), mask=live)


@triton.jit
def _backward_sums(
    probs, grad, out, sums, alphas, excess, n_rows, n, probs_stride, grad_stride, tiles, n_blocks,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    block = (tl.program_id(0) % tiles) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    live = column < n
    p = tl.load(probs + row * probs_stride + column, mask=live, other=0.0).to(tl.float32)
    nothing = tl.zeros((BLOCKS, WIDTH), dtype=out.dtype.element_ty)
    tl.store(out + row * n + column, nothing, mask=live)
    g = tl.load(grad + row * grad_stride + column, mask=p != 0.0, other=0.0).to(tl.float32)
    if PER_ROW:
        excess = tl.load(alphas + row) - 1.0
    slope = _slopes(p, excess, KIND)
    place = row * n_blocks + block
    tl.store(sums + place, tl.sum(slope, 1), mask=block < n_blocks)
    second = n_rows.to(tl.int64) * n_blocks
    tl.store(sums + second + place, tl.sum(slope * g, 1), mask=block < n_blocks)


@triton.jit
def _gradient_of_steepest(
    probs, grad, chosen, count, n, excess,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    steepest = 0.0
    shift = 0.0
    for first in range(0, count, GROUP):
        column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
        p = tl.load(probs + column, mask=live, other=0.0).to(tl.float32)
        g = tl.load(grad + column, mask=p != 0.0, other=0.0).to(tl.float32)
        slope = _slopes(p, excess, KIND)
        here = tl.max(tl.max(slope, 1), 0)
        first_of = tl.where(slope == here, column, n)
        place = tl.min(tl.min(first_of, 1), 0)
        there = tl.sum(tl.sum(tl.where(column == place, g, 0.0), 1), 0)
        shift = tl.where(here > steepest, there, shift)
        steepest = tl.maximum(here, steepest)
    return shift


@triton.jit
def _backward_of_chosen(
    probs, grad, out, sums, chosen, alphas, excess, n_rows, n, probs_stride, grad_stride, n_blocks,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    PER_ROW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chosen += row * n_blocks
    if PER_ROW:
        excess = tl.load(alphas + row) - 1.0
    block = tl.arange(0, BLOCKS)
    place = row * n_blocks + block
    second = n_rows.to(tl.int64) * n_blocks
    weights = tl.load(sums + place, mask=block < n_blocks, other=0.0)
    products = tl.load(sums + second + place, mask=block < n_blocks, other=0.0)
    weight = tl.sum(weights, 0)
    mean = tl.sum(products, 0) / weight
    shift = 0.0
    count = choose_blocks(chosen, weights != 0.0, BLOCKS)
    if KIND == 0:
        if excess > 1.0:
            # As above: the gradients are measured from that of the steepest class.
            shift = _gradient_of_steepest(
                probs + row * probs_stride, grad + row * grad_stride, chosen, count, n, excess,
                WIDTH, GROUP, KIND,
            )  # fmt: skip
            mean = 0.0
            for first in range(0, count, GROUP):
                column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
                p = tl.load(probs + row * probs_stride + column, mask=live, other=0.0)
                p = p.to(tl.float32)
                g = tl.load(grad + row * grad_stride + column, mask=p != 0.0, other=0.0)
                products_here = _slopes(p, excess, KIND) * (g.to(tl.float32) - shift)
                mean += tl.sum(tl.sum(products_here, 1), 0) / weight
    for first in range(0, count, GROUP):
        column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
        p = tl.load(probs + row * probs_stride + column, mask=live, other=0.0).to(tl.float32)
        inside = p != 0.0
        g = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        product = _slopes(p, excess, KIND) * (g - shift - mean)
        tl.store(out + row * n + column, product.to(out.dtype.element_ty), mask=inside)
