"""Calibration of scores trained with ZLPR: probabilities and thresholds from held-out data."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from lastlayer._checks import check_choice, check_int, check_positive, check_scores
from lastlayer._labels import check_multilabel, rows_of_mask
from lastlayer._torch import accumulation_dtype

# Maximum number of scores per chunk that is converted to float64.
_WIDENED = 1 << 22
_MOST_STEPS = 100
Columns = Callable[[], Iterator[tuple[slice, Tensor, Tensor, Tensor]]]


class ZLPRCalibrator(torch.nn.Module):
    r"""Turns ZLPR scores into probabilities :math:`\sigma(a\,s + b)` and labels (Platt scaling).

    ZLPR trained on hard labels ranks the classes of a row and puts its threshold near 0, but its
    scores are not log-odds, see :func:`lastlayer.zlpr_probability`. :meth:`fit` finds the
    :math:`a \ge 0` and :math:`b` that minimise the negative log-likelihood of held-out data. The
    curve of each class is regularised towards that of all classes, as if by ``strength``
    observations, so that rare classes get a sensible one. The fit is Newton's method in float64,
    and deterministic; the probabilities do not depend on the scale of the scores.

    Before :meth:`fit` the probability is :math:`\sigma(2s)`, and the threshold 0. The
    ``state_dict`` has four buffers.

    Args:
        n_classes: number of classes, each with its own curve and threshold; None to share one curve
            and threshold.
        threshold: the rule of :meth:`predict`: "half", a probability above 1/2, or "f1", the
            threshold with the best F1 on the data of the fit (for each class, or over all classes
            if they share it). Classes without positives there use "half".
        strength: strength of the regularisation towards the common curve, above 0.

    Example:
        >>> scores = torch.randn(1000, 5)
        >>> labels = torch.rand(1000, 5) < torch.sigmoid(1.3 * scores - 1.0)
        >>> calibrator = ZLPRCalibrator(5).fit(scores, labels)
        >>> calibrator(scores).shape, calibrator.predict(scores).dtype
        (torch.Size([1000, 5]), torch.bool)

    Reference:
        Platt, Probabilistic Outputs for Support Vector Machines, 1999; Lin, Lin and Weng, A note on
        Platt's probabilistic outputs for support vector machines, Machine Learning 2007.
    """

    slope: Tensor
    bias: Tensor
    threshold: Tensor
    is_fitted: Tensor

    def __init__(
        self, n_classes: int | None = None, *, threshold: str = "half", strength: float = 1.0
    ) -> None:
        super().__init__()
        n_classes = None if n_classes is None else check_int("n_classes", n_classes)
        check_choice("threshold", threshold, ("half", "f1"))
        self.n_classes, self.threshold_kind = n_classes, threshold
        self.strength = check_positive("strength", strength)
        size = 1 if n_classes is None else n_classes
        self.register_buffer("slope", torch.full((size,), 2.0, dtype=torch.float64))
        self.register_buffer("bias", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("threshold", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("is_fitted", torch.tensor(False))

    @torch.no_grad()
    def fit(self, scores: Tensor, target: Tensor, mask: Tensor | None = None) -> Self:
        """Fit curves and thresholds to held-out data, and return the calibrator.

        Args:
            scores: ``(*batch, n)``, of data not used in training; infinite scores are ignored.
            target: labels of that shape, 0 or 1 (bool, integer or floating).
            mask: bool that broadcasts to ``scores``; scores with False are ignored.
        """
        check_multilabel(scores, target, mask, "none")
        self._check_classes(scores)
        n = scores.shape[-1]
        n_rows = scores.shape[:-1].numel()
        rows_mask = rows_of_mask(mask, scores, n_rows)
        flat, labels = scores.reshape(n_rows, n), target.reshape(n_rows, n)
        _check_values(flat, labels, rows_mask)
        columns = _columns(flat, labels, rows_mask)
        unit = _typical_size(columns, scores.device)
        in_units = _columns(flat, labels, rows_mask, unit)
        curve = _fit_shared(in_units, scores.device)
        if self.n_classes is not None:
            # Regularised towards the common curve, which classes without data get.
            around = curve.expand(2, n).clone()
            curve = _minimise(in_units, around, shared=False, strength=self.strength)
        slope, bias = curve[0] / unit, curve[1]
        # The score with probability 1/2; infinite if the slope is 0.
        always = torch.where(bias > 0, -math.inf, math.inf).to(bias.dtype)
        threshold = torch.where(slope > 0, -bias / slope, always)
        if self.threshold_kind == "f1":
            threshold = _at_best_f1(columns, threshold)
        self.slope.copy_(slope)
        self.bias.copy_(bias)
        self.threshold.copy_(threshold)
        self.is_fitted.fill_(True)
        return self

    def forward(self, scores: Tensor) -> Tensor:
        """Probabilities, of the shape and dtype of ``scores``."""
        self._check_classes(scores)
        dtype = accumulation_dtype(scores.dtype)
        slope, bias = self.slope.to(dtype), self.bias.to(dtype)
        # 0 times an infinite score would be NaN.
        scaled = torch.where(slope == 0, 0.0, slope * scores.to(dtype))
        return torch.sigmoid(scaled + bias).to(scores.dtype)

    def predict(self, scores: Tensor) -> Tensor:
        """The predicted labels, bool of the shape of ``scores``."""
        self._check_classes(scores)
        return scores.double() > self.threshold.double()

    def _check_classes(self, scores: Any) -> None:
        check_scores(scores)
        if self.n_classes is not None and scores.shape[-1] != self.n_classes:
            raise ValueError(
                f"scores: expected shape (*batch, {self.n_classes}), one score per class, got "
                f"{tuple(scores.shape)}"
            )

    def extra_repr(self) -> str:
        return (
            f"n_classes={self.n_classes}, threshold={self.threshold_kind!r}, "
            f"strength={self.strength:g}"
        )


def _at_best_f1(columns: Columns, fallback: Tensor) -> Tensor:
    """The threshold on scores with the best F1, for each class or over all classes."""
    found = fallback.clone()
    if len(fallback) == 1:
        every = [(x.reshape(-1), y.reshape(-1), w.reshape(-1)) for _, x, y, w in columns()]
        x, y, w = (torch.cat(each).unsqueeze(-1) for each in zip(*every, strict=True))
        return _cut(x, y, w, fallback)
    for part, x, y, w in columns():
        found[part] = _cut(x, y, w, fallback[part])
    return found


def _cut(scores: Tensor, labels: Tensor, counts: Tensor, fallback: Tensor) -> Tensor:
    if not len(scores):
        return fallback
    ranked, order = torch.where(counts > 0, scores, -math.inf).sort(0, descending=True)
    hits = (labels * counts).gather(0, order).cumsum(0)
    taken = counts.gather(0, order).cumsum(0)
    below = torch.cat([ranked[1:], torch.full_like(ranked[:1], -math.inf)])
    f1 = 2.0 * hits / (taken + hits[-1]).clamp(min=1.0)
    # No threshold can separate equal scores.
    best, place = torch.where(ranked > below, f1, -1.0).max(0)
    at, under = (each.gather(0, place.unsqueeze(0)).squeeze(0) for each in (ranked, below))
    halfway = torch.where(under > -math.inf, (at + under) / 2.0, at - 1.0)
    return torch.where(best > 0, halfway, fallback)


def _check_values(scores: Tensor, target: Tensor, mask: Tensor | None) -> None:
    """Checks values. This needs a host sync, as fitting does anyway."""
    counted = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    if bool((scores.isnan() & counted).any()):
        raise ValueError("scores: expected no NaN, got some; exclude them with mask=")
    if bool(((target != 0) & (target != 1) & counted).any()):
        raise ValueError("target: expected labels 0 or 1, got other values; a calibrator cannot be "
                         "fitted to soft labels")  # fmt: skip
    if not bool((scores.isfinite() & counted).any()):
        raise ValueError("scores: expected at least one finite, unmasked score, got none")


def _columns(
    scores: Tensor, target: Tensor, mask: Tensor | None, unit: Tensor | None = None
) -> Columns:
    """Chunks of classes in float64: slice of the classes, scores, labels, and 0/1 weights.

    The weight of masked and infinite scores is 0. Scores are divided by ``unit`` if it is given.
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


