"""Every class as likely as another."""

import math

import torch
from torch import Tensor

from lastlayer.kernels.rng import integers
from lastlayer.samplers._drawn import Sampled
from lastlayer.samplers.base import Sampler


class Uniform(Sampler):
    """All classes alike: q(c) = 1 / n.

    A draw is ⌊n · r / 2^64⌋ from 64 random bits r, which makes probabilities differ by less than
    one part in 2^32 from each other. Nothing is stored.

    Args:
        n_classes: how many classes there are.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> sampler = samplers.Uniform(8)
        >>> sampler.sample(5, counter=(1, 0))
        tensor([7, 4, 5, 3, 1])
        >>> sampler.log_prob(torch.tensor([0, 7])).exp()
        tensor([0.1250, 0.1250])
    """

    def _draw(self, n: int, counter: Tensor, _context: Tensor | None) -> Tensor:
        ids: Tensor = integers("auto", counter, n, self.n_classes)
        return ids

    def _draw_both(self, n: int, counter: Tensor, context: Tensor | None) -> Sampled:
        ids = self._draw(n, counter, context)
        log_prob = torch.full_like(ids, -math.log(self.n_classes), dtype=torch.float32)
        return Sampled(ids, log_prob)

    def _log_prob(self, ids: Tensor, _context: Tensor | None) -> Tensor:
        return torch.full_like(ids, -math.log(self.n_classes), dtype=torch.float64)
