"""entmax in plain torch: the reference that the kernels are tested against.

Rows are the last dimension. With ``distance = scores - max <= 0`` and ``excess = alpha - 1`` the
map is ``p = relu(top + excess * distance) ** (1 / excess)``, where ``top = max(p) ** excess`` is
the only unknown. README.md has the derivation.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels.entmax import exp_remainder


def forward(scores: Tensor, alpha: float, row_alpha: Tensor | None) -> Tensor:
    """Probabilities of each row, in the dtype of ``scores``."""
    values = scores.to(accumulation_dtype(scores.dtype))
    if values.numel() == 0:
        return torch.empty_like(scores)
    peak = values.amax(-1, keepdim=True)
    empty = peak == -math.inf
    distance = values - peak.masked_fill(empty, 0.0)
    if row_alpha is not None:
        excess = (row_alpha.to(values.dtype) - 1.0).unsqueeze(-1)
        probs = _polished(*_bisected(distance, excess), excess)
        probs = probs.masked_fill(~(excess >= 0.0), math.nan)
    elif alpha == 1.0:
        probs = torch.softmax(distance, -1)
    elif alpha in (1.5, 2.0):
        probs = _sorted(distance, alpha)
    else:
        excess = torch.full_like(peak, alpha - 1.0)
        probs = _polished(*_bisected(distance, excess), excess)
    probs = torch.where(torch.isfinite(peak) | empty, probs, math.nan)
    return probs.masked_fill(empty, 0.0).to(scores.dtype)


def log_(scores: Tensor, alpha: float) -> None:
    """Overwrites the scores with log-probabilities, -inf for a probability of 0."""
    scores.copy_(forward(scores, alpha, None).log_())


def backward(probs: Tensor, grad: Tensor, alpha: float, row_alpha: Tensor | None) -> Tensor:
    """``s * (grad - <s, grad> / <s, 1>)`` with ``s = p ** (2 - alpha)`` on the support."""
    dtype = accumulation_dtype(probs.dtype)
    values, upstream = probs.to(dtype), grad.to(dtype)
    support = values != 0.0
    exponent: Tensor | float
    exponent = 2.0 - alpha if row_alpha is None else (2.0 - row_alpha.to(dtype)).unsqueeze(-1)
    slope = torch.where(support, torch.where(support, values, 1.0) ** exponent, 0.0)
    slope = torch.where(values.isnan(), values, slope)
    if slope.shape[-1]:
        # For alpha > 2 one slope can be far larger than all others. Subtracting its gradient avoids
        # cancellation.
        steepest = slope.argmax(-1, keepdim=True)
        upstream = upstream - upstream.gather(-1, steepest)
    weighted = torch.where(support, slope * upstream, 0.0)
    mean = weighted.sum(-1, keepdim=True) / slope.sum(-1, keepdim=True)
    return torch.where(support, weighted - slope * mean, 0.0).to(grad.dtype)


def gradients(probs: Tensor, grad: Tensor, row_alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the scores and, ``<grad, dp / d alpha>`` per row, of ``row_alpha``.

    The upstream gradient is read on the support only.
    """
    dtype = accumulation_dtype(probs.dtype)
    values, excess = probs.to(dtype), row_alpha.to(dtype).unsqueeze(-1) - 1.0
    support = values != 0.0
    upstream = torch.where(support, grad.to(dtype), 0.0)
    # The derivatives of a row sum to 0, so the mean can be subtracted, which avoids cancellation.
    upstream = torch.where(support, upstream - (values * upstream).sum(-1, keepdim=True), 0.0)
    logs = torch.log(torch.where(support, values, 1.0))
    power = -excess * logs
    square = logs.square() * exp_remainder(power)

    def mean(numbers: Tensor) -> Tensor:
        return (values * numbers).sum(-1)

    entropy, total = -mean(logs), mean(torch.exp(power))
    first, second = mean(upstream * logs), mean(upstream * square)
    moved = -second - excess.squeeze(-1) * (mean(square) * first + entropy * second)
    by_alpha = moved / torch.where(total == 0.0, 1.0, total)
    return backward(probs, grad, 0.0, row_alpha), by_alpha.to(row_alpha.dtype)


