"""Chunks of rows, so that the numbers of all rows and classes are never held at once."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lastlayer.fused._chunks import rows_at_a_time


def row_chunks(
    rows: Tensor, n_classes: int, chunk_rows: int | str, copies: float
) -> Iterator[slice]:
    """Slices of the rows: at least one, an empty one where there are no rows.

    ``copies`` is how many numbers in float32 (float64 from float64) are held for each row and
    class.
    """
    wide = 8 if rows.dtype == torch.float64 else 4
    step = rows_at_a_time(chunk_rows, rows, n_classes, copies * wide / rows.element_size())
    n = rows.shape[0]
    for first in range(0, max(1, n), step):
        yield slice(first, min(n, first + step))
