"""The Tsallis entropies behind entmax, and what moves when alpha does.

Written in ``excess = alpha - 1`` and in functions that have a limit at 0, so that nothing cancels
as alpha goes to 1. The formulas are derived in kernels/entmax/README.md.
"""

import math

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype


def tsallis_entropy(probs: Tensor, alpha: float | Tensor) -> Tensor:
    r"""``H(p) = sum(p - p**alpha) / (alpha (alpha - 1))``, Shannon's at alpha = 1; per row."""
    log_probs, excess = _log_on_support(probs), _per_class(alpha) - 1.0
    return -(probs * log_probs * _expm1_ratio(excess * log_probs)).sum(-1) / alpha


def tsallis_entropy_alpha_slope(probs: Tensor, alpha: Tensor) -> Tensor:
    """The derivative of :func:`tsallis_entropy` by alpha at fixed probabilities; per row."""
    log_probs, excess = _log_on_support(probs), _per_class(alpha) - 1.0
    curvature = (probs * log_probs.square() * _expm1_ratio_slope(excess * log_probs)).sum(-1)
    return -(tsallis_entropy(probs, alpha) + curvature) / alpha


def alpha_slope(probs: Tensor, alpha: Tensor) -> Tensor:
    """The derivative of ``entmax(scores, alpha)`` by alpha, from its value; shape of ``probs``."""
    dtype = accumulation_dtype(probs.dtype)
    probs, excess = probs.to(dtype), alpha.to(dtype).unsqueeze(-1) - 1.0
    log_probs = _log_on_support(probs)
    power = -excess * log_probs
    square = log_probs.square() * _exp_remainder(power)
    mean_square = (probs * square).sum(-1, keepdim=True)
    entropy = -(probs * log_probs).sum(-1, keepdim=True)
    total = (probs * torch.exp(power)).sum(-1, keepdim=True)
    total = torch.where(total == 0, 1.0, total)
    inner = mean_square - square - excess * (log_probs * mean_square + entropy * square)
    return torch.where(probs != 0, probs * inner / total, 0.0)


def _per_class(alpha: float | Tensor) -> float | Tensor:
    return alpha.unsqueeze(-1) if isinstance(alpha, Tensor) else alpha


def _log_on_support(probs: Tensor) -> Tensor:
    return torch.log(torch.where(probs != 0, probs, 1.0))


def _expm1_ratio(x: Tensor) -> Tensor:
    """``(exp(x) - 1) / x``, 1 at 0."""
    small, safe = _split(x)
    return torch.where(small, _series(x, _EXPM1_RATIO), torch.expm1(safe) / safe)


def _exp_remainder(x: Tensor) -> Tensor:
    """``(exp(x) - 1 - x) / x**2``, 1/2 at 0."""
    small, safe = _split(x)
    exact = (torch.expm1(safe) - safe) / safe.square()
    return torch.where(small, _series(x, _EXP_REMAINDER), exact)


def _expm1_ratio_slope(x: Tensor) -> Tensor:
    """The derivative of :func:`_expm1_ratio`, 1/2 at 0."""
    small, safe = _split(x)
    exact = (safe * torch.exp(safe) - torch.expm1(safe)) / safe.square()
    return torch.where(small, _series(x, _EXPM1_RATIO_SLOPE), exact)


# Below this size the closed forms cancel; up to it the series reaches float64.
_SMALL = 0.3
_TERMS = range(14)
_EXPM1_RATIO = tuple(1.0 / math.factorial(k + 1) for k in _TERMS)
_EXP_REMAINDER = tuple(1.0 / math.factorial(k + 2) for k in _TERMS)
_EXPM1_RATIO_SLOPE = tuple((k + 1.0) / math.factorial(k + 2) for k in _TERMS)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    small = x.abs() < _SMALL
    return small, torch.where(small, 1.0, x)


def _series(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    # Large x would overflow in the branch that is not taken, and poison its gradient.
    x = x.clamp(-_SMALL, _SMALL)
    total = torch.zeros_like(x)
    for coefficient in reversed(coefficients):
        total = total * x + coefficient
    return total
