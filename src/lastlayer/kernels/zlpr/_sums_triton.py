"""The sums of ZLPR on CUDA: a row is read once, unless a score is far on its wrong side.

README.md beside this file says why the first reading needs no maximum.
"""

import triton
import triton.language as tl

from lastlayer.kernels.zlpr._labels_triton import (
    BITS,
    HARD,
    LISTED,
    LOG2E,
    exp_from,
    list_of,
    load_listed,
    load_tile,
)

# exp of this, times any number of classes, is far from the ends of float32.
FAR = tl.constexpr(60.0)


@triton.jit
def _add(
    value, label, keep, top, up, down, up_peak, down_peak, KIND: tl.constexpr, FIRST: tl.constexpr
):
    """Sums over negatives (up) and positives (down), and the largest exponent of the two."""
    if (KIND == HARD) or (KIND == BITS):
        x = tl.where(keep, tl.where(label, -value, value), -float("inf"))
        if FIRST:
            top = tl.maximum(top, x)
            share = tl.exp2(x * LOG2E)
        else:
            share = exp_from(x, tl.where(label, down_peak, up_peak))
        up += tl.where(label, 0.0, share)
        down += tl.where(label, share, 0.0)
    else:
        negative = tl.where(keep & (label < 1.0), value, -float("inf"))
        positive = tl.where(keep & (label > 0.0), -value, -float("inf"))
        if FIRST:
            top = tl.maximum(top, tl.maximum(negative, positive))
            up_share, down_share = tl.exp2(negative * LOG2E), tl.exp2(positive * LOG2E)
        else:
            up_share, down_share = exp_from(negative, up_peak), exp_from(positive, down_peak)
        # A label of a class that does not count may be anything.
        up += tl.where(keep, 1.0 - label, 0.0) * up_share
        down += tl.where(keep, label, 0.0) * down_share
    return top, up, down


@triton.jit
def _raise(value, label, keep, up_peak, down_peak, KIND: tl.constexpr):
    """The largest exponents of both sums."""
    if (KIND == HARD) or (KIND == BITS):
        is_negative, is_positive = keep & ~label, keep & label
    else:
        is_negative, is_positive = keep & (label < 1.0), keep & (label > 0.0)
    up_peak = tl.maximum(up_peak, tl.where(is_negative, value, -float("inf")))
    return up_peak, tl.maximum(down_peak, tl.where(is_positive, -value, -float("inf")))


