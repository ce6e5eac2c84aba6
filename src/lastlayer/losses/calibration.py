"""Probabilities and thresholds for scores that were trained with ZLPR, from held-out data."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from lastlayer._checks import check_choice, check_int, check_positive, check_scores
from lastlayer._labels import check_multilabel, rows_of_mask
from lastlayer._torch import accumulation_dtype

# Numbers that are widened to float64 at a time.
_WIDENED = 1 << 22
_MOST_STEPS = 100
Columns = Callable[[], Iterator[tuple[slice, Tensor, Tensor, Tensor]]]


class ZLPRCalibrator(torch.nn.Module):
    r"""Scores to probabilities, :math:`p = \sigma(a\,s + b)` with :math:`a \ge 0`, and to labels.

    ZLPR trained on hard labels ranks the classes of a row and puts its threshold near 0, but its
    scores are no log-odds, see :func:`lastlayer.zlpr_probability`. Fitted on data that was not
    trained on, :math:`a` and :math:`b` minimise the negative log-likelihood. The curve of a class
    is drawn to that of all classes, as if by ``strength`` observations, so that rare classes have a
    sensible one. All is done in float64 by Newton's method, and is deterministic; scores of
    another scale give the same probabilities.

    Before it is fitted it is :math:`\sigma(2s)`, with a threshold of 0. Its state is a plain
    ``state_dict`` of four buffers.

    Args:
        n_classes: number of classes, with a curve and a threshold each; None for shared ones.
        threshold: what :meth:`predict` asks for: "half", a probability above 1/2, or "f1", the
            threshold that has the best F1 on the data of the fit (of a class, or of all together
            where they share it). Classes without a positive there take "half".
        strength: how strongly the curve of a class is drawn to the common one, above 0.

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
        """Fits the curves and thresholds, and returns itself.

        Args:
            scores: ``(*batch, n)``, of data that was not trained on; infinite ones do not count.
            target: labels of that shape, 0 or 1 (bool, integer or floating).
            mask: bool that broadcasts to ``scores``, True for what counts.
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
            # Drawn to the common curve, which classes without data take.
            around = curve.expand(2, n).clone()
            curve = _minimise(in_units, around, shared=False, strength=self.strength)
        slope, bias = curve[0] / unit, curve[1]
        # Where the probability is 1/2; nowhere and everywhere are infinite.
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
        # A slope of 0 makes nothing of an infinite score.
        scaled = torch.where(slope == 0, 0.0, slope * scores.to(dtype))
        return torch.sigmoid(scaled + bias).to(scores.dtype)

    def predict(self, scores: Tensor) -> Tensor:
        """Which labels there are: bool of the shape of ``scores``."""
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
    """The threshold on scores with the best F1, of each class or of all together."""
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
    # Between equal scores no threshold can cut.
    best, place = torch.where(ranked > below, f1, -1.0).max(0)
    at, under = (each.gather(0, place.unsqueeze(0)).squeeze(0) for each in (ranked, below))
    halfway = torch.where(under > -math.inf, (at + under) / 2.0, at - 1.0)
    return torch.where(best > 0, halfway, fallback)


def _check_values(scores: Tensor, target: Tensor, mask: Tensor | None) -> None:
    """Fitting waits for the device anyway."""
    counted = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    if bool((scores.isnan() & counted).any()):
        raise ValueError("scores: expected numbers, got NaN; leave such scores out by mask=")
    if bool(((target != 0) & (target != 1) & counted).any()):
        raise ValueError("target: expected observed labels, 0 or 1, got others; a calibrator is "
                         "fitted on what was the case")  # fmt: skip
    if not bool((scores.isfinite() & counted).any()):
        raise ValueError("scores: expected at least one finite score that counts, got none")


def _columns(
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


def _typical_size(columns: Columns, device: torch.device) -> Tensor:
    """The mean of the sizes of scores; 1 where all are 0.

    In this unit a fit takes the same steps for scores of any scale, and is drawn as strongly.
    """
    total, number = torch.zeros(2, dtype=torch.float64, device=device)
    for _, x, _, counts in columns():
        total += x.abs().sum()
        number += counts.sum()
    return torch.where(total > 0, total / number, 1.0)


def _fit_shared(columns: Columns, device: torch.device) -> Tensor:
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


def _minimise(columns: Columns, start: Tensor, *, shared: bool, strength: float) -> Tensor:
    """Slopes and biases, ``(2, n)``, by Newton's method with halved steps.

    Slopes that came out below 0 are put at 0, and the rest is found once more.
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
