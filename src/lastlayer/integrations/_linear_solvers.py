"""Minimise the objective of a linear model: by L-BFGS on all rows, or by Adam in batches."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lastlayer.integrations._linear_objective import Objective

# Number of past steps from which L-BFGS estimates the curvature.
_HISTORY = 10


class Solution(NamedTuple):
    """The result of a solver; ``problem`` says why it has not converged, or is None."""

    weight: Tensor
    bias: Tensor
    n_iter: int
    problem: str | None


def solve_lbfgs(
    objective: Objective, dtype: torch.dtype, *, fit_intercept: bool, max_iter: int, tol: float
) -> Solution:
    """Stops if no entry of the gradient exceeds ``tol``, or if changes are only rounding errors.

    Variables are ``weight * unit`` and, instead of intercepts, the scores of the mean row, all in
    float64. These are nearly uncorrelated, which takes fewer steps. Memory: about 30 times the
    weight in float64.
    """
    n_scores, width, unit = objective.n_scores, objective.features.shape[1], objective.unit
    flat = torch.zeros(n_scores * (width + fit_intercept), dtype=torch.float64)
    mean = objective.mean

    def model() -> tuple[Tensor, Tensor]:
        weight, *of_mean = flat.split(n_scores * width)
        weight = (weight / unit).view(n_scores, width)
        bias = of_mean[0] - weight @ mean if of_mean else weight.new_zeros(n_scores)
        return weight.to(dtype), bias.to(dtype)

    def value_and_gradient() -> float:
        found = objective(*model())
        weight, bias = found.weight.double(), found.bias.double()
        if fit_intercept:
            weight = torch.addr(weight, bias, mean, alpha=-1.0)
        pieces = [weight.ravel() / unit]
        flat.grad = torch.cat([*pieces, bias] if fit_intercept else pieces)
        return found.value

    steps = torch.optim.LBFGS(
        [flat],
        max_iter=max_iter,
        max_eval=20 * max_iter,
        tolerance_grad=tol,
        tolerance_change=torch.finfo(dtype).eps / 8,
        history_size=_HISTORY,
        line_search_fn="strong_wolfe",
    )
    steps.step(value_and_gradient)
    n_iter, problem = int(steps.state[flat]["n_iter"]), None
    if n_iter >= max_iter:
        value_and_gradient()
        largest = float(flat.grad.abs().max())  # type: ignore[union-attr]
        if not largest <= tol:
            problem = (
                f"L-BFGS did not converge in {max_iter} iterations: the gradient is {largest:.2g}"
            )
    weight, bias = model()
    return Solution(weight.clone(), bias.clone(), n_iter, problem)


def solve_adam(
    objective: Objective,
    dtype: torch.dtype,
    random: np.random.RandomState,
    *,
    fit_intercept: bool,
    max_iter: int,
    tol: float,
    batch_size: int,
    learning_rate: float,
    patience: int,
) -> Solution:
    """Stops if the loss of an epoch has not improved by more than ``tol`` for ``patience`` epochs.

    The learning rate is for features with standard deviation 1, and decays with the square root of
    the epoch. Memory: 4 times the weight.
    """
    n_rows, deviation = objective.n_rows, objective.unit / math.sqrt(objective.features.shape[1])
    rates = learning_rate / deviation, learning_rate
    weight = torch.zeros(objective.n_scores, objective.features.shape[1], dtype=dtype)
    bias = torch.zeros(objective.n_scores, dtype=dtype)
    groups = [{"params": [each]} for each in ((weight, bias) if fit_intercept else (weight,))]
    steps = torch.optim.Adam(groups)
    best, waited = math.inf, 0
    for epoch in range(1, max_iter + 1):
        for group, rate in zip(steps.param_groups, rates, strict=False):
            group["lr"] = rate / math.sqrt(epoch)
        order, total = random.permutation(n_rows), 0.0
        for first in range(0, n_rows, batch_size):
            rows = order[first : first + batch_size]
            found = objective(weight, bias, rows)
            weight.grad, bias.grad = found.weight, found.bias
            steps.step()
            total += found.value * len(rows)
        waited = 0 if total / n_rows < best - tol else waited + 1
        best = min(best, total / n_rows)
        if waited >= patience:
            return Solution(weight, bias, epoch, None)
    problem = f"Adam did not converge in {max_iter} epochs, the loss still decreased"
    return Solution(weight, bias, max_iter, problem)