def _typical_size(columns: Columns, device: torch.device) -> Tensor:
    """The mean absolute score; 1 if all are 0.

    Dividing by it makes the fit and its regularisation independent of the scale of the scores.
    """
    total, number = torch.zeros(2, dtype=torch.float64, device=device)
    for _, x, _, counts in columns():
        total += x.abs().sum()
        number += counts.sum()
    return torch.where(total > 0, total / number, 1.0)


def _fit_shared(columns: Columns, device: torch.device) -> Tensor:
    """One curve for all classes, with Platt's targets (one positive and one negative are added)."""
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


def _minimise(columns: Columns, start: Tensor, *, shared: bool, strength: float) -> Tensor:
    """Slopes and biases, ``(2, n)``, by Newton's method with step halving.

    Negative slopes are fixed at 0, and the fit is repeated.
    """
    free = torch.ones_like(start[0], dtype=torch.bool)
    found = _newton(columns, start, start, free, shared, strength)
    if bool((found[0] < 0).any()):
        free = found[0] >= 0
        begin = torch.where(torch.stack([free, torch.ones_like(free)]), found, 0.0)
        found = _newton(columns, begin, start, free, shared, strength)
    return found


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
        # Steps are halved for classes whose value would increase, up to 40 times.
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
    """The negative log-likelihood with its L2 regularisation, its gradient and its Hessian."""
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
    # Fixed slopes do not take part.
    ga, ab, aa = torch.where(free, ga, 0.0), torch.where(free, ab, 0.0), torch.where(free, aa, 1.0)
    return value, torch.stack([ga, gb]), torch.stack([aa, ab, bb])
