"""Losses of linear models: per row from its scores, or fused."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer.fused import linear_entmax_loss, linear_zlpr_loss
from lastlayer.losses.entmax import sparsemax_loss
from lastlayer.losses.multilabel import multilabel_sparsemax_loss
from lastlayer.losses.zlpr import zlpr_loss_from_indices


class Lists(NamedTuple):
    """Lists of labels in CSR: row i has ``indices[offsets[i] : offsets[i + 1]]``."""

    indices: Tensor
    offsets: Tensor

    @property
    def counts(self) -> Tensor:
        """The number of labels of each row."""
        return self.offsets.diff()

    def some(self, rows: slice | NDArray[np.int64]) -> "Lists":
        """The lists of a slice of rows, or of the given rows in that order."""
        if isinstance(rows, slice):
            offsets = self.offsets[rows.start : rows.stop + 1]
            return Lists(self.indices[offsets[0] : offsets[-1]], offsets - offsets[0])
        chosen = torch.from_numpy(rows)
        counts = self.counts[chosen]
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        shift = torch.repeat_interleave(self.offsets[chosen] - offsets[:-1], counts)
        return Lists(self.indices[torch.arange(len(shift)) + shift], offsets)

    def dense(self, n_labels: int) -> Tensor:
        """The labels as a bool matrix, ``(rows, n_labels)``."""
        labels = torch.zeros(len(self.offsets) - 1, n_labels, dtype=torch.bool)
        labels[torch.repeat_interleave(self.counts), self.indices] = True
        return labels


class RowLoss(NamedTuple):
    """A loss for linear models.

    Attributes:
        of_scores: computes the loss of each row from scores ``(rows, n)`` and labels.
        fused: computes the summed loss from hidden, weight, bias, labels and row weights (None for
            1), without storing scores; None if there is no fused loss.
    """

    of_scores: Callable[[Tensor, Lists], Tensor]
    fused: Callable[[Tensor, Tensor, Tensor, Lists, Tensor | None], Tensor] | None = None


def _zlpr(scores: Tensor, labels: Lists) -> Tensor:
    return zlpr_loss_from_indices(scores, labels.indices, labels.offsets, reduction="none")


def _fused_zlpr(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Lists, row_weight: Tensor | None
) -> Tensor:
    reduction = "sum" if row_weight is None else "none"
    loss = linear_zlpr_loss(
        hidden, weight, labels.indices, bias, offsets=labels.offsets, reduction=reduction
    )
    return loss if row_weight is None else (loss * row_weight).sum()


def _fused_sparsemax(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Lists, row_weight: Tensor | None
) -> Tensor:
    return linear_entmax_loss(
        hidden, weight, labels.indices, bias, alpha=2.0, row_weight=row_weight, reduction="sum"
    )


def _two_class_sparsemax(scores: Tensor, labels: Lists) -> Tensor:
    """Sparsemax loss with one score per row for the second class; the first class has score 0."""
    return sparsemax_loss(torch.nn.functional.pad(scores, (1, 0)), labels.counts, reduction="none")


# For one score per row this is the logistic loss.
ZLPR = RowLoss(_zlpr, _fused_zlpr)
SPARSEMAX_OF_TWO = RowLoss(_two_class_sparsemax)
SPARSEMAX_OF_CLASSES = RowLoss(
    lambda scores, labels: sparsemax_loss(scores, labels.indices, reduction="none"),
    _fused_sparsemax,
)
SPARSEMAX_OF_LABELS = RowLoss(
    lambda scores, labels: multilabel_sparsemax_loss(
        scores, labels.dense(scores.shape[1]), reduction="none"
    )
)
