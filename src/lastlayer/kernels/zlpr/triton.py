"""ZLPR on CUDA: layout of labels and rows, launches, and kernels.

Forward reads a row once, unless an exponent is above 60; README.md says why the first pass needs no
maximum. Backward reads and writes each tile once. In a slab a program handles a part of one row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import (
    BITS,
    HARD,
    LISTED,
    LOG2E,
    SCORES_A_PROGRAM,
    cdiv,
    in_rows,
    labels_of,
    load_labelled,
    mask_of,
    next_power_of_2,
    row_parts,
    tile_width,
)

LIST = 64
# What a pass over a row computes: sums; peaks, if an exponent is above FAR; or sums relative to
# these peaks.
SUMS, PEAKS, SUMS_FROM_PEAKS = (tl.constexpr(kind) for kind in range(3))
# exp of this, times any number of classes, does not overflow float32.
FAR = tl.constexpr(60.0)
# Scores of a slab that one program handles.
SHARE = 16 * SCORES_A_PROGRAM


def forward(
    scores: Tensor, target: Tensor | None, lists: list[Tensor], values: Tensor | None,
    mask: Tensor | None, smoothing: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kind, labels, *lists_of, smoothing = _labels(scores, target, lists, values, smoothing)
    scores = in_rows(scores)
    n_rows, n = scores.shape
    losses = torch.empty(n_rows, device=scores.device, dtype=torch.float32)
    stats = torch.empty((4, n_rows), device=scores.device, dtype=torch.float32)
    masked = mask is not None
    counts = torch.empty(n_rows if masked else 0, device=scores.device, dtype=torch.bool)
    seen = counts.view(torch.uint8)
    if not n_rows:
        return losses, stats, counts
    height, width = _tile_of(n, kind)
    tiles = cdiv(n_rows, height)
    span, parts = row_parts(tiles, n, width)
    pieces = losses if parts == 1 else stats.new_empty((5, parts, n_rows))
    _sum_rows[(tiles, parts)](
        scores, labels, *mask_of(mask), *lists_of, losses, stats, seen, pieces, n_rows, n, span,
        scores.stride(0), labels.stride(0), smoothing, ROWS=height, BLOCK=width, KIND=kind,
        MASKED=masked, WHOLE=parts == 1, LIST=LIST, num_warps=max(1, height * width // 512),
    )  # fmt: skip
    if parts > 1:
        _merge_parts[(n_rows,)](
            pieces, losses, stats, seen, n_rows, parts, PARTS=next_power_of_2(parts), MASKED=masked,
            num_warps=1,
        )  # fmt: skip
    return losses, stats, counts


def backward(
    scores: Tensor, target: Tensor | None, lists: list[Tensor], values: Tensor | None,
    mask: Tensor | None, smoothing: float, stats: Tensor, grad: Tensor,
) -> Tensor:  # fmt: skip
    kind, labels, *lists_of, smoothing = _labels(scores, target, lists, values, smoothing)
    scores = in_rows(scores)
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    n_rows, n = scores.shape
    if not out.numel():
        return out
    height, width = _tile_of(n, kind)
    grad = grad.reshape(-1) if grad.dim() > 1 else grad
    _fill_gradient[(cdiv(n_rows, height), cdiv(n, width))](
        scores, labels, *mask_of(mask), *lists_of, stats, grad, out, n_rows, n, scores.stride(0),
        labels.stride(0), grad.stride(0) if grad.numel() > 1 else 0, smoothing, ROWS=height,
        BLOCK=width, KIND=kind, MASKED=mask is not None, LIST=LIST,
        num_warps=max(1, height * width // 512),
    )  # fmt: skip
    return out


def _labels(scores, target, lists, values, smoothing):
    """The kind of labels, and their tensors; lists become one bit per class."""
    if target is not None:
        return *labels_of(target), None, None, None, 0.0
    classes, starts = lists[0].contiguous(), None if len(lists) == 1 else lists[-1].contiguous()
    n_rows, n = scores.shape
    words = cdiv(n, 32)
    bits = torch.empty((n_rows, words), dtype=torch.int32, device=scores.device)
    if bits.numel():
        width = tile_width(words, 1024, 32)
        _set_bits[(n_rows,)](
            classes, starts, bits, classes.shape[-1], classes.numel(), n, words,
            PADDED=starts is None, WIDTH=width, LIST=LIST, num_warps=1,
        )  # fmt: skip
    if values is None and smoothing == 0.0:
        return BITS.value, bits, None, None, None, 0.0
    values = torch.ones_like(classes, dtype=torch.float32) if values is None else values.float()
    return LISTED.value, bits, classes, values.contiguous(), starts, smoothing


@kernel(do_not_specialize=["m", "k"])
def _set_bits(
    classes, starts, bits, m, k, n, words,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Sets one bit per listed class of a row; order and duplicates do not matter."""
    row = tl.program_id(0).to(tl.int64)
    bits += row * words
    for first in range(0, words, WIDTH):
        word = first + tl.arange(0, WIDTH)
        tl.store(bits + word, tl.zeros((WIDTH,), dtype=tl.int32), mask=word < words)
    # Other threads of this program set bits that this thread has cleared.
    tl.debug_barrier()
    if PADDED:
        begin = row * m
        end = begin + m
    else:
        begin = tl.maximum(tl.load(starts + row), 0)
        end = tl.minimum(tl.load(starts + row + 1), k)
    for first in range(begin, end, LIST):
        place = first + tl.arange(0, LIST)
        named = tl.load(classes + place, mask=place < end, other=-1)
        real = (named >= 0) & (named < n)
        bit = (1 << (named & 31)).to(tl.int32)
        tl.atomic_or(bits + (named >> 5), bit, mask=real)


