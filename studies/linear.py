"""Linear models with any loss of scores, fitted by L-BFGS, for the convex studies."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Loss = Callable[[Tensor], Tensor]


class Linear:
    """Scores ``W x + b`` for rows of features.

    Args:
        weight: ``(n_classes, n_features + 1)``; the last column is the bias.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, features: Tensor) -> Tensor:
        return features @ self.weight[:, :-1].T + self.weight[:, -1]


def fit_path(
    features: Tensor, n_classes: int, loss: Loss, penalties: Sequence[float], steps: int = 100,
    start: Tensor | None = None,
) -> Iterator[tuple[float, Linear]]:  # fmt: skip
    """Minimises ``loss(scores) + penalty / 2 · |W|²`` for each penalty, the largest first.

    Each fit starts from the previous one. Biases are not penalised. Products are in the dtype of
    the features, L-BFGS is in float64.

    Args:
        features: ``(n, d)``.
        n_classes: number of scores.
        loss: differentiable loss of scores ``(n, n_classes)``.
        penalties: penalties to try.
        steps: largest number of L-BFGS iterations.
        start: initial biases of the first fit, ``(n_classes,)``; 0 by default.
    """
    from scipy.optimize import minimize

    rows = torch.cat([features, features.new_ones(len(features), 1)], 1)
    shape = n_classes, rows.shape[1]
    at: NDArray[np.float64] = np.zeros(n_classes * rows.shape[1])
    if start is not None:
        at.reshape(shape)[:, -1] = start.detach().double().numpy()
    for penalty in sorted(penalties, reverse=True):

        def objective(
            flat: NDArray[np.float64], penalty: float = penalty
        ) -> tuple[float, NDArray[np.float64]]:
            weight = torch.from_numpy(flat).view(shape).to(rows.dtype)
            shrunk = weight.clone()
            shrunk[:, -1] = 0.0
            scores = (rows @ weight.T).requires_grad_()
            value = loss(scores)
            (slope,) = torch.autograd.grad(value, scores)
            total = value.item() + 0.5 * penalty * shrunk.square().sum().item()
            return total, (slope.T @ rows + penalty * shrunk).flatten().double().numpy()

        made = minimize(objective, at, jac=True, method="L-BFGS-B", options={"maxiter": steps})
        at = made.x
        yield penalty, Linear(torch.from_numpy(at).view(shape).to(features.dtype))
