"""Loss and gradients in float64, a few rows at a time."""

import torch
from torch import Tensor

from lastlayer.bench.losses import Truth
from lastlayer.bench.maps import cases as map_cases

CROSS_ENTROPY = "cross_entropy"
# Bytes of scores that are held at a time.
_BYTES = {"cuda": 2**31, "cpu": 2**27}
# What entropy the loss of a function has; 1 is Shannon's.
_ALPHAS = {CROSS_ENTROPY: 1.0, map_cases.TOPK: 1.0, "sparsemax": 2.0, "entmax 1.5": 1.5}


def truth_of(computes: str, hidden: Tensor, weight: Tensor, target: Tensor) -> Truth:
    """What every method that computes this function should give for these inputs."""
    rows, classes = hidden.shape[0], weight.shape[0]
    hidden, weight = hidden.double(), weight.double()
    hidden_gradient, weight_gradient = torch.empty_like(hidden), torch.zeros_like(weight)
    total = hidden.new_zeros(())
    step = max(1, _BYTES[hidden.device.type] // (8 * classes))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        scores = hidden[part] @ weight.t()
        loss, gradient = _of_scores(computes, scores, target[part])
        total += loss
        gradient /= rows
        torch.mm(gradient, weight, out=hidden_gradient[part])
        weight_gradient.addmm_(gradient.t(), hidden[part])
    return Truth(float(total / rows), (hidden_gradient, weight_gradient))


def _of_scores(computes: str, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss ⟨p − y, scores⟩ + H(p) and its gradient p − y."""
    name = "softmax" if computes == CROSS_ENTROPY else computes
    probabilities = map_cases.truth(name, scores)
    alpha = _ALPHAS[computes]
    if alpha == 1.0:
        entropy = torch.special.entr(probabilities).sum()
    else:
        powers = probabilities.pow(alpha).sum(-1)
        entropy = (1.0 - powers).sum() / (alpha * (alpha - 1.0))
    at_target = scores.gather(-1, target.unsqueeze(-1))
    lead = torch.dot(probabilities.flatten(), scores.flatten()) - at_target.sum()
    ones = torch.ones_like(at_target)
    return lead + entropy, probabilities.scatter_add_(-1, target.unsqueeze(-1), -ones)
