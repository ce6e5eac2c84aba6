"""Samplers in closed form, which need no tables: uniform, and Zipf's law by rank."""

import math
import warnings
from typing import Any, Self

import torch
from torch import Tensor

from lastlayer._checks import as_counts, as_permutation
from lastlayer._processes import local_part
from lastlayer._torch import as_numpy
from lastlayer.kernels import rng
from lastlayer.samplers.base import Sampled, Sampler


class Uniform(Sampler):
    """All classes equally likely: q(c) = 1 / n.

    A draw is ⌊n · r / 2^64⌋ from 64 random bits r, so probabilities differ by less than one part in
    2^32. Nothing is stored.

    Args:
        n_classes: number of classes, at most 2^31.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> sampler = samplers.Uniform(8)
        >>> sampler.sample(5, rng_counter=(1, 0))
        tensor([7, 4, 5, 3, 1])
        >>> sampler.log_prob(torch.tensor([0, 7])).exp()
        tensor([0.1250, 0.1250])
    """

    def _draw(self, n: int, rng_counter: Tensor, _context: Tensor | None) -> Tensor:
        ids: Tensor = rng.integers("auto", rng_counter, n, self.n_classes)
        return ids

    def _draw_both(self, n: int, rng_counter: Tensor, context: Tensor | None) -> Sampled:
        ids = self._draw(n, rng_counter, context)
        log_prob = torch.full_like(ids, -math.log(self.n_classes), dtype=torch.float32)
        return Sampled(ids, log_prob)

    def _tables(self) -> tuple[int, Tensor | None, Tensor | None, int] | None:
        if type(self) is not Uniform:
            return None
        return rng.UNIFORM, None, None, self.n_classes

    def _log_prob(self, ids: Tensor, _context: Tensor | None) -> Tensor:
        return torch.full_like(ids, -math.log(self.n_classes), dtype=torch.float64)


class LogUniform(Sampler):
    """Zipf's law by rank, without counts: q(k) = log((k+2)/(k+1)) / log(n+1).

    Class 0 is the most frequent one. A draw is ⌊(n+1)^u⌋ − 1 with u uniform, which has exactly
    these probabilities. Without ``order`` nothing is stored, and the cost of a draw does not depend
    on the number of classes. Log-probabilities are rounded to float32, which at 100 million classes
    is a relative error of one in a million.

    Args:
        n_classes: number of classes, at most 2^31.
        order: class ids, the most frequent one first, if classes are not sorted by frequency.
        counts: frequency of each class, only used for a warning if classes are not sorted.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> sampler = samplers.LogUniform(1000)
        >>> sampler.sample(6, rng_counter=(1, 0))
        tensor([467,  56, 102,  25,   4, 136])
        >>> sampler.log_prob(torch.tensor([0, 999])).exp()
        tensor([0.1003, 0.0001])
    """

    spreadable = "order", "rank"
    order: Tensor | None
    rank: Tensor | None

    def __init__(self, n_classes: int, *, order: Any = None, counts: Any = None) -> None:
        super().__init__(n_classes)
        ranked = None
        if order is not None:
            ranked = torch.from_numpy(as_permutation("order", order, self.n_classes))
        self.register_buffer("order", ranked)
        self.register_buffer("rank", None if ranked is None else ranked.argsort())
        if counts is not None:
            _check_sorted(as_counts(counts, self.n_classes, kinds="iuf"), ranked)

    def _check_state(self) -> None:
        if self._spread is not None:
            self._check_part()
        elif self.order is not None and self.rank is not None:
            order = as_permutation("order", self.order, self.n_classes)
            if (as_numpy(self.rank.cpu()) != order.argsort()).any():
                raise ValueError(
                    "rank: expected the position of each class in order, got other ranks; load "
                    "both from the state of one sampler"
                )

    def _check_part(self) -> None:
        """Check the rows of this process only, without communication."""
        for name in self.spreadable:
            part = local_part(self.get_buffer(name))
            if bool(((part < 0) | (part >= self.n_classes)).any()):
                raise ValueError(
                    f"{name}: expected integers from 0 to {self.n_classes - 1}, got others"
                )

    def _draw(self, n: int, rng_counter: Tensor, context: Tensor | None) -> Tensor:
        return self._draw_both(n, rng_counter, context).ids

    def _draw_both(self, n: int, rng_counter: Tensor, _context: Tensor | None) -> Sampled:
        if self._spread is None:
            return Sampled(*rng.log_uniform("auto", rng_counter, self.order, n, self.n_classes))
        rank, log_prob = rng.log_uniform("auto", rng_counter, None, n, self.n_classes)
        return Sampled(self._entries("order", rank, drawn=True), log_prob)

    def _draw_wide(self, n: int, rng_counter: Tensor, context: Tensor | None) -> Sampled:
        if self._spread is None:
            return super()._draw_wide(n, rng_counter, context)
        rank, _ = rng.log_uniform("auto", rng_counter, None, n, self.n_classes)
        return Sampled(self._entries("order", rank, drawn=True), self._log_prob_at(rank))

    def _tables(self) -> tuple[int, Tensor | None, Tensor | None, int] | None:
        if type(self) is not LogUniform:
            return None
        # Attributes of a module are slow to look up.
        own = self._buffers
        return rng.LOG_UNIFORM, own["order"], own["rank"], self.n_classes

    def _log_targets(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        return self._log_share(target, dtype, False)

    def _log_complement(
        self, target: Tensor, _context: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        return self._log_share(target, dtype, True)

    def _log_share(self, target: Tensor, dtype: torch.dtype, complement: bool) -> Tensor:
        wide, rank = dtype == torch.float64, self.rank
        if self._spread is not None:
            found = self._entries("rank", target.clamp(min=0))
            target, rank = torch.where(target < 0, target, found), None
        made: Tensor = rng.log_uniform_share("auto", target, rank, self.n_classes, complement, wide)
        return made.to(dtype)

    def _log_prob(self, ids: Tensor, _context: Tensor | None) -> Tensor:
        return self._log_prob_at(ids if self.rank is None else self._entries("rank", ids))

    def _log_prob_at(self, rank: Tensor) -> Tensor:
        return (torch.log1p(1.0 / (rank.double() + 1.0)) / math.log1p(self.n_classes)).log()

    def config(self) -> dict[str, Any]:
        return {"n_classes": self.n_classes, "order": self.order}

    def _saved_config(self) -> dict[str, Any]:
        return {"n_classes": self.n_classes, "order": None if self.order is None else True}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        ordered = torch.arange(config["n_classes"]) if config["order"] else None
        return cls(**{**config, "order": ordered})

    @classmethod
    def _on_meta(cls, config: dict[str, Any]) -> Self:
        made = cls(config["n_classes"])
        if config["order"]:
            for name in cls.spreadable:
                empty = torch.empty(made.n_classes, dtype=torch.int64, device="meta")
                made.register_buffer(name, empty)
        return made


def _check_sorted(counts: Any, order: Tensor | None) -> None:
    ranked = counts if order is None else counts[as_numpy(order.cpu())]
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
