"""The loss of entmax on rows of scores in plain torch: the reference."""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels import entmax, entmax_rows
from lastlayer.kernels.score_loss import NUMBERS


def forward(
    scores: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int | None,
    alpha: float, row_alpha: Tensor | None, labels: bool, mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``<p - y, scores> + H(p) - H(y)`` of each row times its weight, or the weighted mean.

    Also returns the numbers and the lists of blocks for ``backward``. With ``labels`` the target is
    divided by its sum. Ignored rows, and rows of labels without positives, have weight 0, and a
    loss of 0 whatever their scores are. Other rows have the class weight of their target, or its
    mean under a distribution. A fully masked row has loss +inf. The mean divides by the sum of
    weights, and is 0 if that is 0.
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
    n = len(weight)
    stats, chosen = values.new_zeros(NUMBERS * n + 1), values.new_zeros(0, dtype=torch.int16)
    probs = entmax.forward("reference", values, alpha, row_alpha)
    slopes = None if row_alpha is None else stats[n : 2 * n]
    losses = entmax_rows.forward_(
        "reference", probs, values, target, None, alpha, row_alpha, slopes
    )
    losses = torch.where(weight == 0, 0.0, losses * weight)
    stats[:n] = weight
    stats[-1] = 1.0
    if not mean:
        return losses, stats, chosen
    size = weight.sum()
    stats[-1] = torch.where(size == 0, 0.0, size.reciprocal())
    return losses.sum() * stats[-1], stats, chosen


def backward(
    scores: Tensor, target: Tensor, stats: Tensor, chosen: Tensor, factor: Tensor, alpha: float,
    row_alpha: Tensor | None, labels: bool,
) -> Tensor:  # fmt: skip
    """``factor * weight * (p - y)``, the gradient of the scores; ``factor`` is a scalar or per row.

    Rows of factor 0 have gradient 0 even if they contain NaN. Fully masked rows have gradient 0.
    """
    del chosen
    weight = stats[: scores.shape[0]]
    values = scores.to(accumulation_dtype(scores.dtype))
    if target.dim() == 2:
        target = _distributions(target, values.dtype, labels)[0]
    else:
        target = torch.where(weight == 0, 0, target)
    probs: Tensor = entmax.forward("reference", values, alpha, row_alpha)
    row = factor * stats[-1] * weight
    entmax_rows.forward_("reference", probs, values, target, row, alpha, row_alpha)
    return probs.to(scores.dtype)


def _distributions(target: Tensor, dtype: torch.dtype, labels: bool) -> tuple[Tensor, Tensor]:
    """The target as distributions, and which rows have one."""
    wanted = target.to(dtype)
    total = wanted.sum(-1, keepdim=True) if labels else torch.ones_like(wanted[:, :1])
    return wanted / torch.where(total == 0, 1.0, total), (total != 0).squeeze(-1)
