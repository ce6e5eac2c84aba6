"""Linear classifiers for scikit-learn, trained with ZLPR and with the loss of sparsemax."""

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
    r"""A linear model for any number of labels a row, or for classes, trained with ZLPR.

    .. math:: \min_{W, b}\; \frac{1}{\sum_i w_i} \sum_i w_i\, L(W x_i + b, y_i)
              + \frac{\alpha}{2} \|W\|^2

    with L as in :func:`lastlayer.zlpr_loss`. Choose it where a row has few labels of many. What y
    is tells what is learnt:

    * a matrix of 0 and 1, dense or sparse: any number of labels a row, also none. Those with a
      score above 0 are predicted. All labels are trained together, unlike in
      ``OneVsRestClassifier(LogisticRegression())``.
    * labels of more than two classes: the class of the highest score is predicted.
    * labels of two classes: ZLPR with one score is the logistic loss, and this is
      ``LogisticRegression(C=1 / (alpha * rows))``.

    The penalty suits the features by itself: with ``alpha="scale"`` it is

    .. math:: \alpha = \frac{\operatorname{E} \|x - \operatorname{E} x\|^2}{100 \sum_i w_i},

    that of a normal prior under which the scores of rows deviate by 10. Features times a number
    give the same predictions, and rows of length 1, as tf-idf makes them, are penalised as little
    as features of deviation 1. A number is taken as it is.

    Probabilities: those of two classes are :math:`\sigma(s)` and right as they are. Those of more
    classes are a softmax, and of labels :math:`\sigma(2s)`: the sign of a score is learnt, but
    the scale of scores from hard labels is not that of log-odds, see
    :func:`lastlayer.zlpr_probability`. With ``calibrate=True`` a share of the rows is not trained
    on, and :class:`lastlayer.ZLPRCalibrator` fits a curve a label to it; the decision function is
    then the log-odds of that curve, so that it, ``predict`` and ``predict_proba`` agree. (For more
    than two classes the curves are made to sum to 1.)

    Memory for many labels: that of some 30 matrices like ``coef_`` in float64 for L-BFGS, and of
    4 in the dtype of the features for Adam. Scores of all rows and labels are never held together,
    neither in training nor to predict a sparse matrix. All runs on the CPU; for a GPU see
    :class:`lastlayer.heads.MultiLabel`.

    Args:
        alpha: the penalty of the weights, at least 0, or "scale"; intercepts have none.
        fit_intercept: whether each label has an intercept.
        class_weight: None, "balanced" or weights by class, as in scikit-learn; for classes only.
        solver: "lbfgs" for all rows at once, or "adam" for batches, where there are many rows.
        max_iter: the most iterations of L-BFGS, or epochs of Adam.
        tol: L-BFGS ends where no entry of the gradient is above it, where that of the weights is
            divided by how far rows are from their mean; Adam where the loss of an epoch got no
            better by it.
        batch_size: rows of a step of Adam.
        learning_rate: of Adam in its first epoch, for features of deviation 1; it falls with the
            root of the epoch.
        n_iter_no_change: epochs without an improvement after which Adam ends.
        calibrate: whether probabilities and thresholds are fitted on a share of the rows.
        validation_fraction: that share, above 0 and below 1. No more than 4 million scores are
            looked at.
        random_state: for the order of rows, and which of them are held out.

    Attributes:
        coef_: ``(n_scores, n_features)``; one score for two classes.
        intercept_: ``(n_scores,)``.
        classes_: the classes; for labels 0 to ``n_labels - 1``.
        alpha_: the penalty.
        n_iter_: how many iterations or epochs there were.
        calibrator_: the fitted :class:`lastlayer.ZLPRCalibrator`, or None.
        n_features_in_: how many features there are.
        feature_names_in_: their names, where X had names.

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
        """Rows that are trained on, and rows that are held out; a weight of 0 is neither."""
        rows = np.arange(n_rows) if weights is None else np.flatnonzero(weights)
        share = round(self.validation_fraction * len(rows))
        n_held = max(1, min(share, MOST_SCORES // n_scores))
        if n_held >= len(rows):
            raise ValueError(
                f"validation_fraction: expected to leave rows to train on, got "
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
            # With a curve a class: the probabilities of each against the rest, over their sum.
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
            "predict_proba: expected classes, got labels; sparsemax has no probability of each "
            "label, but one distribution over all of them: use predict_distribution"
        )
    return True


class SparsemaxClassifier(LinearClassifier):
    r"""A linear model for classes, or for any number of labels a row, with the loss of sparsemax.

    It minimises the same sum as :class:`ZLPRClassifier`, with :func:`lastlayer.sparsemax_loss` for
    classes and :func:`lastlayer.multilabel_sparsemax_loss` for labels. Choose it where most classes
    should have a probability of exactly 0.

    * For classes, probabilities are ``sparsemax(scores)``. Those of two classes are
      :math:`\min(1, \max(0, (1 + s) / 2))`, from one score.
    * For labels, ``sparsemax(scores)`` is one distribution over the labels of a row, and those with
      more than ``threshold`` are predicted: at 0 these are at least one. Rows of the training data
      without a label are left out. :meth:`predict_distribution` gives that distribution. It says
      how a row is shared among labels, not how probable each label is, so there is no
      ``predict_proba`` for labels. The decision function is the score minus the row's threshold,
      above 0 where a label is predicted.

    Args:
        alpha: the penalty of the weights, at least 0, or "scale", as in :class:`ZLPRClassifier`;
            intercepts have none.
        threshold: for labels: the probability above which one is predicted, from 0 to below 1.
            Choose it on held-out data, with a grid search for one.
        fit_intercept: whether each label has an intercept.
        class_weight: None, "balanced" or weights by class, as in scikit-learn; for classes only.
        solver: "lbfgs" for all rows at once, or "adam" for batches, where there are many rows.
        max_iter: the most iterations of L-BFGS, or epochs of Adam.
        tol: L-BFGS ends where no entry of the gradient is above it, where that of the weights is
            divided by how far rows are from their mean; Adam where the loss of an epoch got no
            better by it.
        batch_size: rows of a step of Adam.
        learning_rate: of Adam in its first epoch, for features of deviation 1; it falls with the
            root of the epoch.
        n_iter_no_change: epochs without an improvement after which Adam ends.
        random_state: for the order of rows.

    Attributes:
        coef_: ``(n_scores, n_features)``; one score for two classes.
        intercept_: ``(n_scores,)``.
        classes_: the classes; for labels 0 to ``n_labels - 1``.
        alpha_: the penalty.
        n_iter_: how many iterations or epochs there were.
        n_features_in_: how many features there are.
        feature_names_in_: their names, where X had names.

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
        """Probabilities of classes ``(rows, n_classes)``; not for labels."""
        return super().predict_proba(X)

    def predict_distribution(self, X: Any) -> Array:
        """Sparse distributions over classes or labels, ``(rows, n)``: each row sums to 1."""
        return super().predict_proba(X)

    def _train(
        self, X: Any, target: Target, weights: Array | None, random: np.random.RandomState
    ) -> None:
        counts = target.labels.counts.numpy()
        if target.kind == "labels" and not counts.all():
            kept = np.flatnonzero(counts)
            if not len(kept) or (weights is not None and not weights[kept].any()):
                raise ValueError(
                    "y: expected a row with a label, got none that counts; the loss of sparsemax "
                    "has nothing to learn from rows without labels"
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
        # What sparsemax subtracts is the same for all of a row.
        subtracted = scores.amax(1, keepdim=True) - probs.amax(1, keepdim=True)
        return torch.where(probs > 0, probs, (scores - subtracted).clamp(max=0)) - self.threshold

    def _probabilities(self, scores: Tensor) -> Tensor:
        if self._kind == "two":
            return ((1.0 + scores) / 2.0).clamp(0.0, 1.0)
        return sparsemax(scores)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_number("threshold", self.threshold, 0.0, 1.0)
