"""How contrastive losses are drawn and judged."""

from typing import Any

import torch
from torch import Tensor

from lastlayer.bench.cases import Measured, Method
from lastlayer.bench.contrastive.cases import ContrastiveCase
from lastlayer.bench.contrastive.record import ContrastiveRecord
from lastlayer.bench.contrastive.truth import truth_of
from lastlayer.bench.losses import Losses, LossVerdict, Truth
from lastlayer.bench.verify import GRADIENT_TOLERANCE, LOSS_TOLERANCE

TEMPERATURE = 0.07
# How far the vectors of a pair are from what they have in common.
SPREAD = 1.5
MADE = (
    f"query and key = c + {SPREAD:g}·N(0, 1) with c ~ N(0, 1) for each pair, temperature "
    f"{TEMPERATURE:g}, with a gradient"
)
# Largest accepted |gradient − truth| / |truth| of the temperature.
TEMPERATURE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


class Contrastive(Losses[ContrastiveCase, ContrastiveRecord]):
    """The family of losses on pairs: inputs are queries, keys and a temperature."""

    name = "contrastive"
    record = ContrastiveRecord

    def draw(self, case: ContrastiveCase, device: torch.device, seed: int) -> tuple[Tensor, ...]:
        """Pairs that are closer to each other than to the rest."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal() -> Tensor:
            return torch.randn(case.shape, generator=generator, device=device)

        common = normal()
        query, key = ((common + SPREAD * normal()).to(case.torch_dtype) for _ in range(2))
        return query, key, torch.tensor(TEMPERATURE, device=device)

    def truth(self, computes: str, inputs: tuple[Tensor, ...]) -> Truth:
        """The mean loss with its gradients."""
        return truth_of(computes, *inputs)

    def tolerances(self, computes: str, dtype: torch.dtype) -> dict[str, float]:  # noqa: ARG002 — all alike
        """The temperature has one gradient, a sum over all pairs."""
        return {
            "loss": LOSS_TOLERANCE[dtype],
            "query": GRADIENT_TOLERANCE[dtype],
            "key": GRADIENT_TOLERANCE[dtype],
            "temperature": TEMPERATURE_TOLERANCE[dtype],
        }

    def operations(self, case: ContrastiveCase) -> int:
        """Similarities, and a product for the gradients of queries and of keys."""
        pairs, width = case.shape
        return 6 * pairs * pairs * width

    def details(
        self, case: ContrastiveCase, method: Method, measured: Measured[LossVerdict]
    ) -> dict[str, Any]:
        """Rate, memory and errors, and how the inputs were made."""
        return super().details(case, method, measured) | {"inputs_made": MADE}
