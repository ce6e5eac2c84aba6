"""Judging: exact likelihoods, the ten best, calibration, deciles, and probabilities of 0."""

import math

import numpy as np
import pytest
import torch

from lastlayer import heads, samplers, trees
from lastlayer.lab import evaluation
from lastlayer.lab.evaluation import (
    BINS,
    EPSILON,
    LabelJudge,
    LabelRows,
    Rows,
    TextJudge,
    as_table,
    best_threshold,
    by_decile,
    calibration,
    deciles_of,
    judge_rows,
    quality,
    rows_for,
)
from lastlayer.lab.feeding import Batch

WIDTH, CLASSES = 8, 40


@pytest.fixture
def batch():
    return Batch(torch.randn(3, 5, WIDTH), torch.randint(CLASSES, (3, 5)), 15)


def judged(head, batch) -> Rows:
    return judge_rows(head, [(batch.inputs, batch.target)])


@pytest.mark.parametrize(
    "head",
    [
        heads.FullSoftmax(WIDTH, CLASSES),
        heads.EntmaxHead(WIDTH, CLASSES, alpha=2.0),
        heads.SampledSoftmax(WIDTH, CLASSES, samplers.Uniform(CLASSES), 4),
        heads.HierarchicalSoftmax(WIDTH, trees.balanced(CLASSES)),
        heads.AdaptiveSoftmax(WIDTH, cutoffs=[10, 20], n_classes=CLASSES),
    ],
    ids=lambda head: type(head).__name__,
)
def test_rows_are_what_the_head_says(head, batch, monkeypatch):
    monkeypatch.setattr(evaluation, "_CHUNK", 3 * CLASSES)
    rows = judged(head, batch)
    hidden, target = batch.inputs.reshape(-1, WIDTH), batch.target.reshape(-1)
    log_prob = head.log_prob(hidden).detach()
    own = log_prob.gather(1, target[:, None])[:, 0]
    # As probabilities: the logarithm of a tiny one, a difference of two scores, has few digits.
    np.testing.assert_allclose(np.exp(-rows.nll), own.exp().numpy(), rtol=1e-5, atol=2e-7)
    np.testing.assert_array_equal(np.isinf(rows.nll), own.isinf().numpy())
    np.testing.assert_array_equal(rows.support, (log_prob > -math.inf).sum(1).numpy())
    best = head.topk(hidden, 10)
    hit = ((best.classes == target[:, None]) & (best.values > -math.inf)).any(1)
    np.testing.assert_array_equal(rows.place < 10, hit.numpy())
    np.testing.assert_allclose(rows.confidence, best.values[:, 0].exp().numpy(), rtol=1e-5)


def test_a_target_without_probability_is_infinitely_bad_and_not_covered():
    rows = Rows(
        target=np.array([0, 1]), nll=np.array([0.0, math.inf]), place=np.array([0, 10]),
        confidence=np.array([1.0, 1.0]), support=np.array([1, 1]), guess=np.array([0, 0]),
    )  # fmt: skip
    found = quality(rows, 100)
    assert found["nll"] == found["perplexity"] == math.inf
    assert found["coverage"] == found["top1"] == found["top10"] == 0.5
    expected = -(math.log(1 - EPSILON + EPSILON / 100) + math.log(EPSILON / 100)) / 2
    assert found["eps_nll"] == pytest.approx(expected)


def test_calibration_is_0_where_confidence_is_accuracy():
    confidence = np.repeat([0.25, 0.75], 400)
    right = np.concatenate([np.arange(400) % 4 == 0, np.arange(400) % 4 != 0])
    place = np.where(right, 0, 10)
    rows = Rows(place * 0, confidence * 0, place, confidence, place * 0, place)
    found = calibration(rows)
    assert found["calibration_error"] == pytest.approx(0.0)
    assert [each["count"] for each in found["calibration"]] == [400, 400]
    sure = Rows(place * 0, confidence * 0, place, np.ones(800), place * 0, place)
    assert calibration(sure)["calibration_error"] == pytest.approx(0.5)
    assert len(calibration(sure)["calibration"]) <= BINS


def test_deciles_hold_about_a_tenth_of_all_occurrences_each(seed):
    counts = np.sort(np.random.default_rng(seed).integers(1, 50, 2000))[::-1]
    decile = deciles_of(counts)
    assert (np.diff(decile) >= 0).all()
    mass = np.bincount(decile, weights=counts, minlength=10) / counts.sum()
    np.testing.assert_allclose(mass, 0.1, atol=0.01)


