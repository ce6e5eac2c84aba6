"""How losses of many labels are drawn, verified, called and judged."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lastlayer.bench import memory, timing
from lastlayer.bench.cases import Call, Family, Method
from lastlayer.bench.multilabel import truth as truths
from lastlayer.bench.multilabel.cases import DTYPES, POSITIVES, MultilabelCase
from lastlayer.bench.multilabel.methods import Step
from lastlayer.bench.multilabel.record import MultilabelRecord
from lastlayer.bench.multilabel.timer import ByLength
from lastlayer.bench.timing import CpuTimer, CudaTimer, CudaTurnsTimer, Thunk, Timer
from lastlayer.bench.verify import GRADIENT_TOLERANCE, Verdict, poison, relative_error

MADE = (
    "hidden ~ N(0, 1) and label vectors ~ N(0, 1/width), or scores ~ N(0, 1); "
    f"{POSITIVES} labels a row, one of each {POSITIVES}th of all"
)
# Largest accepted |loss − truth| / |truth|.
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
# The side of the two square matrices whose product is a limit, and bytes whose copy is another.
_PRODUCT = {"cuda": 8192, "cpu": 2048}
_COPIED = {"cuda": 2**32, "cpu": 2**28}
_NAMES = {1: ("scores",), 2: ("hidden", "weight")}


@dataclass(frozen=True, kw_only=True)
class MultilabelVerdict(Verdict):
    """What a verification found; see :class:`MultilabelRecord`."""

    errors: dict[str, float]
    peak_bytes: int | None


class Multilabel(Family[MultilabelCase, MultilabelVerdict, MultilabelRecord]):
    """Inputs are hidden states, label vectors and lists of labels; or scores and labels."""

    name = "multilabel"
    record = MultilabelRecord

    def __init__(self) -> None:
        self.copy_tb_per_s = 0.0
        self._truth: truths.Truth | None = None

    def draw(self, case: MultilabelCase, device: torch.device, seed: int) -> tuple[Tensor, ...]:
        """Scores of size 1, and labels that differ from each other within a row."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        rows, labels = case.shape[0], case.shape[-1]
        within = labels // POSITIVES
        lists = torch.randint(within, (rows, POSITIVES), generator=generator, device=device)
        lists += within * torch.arange(POSITIVES, device=device)
        if case.is_dense:
            on = torch.zeros(case.shape, dtype=torch.bool, device=device)
            return normal(rows, labels).to(case.torch_dtype), on.scatter_(1, lists, value=True)
        width = case.shape[1]
        weight = normal(labels, width).div_(width**0.5)
        return normal(rows, width).to(case.torch_dtype), weight.to(case.torch_dtype), lists

    def finished(self) -> None:
        """Forget what is known of the case."""
        self._truth = None

    def verify(
        self, case: MultilabelCase, method: Method, call: Call, inputs: tuple[Tensor, ...]
    ) -> MultilabelVerdict:
        """Compare loss and gradients with the float64 truth, and measure the memory."""
        leaves = _leaves(inputs)
        # The first call compiles and tunes, and may take memory for it.
        call(*leaves)
        poison(inputs[0] if case.is_dense else inputs[1])
        step, peak = memory.with_peak(lambda: call(*leaves), inputs[0].device)
        if self._truth is None:
            self._truth = (
                truths.of_dense(*inputs)
                if case.is_dense
                else truths.of_linear(method.computes, *inputs)
            )
        results = sum(each.numel() * each.element_size() for each in step.gradients)
        beyond = None if peak is None else max(0, peak - results)
        return _compared(step, self._truth, case.torch_dtype, beyond)

    def thunk(self, call: Call, sets: list[tuple[Tensor, ...]]) -> Thunk:
        """The loss, and its gradients where they are part of the work."""
        rotation = itertools.cycle([_leaves(inputs) for inputs in sets])
        return lambda: call(*next(rotation))

    def baseline(self, case: MultilabelCase) -> Method:
        """torch.compile on CUDA, torch on a CPU."""
        return case.baseline

    def timer(self, device: torch.device, *, quick: bool) -> Timer:
        """Losses of scores take a fraction of a millisecond, those of a linear layer many."""
        if device.type == "cpu":
            return CpuTimer(budget_s=0.1 if quick else 2.5)
        return ByLength(
            short=CudaTimer(warmup_ms=10, rep_ms=20 if quick else 60),
            long=CudaTurnsTimer(
                budget_s=0.1 if quick else 0.4, fewest_samples=5, most_samples=30, patience_s=2.0
            ),
        )

    def limit(self, device: torch.device, timer: Timer, *, quick: bool) -> float:
        """The rate of a product of two large square matrices; that of a copy is kept here."""
        less = 4 if quick else 1
        copied = _COPIED[device.type] // less
        self.copy_tb_per_s = timing.copy_tb_per_s(device, copied, timer)
        dtype = getattr(torch, DTYPES[device.type])
        return timing.product_tflop_per_s(_PRODUCT[device.type] // less, device, dtype, timer)

    def details(
        self,
        case: MultilabelCase,
        method: Method,  # noqa: ARG002 — what all methods of a case have is enough
        *,
        verdict: MultilabelVerdict | None,
        milliseconds: float | None,
        baseline_ms: float | None,
        limit: float,
    ) -> dict[str, Any]:
        """Rates, memory and errors."""
        rate = speed = None
        if milliseconds and case.is_dense:
            speed = timing.tera_per_s(_bytes_moved(case), milliseconds)
        elif milliseconds:
            rows, width, labels = case.shape
            rate = timing.tera_per_s(6 * rows * width * labels, milliseconds)
        errors = verdict.errors if verdict else {}
        return {
            "inputs_made": MADE,
            "tflop_per_s": rate,
            "gemm_tflop_per_s": limit,
            "fraction_of_gemm": rate / limit if rate else None,
            "tb_per_s": speed,
            "copy_tb_per_s": self.copy_tb_per_s,
            "fraction_of_copy": speed / self.copy_tb_per_s if speed else None,
            "baseline": f"{case.baseline.source} {case.baseline.name}",
            "ratio_to_baseline": (
                milliseconds / baseline_ms if milliseconds and baseline_ms else None
            ),
            "peak_bytes": verdict.peak_bytes if verdict else None,
            **{
                f"{name}_error": errors.get(name) for name in ("loss", "hidden", "weight", "scores")
            },
        }


def _bytes_moved(case: MultilabelCase) -> int:
    """Scores and labels are read; in backward they are read again and a gradient is written."""
    size = case.torch_dtype.itemsize
    each = size + 1 if case.direction == "forward" else 2 * (size + 1) + size
    return case.shape[0] * case.shape[1] * each


def _compared(
    step: Step, truth: truths.Truth, dtype: torch.dtype, peak_bytes: int | None
) -> MultilabelVerdict:
    errors = {"loss": abs(float(step.loss) - truth.loss) / abs(truth.loss)}
    most = {"loss": LOSS_TOLERANCE[dtype]}
    if step.gradients:
        names = _NAMES[len(step.gradients)]
        for name, got, right in zip(names, step.gradients, truth.gradients, strict=True):
            errors[name] = relative_error(got, right)
            most[name] = GRADIENT_TOLERANCE[dtype]
    # Written so that NaN never passes.
    wrong = (
        f"{name if name == 'loss' else f'gradient of {name}'} off by {error:.1e}"
        for name, error in errors.items()
        if not error <= most[name]
    )
    return MultilabelVerdict(reason=next(wrong, None), errors=errors, peak_bytes=peak_bytes)


def _leaves(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    *floating, labels = inputs
    return *(each.detach().requires_grad_() for each in floating), labels
