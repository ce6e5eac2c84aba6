"""The losses from their formulas, with all scores stored and nothing clever; and how to compare."""

from functools import partial

import torch

from lastlayer.fused import (
    linear_cross_entropy,
    linear_entmax_loss,
    linear_statistics,
    linear_topk_softmax_loss,
)

# One of each, for what all of them have in common.
LOSSES = {
    "cross_entropy": linear_cross_entropy,
    "statistics": lambda *args, **options: linear_statistics(*args, **options).loss,
    "entmax": linear_entmax_loss,
    "sparsemax": partial(linear_entmax_loss, alpha=2.0),
    "topk_softmax": partial(linear_topk_softmax_loss, k=5),
}


def scores(hidden, weight, bias=None, softcap=None, temperature=1.0):
    values = hidden @ weight.mT
    if bias is not None:
        values = values + bias
    if softcap is not None:
        values = softcap * torch.tanh(values / softcap)
    return values / temperature


def cross_entropy(values, target, *, label_smoothing=0.0, class_weight=None, z_loss=0.0):
    """A loss for each row; targets are class ids."""
    n_classes = values.shape[-1]
    weights = values.new_ones(n_classes) if class_weight is None else class_weight
    lse = values.exp().sum(-1).log()
    surprise = lse.unsqueeze(-1) - values
    at_target = surprise.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    loss = (1 - label_smoothing) * weights[target] * at_target
    if label_smoothing:
        loss = loss + label_smoothing / n_classes * (weights * surprise).sum(-1)
    return loss + z_loss * lse**2


def entmax_probs(values, alpha):
    """Bisection of the threshold."""
    raised = (alpha - 1) * values
    high = raised.amax(-1, keepdim=True)
    low = high - 1
    for _ in range(60):
        middle = (low + high) / 2
        mass = (raised - middle).clamp_min(0).pow(1 / (alpha - 1)).sum(-1, keepdim=True)
        low, high = torch.where(mass >= 1, middle, low), torch.where(mass >= 1, high, middle)
    return (raised - low).clamp_min(0).pow(1 / (alpha - 1))


def entmax(values, target, *, alpha=1.5, class_weight=None):
    """``<p - y, scores> + H(p)``; p is where that is largest, so it counts as a constant."""
    if alpha == 1:
        return cross_entropy(values, target, class_weight=class_weight)
    probs = entmax_probs(values.detach(), alpha)
    entropy = (probs - probs**alpha).sum(-1) / (alpha * (alpha - 1))
    at_target = values.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    loss = (probs * values).sum(-1) - at_target + entropy
    return loss if class_weight is None else class_weight[target] * loss


def topk_softmax(values, target, *, k, class_weight=None):
    best = values.topk(min(k, values.shape[-1])).values
    at_target = values.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    loss = best.exp().sum(-1).log() - at_target
    return loss if class_weight is None else class_weight[target] * loss


def reduced(rows, target, reduction, *, counted, row_weight=None, class_weight=None):
    """``rows`` are the losses of all rows, ``counted`` says which are not ignored."""
    weights = torch.ones_like(rows) if row_weight is None else row_weight
    weights = torch.where(counted, weights, 0.0)
    total = torch.where(counted, rows, 0.0) * weights
    if reduction == "none":
        return total
    if reduction == "sum":
        return total.sum()
    if class_weight is not None:
        weights = weights * class_weight[target]
    return total.sum() / weights.sum() if counted.any() else total.sum()


def unfused(row_loss, hidden, weight, target, bias=None, **options):
    """What the fused function should give, with the same arguments."""
    shared = {name: options.pop(name, None) for name in ("class_weight", "row_weight")}
    reduction = options.pop("reduction", "mean")
    ignore_index = options.pop("ignore_index", -100)
    values = scores(
        hidden, weight, bias, options.pop("softcap", None), options.pop("temperature", 1.0)
    )
    counted = torch.ones_like(target, dtype=torch.bool)
    if ignore_index is not None:
        counted = target != ignore_index
    target = torch.where(counted, target, 0)
    rows = row_loss(values, target, class_weight=shared["class_weight"], **options)
    return reduced(rows, target, reduction, counted=counted, **shared)


def make_problem(n=13, d=7, v=29, *, bias=True, ignored=(), scale=1.0, dtype=torch.float64):
    """Hidden, weight, target and bias; all but the target with gradients."""
    shape = n if isinstance(n, tuple) else (n,)
    hidden = (torch.randn(*shape, d, dtype=torch.float64) * scale).to(dtype).requires_grad_()
    weight = torch.randn(v, d, dtype=torch.float64).to(dtype).requires_grad_()
    target = torch.randint(v, shape)
    for row in ignored:
        target.view(-1)[row] = -100
    offset = torch.randn(v, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    return hidden, weight, target, offset


def gradients(loss, problem, upstream=None):
    """Of hidden, weight and bias."""
    leaves = [each for each in problem if each is not None and each.requires_grad]
    return torch.autograd.grad(loss, leaves, upstream)


def assert_fused_equals_unfused(function, row_loss, problem, **options):
    """Values, and gradients under an upstream gradient that is not 1."""
    chunking = {name: options.pop(name) for name in ("chunk_rows",) if name in options}
    ours = function(*problem, **options, **chunking)
    truth = unfused(row_loss, *problem, **options)
    torch.testing.assert_close(ours, truth)
    upstream = torch.randn_like(truth)
    pairs = zip(
        gradients(ours, problem, upstream), gradients(truth, problem, upstream), strict=True
    )
    for mine, true in pairs:
        torch.testing.assert_close(mine, true)


def distance(ours, truth):
    """The norm of the difference over that of the truth."""
    truth = truth.double()
    return ((ours.double() - truth).norm() / truth.norm()).item()
