"""The penalised loss of a linear model and its gradient, computed in slices of rows."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer.integrations._linear_losses import Lists, RowLoss

Array = NDArray[Any]
# Maximum number of scores in memory: 32 MB in float64.
MOST_SCORES = 1 << 22
# With at most this many labels, dense scores are faster than the fused loss.
_FEW_LABELS = 64


class Evaluated(NamedTuple):
    """A sum of losses, and its gradients by weight and bias."""

    value: float
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Objective:
    r"""The weighted mean loss of a linear model, plus an L2 penalty of its weight.

    .. math:: \frac{1}{\sum_i w_i} \sum_i w_i\, L(W x_i + b, y_i) + \frac{\alpha}{2} \|W\|^2

    Attributes:
        features: ``(rows, d)``, a tensor or a CSR matrix of SciPy, float32 or float64.
        labels: the lists of labels of the rows.
        row_weight: ``(rows,)`` of that dtype, or None if all are 1.
        loss: the loss of a row.
        n_scores: number of scores per row.
        alpha: the penalty.
        unit: root mean square distance of rows from their mean. Solvers divide by it, so that the
            scale of the features does not matter.
        mean: the mean row, float64 ``(d,)``.
    """

    features: Any
    labels: Lists
    row_weight: Tensor | None
    loss: RowLoss
    n_scores: int
    alpha: float
    unit: float
    mean: Tensor

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        return int(self.features.shape[0])

    def __call__(
        self, weight: Tensor, bias: Tensor, rows: NDArray[np.int64] | None = None
    ) -> Evaluated:
        """The objective, or an unbiased estimate of it from some of the rows."""
        features, labels, row_weight = self.features, self.labels, self.row_weight
        if rows is not None:
            features, labels = features[rows], labels.some(rows)
            row_weight = None if row_weight is None else row_weight[rows]
        summed = _fused if isinstance(features, Tensor) and self._has_fused else _in_slices
        found = summed(self.loss, features, labels, row_weight, weight, bias)
        total = self.n_rows if self.row_weight is None else float(self.row_weight.double().sum())
        scale = self.n_rows / (features.shape[0] * total)
        penalty = 0.5 * self.alpha * float(torch.linalg.vector_norm(weight)) ** 2
        return Evaluated(
            found.value * scale + penalty,
            found.weight * scale + self.alpha * weight,
            found.bias * scale,
        )

    @property
    def _has_fused(self) -> bool:
        return self.loss.fused is not None and self.n_scores > _FEW_LABELS


def row_slices(n_rows: int, n_scores: int) -> Iterator[slice]:
    """Slices of rows with at most ``MOST_SCORES`` scores each."""
    step = max(1, MOST_SCORES // max(1, n_scores))
    for first in range(0, n_rows, step):
        yield slice(first, min(n_rows, first + step))


def linear_scores(features: Any, weight: Tensor, bias: Tensor) -> Tensor:
    """The scores of features in a tensor, or in a CSR matrix."""
    if isinstance(features, Tensor):
        return torch.addmm(bias, features, weight.T)
    return tensor(features @ weight.T.numpy()).add_(bias)


def tensor(array: Array) -> Tensor:
    """An array as a tensor without a copy; read-only arrays must not be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _in_slices(
    loss: RowLoss,
    features: Any,
    labels: Lists,
    row_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor,
) -> Evaluated:
    total, grad_weight, grad_bias = 0.0, torch.zeros_like(weight), torch.zeros_like(bias)
    for part in row_slices(features.shape[0], len(bias)):
        some = features[part]
        scores = linear_scores(some, weight, bias).requires_grad_()
        losses = loss.of_scores(scores, labels.some(part))
        value = losses.sum() if row_weight is None else losses @ row_weight[part]
        (grad,) = torch.autograd.grad(value, scores)
        total += float(value.detach())
        grad_bias += grad.sum(0)
        if isinstance(some, Tensor):
            grad_weight.addmm_(grad.T, some)
        else:
            # The sparse factor must be on the left for SciPy's sparse product.
            grad_weight += tensor(some.T @ grad.numpy()).T
    return Evaluated(total, grad_weight, grad_bias)


def _fused(
    loss: RowLoss,
    features: Tensor,
    labels: Lists,
    row_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor,
) -> Evaluated:
    leaves = weight.detach().requires_grad_(), bias.detach().requires_grad_()
    value = loss.fused(features, *leaves, labels, row_weight)  # type: ignore[misc]
    return Evaluated(float(value.detach()), *torch.autograd.grad(value, leaves))
