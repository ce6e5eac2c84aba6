"""In plain torch: defines the truth."""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype


def sums(scores: Tensor, negated: bool) -> tuple[Tensor, Tensor]:
    """The logsumexp of each row (rows, labels), and that of minus the row, or an empty tensor."""
    values = scores.to(_wide(scores))
    if not negated:
        return values.logsumexp(-1), values.new_empty(0)
    return values.logsumexp(-1), _negated(values).logsumexp(-1)


def gradient_(scores: Tensor, scale: Tensor, above: Tensor, below: Tensor | None) -> None:
    """``scores`` (rows, labels) become the gradient; the rest has one number a row."""
    values = scores.to(_wide(scores))
    gradient = torch.exp(values - above.unsqueeze(-1))
    if below is not None:
        gradient -= torch.exp(_negated(values) - below.unsqueeze(-1))
    scores.copy_(gradient.mul_(scale.unsqueeze(-1)))


def _negated(values: Tensor) -> Tensor:
    return torch.where(values == -torch.inf, values, -values)


def _wide(scores: Tensor) -> torch.dtype:
    return accumulation_dtype(scores.dtype)
