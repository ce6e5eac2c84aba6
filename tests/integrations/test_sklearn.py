"""The estimators for scikit-learn: what they minimise, predict and refuse."""

import importlib
import sys

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, log_loss
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lastlayer.integrations import _linear_objective
from lastlayer.integrations.sklearn import SparsemaxClassifier, ZLPRClassifier
from lastlayer.losses import (
    multilabel_sparsemax_loss,
    multilabel_sparsemax_predict,
    sparsemax_loss,
    zlpr_loss,
    zlpr_probability,
)

BOTH = pytest.mark.parametrize("estimator", [ZLPRClassifier, SparsemaxClassifier])
ALPHA = 1e-2
EXACT = {"alpha": ALPHA, "tol": 1e-8, "max_iter": 2000}


def made(seed, kind, rows=120, width=5, n=4):
    """Features, and what a linear model with noise says of them."""
    random = np.random.default_rng(seed)
    features = random.standard_normal((rows, width))
    features[random.random((rows, width)) < 0.4] = 0.0
    scores = 2 * features @ random.standard_normal((width, n)) + random.standard_normal((rows, n))
    if kind == "two":
        return features, np.where(scores[:, 0] > np.median(scores[:, 0]), "yes", "no")
    if kind == "classes":
        y = scores.argmax(1)
        y[:n] = np.arange(n)
        return features, y
    labels = (scores > 1.0).astype(int)
    labels[0], labels[1] = 0, 1
    return features, labels


def dense_loss(estimator, kind, scores, y):
    """The loss of each row, from dense labels."""
    if kind == "labels":
        loss = zlpr_loss if estimator is ZLPRClassifier else multilabel_sparsemax_loss
        return loss(scores, torch.from_numpy(y), reduction="none")
    ids = torch.from_numpy(np.unique(y, return_inverse=True)[1])
    if estimator is SparsemaxClassifier:
        both = scores if kind == "classes" else torch.cat([torch.zeros_like(scores), scores], 1)
        return sparsemax_loss(both, ids, reduction="none")
    if kind == "two":
        return zlpr_loss(scores, ids.unsqueeze(1), reduction="none")
    return zlpr_loss(scores, torch.nn.functional.one_hot(ids), reduction="none")


@BOTH
@pytest.mark.parametrize("kind", ["two", "classes", "labels"])
@pytest.mark.parametrize("n", [4, 70])
def test_the_gradient_of_the_dense_loss_vanishes(estimator, kind, n, seed):
    features, y = made(seed, kind, rows=160, n=n)
    weights = np.random.default_rng(seed).random(len(features)) + 0.1
    if estimator is SparsemaxClassifier and kind == "labels":
        weights[y.sum(1) == 0] = 0.0  # they are left out
    model = estimator(**EXACT).fit(features, y, sample_weight=weights)
    parts = [torch.from_numpy(each.copy()) for each in (model.coef_, model.intercept_)]
    coef, intercept = (each.requires_grad_() for each in parts)
    scores = torch.from_numpy(features) @ coef.T + intercept
    shares = torch.from_numpy(weights / weights.sum())
    total = shares @ dense_loss(estimator, kind, scores, y) + ALPHA / 2 * coef.square().sum()
    for gradient in torch.autograd.grad(total, (coef, intercept)):
        assert gradient.abs().max() < 1e-6


def test_two_classes_are_logistic_regression(seed):
    features, y = made(seed, "two")
    ours = ZLPRClassifier(**EXACT).fit(features, y)
    theirs = LogisticRegression(C=1 / (ALPHA * len(y)), tol=1e-8, max_iter=2000).fit(features, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-4)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=1e-4)
    np.testing.assert_allclose(
        ours.predict_proba(features), theirs.predict_proba(features), atol=1e-4
    )
    assert (ours.predict(features) == ours.classes_[ours.predict_proba(features).argmax(1)]).all()


