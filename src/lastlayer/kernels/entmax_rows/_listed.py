"""The loss of listed classes and its gradient in plain torch, with probabilities by any kernel."""

import math

import torch
from torch import Tensor

from lastlayer.kernels import entmax
from lastlayer.kernels._registry import Impl


def loss_of_listed(
    impl: Impl, scores: Tensor, classes: Tensor, target: Tensor, target_scores: Tensor,
    row_scale: Tensor | None, class_weight: Tensor | None, alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``listed`` of the reference; ``impl`` computes the probabilities."""
    scores = scores.masked_fill(classes < 0, -math.inf)
    probs = entmax.forward(impl, scores, alpha, None)
    out = target_scores == -math.inf
    # A target score of -inf is replaced by 0, so that differences stay finite; its loss is +inf.
    lead = scores - target_scores.masked_fill(out, 0.0).unsqueeze(-1)
    # Not `probs > 0`, since NaN must propagate.
    loss = torch.where(probs == 0, 0.0, probs * lead).sum(-1) + entropy(probs, alpha)
    # A masked target has infinite loss; NaN is kept.
    loss = loss.masked_fill(out & ~loss.isnan(), math.inf)
    weights = None if class_weight is None else class_weight[target].to(loss.dtype)
    loss = loss if weights is None else loss * weights
    if row_scale is None:
        return loss, probs.new_empty(0), classes.new_empty(0)
    scale = (row_scale if weights is None else row_scale * weights).unsqueeze(-1)
    some = (probs != 0).any(-1, keepdim=True)
    values = torch.cat([probs * scale, torch.where(some, -scale, 0.0)], -1)
    return loss, values, torch.cat([classes.clamp(min=0), target.unsqueeze(-1)], -1)


def entropy(probs: Tensor, alpha: float) -> Tensor:
    """The Tsallis entropy of each row; the Shannon entropy for alpha 1."""
    logs = torch.log(torch.where(probs > 0, probs, 1.0))
    if alpha == 1.0:
        return -(probs * logs).sum(-1)
    return -(probs * torch.expm1((alpha - 1.0) * logs)).sum(-1) / (alpha * (alpha - 1.0))
