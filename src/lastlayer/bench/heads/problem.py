"""The problem that heads are compared on: hidden states, and classes by Zipf's law."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer import trees
from lastlayer.trees import Tree

# Every run draws the same numbers.
SEED = 1949
# What arity a deep tree is collapsed to.
WIDE = 64


@dataclass(frozen=True)
class Problem:
    """Rows of hidden states of some width, and one of many classes for each."""

    rows: int
    width: int
    classes: int
    dtype: torch.dtype
    device: torch.device

    @property
    def made(self) -> dict[str, Any]:
        """What a module's constructor is told of where it is made."""
        return {"device": self.device, "dtype": self.dtype}

    @property
    def counts(self) -> NDArray[np.float64]:
        """How often each class occurs, up to a factor; the most frequent one first."""
        return zipf(self.classes)

    def draw(self, seed: int) -> tuple[Tensor, Tensor]:
        """Hidden states ~ N(0, 1), and targets by the counts."""
        generator = torch.Generator(self.device).manual_seed(seed)
        options: dict[str, Any] = {"generator": generator, "device": self.device}
        hidden = torch.randn(self.rows, self.width, **options)
        chance = torch.rand(self.rows, dtype=torch.float64, **options)
        target = torch.searchsorted(_cumulative(self.classes, self.device), chance)
        return hidden.to(self.dtype), target.clamp(max=self.classes - 1)


@lru_cache(maxsize=2)
def zipf(classes: int) -> NDArray[np.float64]:
    """Counts by Zipf's law with the exponent 1: one over the rank."""
    return 1.0 / np.arange(1, classes + 1)


@lru_cache(maxsize=2)
def _cumulative(classes: int, device: torch.device) -> Tensor:
    sums = np.cumsum(zipf(classes))
    return torch.from_numpy(sums / sums[-1]).to(device)


@lru_cache(maxsize=2)
def huffman(classes: int) -> Tree:
    """Huffman's tree of these counts."""
    return trees.huffman(zipf(classes))
