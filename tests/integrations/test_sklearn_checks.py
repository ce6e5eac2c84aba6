"""scikit-learn's own checks of an estimator."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from lastlayer.integrations.sklearn import SparsemaxClassifier, ZLPRClassifier


def expected_failures(estimator):
    if isinstance(estimator, SparsemaxClassifier):
        return {
            "check_classifiers_multilabel_output_format_predict_proba": (
                "it asks for probabilities strictly between 0 and 1; those of sparsemax are 0 and 1"
            )
        }
    return {}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks(
    # Some compare two fits to seven digits: a loss with flat parts has these with a firm penalty.
    [ZLPRClassifier(max_iter=100), SparsemaxClassifier(alpha=0.1, max_iter=100)],
    expected_failed_checks=expected_failures,
)
def test_scikit_learn_agrees(estimator, check):
    check(estimator)
