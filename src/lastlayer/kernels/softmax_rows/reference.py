"""Cross entropy of rows in plain torch: the reference."""

import math

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels.softmax_rows import NO_RANK


def forward_(
    scores: Tensor, target: Tensor, target_scores: Tensor | None, row_scale: Tensor | None,
    class_weight: Tensor | None, smoothing: float, z_loss: float, softcap: float,
    temperature: float, statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss, logsumexp, entropy, argmax and rank of the target of each row.

    If ``row_scale`` is given, ``scores`` are overwritten with the gradient of ``sum(row_scale *
    loss)``. The last three results are empty without ``statistics``. A fully masked row has loss
    +inf and gradient 0.
    """
    dtype = accumulation_dtype(scores.dtype)
    n_classes = scores.shape[-1]
    place = target.unsqueeze(-1)
    values = scores.to(dtype)
    entropy, argmax, rank = values.new_empty(0), target.new_empty(0), target.new_empty(0)
    if statistics:
        argmax = values.argmax(-1)
        rank = (values > values.gather(-1, place)).sum(-1)
    if target_scores is not None:
        values = values.scatter(-1, place, target_scores.to(dtype).unsqueeze(-1))
    values, slope = _shaped(values, softcap, temperature)

    weights = torch.ones(n_classes, dtype=dtype, device=scores.device)
    weights = weights if class_weight is None else class_weight.to(dtype)
    lse = torch.logsumexp(values, -1)
    empty = lse == -math.inf
    origin = lse.masked_fill(empty, 0.0)
    at_target = values.gather(-1, place).squeeze(-1)
    # Not from lse, in which the common part of large scores rounds the sum away.
    logs = torch.log_softmax(values, -1).masked_fill(empty.unsqueeze(-1), -math.inf)
    log_target = logs.gather(-1, place).squeeze(-1)
    pull = (1.0 - smoothing) * weights[target]
    spread = smoothing / n_classes
    loss = z_loss * lse.square() - pull * log_target
    push = pull + 2.0 * z_loss * origin
    if smoothing:
        loss = loss + spread * (weights.sum() * lse - values @ weights)
        push = push + spread * weights.sum()
    loss = loss.masked_fill(empty, math.inf)
    probs = torch.exp(logs)
    if statistics:
        # Not `probs > 0`, which would hide NaN.
        entropy = -torch.where(probs == 0, 0.0, probs * logs).sum(-1)
        rank = rank.masked_fill(lse.isnan() | (at_target == -math.inf), NO_RANK)
    if row_scale is not None:
        gradient = probs * push.unsqueeze(-1)
        if smoothing:
            gradient = gradient - spread * weights
        # p - 1 from the exact score: for p near 1 rounded scores would give only noise.
        true = push * torch.expm1(log_target) + (push - pull)
        if smoothing:
            true = true - spread * weights[target]
        gradient = gradient.scatter(-1, place, true.unsqueeze(-1)) * slope
        gradient = gradient * row_scale.to(dtype).unsqueeze(-1)
        scores.copy_(gradient.masked_fill(empty.unsqueeze(-1), 0.0))
    return loss, lse, entropy, argmax, rank


def reduced_(
    scores: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    ignore_index: int | None, mean: bool, gradient: bool, smoothing: float, z_loss: float,
    softcap: float, temperature: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Terms of the sum or mean over the rows that are not ignored, and hidden without the others.

    ``scores`` are those of ``linear(hidden, weight, bias)``, perhaps rounded; with ``gradient``
    they are overwritten with the gradient of the sum of all terms. In ignored rows the term, the
    gradient and the returned hidden state are 0, even if hidden states or scores are NaN.
    """
    dtype = accumulation_dtype(scores.dtype)
    counts = torch.ones_like(target, dtype=torch.bool)
    if ignore_index is not None:
        counts = target != ignore_index
    share = counts.to(dtype)
    if mean:
        share = share / share.sum().clamp(min=1.0)
    states = torch.where(counts.unsqueeze(-1), hidden, 0.0)
    right = torch.where(counts, target, 0)
    exact = None
    if scores.dtype != dtype:
        exact = (states.to(dtype) * weight[right].to(dtype)).sum(-1)
        exact = exact if bias is None else exact + bias[right].to(dtype)
    scores = scores if gradient else scores.clone()
    loss, *_ = forward_(
        scores.masked_fill_(~counts.unsqueeze(-1), 0.0), right, exact,
        share if gradient else None, None, smoothing, z_loss, softcap, temperature, False,
    )  # fmt: skip
    return torch.where(counts, loss * share, 0.0), states


def gradient_(
    scores: Tensor, target: Tensor, true: Tensor, lse: Tensor, push: Tensor, softcap: float,
    temperature: float,
) -> None:  # fmt: skip
    """Overwrites the scores of some classes with the gradient, given the normaliser of each row.

    For each row i and class j it is ``push_i * exp(s_ij - lse_i) * slope_ij``, and ``true_i`` at
    the target, where s are the scores after soft cap and temperature, and slope their derivative by
    the original ones. A target of -1 is not among these classes.
    """
    values, slope = _shaped(scores.to(lse.dtype), softcap, temperature)
    gradient = torch.exp(values - lse.unsqueeze(-1)) * push.unsqueeze(-1) * slope
    here = torch.arange(scores.shape[1], device=scores.device) == target.unsqueeze(-1)
    scores.copy_(torch.where(here, true.unsqueeze(-1), gradient))


def _shaped(values: Tensor, softcap: float, temperature: float) -> tuple[Tensor, float | Tensor]:
    """Scores after soft cap and temperature, and their derivative; -inf stays -inf."""
    if not softcap:
        return values / temperature, 1.0 / temperature
    bent, out = torch.tanh(values / softcap), values == -math.inf
    slope = (1.0 - bent.square()) / temperature
    return (softcap * bent).masked_fill(out, -math.inf) / temperature, slope