def test_means_over_deciles_are_the_mean(batch):
    rows = judged(heads.FullSoftmax(WIDTH, CLASSES), batch)
    parts = by_decile(rows, deciles_of(np.arange(CLASSES, 0, -1)), CLASSES)
    assert sum(part["count"] for part in parts) == 15
    total = sum(part["count"] * part["nll"] for part in parts if part["count"])
    assert total / 15 == pytest.approx(rows.nll.mean())


@pytest.mark.parametrize("part", ["valid", "test"])
def test_rows_are_bounded(part):
    counts = (1, 1000, 60_000, 10**7)
    sizes = [rows_for(part, n, on_gpu=False) for n in counts]
    assert sizes == sorted(sizes, reverse=True)
    assert rows_for("test", 60_000, on_gpu=False) > rows_for("valid", 60_000, on_gpu=False)
    on_gpu = [rows_for(part, n, on_gpu=True) for n in counts]
    assert on_gpu[2] > sizes[2]
    assert on_gpu[0] == sizes[0]


def test_padding_is_no_label():
    table = as_table(torch.tensor([[0, 2], [-100, -100], [1, -100]]), 3)
    assert table.tolist() == [[True, False, True], [False] * 3, [False, True, False]]


def test_a_head_that_knows_the_labels_is_perfect():
    class Oracle(torch.nn.Module):
        def predict(self, hidden):
            return torch.tensor([[0, 1], [2, -100]])

        def topk(self, hidden, k):
            scores = torch.tensor([[0.9, 0.8, 0.1], [0.7, 0.2, 0.1]])
            return heads.TopK(scores, torch.tensor([[0, 1, 2], [2, 0, 1]]))

        def forward(self, hidden, target):
            return torch.tensor(0.25)

    class Feed:
        def held_out(self, part, rows):
            yield Batch(torch.zeros(2, 1), torch.tensor([[0, 1], [2, -100]]), 2)

    found = LabelJudge(Feed(), np.array([5, 3, 1])).at_the_end(torch.nn.Identity(), Oracle())
    assert found["micro_f1"] == found["exact_match"] == found["precision_at_1"] == 1.0
    assert found["native_micro_f1"] == found["mean_average_precision"] == 1.0
    assert found["threshold"] == pytest.approx(0.45)
    assert found["precision_at_3"] == pytest.approx(0.5)
    assert found["loss"] == 0.25
    assert sum(part["count"] for part in found["by_decile"]) == 3


def test_the_threshold_has_the_best_micro_f1(seed):
    draw = np.random.default_rng(seed)
    scores = -np.sort(-draw.normal(size=(30, 6)).round(1), 1)
    hits = draw.random((30, 6)) < 0.3
    present = hits.sum(1) + draw.integers(0, 2, 30)
    rows = LabelRows(scores, np.zeros((30, 6), np.int64), hits, present, np.zeros(1), {})

    def f1(threshold):
        guess = scores >= threshold
        return 2 * (guess & hits).sum() / (guess.sum() + present.sum())

    best = max(f1(each) for each in np.unique(scores))
    assert f1(best_threshold(rows)) == pytest.approx(best)


def test_the_unigram_baseline_has_the_entropy_of_the_counts():
    counts = np.array([70, 20, 10])

    class Feed:
        def held_out(self, part, rows):
            target = np.repeat([0, 1, 2], counts)
            yield Batch(None, torch.from_numpy(target)[None], 100)

    found = TextJudge(Feed(), counts).baseline()
    shares = counts / 100
    assert found["test"]["nll"] == pytest.approx(-(shares * np.log(shares)).sum())
    assert found["test"]["top1"] == pytest.approx(0.7)
    assert found["valid"]["perplexity"] == pytest.approx(found["test"]["perplexity"])


def test_the_baseline_of_labels_takes_the_frequent_ones():
    class Feed:
        def held_out(self, part, rows):
            yield Batch(None, torch.tensor([[0, -100], [0, 1], [2, -100]]), 3)

    found = LabelJudge(Feed(), np.array([5, 3, 1])).baseline()["test"]
    assert found["precision_at_1"] == pytest.approx(2 / 3)
    assert found["mean_average_precision"] == pytest.approx((1 + 1 + 1 / 3) / 3)
