"""The loss of listed classes in plain torch: defines the truth."""

import math

import torch
from torch import Tensor

from lastlayer.kernels.entmax import reference as entmax


def forward(
    scores: Tensor,
    classes: Tensor,
    target: Tensor,
    target_scores: Tensor,
    row_scale: Tensor | None,
    class_weight: Tensor | None,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``<p - y, scores> + H(p)`` of each row times the weight of its target, and its gradient.

    Args:
        scores: float32 or float64 ``(rows, k)``, of the listed classes.
        classes: int64 ``(rows, k)``, -1 for none.
        target: int64 ``(rows,)``.
        target_scores: ``(rows,)``.
        row_scale: ``(rows,)``, what the gradient is multiplied by; None where none is wanted.
        class_weight: ``(v,)`` or None.
        alpha: at least 1.

    Returns:
        The losses ``(rows,)``, and the gradient of the scores as values and classes ``(rows, k +
        1)``, the target last and 0 for padding; both are empty without ``row_scale``. A row without
        any probability costs +inf and has no gradient.
    """
    listed = scores.masked_fill(classes < 0, -math.inf)
    probs = entmax.forward(listed, alpha, None)
    return loss_and_gradient(
        probs, listed, classes, target, target_scores, row_scale, class_weight, alpha
    )


def loss_and_gradient(
    probs: Tensor,
    scores: Tensor,
    classes: Tensor,
    target: Tensor,
    target_scores: Tensor,
    row_scale: Tensor | None,
    class_weight: Tensor | None,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the probabilities on."""
    out = target_scores == -math.inf
    # A target of -inf counts as 0 here: its loss is known anyway, and differences stay finite.
    lead = scores - target_scores.masked_fill(out, 0.0).unsqueeze(-1)
    # Not `probs > 0`: a NaN has to show.
    loss = torch.where(probs == 0, 0.0, probs * lead).sum(-1) + _entropy(probs, alpha)
    # A target that is out of the running cannot be met; a NaN stays one.
    loss = loss.masked_fill(out & ~loss.isnan(), math.inf)
    weights = None if class_weight is None else class_weight[target].to(loss.dtype)
    loss = loss if weights is None else loss * weights
    if row_scale is None:
        return loss, probs.new_empty(0), classes.new_empty(0)
    scale = (row_scale if weights is None else row_scale * weights).unsqueeze(-1)
    some = (probs != 0).any(-1, keepdim=True)
    values = torch.cat([probs * scale, torch.where(some, -scale, 0.0)], -1)
    return loss, values, torch.cat([classes.clamp(min=0), target.unsqueeze(-1)], -1)


def _entropy(probs: Tensor, alpha: float) -> Tensor:
    logs = torch.log(torch.where(probs > 0, probs, 1.0))
    if alpha == 1.0:
        return -(probs * logs).sum(-1)
    return -(probs * torch.expm1((alpha - 1.0) * logs)).sum(-1) / (alpha * (alpha - 1.0))
