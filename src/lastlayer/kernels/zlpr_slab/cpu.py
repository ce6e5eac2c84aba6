"""On a CPU: torch's vectorised exponential, on as many rows as a cache holds."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype

_NUMBERS = 1 << 16


def sums(scores: Tensor, negated: bool) -> tuple[Tensor, Tensor]:
    """As the reference's."""
    dtype = accumulation_dtype(scores.dtype)
    n = scores.shape[0]
    above = scores.new_empty(n, dtype=dtype)
    below = scores.new_empty(n if negated else 0, dtype=dtype)
    if scores.shape[1] == 0:
        return above.fill_(-torch.inf), below.fill_(-torch.inf)
    for part in _parts(scores):
        values = scores[part].to(dtype)
        above[part] = _logsumexp(values)
        if negated:
            below[part] = _logsumexp(_negated(values))
    return above, below


def gradient_(scores: Tensor, scale: Tensor, above: Tensor, below: Tensor | None) -> None:
    """As the reference's."""
    for part in _parts(scores):
        values = scores[part].to(above.dtype)
        minus = None if below is None else _negated(values)
        gradient = (values - above[part].unsqueeze(-1)).exp_()
        if minus is not None and below is not None:
            gradient -= minus.sub_(below[part].unsqueeze(-1)).exp_()
        torch.mul(gradient, scale[part].unsqueeze(-1), out=values)
        if values.data_ptr() != scores[part].data_ptr():
            scores[part] = values


def _logsumexp(values: Tensor) -> Tensor:
    """That of each row; torch's own takes twice as long."""
    peak = values.amax(-1)
    origin = torch.where(peak == -torch.inf, 0.0, peak)
    return (values - origin.unsqueeze(-1)).exp_().sum(-1).log_().add_(origin)


def _negated(values: Tensor) -> Tensor:
    return torch.where(values == -torch.inf, values, -values)


def _parts(scores: Tensor) -> Iterator[slice]:
    rows = max(1, _NUMBERS // max(1, scores.shape[1]))
    for first in range(0, scores.shape[0], rows):
        yield slice(first, first + rows)
