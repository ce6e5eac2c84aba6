"""Multi-label losses on slabs of labels, with the listed labels of each row one by one.

A slab has the scores of all rows for some labels, -inf where a label is listed. What is listed
counts by its exact score, and is left out of the slab, never subtracted.
"""

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from lastlayer.fused._listed import Listed
from lastlayer.kernels import zlpr


class LabelLoss(Protocol):
    """A loss of rows from slabs of their scores, which it may overwrite.

    ``normalisers`` are what the gradient of a slab needs to know of all others, ``(k, n)``: given,
    or found by :meth:`finish`. Where labels do not depend on each other there are none, and
    ``look_`` makes the gradient at once.
    """

    normalisers: Tensor | None
    separable: bool

    def look_(self, scores: Tensor, scale: Tensor | None) -> None:
        """Takes note of a slab; a separable loss turns it into its gradient if scale is given."""

    def finish(self, listed: Listed, at_listed: Tensor) -> Tensor:
        """The loss of each row, once all slabs were looked at."""

    def turn_(self, scores: Tensor, scale: Tensor) -> None:
        """Turns a slab into its gradient, once the normalisers are known."""

    def gradient_of_listed(self, listed: Listed, at_listed: Tensor, scale: Tensor) -> Tensor:
        """The gradient of each entry; anything where it does not count."""


class ZlprLabels:
    """``log(1 + sum (1 - t) e^s) + log(1 + sum t e^-s)``: two walks over the labels."""

    separable = False

    def __init__(self, smoothing: float, normalisers: Tensor | None) -> None:
        self.normalisers = normalisers
        self._log_rest = math.log1p(-smoothing)
        self._log_some = math.log(smoothing) if smoothing else None
        self._above: list[Tensor] = []
        self._below: list[Tensor] = []

    def look_(self, scores: Tensor, scale: Tensor | None) -> None:  # noqa: ARG002 — sums need no scale
        above, below = zlpr.slab_sums("auto", scores, self._log_some is not None)
        self._above.append(above)
        self._below.append(below)

    def finish(self, listed: Listed, at_listed: Tensor) -> Tensor:
        if self.normalisers is not None:
            return self.normalisers.sum(0)
        above = torch.stack(self._above).logsumexp(0)
        if self._log_some is not None:
            above = above + self._log_rest
        terms = -at_listed
        if listed.values is not None:
            labels = listed.values.to(at_listed.dtype)
            above = torch.logaddexp(above, listed.logsumexp(torch.log1p(-labels) + at_listed))
            terms = torch.log(labels) + terms
        below = listed.logsumexp(terms)
        if self._log_some is not None:
            below = torch.logaddexp(below, torch.stack(self._below).logsumexp(0) + self._log_some)
        both = torch.stack([above, below])
        self.normalisers = torch.logaddexp(both, both.new_zeros(()))
        return self.normalisers.sum(0)

    def turn_(self, scores: Tensor, scale: Tensor) -> None:
        above, below = self._known()
        if self._log_some is None:
            zlpr.slab_gradient_("auto", scores, scale, above, None)
        else:
            less = above - self._log_rest, below - self._log_some
            zlpr.slab_gradient_("auto", scores, scale, *less)

    def gradient_of_listed(self, listed: Listed, at_listed: Tensor, scale: Tensor) -> Tensor:
        above, below = map(listed.of_rows, self._known())
        if listed.values is None:
            gradient = -torch.exp(-at_listed - below)
        else:
            labels = listed.values.to(at_listed.dtype)
            gradient = torch.exp(torch.log1p(-labels) + at_listed - above)
            gradient = gradient - torch.exp(torch.log(labels) - at_listed - below)
        return gradient * listed.of_rows(scale)

    def _known(self) -> tuple[Tensor, Tensor]:
        if self.normalisers is None:
            raise RuntimeError("normalisers: expected a first walk over all slabs")
        above, below = self.normalisers
        return above, below


class LogisticLabels:
    """``sum softplus(s) - t s``: one walk, since every label stands for itself."""

    separable = True

    def __init__(self, smoothing: float, normalisers: Tensor | None) -> None:
        self.normalisers = normalisers
        self._smoothing = smoothing
        self._losses: list[Tensor] = []

    def look_(self, scores: Tensor, scale: Tensor | None) -> None:
        self._losses.append(zlpr.logistic_slab_("auto", scores, scale, self._smoothing))

    def finish(self, listed: Listed, at_listed: Tensor) -> Tensor:
        # For a label of 1 softplus(-s), where softplus(s) - s would cancel.
        own = -functional.logsigmoid(at_listed)
        if listed.values is not None:
            labels = listed.values.to(at_listed.dtype)
            own = labels * own - (1.0 - labels) * functional.logsigmoid(-at_listed)
        return torch.stack(self._losses).sum(0) + listed.sum(own)

    def turn_(self, scores: Tensor, scale: Tensor) -> None:
        self.look_(scores, scale)

    def gradient_of_listed(self, listed: Listed, at_listed: Tensor, scale: Tensor) -> Tensor:
        if listed.values is None:
            gradient = -torch.sigmoid(-at_listed)
        else:
            gradient = torch.sigmoid(at_listed) - listed.values.to(at_listed.dtype)
        return gradient * listed.of_rows(scale)
