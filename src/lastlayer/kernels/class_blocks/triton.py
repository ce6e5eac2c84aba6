"""Peaks and levels of blocks of classes: a program makes the scores of one. And the k best."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import cdiv, next_power_of_2

# Classes of a block. A power of 2.
CLASSES = 128
_ROWS, _DEPTH = 64, 64
# Numbers of a row that one program looks at together for the best of them.
WIDEST = 8192
_LOWEST = tl.constexpr(-(2**63))


def peaks_and_levels_(hidden: Tensor, weight: Tensor, peaks: Tensor, levels: Tensor) -> None:
    """For each row and block the largest score, and the log of the sum of their exponentials.

    Args:
        hidden: ``(n, d)``.
        weight: ``(n_classes, d)``; block b has the classes from ``CLASSES * b`` on.
        peaks: ``(n, blocks)`` or wider, float32, whose first columns are written; NaN where the
            row has a NaN.
        levels: the same.
    """
    (n, depth), n_classes = hidden.shape, weight.shape[0]
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    if n and n_classes:
        wide = hidden.dtype == torch.float32 or hidden.dtype != weight.dtype
        _peaks_and_levels[(cdiv(n_classes, CLASSES), cdiv(n, _ROWS))](
            hidden, weight, peaks, levels, n, n_classes, depth, peaks.stride(0), hidden.stride(0),
            weight.stride(0), ROWS=_ROWS, CLASSES=CLASSES,
            DEPTH=min(_DEPTH, max(16, next_power_of_2(depth))), WIDE=wide, num_warps=4,
            num_stages=3, enable_fp_fusion=True,
        )  # fmt: skip


def largest(values: Tensor, ids: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The k largest numbers of each row, float32, and their ids; the lower id where equal.

    A NaN comes first, as it does for torch.

    Args:
        values: ``(n, m)``, float32, m at least k.
        ids: ``(n, m)``, int64, from 0 up to 2^32; the columns where it is None.
        k: how many.
    """
    while True:
        n, m = values.shape
        width = min(WIDEST, max(16, next_power_of_2(m)))
        parts = cdiv(m, width)
        # Where a part has fewer than k, what is left over is -inf, behind all others.
        best = torch.empty(n, parts * k, device=values.device, dtype=torch.float32)
        found = torch.empty(n, parts * k, device=values.device, dtype=torch.int64)
        _largest[(n, parts)](
            values.contiguous(), None if ids is None else ids.contiguous(), best, found, m, k,
            WIDTH=width, COLUMNS=ids is None, num_warps=max(1, min(8, width // 256)),
            enable_fp_fusion=True,
        )  # fmt: skip
        if parts == 1:
            return best, found
        values, ids = best, found


@triton.jit
def _peaks_and_levels(
    hidden, weight, peaks, levels, n, n_classes, depth, line, hidden_row, weight_row,
    ROWS: tl.constexpr, CLASSES: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * CLASSES + tl.arange(0, CLASSES)
    live = column < n_classes
    scores = tl.zeros((ROWS, CLASSES), dtype=tl.float32)
    for first in range(0, depth, DEPTH):
        step = first + tl.arange(0, DEPTH)
        inside = step < depth
        states = tl.load(
            hidden + row[:, None] * hidden_row + step[None, :],
            mask=(row < n)[:, None] & inside[None, :],
            other=0.0,
        )
        vectors = tl.load(
            weight + column[:, None] * weight_row + step[None, :],
            mask=live[:, None] & inside[None, :],
            other=0.0,
        )
        if WIDE:
            states = states.to(tl.float32)
            vectors = vectors.to(tl.float32)
        scores = tl.dot(states, tl.trans(vectors), scores, input_precision="ieee")
    scores = tl.where(live[None, :], scores, -float("inf"))
    peak = tl.max(scores, 1)
    total = tl.sum(tl.exp(scores - peak[:, None]), 1)
    # A maximum may pass over a NaN; a sum does not.
    peak = tl.where(total == total, peak, total)
    place = row * line + tl.program_id(0)
    tl.store(peaks + place, peak, mask=row < n)
    tl.store(levels + place, peak + tl.log(total), mask=row < n)


@triton.jit
def _largest(
    values, ids, best, found, m, k, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = column < m
    value = tl.load(values + row * m + column, mask=live, other=-float("inf"))
    if COLUMNS:
        mine = column.to(tl.int64)
    else:
        mine = tl.load(ids + row * m + column, mask=live, other=0xFFFFFFFF)
    # Integers of the order of the values above, and the complement of the id below. A NaN of
    # either sign goes to the top; + 0.0 makes -0.0 equal to 0.0.
    ordered = tl.where(value == value, value, float("inf")) + 0.0
    bits = ordered.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (bits.to(tl.int64) << 32) + (0xFFFFFFFF - mine)
    keys = tl.where(live, keys, _LOWEST)
    into = (row * tl.num_programs(1) + tl.program_id(1)) * k
    for i in range(k):
        top = tl.max(keys, 0)
        here = keys == top
        # Zeros elsewhere: a NaN of another column does not count.
        number = tl.sum(tl.where(here, value, 0.0), 0)
        there = top != _LOWEST
        tl.store(best + into + i, tl.where(there, number, -float("inf")))
        tl.store(found + into + i, tl.where(there, 0xFFFFFFFF - (top & 0xFFFFFFFF), 0xFFFFFFFF))
        keys = tl.where(here, _LOWEST, keys)
