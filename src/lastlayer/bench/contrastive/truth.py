"""Loss and gradients in float64, a few rows at a time."""

import torch
from torch import Tensor
from torch.nn import functional

from lastlayer.bench.losses import Truth

SYMMETRIC, ONE_WAY = "symmetric", "one-way"
# Bytes of similarities that are held at a time.
_BYTES = {"cuda": 2**31, "cpu": 2**27}


def truth_of(computes: str, query: Tensor, key: Tensor, temperature: Tensor) -> Truth:
    """What every method that computes this function should give for these inputs."""
    n = query.shape[0]
    scale = 1.0 / float(temperature)
    leaves = [each.detach().double().requires_grad_() for each in (query, key)]
    units = [functional.normalize(each, dim=-1) for each in leaves]
    left, right = (each.detach() for each in units)
    step = max(1, _BYTES[query.device.type] // (8 * n))
    parts = [slice(first, min(n, first + step)) for first in range(0, n, step)]
    own = (left * right).sum(-1) * scale
    rows, columns = torch.empty_like(own), torch.full_like(own, -torch.inf)
    for part in parts:
        scores = left[part] @ right.t() * scale
        rows[part] = torch.logsumexp(scores, 1)
        columns = torch.logaddexp(columns, torch.logsumexp(scores, 0))
    weight = 0.5 if computes == SYMMETRIC else 1.0
    loss = weight * (rows - own).mean() + (1.0 - weight) * (columns - own).mean()
    to_left, to_right = torch.empty_like(left), torch.zeros_like(right)
    to_scale = loss.new_zeros(())
    for part in parts:
        cosines = left[part] @ right.t()
        gradient = torch.exp(cosines * scale - rows[part].unsqueeze(1)).mul_(weight)
        if weight < 1.0:
            gradient += torch.exp(cosines * scale - columns).mul_(1.0 - weight)
        gradient[:, part].diagonal().sub_(1.0)
        gradient /= n
        to_scale += torch.dot(gradient.flatten(), cosines.flatten())
        torch.mm(gradient * scale, right, out=to_left[part])
        to_right.addmm_(gradient.t(), left[part] * scale)
    of_query, of_key = torch.autograd.grad(units, leaves, [to_left, to_right])
    return Truth(float(loss), (of_query, of_key, -to_scale * scale**2))
