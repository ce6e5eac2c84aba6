"""The loss of entmax on rows of scores in plain torch: defines the truth."""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels import entmax, entmax_rows
from lastlayer.kernels.score_loss import NUMBERS


def forward(
    scores: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int | None,
    alpha: float, labels: bool, mean: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``<p - y, scores> + H(p) - H(y)`` of each row times its weight, or their mean; what is kept.

    With ``labels`` the target is divided by its sum. The weight is 0 for an ignored row and for one
    without positives, whose loss is 0 whatever its scores are; else that of the target's class, or
    of a distribution the mean. A fully masked row costs +inf. A mean is over the weights, and 0
    where nothing counts.
    """
    values = scores.to(accumulation_dtype(scores.dtype))
    counts = torch.ones_like(values[:, 0], dtype=torch.bool)
    if target.dim() == 2:
        target, counts = _distributions(target, values.dtype, labels)
    elif ignore_index is not None:
        counts = target != ignore_index
        target = torch.where(counts, target, 0)
    weight = counts.to(values.dtype)
    if class_weight is not None:
        class_weight = class_weight.to(values.dtype)
        own = target @ class_weight if target.dim() == 2 else class_weight[target]
        weight = torch.where(counts, own, 0.0)
    probs = entmax.forward("reference", values, alpha, None)
    losses = entmax_rows.forward_("reference", probs, values, target, None, alpha)
    losses = torch.where(weight == 0, 0.0, losses * weight)
    stats = values.new_zeros(NUMBERS * len(weight) + 1)
    stats[: len(weight)] = weight
    stats[-1] = 1.0
    if not mean:
        return losses, stats
    size = weight.sum()
    stats[-1] = torch.where(size == 0, 0.0, size.reciprocal())
    return losses.sum() * stats[-1], stats


def backward(
    scores: Tensor, target: Tensor, stats: Tensor, factor: Tensor, alpha: float, labels: bool
) -> Tensor:
    """``factor * weight * (p - y)`` for the loss of forward; the factor is a number, or one a row.

    Rows of factor 0 have gradient 0 even where they are NaN, and so have fully masked rows.
    """
    weight = stats[: scores.shape[0]]
    values = scores.to(accumulation_dtype(scores.dtype))
    if target.dim() == 2:
        target = _distributions(target, values.dtype, labels)[0]
    else:
        target = torch.where(weight == 0, 0, target)
    probs: Tensor = entmax.forward("reference", values, alpha, None)
    entmax_rows.forward_("reference", probs, values, target, factor * stats[-1] * weight, alpha)
    return probs.to(scores.dtype)


def _distributions(target: Tensor, dtype: torch.dtype, labels: bool) -> tuple[Tensor, Tensor]:
    """And which rows have any."""
    wanted = target.to(dtype)
    total = wanted.sum(-1, keepdim=True) if labels else torch.ones_like(wanted[:, :1])
    return wanted / torch.where(total == 0, 1.0, total), (total != 0).squeeze(-1)
