"""scikit-learn's own checks of an estimator."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from lastlayer.integrations.sklearn import SparsemaxClassifier, ZLPRClassifier


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks([ZLPRClassifier(), SparsemaxClassifier()])
def test_scikit_learn_agrees(estimator, check):
    check(estimator)
