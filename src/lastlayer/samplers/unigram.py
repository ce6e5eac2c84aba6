"""A sampler with arbitrary class frequencies, from an integer alias table."""

import math
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._checks import as_counts, check_int, check_not_negative
from lastlayer._processes import local_part
from lastlayer._torch import as_numpy
from lastlayer.kernels import rng
from lastlayer.samplers.base import MOST_CLASSES, Sampled, Sampler


class Unigram(Sampler):
    """Draws classes in proportion to powers of their counts: q(c) ∝ counts(c)^power.

    Probabilities are q(c) = w(c) / 2^B with integers w, which fill an alias table without
    remainder, so that draws have exactly the probabilities of
    :meth:`~lastlayer.samplers.Sampler.log_prob`. The total 2^B is 2^32 times a power of two that is
    at least ``n_classes`` and 4096, and each w(c) is within 1 of its exact share of 2^B. So there
    is no loss of precision at 100 million classes, where a cumulative sum in float32 would give
    many classes probability 0.

    A class with a count of 0, or a share of less than 1, gets w = 1: it is almost never drawn, but
    has a finite log-probability. Add a constant to all counts if such classes should be drawn.
    Building takes O(n_classes) time; tables take 16 to 24 bytes per class, and the counts another
    8 bytes in host memory. A draw is one table lookup, for any number of classes.

    Args:
        counts: one number per class, at least 0, not all 0.
        power: exponent of the counts; 0.75 as in word2vec, 0 makes all classes equally likely.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> sampler = samplers.Unigram([60, 25, 10, 5])
        >>> sampler.sample(8, rng_counter=(1, 0))
        tensor([2, 0, 1, 0, 0, 1, 1, 0])
        >>> sampler.log_prob(torch.arange(4)).exp()
        tensor([0.6000, 0.2500, 0.1000, 0.0500])
    """

    spreadable = "weight", "table"
    table: Tensor
    weight: Tensor
    _counts: NDArray[np.float64] | None
    """Counts as given; None once other weights have been loaded."""

    def __init__(self, counts: Any, power: float = 1.0) -> None:
        # Imported here, since the module compiles code for the CPU.
        from lastlayer.kernels.rng.table import alias_table, column_bits, integer_weights

        counts = as_counts(
            counts, kinds="iuf", alike="where all classes are equally likely use Uniform"
        )
        super().__init__(check_int("n_classes", len(counts), most=MOST_CLASSES))
        self._counts, self.power = counts, check_not_negative("power", power)
        bits = column_bits(len(counts))
        self._set_bits(bits)
        # Divided by the largest count, so that neither the power nor the sum can overflow.
        weight = integer_weights((counts / counts.max()) ** self.power, bits)
        self.register_buffer("weight", torch.from_numpy(weight))
        self.register_buffer("table", torch.from_numpy(alias_table(weight, bits)))

    def _set_bits(self, bits: int) -> None:
        # B: all weights sum to 2^B.
        self.bits, self.log_total = bits + 32, (bits + 32) * math.log(2.0)

    def _check_state(self) -> None:
        from lastlayer.kernels.rng.table import alias_table

        if self._spread is not None:
            self._check_part(local_part(self.weight), local_part(self.table))
            return
        weight = as_numpy(self.weight.cpu())
        total = int(weight.view(np.uint64).sum(dtype=np.uint64))
        right = bool((weight > 0).all()) and total == 1 << self.bits
        if not right or (as_numpy(self.table.cpu()) != alias_table(weight, self.bits - 32)).any():
            raise ValueError(
                f"weight: expected {self.n_classes} integers above 0 that sum to 2^{self.bits}, "
                "and in table their alias table, got others; load both from the state of one "
                "sampler"
            )

    def _check_part(self, weight: Tensor, table: Tensor) -> None:
        """Check the rows of this process only, without communication."""
        if bool((weight <= 0).any()) or bool(((table >> 32) >= self.n_classes).any()):
            raise ValueError(
                "weight: expected integers above 0, and in table their alias table, got others; "
                "load both from the state of one sampler"
            )

    def _draw(self, n: int, rng_counter: Tensor, context: Tensor | None) -> Tensor:
        if self._spread is None:
            return self._draw_both(n, rng_counter, context).ids
        words = rng.words("auto", rng_counter, n)
        column = words[:, 0] >> (64 - self.bits)
        entry = self._entries("table", column, drawn=True)
        return torch.where(words[:, 1] < (entry & 0xFFFFFFFF), column, entry >> 32)

    def _draw_wide(self, n: int, rng_counter: Tensor, context: Tensor | None) -> Sampled:
        ids = self._draw(n, rng_counter, context)
        return Sampled(ids, self._log_share(self._entries("weight", ids, drawn=True)))

    def _draw_both(self, n: int, rng_counter: Tensor, context: Tensor | None) -> Sampled:
        if self._spread is not None:
            ids, log_prob = self._draw_wide(n, rng_counter, context)
            return Sampled(ids, log_prob.float())
        return Sampled(*rng.draw("auto", self.table, self.weight, rng_counter, n))

    def _tables(self) -> tuple[int, Tensor | None, Tensor | None, int] | None:
        if type(self) is not Unigram:
            return None
        return rng.ALIAS, self.table, self.weight, self.n_classes

    def _log_prob(self, ids: Tensor, _context: Tensor | None) -> Tensor:
        return self._log_share(self._entries("weight", ids))

    def _log_share(self, weight: Tensor) -> Tensor:
        return weight.double().log() - self.log_total

    def _log_complement(
        self, target: Tensor, _context: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        wide = dtype not in (torch.float32, torch.bfloat16, torch.float16)
        weight, place = self.weight, target
        if self._spread is not None:
            weight = self._entries("weight", target.clamp(min=0).flatten())
            place = torch.arange(len(weight), device=target.device).view(target.shape)
            place = torch.where(target < 0, target, place)
        made: Tensor = rng.log_complement("auto", weight, place, self.bits, wide)
        return made.to(dtype)

    def config(self) -> dict[str, Any]:
        if self._spread is not None:
            raise ValueError(
                "config: expected a sampler with complete tables, got one whose tables are sharded "
                "over processes; use the sampler of ClassParallel.gather()"
            )
        if self._counts is None:
            return {"counts": as_numpy(self.weight.double().cpu()), "power": 1.0}
        return {"counts": self._counts, "power": self.power}

    def _saved_config(self) -> dict[str, Any]:
        return {"n_classes": self.n_classes, "power": self.power}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        sampler = cls(np.ones(check_int("n_classes", config["n_classes"], most=MOST_CLASSES)))
        sampler.power = config["power"]
        return sampler

    @classmethod
    def _on_meta(cls, config: dict[str, Any]) -> Self:
        from lastlayer.kernels.rng.table import column_bits

        # Build a sampler with one class, then replace its tables by full ones on the meta device.
        made = cls.from_config({**config, "n_classes": 1})
        made.n_classes = check_int("n_classes", config["n_classes"], most=MOST_CLASSES)
        bits, made._counts = column_bits(made.n_classes), None
        made._set_bits(bits)
        for name, size in (("weight", made.n_classes), ("table", 1 << bits)):
            made.register_buffer(name, torch.empty(size, dtype=torch.int64, device="meta"))
        return made

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        given = state_dict.get(f"{prefix}weight")
        if given is not None and self._counts is not None:
            same = not (given.is_meta or self.weight.is_meta) and torch.equal(
                given.to(self.weight.device), self.weight
            )
            self._counts = self._counts if same else None
        super()._load_from_state_dict(state_dict, prefix, *rest)
