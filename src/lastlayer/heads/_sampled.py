"""The frame of all sampled heads: trained on drawn classes, exact in everything else."""

import inspect
from abc import abstractmethod
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from lastlayer.heads._audited import Explained
from lastlayer.heads._checks import check_count
from lastlayer.heads._compared import Batch, ComparedHead, ComparedOptions
from lastlayer.heads._recomputed import Steps
from lastlayer.heads._sampled_checks import check_sampler, check_seed
from lastlayer.heads._sampled_config import sampler_from_config, sampler_to_config
from lastlayer.samplers import Sampler, Uniform, fork

__all__ = ["Batch", "SampledHead", "SampledOptions"]


class SampledOptions(ComparedOptions, total=False):
    """What all of their constructors take by name; :class:`SampledHead` has the defaults."""

    seed: int
    per_rank: bool


class SampledHead(ComparedHead, Explained):
    """One vector a class, trained against a few classes that are drawn anew in every step.

    In training mode the loss is that of :meth:`_loss_of_step`. In eval mode it is the exact cross
    entropy, and ``log_prob``, ``topk`` and ``sample`` are exact in both: nothing is left to chance
    there. What is drawn depends on the buffer ``draws``, seed and step, alone; it is saved with the
    state, so that a resumed run draws what the first one would have drawn.

    Args:
        in_features: how many numbers a hidden state has.
        n_classes: how many classes there are.
        sampler: what classes are drawn from; it becomes a part of the head, and moves with it.
            None for ``Uniform(n_classes)``; where classes are uneven pass
            ``samplers.Unigram(counts)``.
        n_samples: how many classes are drawn in a step.
        bias: whether each class has a bias.
        sparse: whether gradients of weight and bias are row-sparse: coalesced on a CPU, with a slot
            for each draw and each target on a GPU.
        seed: of the draws.
        per_rank: whether the processes of ``torch.distributed`` draw different classes.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".
        device: where the parameters are made.
        dtype: of the parameters.
    """

    # Whether a row has its own draws, or all rows the same.
    draws_for_each_row = False
    sampler: Sampler
    draws: Tensor

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        sampler: Sampler | None = None,
        n_samples: int = 1024,
        *,
        seed: int = 0,
        per_rank: bool = False,
        **options: Unpack[ComparedOptions],
    ) -> None:
        check_count("n_samples", n_samples)
        check_seed(seed)
        super().__init__(in_features, n_classes, **options)
        self.sampler = Uniform(n_classes) if sampler is None else sampler
        self._check_sampler()
        self.n_samples, self.per_rank = n_samples, per_rank
        self.register_buffer("draws", torch.tensor([seed, 0]))
        self._steps = Steps()
        self._move_chance()

    def _sampled_loss(self, batch: Batch) -> Tensor:
        loss = self._loss_of_step(batch, self._counter())
        self._count_step()
        return loss

    @abstractmethod
    def _loss_of_step(self, batch: Batch, counter: Tensor) -> Tensor:
        """The reduced training loss, of classes drawn by ``counter``."""

    def _counter(self) -> Tensor:
        """Seed and step of this step's draws, to be read until the step is counted."""
        draws, distributed = self._steps.counter(self.draws), torch.distributed
        if self.per_rank and distributed.is_available() and distributed.is_initialized():
            return fork(draws, distributed.get_rank())
        return draws

    def _count_step(self) -> None:
        """Once all is drawn; on the device, so that nothing waits for it."""
        if not self._steps.is_recomputed():
            self.draws[1:].add_(1)

    def _drawn(self, counter: Tensor) -> tuple[Tensor, Tensor]:
        """Classes of a step and their log-probabilities, -inf for one that is always counted."""
        ids, log_prob = self.sampler.sample_with_log_prob(self.n_samples, counter=counter)
        return ids, log_prob

    def _classes_a_step(self) -> int:
        return self.n_samples

    def _always_counted(self) -> int:
        """Classes that every step looks at beside those it draws."""
        return 0

    def _check_sampler(self) -> None:
        check_sampler(self.sampler, self.n_classes)

    def _move_chance(self) -> None:
        """Puts the counter and all that draws where the parameters are."""
        device = self.weight.device
        if device.type != "meta":
            for part in self.children():
                part.to(device)
            self.draws = self.draws.to(device)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear | torch.nn.Embedding, **options: Any) -> Self:
        head = super().from_linear(linear, **options)
        head._move_chance()
        return head

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "sampler": sampler_to_config(self.sampler),
            "n_samples": self.n_samples,
            "per_rank": self.per_rank,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        sampler = sampler_from_config(config["sampler"])
        return super().from_config({**config, "sampler": sampler})

    def extra_repr(self) -> str:
        taken = inspect.signature(type(self)).parameters
        return ", ".join(
            f"{name}={value!r}"
            for name, value in self.config().items()
            # The sampler is shown below, as a part.
            if name != "sampler" and (name not in taken or taken[name].default != value)
        )