@BOTH
@pytest.mark.parametrize("kind", ["two", "classes", "labels"])
@pytest.mark.parametrize("solver", ["lbfgs", "adam"])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_sparse_features_give_what_dense_ones_do(estimator, kind, solver, seed):
    features, y = made(seed, kind)
    model = estimator(solver=solver, alpha=ALPHA, max_iter=20, batch_size=32, random_state=3)
    dense, thin = clone(model).fit(features, y), clone(model).fit(sparse.csr_matrix(features), y)
    np.testing.assert_allclose(thin.coef_, dense.coef_, atol=1e-7)
    np.testing.assert_allclose(
        thin.decision_function(sparse.csc_array(features)),
        dense.decision_function(features),
        atol=1e-6,
    )


@BOTH
def test_sparse_labels_give_sparse_predictions(estimator, seed):
    features, y = made(seed, "labels")
    dense = estimator().fit(features, y)
    thin = sparse.csr_array(y)
    # A zero that is stored is a zero.
    thin.data[0] = 0
    first = np.argwhere(y)[0]
    changed = y.copy()
    changed[tuple(first)] = 0
    stored = estimator().fit(features, thin).predict(features)
    np.testing.assert_array_equal(
        stored.toarray(), estimator().fit(features, changed).predict(features)
    )
    predicted = estimator().fit(features, sparse.csr_matrix(y)).predict(features)
    assert sparse.issparse(predicted)
    np.testing.assert_array_equal(predicted.toarray(), dense.predict(features))


@BOTH
@pytest.mark.parametrize("kind", ["classes", "labels"])
@pytest.mark.parametrize("in_sparse", [False, True])
def test_scores_are_held_for_few_rows_at_a_time(estimator, kind, in_sparse, seed, monkeypatch):
    features, y = made(seed, kind, rows=60)
    given = sparse.csr_array(features) if in_sparse else features
    labels = sparse.csr_array(y) if kind == "labels" else y
    model = estimator(alpha=ALPHA, tol=1e-6)
    whole = clone(model).fit(given, labels)
    held, scores_of = [], _linear_objective.linear_scores

    def spied(*arguments):
        scores = scores_of(*arguments)
        held.append(scores.numel())
        return scores

    monkeypatch.setattr(_linear_objective, "MOST_SCORES", 50)
    monkeypatch.setattr(_linear_objective, "linear_scores", spied)
    sliced = clone(model).fit(given, labels)
    assert max(held) <= 50
    np.testing.assert_allclose(sliced.coef_, whole.coef_, atol=1e-4)
    predicted = sliced.predict(given)
    monkeypatch.undo()
    assert (predicted != sliced.predict(given)).sum() == 0


@BOTH
def test_a_weight_of_two_is_the_row_twice(estimator, seed):
    features, y = made(seed, "labels")
    weights = np.random.default_rng(seed).integers(0, 3, len(y))
    weights[:2] = 1
    weighted = estimator(**EXACT).fit(features, y, sample_weight=weights)
    repeated = estimator(**EXACT).fit(features.repeat(weights, 0), y.repeat(weights, 0))
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=1e-5)


