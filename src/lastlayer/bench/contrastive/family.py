"""How contrastive losses are drawn, verified, called and judged."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lastlayer.bench import memory, timing
from lastlayer.bench.cases import Call, Family, Method
from lastlayer.bench.contrastive.cases import DTYPES, ContrastiveCase
from lastlayer.bench.contrastive.methods import Step
from lastlayer.bench.contrastive.record import ContrastiveRecord
from lastlayer.bench.contrastive.truth import Truth, truth_of
from lastlayer.bench.timing import CpuTimer, CudaTurnsTimer, Thunk, Timer
from lastlayer.bench.verify import GRADIENT_TOLERANCE, Verdict, poison, relative_error

TEMPERATURE = 0.07
# How far the vectors of a pair are from what they have in common.
SPREAD = 1.5
MADE = (
    f"query and key = c + {SPREAD:g}·N(0, 1) with c ~ N(0, 1) for each pair, temperature "
    f"{TEMPERATURE:g}, with a gradient"
)
# Largest accepted |loss − truth| / |truth|, and the same of the gradient of the temperature.
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
TEMPERATURE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
# The side of the two square matrices whose product is the limit.
_PRODUCT = {"cuda": 8192, "cpu": 2048}


@dataclass(frozen=True, kw_only=True)
class ContrastiveVerdict(Verdict):
    """What a verification found; see :class:`ContrastiveRecord`."""

    loss_error: float
    query_error: float
    key_error: float
    temperature_error: float
    peak_bytes: int | None


class Contrastive(Family[ContrastiveCase, ContrastiveVerdict, ContrastiveRecord]):
    """The family of losses on pairs: inputs are queries, keys and a temperature."""

    name = "contrastive"
    record = ContrastiveRecord

    def __init__(self) -> None:
        self._truths: dict[str, Truth] = {}

    def draw(self, case: ContrastiveCase, device: torch.device, seed: int) -> tuple[Tensor, ...]:
        """Pairs that are closer to each other than to the rest."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal() -> Tensor:
            return torch.randn(case.shape, generator=generator, device=device)

        common = normal()
        query, key = ((common + SPREAD * normal()).to(case.torch_dtype) for _ in range(2))
        return query, key, torch.tensor(TEMPERATURE, device=device)

    def finished(self) -> None:
        """Forget what is known of the case."""
        self._truths.clear()

    def verify(
        self, case: ContrastiveCase, method: Method, call: Call, inputs: tuple[Tensor, ...]
    ) -> ContrastiveVerdict:
        """Compare loss and gradients with the float64 truth, and measure the memory."""
        leaves = _leaves(inputs)
        # The first call compiles and tunes, and may take memory for it.
        call(*leaves)
        poison(inputs[1])
        step, peak = memory.with_peak(lambda: call(*leaves), inputs[0].device)
        beyond = None if peak is None else max(0, peak - _bytes(step.query) - _bytes(step.key))
        if method.computes not in self._truths:
            self._truths[method.computes] = truth_of(method.computes, *inputs)
        return _compared(step, self._truths[method.computes], case.torch_dtype, beyond)

    def thunk(self, call: Call, sets: list[tuple[Tensor, ...]]) -> Thunk:
        """Loss and gradients."""
        rotation = itertools.cycle([_leaves(inputs) for inputs in sets])
        return lambda: call(*next(rotation))

    def baseline(self, case: ContrastiveCase) -> Method:
        """torch.compile on CUDA, torch on a CPU."""
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
        case: ContrastiveCase,
        method: Method,  # noqa: ARG002 — what all methods of a case have is enough
        *,
        verdict: ContrastiveVerdict | None,
        milliseconds: float | None,
        baseline_ms: float | None,
        limit: float,
    ) -> dict[str, Any]:
        """Rate, memory and errors."""
        pairs, width = case.shape
        operations = 6 * pairs * pairs * width
        rate = timing.tera_per_s(operations, milliseconds) if milliseconds else None
        ratio = milliseconds / baseline_ms if milliseconds and baseline_ms else None
        return {
            "inputs_made": MADE,
            "tflop_per_s": rate,
            "gemm_tflop_per_s": limit,
            "fraction_of_gemm": rate / limit if rate else None,
            "baseline": f"{case.baseline.source} {case.baseline.name}",
            "ratio_to_baseline": ratio,
            "peak_bytes": verdict.peak_bytes if verdict else None,
            "loss_error": verdict.loss_error if verdict else None,
            "query_error": verdict.query_error if verdict else None,
            "key_error": verdict.key_error if verdict else None,
            "temperature_error": verdict.temperature_error if verdict else None,
        }


def _compared(
    step: Step, truth: Truth, dtype: torch.dtype, peak_bytes: int | None
) -> ContrastiveVerdict:
    loss = abs(float(step.loss) - truth.loss) / abs(truth.loss)
    query = relative_error(step.query, truth.query)
    key = relative_error(step.key, truth.key)
    temperature = abs(float(step.temperature) - truth.temperature) / abs(truth.temperature)
    found = {
        "loss": (loss, LOSS_TOLERANCE[dtype]),
        "gradient of query": (query, GRADIENT_TOLERANCE[dtype]),
        "gradient of key": (key, GRADIENT_TOLERANCE[dtype]),
        "gradient of temperature": (temperature, TEMPERATURE_TOLERANCE[dtype]),
    }
    # Written so that NaN never passes.
    wrong = (f"{name} off by {x:.1e}" for name, (x, most) in found.items() if not x <= most)
    return ContrastiveVerdict(
        reason=next(wrong, None),
        loss_error=loss,
        query_error=query,
        key_error=key,
        temperature_error=temperature,
        peak_bytes=peak_bytes,
    )


def _leaves(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.detach().requires_grad_() for each in inputs)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
