"""Top-k softmax on CUDA. Narrow rows are searched in registers, wide ones by their peaks.

README.md has the derivation; ../_triton.py the first stage for wide rows.
"""

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
    in_rows,
    next_power_of_2,
    peaks_of_row,
    row_max,
)

WIDEST_IN_REGISTERS = 8192
# Up to this width one program finds the peaks of a row and finishes it.
WIDEST_IN_ONE_PROGRAM = 16384
FEW_ROWS = 1024
# Low bits of a float32 that are 0 if it was converted from half precision: the search skips them.
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
# First steps of a search, which bisect values, not their bits: for usual scores this is faster.
BY_VALUE = tl.constexpr(10)
# Scores of chosen blocks that a program holds on chip; more are read again in each step.
MOST_ON_CHIP = 8192


def forward(scores: Tensor, k: int) -> Tensor:
    """Softmax over the ``k`` largest scores of a row (ties: lowest index first); zero elsewhere."""
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    if scores.numel():
        _run(as_rows(scores), out, None, None, None, None, k)
    return out


def logs_into(out: Tensor, scores: Tensor, bias: Tensor | None, k: int) -> None:
    if scores.numel():
        _run(in_rows(scores), out, bias, None, None, None, k, logs=True)


def loss(
    scores: Tensor, target: Tensor, row_scale: Tensor | None, k: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    losses = torch.empty(len(scores), device=scores.device, dtype=torch.float32)
    gradient = torch.empty_like(scores, memory_format=torch.contiguous_format)
    if scores.numel():
        _run(in_rows(scores), gradient, None, target.contiguous(), row_scale, losses, k)
    return losses, gradient


def _run(
    rows: Tensor, out: Tensor, bias: Tensor | None, target: Tensor | None,
    row_scale: Tensor | None, losses: Tensor | None, k: int, logs: bool = False,
) -> None:  # fmt: skip
    """Writes probabilities, their ``logs``, or with a target the loss and its gradient."""
    n_rows, n = rows.shape
    k, shift = min(k, n), UNUSED_BITS[rows.dtype] if bias is None else 0
    constants = dict(
        SHIFT=shift, BIASED=bias is not None, LOSS=target is not None,
        SCALED=row_scale is not None, LOGS=logs,
    )  # fmt: skip
    # With few rows a second launch would take longer than one program per wide row.
    if n <= WIDEST_IN_REGISTERS or (logs and n <= WIDEST_IN_ONE_PROGRAM and n_rows <= FEW_ROWS):
        width = max(16, next_power_of_2(n))
        _forward_in_registers[(n_rows,)](
            rows, out, bias, target, row_scale, losses, n, rows.stride(0), k, WIDTH=width,
            **constants, num_warps=max(1, width // 1024), enable_fp_fusion=True,
        )  # fmt: skip
        return
    width = block_width(n)
    n_blocks = cdiv(n, width)
    in_one = n <= WIDEST_IN_ONE_PROGRAM and not logs
    chosen = torch.empty(n_rows, n_blocks, device=rows.device, dtype=torch.int32)
    peaks = chosen if in_one else find_peaks(rows, None if logs else out, bias)
    # 16-bit scores are often equal at the edge, and then more than k blocks remain.
    expected = 2 * k if rows.element_size() == 2 else k
    group = next_power_of_2(min(expected, n_blocks))
    group = min(group, max(1, MOST_ON_CHIP // width))
    _forward_of_chosen[(n_rows,)](
        rows, out, bias, target, row_scale, losses, peaks, chosen, n, rows.stride(0), n_blocks, k,
        BLOCKS=next_power_of_2(n_blocks), WIDTH=width, GROUP=group, IN_ONE=in_one, **constants,
        num_warps=8 if group * width > 4096 else 4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _ordered(values, SHIFT: tl.constexpr):
    """Maps floats to integers of the same order, so that bisection ends at the exact score."""
    # Adding 0 makes -0 equal to 0.
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _values(scores, bias, column, live, BIASED: tl.constexpr):
    """Scores of a row plus bias; -inf where ``live`` is false."""
    values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
    if BIASED:
        values += tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
    return values


@triton.jit
def _lowest(SHIFT: tl.constexpr):
    """The key of -inf."""
    return tl.full((), -0x7F800001, tl.int32) >> SHIFT


@triton.jit
def _value_of(key, SHIFT: tl.constexpr):
    """The float of a key, up to the unused bits."""
    bits = key.to(tl.int32) << SHIFT
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high, trips, SHIFT: tl.constexpr):
    """A key in (``low``, ``high``]; int64, since their difference may not fit 32 bits."""
    middle = low + ((high - low + 1) >> 1)
    mean = 0.5 * _value_of(low, SHIFT) + 0.5 * _value_of(high, SHIFT)
    by_value = _ordered(mean, SHIFT).to(tl.int64)
    return tl.where((trips < BY_VALUE) & (by_value > low) & (by_value <= high), by_value, middle)


@triton.jit
def _count(members):
    """The number of true entries of a tile with one or two dimensions."""
    counts = members.to(tl.int32)
    if len(counts.shape) == 2:
        counts = tl.sum(counts, 1)
    return tl.sum(counts, 0)


@triton.jit
def _search_tile(keys, floor, top, k, SHIFT: tl.constexpr):
    """A key that exactly k keys of a tile reach; if ties prevent that, the k-th largest key.

    At least k keys must be at least ``floor``.
    """
    low = floor.to(tl.int64)
    high = top.to(tl.int64)
    trips = 0
    while low < high:
        middle = _middle(low, high, trips, SHIFT)
        trips += 1
        count = _count(keys >= middle.to(tl.int32))
        low = tl.where(count >= k, middle, low)
        high = tl.where(count > k, high, tl.where(count == k, middle, middle - 1))
    return low.to(tl.int32)


@triton.jit
def _taken(keys, edge, at_edge):
    """Mask of the keys above the edge, and of the first ``at_edge`` keys equal to it."""
    equal = (keys == edge).to(tl.int32)
    if len(keys.shape) == 2:
        flat = tl.reshape(equal, (keys.shape[0] * keys.shape[1],))
        rank = tl.reshape(tl.cumsum(flat, 0), (keys.shape[0], keys.shape[1]))
    else:
        rank = tl.cumsum(equal, 0)
    return (keys > edge) | ((equal > 0) & (rank <= at_edge))


@triton.jit
def _best(keys, edge, k):
    """Mask of the k largest keys of a tile; ties: lowest index first."""
    taken = keys >= edge
    if _count(taken) > k:
        taken = _taken(keys, edge, k - _count(keys > edge))
    return taken


@triton.jit
def _loss_of(
    scores, row_scale, losses, row, right, origin, total, rest, taken, broken, n,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Writes the loss of a row; returns the gradient of its target score, and the row's scale.

    ``rest`` is ``total`` without the target, summed separately so that nothing cancels.
    """
    at_target = tl.load(scores + right, mask=(right >= 0) & (right < n), other=float("nan"))
    own = at_target.to(tl.float32) - origin
    ratio = rest * tl.exp(-own)
    near = ratio * (1.0 - ratio * (0.5 - ratio * 0.33333334))
    loss = tl.where(ratio < 1e-2, near, tl.log(1.0 + ratio))
    loss = tl.where(taken & (ratio < 1e30), loss, tl.log(total) - own)
    # Fully masked rows and masked targets have infinite loss; NaN stays NaN.
    loss = tl.where((total == 0.0) | (own == -float("inf")), float("inf"), loss)
    tl.store(losses + row, tl.where(broken | (own != own), float("nan"), loss))
    scale = 1.0
    if SCALED:
        scale = tl.load(row_scale + row).to(tl.float32)
    short = tl.where(taken, -rest / total, -1.0) * scale
    short = tl.where(broken, float("nan"), tl.where(total == 0.0, 0.0, short))
    return tl.where(scale == 0.0, 0.0, short), scale


@kernel
def _forward_in_registers(
    scores, out, bias, target, row_scale, losses, n, stride, k,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr, BIASED: tl.constexpr, LOSS: tl.constexpr,
    SCALED: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    column = tl.arange(0, WIDTH)
    values = _values(scores, bias, column, column < n, BIASED)
    peak = row_max(values, 0)
    keys = _ordered(values, SHIFT)
    edge = _search_tile(keys, _lowest(SHIFT), tl.max(keys, 0), k, SHIFT)
    taken = _best(keys, edge, k)
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    weights = tl.where(taken, tl.exp(values - origin), 0.0)
    total = tl.sum(weights, 0)
    total_or_1 = tl.where(total == 0.0, 1.0, total)
    if LOGS:
        probs = tl.where(taken, values - origin - tl.log(total_or_1), -float("inf"))
    else:
        probs = weights / total_or_1
    probs = tl.where(peak == float("inf"), float("nan"), probs)
    if LOSS:
        right = tl.load(target + row)
        rest = tl.sum(tl.where(column == right, 0.0, weights), 0)
        own_taken = _count(taken & (column == right)) > 0
        short, scale = _loss_of(
            scores, row_scale, losses, row, right, origin, total, rest, own_taken,
            peak == float("inf"), n, SCALED,
        )  # fmt: skip
        probs = tl.where(scale == 0.0, 0.0, probs * scale)
        probs = tl.where(column == right, short, probs)
    tl.store(out + row * n + column, probs.to(out.dtype.element_ty), mask=column < n)


@triton.jit
def _search_chosen(
    scores, bias, chosen, count, n, floor, top, k,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Like _search_tile, for more scores than fit on chip: they are read again in each step."""
    low = floor.to(tl.int64)
    high = top.to(tl.int64)
    trips = 0
    while low < high:
        middle = _middle(low, high, trips, SHIFT)
        trips += 1
        members = tl.zeros((GROUP, WIDTH), dtype=tl.int32)
        for first in range(0, count, GROUP):
            column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
            values = _values(scores, bias, column, live, BIASED)
            members += ((_ordered(values, SHIFT) >= middle.to(tl.int32)) & live).to(tl.int32)
        found = tl.sum(tl.sum(members, 1), 0)
        low = tl.where(found >= k, middle, low)
        high = tl.where(found > k, high, tl.where(found == k, middle, middle - 1))
    return low.to(tl.int32)


@triton.jit
def _write(out, column, probs, present, right, scale, LOSS: tl.constexpr):
    """Writes probabilities, or the gradient of all classes but the target."""
    if LOSS:
        probs = tl.where(scale == 0.0, 0.0, probs * scale)
        present = present & (column != right)
    tl.store(out + column, probs.to(out.dtype.element_ty), mask=present)


@kernel
def _forward_of_chosen(
    scores, out, bias, target, row_scale, losses, peaks, chosen, n, stride, n_blocks, k,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, IN_ONE: tl.constexpr,
    SHIFT: tl.constexpr, BIASED: tl.constexpr, LOSS: tl.constexpr, SCALED: tl.constexpr,
    LOGS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    out += row * n
    chosen += row * n_blocks
    block = tl.arange(0, BLOCKS)
    if IN_ONE:
        peak_of = peaks_of_row(scores, out, n, BLOCKS, WIDTH, True)
    else:
        place = row * n_blocks + block
        peak_of = tl.load(peaks + place, mask=block < n_blocks, other=-float("inf"))
    if LOGS:
        for first in range(0, n, BLOCKS):
            tl.store(out + first + block, -float("inf"), mask=first + block < n)
        # Other threads of this program overwrite some of them below.
        tl.debug_barrier()
    peak = tl.max(peak_of, 0)
    broken = peak == float("inf")
    keys_of_peaks = _ordered(peak_of, SHIFT)
    top = tl.max(keys_of_peaks, 0)

    # k peaks are k scores, so the k-th largest score is at least the k-th largest peak.
    floor = _lowest(SHIFT)
    if k < n_blocks:
        floor = _search_tile(keys_of_peaks, floor, top, k, SHIFT)
    reachable = (keys_of_peaks >= floor) & (peak_of > -float("inf"))
    keep = tl.where(broken, 1, reachable.to(tl.int32)) > 0
    count = choose_blocks(chosen, keep & (block < n_blocks), BLOCKS)

    origin = tl.where(peak == -float("inf"), 0.0, peak)
    right = tl.full((), -1, tl.int64)
    scale = tl.full((), 1.0, tl.float32)
    short = tl.full((), 0.0, tl.float32)
    if LOSS:
        right = tl.load(target + row)
    if count <= GROUP:
        column, live = chosen_columns(chosen, 0, count, n, GROUP, WIDTH)
        values = _values(scores, bias, column, live, BIASED)
        keys = _ordered(values, SHIFT)
        edge = _search_tile(keys, floor, top, k, SHIFT)
        taken = _best(keys, edge, k) & live
        weights = tl.where(taken, tl.exp(values - origin), 0.0)
        total = tl.sum(tl.sum(weights, 1), 0)
        if LOSS:
            rest = tl.sum(tl.sum(tl.where(column == right, 0.0, weights), 1), 0)
            own_taken = _count(taken & (column == right)) > 0
            short, scale = _loss_of(
                scores, row_scale, losses, row, right, origin, total, rest, own_taken, broken, n,
                SCALED,
            )  # fmt: skip
        if LOGS:
            probs = values - origin - tl.log(total)
        else:
            probs = weights / total
        probs = tl.where(broken, float("nan"), probs)
        _write(out, column, probs, tl.where(broken, live, taken), right, scale, LOSS)
    else:
        edge = _search_chosen(
            scores, bias, chosen, count, n, floor, top, k, GROUP, WIDTH, SHIFT, BIASED
        )
        above = tl.zeros((GROUP, WIDTH), dtype=tl.int32)
        for first in range(0, count, GROUP):
            column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
            values = _values(scores, bias, column, live, BIASED)
            above += (_ordered(values, SHIFT) > edge).to(tl.int32)
        at_edge = k - tl.sum(tl.sum(above, 1), 0)
        left = at_edge
        weights = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
        others = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
        met = tl.zeros((GROUP, WIDTH), dtype=tl.int32)
        for first in range(0, count, GROUP):
            column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
            values = _values(scores, bias, column, live, BIASED)
            keys = _ordered(values, SHIFT)
            taken = _taken(keys, edge, left) & live
            left -= _count((keys == edge) & live)
            more = tl.where(taken, tl.exp(values - origin), 0.0)
            weights += more
            if LOSS:
                others += tl.where(column == right, 0.0, more)
                met += (taken & (column == right)).to(tl.int32)
        total = tl.sum(tl.sum(weights, 1), 0)
        if LOSS:
            short, scale = _loss_of(
                scores, row_scale, losses, row, right, origin, total,
                tl.sum(tl.sum(others, 1), 0), tl.sum(tl.sum(met, 1), 0) > 0, broken, n, SCALED,
            )  # fmt: skip
        left = at_edge
        for first in range(0, count, GROUP):
            column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
            values = _values(scores, bias, column, live, BIASED)
            keys = _ordered(values, SHIFT)
            taken = _taken(keys, edge, left) & live
            left -= _count((keys == edge) & live)
            if LOGS:
                probs = values - origin - tl.log(total)
            else:
                probs = tl.exp(values - origin) / total
            probs = tl.where(broken, float("nan"), probs)
            _write(out, column, probs, tl.where(broken, live, taken), right, scale, LOSS)
    if LOSS:
        # Other threads of this program may have written a zero there.
        tl.debug_barrier()
        tl.store(out + right, short.to(out.dtype.element_ty), mask=(right >= 0) & (right < n))