def _tile_of(n, kind):
    """Rows and columns of a tile; a single row if labels are lists with values."""
    width = tile_width(n, SCORES_A_PROGRAM)
    return (1 if kind == LISTED.value else SCORES_A_PROGRAM // width), width


@triton.jit
def _load_listed(
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
def _list_of(starts, row, part, KIND: tl.constexpr):
    """Begin and end of the list of a row; only the first part of a row handles it."""
    begin = tl.zeros((), dtype=tl.int64)
    end = begin
    if KIND == LISTED:
        if part == 0:
            begin = tl.load(starts + row)
            end = tl.load(starts + row + 1)
    return begin, end


@triton.jit
def _exp_from(x, origin):
    # 0 for equal infinities, whose difference would be NaN.
    return tl.exp2(tl.where(x == origin, 0.0, x - origin) * LOG2E)


@triton.jit
def _add(
    value, label, keep, top, up, down, up_peak, down_peak, KIND: tl.constexpr, PASS: tl.constexpr
):
    """Adds a tile to the sums (or maxima) of negatives (up) and positives (down).

    ``top`` is the largest exponent so far.
    """
    if PASS == PEAKS:
        if (KIND == HARD) or (KIND == BITS):
            is_negative, is_positive = keep & ~label, keep & label
        else:
            is_negative, is_positive = keep & (label < 1.0), keep & (label > 0.0)
        up = tl.maximum(up, tl.where(is_negative, value, -float("inf")))
        down = tl.maximum(down, tl.where(is_positive, -value, -float("inf")))
    elif (KIND == HARD) or (KIND == BITS):
        x = tl.where(keep, tl.where(label, -value, value), -float("inf"))
        if PASS == SUMS:
            top = tl.maximum(top, x)
            share = tl.exp2(x * LOG2E)
        else:
            share = _exp_from(x, tl.where(label, down_peak, up_peak))
        up += tl.where(label, 0.0, share)
        down += tl.where(label, share, 0.0)
    else:
        negative = tl.where(keep & (label < 1.0), value, -float("inf"))
        positive = tl.where(keep & (label > 0.0), -value, -float("inf"))
        if PASS == SUMS:
            top = tl.maximum(top, tl.maximum(negative, positive))
            up_share, down_share = tl.exp2(negative * LOG2E), tl.exp2(positive * LOG2E)
        else:
            up_share, down_share = _exp_from(negative, up_peak), _exp_from(positive, down_peak)
        # The label of a masked class may have any value, even NaN.
        up += tl.where(keep, 1.0 - label, 0.0) * up_share
        down += tl.where(keep, label, 0.0) * down_share
    return top, up, down


@triton.jit
def _of_rows(values, PASS: tl.constexpr):
    if PASS == PEAKS:
        return tl.max(values, 1)
    else:
        return tl.sum(values, 1)


@triton.jit
def _sweep(
    scores, labels, mask, classes, values, row, live, first_column, stop_column, begin, end,
    stride, label_stride, mask_row, mask_column, smoothing, up_peak, down_peak,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
    LIST: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    """One pass over rows: the largest exponent, both sums or peaks, and whether any class counts.

    Peaks are at least 0, the exponent of the 1 that is added to the sums.
    """
    top = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    up = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    down = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    seen = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    for first in range(first_column, stop_column, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        value, label, keep, _ = load_labelled(
            scores, labels, mask, row, column, live & (column < stop_column), stride, label_stride,
            mask_row, mask_column, smoothing, KIND, MASKED,
        )  # fmt: skip
        top, up, down = _add(value, label, keep, top, up, down, up_peak, down_peak, KIND, PASS)
        if MASKED:
            seen = seen | keep.to(tl.int32)
    highest, all_up, all_down = tl.max(top, 1), _of_rows(up, PASS), _of_rows(down, PASS)
    any_seen = tl.max(seen, 1)
    if KIND == LISTED:
        top = tl.zeros((1, LIST), dtype=tl.float32)
        up = tl.zeros((1, LIST), dtype=tl.float32)
        down = tl.zeros((1, LIST), dtype=tl.float32)
        seen = tl.zeros((1, LIST), dtype=tl.int32)
        for first in range(begin, end, LIST):
            value, label, keep, _, _ = _load_listed(
                scores, mask, classes, values, first, end, row, stride, mask_row, mask_column,
                MASKED, LIST,
            )  # fmt: skip
            top, up, down = _add(value, label, keep, top, up, down, up_peak, down_peak, KIND, PASS)
            seen = seen | keep.to(tl.int32)
        highest = tl.maximum(highest, tl.max(top, 1))
        any_seen = tl.maximum(any_seen, tl.max(seen, 1))
        if PASS == PEAKS:
            all_up = tl.maximum(all_up, tl.max(up, 1))
            all_down = tl.maximum(all_down, tl.max(down, 1))
        else:
            all_up += tl.sum(up, 1)
            all_down += tl.sum(down, 1)
    return highest, all_up, all_down, any_seen


@triton.jit
def _log_one_plus(peak, total):
    """``log(1 + total · exp(peak))``."""
    series = total * (1.0 - total * (0.5 - total * (0.33333334 - total * (0.25 - total * 0.2))))
    plain = tl.where(total < 0.03125, series, tl.log(1.0 + total))
    return tl.where(peak > 0.0, peak + tl.log(total + tl.exp(-peak)), plain)


@triton.jit
def _store_row(
    losses, stats, counts, row, live, n_rows, up_peak, up, down_peak, down, seen,
    MASKED: tl.constexpr,
):  # fmt: skip
    loss = _log_one_plus(up_peak, up) + _log_one_plus(down_peak, down)
    tl.store(losses + row, loss, mask=live)
    # NaN in one of the sums makes the whole gradient NaN.
    nothing = tl.where(loss != loss, float("nan"), 0.0)
    tl.store(stats + row, up_peak, mask=live)
    tl.store(stats + n_rows + row, up + tl.exp(-up_peak) + nothing, mask=live)
    tl.store(stats + 2 * n_rows + row, down_peak, mask=live)
    tl.store(stats + 3 * n_rows + row, down + tl.exp(-down_peak) + nothing, mask=live)
    if MASKED:
        tl.store(counts + row, seen.to(tl.uint8), mask=live)


@kernel
def _sum_rows(
    scores, labels, mask, mask_row, mask_column, classes, values, starts, losses, stats, counts,
    pieces, n_rows, n, span, stride, label_stride, smoothing,
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
    begin, end = _list_of(starts, first_row, part, KIND)

    top, up, down, seen = _sweep(
        scores, labels, mask, classes, values, row, live, start, stop, begin, end, stride,
        label_stride, mask_row, mask_column, smoothing, 0.0, 0.0,
        ROWS, BLOCK, KIND, MASKED, LIST, SUMS,
    )  # fmt: skip
    if not MASKED:
        seen = (flat_row >= 0) & (stop > start)
    up_peak = tl.zeros((ROWS,), dtype=tl.float32)
    down_peak = tl.zeros((ROWS,), dtype=tl.float32)
    if tl.max(top, 0) > FAR:
        _, up_peak, down_peak, _ = _sweep(
            scores, labels, mask, classes, values, row, live, start, stop, begin, end, stride,
            label_stride, mask_row, mask_column, smoothing, 0.0, 0.0,
            ROWS, BLOCK, KIND, MASKED, LIST, PEAKS,
        )  # fmt: skip
        _, up, down, _ = _sweep(
            scores, labels, mask, classes, values, row, live, start, stop, begin, end, stride,
            label_stride, mask_row, mask_column, smoothing, up_peak[:, None], down_peak[:, None],
            ROWS, BLOCK, KIND, MASKED, LIST, SUMS_FROM_PEAKS,
        )  # fmt: skip
    if WHOLE:
        _store_row(
            losses, stats, counts, flat_row, flat_live, n_rows, up_peak, up, down_peak, down, seen,
            MASKED,
        )  # fmt: skip
    else:
        parts = tl.num_programs(1).to(tl.int64)
        place = pieces + part * n_rows + flat_row
        tl.store(place, up_peak, mask=flat_live)
        tl.store(place + parts * n_rows, up, mask=flat_live)
        tl.store(place + 2 * parts * n_rows, down_peak, mask=flat_live)
        tl.store(place + 3 * parts * n_rows, down, mask=flat_live)
        tl.store(place + 4 * parts * n_rows, seen.to(tl.float32), mask=flat_live)


@kernel
def _merge_parts(
    pieces, losses, stats, counts, n_rows, parts, PARTS: tl.constexpr, MASKED: tl.constexpr
):
    """Merges the sums of the parts of a row."""
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
    up = tl.sum(ups * _exp_from(up_peaks, up_peak[:, None]), 1)
    down = tl.sum(downs * _exp_from(down_peaks, down_peak[:, None]), 1)
    _store_row(
        losses, stats, counts, row, row < n_rows, n_rows, up_peak, up, down_peak, down, seen, MASKED
    )


@triton.jit
def _slopes(value, label, keep, grad, up_peak, up_scale, down_peak, down_scale, KIND: tl.constexpr):
    if (KIND == HARD) or (KIND == BITS):
        x = tl.where(label, -value, value)
        share = _exp_from(x, tl.where(label, down_peak, up_peak))
        slope = share * tl.where(label, -down_scale, up_scale)
    else:
        up = tl.where(label < 1.0, _exp_from(value, up_peak) * up_scale, 0.0) * (1.0 - label)
        down = tl.where(label > 0.0, _exp_from(-value, down_peak) * down_scale, 0.0) * label
        slope = up - down
    return tl.where(keep & (grad != 0.0), slope * grad, 0.0)


@kernel
def _fill_gradient(
    scores, labels, mask, mask_row, mask_column, classes, values, starts, stats, grad, out,
    n_rows, n, stride, label_stride, step, smoothing,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
    LIST: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    row = (first_row + tl.arange(0, ROWS))[:, None]
    live = row < n_rows
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = live & (column < n)
    upstream = tl.load(grad + row * step, mask=live, other=0.0).to(tl.float32)
    up_peak = tl.load(stats + row, mask=live, other=0.0)
    up_scale = 1.0 / tl.load(stats + n_rows + row, mask=live, other=1.0)
    down_peak = tl.load(stats + 2 * n_rows + row, mask=live, other=0.0)
    down_scale = 1.0 / tl.load(stats + 3 * n_rows + row, mask=live, other=1.0)
    value, label, keep, listed = load_labelled(
        scores, labels, mask, row, column, inside, stride, label_stride, mask_row, mask_column,
        smoothing, KIND, MASKED,
    )  # fmt: skip
    slope = _slopes(value, label, keep, upstream, up_peak, up_scale, down_peak, down_scale, KIND)
    place = out + row * n + column
    tl.store(place, slope.to(out.dtype.element_ty), mask=inside & ~listed)
    if KIND == LISTED:
        begin, end = _list_of(starts, first_row, tl.program_id(1), KIND)
        for first in range(begin, end, LIST):
            its_value, its_label, its_keep, named, real = _load_listed(
                scores, mask, classes, values, first, end, row, stride, mask_row, mask_column,
                MASKED, LIST,
            )  # fmt: skip
            its_slope = _slopes(
                its_value, its_label, its_keep, upstream, up_peak, up_scale, down_peak,
                down_scale, KIND,
            )  # fmt: skip
            tl.store(out + row * n + named, its_slope.to(out.dtype.element_ty), mask=real)


def slab_sums(scores: Tensor, negated: bool) -> tuple[Tensor, Tensor]:
    n_rows, n = scores.shape
    parts = max(1, cdiv(n, SHARE))
    above = torch.empty(parts, n_rows, device=scores.device, dtype=torch.float32)
    below = torch.empty_like(above) if negated else above.new_empty(0)
    if scores.numel():
        block = tile_width(n, SCORES_A_PROGRAM, 32)
        _slab_sums[(n_rows, parts)](
            scores, above, below, n_rows, n, scores.stride(0), SHARE, BLOCK=block, NEGATED=negated,
            num_warps=max(1, block // 512),
        )  # fmt: skip
    else:
        above.fill_(-torch.inf)
        below.fill_(-torch.inf)
    return above.logsumexp(0), below.logsumexp(0) if negated else below


def slab_gradient_(scores: Tensor, scale: Tensor, above: Tensor, below: Tensor | None) -> None:
    n_rows, n = scores.shape
    if scores.numel():
        block = tile_width(n, SCORES_A_PROGRAM, 32)
        _slab_gradient[(n_rows, cdiv(n, block))](
            scores, scale, above, below, n, scores.stride(0), BLOCK=block,
            NEGATED=below is not None, num_warps=max(1, block // 512),
        )  # fmt: skip


@kernel
def _slab_sums(
    scores, above, below, n_rows, n, stride, share, BLOCK: tl.constexpr, NEGATED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    scores += row * stride
    stop = tl.minimum((part + 1) * share, n)
    peak = tl.full((), -float("inf"), dtype=tl.float32)
    floor = peak
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    reverse = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(part * share, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        values = tl.load(scores + column, mask=column < stop, other=-float("inf")).to(tl.float32)
        peak, total = _added(values, peak, total)
        if NEGATED:
            floor, reverse = _added(_negated(values), floor, reverse)
    tl.store(above + part * n_rows + row, peak + tl.log(tl.sum(total, 0)))
    if NEGATED:
        tl.store(below + part * n_rows + row, floor + tl.log(tl.sum(reverse, 0)))


@triton.jit
def _added(values, peak, total):
    """Adds values to a running maximum and the sums of exponentials relative to it."""
    grown = tl.maximum(peak, tl.max(values, 0))
    # While all values are -inf, subtract 0, not -inf, which would give NaN.
    origin = tl.where(grown == -float("inf"), 0.0, grown) * LOG2E
    shrink = tl.exp2(peak * LOG2E - origin)
    return grown, total * shrink + tl.exp2(values * LOG2E - origin)


@triton.jit
def _negated(values):
    return tl.where(values == -float("inf"), values, -values)


@kernel
def _slab_gradient(
    scores, scale, above, below, n, stride, BLOCK: tl.constexpr, NEGATED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < n
    place = scores + row * stride + column
    values = tl.load(place, mask=live, other=-float("inf")).to(tl.float32)
    gradient = tl.exp2((values - tl.load(above + row)) * LOG2E)
    if NEGATED:
        gradient -= tl.exp2((_negated(values) - tl.load(below + row)) * LOG2E)
    gradient *= tl.load(scale + row)
    tl.store(place, gradient.to(scores.dtype.element_ty), mask=live)
