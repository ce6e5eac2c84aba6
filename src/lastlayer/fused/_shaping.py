"""The soft cap and the temperature on scores of chosen classes."""

import math

import torch
from torch import Tensor


def shaped(scores: Tensor, softcap: float, temperature: float) -> tuple[Tensor, Tensor]:
    """Capped (0: not at all) and tempered scores, and their derivative by the plain ones."""
    if not softcap:
        return scores / temperature, torch.full_like(scores, 1.0 / temperature)
    bent = torch.tanh(scores / softcap)
    # What is out of the running stays out: a cap would bring it back.
    capped = (bent * (softcap / temperature)).masked_fill(scores == -math.inf, -math.inf)
    return capped, (1.0 - bent.square()) / temperature
