"""Logistic curves through scores and labels, one a class or one for all, by Newton's method."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Numbers that are widened to float64 at a time.
_WIDENED = 1 << 22
_MOST_STEPS = 100

Columns = Callable[[], Iterator[tuple[slice, Tensor, Tensor, Tensor]]]


class Curve(NamedTuple):
    """``sigmoid(slope · score + bias)``; one number a class, or one."""

    slope: Tensor
    bias: Tensor


def columns_of(
    scores: Tensor, target: Tensor, mask: Tensor | None, unit: Tensor | None = None
) -> Columns:
    """Some classes at a time in float64: where, scores, labels, and what counts as 0 or 1.

    Scores are in multiples of ``unit``, where it is given.
    """
    n_rows, n = scores.shape
    step = max(1, _WIDENED // max(1, n_rows))

    def each() -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        for first in range(0, n, step):
            part = slice(first, first + step)
            x = scores[:, part].double()
            counts = x.isfinite()
            if mask is not None:
                counts = counts & mask[:, part]
            labels = torch.where(counts, target[:, part].double(), 0.0)
            x = x if unit is None else x / unit
            yield part, torch.where(counts, x, 0.0), labels, counts.double()

    return each


def typical_size(columns: Columns, device: torch.device) -> Tensor:
    """The mean of the sizes of scores; 1 where all are 0.

    In this unit a fit takes the same steps for scores of any scale, and is drawn as strongly.
    """
    total, number = torch.zeros(2, dtype=torch.float64, device=device)
    for _, x, _, counts in columns():
        total += x.abs().sum()
        number += counts.sum()
    return torch.where(total > 0, total / number, 1.0)


def fit_shared(columns: Columns, device: torch.device) -> Curve:
    """One curve for all classes, with Platt's targets: counts of one more right and one wrong."""
    ones = torch.zeros((), dtype=torch.float64, device=device)
    zeros = ones.clone()
    for _, _, labels, counts in columns():
        ones += (labels * counts).sum()
        zeros += ((1.0 - labels) * counts).sum()
    low, high = 1.0 / (zeros + 2.0), (ones + 1.0) / (ones + 2.0)

    def smoothed() -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        for part, x, labels, counts in columns():
            yield part, x, low + (high - low) * labels, counts

    start = torch.tensor([[1.0], [0.0]], dtype=torch.float64, device=device)
    return _minimise(smoothed, start, shared=True, strength=1e-9)


def fit_each(columns: Columns, around: Curve, n_classes: int, strength: float) -> Curve:
    """A curve a class, drawn to a common one; what has no data is as the common one."""
    start = torch.stack([around.slope, around.bias]).expand(2, n_classes).clone()
    return _minimise(columns, start, shared=False, strength=strength)


def _minimise(columns: Columns, start: Tensor, *, shared: bool, strength: float) -> Curve:
    """Newton's method with halved steps; then once more with slopes at 0 that came out below."""
    free = torch.ones_like(start[0], dtype=torch.bool)
    found = _newton(columns, start, start, free, shared, strength)
    if bool((found[0] < 0).any()):
        free = found[0] >= 0
        begin = torch.where(torch.stack([free, torch.ones_like(free)]), found, 0.0)
        found = _newton(columns, begin, start, free, shared, strength)
    return Curve(*found)


def _newton(
    columns: Columns, begin: Tensor, around: Tensor, free: Tensor, shared: bool, strength: float
) -> Tensor:
    now = begin
    value, gradient, hessian = _expand(columns, now, around, free, shared, strength)
    for _ in range(_MOST_STEPS):
        (aa, ab, bb), (ga, gb) = hessian, gradient
        scale = 1.0 / (aa * bb - ab * ab)
        step = torch.stack([(bb * ga - ab * gb) * scale, (aa * gb - ab * ga) * scale])
        if not step.numel() or float(step.abs().max()) < 1e-10:
            break
        size = torch.ones_like(value)
        # Half as far for those classes that would not get better, until all do or stay.
        for _ in range(40):
            trial = now - size * step
            tried = _expand(columns, trial, around, free, shared, strength)
            worse = ~(tried[0] <= value)
            if not bool(worse.any()):
                break
            size = torch.where(worse, size / 2, size)
        else:
            size = torch.where(worse, 0.0, size)
            trial = now - size * step
            tried = _expand(columns, trial, around, free, shared, strength)
        moved = float((trial - now).abs().max())
        now, (value, gradient, hessian) = trial, tried
        if moved < 1e-10:
            break
    return now


def _expand(
    columns: Columns, now: Tensor, around: Tensor, free: Tensor, shared: bool, strength: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The negative log-likelihood with its ridge, its gradient and its Hessian."""
    sums = now.new_zeros(6, now.shape[1])
    for part, x, labels, counts in columns():
        here = slice(None) if shared else part
        a, b = now[0, here], now[1, here]
        z = a * x + b
        p = torch.sigmoid(z)
        cost = counts * (torch.nn.functional.softplus(z, threshold=700.0) - labels * z)
        miss, spread = counts * (p - labels), counts * p * (1.0 - p)
        numbers = [cost, miss * x, miss, spread * x * x, spread * x, spread]
        added = torch.stack([each.sum(0) for each in numbers])
        sums[:, here] += added.sum(-1, keepdim=True) if shared else added
    value, ga, gb, aa, ab, bb = sums
    apart = now - around
    value = value + 0.5 * strength * (apart * apart).sum(0)
    ga, gb = ga + strength * apart[0], gb + strength * apart[1]
    aa, bb = aa + strength, bb + strength
    # A slope that is held has no part.
    ga, ab, aa = torch.where(free, ga, 0.0), torch.where(free, ab, 0.0), torch.where(free, aa, 1.0)
    return value, torch.stack([ga, gb]), torch.stack([aa, ab, bb])
