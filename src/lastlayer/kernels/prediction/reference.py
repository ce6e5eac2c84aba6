"""Best classes, draws and log-probabilities in plain torch: defines the truth."""

import math

import torch
from torch import Tensor


def best(
    scores: Tensor, bias: Tensor | None, softcap: float, temperature: float, k: int,
    normalised: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Values and classes ``(n, k)``, the best first, and the logsumexp of each row ``(n,)``.

    Values are log-probabilities where ``normalised``; else scores, and the logsumexp is 0. A NaN,
    and +inf, come first. A row with a NaN or +inf has log-probabilities of NaN.
    """
    values = shaped(scores, bias, softcap, temperature)
    total = values.new_zeros(values.shape[0])
    if normalised:
        values = _log_softmax(values)
        total = torch.logsumexp(shaped(scores, bias, softcap, temperature), -1)
        total = total.masked_fill(values[:, 0].isnan(), math.nan)
    # A NaN of either sign is above all; + 0.0 makes -0.0 equal to 0.0.
    keys = values.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).add_(0.0)
    classes = keys.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return values.gather(-1, classes), classes.contiguous(), total


def draw(
    scores: Tensor, bias: Tensor | None, softcap: float, temperature: float, uniform: Tensor
) -> Tensor:
    """Classes ``(n, m)`` for numbers ``(n, m)`` in [0, 1), float64; -1 without probabilities.

    The first class whose cumulated probability exceeds the number: a class of probability 0 is
    never drawn. Sums are in float64, so that the many small classes of a wide row keep their
    shares, which they would lose in ``torch.multinomial``.
    """
    values = shaped(scores, bias, softcap, temperature).double()
    peak = values.amax(-1, keepdim=True)
    reached = (values - peak.masked_fill_(peak == -math.inf, 0.0)).exp_().cumsum_(-1)
    total = reached[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    places = torch.searchsorted(reached, torch.minimum(uniform * total, below), right=True)
    return torch.where(total > 0, places, -1)


def log_softmax_(
    scores: Tensor, bias: Tensor | None, softcap: float, temperature: float,
    offset: Tensor | None = None,
) -> None:  # fmt: skip
    """Log-probabilities in place of the scores; -inf throughout a fully masked row."""
    if bias is not None or softcap or temperature != 1.0:
        scores.copy_(shaped(scores, bias, softcap, temperature))
    if not scores.numel():
        return
    # A CPU need not look at all scores to know that no row is masked.
    masked = scores[:, :1] == -math.inf
    if scores.device.type != "cpu" or bool(masked.any()):
        masked = scores.amax(-1, keepdim=True) == -math.inf
        torch.log_softmax(scores, -1, out=scores)
        scores.masked_fill_(masked, -math.inf)
    else:
        torch.log_softmax(scores, -1, out=scores)
    if offset is not None:
        scores.add_(offset.unsqueeze(-1))


def log_sigmoid_(scores: Tensor, bias: Tensor | None, softcap: float, temperature: float) -> None:
    """The log of ``sigmoid`` in place of each score."""
    if bias is not None or softcap or temperature != 1.0:
        scores.copy_(shaped(scores, bias, softcap, temperature))
    torch._C._nn.log_sigmoid(scores, out=scores)  # type: ignore[call-arg]


def shaped(scores: Tensor, bias: Tensor | None, softcap: float, temperature: float) -> Tensor:
    """Scores after bias, soft cap and temperature; the scores themselves where there are none."""
    if bias is not None:
        scores = scores + bias
    if softcap:
        capped = softcap * torch.tanh(scores / softcap)
        # A cap must not bring back a class that a bias of -inf masks.
        scores = capped.masked_fill(scores == -math.inf, -math.inf)
    return scores if temperature == 1.0 else scores / temperature


def _log_softmax(scores: Tensor) -> Tensor:
    if not scores.shape[-1]:
        return scores
    masked = scores.amax(-1, keepdim=True) == -math.inf
    made = torch.log_softmax(scores.masked_fill(masked, 0.0), -1)
    return made.masked_fill_(masked, -math.inf)
