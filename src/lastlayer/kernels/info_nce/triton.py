"""InfoNCE on CUDA: from a few rows of products to normalisers, and to gradients in place.

Where products are bounded and the scale is not too large, one power of 2 of each similarity serves
its row and its column; the device decides, so that nobody waits for the scale.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import cdiv
from lastlayer.kernels.info_nce._powers_triton import LARGEST, LOG2E, common_origin
from lastlayer.kernels.info_nce._statistics_triton import _fold, _statistics
from lastlayer.kernels.info_nce._vectors_triton import row_gradients_, unit_rows_

__all__ = ["row_gradients_", "statistics_", "unit_rows_", "weights_"]

# Rows and columns of a tile, of which a program of the statistics takes several in turn, and fewer
# where there would not be programs for all multiprocessors.
ROWS, WIDTH = 64, 128
TILES_IN_TURN, FEWER_IN_TURN, PROGRAMS = 16, 4, 1000
WEIGHT_ROWS, WEIGHT_WIDTH = 32, 256
NO_GROUPS, IGNORED, POSITIVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def statistics_(
    scores: Tensor,
    scale: Tensor,
    own: int,
    query_groups: Tensor | None,
    key_groups: Tensor | None,
    positive: bool,
    bounded: bool,
    row_lse: Tensor,
    row_positive: Tensor,
    column_lse: Tensor,
    column_positive: Tensor,
) -> None:
    """As the reference's."""
    n, m = scores.shape
    if not n or not m:
        row_lse.fill_(-torch.inf)
        row_positive.zero_()
        return
    columns = column_lse.shape[0] > 0
    tiles, share = cdiv(n, ROWS), WIDTH * TILES_IN_TURN
    if tiles * cdiv(m, share) < PROGRAMS:
        share = WIDTH * FEWER_IN_TURN
    splits = cdiv(m, share)
    row_parts = row_lse.new_empty(2, splits, n)
    column_parts = row_lse.new_empty(2 if column_positive.shape[0] else 1, tiles, m * columns)
    _statistics[(tiles, splits)](
        scores, scale, query_groups, key_groups, row_parts, column_parts, own, n, m, splits, tiles,
        scores.stride(0), ROWS=ROWS, WIDTH=WIDTH, SHARE=share, COLUMNS=columns,
        BOUNDED=bounded, GROUPS=_kind(query_groups, positive), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    block = 128
    row_blocks = cdiv(n, block)
    _fold[(row_blocks + (cdiv(m, block) if columns else 0),)](
        row_parts, row_lse, row_positive, column_parts, column_lse, column_positive, n, m, splits,
        tiles, row_blocks, BLOCK=block, GROUPED=column_positive.shape[0] > 0, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip


def weights_(
    scores: Tensor,
    scale: Tensor,
    own: int,
    query_groups: Tensor | None,
    key_groups: Tensor | None,
    positive: bool,
    bounded: bool,
    row_lse: Tensor,
    row_push: Tensor,
    row_pull: Tensor,
    column_lse: Tensor,
    column_push: Tensor,
    column_pull: Tensor,
    out: Tensor,
) -> None:
    """As the reference's."""
    n, m = scores.shape
    if not n or not m:
        return
    grid = (cdiv(n, WEIGHT_ROWS), cdiv(m, WEIGHT_WIDTH))
    _weights[grid](
        scores, scale, query_groups, key_groups, row_lse, row_push, row_pull, column_lse,
        column_push, column_pull, out, own, n, m, scores.stride(0), out.stride(0),
        ROWS=WEIGHT_ROWS, WIDTH=WEIGHT_WIDTH, COLUMNS=column_lse.shape[0] > 0,
        PULLED=column_pull.shape[0] > 0, BOUNDED=bounded and column_lse.shape[0] > 0,
        GROUPS=_kind(query_groups, positive), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def _kind(groups: Tensor | None, positive: bool) -> int:
    if groups is None:
        return NO_GROUPS.value
    return POSITIVE.value if positive else IGNORED.value


@triton.jit(do_not_specialize=["own"])
def _weights(
    scores, scale, query_groups, key_groups, row_lse, row_push, row_pull, column_lse, column_push,
    column_pull, out, own, n, m, stride, out_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, PULLED: tl.constexpr, BOUNDED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    first_row, first = tl.program_id(0) * ROWS, tl.program_id(1) * WIDTH
    row = first_row + tl.arange(0, ROWS)
    column = first + tl.arange(0, WIDTH)
    known, there = row < n, column < m
    live = known[:, None] & there[None, :]
    factor = tl.load(scale).to(tl.float32) * LOG2E
    long_row = row.to(tl.int64)[:, None]
    values = tl.load(scores + long_row * stride + column[None, :], mask=live, other=0.0)
    values = values.to(tl.float32) * factor
    lse = tl.load(row_lse + row, mask=known, other=0.0) * LOG2E
    push = tl.load(row_push + row, mask=known, other=0.0)
    if COLUMNS:
        other_lse = tl.load(column_lse + column, mask=there, other=0.0) * LOG2E
        other_push = tl.load(column_push + column, mask=there, other=0.0)
        one_power = False
        if BOUNDED:
            one_power = factor <= LARGEST
        if one_power:
            origin = common_origin(factor)
            by_row = push * tl.exp2(origin - lse)
            by_column = other_push * tl.exp2(origin - other_lse)
            result = tl.exp2(values - origin) * (by_row[:, None] + by_column[None, :])
        else:
            result = tl.exp2(values - lse[:, None]) * push[:, None]
            result += tl.exp2(values - other_lse[None, :]) * other_push[None, :]
    else:
        result = tl.exp2(values - lse[:, None]) * push[:, None]
    crossing = (first < own + first_row + ROWS) & (first + WIDTH > own + first_row)
    if GROUPS != 0:
        mine = (row + own)[:, None] == column[None, :]
        query_group = tl.load(query_groups + row, mask=known, other=-3)
        key_group = tl.load(key_groups + column, mask=there, other=-4)
        same = query_group[:, None] == key_group[None, :]
        hit = mine
        if GROUPS == 2:
            hit = mine | same
        pull = tl.load(row_pull + row, mask=known, other=0.0)[:, None]
        if PULLED:
            pull = pull + tl.load(column_pull + column, mask=there, other=0.0)[None, :]
        result = tl.where(hit, result + pull, result)
        if GROUPS == 1:
            result = tl.where(same & (mine == 0), 0.0, result)
    elif crossing:
        mine = (row + own)[:, None] == column[None, :]
        pull = tl.load(row_pull + row, mask=known, other=0.0)[:, None]
        result = tl.where(mine, result + pull, result)
    place = out + long_row * out_stride + column[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=live)
