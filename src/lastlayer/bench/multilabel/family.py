"""How losses of many labels are drawn and judged."""

import math
from typing import Any

import torch
from torch import Tensor

from lastlayer.bench import timing
from lastlayer.bench.cases import Measured, Method
from lastlayer.bench.losses import Losses, LossVerdict, Truth, turns_on_cuda
from lastlayer.bench.maps.tables import limit as copy_limit
from lastlayer.bench.multilabel import truth as truths
from lastlayer.bench.multilabel.cases import POSITIVES, MultilabelCase
from lastlayer.bench.multilabel.record import MultilabelRecord
from lastlayer.bench.multilabel.timer import ByLength
from lastlayer.bench.multilabel.truth import DENSE_ZLPR
from lastlayer.bench.timing import CpuTimer, CudaTimer, Timer
from lastlayer.bench.verify import GRADIENT_TOLERANCE, LOSS_TOLERANCE

MADE = (
    "hidden ~ N(0, 1) and label vectors ~ N(0, 1/width), or scores ~ N(0, 1); "
    f"{POSITIVES} labels a row, one of each {POSITIVES}th of all"
)
# Bytes whose copy is the limit of losses of scores.
_COPIED = {"cuda": 2**32, "cpu": 2**28}


class Multilabel(Losses[MultilabelCase, MultilabelRecord]):
    """Inputs are hidden states, label vectors and lists of labels; or scores and labels."""

    name = "multilabel"
    record = MultilabelRecord

    def __init__(self) -> None:
        super().__init__()
        self._copy_tb_per_s = 0.0

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

    def truth(self, computes: str, inputs: tuple[Tensor, ...]) -> Truth:
        """The mean loss with its gradients: of hidden and weight, or of the scores."""
        if computes == DENSE_ZLPR:
            return truths.of_dense(*inputs)
        return truths.of_linear(computes, *inputs)

    def tolerances(self, computes: str, dtype: torch.dtype) -> dict[str, float]:
        """The same for all."""
        names = ("scores",) if computes == DENSE_ZLPR else ("hidden", "weight")
        return {"loss": LOSS_TOLERANCE[dtype]} | dict.fromkeys(names, GRADIENT_TOLERANCE[dtype])

    def operations(self, case: MultilabelCase) -> int | None:
        """Scores, and a product for each of the two gradients; none where scores are given."""
        return None if case.is_dense else 6 * math.prod(case.shape)

    def timer(self, device: torch.device, *, quick: bool) -> Timer:
        """Losses of scores take a fraction of a millisecond, those of a linear layer many."""
        if device.type == "cpu":
            return CpuTimer(budget_s=0.1 if quick else 2.5)
        short = CudaTimer(warmup_ms=10, rep_ms=20 if quick else 60)
        return ByLength(short=short, long=turns_on_cuda(quick=quick))

    def limit(self, device: torch.device, timer: Timer, *, quick: bool) -> float:
        """The rate of a large product; that of a copy is kept here."""
        copied = _COPIED[device.type] // (4 if quick else 1)
        self._copy_tb_per_s = timing.copy_tb_per_s(device, copied, timer)
        return super().limit(device, timer, quick=quick)

    def in_words(self, limit: float) -> str:
        """Both limits."""
        return f"{super().in_words(limit)}, {copy_limit(self._copy_tb_per_s)}"

    def details(
        self, case: MultilabelCase, method: Method, measured: Measured[LossVerdict]
    ) -> dict[str, Any]:
        """Rates, memory and errors, and how the inputs were made."""
        speed = measured.tera_per_s(_bytes_moved(case)) if case.is_dense else None
        return super().details(case, method, measured) | {
            "inputs_made": MADE,
            "tb_per_s": speed,
            "copy_tb_per_s": self._copy_tb_per_s,
            "fraction_of_copy": speed / self._copy_tb_per_s if speed else None,
        }


def _bytes_moved(case: MultilabelCase) -> int:
    """Scores and labels are read; in backward they are read again and a gradient is written."""
    size = case.torch_dtype.itemsize
    each = size + 1 if case.direction == "forward" else 2 * (size + 1) + size
    return case.shape[0] * case.shape[1] * each