@triton.jit
def _sweep(
    scores, labels, mask, classes, values, row, live, first_column, stop_column, begin, end,
    stride, label_stride, mask_row, mask_column, smoothing, up_peak, down_peak,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
    LIST: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One reading: the largest exponent, both sums, and whether anything counts."""
    top = tl.full((ROWS, BLOCK), 0.0, dtype=tl.float32)
    up = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    down = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    seen = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    for first in range(first_column, stop_column, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        value, label, keep, _ = load_tile(
            scores, labels, mask, row, column, live & (column < stop_column), stride, label_stride,
            mask_row, mask_column, smoothing, KIND, MASKED,
        )  # fmt: skip
        top, up, down = _add(value, label, keep, top, up, down, up_peak, down_peak, KIND, FIRST)
        if MASKED:
            seen = seen | keep.to(tl.int32)
    highest, up_sum, down_sum = tl.max(top, 1), tl.sum(up, 1), tl.sum(down, 1)
    any_seen = tl.max(seen, 1)
    if KIND == LISTED:
        top = tl.full((1, LIST), 0.0, dtype=tl.float32)
        up = tl.zeros((1, LIST), dtype=tl.float32)
        down = tl.zeros((1, LIST), dtype=tl.float32)
        seen = tl.zeros((1, LIST), dtype=tl.int32)
        for first in range(begin, end, LIST):
            value, label, keep, _, _ = load_listed(
                scores, mask, classes, values, first, end, row, stride, mask_row, mask_column,
                MASKED, LIST,
            )  # fmt: skip
            top, up, down = _add(value, label, keep, top, up, down, up_peak, down_peak, KIND, FIRST)
            seen = seen | keep.to(tl.int32)
        highest = tl.maximum(highest, tl.max(top, 1))
        up_sum += tl.sum(up, 1)
        down_sum += tl.sum(down, 1)
        any_seen = tl.maximum(any_seen, tl.max(seen, 1))
    return highest, up_sum, down_sum, any_seen


@triton.jit
def _find_peaks(
    scores, labels, mask, classes, values, row, live, first_column, stop_column, begin, end,
    stride, label_stride, mask_row, mask_column, smoothing,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
    LIST: tl.constexpr,
):  # fmt: skip
    """The largest exponents of both sums, at least that of the 1 beside them."""
    up = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    down = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(first_column, stop_column, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        value, label, keep, _ = load_tile(
            scores, labels, mask, row, column, live & (column < stop_column), stride, label_stride,
            mask_row, mask_column, smoothing, KIND, MASKED,
        )  # fmt: skip
        up, down = _raise(value, label, keep, up, down, KIND)
    up_peak, down_peak = tl.max(up, 1), tl.max(down, 1)
    if KIND == LISTED:
        up = tl.zeros((1, LIST), dtype=tl.float32)
        down = tl.zeros((1, LIST), dtype=tl.float32)
        for first in range(begin, end, LIST):
            value, label, keep, _, _ = load_listed(
                scores, mask, classes, values, first, end, row, stride, mask_row, mask_column,
                MASKED, LIST,
            )  # fmt: skip
            up, down = _raise(value, label, keep, up, down, KIND)
        up_peak = tl.maximum(up_peak, tl.max(up, 1))
        down_peak = tl.maximum(down_peak, tl.max(down, 1))
    return up_peak, down_peak


@triton.jit
def _log_one_plus(peak, total):
    """``log(1 + sum)``, where the sum is ``total · exp(peak)``."""
    series = total * (1.0 - total * (0.5 - total * (0.33333334 - total * (0.25 - total * 0.2))))
    plain = tl.where(total < 0.03125, series, tl.log(1.0 + total))
    return tl.where(peak > 0.0, peak + tl.log(total + tl.exp(-peak)), plain)


@triton.jit
def _store_row(losses, stats, counts, row, live, n_rows, up_peak, up, down_peak, down, seen):
    loss = _log_one_plus(up_peak, up) + _log_one_plus(down_peak, down)
    tl.store(losses + row, loss, mask=live)
    tl.store(stats + row, up_peak, mask=live)
    tl.store(stats + n_rows + row, up + tl.exp(-up_peak), mask=live)
    tl.store(stats + 2 * n_rows + row, down_peak, mask=live)
    tl.store(stats + 3 * n_rows + row, down + tl.exp(-down_peak), mask=live)
    tl.store(counts + row, seen.to(tl.uint8), mask=live)


@triton.jit
def sum_rows(
    scores, labels, mask, classes, values, starts, losses, stats, counts, pieces,
    n_rows, n, span, stride, label_stride, mask_row, mask_column, smoothing,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
    WHOLE: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    flat_row = first_row + tl.arange(0, ROWS)
    flat_live = flat_row < n_rows
    row, live = flat_row[:, None], flat_live[:, None]
    start = part * span
    stop = tl.minimum(start + span, n)
    begin, end = list_of(starts, first_row, part, KIND)

    top, up, down, seen = _sweep(
        scores, labels, mask, classes, values, row, live, start, stop, begin, end, stride,
        label_stride, mask_row, mask_column, smoothing, 0.0, 0.0,
        ROWS, BLOCK, KIND, MASKED, LIST, True,
    )  # fmt: skip
    if not MASKED:
        seen = (flat_row >= 0) & (stop > start)
    up_peak = tl.zeros((ROWS,), dtype=tl.float32)
    down_peak = tl.zeros((ROWS,), dtype=tl.float32)
    if tl.max(top, 0) > FAR:
        up_peak, down_peak = _find_peaks(
            scores, labels, mask, classes, values, row, live, start, stop, begin, end, stride,
            label_stride, mask_row, mask_column, smoothing, ROWS, BLOCK, KIND, MASKED, LIST,
        )  # fmt: skip
        _, up, down, _ = _sweep(
            scores, labels, mask, classes, values, row, live, start, stop, begin, end, stride,
            label_stride, mask_row, mask_column, smoothing, up_peak[:, None], down_peak[:, None],
            ROWS, BLOCK, KIND, MASKED, LIST, False,
        )  # fmt: skip
    if WHOLE:
        _store_row(
            losses, stats, counts, flat_row, flat_live, n_rows, up_peak, up, down_peak, down, seen
        )
    else:
        parts = tl.num_programs(1).to(tl.int64)
        place = pieces + part * n_rows + flat_row
        tl.store(place, up_peak, mask=flat_live)
        tl.store(place + parts * n_rows, up, mask=flat_live)
        tl.store(place + 2 * parts * n_rows, down_peak, mask=flat_live)
        tl.store(place + 3 * parts * n_rows, down, mask=flat_live)
        tl.store(place + 4 * parts * n_rows, seen.to(tl.float32), mask=flat_live)


@triton.jit
def merge_parts(pieces, losses, stats, counts, n_rows, parts, PARTS: tl.constexpr):
    """The parts of a row to its sums."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    part = tl.arange(0, PARTS)[None, :]
    here = part < parts
    place = pieces + part.to(tl.int64) * n_rows + row[:, None]
    step = parts.to(tl.int64) * n_rows
    up_peaks = tl.load(place, mask=here, other=0.0)
    ups = tl.load(place + step, mask=here, other=0.0)
    down_peaks = tl.load(place + 2 * step, mask=here, other=0.0)
    downs = tl.load(place + 3 * step, mask=here, other=0.0)
    seen = tl.max(tl.load(place + 4 * step, mask=here, other=0.0), 1)
    up_peak, down_peak = tl.max(up_peaks, 1), tl.max(down_peaks, 1)
    up = tl.sum(ups * exp_from(up_peaks, up_peak[:, None]), 1)
    down = tl.sum(downs * exp_from(down_peaks, down_peak[:, None]), 1)
    _store_row(losses, stats, counts, row, row < n_rows, n_rows, up_peak, up, down_peak, down, seen)
