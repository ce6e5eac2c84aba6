"""Cross entropy from hidden states of small width, tile by tile: scores never reach memory.

For a small hidden size, recomputing a score is cheaper than storing it. There are three kernels:

* ``_mix_of_rows`` has a tile of rows per program and loops over the classes with a running maximum,
  like flash attention with the class vectors as both keys and values. It computes the logsumexp of
  each row and the mean class vector under softmax, which is all that the gradient of hidden needs.
  If there are few rows, several programs per tile each process a part of the classes.
* ``_finish_row`` computes loss and gradient of a row from these.
* ``_gradient_of_classes`` has a tile of classes per program and loops over the rows, recomputing
  each score. A row of the weight's gradient is summed in float32 and written once, by one program.

There are no locks and no atomics: the result does not depend on the order of programs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import (
    LOG2E,
    cdiv,
    load_rows,
    multiprocessors,
    next_power_of_2,
    sort_ids,
    tanh,
)


class Mix(NamedTuple):
    """Statistics of each row, for each part of the classes."""

    lse: Tensor
    """float32 ``(parts, n)``."""
    mean_vector: Tensor
    """float32 ``(parts, n, depth)``, or ``(parts, 0, depth)`` if not wanted."""


class Rows(NamedTuple):
    """Results of each row over all classes."""

    loss: Tensor
    """float32 ``(n,)``."""
    factors: Tensor
    """float32 ``(3, n)``: logsumexp, push (factor of probabilities) and pull (of the target)."""
    gradient: Tensor
    """Gradient of hidden, ``(n, depth)``, or ``(0, depth)`` if not wanted."""


def mix_of_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float, temperature: float,
    mean_wanted: bool,
) -> Mix:  # fmt: skip
    """The logsumexp of each row, and ``sum_j p_j * slope_j * weight_j``, for parts of the classes.

    ``slope`` is the derivative of the score, after cap and temperature, with respect to the plain
    score. :func:`finish_rows` combines the parts.
    """
    n, depth = hidden.shape
    n_classes = weight.shape[0]
    bias = None if bias is None else bias.contiguous()
    rows, classes, warps, stages = _row_tiles(depth)
    tiles = cdiv(n, rows)
    splits = _splits(tiles, n_classes, hidden)
    lse = torch.empty(splits, n, device=hidden.device, dtype=torch.float32)
    kept = n if mean_wanted else 0
    mean = torch.empty(splits, kept, depth, device=hidden.device, dtype=torch.float32)
    span = cdiv(cdiv(n_classes, splits), classes) * classes
    _mix_of_rows[(tiles, splits)](
        hidden, weight, bias, lse, mean, n, n_classes, depth, span, hidden.stride(0),
        weight.stride(0), softcap, 1.0 / temperature, ROWS=rows, CLASSES=classes,
        DEPTH=_padded(depth), EVEN=_padded(depth) == depth, BIASED=bias is not None,
        CAPPED=softcap != 0.0, MEAN=mean_wanted, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return Mix(lse, mean)


def gradient_of_classes(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, factors: Tensor,
    softcap: float, temperature: float, weight_gradient: Tensor, bias_gradient: Tensor | None,
    add: bool, in_order: bool = False,
) -> None:  # fmt: skip
    """Writes, or adds, ``sum_i (push_i p_ij - pull_i [j = target_i]) slope_ij hidden_i``.

    ``factors`` has logsumexp, push and pull of each row, float32 ``(3, n)``. ``in_order`` means
    that rows are already sorted by target.
    """
    n, depth = hidden.shape
    n_classes = weight.shape[0]
    bias = None if bias is None else bias.contiguous()
    rows, classes, warps, stages = _class_tiles(depth)
    # Row factors such as 1/n would underflow in float16, so they are scaled to 1, and back later.
    size = factors[1].abs().amax().clamp_min(1e-30) if hidden.dtype == torch.float16 else None
    # With rows sorted by target, the rows with targets in a tile of classes are adjacent, and the
    # kernel skips the comparison for all others.
    if not in_order:
        target, order = sort_ids(target.int())
        hidden, factors = hidden.index_select(0, order), factors.index_select(1, order)
    _gradient_of_classes[(cdiv(n_classes, classes),)](
        hidden, weight, bias, target, factors, size, weight_gradient, bias_gradient, n, n_classes,
        depth, hidden.stride(0), weight.stride(0), weight_gradient.stride(0), softcap,
        1.0 / temperature, ROWS=rows, CLASSES=classes, DEPTH=_padded(depth),
        EVEN=_padded(depth) == depth, BIASED=bias is not None,
        BIAS_GRADIENT=bias_gradient is not None, CAPPED=softcap != 0.0, ADD=add,
        SIZED=size is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _padded(depth: int) -> int:
    return max(16, next_power_of_2(depth))


def _row_tiles(depth: int) -> tuple[int, int, int, int]:
    """Rows per program, classes per step, warps and stages; tuned."""
    if depth <= 64:
        return 64, 128, 4, 3
    if depth <= 128:
        return 128, 64, 4, 4
    return 128, 64, 8, 3


def _class_tiles(depth: int) -> tuple[int, int, int, int]:
    """Rows per step, classes per program, warps and stages; tuned."""
    if depth <= 64:
        return 64, 128, 4, 3
    if depth <= 128:
        return 128, 64, 4, 2
    return 64, 128, 8, 3


def _splits(tiles: int, n_classes: int, hidden: Tensor) -> int:
    """Number of parts of the classes, so that all multiprocessors have work."""
    if hidden.device.type != "cuda":
        return min(2, n_classes)
    return max(1, min(8 * multiprocessors(hidden.device) // tiles, n_classes // 1024, 16))


@triton.jit
def _load(base, row, stride, step, there, inside, EVEN: tl.constexpr):
    """Rows of a matrix, 0 outside of it; ``EVEN`` if their length is that of ``step``."""
    if EVEN:
        return tl.load(base + row[:, None] * stride + step[None, :], mask=there[:, None], other=0.0)
    else:
        return load_rows(base, row, stride, step, 1, there, inside)


# The number of rows of a cluster differs between steps, so kernels are not specialised for it.
@kernel(do_not_specialize=["n"])
def _mix_of_rows(
    hidden, weight, bias, lse, mean, n, n_classes, depth, span, hidden_row, weight_row, softcap,
    inverse_temperature, ROWS: tl.constexpr, CLASSES: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    step = tl.arange(0, DEPTH)
    inside = step < depth
    states = load_rows(hidden, row, hidden_row, step, 1, row < n, inside)
    peak = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    mixed = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
    start = split * span
    stop = tl.minimum(start + span, n_classes)
    scale = inverse_temperature * LOG2E
    for first in range(start, stop, CLASSES):
        column = first + tl.arange(0, CLASSES)
        live = column < stop
        vectors = _load(weight, column.to(tl.int64), weight_row, step, live, inside, EVEN)
        scores = tl.dot(states, tl.trans(vectors))
        if BIASED:
            scores += tl.load(bias + column, mask=live, other=0.0).to(tl.float32)[None, :]
        if CAPPED:
            bent = tanh(scores / softcap)
            # -inf is kept: a cap would unmask the class.
            scores = tl.where(scores == -float("inf"), scores, bent * softcap)
        if first + CLASSES > stop:
            scores = tl.where(live[None, :], scores, -float("inf"))
        grown = tl.maximum(peak, tl.max(scores, 1) * scale)
        # While all classes are masked by a bias of -inf, the origin is 0, so no difference is NaN.
        origin = tl.where(grown == -float("inf"), 0.0, grown)
        shares = tl.exp2(scores * scale - origin[:, None])
        shrink = tl.exp2(peak - origin)
        total = total * shrink + tl.sum(shares, 1)
        if MEAN:
            mixed = mixed * shrink[:, None]
            if CAPPED:
                shares *= 1.0 - bent * bent
            mixed = tl.dot(shares.to(vectors.dtype), vectors, mixed)
        peak = grown
    tl.store(lse + split * n + row, (peak + tl.log2(total)) / LOG2E, mask=row < n)
    if MEAN:
        mixed = mixed * tl.where(total > 0.0, inverse_temperature / total, 0.0)[:, None]
        tl.store(
            mean + (split * n + row)[:, None] * depth + step[None, :],
            mixed,
            mask=(row < n)[:, None] & inside[None, :],
        )


@kernel(do_not_specialize=["n"])
def _gradient_of_classes(
    hidden, weight, bias, target, factors, size, weight_gradient, bias_gradient, n,
    n_classes, depth, hidden_row, weight_row, out_row, softcap,
    inverse_temperature, ROWS: tl.constexpr, CLASSES: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, BIASED: tl.constexpr, BIAS_GRADIENT: tl.constexpr, CAPPED: tl.constexpr,
    ADD: tl.constexpr, SIZED: tl.constexpr,
):  # fmt: skip
    back = inverse_temperature
    shrink = 1.0
    if SIZED:
        back *= tl.load(size)
        shrink = 1.0 / tl.load(size)
    push = factors + n
    pull = push + n
    column = tl.program_id(0) * CLASSES + tl.arange(0, CLASSES)
    live = column < n_classes
    step = tl.arange(0, DEPTH)
    inside = step < depth
    vectors = load_rows(weight, column.to(tl.int64), weight_row, step, 1, live, inside)
    if BIASED:
        offset = tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
    first_own = _how_many_below(target, n, tl.program_id(0) * CLASSES)
    last_own = _how_many_below(target, n, (tl.program_id(0) + 1) * CLASSES)
    scale = inverse_temperature * LOG2E
    summed = tl.zeros((CLASSES, DEPTH), dtype=tl.float32)
    bias_sum = tl.zeros((CLASSES,), dtype=tl.float32)
    for first in range(0, n, ROWS):
        row = first + tl.arange(0, ROWS)
        known = row < n
        states = _load(hidden, row.to(tl.int64), hidden_row, step, known, inside, EVEN)
        log2_sum = tl.load(factors + row, mask=known, other=0.0) * LOG2E
        # For a fully masked row, 0 avoids a difference of infinities.
        log2_sum = tl.where(log2_sum == -float("inf"), 0.0, log2_sum)
        push_row = tl.load(push + row, mask=known, other=0.0) * shrink
        scores = tl.dot(vectors, tl.trans(states))
        if BIASED:
            scores += offset[:, None]
        if CAPPED:
            bent = tanh(scores / softcap)
            scores = tl.where(scores == -float("inf"), scores, bent * softcap)
        gradient = tl.exp2(scores * scale - log2_sum[None, :]) * push_row[None, :]
        if (first < last_own) & (first + ROWS > first_own):
            pull_row = tl.load(pull + row, mask=known, other=0.0) * shrink
            right = tl.load(target + row, mask=known, other=-1)
            own = column[:, None] == right[None, :]
            gradient = tl.where(own, gradient - pull_row[None, :], gradient)
        if CAPPED:
            gradient *= 1.0 - bent * bent
        if BIAS_GRADIENT:
            bias_sum += tl.sum(gradient, 1)
        summed = tl.dot(gradient.to(states.dtype), states, summed)
    out = weight_gradient + column.to(tl.int64)[:, None] * out_row + step[None, :]
    shown = live[:, None] & inside[None, :]
    summed *= back
    if ADD:
        summed += tl.load(out, mask=shown, other=0.0).to(tl.float32)
    tl.store(out, summed.to(weight_gradient.dtype.element_ty), mask=shown)
    if BIAS_GRADIENT:
        place = bias_gradient + column
        bias_sum *= back
        if ADD:
            bias_sum += tl.load(place, mask=live, other=0.0).to(tl.float32)
        tl.store(place, bias_sum.to(bias_gradient.dtype.element_ty), mask=live)


@triton.jit
def _how_many_below(target, n, bound):
    """The number of targets below ``bound``, by bisection; they are sorted."""
    low = n * 0
    high = n
    while low < high:
        middle = (low + high) // 2
        below = tl.load(target + middle) < bound
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


def finish_rows(
    mix: Mix, weight: Tensor, target: Tensor, exact: Tensor, row_scale: Tensor | None,
    row_weight: Tensor | None, keep: float, more: Tensor | None, z_loss: float, softcap: float,
    temperature: float, dtype: torch.dtype,
) -> Rows:  # fmt: skip
    """Losses, row factors and the gradient of hidden, in ``dtype``, from the parts of ``mix``.

    ``mix`` has mean vectors if the gradient is wanted; ``exact`` is the plain score of each target.
    ``keep`` is the weight of the target, less than 1 with label smoothing. ``more`` is one number
    that is added to push, or None.
    """
    parts, n = mix.lse.shape
    kept, depth = mix.mean_vector.shape[1:]
    loss = torch.empty_like(exact)
    factors = exact.new_empty(3, n)
    gradient = exact.new_empty(kept, depth, dtype=dtype)
    _finish_row[(n,)](
        mix.lse, mix.mean_vector, weight, target, exact, row_scale, row_weight, more, loss, factors,
        gradient, n, depth, parts, weight.stride(0), keep, z_loss, softcap, 1.0 / temperature,
        PARTS=next_power_of_2(parts), DEPTH=_padded(depth), CAPPED=softcap != 0.0,
        WEIGHTED=row_weight is not None, MORE=more is not None, SCALED=row_scale is not None,
        MEAN=kept > 0, num_warps=1,
    )  # fmt: skip
    return Rows(loss, factors, gradient)


# The number of rows of a cluster, the resulting number of parts, and the alignment of rows differ
# between steps, so the kernel is not specialised for them.
@kernel(
    do_not_specialize=["n", "parts"],
    do_not_specialize_on_alignment=["target", "exact", "row_scale", "row_weight", "more", "loss"],
)
def _finish_row(
    lse, mean, weight, target, exact, row_scale, row_weight, more, loss, factors, gradient, n,
    depth, parts, weight_row, keep, z_loss, softcap, inverse_temperature, PARTS: tl.constexpr,
    DEPTH: tl.constexpr, CAPPED: tl.constexpr, WEIGHTED: tl.constexpr, MORE: tl.constexpr,
    SCALED: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    there = part < parts
    logs = tl.load(lse + part * n + row, mask=there, other=-float("inf"))
    peak = tl.max(logs, 0)
    # A bias of -inf may mask all classes of a part, or of all parts.
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    total = origin + tl.log(tl.sum(tl.exp(logs - origin), 0))
    at_target = tl.load(exact + row)
    slope = inverse_temperature
    if CAPPED:
        bent = tanh(at_target / softcap)
        at_target = tl.where(at_target == -float("inf"), at_target, bent * softcap)
        slope *= 1.0 - bent * bent
    at_target *= inverse_temperature
    pull = keep
    if WEIGHTED:
        pull *= tl.load(row_weight + row).to(tl.float32)
    # Fully masked rows have infinite loss and zero gradient.
    empty = total == -float("inf")
    row_loss = pull * (total - at_target) + z_loss * total * total
    tl.store(loss + row, tl.where(empty, float("inf"), row_loss))
    push = pull + 2.0 * z_loss * total
    if MORE:
        push += tl.load(more).to(tl.float32)
    push = tl.where(empty, 0.0, push)
    pull = tl.where(empty, 0.0, pull)
    if SCALED:
        scale = tl.load(row_scale + row).to(tl.float32)
        push *= scale
        pull *= scale
    tl.store(factors + row, total)
    tl.store(factors + n + row, push)
    tl.store(factors + 2 * n + row, pull)
    if MEAN:
        step = tl.arange(0, DEPTH)
        inside = step < depth
        share = tl.where(logs == -float("inf"), 0.0, tl.exp(logs - total))
        means = load_rows(mean, part * n + row, depth, step, 1, there, inside)
        own = weight + tl.load(target + row) * weight_row + step
        own = tl.load(own, mask=inside, other=0.0).to(tl.float32)
        # In float32, since the two nearly cancel when the target's probability is close to 1.
        moved = tl.sum(means * share[:, None], 0) * push - own * (pull * slope)
        place = gradient + row * depth + step
        tl.store(place, moved.to(gradient.dtype.element_ty), mask=inside)