@BOTH
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_features_times_a_number_give_the_same_scores(estimator, scale, seed):
    features, y = made(seed, "labels")
    before = estimator(tol=1e-6, max_iter=2000).fit(features, y)
    after = estimator(tol=1e-6, max_iter=2000).fit(scale * features, y)
    assert after.alpha_ == pytest.approx(scale**2 * before.alpha_)
    scores = before.decision_function(features)
    found = after.decision_function(scale * features)
    np.testing.assert_allclose(found, scores, atol=1e-2 * np.abs(scores).max())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_penalty_is_that_of_scores_that_deviate_by_ten(dtype, seed):
    features, y = made(seed, "labels")
    features = (features + 3.0).astype(dtype)
    weights = np.random.default_rng(seed).integers(0, 3, len(y))
    weights[:2] = 2
    given = [(features, y, weights), (sparse.csr_array(features), y, weights)]
    given.append((features.repeat(weights, 0), y.repeat(weights, 0), None))
    rows = features.repeat(weights, 0).astype(float)
    expected = ((rows - rows.mean(0)) ** 2).sum(1).mean() / (100 * len(rows))
    for rows_of, labels, counts in given:
        found = ZLPRClassifier().fit(rows_of, labels, sample_weight=counts).alpha_
        assert found == pytest.approx(expected, rel=1e-4)
    twice = ZLPRClassifier().fit(features, y, sample_weight=np.full(len(y), 2.0)).alpha_
    assert twice == pytest.approx(ZLPRClassifier().fit(features, y).alpha_ / 2)
    assert ZLPRClassifier(alpha=0.5).fit(features, y).alpha_ == 0.5


@BOTH
def test_rows_of_length_one_are_learnt_by_default(estimator, seed):
    random = np.random.default_rng(seed)
    words = np.array([random.choice(40, 3, replace=False) for _ in range(900)])
    texts = [" ".join(f"word{word}" for word in row) for row in words]
    labels = (words[:, :, None] == np.arange(20)).any(1).astype(int)
    labels[:, 0] = 1  # the loss of sparsemax leaves rows without labels out
    model = make_pipeline(TfidfVectorizer(), estimator()).fit(texts[:700], labels[:700])
    assert f1_score(labels[700:], model.predict(texts[700:]), average="micro") > 0.9


def test_class_weights_are_row_weights(seed):
    features, y = made(seed, "classes")
    weights = dict(enumerate([1.0, 2.0, 0.5, 3.0]))
    by_class = ZLPRClassifier(class_weight=weights).fit(features, y)
    by_row = ZLPRClassifier().fit(features, y, sample_weight=[weights[c] for c in y])
    np.testing.assert_array_equal(by_class.coef_, by_row.coef_)


@BOTH
def test_labels_are_learnt(estimator, seed):
    features, y = made(seed, "labels", rows=600, n=12)
    y[300] = 0  # a row without labels
    model = estimator(alpha=1e-3).fit(features[:300], y[:300])
    predicted = model.predict(features[300:])
    assert predicted.shape == (300, 12)
    assert predicted.dtype.kind == "i"
    chance = f1_score(y[300:], np.ones_like(predicted), average="micro", zero_division=0)
    assert f1_score(y[300:], predicted, average="micro", zero_division=0) > chance + 0.05
    np.testing.assert_array_equal(model.classes_, np.arange(12))
    np.testing.assert_array_equal(predicted, model.decision_function(features[300:]) > 0)


def test_the_rules_of_zlpr(seed):
    features, y = made(seed, "labels")
    model = ZLPRClassifier().fit(features, y)
    scores = torch.from_numpy(features @ model.coef_.T + model.intercept_)
    np.testing.assert_allclose(model.decision_function(features), scores, atol=1e-9)
    np.testing.assert_allclose(model.predict_proba(features), zlpr_probability(scores), atol=1e-9)
    many = ZLPRClassifier().fit(*made(seed, "classes"))
    probs = many.predict_proba(features)
    np.testing.assert_allclose(probs.sum(1), 1.0)
    np.testing.assert_array_equal(probs.argmax(1), many.predict(features))