def support(
    scores: Tensor, alpha: float, row_alpha: Tensor | None, max_support: int, wide: bool = False,
    shrink: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Values, classes (ascending) and number of non-zeros of each row, padded with (0, class 0)."""
    if wide and scores.itemsize < 4:
        scores = scores.float()
    if shrink != 1.0:
        scores = scores * shrink
    probs = forward(scores, alpha, row_alpha)
    present = probs != 0.0
    size = present.sum(-1)
    n = scores.shape[-1]
    width = min(max_support, n)
    classes = torch.arange(n, device=scores.device).expand_as(probs)
    order = torch.where(present, classes, n).topk(width, dim=-1, largest=False).values
    padding = order == n
    indices = order.masked_fill(padding, 0)
    values = probs.gather(-1, indices).masked_fill(padding, 0.0)
    room = (0, max_support - width)
    return pad(values, room), pad(indices, room), size


def _sorted(distance: Tensor, alpha: float) -> Tensor:
    """Closed form for alpha 1.5 and 2: the support is a prefix of the sorted row."""
    scaled = distance * (alpha - 1.0)
    ordered = scaled.sort(-1, descending=True).values.clamp(min=-2.0)
    size = torch.arange(1, ordered.shape[-1] + 1, device=ordered.device, dtype=ordered.dtype)
    mean = ordered.cumsum(-1) / size
    if alpha == 2.0:
        threshold = mean - 1.0 / size
    else:
        spread = (ordered.square().cumsum(-1) / size - mean.square()).clamp(min=0.0)
        threshold = mean - (1.0 / size - spread).clamp(min=0.0).sqrt()
    count = (threshold < ordered).sum(-1, keepdim=True).clamp(min=1)
    excess = torch.full_like(scaled[..., :1], alpha - 1.0)
    margin = (scaled - threshold.gather(-1, count - 1)).clamp(min=0.0)
    if alpha == 2.0:
        return _polished(margin, (margin > 0.0).to(margin.dtype), excess)
    return _polished(margin.square(), margin, excess)


def _bisected(distance: Tensor, excess: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities for any alpha, by bisection of ``log(max(p))`` to the precision of the dtype.

    The largest probability lies in [1/n, 1]. The upper end of the bracket is returned: there the
    sum is at least 1, so every class of the support is present.
    """
    low = torch.full_like(excess, -math.log(distance.shape[-1]))
    high = torch.zeros_like(excess)
    steps = 60 if distance.dtype == torch.float64 else 32
    for _ in range(steps):
        middle = 0.5 * (low + high)
        enough = _deformed_exp(distance, middle, excess)[0].sum(-1, keepdim=True) >= 1.0
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle)
    return _deformed_exp(distance, high, excess)


def _deformed_exp(distance: Tensor, log_top: Tensor, excess: Tensor) -> tuple[Tensor, Tensor]:
    """``p`` for a given ``log(max(p))``, and its derivative up to a common factor of the row."""
    # Without the clamp, 0 * inf would exclude the maximum itself for a very large alpha.
    ratio = excess * distance * torch.exp((-excess * log_top).clamp(max=80.0))
    inside = ratio > -1.0
    ratio = torch.where(inside, ratio, 0.0)
    nearly_softmax = excess < 1e-12
    exponent = torch.where(
        nearly_softmax, distance, torch.log1p(ratio) / torch.where(nearly_softmax, 1.0, excess)
    )
    probs = torch.where(inside, torch.exp(log_top + exponent), 0.0)
    return probs, torch.where(inside, probs / (1.0 + ratio), 0.0)


def _polished(probs: Tensor, slope: Tensor, excess: Tensor) -> Tensor:
    """A last Newton step on the probabilities, which corrects the rounding of the threshold.

    For alpha > 2 the slope is infinite at the edge of the support and the step may overshoot; the
    clamp and the division correct this.
    """
    missing = 1.0 - probs.sum(-1, keepdim=True)
    probs = (probs + slope * (missing / slope.sum(-1, keepdim=True))).clamp(min=0.0)
    return torch.where(excess > 1.0, probs / probs.sum(-1, keepdim=True), probs)
