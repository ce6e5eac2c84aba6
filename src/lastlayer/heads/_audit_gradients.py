"""Sums from which the bias and the variance of a gradient follow, without keeping any draw."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype


@dataclass(frozen=True)
class GradientError:
    """An estimated gradient beside the exact one; all numbers are norms over the whole tensor."""

    norm: float
    """Of the exact gradient."""
    bias: float
    """Of the mean estimate less the exact one; what chance alone explains is taken out."""
    deviation: float
    """Of one estimate less the mean one, the root of the variance of all its numbers together."""
    cosine: float
    """Between the mean estimate and the exact one, 1 where a bias is a matter of length alone."""
    least_bias: float
    """The deviation of the mean; a bias below this cannot be told from chance."""

    @property
    def relative_bias(self) -> float:
        """The bias over the norm of the exact gradient."""
        return _ratio(self.bias, self.norm)

    @property
    def relative_deviation(self) -> float:
        """The deviation over the norm of the exact gradient."""
        return _ratio(self.deviation, self.norm)


class GradientSums:
    """The sum of estimates and that of their squared norms; memory for two gradients."""

    def __init__(self, exact: Tensor) -> None:
        dtype = accumulation_dtype(exact.dtype)
        self._exact = exact.to(dtype)
        self._sum = torch.zeros_like(self._exact)
        self._squares = torch.zeros((), dtype=torch.float64, device=exact.device)
        self._n = 0

    def add(self, estimate: Tensor) -> None:
        """One draw, dense or row-sparse."""
        if estimate.layout == torch.strided:
            values = estimate.detach()
            self._sum += values
        else:
            estimate = estimate.detach().coalesce()
            values = estimate.values()
            self._sum.index_add_(0, estimate.indices()[0], values.to(self._sum.dtype))
        self._squares += values.double().square().sum()
        self._n += 1

    def compared(self) -> GradientError:
        """What the draws so far say. The host waits."""
        mean = self._sum / self._n
        of_mean, of_exact = _square(mean), _square(self._exact)
        variance = max(0.0, self._squares.item() / self._n - of_mean)
        variance *= self._n / (self._n - 1)
        by_chance = variance / self._n
        bias = max(0.0, _square(mean.sub_(self._exact)) - by_chance)
        # <m, g> = (|m|² + |g|² - |m - g|²) / 2, where m - g has taken the place of m.
        product = (of_mean + of_exact - _square(mean)) / 2
        return GradientError(
            norm=math.sqrt(of_exact),
            bias=math.sqrt(bias),
            deviation=math.sqrt(variance),
            cosine=_ratio(product, math.sqrt(of_mean * of_exact)),
            least_bias=math.sqrt(by_chance),
        )


def _square(values: Tensor) -> float:
    norm: float = torch.linalg.vector_norm(values, dtype=torch.float64).item()
    return norm * norm


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (math.nan if part else 0.0)
