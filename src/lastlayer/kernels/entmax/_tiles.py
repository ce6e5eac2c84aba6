"""What the Triton kernels of entmax share: their arguments, and tiles of rows in registers."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import next_power_of_2


class Alpha(NamedTuple):
    """alpha as the kernels take it."""

    kind: int
    excess: float
    per_row: Tensor | None


def as_rows(scores: Tensor) -> Tensor:
    rows = scores.reshape(-1, scores.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def as_alpha(alpha: float, row_alpha: Tensor | None) -> Alpha:
    if row_alpha is not None:
        return Alpha(0, 0.0, row_alpha.reshape(-1).float().contiguous())
    kind = {2.0: 1, 1.5: 2}.get(alpha, 0)
    return Alpha(kind, alpha - 1.0, None)


def register_tile(n: int) -> tuple[int, int, int]:
    """Width and rows of a tile that one program holds, and its warps."""
    width = max(16, next_power_of_2(n))
    return width, max(1, 512 // width), max(1, min(8, width // 1024))


@triton.jit
def tile(n_rows, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows (a scalar where there is one) and columns of this program, and which entries exist."""
    column = tl.arange(0, WIDTH)
    if ROWS == 1:
        row = tl.program_id(0).to(tl.int64)
        return row, column, column < n
    else:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        return row, column[None, :], (row < n_rows)[:, None] & (column[None, :] < n)
