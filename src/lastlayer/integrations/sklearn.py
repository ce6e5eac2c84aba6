"""Linear classifiers for scikit-learn, trained with ZLPR or with the sparsemax loss."""

# scikit-learn calls features X.
# ruff: noqa: N803, N806

from typing import Any

try:
    from sklearn.utils.validation import validate_data as _  # noqa: F401 - new in 1.6
except ImportError as error:
    raise ImportError(
        "lastlayer.integrations.sklearn needs scikit-learn 1.6 or newer: "
        'pip install "lastlayer[sklearn]"'
    ) from error

import numpy as np
import torch
from sklearn.utils.metaestimators import available_if
from torch import Tensor
from torch.nn.functional import logsigmoid

from lastlayer.integrations._linear_losses import (
    SPARSEMAX_OF_CLASSES,
    SPARSEMAX_OF_LABELS,
    SPARSEMAX_OF_TWO,
    ZLPR,
    RowLoss,
)
from lastlayer.integrations._linear_objective import MOST_SCORES, Array
from lastlayer.integrations._sklearn_base import LinearClassifier, check_number
from lastlayer.integrations._sklearn_targets import Target
from lastlayer.losses.calibration import ZLPRCalibrator
from lastlayer.losses.zlpr import zlpr_probability
from lastlayer.maps.sparsemax import sparsemax

__all__ = ["SparsemaxClassifier", "ZLPRClassifier"]


