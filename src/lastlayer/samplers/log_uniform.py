"""Frequency by rank, without counts: Zipf's law in closed form."""

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lastlayer.kernels.rng import log_uniform
from lastlayer.samplers._checks import as_counts
from lastlayer.samplers._drawn import Sampled
from lastlayer.samplers.base import Sampler


class LogUniform(Sampler):
    """Log-uniform ranks, about what words of a language follow: q(k) = log((k+2)/(k+1)) / log(n+1).

    Class 0 is the most frequent one. A draw is ⌊(n+1)^u⌋ − 1 with u uniform, which has exactly
    these probabilities. Nothing is stored, and 100 million classes cost no more than ten: each
    probability is kept to one part in a million there, as float32 keeps its logarithm.

    Args:
        n_classes: how many classes there are.
        order: class ids, the most frequent one first, where classes are not sorted by frequency.
        counts: how frequent each class is. They are only compared: where they say that classes do
            not come in this order, a warning tells so.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> sampler = samplers.LogUniform(1000)
        >>> sampler.sample(6, counter=(1, 0))
        tensor([467,  56, 102,  25,   4, 136])
        >>> sampler.log_prob(torch.tensor([0, 999])).exp()
        tensor([0.1003, 0.0001])
    """

    order: Tensor | None
    rank: Tensor | None

    def __init__(self, n_classes: int, *, order: Any = None, counts: Any = None) -> None:
        super().__init__(n_classes)
        ranked = None if order is None else _as_order(order, self.n_classes)
        self.register_buffer("order", ranked)
        self.register_buffer("rank", None if ranked is None else ranked.argsort())
        if counts is not None:
            _compare(as_counts(counts), ranked, self.n_classes)

    def _draw(self, n: int, counter: Tensor, context: Tensor | None) -> Tensor:
        return self._draw_both(n, counter, context).ids

    def _draw_both(self, n: int, counter: Tensor, _context: Tensor | None) -> Sampled:
        return Sampled(*log_uniform("auto", counter, self.order, n, self.n_classes))

    def _log_prob(self, ids: Tensor, _context: Tensor | None) -> Tensor:
        rank = (ids if self.rank is None else self.rank[ids]).double()
        return (torch.log1p(1.0 / (rank + 1.0)) / math.log1p(self.n_classes)).log()

    def config(self) -> dict[str, Any]:
        return {"n_classes": self.n_classes, "ordered": self.order is not None}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LogUniform":
        n_classes = config["n_classes"]
        return cls(n_classes, order=torch.arange(n_classes) if config["ordered"] else None)


def _as_order(order: Any, n_classes: int) -> Tensor:
    ids = torch.as_tensor(order)
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise TypeError(f"order: expected class ids, got {ids.dtype}")
    if ids.shape != (n_classes,):
        raise ValueError(f"order: expected shape ({n_classes},), got {tuple(ids.shape)}")
    ids = ids.long()
    outside = (ids < 0) | (ids >= n_classes)
    if bool(outside.any()):
        place = int(outside.int().argmax())
        raise ValueError(
            f"order: expected class ids from 0 to {n_classes - 1}, got {int(ids[place])} at "
            f"position {place}"
        )
    times = torch.bincount(ids, minlength=n_classes)
    if bool((times != 1).any()):
        missed = int((times == 0).int().argmax())
        raise ValueError(f"order: expected each class once, got none of class {missed}")
    return ids


def _compare(counts: "np.ndarray[Any, Any]", order: Tensor | None, n_classes: int) -> None:
    if len(counts) != n_classes:
        raise ValueError(f"counts: expected shape ({n_classes},), got {counts.shape}")
    ranked = counts if order is None else counts[order.cpu().numpy()]
    rising = ranked[1:] > ranked[:-1]
    if rising.any():
        place = int(rising.argmax())
        warnings.warn(
            f"counts: classes are not sorted by frequency, as LogUniform assumes: rank {place} has "
            f"a count of {ranked[place]:g} and rank {place + 1} one of {ranked[place + 1]:g}; give "
            "order=counts.argsort(descending=True), or use Unigram(counts)",
            UserWarning,
            stacklevel=3,
        )
