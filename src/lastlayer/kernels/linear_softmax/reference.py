"""Softmax over class scores in plain torch, which stores all scores: the reference for tests."""

import math

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype


def mix_of_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """The logsumexp of each row, and ``sum_j p_j * slope_j * weight_j``."""
    scores, slope = _shaped(hidden, weight, bias, softcap, temperature)
    lse = torch.logsumexp(scores, -1)
    return lse, (_probs(scores, lse) * slope) @ weight.to(scores.dtype)


def gradient_of_classes(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, lse: Tensor, push: Tensor,
    pull: Tensor, softcap: float, temperature: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``sum_i (push_i p_ij - pull_i [j = target_i]) slope_ij hidden_i``, and without hidden_i."""
    scores, slope = _shaped(hidden, weight, bias, softcap, temperature)
    gradient = _probs(scores, lse) * push.unsqueeze(-1)
    gradient = gradient.scatter_add(-1, target.unsqueeze(-1), -pull.unsqueeze(-1)) * slope
    return gradient.t() @ hidden.to(gradient.dtype), gradient.sum(0)


def _probs(scores: Tensor, lse: Tensor) -> Tensor:
    """Softmax; all 0 for a row that is all -inf."""
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))


def _shaped(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Scores after cap and temperature, and their derivative with respect to the plain scores."""
    dtype = accumulation_dtype(hidden.dtype)
    scores = hidden.to(dtype) @ weight.to(dtype).t()
    if bias is not None:
        scores = scores + bias.to(dtype)
    slope = torch.ones_like(scores)
    if softcap:
        bent, out = torch.tanh(scores / softcap), scores == -math.inf
        scores, slope = (softcap * bent).masked_fill(out, -math.inf), 1.0 - bent.square()
    return scores / temperature, slope / temperature
