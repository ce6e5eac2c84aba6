"""Probabilities and thresholds for scores that were trained with ZLPR, from held-out data."""

import math
from typing import Any, Self

import torch
from torch import Tensor

from lastlayer._checks import check_scores
from lastlayer._torch import accumulation_dtype
from lastlayer.losses._multilabel import check_multilabel, rows_of_mask
from lastlayer.losses._platt import Columns, Curve, columns_of, fit_each, fit_shared, typical_size


class ZLPRCalibrator(torch.nn.Module):
    r"""Scores to probabilities, :math:`p = \sigma(a\,s + b)` with :math:`a \ge 0`, and to labels.

    ZLPR trained on hard labels ranks the classes of a row and puts its threshold near 0, but its
    scores are no log-odds, see :func:`lastlayer.zlpr_probability`. Fitted on data that was not
    trained on, :math:`a` and :math:`b` minimise the negative log-likelihood. A curve a class is
    drawn to the curve of all classes, as if by ``strength`` observations, so that rare classes have
    a sensible one. All is done in float64 by Newton's method, and is deterministic; scores of
    another scale give the same probabilities.

    Before it is fitted it is :math:`\sigma(2s)`, with a threshold of 0. Its state is a plain
    ``state_dict`` of four buffers.

    Args:
        n_classes: how many classes, for a curve and a threshold each; None for one that all share.
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
        _check_options(n_classes, threshold, strength)
        self.n_classes, self.threshold_kind, self.strength = n_classes, threshold, strength
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
        columns = columns_of(flat, labels, rows_mask)
        unit = typical_size(columns, scores.device)
        in_units = columns_of(flat, labels, rows_mask, unit)
        curve = fit_shared(in_units, scores.device)
        if self.n_classes is not None:
            curve = fit_each(in_units, curve, n, self.strength)
        curve = Curve(curve.slope / unit, curve.bias)
        threshold = _at_half(curve)
        if self.threshold_kind == "f1":
            threshold = _at_best_f1(columns, threshold)
        for buffer, value in (
            (self.slope, curve.slope),
            (self.bias, curve.bias),
            (self.threshold, threshold),
        ):
            buffer.copy_(value)
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
                f"scores: expected shape (*batch, {self.n_classes}), one score a class, got "
                f"{tuple(scores.shape)}"
            )

    def extra_repr(self) -> str:
        return (
            f"n_classes={self.n_classes}, threshold={self.threshold_kind!r}, "
            f"strength={self.strength:g}"
        )


def _at_half(curve: Curve) -> Tensor:
    """Where the probability is 1/2; nowhere and everywhere are infinite."""
    always = torch.where(curve.bias > 0, -math.inf, math.inf).to(curve.bias.dtype)
    return torch.where(curve.slope > 0, -curve.bias / curve.slope, always)


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


def _check_options(n_classes: Any, threshold: Any, strength: Any) -> None:
    if n_classes is not None:
        if isinstance(n_classes, bool) or not isinstance(n_classes, int):
            raise TypeError(
                f"n_classes: expected an int, or None for one curve, got {type(n_classes).__name__}"
            )
        if n_classes < 1:
            raise ValueError(f"n_classes: expected at least 1, got {n_classes}")
    if threshold not in ("half", "f1"):
        raise ValueError(f"threshold: expected 'half' or 'f1', got {threshold!r}")
    if isinstance(strength, bool) or not isinstance(strength, (int, float)):
        raise TypeError(f"strength: expected a number, got {type(strength).__name__}")
    if not 0.0 < strength < math.inf:
        raise ValueError(f"strength: expected a finite number above 0, got {strength}")


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
