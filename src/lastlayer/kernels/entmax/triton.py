"""entmax on CUDA. Narrow rows are solved in registers, wide ones by their peaks.

README.md beside this file has the derivation; _solve.py the threshold; ../_peaks.py the first
stage on wide rows.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._peaks import (
    block_width,
    choose_blocks,
    chosen_columns,
    find_peaks,
    peaks_of_row,
    row_max,
)
from lastlayer.kernels.entmax._solve import (
    BOTH,
    advance,
    bound_from_part,
    correction,
    per_class,
    polished,
    row_sum,
    shares,
    solve_tile,
    unsolved_row,
)

WIDEST_IN_REGISTERS = 512
WIDEST_BACKWARD_IN_REGISTERS = 8192
# Up to here one program finds the peaks of a row and finishes it.
WIDEST_IN_ONE_PROGRAM = 16384


class _Alpha(NamedTuple):
    """alpha as the kernels take it."""

    kind: int
    excess: float
    per_row: Tensor | None


def forward(scores: Tensor, alpha: float, row_alpha: Tensor | None) -> Tensor:
    """Probabilities of each row, in the dtype of ``scores``."""
    probs = torch.empty_like(scores, memory_format=torch.contiguous_format)
    if scores.numel():
        rows = _as_rows(scores)
        _solve(rows, _as_alpha(alpha, row_alpha), probs, None, None, 0)
    return probs


def support(
    scores: Tensor, alpha: float, row_alpha: Tensor | None, max_support: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The non-zeros of each row in ascending order of class, padded with (0, class 0)."""
    batch = scores.shape[:-1]
    values = scores.new_zeros(*batch, max_support)
    indices = scores.new_zeros(*batch, max_support, dtype=torch.int64)
    size = scores.new_zeros(batch, dtype=torch.int64)
    if scores.numel():
        rows = _as_rows(scores)
        _solve(rows, _as_alpha(alpha, row_alpha), values, indices, size, max_support)
    return values, indices, size


