"""Top-k softmax in plain torch: the reference that the kernels are tested against."""

import math

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels import entmax_rows


def forward(scores: Tensor, k: int) -> Tensor:
    """Softmax over the ``k`` largest scores of a row (ties: lowest index first); zero elsewhere."""
    if scores.numel() == 0:
        return torch.empty_like(scores)
    kept, broken = _kept(scores.to(accumulation_dtype(scores.dtype)), k)
    # The softmax of a fully masked row is NaN.
    probs = torch.softmax(kept, -1).masked_fill(kept == -math.inf, 0.0)
    return probs.masked_fill(broken, math.nan).to(scores.dtype)


def logs_into(out: Tensor, scores: Tensor, bias: Tensor | None, k: int) -> None:
    """Writes the log of :func:`forward` of scores plus bias, in the dtype of the scores.

    -inf for classes that are not among the ``k`` best, and for all of a fully masked row.
    """
    if scores.numel():
        kept, broken = _kept(scores if bias is None else scores + bias, k)
        logs = torch.log_softmax(kept, -1).masked_fill(kept == -math.inf, -math.inf)
        out.copy_(logs.masked_fill_(broken, math.nan))


def _kept(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest minus their maximum, -inf elsewhere; and which rows have a NaN or +inf."""
    edge = values.topk(min(k, values.shape[-1]), dim=-1).values[..., -1:]
    above, equal = values > edge, values == edge
    left = k - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1) <= left))
    peak = values.amax(-1, keepdim=True)
    empty = peak == -math.inf
    kept = torch.where(taken, values, -math.inf) - peak.masked_fill(empty, 0.0)
    return kept, ~torch.isfinite(peak) & ~empty


def loss(scores: Tensor, target: Tensor, row_scale: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The loss of each row against a class id, and the gradient of ``sum(row_scale * loss)``.

    The gradient is in the dtype of the scores; ``row_scale`` is 1 if None. A fully masked row has
    loss +inf and gradient 0. A row of scale 0 has gradient 0 even if it contains NaN.
    """
    values = scores.to(accumulation_dtype(scores.dtype))
    probs = forward(values, k)
    scale = torch.ones_like(values[:, 0]) if row_scale is None else row_scale
    losses = entmax_rows.forward_("reference", probs, values, target, scale, 1.0)
    return losses, probs.to(scores.dtype)
