"""The multi-label table: how the large sets are fitted, and precision."""

import pytest
import torch

from studies import multilabel_table as table
from studies.linear import fit_path


def _made(n, seed, dtype=torch.float32):
    """Rows whose labels depend on their features."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    layer = torch.randn(5, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    noise = torch.randn(n, 8, generator=generator, dtype=torch.float64)
    labels = (2 * features @ layer + noise > 2).to(dtype)
    return table.Rows(features.to(dtype), labels)


def test_precision_counts_the_right_labels_among_the_first():
    scores = torch.randn(30, 9)
    labels = (torch.rand(30, 9) < 0.3).float()
    found = table.precision(labels, scores)
    for k in table.DEPTHS:
        hits = 0
        for row, truth in zip(scores.tolist(), labels.tolist(), strict=True):
            first = sorted(range(9), key=lambda i: -row[i])[:k]
            hits += sum(truth[i] for i in first)
        assert found[f"p{k}"] == pytest.approx(hits / (30 * k))


def test_large_sets_have_precision_and_their_own_penalties():
    penalties = dict.fromkeys(table.LOSSES, (0.1, 0.01))
    fitting = table.Fitting(penalties, held_out=1, steps=20, smoothing=0.01, large=True)
    found = table.evaluate(_made(200, 0), _made(100, 1), fitting)
    assert list(found["precision"]) == list(table.LOSSES)
    for each in found["precision"].values():
        # Labels depend on features: far better than their frequency.
        assert each["p1"] > 0.7
        assert {each[f"p{k}_penalty"] for k in table.DEPTHS} <= {0.1, 0.01}
    for each in found["f1"].values():
        assert each["micro"] > 0.5
        assert each["micro_penalty"] in (0.1, 0.01)


def test_small_sets_are_fitted_as_before():
    fitting = table.Fitting(dict.fromkeys(table.LOSSES, (0.1,)), held_out=2, folds=2)
    train, test = (_made(60, seed, torch.float64) for seed in (0, 1))
    found = table.evaluate(train, test, fitting)
    assert "precision" not in found
    ((_, model),) = fit_path(train.features, 8, lambda z: table.bce_loss(z, train.labels), (0.1,))
    rule = found["f1"]["logistic"]["micro_rule"]
    predicted = torch.sigmoid(model(test.features)) > rule
    micro = table.f1_scores(test.labels, predicted)["micro"]
    assert found["f1"]["logistic"]["micro"] == pytest.approx(micro)


def test_biases_start_where_the_loss_is_least_without_features():
    labels = _made(400, 0, torch.float64).labels
    for name in ("logistic", "softmax"):
        start = table._start(name, labels).detach().double().requires_grad_()
        value = table.LOSSES[name](start.expand(400, 8), labels)
        (slope,) = torch.autograd.grad(value, start)
        # Softmax counts labels, and its loss counts rows: close, not equal.
        assert slope.abs().max() < (1e-5 if name == "logistic" else 0.1)


def test_float32_comes_to_the_same_minimum():
    rows = _made(100, 3, torch.float64)
    at = []
    for dtype in (torch.float64, torch.float32):
        some = table.Rows(*(x.to(dtype) for x in rows))
        start = table._start("ZLPR", some.labels)
        ((_, model),) = fit_path(
            some.features, 8, lambda z, y=some.labels: table.zlpr_loss(z, y), (0.1,), 300, start
        )
        at.append(model.weight.double())
    assert (at[0] - at[1]).abs().max() < 5e-3


def test_the_verdict_tells_of_sets_without_published_f1():
    f1 = {m: dict.fromkeys(table.MEASURES, 0.5) for m in table.METHODS}
    precision = {m: {"p1": 0.6, "p3": 0.4, "p5": 0.3, "p1_penalty": 0.1} for m in table.LOSSES}
    runs = [{"set": name, "split": 0, "train": 9, "f1": f1} for name in table.SETS]
    plain = table.verdict({"runs": runs})
    large = {"set": "bibtex", "split": "published", "train": 9, "f1": f1, "precision": precision}
    both = table.verdict({"runs": [*runs, large]})
    assert both.word == plain.word
    assert both.why.startswith(plain.why)
    assert "On bibtex, which is not in the paper" in both.why
    assert "-2.6 points from one-vs-all" in both.why
    grids = table.grids({"runs": [*runs, large]})
    assert grids[-1].rows[0][:4] == ["bibtex", "P@1", "62.62†", "60.0"]
