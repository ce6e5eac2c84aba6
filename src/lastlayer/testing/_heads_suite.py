"""What the rules of a head stand on: copies of it, inputs that fit, and its gradients."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.testing._suite import Suite


@dataclass
class HeadSuite(Suite):
    """A head, which is only ever copied, and what is asked of it."""

    # Any: what is checked is whether it is a head at all.
    given: Any

    @property
    def n_classes(self) -> int:
        return int(self.given.n_classes)

    @property
    def ignore_index(self) -> int | None:
        ignored: int | None = self.given.ignore_index
        return ignored

    def head(self, dtype: torch.dtype | None = None, reduction: str = "mean") -> Any:
        """A copy in training mode, in the finest dtype unless said otherwise."""
        head = copy.deepcopy(self.given).to(self.device, dtype or self.finest).train()
        head.reduction = reduction
        return head

    def hidden(self, *batch: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        return scale * self.normal(*batch, self.given.in_features, dtype=dtype or self.finest)

    def targets(self, *batch: int) -> Tensor:
        """Class ids, none of them the ignored one."""
        ids = self.integers(self.n_classes, *batch)
        if self.ignore_index is None or self.n_classes == 1:
            return ids
        return torch.where(ids == self.ignore_index, (ids + 1) % self.n_classes, ids)

    def all_targets(self) -> Tensor:
        """All class ids but the ignored one."""
        ids = torch.arange(self.n_classes, device=self.device)
        return ids if self.ignore_index is None else ids[ids != self.ignore_index]

    def loss(self, head: Any, hidden: Tensor, target: Tensor) -> Tensor:
        """The loss, with the same chance each time for a head that draws, also from a counter."""
        before = [each.clone() for each in head.buffers()]
        with self.same_chance():
            loss: Tensor = head(hidden, target)
        with torch.no_grad():
            for buffer, value in zip(head.buffers(), before, strict=True):
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        return loss

    @contextmanager
    def same_chance(self) -> Iterator[None]:
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.seed)
            yield

    def gradients(self, head: Any, value: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        """Of hidden and of each parameter; zeros where there is none."""
        leaves = self.leaves(head, hidden)
        made: tuple[Tensor | None, ...] = torch.autograd.grad(
            value, list(leaves.values()), allow_unused=True
        )
        return {
            name: torch.zeros_like(leaf) if grad is None else grad.to_dense()
            for (name, leaf), grad in zip(leaves.items(), made, strict=True)
        }

    @staticmethod
    def leaves(head: Any, hidden: Tensor) -> dict[str, Tensor]:
        learned = {name: each for name, each in head.named_parameters() if each.requires_grad}
        return {"hidden": hidden, **learned}

    def failure(
        self, rule: str, detail: str, scores: Tensor | None = None, place: tuple[int, ...] = ()
    ) -> AssertionError:
        error = super().failure(rule, detail, scores, place)
        return AssertionError(str(error).replace("\n  scores: ", "\n  hidden: "))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of losses and log-probabilities."""
    return accumulation_dtype(dtype)
