"""The gradient of ZLPR on CUDA: a tile is read and written once."""

import triton
import triton.language as tl

from lastlayer.kernels.zlpr._labels_triton import (
    BITS,
    HARD,
    LISTED,
    exp_from,
    list_of,
    load_listed,
    load_tile,
)


@triton.jit
def _slopes(value, label, keep, grad, up_peak, up_scale, down_peak, down_scale, KIND: tl.constexpr):
    if (KIND == HARD) or (KIND == BITS):
        x = tl.where(label, -value, value)
        share = exp_from(x, tl.where(label, down_peak, up_peak))
        slope = share * tl.where(label, -down_scale, up_scale)
    else:
        up = tl.where(label < 1.0, exp_from(value, up_peak) * up_scale, 0.0) * (1.0 - label)
        down = tl.where(label > 0.0, exp_from(-value, down_peak) * down_scale, 0.0) * label
        slope = up - down
    return tl.where(keep & (grad != 0.0), slope * grad, 0.0)


@triton.jit
def fill_gradient(
    scores, labels, mask, classes, values, starts, stats, grad, out,
    n_rows, n, stride, label_stride, mask_row, mask_column, smoothing,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
    LIST: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    row = (first_row + tl.arange(0, ROWS))[:, None]
    live = row < n_rows
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = live & (column < n)
    upstream = tl.load(grad + row, mask=live, other=0.0).to(tl.float32)
    up_peak = tl.load(stats + row, mask=live, other=0.0)
    up_scale = 1.0 / tl.load(stats + n_rows + row, mask=live, other=1.0)
    down_peak = tl.load(stats + 2 * n_rows + row, mask=live, other=0.0)
    down_scale = 1.0 / tl.load(stats + 3 * n_rows + row, mask=live, other=1.0)
    value, label, keep, listed = load_tile(
        scores, labels, mask, row, column, inside, stride, label_stride, mask_row, mask_column,
        smoothing, KIND, MASKED,
    )  # fmt: skip
    slope = _slopes(value, label, keep, upstream, up_peak, up_scale, down_peak, down_scale, KIND)
    place = out + row * n + column
    tl.store(place, slope.to(out.dtype.element_ty), mask=inside & ~listed)
    if KIND == LISTED:
        begin, end = list_of(starts, first_row, tl.program_id(1), KIND)
        for first in range(begin, end, LIST):
            its_value, its_label, its_keep, named, real = load_listed(
                scores, mask, classes, values, first, end, row, stride, mask_row, mask_column,
                MASKED, LIST,
            )  # fmt: skip
            its_slope = _slopes(
                its_value, its_label, its_keep, upstream, up_peak, up_scale, down_peak,
                down_scale, KIND,
            )  # fmt: skip
            tl.store(out + row * n + named, its_slope.to(out.dtype.element_ty), mask=real)
