"""How heads are drawn, verified, called and judged."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from lastlayer.bench.cases import Call, Family, Measured, Method
from lastlayer.bench.heads.cases import TOP, HeadCase
from lastlayer.bench.heads.problem import zipf
from lastlayer.bench.heads.record import HeadRecord
from lastlayer.bench.heads.replay import replayed_ms
from lastlayer.bench.heads.timer import CudaWallTimer
from lastlayer.bench.heads.verdict import HeadVerdict
from lastlayer.bench.timing import CpuTimer, Thunk, Timer

# Sets of inputs that calls on a GPU rotate among, so that its cache does not hold their vectors.
_SETS = 8
# How many of them one graph has.
_REPLAYED_SETS = 4


class Work(Protocol):
    """What a method of this family loads: a call that can verify itself."""

    def __call__(self, *inputs: Tensor) -> Any:
        """What is timed."""

    def captured(self, *inputs: Tensor) -> Any:
        """The same, for a CUDA graph."""

    def verify(self, inputs: tuple[Tensor, ...]) -> HeadVerdict:
        """Compare it with the truth."""


class Heads(Family[HeadCase, HeadVerdict, HeadRecord]):
    """The family of heads: inputs are hidden states and targets, or counts for a tree."""

    name = "heads"
    record = HeadRecord

    def __init__(self) -> None:
        self._more: list[tuple[Tensor, ...]] = []

    def draw(self, case: HeadCase, device: torch.device, seed: int) -> tuple[Tensor, ...]:
        """Hidden states, with targets by Zipf's law; without heads counts in random order."""
        if case.problem is None:
            (classes,) = case.shape
            counts = np.random.default_rng(seed).permutation(zipf(classes))
            return (torch.from_numpy(counts).to(device),)
        hidden, target = case.problem.draw(seed)
        return (hidden,) if case.section == TOP else (hidden, target)

    def started(self, case: HeadCase, inputs: tuple[Tensor, ...]) -> None:
        """Draw what calls on a GPU rotate among."""
        device = inputs[0].device
        if device.type == "cuda":
            self._more = [self.draw(case, device, seed) for seed in range(1, _SETS)]

    def finished(self) -> None:
        """Let go of it."""
        self._more = []

    def verify(
        self,
        case: HeadCase,  # noqa: ARG002 — what was loaded knows its case
        method: Method,  # noqa: ARG002 — and its method
        call: Call,
        inputs: tuple[Tensor, ...],
    ) -> HeadVerdict:
        """Steps by loss and gradients, the best classes by a dense sort, draws and trees alone.

        On a GPU what is right is then captured as a CUDA graph and replayed.
        """
        work = cast("Work", call)
        verdict = work.verify(inputs)
        device = inputs[0].device
        if device.type != "cuda" or not verdict.ok:
            return verdict
        sets = [inputs, *self._more][:_REPLAYED_SETS]
        calls = [partial(work.captured, *_leaves(each)) for each in sets]
        return replace(verdict, replayed_ms=replayed_ms(calls, device))

    def thunk(self, call: Call, sets: list[tuple[Tensor, ...]]) -> Thunk:
        """One call on the next set of inputs."""
        rotation = itertools.cycle([_leaves(inputs) for inputs in (*sets, *self._more)])
        return lambda: call(*next(rotation))

    def timer(self, device: torch.device, *, quick: bool) -> Timer:
        """Wall clock, on a GPU too, where Python and the host's waiting are part of a step."""
        if device.type == "cuda":
            return CudaWallTimer(
                budget_s=0.1 if quick else 0.4,
                fewest_samples=5,
                most_samples=60,
                sample_ms=10.0,
                patience_s=2.0,
            )
        return CpuTimer(budget_s=0.05 if quick else 0.8, patience_s=2.0)

    def details(
        self,
        case: HeadCase,
        method: Method,  # noqa: ARG002 — the verdict has all of it
        measured: Measured[HeadVerdict],
    ) -> dict[str, Any]:
        """Ratio, memory, parameters and errors."""
        found = measured.verdict or HeadVerdict()
        return {
            "settings": found.settings,
            "parameters": found.parameters,
            "gemm_tflop_per_s": measured.limit,
            "baseline": case.baseline and case.baseline.label,
            "ratio_to_baseline": measured.ratio_to_baseline,
            "peak_bytes": found.peak_bytes,
            "loss_error": found.loss_error,
            "hidden_error": found.hidden_error,
            "weight_error": found.weight_error,
            "value_error": found.value_error,
            "classes_differ": found.classes_differ,
            "replayed_ms": found.replayed_ms,
        }


def _leaves(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Hidden states that want a gradient where there are targets to get it from."""
    if len(inputs) == 1:
        return inputs
    hidden, target = inputs
    return hidden.detach().requires_grad_(), target