def backward(probs: Tensor, grad: Tensor, alpha: float, row_alpha: Tensor | None) -> Tensor:
    """``s * (grad - <s, grad> / <s, 1>)`` with ``s = p ** (2 - alpha)`` on the support."""
    out = torch.empty_like(grad, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    probs, grad = _as_rows(probs), _as_rows(grad)
    kind, excess, per_row = _as_alpha(alpha, row_alpha)
    if per_row is None and alpha == 1.0:
        kind = 3
    n_rows, n = probs.shape
    alphas = probs if per_row is None else per_row
    if n <= WIDEST_BACKWARD_IN_REGISTERS:
        width, rows, warps = _register_tile(n)
        _backward_in_registers[(triton.cdiv(n_rows, rows),)](
            probs, grad, out, alphas, excess, n_rows, n, probs.stride(0), grad.stride(0),
            ROWS=rows, WIDTH=width, KIND=kind, PER_ROW=per_row is not None, num_warps=warps,
        )  # fmt: skip
        return out
    width = block_width(n)
    n_blocks = triton.cdiv(n, width)
    sums = torch.empty(2, n_rows, n_blocks, device=probs.device, dtype=torch.float32)
    blocks = max(1, 4096 // width)
    tiles = triton.cdiv(n_blocks, blocks)
    _backward_sums[(n_rows * tiles,)](
        probs, grad, out, sums, alphas, excess, n_rows, n, probs.stride(0), grad.stride(0),
        tiles, n_blocks, BLOCKS=blocks, WIDTH=width, KIND=kind, PER_ROW=per_row is not None,
        num_warps=4,
    )  # fmt: skip
    chosen = torch.empty(n_rows, n_blocks, device=probs.device, dtype=torch.int32)
    _backward_of_chosen[(n_rows,)](
        probs, grad, out, sums, chosen, alphas, excess, n_rows, n, probs.stride(0),
        grad.stride(0), n_blocks, BLOCKS=triton.next_power_of_2(n_blocks), WIDTH=width,
        GROUP=max(1, _group_scores(n) // width), KIND=kind, PER_ROW=per_row is not None,
        num_warps=4,
    )  # fmt: skip
    return out


def _solve(
    rows: Tensor,
    alpha: _Alpha,
    out: Tensor,
    indices: Tensor | None,
    size: Tensor | None,
    max_support: int,
) -> None:
    """Dense probabilities into ``out``, or where ``indices`` is given the non-zeros alone."""
    n_rows, n = rows.shape
    compact = indices is not None
    alphas = rows if alpha.per_row is None else alpha.per_row
    shared = dict(
        KIND=alpha.kind,
        PER_ROW=alpha.per_row is not None,
        COMPACT=compact,
        enable_fp_fusion=False,  # _solve.py says why
    )
    if n <= WIDEST_IN_REGISTERS:
        width, row_count, warps = _register_tile(n)
        _forward_in_registers[(triton.cdiv(n_rows, row_count),)](
            rows, out, indices, size, alphas, alpha.excess, n_rows, n, rows.stride(0), math.log(n),
            max_support, ROWS=row_count, WIDTH=width, num_warps=warps, **shared,
        )  # fmt: skip
        return
    width = block_width(n)
    n_blocks = triton.cdiv(n, width)
    in_one = n <= WIDEST_IN_ONE_PROGRAM
    chosen = torch.empty(n_rows, n_blocks, device=rows.device, dtype=torch.int32)
    peaks = chosen if in_one else find_peaks(rows, None if compact else out)
    _forward_of_chosen[(n_rows,)](
        rows, out, indices, size, peaks, chosen, alphas, alpha.excess, n, rows.stride(0),
        math.log(n), n_blocks, max_support, BLOCKS=triton.next_power_of_2(n_blocks), WIDTH=width,
        GROUP=max(1, _group_scores(n) // width), IN_ONE=in_one, num_warps=_warps(n), **shared,
    )  # fmt: skip


def _group_scores(n: int) -> int:
    """How many scores of chosen blocks a program looks at together."""
    return 256 if n <= 2048 else 512 if n <= 8192 else 1024


def _warps(n: int) -> int:
    return 1 if n <= 2048 else 2 if n <= 8192 else 4


def _as_rows(scores: Tensor) -> Tensor:
    rows = scores.reshape(-1, scores.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _as_alpha(alpha: float, row_alpha: Tensor | None) -> _Alpha:
    if row_alpha is not None:
        return _Alpha(0, 0.0, row_alpha.reshape(-1).float().contiguous())
    kind = {2.0: 1, 1.5: 2}.get(alpha, 0)
    return _Alpha(kind, alpha - 1.0, None)


def _register_tile(n: int) -> tuple[int, int, int]:
    """Width and rows of a tile that one program holds, and its warps."""
    width = max(16, triton.next_power_of_2(n))
    return width, max(1, 512 // width), max(1, min(8, width // 1024))


@triton.jit
def _tile(n_rows, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows (a scalar where there is one) and columns of this program, and which entries exist."""
    column = tl.arange(0, WIDTH)
    if ROWS == 1:
        row = tl.program_id(0).to(tl.int64)
        return row, column, column < n
    else:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        return row, column[None, :], (row < n_rows)[:, None] & (column[None, :] < n)


@triton.jit
def _is_broken(peak, excess, KIND: tl.constexpr):
    """Rows whose result is NaN: a score is NaN or +inf, or alpha is below 1 or NaN."""
    broken = peak == float("inf")
    if KIND == 0:
        broken = broken | (excess < 0.0) | (excess != excess)
    return broken


@triton.jit
def _overshoot(total, excess):
    """What to divide by: where alpha > 2 slopes are steep at the edge of the support."""
    return tl.where((excess > 1.0) & (total != 0.0), total, 1.0)


@triton.jit
def _forward_in_registers(
    scores, out, indices, size, alphas, excess, n_rows, n, stride, log_n, max_support,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, PER_ROW: tl.constexpr,
    COMPACT: tl.constexpr,
):  # fmt: skip
    AXIS: tl.constexpr = 0 if ROWS == 1 else 1
    row, column, live = _tile(n_rows, n, ROWS, WIDTH)
    place = per_class(row, AXIS)
    values = tl.load(scores + place * stride + column, mask=live, other=-float("inf"))
    values = values.to(tl.float32)
    peak = row_max(values, AXIS)
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    if PER_ROW:
        excess = tl.load(alphas + row, mask=row < n_rows, other=1.0) - 1.0
    else:
        excess = tl.zeros_like(peak) + excess
    distance = values - per_class(origin, AXIS)
    at = unsolved_row(peak, KIND)
    at, total, weight = solve_tile(distance, at, log_n, excess, KIND, AXIS)
    probs, slope = shares(distance, per_class(at, AXIS), per_class(excess, AXIS), KIND)
    missing = correction(total, weight, _is_broken(peak, excess, KIND))
    probs = polished(probs, slope, per_class(missing, AXIS))
    if KIND == 0:
        probs = probs / per_class(_overshoot(row_sum(probs, AXIS), excess), AXIS)
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
def _sums_of_chosen(
    scores, chosen, count, n, origin, at, excess,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    totals = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
    weights = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
    for first in range(0, count, GROUP):
        column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
        values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
        probs, slope = shares(values - origin, at, excess, KIND)
        totals += probs
        weights += slope
    return row_sum(totals, BOTH), row_sum(weights, BOTH)


@triton.jit
def _solve_chosen(
    scores, chosen, count, n, origin, at, log_n, excess,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """As solve_tile, for a row with more candidates than the chip holds: they are read again."""
    low, high = -log_n, at
    total, weight = _sums_of_chosen(
        scores, chosen, count, n, origin, at, excess, WIDTH, GROUP, KIND
    )
    trips = 0
    at, low, high, go = advance(at, low, high, total, weight, excess, trips, KIND)
    while go:
        total, weight = _sums_of_chosen(
            scores, chosen, count, n, origin, at, excess, WIDTH, GROUP, KIND
        )
        trips += 1
        at, low, high, go = advance(at, low, high, total, weight, excess, trips, KIND)
    return at, total, weight


@triton.jit
def _survives(probs, out):
    """Which probabilities are not 0 once they are written."""
    return probs.to(out.dtype.element_ty).to(tl.float32) != 0.0


@triton.jit
def _write_chosen(
    out, indices, probs, column, live, filled, max_support,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """Writes the non-zeros of a group of blocks; says how many the row has so far."""
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
):  # fmt: skip
    """Solves and writes a row whose chosen blocks fit on the chip; says how many non-zeros."""
    column, live = chosen_columns(chosen, 0, count, n, GROUP, WIDTH)
    values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
    distance = values - origin
    at, total, weight = solve_tile(distance, at, log_n, excess, KIND, BOTH)
    probs, slope = shares(distance, at, excess, KIND)
    probs = polished(probs, slope, correction(total, weight, broken))
    if KIND == 0:
        probs = probs / _overshoot(row_sum(probs, BOTH), excess)
    return _write_chosen(out, indices, probs, column, live, 0, max_support, GROUP, WIDTH, COMPACT)


@triton.jit
def _finish_many(
    scores, out, indices, chosen, count, n, origin, at, log_n, excess, broken, max_support,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """As _finish_few, for a row with more candidates than the chip holds."""
    at, total, weight = _solve_chosen(
        scores, chosen, count, n, origin, at, log_n, excess, WIDTH, GROUP, KIND
    )
    missing = correction(total, weight, broken)
    norm = 1.0
    if KIND == 0:
        if excess > 1.0:
            norm = 0.0
            for first in range(0, count, GROUP):
                column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
                values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
                probs, slope = shares(values - origin, at, excess, KIND)
                norm += row_sum(polished(probs, slope, missing), BOTH)
    filled = 0
    for first in range(0, count, GROUP):
        column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
        values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
        probs, slope = shares(values - origin, at, excess, KIND)
        probs = polished(probs, slope, missing)
        if KIND == 0:
            probs = probs / norm
        filled = _write_chosen(
            out, indices, probs, column, live, filled, max_support, GROUP, WIDTH, COMPACT
        )
    return filled


@triton.jit
def _forward_of_chosen(
    scores, out, indices, size, peaks, chosen, alphas, excess, n, stride, log_n, n_blocks,
    max_support, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, PER_ROW: tl.constexpr, COMPACT: tl.constexpr, IN_ONE: tl.constexpr,
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
    broken = _is_broken(peak, excess, KIND)
    origin = tl.where(peak == -float("inf"), 0.0, peak)

    # Blocks whose peak does not pass the threshold of the peaks have no share.
    distance = peak_of - origin
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
            GROUP, WIDTH, KIND, COMPACT,
        )  # fmt: skip
    else:
        filled = _finish_many(
            scores, out, indices, chosen, count, n, origin, at, log_n, excess, broken, max_support,
            GROUP, WIDTH, KIND, COMPACT,
        )  # fmt: skip
    if COMPACT:
        tl.store(size + row, filled.to(tl.int64))


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
    row, column, live = _tile(n_rows, n, ROWS, WIDTH)
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