@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_the_rules_of_sparsemax(threshold, seed):
    features, y = made(seed, "labels")
    model = SparsemaxClassifier(threshold=threshold).fit(features, y)
    scores = torch.from_numpy(features @ model.coef_.T + model.intercept_)
    predicted = model.predict(features)
    expected = multilabel_sparsemax_predict(scores, threshold)
    # A rounding decides whether a probability is 0 or next to it.
    unclear = np.abs(model.decision_function(features)) < 1e-9
    np.testing.assert_array_equal(predicted[~unclear], expected.numpy()[~unclear])
    if not threshold:
        assert (predicted.sum(1) >= 1).all()
    probs = model.predict_distribution(features)
    np.testing.assert_allclose(probs.sum(1), 1.0)
    assert (probs == 0).any()
    assert not hasattr(model, "predict_proba")
    with pytest.raises(AttributeError, match="predict_proba"):
        model.predict_proba(features)
    two = SparsemaxClassifier(alpha=1e-4).fit(*made(seed, "two")).predict_proba(features)
    np.testing.assert_allclose(two.sum(1), 1.0)
    assert ((two == 0) | (two == 1)).any()


def test_one_label_in_every_row_is_a_class(seed):
    features, y = made(seed, "classes")
    classes = SparsemaxClassifier(**EXACT).fit(features, y)
    labels = SparsemaxClassifier(**EXACT).fit(features, np.eye(4, dtype=int)[y])
    np.testing.assert_allclose(classes.coef_, labels.coef_, atol=1e-5)


@pytest.mark.parametrize("kind", ["two", "classes", "labels"])
def test_calibrated_probabilities_agree_with_predictions(kind, seed):
    features, y = made(seed, kind)
    model = ZLPRClassifier(calibrate=True, validation_fraction=0.3, random_state=1)
    model.fit(features, y)
    assert model.calibrator_.is_fitted
    probs, predicted = model.predict_proba(features), model.predict(features)
    decision = model.decision_function(features)
    if kind == "labels":
        np.testing.assert_array_equal(probs > 0.5, predicted)
        np.testing.assert_array_equal(decision > 0, predicted)
        return
    np.testing.assert_allclose(probs.sum(1), 1.0)
    np.testing.assert_array_equal(model.classes_[probs.argmax(1)], predicted)
    again = clone(model).fit(features, y)
    np.testing.assert_array_equal(again.predict_proba(features), probs)


def test_calibration_makes_probabilities_better(seed):
    random = np.random.default_rng(seed)
    features = random.standard_normal((6000, 4))
    chances = 1 / (1 + np.exp(-(features @ random.standard_normal((4, 30)) - 1.0)))
    y = (random.random(chances.shape) < chances).astype(int)
    losses = []
    for calibrate in (False, True):
        model = ZLPRClassifier(calibrate=calibrate, validation_fraction=0.3, random_state=0)
        probs = model.fit(features[:3000], y[:3000]).predict_proba(features[3000:])
        losses.append(log_loss(y[3000:].ravel(), probs.ravel()))
    assert losses[1] < losses[0]


@BOTH
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_adam_comes_near_and_is_repeated_by_its_seed(estimator, seed):
    features, y = made(seed, "labels", rows=300)
    exact = estimator(**EXACT).fit(features, y)
    near = estimator(
        alpha=ALPHA, solver="adam", max_iter=60, batch_size=32, learning_rate=0.1, random_state=0
    )
    near.fit(features, y)
    assert 1 <= near.n_iter_ <= 60
    assert np.mean(near.predict(features) == exact.predict(features)) > 0.9
    again = clone(near).fit(features, y)
    np.testing.assert_array_equal(again.coef_, near.coef_)
    other = clone(near).set_params(random_state=1).fit(features, y)
    assert (other.coef_ != near.coef_).any()


def test_float32_stays_float32(seed):
    features, y = made(seed, "labels")
    wide, narrow = (ZLPRClassifier().fit(features.astype(t), y) for t in ("f8", "f4"))
    assert narrow.coef_.dtype == narrow.predict_proba(features).dtype == np.float32
    np.testing.assert_allclose(narrow.coef_, wide.coef_, atol=0.05)


@BOTH
def test_without_intercepts(estimator, seed):
    model = estimator(fit_intercept=False).fit(*made(seed, "labels"))
    assert not model.intercept_.any()


