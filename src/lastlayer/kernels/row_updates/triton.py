"""Row-wise steps on CUDA: a program takes one row of a gradient."""

import math

import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import next_power_of_2

WIDEST = 1024


def adagrad_(
    weight: Tensor,
    total: Tensor,
    ids: Tensor,
    gradient: Tensor,
    lr: float,
    weight_decay: float,
    eps: float,
) -> None:
    """As the reference's."""
    k, depth = gradient.shape
    if gradient.numel():
        _adagrad[(k,)](
            weight, total, ids, gradient, depth, weight.stride(0), gradient.stride(0),
            gradient.stride(1), lr, 1.0 - lr * weight_decay, eps, WIDTH=_width(depth),
            enable_fp_fusion=True,
        )  # fmt: skip


def adam_(
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    row_step: Tensor,
    step: Tensor,
    ids: Tensor,
    gradient: Tensor,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    decays: bool,
) -> None:
    """As the reference's."""
    k, depth = gradient.shape
    if gradient.numel():
        _adam[(k,)](
            weight, first, second, row_step, step, ids, gradient, depth, weight.stride(0),
            gradient.stride(0), gradient.stride(1), lr, 1.0 - lr * weight_decay, beta1, beta2,
            1.0 - beta1, 1.0 - beta2, _log(beta1), _log(beta2), eps, DECAYS=decays,
            WIDTH=_width(depth), enable_fp_fusion=True,
        )  # fmt: skip


def _width(depth: int) -> int:
    return min(WIDEST, max(16, next_power_of_2(depth)))


def _log(beta: float) -> float:
    # Of 0 a number whose multiples are 0 when they are exponentiated.
    return math.log(beta) if beta > 0.0 else -1e4


@triton.jit
def _comes_again(ids, place, row):
    """Whether the row is that of the slot before, which has moved it."""
    return tl.load(ids + place - 1, mask=place > 0, other=-1) == row


@triton.jit
def _adagrad(
    weight, total, ids, gradient, depth, weight_row, gradient_row, gradient_step, lr, kept, eps,
    WIDTH: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + place).to(tl.int64)
    if not _comes_again(ids, place, row):
        squares = tl.zeros((WIDTH,), dtype=tl.float32)
        for start in range(0, depth, WIDTH):
            step = start + tl.arange(0, WIDTH)
            at = gradient + place * gradient_row + step * gradient_step
            value = tl.load(at, mask=step < depth, other=0.0).to(tl.float32)
            squares += value * value
        sums = tl.load(total + row) + tl.sum(squares, 0) / depth
        # Every warp of the program has read the old sum before one of them writes the new one.
        tl.debug_barrier()
        tl.store(total + row, sums)
        factor = lr / (tl.sqrt(sums) + eps)
        for start in range(0, depth, WIDTH):
            step = start + tl.arange(0, WIDTH)
            inside = step < depth
            at = gradient + place * gradient_row + step * gradient_step
            value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            there = weight + row * weight_row + step
            old = tl.load(there, mask=inside, other=0.0).to(tl.float32)
            tl.store(there, (kept * old - factor * value).to(weight.dtype.element_ty), mask=inside)


@triton.jit
def _adam(
    weight, first, second, row_step, step, ids, gradient, depth, weight_row, gradient_row,
    gradient_step, lr, kept, beta1, beta2, new1, new2, log1, log2, eps, DECAYS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + place).to(tl.int64)
    if not _comes_again(ids, place, row):
        before = tl.load(row_step + row)
        kept1, kept2 = beta1, beta2
        if DECAYS:
            now = tl.load(step).to(tl.int32)
            missed = (now - before).to(tl.float32)
            kept1, kept2 = tl.exp(missed * log1), tl.exp(missed * log2)
        else:
            now = before + 1
        # Every warp of the program has read the clock before one of them sets it.
        tl.debug_barrier()
        tl.store(row_step + row, now)
        factor = lr / _one_minus_exp(now.to(tl.float32) * log1)
        root_scale = 1.0 / tl.sqrt(_one_minus_exp(now.to(tl.float32) * log2))
        for start in range(0, depth, WIDTH):
            column = start + tl.arange(0, WIDTH)
            inside = column < depth
            at = gradient + place * gradient_row + column * gradient_step
            value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            state = row * depth + column
            mean = kept1 * tl.load(first + state, mask=inside, other=0.0) + new1 * value
            square = kept2 * tl.load(second + state, mask=inside, other=0.0) + new2 * value * value
            tl.store(first + state, mean, mask=inside)
            tl.store(second + state, square, mask=inside)
            way = factor * mean / (tl.sqrt(square) * root_scale + eps)
            there = weight + row * weight_row + column
            old = tl.load(there, mask=inside, other=0.0).to(tl.float32)
            tl.store(there, (kept * old - way).to(weight.dtype.element_ty), mask=inside)


@triton.jit
def _one_minus_exp(x):
    """1 − e^x for x < 0; by its series where the difference would cancel."""
    series = 1.0 + x / 6.0 * (1.0 + x / 7.0 * (1.0 + x / 8.0 * (1.0 + x / 9.0)))
    series = 1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0 * series)))
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))
