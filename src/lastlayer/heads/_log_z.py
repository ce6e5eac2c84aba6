"""How far a model is from one whose scores are log-probabilities as they are."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.fused import linear_statistics
from lastlayer.heads._checks import check_classes, check_hidden

if TYPE_CHECKING:
    from lastlayer.heads._linear import LinearHead


class Drift(NamedTuple):
    """How far log Z is from where it should be, over some rows."""

    mean: float
    """What could be subtracted from all scores."""
    deviation: float
    """Its standard deviation, which cannot; the error of an unnormalised log-probability."""
    largest: float
    """Of all rows, without its sign."""


def drift_of(log_z: Tensor) -> Drift:
    """From one number a row; all are 0 where there are none. The host waits."""
    rows = log_z.detach().flatten().double()
    if not rows.numel():
        return Drift(0.0, 0.0, 0.0)
    spread = rows.std(correction=0)
    return Drift(rows.mean().item(), spread.item(), rows.abs().max().item())


@torch.no_grad()
def log_normalizer(head: "LinearHead", hidden: Tensor, biases: Tensor | None = None) -> Tensor:
    """log Σ e^s of the scores of all classes, exact, ``(*batch)``, in bounded memory.

    Args:
        head: whose classes.
        hidden: ``(*batch, in_features)``.
        biases: instead of those of the head.
    """
    check_hidden(head, hidden)
    anything = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    return linear_statistics(
        hidden,
        head.weight,
        anything,
        head.bias if biases is None else biases,
        ignore_index=None,
        temperature=temperature_of(head),
        chunk_rows=head.chunk_rows,
    ).logsumexp


def temperature_of(head: "LinearHead") -> float:
    """What a head divides its scores by; 1 where it has none."""
    return float(getattr(head, "temperature", 1.0))


@torch.no_grad()
def chosen_scores(head: "LinearHead", hidden: Tensor, classes: Tensor) -> Tensor:
    """Scores of chosen classes alone, ``(*batch, k)``, in float32, or float64 from float64."""
    check_hidden(head, hidden)
    chosen = check_classes(head, hidden, classes)
    rows, weight, bias = head._operands(hidden)
    scores: Tensor = kernels.products.scores("auto", rows, weight, bias, chosen)
    return scores.reshape(*hidden.shape[:-1], chosen.shape[-1])
