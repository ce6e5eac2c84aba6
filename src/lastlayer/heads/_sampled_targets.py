"""The targets of rows: their logits, and what becomes of them beside the draws."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lastlayer import kernels
from lastlayer.heads._sampled_rule import Rule


def target_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    factor: float,
    log_expected: Tensor | None,
    row_shift: Tensor | None,
) -> Tensor:
    logits: Tensor = kernels.products.scores("auto", hidden, weight, bias, target)
    if factor != 1.0:
        logits = logits * factor
    if log_expected is not None:
        logits = logits - log_expected
    return logits if row_shift is None else logits + row_shift.to(logits.dtype).unsqueeze(-1)


def log_mass(logits: Tensor, target: Tensor) -> Tensor:
    """log Σ e^logit over the different targets of a row."""
    if target.shape[1] == 1:
        return logits.squeeze(1)
    return torch.logsumexp(logits.masked_fill(_left_out(target), -torch.inf), -1)


def _left_out(target: Tensor) -> Tensor:
    """Places without a target, or with one that was there before."""
    again = (target.unsqueeze(-1) == target.unsqueeze(-2)).tril(-1).any(-1)
    return again | (target < 0)


def combined(
    logits: Tensor, target: Tensor, exact: Tensor | None, first: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Losses ``(n,)``, and slopes of the logits of targets ``(n, p)``.

    Args:
        logits: of the targets, ``(n, p)``.
        target: ``(n, p)``, -1 for none.
        exact: the log of their part in the normaliser, ``(n,)``; None where they have none.
        first: what the draws add up to, ``(n,)``.
        rule: the loss.
    """
    if target.shape[1] == 1 and exact is not None:
        # The odds of the rest against the target: 1 - p is not what remains of 1.
        odds = first - exact
        return _softplus(odds), -torch.sigmoid(odds).unsqueeze(-1)
    there = (target >= 0).to(logits.dtype)
    share = there / there.sum(-1, keepdim=True).clamp(min=1.0)
    if rule.logistic:
        losses = (share * _softplus(-logits)).sum(-1) + first
        return losses, -share * torch.sigmoid(-logits)
    pull = (share * logits).sum(-1)
    if exact is None:
        return first - pull, -share
    odds = first - exact
    mass = torch.sigmoid(-odds).unsqueeze(-1) * torch.exp(logits - exact.unsqueeze(-1))
    slopes = mass.masked_fill(_left_out(target), 0.0) - share
    return _softplus(odds) + (exact - pull), slopes


def _softplus(values: Tensor) -> Tensor:
    """log(1 + e^x); torch's own is x beyond 20, which float64 notices."""
    return -logsigmoid(-values)
