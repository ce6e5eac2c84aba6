"""Families of losses: how they are verified with their gradients, called and judged."""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer.bench import memory
from lastlayer.bench.cases import Call, CaseT, Family, Measured, Method, RecordT
from lastlayer.bench.timing import CpuTimer, CudaTurnsTimer, Thunk, Timer
from lastlayer.bench.verify import Verdict, poison, relative_error


class Step(NamedTuple):
    """What one call gives; no gradients of a forward pass alone."""

    loss: Tensor
    gradients: tuple[Tensor, ...]


class Truth(NamedTuple):
    """The loss, and its gradients in float64."""

    loss: float
    gradients: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class LossVerdict(Verdict):
    """What a verification found.

    Attributes:
        errors: of the loss and of each gradient, by name; see
            :class:`lastlayer.bench.baseline_record.BaselineRecord`.
        peak_bytes: the most memory held at once beyond inputs and gradients.
    """

    errors: dict[str, float]
    peak_bytes: int | None


class Losses(Family[CaseT, LossVerdict, RecordT]):
    """A family of losses: inputs in floating point get gradients, others are labels."""

    def __init__(self) -> None:
        self._truths: dict[str, Truth] = {}

    @abstractmethod
    def truth(self, computes: str, inputs: tuple[Tensor, ...]) -> Truth:
        """What every method that computes this function should give for these inputs."""

    @abstractmethod
    def tolerances(self, computes: str, dtype: torch.dtype) -> dict[str, float]:
        """The largest accepted error of the ``"loss"``, then of each gradient by its name."""

    @abstractmethod
    def operations(self, case: CaseT) -> int | None:
        """Those of the products that the loss needs; None where there are none."""

    def finished(self) -> None:
        """Forget what is known of the case."""
        self._truths.clear()

    def verify(
        self, case: CaseT, method: Method, call: Call, inputs: tuple[Tensor, ...]
    ) -> LossVerdict:
        """Compare loss and gradients with the float64 truth, and measure the memory."""
        leaves = _leaves(inputs)
        # The first call compiles and tunes, and may take memory for it.
        call(*leaves)
        poison([leaf for leaf in leaves if leaf.requires_grad and leaf.dim() > 1][-1])
        step, peak = memory.with_peak(lambda: call(*leaves), inputs[0].device)
        computes = method.computes
        if computes not in self._truths:
            self._truths[computes] = self.truth(computes, inputs)
        beyond = None if peak is None else max(0, peak - sum(g.nbytes for g in step.gradients))
        tolerances = self.tolerances(computes, case.torch_dtype)
        return judge(step, self._truths[computes], tolerances, beyond)

    def thunk(self, call: Call, sets: list[tuple[Tensor, ...]]) -> Thunk:
        """The loss, and its gradients where they are part of the work."""
        rotation = itertools.cycle([_leaves(inputs) for inputs in sets])
        return lambda: call(*next(rotation))

    def timer(self, device: torch.device, *, quick: bool) -> Timer:
        """Competitors take turns on a GPU too: its clocks fall as it gets hot."""
        if device.type == "cuda":
            return turns_on_cuda(quick=quick)
        return CpuTimer(budget_s=0.1 if quick else 4.0)

    def details(
        self,
        case: CaseT,
        method: Method,  # noqa: ARG002 — what all methods of a case have is enough
        measured: Measured[LossVerdict],
    ) -> dict[str, Any]:
        """Rate, memory and errors."""
        operations, verdict = self.operations(case), measured.verdict
        rate = None if operations is None else measured.tera_per_s(operations)
        errors = verdict.errors if verdict else {}
        return {
            "tflop_per_s": rate,
            "gemm_tflop_per_s": measured.limit,
            "fraction_of_gemm": rate / measured.limit if rate else None,
            "baseline": case.baseline and case.baseline.label,
            "ratio_to_baseline": measured.ratio_to_baseline,
            "peak_bytes": verdict.peak_bytes if verdict else None,
            **{f"{name}_error": error for name, error in errors.items()},
        }


def turns_on_cuda(*, quick: bool) -> CudaTurnsTimer:
    """The timer of calls of many milliseconds on a GPU."""
    return CudaTurnsTimer(
        budget_s=0.1 if quick else 0.4, fewest_samples=5, most_samples=30, patience_s=2.0
    )


def judge(
    step: Step, truth: Truth, tolerances: Mapping[str, float], peak_bytes: int | None
) -> LossVerdict:
    """Whether loss and gradients are right; see :meth:`Losses.tolerances`."""
    loss, *names = tolerances
    errors = {loss: abs(float(step.loss) - truth.loss) / abs(truth.loss)}
    if step.gradients:
        for name, got, right in zip(names, step.gradients, truth.gradients, strict=True):
            errors[name] = relative_error(got, right)
    # Written so that NaN never passes.
    wrong = (
        f"{name if name == loss else f'gradient of {name}'} off by {error:.1e}"
        for name, error in errors.items()
        if not error <= tolerances[name]
    )
    return LossVerdict(reason=next(wrong, None), errors=errors, peak_bytes=peak_bytes)


def scores_held(fixed: int, copies: int) -> Callable[[tuple[int, ...], int], int]:
    """Bytes of so many bytes a score and so many copies of the scores, rows by classes."""

    def needed(shape: tuple[int, ...], itemsize: int) -> int:
        return shape[0] * shape[-1] * (fixed + copies * itemsize)

    return needed


def _leaves(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(
        each.detach().requires_grad_() if each.is_floating_point() else each for each in inputs
    )
