"""From the probabilities of a chunk to its losses and score gradient, as lists or dense.

Both are the Fenchel-Young loss ``<p - y, scores> + H(p)`` with gradient ``p - y``, times the
weight of the target's class.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.fused.engine import Chunk, RowResult, Sparse

# Dense probabilities are held for one of so many parts of a chunk, beside its scores.
PIECES = 4


def scores_of_listed(scores: Tensor, chunk: Chunk, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Of the classes (rows, k) and of the target, in full precision; -1 is none, with anything."""
    if scores.itemsize < 4:
        return chunk.exact_scores(classes), chunk.target_scores
    # Both from one product, whose rounding they share.
    at_target = scores.gather(-1, chunk.target.unsqueeze(-1)).squeeze(-1)
    return scores.gather(-1, classes.clamp(min=0)), at_target


def sparse_rows(
    chunk: Chunk,
    class_weight: Tensor | None,
    own: Tensor,
    at_target: Tensor,
    classes: Tensor,
    alpha: float,
) -> RowResult:
    """From the scores (rows, k) of all classes that can have probability; -1 is none."""
    loss, *gradient = kernels.entmax_rows.listed(
        "auto", own, classes, chunk.target, at_target, chunk.row_scale, class_weight, alpha
    )
    return RowResult(loss, None if chunk.row_scale is None else Sparse(*gradient))


def weights_and_scale(
    chunk: Chunk, class_weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """What the loss of each row is weighted by, and what its gradient is multiplied by."""
    if class_weight is None:
        return None, chunk.row_scale
    weights = class_weight[chunk.target]
    return weights, None if chunk.row_scale is None else chunk.row_scale * weights


def dense_rows(
    scores: Tensor,
    chunk: Chunk,
    class_weight: Tensor | None,
    alpha: float,
    probabilities: Callable[[Tensor], Tensor],
) -> RowResult:
    """From all probabilities, a few rows at a time; the scores' memory becomes the gradient."""
    weights, scale = weights_and_scale(chunk, class_weight)
    losses = []
    step = max(1, -(-scores.shape[0] // PIECES))
    for first in range(0, max(1, scores.shape[0]), step):
        part = slice(first, first + step)
        probs = probabilities(scores[part])
        some_scale = None if scale is None else scale[part]
        losses.append(
            kernels.entmax_rows.forward_(
                "auto", probs, scores[part], chunk.target[part], some_scale, alpha
            )
        )
        if scale is not None:
            scores[part] = probs
    loss = torch.cat(losses)
    if weights is not None:
        loss = loss * weights
    return RowResult(loss, None if scale is None else scores)
