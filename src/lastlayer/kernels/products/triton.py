"""Products with chosen classes on CUDA, without atomics: results are deterministic.

A program computes the scores of up to 16 classes of one row; or sums the class vectors of one row;
or sums the rows of one class, from entries sorted by class. Classes without entries are not
touched. ``scale_`` reads the factor first, and does not read the tensor if it is 1. One program
computes a mean.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import (
    cdiv,
    dot_rows,
    in_rows,
    load_rows,
    mean_of_losses,
    next_power_of_2,
    sort_ids,
    tile_width,
)

# Entries that a program adds in one step.
GROUP = 16
WIDEST = 512
# Few programs with several blocks each, since with a factor of 1 starting them is the whole cost.
MOST_PROGRAMS = 2048
# Elements of hidden states that a program copies.
COPIED = 2048
# Up to this many losses one program computes their mean in microseconds.
MOST_LOSSES = 1 << 18


def scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor) -> Tensor:
    made = torch.empty(classes.shape, device=hidden.device, dtype=torch.float32)
    n, k = classes.shape
    if made.numel():
        depth = hidden.shape[1]
        group = min(16, next_power_of_2(k))
        _class_scores[(n, cdiv(k, group))](
            hidden, weight, None if bias is None else bias.contiguous(), classes.contiguous(), made,
            k, depth, hidden.stride(0), hidden.stride(1), weight.stride(0), weight.stride(1),
            GROUP=group, DEPTH=tile_width(depth, 1024), BIASED=bias is not None,
        )  # fmt: skip
    return made


# Classes are often a slice of a longer list, with any alignment.
@kernel(do_not_specialize_on_alignment=["classes", "scores"])
def _class_scores(
    hidden, weight, bias, classes, scores, k, depth, hidden_row, hidden_step, weight_row,
    weight_step, GROUP: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    live = slot < k
    chosen = tl.load(classes + row * k + slot, mask=live, other=-1)
    live = chosen >= 0
    hidden += row * hidden_row
    total = dot_rows(
        hidden, hidden_step, weight, chosen, weight_row, weight_step, live, depth, GROUP, DEPTH
    )
    if BIASED:
        total += tl.load(bias + chosen, mask=live, other=0.0).to(tl.float32)
    tl.store(scores + row * k + slot, total, mask=slot < k)


def to_hidden(values: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
    n, k = values.shape
    depth = weight.shape[1]
    out = torch.empty(n, depth, device=weight.device, dtype=weight.dtype)
    if out.numel():
        width = tile_width(depth, WIDEST)
        _gather_classes[(n, cdiv(depth, width))](
            values.contiguous(), classes.contiguous(), weight, out, k, depth, weight.stride(0),
            weight.stride(1), GROUP=GROUP, WIDTH=width,
        )  # fmt: skip
    return out


def add_to_weight_(
    values: Tensor, classes: Tensor, hidden: Tensor, weight_gradient: Tensor
) -> None:
    n_classes, depth = weight_gradient.shape
    if not values.numel() or not weight_gradient.numel():
        return
    # Padding is sorted behind the last class.
    key = torch.where(values == 0, n_classes, classes).flatten()
    key, order = sort_ids(key.int())
    edges = torch.arange(n_classes + 1, device=key.device, dtype=torch.int32)
    starts = torch.searchsorted(key, edges)
    width = tile_width(depth, WIDEST)
    _gather_rows[(n_classes, cdiv(depth, width))](
        values.contiguous(), order, starts, hidden, weight_gradient, values.shape[1], depth,
        hidden.stride(0), hidden.stride(1), weight_gradient.stride(0), weight_gradient.stride(1),
        GROUP=GROUP, WIDTH=width,
    )  # fmt: skip


@kernel
def _gather_classes(
    values, classes, weight, out, k, depth, weight_row, weight_step,
    GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = step < depth
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for first in range(0, k, GROUP):
        slot = first + tl.arange(0, GROUP)
        value = tl.load(values + row * k + slot, mask=slot < k, other=0.0).to(tl.float32)
        used = value != 0.0
        if tl.max(used.to(tl.int32), 0) > 0:
            chosen = tl.load(classes + row * k + slot, mask=used, other=0)
            # In a row of NaN the padding is NaN too, with class -1.
            there = used & (chosen >= 0)
            vectors = load_rows(weight, chosen, weight_row, step, weight_step, there, inside)
            total += tl.sum(vectors.to(tl.float32) * value[:, None], 0)
    tl.store(out + row * depth + step, total.to(out.dtype.element_ty), mask=inside)


@kernel
def _gather_rows(
    values, order, starts, hidden, out, k, depth, hidden_row, hidden_step, out_row, out_step,
    GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    chosen = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + chosen)
    stop = tl.load(starts + chosen + 1)
    if start < stop:
        step = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        inside = step < depth
        total = tl.zeros((WIDTH,), dtype=tl.float32)
        for first in range(start, stop, GROUP):
            slot = first + tl.arange(0, GROUP)
            entry = tl.load(order + slot, mask=slot < stop, other=0)
            value = tl.load(values + entry, mask=slot < stop, other=0.0).to(tl.float32)
            states = load_rows(
                hidden, entry // k, hidden_row, step, hidden_step, slot < stop, inside
            )
            total += tl.sum(states.to(tl.float32) * value[:, None], 0)
        place = out + chosen * out_row + step * out_step
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def scale_(values: Tensor, others: Sequence[Tensor], factor: Tensor) -> None:
    """Same as the reference; all tensors must be contiguous."""
    some = [each for each in (values, *others) if each.numel()]
    for first in range(0, len(some), 3):
        three = some[first : first + 3]
        sizes = [each.numel() for each in three]
        block = 4096
        programs = min(cdiv(max(sizes), block), MOST_PROGRAMS)
        while len(three) < 3:
            three.append(three[0])
            sizes.append(0)
        _scale[(programs,)](factor, *three, *sizes, BLOCK=block, num_warps=8)


@triton.jit
def _scale_one(values, by, n, BLOCK: tl.constexpr):
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
        place = first + tl.arange(0, BLOCK)
        value = tl.load(values + place, mask=place < n, other=0.0)
        tl.store(values + place, (value.to(tl.float32) * by).to(value.dtype), mask=place < n)


@kernel
def _scale(factor, first, second, third, n_first, n_second, n_third, BLOCK: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        _scale_one(first, by, n_first, BLOCK)
        _scale_one(second, by, n_second, BLOCK)
        _scale_one(third, by, n_third, BLOCK)


def weighted_mean(losses: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    n = losses.shape[0]
    if n > MOST_LOSSES:
        share = losses.new_full((), n) if weights is None else weights.sum(dtype=losses.dtype)
        share = torch.where(share == 0, 0.0, share.reciprocal())
        if weights is not None:
            losses = torch.where(weights == 0, 0.0, losses * weights)
        return losses.sum() * share, share
    loss = torch.empty((), device=losses.device, dtype=losses.dtype)
    share = torch.empty((), device=losses.device, dtype=losses.dtype)
    if weights is not None:
        weights = weights.contiguous()
        weights = weights.view(torch.uint8) if weights.dtype == torch.bool else weights
    mean_of_losses(losses.contiguous(), 0, weights, loss, share, 0, n)
    return loss, share


def row_factors(
    target: Tensor, hidden: Tensor, row_weight: Tensor | None, ignore_index: int, mean: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (n, depth), hidden = hidden.shape, in_rows(hidden)
    clean = torch.empty_like(target)
    states = torch.empty(n, depth, device=hidden.device, dtype=hidden.dtype)
    weight = torch.empty(n, device=target.device, dtype=torch.float32)
    factor = torch.empty_like(weight) if mean else weight
    if n:
        block = tile_width(n, 4096, 128)
        programs = cdiv(n, block)
        # Every one of the first programs sums all weights, so that none waits for another. The
        # other programs copy hidden states.
        _row_factors[(programs + cdiv(n * depth, COPIED),)](
            target.contiguous(), hidden, row_weight, clean, states, weight, factor, n, depth,
            hidden.stride(0), ignore_index, programs, BLOCK=block, COPIED=COPIED,
            WEIGHTED=row_weight is not None, MEAN=mean, num_warps=max(4, block // 512),
        )  # fmt: skip
    return clean, states, weight, factor


@triton.jit
def _weights(target, row_weight, row, n, ignored, WEIGHTED: tl.constexpr):
    own = tl.load(target + row, mask=row < n, other=ignored)
    weight = tl.where(own == ignored, 0.0, 1.0)
    if WEIGHTED:
        given = tl.load(row_weight + row, mask=row < n, other=0.0).to(tl.float32)
        weight = tl.where(own == ignored, 0.0, given)
    return own, weight


@kernel(do_not_specialize=["n", "programs"])
def _row_factors(
    target, hidden, row_weight, clean, states, weights, factors, n, depth, stride, ignored,
    programs, BLOCK: tl.constexpr, COPIED: tl.constexpr, WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < programs:
        row = program * BLOCK + tl.arange(0, BLOCK)
        own, weight = _weights(target, row_weight, row, n, ignored, WEIGHTED)
        tl.store(clean + row, tl.where(own == ignored, 0, own), mask=row < n)
        tl.store(weights + row, weight, mask=row < n)
        if MEAN:
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            for first in range(0, n, BLOCK):
                some = first + tl.arange(0, BLOCK)
                _, more = _weights(target, row_weight, some, n, ignored, WEIGHTED)
                total += more
            size = tl.sum(total, 0)
            tl.store(factors + row, weight / tl.where(size == 0.0, 1.0, size), mask=row < n)
    else:
        place = (program - programs).to(tl.int64) * COPIED + tl.arange(0, COPIED)
        of_row = place // depth
        counts = tl.load(target + of_row, mask=of_row < n, other=ignored) != ignored
        # Hidden states of ignored rows may be NaN, so they are not read.
        state = tl.load(hidden + of_row * stride + place % depth, mask=counts, other=0.0)
        tl.store(states + place, state, mask=of_row < n)
