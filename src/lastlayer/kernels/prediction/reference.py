"""Best classes, samples and log-probabilities in plain torch: the reference."""

import math

import torch
from torch import Tensor


def best(
    scores: Tensor, bias: Tensor | None, softcap: float, temperature: float, k: int,
    normalised: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Values and classes ``(n, k)``, the best first, and the logsumexp of each row ``(n,)``.

    With ``normalised`` the values are log-probabilities; otherwise they are scores, and the
    logsumexp is 0. NaN and +inf rank first. A row with a NaN or +inf has log-probabilities of NaN.
    """
    values = shaped(scores, bias, softcap, temperature)
    total = values.new_zeros(values.shape[0])
    if normalised:
        values = _log_softmax(values)
        total = torch.logsumexp(shaped(scores, bias, softcap, temperature), -1)
        total = total.masked_fill(values[:, 0].isnan(), math.nan)
    # NaN of either sign ranks first; + 0.0 makes -0.0 equal to 0.0.
    keys = values.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).add_(0.0)
    classes = keys.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return values.gather(-1, classes), classes.contiguous(), total


def draw(
    scores: Tensor, bias: Tensor | None, softcap: float, temperature: float, uniform: Tensor
) -> Tensor:
    """Classes ``(n, m)`` for float64 numbers ``(n, m)`` in [0, 1); -1 without valid probabilities.

    The result is the first class whose cumulative probability exceeds the number, so a class of
    probability 0 is never drawn. Sums are in float64: in float32, as in ``torch.multinomial``, the
    many small probabilities of a wide row are lost.
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
    """Overwrites the scores with log-probabilities; -inf in a fully masked row."""
    if bias is not None or softcap or temperature != 1.0:
        scores.copy_(shaped(scores, bias, softcap, temperature))
    if not scores.numel():
        return
    # On a CPU one column usually shows that no row is fully masked.
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
    """Overwrites each score with the log of its sigmoid."""
    if bias is not None or softcap or temperature != 1.0:
        scores.copy_(shaped(scores, bias, softcap, temperature))
    torch._C._nn.log_sigmoid(scores, out=scores)  # type: ignore[call-arg]


def shaped(scores: Tensor, bias: Tensor | None, softcap: float, temperature: float) -> Tensor:
    """Scores after bias, soft cap and temperature; the same tensor if none of these is given."""
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
