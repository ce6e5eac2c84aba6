"""Binary losses of rows that have positives and negatives."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lastlayer._checks import check_reduction, check_scores


def check_pairs(positive: Any, negative: Any) -> None:
    """Scores of shapes ``(*batch)`` or ``(*batch, p)``, and ``(*batch, n)``."""
    check_scores(positive, name="positive", at_least_1d=False)
    check_scores(negative, name="negative")
    rows = negative.dim() - 1
    batch = positive.shape[:rows]
    shared = negative.shape[:-1]
    fits = positive.dim() in (rows, rows + 1) and all(
        have in (1, wanted) for have, wanted in zip(shared, batch, strict=True)
    )
    if not fits:
        raise ValueError(
            "negative: expected shape (*batch, n) for positive of shape (*batch) or (*batch, p), "
            "with sizes of 1 where rows share their negatives, got "
            f"{tuple(negative.shape)} for {tuple(positive.shape)}"
        )


def check_spread(name: str, value: Any, scores: Tensor) -> None:
    """A tensor that broadcasts to the shape of the scores."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    try:
        fits = torch.broadcast_shapes(value.shape, scores.shape) == scores.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name}: expected a shape that broadcasts to {tuple(scores.shape)}, got "
            f"{tuple(value.shape)}"
        )


def check_positive_mask(mask: Any, positive: Tensor) -> None:
    """A bool tensor of the shape of the positives."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask: expected a bool tensor with True for positives, got {got}")
    if mask.shape != positive.shape:
        raise ValueError(
            f"mask: expected the shape of positive, {tuple(positive.shape)}, got "
            f"{tuple(mask.shape)}"
        )


def logistic_loss(
    positive: Tensor, negative: Tensor, mask: Tensor | None, reduction: str
) -> Tensor:
    """The mean of -log σ over the positives of a row, plus the sum of -log(1 - σ) over negatives.

    A row without a positive that counts has loss 0. Arguments but ``reduction`` are checked before.
    """
    check_reduction(reduction)
    if positive.dim() < negative.dim():
        positive = positive.unsqueeze(-1)
        mask = None if mask is None else mask.unsqueeze(-1)
    if mask is None:
        mask = torch.ones_like(positive, dtype=torch.bool)
    counts = mask.any(-1)
    # What does not count is taken out before: a NaN there would reach gradients as 0 · NaN.
    found = -logsigmoid(torch.where(mask, positive, 0.0))
    number = mask.sum(-1).clamp(min=1)
    pulled = torch.where(mask, found, 0.0).sum(-1) / number
    pushed = -logsigmoid(-torch.where(counts.unsqueeze(-1), negative, -torch.inf)).sum(-1)
    losses = pulled + pushed
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / counts.sum().clamp(min=1) if reduction == "mean" else total


def wide(scores: Tensor) -> Tensor:
    """In float32, or in float64 from float64."""
    return scores if scores.dtype == torch.float64 else scores.float()
