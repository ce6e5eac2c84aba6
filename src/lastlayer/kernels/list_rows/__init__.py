"""Scores of a few listed classes to the Fenchel-Young loss of entmax and its gradient.

``alpha`` 1 is softmax over what is listed. A class of -1 is padding, whose score does not count.
"""

import torch
from torch import Tensor

from lastlayer.kernels._registry import Operation


def _fake(
    scores: Tensor,
    classes: Tensor,
    target: Tensor,
    _target_scores: Tensor,
    row_scale: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    n, k = classes.shape
    shape = (n, k + 1) if row_scale is not None else (0,)
    loss = torch.empty_like(target, dtype=scores.dtype)
    return loss, scores.new_empty(shape), classes.new_empty(shape)


forward = Operation(
    "list_rows",
    "(Tensor scores, Tensor classes, Tensor target, Tensor target_scores, Tensor? row_scale, "
    "Tensor? class_weight, float alpha) -> (Tensor, Tensor, Tensor)",
    __name__,
    "forward",
    _fake,
)
