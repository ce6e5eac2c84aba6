"""How losses on a linear layer are drawn, verified, called and judged."""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer import maps
from lastlayer.bench import memory, timing
from lastlayer.bench.cases import Call, Family, Method
from lastlayer.bench.fused.cases import DTYPES, FusedCase
from lastlayer.bench.fused.methods import Step
from lastlayer.bench.fused.record import FusedRecord
from lastlayer.bench.fused.truth import CROSS_ENTROPY, Truth, truth_of
from lastlayer.bench.timing import CpuTimer, CudaTurnsTimer, Thunk, Timer
from lastlayer.bench.verify import GRADIENT_TOLERANCE, Verdict, poison, relative_error

# Largest accepted |loss − truth| / |truth|.
LOSS_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 1e-3,
}
# Where probabilities are 0 beyond an edge, rounding a score moves them more, and moves classes
# across the edge.
SPARSE_LOSS_TOLERANCE = {**LOSS_TOLERANCE, torch.bfloat16: 1e-2}
SPARSE_GRADIENT_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 5e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
_ALPHAS = {"sparsemax": 2.0, "entmax 1.5": 1.5}
# Rows whose supports are counted.
_COUNTED_ROWS = {"cuda": 256, "cpu": 32}
# The side of the two square matrices whose product is the limit.
_PRODUCT = {"cuda": 8192, "cpu": 2048}


@dataclass(frozen=True, kw_only=True)
class FusedVerdict(Verdict):
    """What a verification found; see :class:`lastlayer.bench.fused.record.FusedRecord`."""

    loss_error: float
    hidden_error: float
    weight_error: float
    peak_bytes: int | None


class Supports(NamedTuple):
    """How many classes have a probability other than 0, over some rows."""

    mean: float
    largest: int


class Fused(Family[FusedCase, FusedVerdict, FusedRecord]):
    """The family of losses on a linear layer: inputs are hidden states, class vectors, targets."""

    name = "fused"
    record = FusedRecord

    def __init__(self) -> None:
        self._truths: dict[str, Truth] = {}
        self._supports: dict[str, Supports] = {}

    def draw(self, case: FusedCase, device: torch.device, seed: int) -> tuple[Tensor, ...]:
        """Inputs that give scores of the case's kind."""
        generator = torch.Generator(device).manual_seed(seed)
        hidden, weight, target = case.scores.draw(case.shape, generator)
        return hidden.to(case.torch_dtype), weight.to(case.torch_dtype), target

    def started(self, case: FusedCase, inputs: tuple[Tensor, ...]) -> None:
        """Count the supports of the functions that have one."""
        sparse = {m.computes for m in case.methods} & _ALPHAS.keys()
        if not sparse:
            return
        hidden, weight, _ = inputs
        scores = hidden[: _COUNTED_ROWS[hidden.device.type]].float() @ weight.float().t()
        for computes in sparse:
            sizes = (maps.entmax(scores, _ALPHAS[computes]) > 0).sum(-1)
            self._supports[computes] = Supports(float(sizes.double().mean()), int(sizes.max()))

    def finished(self) -> None:
        """Forget what is known of the case."""
        self._truths.clear()
        self._supports.clear()

    def verify(
        self, case: FusedCase, method: Method, call: Call, inputs: tuple[Tensor, ...]
    ) -> FusedVerdict:
        """Compare loss and both gradients with the float64 truth, and measure the memory."""
        leaves = _leaves(inputs)
        device = inputs[0].device
        # The first call compiles and tunes, and may take memory for it.
        call(*leaves)
        poison(inputs[1])
        step, peak = memory.with_peak(lambda: call(*leaves), device)
        beyond = None if peak is None else max(0, peak - _bytes(step.hidden) - _bytes(step.weight))
        return self._compared(case, method, step, inputs, beyond)

    def _compared(
        self,
        case: FusedCase,
        method: Method,
        step: Step,
        inputs: tuple[Tensor, ...],
        peak_bytes: int | None,
    ) -> FusedVerdict:
        computes, dtype = method.computes, case.torch_dtype
        if computes not in self._truths:
            self._truths[computes] = truth_of(computes, *inputs)
        truth = self._truths[computes]
        loss_error = abs(float(step.loss) - truth.loss) / abs(truth.loss)
        hidden_error = relative_error(step.hidden, truth.hidden)
        weight_error = relative_error(step.weight, truth.weight)
        dense = computes == CROSS_ENTROPY
        most = (GRADIENT_TOLERANCE if dense else SPARSE_GRADIENT_TOLERANCE)[dtype]
        reason = None
        # Written so that NaN never passes.
        if not loss_error <= (LOSS_TOLERANCE if dense else SPARSE_LOSS_TOLERANCE)[dtype]:
            reason = f"loss off by {loss_error:.1e}"
        elif not weight_error <= most:
            reason = f"gradient of weight off by {weight_error:.1e}"
        elif not hidden_error <= most:
            reason = f"gradient of hidden off by {hidden_error:.1e}"
        return FusedVerdict(
            reason=reason,
            loss_error=loss_error,
            hidden_error=hidden_error,
            weight_error=weight_error,
            peak_bytes=peak_bytes,
        )

    def thunk(self, call: Call, sets: list[tuple[Tensor, ...]]) -> Thunk:
        """Loss and gradients."""
        rotation = itertools.cycle([_leaves(inputs) for inputs in sets])
        return lambda: call(*next(rotation))

    def baseline(self, case: FusedCase) -> Method:
        """torch.compile on CUDA, torch on a CPU, our cross entropy for the sparse losses."""
        return case.baseline

    def timer(self, device: torch.device, *, quick: bool) -> Timer:
        """Competitors take turns on a GPU too: its clocks fall as it gets hot."""
        if device.type == "cuda":
            return CudaTurnsTimer(
                budget_s=0.1 if quick else 0.4, fewest_samples=5, most_samples=30, patience_s=2.0
            )
        return CpuTimer(budget_s=0.1 if quick else 4.0)

    def limit(self, device: torch.device, timer: Timer, *, quick: bool) -> float:
        """The rate of a product of two large square matrices."""
        size = _PRODUCT[device.type] // (4 if quick else 1)
        dtype = getattr(torch, DTYPES[device.type])
        return timing.product_tflop_per_s(size, device, dtype, timer)

    def details(
        self,
        case: FusedCase,
        method: Method,
        *,
        verdict: FusedVerdict | None,
        milliseconds: float | None,
        baseline_ms: float | None,
        limit: float,
    ) -> dict[str, Any]:
        """Rate, memory and errors."""
        rows, width, classes = case.shape
        operations = 6 * rows * width * classes
        rate = timing.tera_per_s(operations, milliseconds) if milliseconds else None
        ratio = milliseconds / baseline_ms if milliseconds and baseline_ms else None
        supports = self._supports.get(method.computes)
        return {
            "scores": case.scores.name,
            "scores_made": case.scores.made,
            "support_mean": supports.mean if supports else None,
            "support_max": supports.largest if supports else None,
            "tflop_per_s": rate,
            "gemm_tflop_per_s": limit,
            "fraction_of_gemm": rate / limit if rate else None,
            "baseline": f"{case.baseline.source} {case.baseline.name}",
            "ratio_to_baseline": ratio,
            "peak_bytes": verdict.peak_bytes if verdict else None,
            "loss_error": verdict.loss_error if verdict else None,
            "hidden_error": verdict.hidden_error if verdict else None,
            "weight_error": verdict.weight_error if verdict else None,
        }


def _leaves(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    hidden, weight, target = inputs
    return hidden.detach().requires_grad_(), weight.detach().requires_grad_(), target


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
