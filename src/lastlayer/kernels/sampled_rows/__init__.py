"""Rows of scores of drawn classes to a softmax or logistic loss, and to its gradient; README.md.

``row_scale``, ``start`` and ``finish_`` surround them where each row has one target and all rows
share their draws. These have no CPU implementation: torch's own operations are as good there.
"""

import torch
from torch import Tensor

from lastlayer.kernels._registry import operation


def parts_of_columns(n: int, m: int) -> int:
    """How many parts the sums of columns come in on CUDA, one per program."""
    # Programs that a GPU runs at once, or a few more.
    return max(1, min(n, (1 << 21) // max(16, 1 << (m - 1).bit_length())))


def _row_scale(hidden: Tensor, target: Tensor, _mean: bool) -> Tensor:
    return hidden.new_empty(target.shape[:1], dtype=torch.float32)


def _start(
    hidden: Tensor, _weight: Tensor, _bias: Tensor | None, _target: Tensor, ids: Tensor, *_: object
) -> tuple[Tensor, ...]:
    (n, d), m = hidden.shape, ids.shape[0]
    return (
        hidden.new_empty(n, d),
        hidden.new_empty(m, d),
        hidden.new_empty(n, dtype=torch.float32),
        hidden.new_empty(m, dtype=torch.float32),
        ids.new_empty(m + n, dtype=torch.int32),
    )


def _finish(first: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(first), torch.empty_like(first)


forward_ = operation(
    "sampled_rows.forward_",
    "sampled_rows_",
    writes=("scores", "gradient", "first", "second", "columns"),
)
row_scale = operation("sampled_rows.row_scale", "sampled_row_scale", _row_scale, has_cpu=False)
start = operation("sampled_rows.start", "sampled_start", _start, has_cpu=False)
finish_ = operation(
    "sampled_rows.finish_", "sampled_finish_", _finish, ("of_hidden",), has_cpu=False
)