def test_a_pipeline_and_a_grid_search(seed):
    features, y = made(seed, "labels")
    pipeline = make_pipeline(StandardScaler(), SparsemaxClassifier())
    grid = {"sparsemaxclassifier__threshold": [0.0, 0.2], "sparsemaxclassifier__alpha": [1e-2, 1.0]}
    search = GridSearchCV(pipeline, grid, scoring="f1_micro", cv=3).fit(features, y)
    assert set(search.best_params_) == set(grid)
    assert search.best_score_ == search.cv_results_["mean_test_score"].max()
    assert search.predict(features).shape == y.shape


def test_text_in_a_pipeline():
    texts = ["red apple", "green apple", "red car", "green car", "apple", "car"]
    labels = [[1, 1, 0], [1, 0, 0], [0, 1, 1], [0, 0, 1], [1, 0, 0], [0, 0, 1]]
    model = make_pipeline(TfidfVectorizer(), ZLPRClassifier()).fit(texts, labels)
    np.testing.assert_array_equal(model.predict(["red", "red car"]), [[0, 1, 0], [0, 1, 1]])


def test_training_that_ends_early_says_so(seed):
    features, y = made(seed, "labels")
    for solver in ("lbfgs", "adam"):
        with pytest.warns(ConvergenceWarning, match="max_iter"):
            ZLPRClassifier(solver=solver, max_iter=1, tol=0.0).fit(features, y)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"alpha": -1.0}, ValueError, "alpha: expected at least 0"),
        ({"alpha": None}, TypeError, "alpha: expected a number"),
        ({"alpha": "1"}, ValueError, "alpha: expected a number or 'scale', got '1'"),
        ({"tol": float("nan")}, ValueError, "tol: expected"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate: expected above 0"),
        ({"max_iter": 0}, ValueError, "max_iter: expected at least 1"),
        ({"batch_size": 2.5}, TypeError, "batch_size: expected a whole number"),
        ({"n_iter_no_change": True}, TypeError, "n_iter_no_change: expected a whole number"),
        ({"solver": "sgd"}, ValueError, "solver: expected 'lbfgs' or 'adam', got 'sgd'"),
        ({"validation_fraction": 1.0}, ValueError, "validation_fraction: expected above 0 and bel"),
        ({"class_weight": "balanced"}, ValueError, "class_weight: expected None"),
    ],
)
def test_wrong_options(options, error, message, seed):
    with pytest.raises(error, match=message):
        ZLPRClassifier(**options).fit(*made(seed, "labels"))


def test_wrong_labels(seed):
    features, y = made(seed, "labels")
    with pytest.raises(ValueError, match="y: expected at least one row with a label"):
        SparsemaxClassifier().fit(features, np.zeros_like(y))
    with pytest.raises(ValueError, match="y: expected at least 2 classes, got one"):
        ZLPRClassifier().fit(features, np.ones(len(y)))
    with pytest.raises(ValueError, match="y: expected class labels of shape"):
        ZLPRClassifier().fit(features, 2 * y + np.arange(4))
    with pytest.raises(ValueError, match="y: expected class labels, or a matrix of at least 2"):
        ZLPRClassifier().fit(features, sparse.csr_array(y[:, :1]))
    with pytest.raises(ValueError, match="threshold: expected at least 0 and below 1"):
        SparsemaxClassifier(threshold=1.0).fit(features, y)
    with pytest.raises(
        ValueError, match="validation_fraction: expected to leave rows for training"
    ):
        ZLPRClassifier(calibrate=True, validation_fraction=0.9).fit(features[:2], y[:2])
    assert (ZLPRClassifier().fit(features, np.zeros_like(y)).predict(features) == 0).all()


def test_without_scikit_learn_it_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.utils.validation", None)
    monkeypatch.delitem(sys.modules, "lastlayer.integrations.sklearn")
    with pytest.raises(ImportError, match=r"lastlayer\[sklearn\]"):
        importlib.import_module("lastlayer.integrations.sklearn")
