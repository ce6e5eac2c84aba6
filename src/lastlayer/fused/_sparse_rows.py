"""From the probabilities of a chunk to its losses and score gradient, as lists or dense.

Both are the Fenchel-Young loss ``<p - y, scores> + H(p)`` with gradient ``p - y``, times the
weight of the target's class.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.fused.engine import Chunk, RowResult, Sparse

# Dense probabilities are held for one of so many parts of a chunk, beside its scores.
PIECES = 4


def can_wait(scores: Tensor) -> bool:
    """Whether the host may read a number: not while a CUDA graph is being captured."""
    return scores.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def lead_of_classes(
    scores: Tensor, chunk: Chunk, classes: Tensor, listed: Tensor | None, rounded: bool
) -> Tensor:
    """By how much each of the classes (rows, k) beats the target; -inf where it is not listed.

    A target of -inf counts as 0 here: its loss is known anyway, and differences stay finite.
    """
    if rounded:
        wanted = classes if listed is None else torch.where(listed, classes, -1)
        values, base = chunk.exact_scores(wanted), chunk.target_scores.unsqueeze(-1)
    else:
        values, base = scores.gather(-1, classes), scores.gather(-1, chunk.target.unsqueeze(-1))
    lead = values - base.masked_fill(base == -math.inf, 0.0)
    return lead if listed is None else torch.where(listed, lead, -math.inf)


def sparse_rows(
    chunk: Chunk,
    class_weight: Tensor | None,
    probs: Tensor,
    classes: Tensor,
    lead: Tensor,
    entropy: Tensor,
) -> RowResult:
    """From the probabilities (rows, k) of some classes, and the entropy of each row.

    ``lead`` says by how much each class beats the target. A row without any probability costs +inf
    and has no gradient.
    """
    place = chunk.target.unsqueeze(-1)
    # Not `probs > 0`: a NaN has to show.
    loss = torch.where(probs == 0, 0.0, probs * lead).sum(-1) + entropy
    # A target that is out of the running cannot be met; a NaN stays one.
    loss = loss.masked_fill((chunk.target_scores == -math.inf) & ~loss.isnan(), math.inf)
    weights = torch.ones_like(loss) if class_weight is None else class_weight[chunk.target]
    loss = loss * weights
    if chunk.row_scale is None:
        return RowResult(loss, None)
    scale = (chunk.row_scale * weights).unsqueeze(-1)
    some = (probs != 0).any(-1, keepdim=True)
    values = torch.cat([probs * scale, torch.where(some, -scale, 0.0)], -1)
    return RowResult(loss, Sparse(values, torch.cat([classes, place], -1)))


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
