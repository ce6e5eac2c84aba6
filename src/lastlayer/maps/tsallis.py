"""The Tsallis entropy behind entmax, and derivatives with respect to alpha.

The formulas use ``excess = alpha - 1`` and functions that have a limit at 0, so that no digits
cancel as alpha goes to 1. They are derived in kernels/entmax/README.md.
"""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels.entmax import exp_remainder


def tsallis_entropy(probs: Tensor, alpha: float | Tensor) -> Tensor:
    r"""``sum(p - p**alpha) / (alpha (alpha - 1))`` per row; the Shannon entropy at alpha = 1."""
    return _entropy_and_bend(probs, alpha)[0]


def tsallis_entropy_alpha_slope(probs: Tensor, alpha: Tensor) -> Tensor:
    """Derivative of :func:`tsallis_entropy` with respect to alpha at fixed ``probs``, per row."""
    entropy, bend = _entropy_and_bend(probs, alpha)
    return -(entropy + bend) / alpha


def alpha_slope(probs: Tensor, alpha: Tensor) -> Tensor:
    """Derivative of ``probs = entmax(scores, alpha)`` with respect to alpha, shape of ``probs``."""
    dtype = accumulation_dtype(probs.dtype)
    probs, excess = probs.to(dtype), alpha.to(dtype).unsqueeze(-1) - 1.0
    log_probs = _log_on_support(probs)
    power = -excess * log_probs
    square = log_probs.square() * exp_remainder(power)
    mean_square = (probs * square).sum(-1, keepdim=True)
    entropy = -(probs * log_probs).sum(-1, keepdim=True)
    total = (probs * torch.exp(power)).sum(-1, keepdim=True)
    total = torch.where(total == 0, 1.0, total)
    inner = mean_square - square - excess * (log_probs * mean_square + entropy * square)
    return torch.where(probs != 0, probs * inner / total, 0.0)


def _entropy_and_bend(probs: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """``-sum(p log(p) f(x)) / alpha``, which is the entropy, and ``sum(p log(p)**2 f'(x))``.

    Here f(x) = (exp(x) - 1) / x and x = (alpha - 1) log(p).
    """
    log_probs = _log_on_support(probs)
    x = ((alpha.unsqueeze(-1) if isinstance(alpha, Tensor) else alpha) - 1.0) * log_probs
    remainder = exp_remainder(x)
    ratio = 1.0 + x * remainder
    entropy = -(probs * log_probs * ratio).sum(-1) / alpha
    return entropy, (probs * log_probs.square() * (ratio - remainder)).sum(-1)


def _log_on_support(probs: Tensor) -> Tensor:
    return torch.log(torch.where(probs != 0, probs, 1.0))
