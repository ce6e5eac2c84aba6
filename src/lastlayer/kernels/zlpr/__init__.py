"""Rows of scores and labels to ZLPR, and to its gradient. README.md has the formulas.

Scores are ``(rows, n)``. Labels are ``target`` of that shape, bool, integers 0 and 1 or floating in
[0, 1]; or they are lists in the form of ``losses/_positives.py``, where listed classes have the
label in ``values`` (1 where it is None) and all others have ``smoothing``. ``mask``, bool of the
shape of the scores, says which classes count.

Forward gives the loss of each row, four numbers a row from which backward goes on (peak and sum of
the negatives, peak and sum of the positives), and whether anything counts in the row.
"""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import Operation


def _losses(scores: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    n_rows = scores.shape[0]
    dtype = accumulation_dtype(scores.dtype)
    return (
        scores.new_empty(n_rows, dtype=dtype),
        scores.new_empty((4, n_rows), dtype=dtype),
        scores.new_empty(n_rows, dtype=torch.bool),
    )


def _like_scores(scores: Tensor, *_: object) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


_LISTS = "Tensor classes, Tensor rows, Tensor starts, Tensor? values, Tensor? mask, float smoothing"

forward = Operation(
    "zlpr",
    "(Tensor scores, Tensor target, Tensor? mask) -> (Tensor, Tensor, Tensor)",
    __name__,
    "forward",
    _losses,
)
backward = Operation(
    "zlpr_backward",
    "(Tensor scores, Tensor target, Tensor? mask, Tensor stats, Tensor grad) -> Tensor",
    __name__,
    "backward",
    _like_scores,
)
forward_listed = Operation(
    "zlpr_listed",
    f"(Tensor scores, {_LISTS}) -> (Tensor, Tensor, Tensor)",
    __name__,
    "forward_listed",
    _losses,
)
backward_listed = Operation(
    "zlpr_listed_backward",
    f"(Tensor scores, {_LISTS}, Tensor stats, Tensor grad) -> Tensor",
    __name__,
    "backward_listed",
    _like_scores,
)
