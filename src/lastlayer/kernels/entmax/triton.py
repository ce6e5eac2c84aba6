"""entmax on CUDA: narrow rows are solved in registers, wide rows by the peaks of their blocks.

Backward reads all probabilities, but the gradient only on the support. Wide rows take two kernels
there too: the first streams the probabilities, writes zeros and stores two sums per block; the
second processes the blocks that have non-zeros. README.md has the derivation, and threshold.py
solves for the threshold.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import (
    as_rows,
    block_width,
    cdiv,
    choose_blocks,
    chosen_columns,
    find_peaks,
    next_power_of_2,
    peaks_of_row,
    row_max,
)
from lastlayer.kernels.entmax.threshold import (
    BOTH,
    WIDEST_IN_ONE_PROGRAM,
    alpha_gradient,
    alpha_terms,
    below,
    bound_from_part,
    correction,
    group_and_warps,
    is_broken,
    kind_of,
    per_class,
    polished,
    register_tile,
    row_sum,
    shares,
    solve_chosen,
    solved_tile,
    tile,
    unsolved_row,
)

WIDEST_IN_REGISTERS, WIDEST_BACKWARD = 512, 8192
BACKWARD_SCORES, BACKWARD_GROUP = 4096, 1024


def _as_alpha(alpha: float, row_alpha: Tensor | None) -> tuple[int, float, Tensor | None]:
    """Arguments of the kernels: the kind, alpha - 1, and the alpha of each row or None."""
    if row_alpha is not None:
        return 0, 0.0, row_alpha.reshape(-1).float().contiguous()
    return kind_of(alpha), alpha - 1.0, None


def forward(scores: Tensor, alpha: float, row_alpha: Tensor | None) -> Tensor:
    probs = torch.empty_like(scores, memory_format=torch.contiguous_format)
    if scores.numel():
        _solve(scores, alpha, row_alpha, probs, None, None, 0)
    return probs


def log_(scores: Tensor, alpha: float) -> None:
    torch.log(forward(scores, alpha, None), out=scores)


def support(
    scores: Tensor, alpha: float, row_alpha: Tensor | None, max_support: int, wide: bool = False,
    shrink: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch = scores.shape[:-1]
    dtype = torch.float32 if wide else scores.dtype
    values = scores.new_zeros(*batch, max_support, dtype=dtype)
    indices = scores.new_zeros(*batch, max_support, dtype=torch.int64)
    size = scores.new_zeros(batch, dtype=torch.int64)
    if scores.numel():
        _solve(scores, alpha, row_alpha, values, indices, size, max_support, shrink)
    return values, indices, size


def _solve(
    scores: Tensor, alpha: float, row_alpha: Tensor | None, out: Tensor, indices: Tensor | None,
    size: Tensor | None, max_support: int, shrink: float = 1.0,
) -> None:  # fmt: skip
    """Writes dense probabilities to ``out``, or only the non-zeros if ``indices`` is given."""
    rows = as_rows(scores)
    n_rows, n = rows.shape
    compact = indices is not None
    kind, excess, per_row = _as_alpha(alpha, row_alpha)
    alphas = rows if per_row is None else per_row
    # threshold.py explains enable_fp_fusion=False.
    options = dict(COMPACT=compact, SHRINK=shrink, enable_fp_fusion=False)
    shared = dict(KIND=kind, PER_ROW=per_row is not None, **options)
    if n <= WIDEST_IN_REGISTERS:
        width, row_count, warps = register_tile(n)
        _forward_in_registers[(cdiv(n_rows, row_count),)](
            rows, out, indices, size, alphas, excess, n_rows, n, rows.stride(0), math.log(n),
            max_support, ROWS=row_count, WIDTH=width, num_warps=warps, **shared,
        )  # fmt: skip
        return
    width = block_width(n)
    n_blocks = cdiv(n, width)
    in_one = n <= WIDEST_IN_ONE_PROGRAM
    chosen = torch.empty(n_rows, n_blocks, device=rows.device, dtype=torch.int32)
    peaks = chosen if in_one else find_peaks(rows, None if compact else out)
    _forward_of_chosen[(n_rows,)](
        rows, out, indices, size, peaks, chosen, alphas, excess, n, rows.stride(0),
        math.log(n), n_blocks, max_support, BLOCKS=next_power_of_2(n_blocks), WIDTH=width,
        IN_ONE=in_one, **group_and_warps(n, width), **shared,
    )  # fmt: skip


@kernel
def _forward_in_registers(
    scores, out, indices, size, alphas, excess, n_rows, n, stride, log_n, max_support,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, PER_ROW: tl.constexpr,
    COMPACT: tl.constexpr, SHRINK: tl.constexpr,
):  # fmt: skip
    AXIS: tl.constexpr = 0 if ROWS == 1 else 1
    row, column, live = tile(n_rows, n, ROWS, WIDTH)
    place = per_class(row, AXIS)
    values = tl.load(scores + place * stride + column, mask=live, other=-float("inf"))
    values = values.to(tl.float32)
    peak = row_max(values, AXIS)
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    if PER_ROW:
        excess = tl.load(alphas + row, mask=row < n_rows, other=1.0) - 1.0
    else:
        excess = tl.zeros_like(peak) + excess
    distance = below(values, per_class(origin, AXIS), SHRINK)
    broken = is_broken(peak, excess, KIND)
    probs = solved_tile(distance, unsolved_row(peak, KIND), broken, log_n, excess, KIND, AXIS)
    if COMPACT:
        present = _survives(probs, out) & live
        slot = tl.cumsum(present.to(tl.int32), AXIS) - 1
        room = present & (slot < max_support)
        slot = place * max_support + slot
        tl.store(out + slot, probs.to(out.dtype.element_ty), mask=room)
        tl.store(indices + slot, slot * 0 + column, mask=room)
        tl.store(size + row, tl.sum(present.to(tl.int64), AXIS), mask=row < n_rows)
    else:
        tl.store(out + place * n + column, probs.to(out.dtype.element_ty), mask=live)


@triton.jit
def _survives(probs, out):
    """Which probabilities are not 0 after conversion to the dtype of ``out``."""
    return probs.to(out.dtype.element_ty).to(tl.float32) != 0.0


@triton.jit
def _write_chosen(
    out, indices, probs, column, live, filled, max_support,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """Writes the non-zeros of a group of blocks; returns how many the row has so far."""
    present = _survives(probs, out) & live
    if COMPACT:
        flat = tl.reshape(present.to(tl.int32), (GROUP * WIDTH,))
        slot = tl.reshape(tl.cumsum(flat, 0), (GROUP, WIDTH)) - 1 + filled
        room = present & (slot < max_support)
        tl.store(out + slot, probs.to(out.dtype.element_ty), mask=room)
        tl.store(indices + slot, column.to(tl.int64), mask=room)
        filled += tl.sum(flat, 0)
    else:
        tl.store(out + column, probs.to(out.dtype.element_ty), mask=present)
    return filled


@triton.jit
def _finish_few(
    scores, out, indices, chosen, count, n, origin, at, log_n, excess, broken, max_support,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, COMPACT: tl.constexpr,
    SHRINK: tl.constexpr,
):  # fmt: skip
    """Solves and writes a row whose chosen blocks fit in registers; returns its non-zeros."""
    column, live = chosen_columns(chosen, 0, count, n, GROUP, WIDTH)
    values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
    distance = below(values, origin, SHRINK)
    probs = solved_tile(distance, at, broken, log_n, excess, KIND, BOTH)
    return _write_chosen(out, indices, probs, column, live, 0, max_support, GROUP, WIDTH, COMPACT)


@triton.jit
def _finish_many(
    scores, out, indices, chosen, count, n, origin, at, log_n, excess, broken, max_support,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, COMPACT: tl.constexpr,
    LONG: tl.constexpr, SHRINK: tl.constexpr,
):  # fmt: skip
    """As :func:`_finish_few`, for a row with more candidates than fit in registers."""
    at, total, weight = solve_chosen(
        scores, chosen, count, n, origin, at, log_n, excess, WIDTH, GROUP, KIND, LONG, SHRINK
    )
    missing = correction(total, weight, broken)
    norm = 1.0
    if KIND == 0:
        if excess > 1.0:
            norm = 0.0
            for first in range(0, count, GROUP):
                column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
                values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
                probs, slope = shares(below(values, origin, SHRINK), at, excess, KIND)
                norm += row_sum(polished(probs, slope, missing), BOTH)
    filled = 0
    for first in range(0, count, GROUP):
        column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
        values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
        probs, slope = shares(below(values, origin, SHRINK), at, excess, KIND)
        probs = polished(probs, slope, missing)
        if KIND == 0:
            probs = probs / norm
        filled = _write_chosen(
            out, indices, probs, column, live, filled, max_support, GROUP, WIDTH, COMPACT
        )
    return filled


@kernel
def _forward_of_chosen(
    scores, out, indices, size, peaks, chosen, alphas, excess, n, stride, log_n, n_blocks,
    max_support, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, PER_ROW: tl.constexpr, COMPACT: tl.constexpr, IN_ONE: tl.constexpr,
    SHRINK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    chosen += row * n_blocks
    if PER_ROW:
        excess = tl.load(alphas + row) - 1.0
    block = tl.arange(0, BLOCKS)
    if IN_ONE:
        peak_of = peaks_of_row(scores, out + row * n, n, BLOCKS, WIDTH, not COMPACT)
    else:
        place = row * n_blocks + block
        peak_of = tl.load(peaks + place, mask=block < n_blocks, other=-float("inf"))
    peak = tl.max(peak_of, 0)
    broken = is_broken(peak, excess, KIND)
    origin = tl.where(peak == -float("inf"), 0.0, peak)

    # Blocks whose peak does not exceed the threshold of the peaks are zero.
    distance = below(peak_of, origin, SHRINK)
    at = bound_from_part(distance, origin, log_n, excess, KIND)
    reachable, _ = shares(distance, at, excess, KIND)
    keep = tl.where(broken, 1.0, reachable) > 0.0
    count = choose_blocks(chosen, keep & (block < n_blocks), BLOCKS)

    if COMPACT:
        out += row * max_support
        indices += row * max_support
    else:
        out += row * n
    if count <= GROUP:
        filled = _finish_few(
            scores, out, indices, chosen, count, n, origin, at, log_n, excess, broken, max_support,
            GROUP, WIDTH, KIND, COMPACT, SHRINK,
        )  # fmt: skip
    else:
        filled = _finish_many(
            scores, out, indices, chosen, count, n, origin, at, log_n, excess, broken, max_support,
            GROUP, WIDTH, KIND, COMPACT, not IN_ONE, SHRINK,
        )  # fmt: skip
    if COMPACT:
        tl.store(size + row, filled.to(tl.int64))


def backward(probs: Tensor, grad: Tensor, alpha: float, row_alpha: Tensor | None) -> Tensor:
    return _backward(probs, grad, alpha, row_alpha, None)


def gradients(probs: Tensor, grad: Tensor, row_alpha: Tensor) -> tuple[Tensor, Tensor]:
    by_alpha = torch.empty(row_alpha.shape, device=probs.device, dtype=row_alpha.dtype)
    return _backward(probs, grad, 0.0, row_alpha, by_alpha), by_alpha


def _backward(
    probs: Tensor, grad: Tensor, alpha: float, row_alpha: Tensor | None, by_alpha: Tensor | None
) -> Tensor:
    out = torch.empty_like(grad, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    probs, grad = as_rows(probs), as_rows(grad)
    kind, excess, per_row = _as_alpha(alpha, row_alpha)
    if kind > 2:
        kind = 0
    if per_row is None and alpha == 1.0:
        kind = 3
    n_rows, n = probs.shape
    alphas = probs if per_row is None else per_row
    shared = dict(KIND=kind, PER_ROW=per_row is not None, LEARNED=by_alpha is not None)
    if n <= WIDEST_BACKWARD:
        width, rows, warps = register_tile(n)
        _backward_in_registers[(cdiv(n_rows, rows),)](
            probs, grad, out, alphas, by_alpha, excess, n_rows, n, probs.stride(0),
            grad.stride(0), ROWS=rows, WIDTH=width, num_warps=warps, **shared,
        )  # fmt: skip
        return out
    width = block_width(n)
    n_blocks = cdiv(n, width)
    sums = torch.empty(2, n_rows, n_blocks, device=probs.device, dtype=torch.float32)
    blocks = max(1, BACKWARD_SCORES // width)
    tiles = cdiv(n_blocks, blocks)
    _backward_sums[(n_rows * tiles,)](
        probs, grad, out, sums, n_rows, n, probs.stride(0), grad.stride(0), tiles, n_blocks,
        BLOCKS=blocks, WIDTH=width, KIND=kind, num_warps=4,
    )  # fmt: skip
    chosen = torch.empty(n_rows, n_blocks, device=probs.device, dtype=torch.int32)
    _backward_of_chosen[(n_rows,)](
        probs, grad, out, sums, chosen, alphas, by_alpha, excess, n_rows, n, probs.stride(0),
        grad.stride(0), n_blocks, BLOCKS=next_power_of_2(n_blocks), WIDTH=width,
        GROUP=max(1, BACKWARD_GROUP // width), num_warps=4, **shared,
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


@kernel
def _backward_in_registers(
    probs, grad, out, alphas, by_alpha, excess, n_rows, n, probs_stride, grad_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, PER_ROW: tl.constexpr,
    LEARNED: tl.constexpr,
):  # fmt: skip
    AXIS: tl.constexpr = 0 if ROWS == 1 else 1
    row, column, live = tile(n_rows, n, ROWS, WIDTH)
    place = per_class(row, AXIS)
    p = tl.load(probs + place * probs_stride + column, mask=live, other=0.0).to(tl.float32)
    inside = p != 0.0
    g = tl.load(grad + place * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    if PER_ROW:
        own = tl.load(alphas + row, mask=row < n_rows, other=1.0) - 1.0
        excess = per_class(own, AXIS)
    slope = _slopes(p, excess, KIND)
    weight = tl.sum(slope, AXIS)
    if LEARNED:
        entropy = -tl.sum(p * tl.log(tl.where(inside, p, 1.0)), AXIS)
        square, first, second = alpha_terms(p, g, per_class(tl.sum(p * g, AXIS), AXIS), excess)
        made = alpha_gradient(
            tl.sum(square, AXIS), tl.sum(first, AXIS), tl.sum(second, AXIS), entropy, weight, own
        )
        tl.store(by_alpha + row, made.to(by_alpha.dtype.element_ty), mask=row < n_rows)
    if KIND == 0:
        # For alpha > 2 one slope can be far larger than all others. Subtracting its gradient avoids
        # cancellation.
        steepest = slope == per_class(tl.max(slope, AXIS), AXIS)
        shift = tl.sum(tl.where(steepest, g, 0.0), AXIS) / tl.sum(steepest.to(tl.float32), AXIS)
        g -= per_class(shift, AXIS)
    mean = tl.sum(slope * g, AXIS) / tl.where(weight == 0.0, 1.0, weight)
    product = tl.where(inside, slope * (g - per_class(mean, AXIS)), 0.0)
    tl.store(out + place * n + column, product.to(out.dtype.element_ty), mask=live)


@kernel
def _backward_sums(
    probs, grad, out, sums, n_rows, n, probs_stride, grad_stride, tiles, n_blocks,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Writes zeros, and per block the sum of slopes and the sum of slopes times gradients.

    Kind 0 writes only the number of non-zeros: powers would take longer than the memory accesses.
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    block = (tl.program_id(0) % tiles) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    live = column < n
    p = tl.load(probs + row * probs_stride + column, mask=live, other=0.0).to(tl.float32)
    nothing = tl.zeros((BLOCKS, WIDTH), dtype=out.dtype.element_ty)
    tl.store(out + row * n + column, nothing, mask=live)
    place = row * n_blocks + block
    if KIND == 0:
        tl.store(sums + place, tl.sum((p != 0.0).to(tl.float32), 1), mask=block < n_blocks)
    else:
        g = tl.load(grad + row * grad_stride + column, mask=p != 0.0, other=0.0).to(tl.float32)
        slope = _slopes(p, 0.0, KIND)
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


@kernel
def _backward_of_chosen(
    probs, grad, out, sums, chosen, alphas, by_alpha, excess, n_rows, n, probs_stride, grad_stride,
    n_blocks, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    PER_ROW: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chosen += row * n_blocks
    probs += row * probs_stride
    grad += row * grad_stride
    out += row * n
    if PER_ROW:
        excess = tl.load(alphas + row) - 1.0
    block = tl.arange(0, BLOCKS)
    place = row * n_blocks + block
    weights = tl.load(sums + place, mask=block < n_blocks, other=0.0)
    count = choose_blocks(chosen, weights != 0.0, BLOCKS)
    shift = 0.0
    if KIND > 0:
        second_sums = sums + n_rows.to(tl.int64) * n_blocks
        products = tl.load(second_sums + place, mask=block < n_blocks, other=0.0)
        mean = tl.sum(products, 0) / tl.sum(weights, 0)
    else:
        if excess > 1.0:
            # As above: the gradient of the steepest class is subtracted.
            shift = _gradient_of_steepest(probs, grad, chosen, count, n, excess, WIDTH, GROUP, KIND)
        slopes = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
        products = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
        entropies = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
        means = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
        for first in range(0, count, GROUP):
            column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
            p = tl.load(probs + column, mask=live, other=0.0).to(tl.float32)
            g = tl.load(grad + column, mask=p != 0.0, other=0.0).to(tl.float32)
            slope = _slopes(p, excess, KIND)
            slopes += slope
            products += slope * (g - shift)
            if LEARNED:
                entropies -= p * tl.log(tl.where(p != 0.0, p, 1.0))
                means += p * g
        weight = row_sum(slopes, BOTH)
        mean = row_sum(products, BOTH) / weight
        mean_g = row_sum(means, BOTH)
    squares = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
    firsts = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
    seconds = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
    for first in range(0, count, GROUP):
        column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
        p = tl.load(probs + column, mask=live, other=0.0).to(tl.float32)
        inside = p != 0.0
        g = tl.load(grad + column, mask=inside, other=0.0).to(tl.float32)
        product = _slopes(p, excess, KIND) * (g - shift - mean)
        tl.store(out + column, product.to(out.dtype.element_ty), mask=inside)
        if LEARNED:
            square, one, two = alpha_terms(p, g, mean_g, excess)
            squares += square
            firsts += one
            seconds += two
    if LEARNED:
        made = alpha_gradient(
            row_sum(squares, BOTH), row_sum(firsts, BOTH), row_sum(seconds, BOTH),
            row_sum(entropies, BOTH), weight, excess,
        )  # fmt: skip
        tl.store(by_alpha + row, made.to(by_alpha.dtype.element_ty))
