"""What surrounds the rows of drawn classes on CUDA, in as few launches as its parts allow."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._sizes import next_power_of_2
from lastlayer.kernels.sampled_rows._columns_triton import _softplus

WIDEST = 1024


def row_scale(hidden: Tensor, target: Tensor, mean: bool) -> Tensor:
    """As the reference's."""
    n, p = target.shape
    scale = torch.empty(n, device=hidden.device, dtype=torch.float32)
    if n:
        block = min(8192, max(16, next_power_of_2(n)))
        # One program: rows are counted before the first of them gets its share.
        _scale[(1,)](
            target.contiguous(), scale, n, p, MEAN=mean, BLOCK=block,
            num_warps=max(1, min(16, block // 256)), enable_fp_fusion=True,
        )  # fmt: skip
    return scale


def start(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ids: Tensor,
    log_expected: Tensor,
    target_log_expected: Tensor | None,
    row_shift: Tensor | None,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the reference's."""
    (n, d), m = hidden.shape, ids.shape[0]
    device, dtype = hidden.device, hidden.dtype
    both = torch.empty(n + m, d, device=device, dtype=dtype)
    added = torch.empty(n + m, device=device, dtype=torch.float32)
    entries = torch.empty(m + n, device=device, dtype=torch.int32)
    clean, vectors, logits, offset = both[:n], both[n:], added[:n], added[n:]
    if n + m:
        _start[(m + n,)](
            hidden, weight, None if bias is None else bias.contiguous(), target.contiguous(),
            ids.contiguous(), log_expected.contiguous(), target_log_expected, row_shift, clean,
            vectors, logits, offset, entries, m, d, factor, hidden.stride(0), hidden.stride(1),
            weight.stride(0), weight.stride(1), BIASED=bias is not None,
            WEIGHTED=target_log_expected is not None, SHIFTED=row_shift is not None,
            WIDTH=_width(d), enable_fp_fusion=True,
        )  # fmt: skip
    return clean, vectors, logits, offset, entries


def finish_(
    first: Tensor,
    logits: Tensor,
    scale: Tensor,
    row_scale: Tensor | None,
    classes: Tensor,
    weight: Tensor,
    of_hidden: Tensor,
    factor: float,
    logistic: bool,
    with_target: bool,
) -> tuple[Tensor, Tensor]:
    """As the reference's."""
    n = first.shape[0]
    losses, slopes = torch.empty(2, n, device=first.device, dtype=torch.float32).unbind()
    if n:
        _finish[(n,)](
            first, logits, scale, row_scale, classes, weight, of_hidden, losses, slopes,
            weight.shape[1], factor, weight.stride(0), weight.stride(1), LOGISTIC=logistic,
            WITH_TARGET=with_target, GRADIENT=row_scale is not None, HIDDEN=of_hidden.dim() == 2,
            WIDTH=_width(weight.shape[1]), enable_fp_fusion=True,
        )  # fmt: skip
    return losses, slopes


def _width(depth: int) -> int:
    return min(WIDEST, max(16, next_power_of_2(depth)))


@triton.jit
def _counts(target, row, n, p):
    counts = tl.zeros(row.shape, dtype=tl.int32)
    for place in range(p):
        chosen = tl.load(target + row.to(tl.int64) * p + place, mask=row < n, other=-1)
        counts = counts | (chosen >= 0).to(tl.int32)
    return counts


@triton.jit
def _scale(target, scale, n, p, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    share = 1.0
    if MEAN:
        totals = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(0, n, BLOCK):
            totals += _counts(target, start + tl.arange(0, BLOCK), n, p)
        share = 1.0 / tl.maximum(tl.sum(totals, 0), 1).to(tl.float32)
    for start in range(0, n, BLOCK):
        row = start + tl.arange(0, BLOCK)
        counts = _counts(target, row, n, p)
        tl.store(scale + row, counts.to(tl.float32) * share, mask=row < n)


@triton.jit
def _start(
    hidden, weight, bias, target, ids, log_expected, target_log_expected, row_shift, clean, vectors,
    logits, offset, entries, m, depth, factor, hidden_row, hidden_step, weight_row, weight_step,
    BIASED: tl.constexpr, WEIGHTED: tl.constexpr, SHIFTED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    if place < m:
        chosen = tl.load(ids + place)
        tl.store(entries + place, chosen.to(tl.int32))
        added = -tl.load(log_expected + place).to(tl.float32)
        if BIASED:
            level = factor * tl.load(bias + chosen).to(tl.float32)
            # A masked class has no mass, but it was drawn: -inf would say that it was not.
            added += tl.where(level == -float("inf"), -1e38, level)
        tl.store(offset + place, added)
        for start in range(0, depth, WIDTH):
            step = start + tl.arange(0, WIDTH)
            inside = step < depth
            source = weight + chosen * weight_row + step * weight_step
            vector = tl.load(source, mask=inside, other=0.0)
            into = vectors + place * depth + step
            tl.store(into, vector.to(vectors.dtype.element_ty), mask=inside)
    else:
        row = place - m
        given = tl.load(target + row)
        chosen = tl.where(given < 0, tl.load(ids, mask=m > 0, other=0), given)
        tl.store(entries + place, chosen.to(tl.int32))
        # A row without a target may hold anything, which must not come into a product.
        read = tl.where(given < 0, 0, depth)
        sums = tl.zeros((WIDTH,), dtype=tl.float32)
        for start in range(0, depth, WIDTH):
            step = start + tl.arange(0, WIDTH)
            state = tl.load(
                hidden + row * hidden_row + step * hidden_step, mask=step < read, other=0.0
            )
            source = weight + chosen * weight_row + step * weight_step
            vector = tl.load(source, mask=step < depth, other=0.0)
            sums += state.to(tl.float32) * vector.to(tl.float32)
            tl.store(clean + row * depth + step, state, mask=step < depth)
        logit = tl.sum(sums, 0)
        if BIASED:
            logit += tl.load(bias + chosen).to(tl.float32)
        logit *= factor
        if WEIGHTED:
            logit -= tl.load(target_log_expected + row).to(tl.float32)
        if SHIFTED:
            logit += tl.load(row_shift + row).to(tl.float32)
        tl.store(logits + row, logit)


@triton.jit
def _odds(others, logit):
    """Of the rest against the target; inf where that is masked, also if all others are."""
    return tl.where(logit == -float("inf"), float("inf"), others - logit)


@triton.jit
def _finish(
    first, logits, scale, row_scale, classes, weight, of_hidden, losses, slopes, depth, factor,
    weight_row, weight_step, LOGISTIC: tl.constexpr, WITH_TARGET: tl.constexpr,
    GRADIENT: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    others = tl.load(first + row)
    logit = tl.load(logits + row)
    if LOGISTIC:
        loss, slope = _softplus(-logit)
        loss += others
    elif WITH_TARGET:
        # The odds of the rest against the target: 1 - p is not what remains of 1.
        loss, slope = _softplus(_odds(others, logit))
    else:
        loss, slope = _odds(others, logit), 1.0
    share = tl.load(scale + row)
    tl.store(losses + row, tl.where(share == 0.0, 0.0, loss * share))
    push = 0.0
    if GRADIENT:
        weighed = tl.load(row_scale + row) * factor
        push = tl.where(weighed == 0.0, 0.0, -slope * weighed)
    tl.store(slopes + row, push)
    if HIDDEN:
        if push != 0.0:
            chosen = tl.load(classes + row).to(tl.int64)
            for start in range(0, depth, WIDTH):
                step = start + tl.arange(0, WIDTH)
                inside = step < depth
                source = weight + chosen * weight_row + step * weight_step
                vector = tl.load(source, mask=inside, other=0.0).to(tl.float32)
                into = of_hidden + row * depth + step
                total = tl.load(into, mask=inside, other=0.0) + push * vector
                tl.store(into, total, mask=inside)
