"""Attention in plain torch, which stores all weights; differentiable to any order."""

from collections.abc import Callable

from torch import Tensor

from lastlayer.kernels.attention import Problem, grouped, scores


def forward(problem: Problem, entmax: Callable[[Tensor, float | Tensor], Tensor]) -> Tensor:
    """The output in the dtype of the queries; ``entmax`` maps scores and alpha to weights."""
    p, (n, m) = problem, (problem.query.shape[2], problem.key.shape[2])
    alpha = p.alpha if p.head_alpha is None else p.head_alpha[..., None, None]
    weights = entmax(scores(p, slice(0, n), slice(0, m)), alpha)
    value = p.value.to(weights.dtype)
    out = grouped(weights, value.shape[1]) @ value
    return out.view(*weights.shape[:3], value.shape[3]).to(p.query.dtype)
