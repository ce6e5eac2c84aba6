"""Any frequencies, from an alias table of integers."""

import math
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from lastlayer.kernels.rng import draw, log_complement
from lastlayer.kernels.rng.table import alias_table, column_bits, integer_weights
from lastlayer.samplers._checks import as_counts, check_number, check_real
from lastlayer.samplers._drawn import Sampled
from lastlayer.samplers.base import Sampler


class Unigram(Sampler):
    """Classes as frequent as their counts say: q(c) = w(c) / 2^B with integers w ∝ counts^power.

    The integers are shared out over the columns of an alias table without a remainder, so that a
    class is drawn with probability w(c) / 2^B to the last bit, and that is what
    :meth:`~lastlayer.samplers.Sampler.log_prob` says. They are within 1 of the exact share of a
    total of 2^32 times a power of two that is at least ``n_classes`` and 4096, so that nothing is
    lost at 100 million classes. A cumulative sum in float32 leaves many of so many classes nothing.

    A class whose share is less than 1 of that total, as for a count of 0, gets a weight of 1: it is
    next to never drawn, and has a log-probability all the same. Add a number to all counts where
    such classes should be drawn. Building takes O(n_classes) time, 16 to 24 bytes a class are kept,
    and a draw takes one look at the table however many classes there are.

    Args:
        counts: one number a class, at least 0, not all 0.
        power: to which counts are raised; 0.75 is that of word2vec, 0 makes all classes alike.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> sampler = samplers.Unigram([60, 25, 10, 5])
        >>> sampler.sample(8, counter=(1, 0))
        tensor([2, 0, 1, 0, 0, 1, 1, 0])
        >>> sampler.log_prob(torch.arange(4)).exp()
        tensor([0.6000, 0.2500, 0.1000, 0.0500])
    """

    table: Tensor
    weight: Tensor

    def __init__(self, counts: Any, power: float = 1.0) -> None:
        array = as_counts(counts)
        self.power = check_real("power", power, least=0.0, most=math.inf)
        super().__init__(len(array))
        bits = column_bits(len(array))
        # The largest becomes 1: neither a power nor the sum can overflow.
        weight = integer_weights((array / array.max()) ** self.power, bits)
        self._keep(torch.from_numpy(weight), torch.from_numpy(alias_table(weight, bits)))

    def _keep(self, weight: Tensor, table: Tensor) -> None:
        self.register_buffer("weight", weight)
        self.register_buffer("table", table)

    @property
    def bits(self) -> int:
        """B: all weights sum to 2^B."""
        return column_bits(self.n_classes) + 32

    @property
    def log_total(self) -> float:
        """The logarithm of what all weights sum to."""
        return self.bits * math.log(2.0)

    def _draw(self, n: int, counter: Tensor, context: Tensor | None) -> Tensor:
        return self._draw_both(n, counter, context).ids

    def _draw_both(self, n: int, counter: Tensor, _context: Tensor | None) -> Sampled:
        return Sampled(*draw("auto", self.table, self.weight, counter, n))

    def _log_prob(self, ids: Tensor, _context: Tensor | None) -> Tensor:
        return self.weight[ids].double().log() - self.log_total

    def _log_complement(
        self, target: Tensor, _context: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        wide = dtype not in (torch.float32, torch.bfloat16, torch.float16)
        made: Tensor = log_complement("auto", self.weight, target, self.bits, wide)
        return made.to(dtype)

    def config(self) -> dict[str, Any]:
        return {"n_classes": self.n_classes, "power": self.power}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        n_classes = check_number("n_classes", config["n_classes"])
        sampler = cls(np.ones(n_classes))
        sampler.power = config["power"]
        return sampler
