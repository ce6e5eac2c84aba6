"""Base class of the scikit-learn estimators: checks, training, and prediction in slices of rows."""

# scikit-learn calls features X.
# ruff: noqa: N803, N806

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state, compute_sample_weight
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from lastlayer.integrations._linear_losses import RowLoss
from lastlayer.integrations._linear_objective import (
    Array,
    Objective,
    linear_scores,
    row_slices,
    tensor,
)
from lastlayer.integrations._linear_solvers import Solution, solve_adam, solve_lbfgs
from lastlayer.integrations._sklearn_targets import Target, target_of

# Standard deviation of scores under the prior of alpha="scale".
_DEVIATION = 10.0


class LinearClassifier(ClassifierMixin, BaseEstimator):
    """A linear multiclass or multi-label classifier."""

    _kind: str
    _in_sparse: bool
    coef_: Array
    intercept_: Array
    classes_: Array

    def __init__(
        self,
        *,
        alpha: float | str,
        fit_intercept: bool,
        class_weight: Any,
        solver: str,
        max_iter: int,
        tol: float,
        batch_size: int,
        learning_rate: float,
        n_iter_no_change: int,
        random_state: Any,
    ) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.solver = solver
        self.max_iter = max_iter
        self.tol = tol
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.n_iter_no_change = n_iter_no_change
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train the model.

        Args:
            X: features ``(rows, n_features)``: an array, a data frame, or a sparse matrix.
            y: class labels ``(rows,)``; or an indicator matrix of 0 and 1, ``(rows, n_labels)``,
                an array or a sparse matrix.
            sample_weight: weight of each row, ``(rows,)``; 2 is equivalent to repeating the row.
        """
        self._check_parameters()
        X, y = validate_data(
            self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], order="C",
            multi_output=True,
        )  # fmt: skip
        target = target_of(y)
        weights = self._row_weights(X, y, sample_weight, target)
        self._kind, self._in_sparse = target.kind, target.in_sparse
        self.classes_ = target.classes
        self._train(X, target, weights, check_random_state(self.random_state))
        return self

    def _train(
        self, X: Any, target: Target, weights: Array | None, random: np.random.RandomState
    ) -> None:
        features = StandardScaler(with_mean=not sparse.issparse(X)).fit(X, sample_weight=weights)
        self.alpha_ = self._penalty(features, weights)
        objective = Objective(
            features_of(X),
            target.labels,
            None if weights is None else tensor(weights),
            self._loss(target.kind),
            target.n_scores,
            self.alpha_,
            math.sqrt(features.var_.sum()) or 1.0,
            tensor(features.mean_.astype(np.float64)),
        )
        found = self._solve(objective, tensor(np.empty(0, X.dtype)).dtype, random)
        if found.problem is not None:
            warnings.warn(
                f"{found.problem}; increase max_iter or tol, or scale the features",
                ConvergenceWarning,
                stacklevel=4,
            )
        self.coef_, self.intercept_ = found.weight.numpy(), found.bias.numpy()
        self.n_iter_ = found.n_iter

    def _penalty(self, features: StandardScaler, weights: Array | None) -> float:
        """``alpha`` as given, or from a prior with a standard deviation of scores of 10."""
        if self.alpha != "scale":
            return float(self.alpha)
        rows = features.n_samples_seen_ if weights is None else weights.sum(dtype=np.float64)
        return float(features.var_.sum() / (rows * _DEVIATION**2))

    def _solve(
        self, objective: Objective, dtype: torch.dtype, random: np.random.RandomState
    ) -> Solution:
        shared: dict[str, Any] = {
            "fit_intercept": bool(self.fit_intercept),
            "max_iter": int(self.max_iter),
            "tol": float(self.tol),
        }
        if self.solver == "lbfgs":
            return solve_lbfgs(objective, dtype, **shared)
        return solve_adam(
            objective, dtype, random, **shared, batch_size=int(self.batch_size),
            learning_rate=float(self.learning_rate), patience=int(self.n_iter_no_change),
        )  # fmt: skip

    def _row_weights(self, X: Any, y: Any, sample_weight: Any, target: Target) -> Array | None:
        """The weight of each row; None if all are 1."""
        if sample_weight is None and self.class_weight is None:
            return None
        weights: Array = _check_sample_weight(
            sample_weight, X, dtype=X.dtype, ensure_non_negative=True
        )
        if self.class_weight is not None:
            if target.kind == "labels":
                raise ValueError(
                    "class_weight: expected None for multi-label targets, got "
                    f"{self.class_weight!r}; pass sample_weight to fit instead"
                )
            weights = weights * compute_sample_weight(self.class_weight, np.ravel(y))
        if not (weights > 0).any():
            raise ValueError("sample_weight: expected at least one weight above 0, got only zeros")
        return None if (weights == 1).all() else weights.astype(X.dtype, copy=False)

    def decision_function(self, X: Any) -> Array:
        """Scores ``(rows, n_classes)``; for two classes ``(rows,)``, above 0 for the second class.

        Labels with a score above 0 are predicted.
        """
        found = _joined(map(self._decision, self._scores(X)))
        return found.ravel() if self._kind == "two" else found

    def predict(self, X: Any) -> Any:
        """Classes ``(rows,)``; or labels as a matrix of 0 and 1, sparse if y was sparse."""
        decisions = map(self._decision, self._scores(X))
        if self._kind == "classes":
            return self.classes_[_joined(each.argmax(1) for each in decisions)]
        chosen = ((each > 0).long() for each in decisions)
        if self._in_sparse:
            return sparse.vstack([sparse.csr_array(each.numpy()) for each in chosen], format="csr")
        found = _joined(chosen)
        return self.classes_[found.ravel()] if self._kind == "two" else found

    def predict_proba(self, X: Any) -> Array:
        """Probabilities ``(rows, n_classes)``, or of each label ``(rows, n_labels)``."""
        found = _joined(map(self._probabilities, self._scores(X)))
        return np.concatenate([1.0 - found, found], 1) if self._kind == "two" else found

    def _scores(self, X: Any) -> Iterator[Tensor]:
        """Linear scores of consecutive slices of rows, in the dtype of the model."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=self.coef_.dtype, reset=False)
        features, weight, bias = features_of(X), tensor(self.coef_), tensor(self.intercept_)
        slices = row_slices(X.shape[0], len(bias))
        return (linear_scores(features[part], weight, bias) for part in slices)

    @abstractmethod
    def _loss(self, kind: str) -> RowLoss:
        """The loss for "two" classes, more "classes" or "labels"."""

    @abstractmethod
    def _decision(self, scores: Tensor) -> Tensor:
        """The decision function: above 0 for predicted labels, highest for the predicted class."""

    @abstractmethod
    def _probabilities(self, scores: Tensor) -> Tensor:
        """Probabilities of all labels or classes; for two classes only of the second."""

    def _check_parameters(self) -> None:
        if not isinstance(self.alpha, str):
            check_number("alpha", self.alpha, 0.0)
        elif self.alpha != "scale":
            raise ValueError(f"alpha: expected a number or 'scale', got {self.alpha!r}")
        check_number("tol", self.tol, 0.0)
        check_number("learning_rate", self.learning_rate, 0.0, above=True)
        for name in ("max_iter", "batch_size", "n_iter_no_change"):
            _check_whole(name, getattr(self, name))
        if self.solver not in ("lbfgs", "adam"):
            raise ValueError(f"solver: expected 'lbfgs' or 'adam', got {self.solver!r}")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.classifier_tags.multi_label = True
        return tags


def features_of(X: Any) -> Any:
    """Dense features as a tensor; sparse features unchanged."""
    return tensor(X) if isinstance(X, np.ndarray) else X


def _joined(slices: Iterable[Tensor]) -> Array:
    found: Array = torch.cat(list(slices)).numpy()
    return found


def check_number(
    name: str, value: Any, least: float, below: float = math.inf, *, above: bool = False
) -> None:
    """Check a number of at least ``least``, or ``above`` it, and below ``below``."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    number = float(value)
    if not (least < number if above else least <= number) or not number < below:
        start = f"above {least:g}" if above else f"at least {least:g}"
        end = "finite" if below == math.inf else f"below {below:g}"
        raise ValueError(f"{name}: expected {start} and {end}, got {value}")


def _check_whole(name: str, value: Any) -> None:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected a whole number, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
