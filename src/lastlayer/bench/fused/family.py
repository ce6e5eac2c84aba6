"""How losses on a linear layer are drawn and judged."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer import maps
from lastlayer.bench.cases import Measured, Method
from lastlayer.bench.fused.cases import FusedCase
from lastlayer.bench.fused.record import FusedRecord
from lastlayer.bench.fused.truth import CROSS_ENTROPY, truth_of
from lastlayer.bench.losses import Losses, LossVerdict, Truth
from lastlayer.bench.verify import GRADIENT_TOLERANCE, LOSS_TOLERANCE

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


class Supports(NamedTuple):
    """How many classes have a probability other than 0, over some rows."""

    mean: float
    largest: int


class Fused(Losses[FusedCase, FusedRecord]):
    """The family of losses on a linear layer: inputs are hidden states, class vectors, targets."""

    name = "fused"
    record = FusedRecord

    def __init__(self) -> None:
        super().__init__()
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
        super().finished()
        self._supports.clear()

    def truth(self, computes: str, inputs: tuple[Tensor, ...]) -> Truth:
        """The mean loss with its gradients."""
        return truth_of(computes, *inputs)

    def tolerances(self, computes: str, dtype: torch.dtype) -> dict[str, float]:
        """Sparse losses may be off by more."""
        dense = computes == CROSS_ENTROPY
        loss = LOSS_TOLERANCE if dense else SPARSE_LOSS_TOLERANCE
        gradient = GRADIENT_TOLERANCE if dense else SPARSE_GRADIENT_TOLERANCE
        return {"loss": loss[dtype], "hidden": gradient[dtype], "weight": gradient[dtype]}

    def operations(self, case: FusedCase) -> int:
        """Scores, and a product for each of the two gradients."""
        return 6 * math.prod(case.shape)

    def details(
        self, case: FusedCase, method: Method, measured: Measured[LossVerdict]
    ) -> dict[str, Any]:
        """Rate, memory and errors, how scores were made, and what supports they have."""
        supports = self._supports.get(method.computes)
        return super().details(case, method, measured) | {
            "scores": case.scores.name,
            "scores_made": case.scores.made,
            "support_mean": supports.mean if supports else None,
            "support_max": supports.largest if supports else None,
        }
