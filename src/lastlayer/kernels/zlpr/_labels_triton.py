"""Scores with their labels, as the CUDA kernels of ZLPR load them."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Where the label of a class comes from.
HARD, SOFT, BITS, LISTED = (tl.constexpr(kind) for kind in range(4))


@triton.jit
def load_tile(
    scores, labels, mask, row, column, inside, stride, label_stride, mask_row, mask_column,
    smoothing, KIND: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores, their labels (bool where they are 0 or 1), which count, and which are listed."""
    value = tl.load(scores + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    keep = inside
    if MASKED:
        place = row * mask_row + column * mask_column
        keep = keep & (tl.load(mask + place, mask=inside, other=0) != 0)
    listed = ~inside
    if KIND == HARD:
        label = tl.load(labels + row * label_stride + column, mask=inside, other=0) != 0
    elif KIND == SOFT:
        label = tl.load(labels + row * label_stride + column, mask=inside, other=0.0)
        label = label.to(tl.float32)
    else:
        word = tl.load(labels + row * label_stride + (column >> 5), mask=inside, other=0)
        label = ((word >> (column & 31)) & 1) != 0
        if KIND == LISTED:
            listed = label
            keep = keep & ~listed
            label = value * 0.0 + smoothing
    return value, label, keep, listed


@triton.jit
def load_listed(
    scores, mask, classes, values, first, end, row, stride, mask_row, mask_column,
    MASKED: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    place = first + tl.arange(0, LIST)[None, :]
    inside = place < end
    named = tl.load(classes + place, mask=inside, other=-1)
    real = named >= 0
    value = tl.load(scores + row * stride + named, mask=real, other=0.0).to(tl.float32)
    label = tl.load(values + place, mask=real, other=0.0)
    keep = real
    if MASKED:
        allowed = tl.load(mask + row * mask_row + named * mask_column, mask=real, other=0)
        keep = keep & (allowed != 0)
    return value, label, keep, named, real


@triton.jit
def list_of(starts, row, part, KIND: tl.constexpr):
    """Where the list of the one row begins and ends; the first part of a row has it."""
    begin = tl.zeros((), dtype=tl.int64)
    end = begin
    if KIND == LISTED:
        if part == 0:
            begin = tl.load(starts + row)
            end = tl.load(starts + row + 1)
    return begin, end


@triton.jit
def exp_from(x, origin):
    # The same infinity twice is a distance of 0.
    return tl.exp2(tl.where(x == origin, 0.0, x - origin) * LOG2E)