class ZLPRClassifier(LinearClassifier):
    r"""A linear multi-label or multiclass classifier, trained with ZLPR.

    .. math:: \min_{W, b}\; \frac{1}{\sum_i w_i} \sum_i w_i\, L(W x_i + b, y_i)
              + \frac{\alpha}{2} \|W\|^2

    with L as in :func:`lastlayer.zlpr_loss`. Choose it if each row has a few of many labels. The
    task follows from y:

    * a matrix of 0 and 1, dense or sparse: multi-label; a row may have no labels. Labels with a
      score above 0 are predicted. All labels are trained jointly, unlike in
      ``OneVsRestClassifier(LogisticRegression())``.
    * more than two classes: the class with the highest score is predicted.
    * two classes: ZLPR with one score is the logistic loss, so this equals
      ``LogisticRegression(C=1 / (alpha * rows))``.

    With ``alpha="scale"`` the penalty adapts to the scale of the features:

    .. math:: \alpha = \frac{\operatorname{E} \|x - \operatorname{E} x\|^2}{100 \sum_i w_i}.

    This corresponds to a normal prior under which scores have a standard deviation of 10. Scaling
    all features does not change predictions, and rows of length 1, as tf-idf produces them, are
    penalised like features with standard deviation 1. A number is used unchanged.

    Probabilities of two classes are :math:`\sigma(s)`, as in logistic regression. Those of more
    classes are a softmax, and those of labels :math:`\sigma(2s)`: training on hard labels
    determines the sign of a score, but its scale is not that of log-odds, see
    :func:`lastlayer.zlpr_probability`. With ``calibrate=True``, :class:`lastlayer.ZLPRCalibrator`
    fits one curve per label on held-out rows; the decision function is then the log-odds of these
    curves, so that it agrees with ``predict`` and ``predict_proba``. (For more than two classes the
    probabilities of the curves are normalised to sum to 1.)

    Memory for many labels: about 30 matrices like ``coef_`` in float64 for L-BFGS, or 4 in the
    dtype of the features for Adam. The scores of all rows and labels are never stored together,
    neither in training nor to predict a sparse matrix. Everything runs on the CPU; for a GPU see
    :class:`lastlayer.heads.MultiLabel`.

    Args:
        alpha: L2 penalty of the weights, at least 0, or "scale"; intercepts are not penalised.
        fit_intercept: whether each label has an intercept.
        class_weight: None, "balanced" or weights by class, as in scikit-learn; not for labels.
        solver: "lbfgs" with all rows in each step, or "adam" with batches, for many rows.
        max_iter: maximum number of iterations of L-BFGS, or epochs of Adam.
        tol: L-BFGS stops if no entry of the gradient exceeds it, where the gradient of the weights
            is divided by the root mean square distance of rows from their mean; Adam if the loss of
            an epoch does not improve by more than it.
        batch_size: batch size of Adam.
        learning_rate: learning rate of Adam in its first epoch, for features with standard
            deviation 1; it decays with the square root of the epoch.
        n_iter_no_change: number of epochs without improvement after which Adam stops.
        calibrate: whether to fit probabilities and thresholds on held-out rows.
        validation_fraction: share of rows to hold out, above 0 and below 1; at most 4 million
            scores are used.
        random_state: random state of the order of rows and of the held-out rows.

    Attributes:
        coef_: ``(n_scores, n_features)``; one score for two classes.
        intercept_: ``(n_scores,)``.
        classes_: the classes; for labels 0 to ``n_labels - 1``.
        alpha_: the penalty.
        n_iter_: number of iterations or epochs.
        calibrator_: the fitted :class:`lastlayer.ZLPRCalibrator`, or None.
        n_features_in_: number of features.
        feature_names_in_: names of the features, if X has names.

    Example:
        >>> X = [[0.0], [1.0], [2.0], [3.0]]
        >>> Y = [[0, 0], [1, 0], [1, 0], [1, 1]]
        >>> ZLPRClassifier(alpha=1e-3).fit(X, Y).predict(X)
        array([[0, 0],
               [1, 0],
               [1, 0],
               [1, 1]])
    """

    def __init__(
        self,
        *,
        alpha: float | str = "scale",
        fit_intercept: bool = True,
        class_weight: Any = None,
        solver: str = "lbfgs",
        max_iter: int = 500,
        tol: float = 1e-4,
        batch_size: int = 256,
        learning_rate: float = 0.02,
        n_iter_no_change: int = 5,
        calibrate: bool = False,
        validation_fraction: float = 0.1,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            alpha=alpha, fit_intercept=fit_intercept, class_weight=class_weight, solver=solver,
            max_iter=max_iter, tol=tol, batch_size=batch_size, learning_rate=learning_rate,
            n_iter_no_change=n_iter_no_change, random_state=random_state,
        )  # fmt: skip
        self.calibrate = calibrate
        self.validation_fraction = validation_fraction

    def _train(
        self, X: Any, target: Target, weights: Array | None, random: np.random.RandomState
    ) -> None:
        self.calibrator_ = None
        if not self.calibrate:
            super()._train(X, target, weights, random)
            return
        kept, held = self._split(X.shape[0], target.n_scores, weights, random)
        labels = target.labels
        some = target._replace(labels=labels.some(kept))
        super()._train(X[kept], some, None if weights is None else weights[kept], random)
        (scores,) = self._scores(X[held])
        calibrator = ZLPRCalibrator(target.n_scores)
        self.calibrator_ = calibrator.fit(scores, labels.some(held).dense(target.n_scores))

    def _split(
        self, n_rows: int, n_scores: int, weights: Array | None, random: np.random.RandomState
    ) -> tuple[Array, Array]:
        """Rows for training, and held-out rows; rows with weight 0 are in neither."""
        rows = np.arange(n_rows) if weights is None else np.flatnonzero(weights)
        share = round(self.validation_fraction * len(rows))
        n_held = max(1, min(share, MOST_SCORES // n_scores))
        if n_held >= len(rows):
            raise ValueError(
                f"validation_fraction: expected to leave rows for training, got "
                f"{self.validation_fraction} of {len(rows)} rows"
            )
        order = random.permutation(rows)
        return np.sort(order[n_held:]), np.sort(order[:n_held])

    def _loss(self, kind: str) -> RowLoss:  # noqa: ARG002
        return ZLPR

    def _decision(self, scores: Tensor) -> Tensor:
        if self.calibrator_ is None:
            return scores
        return (self.calibrator_.slope * scores + self.calibrator_.bias).to(scores.dtype)

    def _probabilities(self, scores: Tensor) -> Tensor:
        decision = self._decision(scores)
        if self._kind == "classes":
            # With one curve per class: one-vs-rest probabilities, divided by their sum.
            logits = decision if self.calibrator_ is None else logsigmoid(decision)
            return torch.softmax(logits, -1)
        if self._kind == "labels" and self.calibrator_ is None:
            return zlpr_probability(decision)
        return torch.sigmoid(decision)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_number("validation_fraction", self.validation_fraction, 0.0, 1.0, above=True)


def _has_probabilities(estimator: Any) -> bool:
    if getattr(estimator, "_kind", None) == "labels":
        raise AttributeError(
            "predict_proba: expected classes, got labels; sparsemax has no probability per label, "
            "but one distribution over all labels: use predict_distribution"
        )
    return True


class SparsemaxClassifier(LinearClassifier):
    r"""A linear multiclass or multi-label classifier with the sparsemax loss.

    It minimises the same objective as :class:`ZLPRClassifier`, with
    :func:`lastlayer.sparsemax_loss` for classes and :func:`lastlayer.multilabel_sparsemax_loss` for
    labels. Choose it if most classes should have a probability of exactly 0.

    * For classes, probabilities are ``sparsemax(scores)``. For two classes there is one score s,
      and the probability of the second class is :math:`\min(1, \max(0, (1 + s) / 2))`.
    * For labels, ``sparsemax(scores)`` is one distribution over all labels of a row, see
      :meth:`predict_distribution`. Labels with a probability above ``threshold`` are predicted; a
      threshold of 0 predicts at least one. Training rows without labels are ignored. There is no
      ``predict_proba``, since the distribution does not give the probability of each label. The
      decision function is above 0 for predicted labels.

    Args:
        alpha: L2 penalty of the weights, at least 0, or "scale", as in :class:`ZLPRClassifier`;
            intercepts are not penalised.
        threshold: for labels: those with a higher probability are predicted; from 0 to below 1.
            Choose it on held-out data, for example with a grid search.
        fit_intercept: whether each label has an intercept.
        class_weight: None, "balanced" or weights by class, as in scikit-learn; not for labels.
        solver: "lbfgs" with all rows in each step, or "adam" with batches, for many rows.
        max_iter: maximum number of iterations of L-BFGS, or epochs of Adam.
        tol: L-BFGS stops if no entry of the gradient exceeds it, where the gradient of the weights
            is divided by the root mean square distance of rows from their mean; Adam if the loss of
            an epoch does not improve by more than it.
        batch_size: batch size of Adam.
        learning_rate: learning rate of Adam in its first epoch, for features with standard
            deviation 1; it decays with the square root of the epoch.
        n_iter_no_change: number of epochs without improvement after which Adam stops.
        random_state: random state of the order of rows.

    Attributes:
        coef_: ``(n_scores, n_features)``; one score for two classes.
        intercept_: ``(n_scores,)``.
        classes_: the classes; for labels 0 to ``n_labels - 1``.
        alpha_: the penalty.
        n_iter_: number of iterations or epochs.
        n_features_in_: number of features.
        feature_names_in_: names of the features, if X has names.

    Example:
        >>> X = [[0.0], [1.0], [4.0], [5.0]]
        >>> model = SparsemaxClassifier().fit(X, ["a", "a", "b", "b"])
        >>> model.predict([[-1.0], [6.0]]), model.predict_proba([[-1.0]])
        (array(['a', 'b'], dtype='<U1'), array([[1., 0.]]))

    Reference:
        Martins and Astudillo, From Softmax to Sparsemax, ICML 2016, arXiv:1602.02068.
    """

    def __init__(
        self,
        *,
        alpha: float | str = "scale",
        threshold: float = 0.0,
        fit_intercept: bool = True,
        class_weight: Any = None,
        solver: str = "lbfgs",
        max_iter: int = 500,
        tol: float = 1e-4,
        batch_size: int = 256,
        learning_rate: float = 0.02,
        n_iter_no_change: int = 5,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            alpha=alpha, fit_intercept=fit_intercept, class_weight=class_weight, solver=solver,
            max_iter=max_iter, tol=tol, batch_size=batch_size, learning_rate=learning_rate,
            n_iter_no_change=n_iter_no_change, random_state=random_state,
        )  # fmt: skip
        self.threshold = threshold

    @available_if(_has_probabilities)
    def predict_proba(self, X: Any) -> Array:
        """Probabilities of classes, ``(rows, n_classes)``; not available for labels."""
        return super().predict_proba(X)

    def predict_distribution(self, X: Any) -> Array:
        """Sparse distributions over classes or labels, ``(rows, n)``; each row sums to 1."""
        return super().predict_proba(X)

    def _train(
        self, X: Any, target: Target, weights: Array | None, random: np.random.RandomState
    ) -> None:
        counts = target.labels.counts.numpy()
        if target.kind == "labels" and not counts.all():
            kept = np.flatnonzero(counts)
            if not len(kept) or (weights is not None and not weights[kept].any()):
                raise ValueError(
                    "y: expected at least one row with a label and a weight above 0, got none; the "
                    "sparsemax loss cannot use rows without labels"
                )
            X, weights = X[kept], None if weights is None else weights[kept]
            target = target._replace(labels=target.labels.some(kept))
        super()._train(X, target, weights, random)

    def _loss(self, kind: str) -> RowLoss:
        losses = {
            "two": SPARSEMAX_OF_TWO,
            "classes": SPARSEMAX_OF_CLASSES,
            "labels": SPARSEMAX_OF_LABELS,
        }
        return losses[kind]

    def _decision(self, scores: Tensor) -> Tensor:
        if self._kind != "labels":
            return scores
        probs = sparsemax(scores)
        # The threshold that sparsemax subtracts from all scores of a row.
        subtracted = scores.amax(1, keepdim=True) - probs.amax(1, keepdim=True)
        return torch.where(probs > 0, probs, (scores - subtracted).clamp(max=0)) - self.threshold

    def _probabilities(self, scores: Tensor) -> Tensor:
        if self._kind == "two":
            return ((1.0 + scores) / 2.0).clamp(0.0, 1.0)
        return sparsemax(scores)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_number("threshold", self.threshold, 0.0, 1.0)
