"""Losses and gradients in float64, a few rows at a time."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lastlayer.bench.losses import Truth

LINEAR_ZLPR, LINEAR_BCE, DENSE_ZLPR = "linear + ZLPR", "linear + BCE", "ZLPR of scores"
# Bytes of scores that are held at a time.
_BYTES = {"cuda": 2**31, "cpu": 2**26}


def of_linear(section: str, hidden: Tensor, weight: Tensor, positives: Tensor) -> Truth:
    """What every method of this section should give for these inputs."""
    hidden, weight = hidden.double(), weight.double()
    of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    total = hidden.new_zeros(())
    for part in _parts(hidden.shape[0], weight.shape[0], hidden):
        scores = hidden[part] @ weight.t()
        on = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, positives[part], value=True)
        losses, gradient = _of_scores(section, scores, on)
        total += losses.sum()
        gradient /= hidden.shape[0]
        torch.mm(gradient, weight, out=of_hidden[part])
        of_weight.addmm_(gradient.t(), hidden[part])
    return Truth(float(total / hidden.shape[0]), (of_hidden, of_weight))


def of_dense(scores: Tensor, target: Tensor) -> Truth:
    """The same of scores and labels."""
    rows = scores.shape[0]
    gradient = torch.empty_like(scores, dtype=torch.float64)
    total = gradient.new_zeros(())
    for part in _parts(rows, scores.shape[1], scores):
        losses, slope = _of_scores(DENSE_ZLPR, scores[part].double(), target[part])
        total += losses.sum()
        gradient[part] = slope / rows
    return Truth(float(total / rows), (gradient,))


def _of_scores(section: str, scores: Tensor, on: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row, and its gradient."""
    if section == LINEAR_BCE:
        losses = -logsigmoid(torch.where(on, scores, -scores)).sum(-1)
        return losses, torch.sigmoid(scores) - on.double()
    zero = scores.new_zeros(scores.shape[0], 1)
    above = torch.logaddexp(scores.masked_fill(on, -torch.inf).logsumexp(-1, True), zero)
    below = torch.logaddexp((-scores).masked_fill(~on, -torch.inf).logsumexp(-1, True), zero)
    gradient = torch.where(on, -torch.exp(-scores - below), torch.exp(scores - above))
    return (above + below).squeeze(-1), gradient


def _parts(rows: int, labels: int, like: Tensor) -> list[slice]:
    step = max(1, _BYTES[like.device.type] // (8 * labels))
    return [slice(first, first + step) for first in range(0, rows, step)]
