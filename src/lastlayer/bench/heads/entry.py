"""A head whose training step is measured, and where."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lastlayer.bench.cases import OURS, Method
from lastlayer.bench.heads.problem import SEED, Problem
from lastlayer.bench.heads.step import Step
from lastlayer.bench.heads.truth import Losses

# Where an entry takes part: the step on a CPU, that on a GPU, the one with few classes that have
# spellings, and the cost against the number of classes.
CPU, CUDA, WORDS, SWEEP = "cpu", "cuda", "words", "sweep"


@dataclass(frozen=True)
class Entry:
    """A head, and where it is measured.

    Attributes:
        name: what the table calls it.
        build: makes it for a problem; classes are by falling frequency.
        losses: its loss in float64.
        on: which of the parts above it is in.
        source: the distribution it comes from.
        computes: the function it computes, where other entries compute it too.
        settings: what was chosen for the problem, in words.
        op: our operation below it, to say which kernel ran.
        score_bytes: bytes it holds for each row and class; 0 where it stores no scores.
        slack: how many times more than usual its gradients may be off.
        optimizer: of the parameters, whose step then ends each call.
    """

    name: str
    build: Callable[[Problem], torch.nn.Module]
    losses: Losses
    on: frozenset[str]
    source: str = OURS
    computes: str = ""
    settings: Callable[[Any], str] = lambda _: ""
    op: str | None = None
    score_bytes: int = 0
    slack: float = 1.0
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None

    def method(self, problem: Problem) -> Method:
        """What the harness calls."""

        def scratch(shape: tuple[int, ...], _: int) -> int:
            return shape[0] * shape[-1] * self.score_bytes

        return Method(
            self.name,
            self.source,
            self.computes or self.name,
            partial(self._step, problem),
            op=self.op,
            scratch=scratch if self.score_bytes else None,
        )

    def _step(self, problem: Problem) -> Step:
        module = seeded(lambda: self.build(problem), problem.device)
        update = None if self.optimizer is None else self.optimizer(module.parameters()).step
        settings = self.settings(module)
        return Step(module, self.losses, problem.classes, self.slack, settings, update)


def seeded(
    build: Callable[[], torch.nn.Module], device: torch.device, seed: int = SEED
) -> torch.nn.Module:
    """A module with the same numbers in every run."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return build()
