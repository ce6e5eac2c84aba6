"""Probabilities and thresholds from held-out data."""

import math

import pytest
import torch

from lastlayer.losses.calibration import ZLPRCalibrator
from lastlayer.losses.zlpr import zlpr_probability


def drawn(slope, bias, n_rows=4000):
    slope, bias = torch.tensor(slope), torch.tensor(bias)
    scores = 2 * torch.randn(n_rows, len(slope))
    chance = torch.sigmoid(slope * scores + bias)
    return scores, chance, torch.rand_like(chance) < chance


def test_it_finds_probabilities_that_the_formula_does_not():
    scores, chance, labels = drawn([0.5, 1.0, 1.6], [-1.0, 0.5, -2.0])
    calibrator = ZLPRCalibrator(3).fit(scores, labels)
    assert calibrator.is_fitted
    assert (calibrator(scores) - chance).abs().mean() < 0.02
    assert (zlpr_probability(scores) - chance).abs().mean() > 0.05


def test_a_shared_curve_is_one_for_all():
    scores, chance, labels = drawn([1.2] * 4, [-0.7] * 4, n_rows=2000)
    calibrator = ZLPRCalibrator().fit(scores.reshape(10, 200, 4), labels.reshape(10, 200, 4))
    assert calibrator.slope.shape == (1,)
    assert (calibrator(scores) - chance).abs().mean() < 0.02


def test_it_is_the_minimum_of_the_likelihood():
    scores, _, labels = drawn([0.8, 2.0], [1.0, -1.0], n_rows=300)
    calibrator = ZLPRCalibrator(2, strength=1e-9).fit(scores, labels)
    z = calibrator.slope * scores.double() + calibrator.bias
    miss = torch.sigmoid(z) - labels.double()
    assert miss.sum(0).abs().max() < 1e-5
    assert (miss * scores.double()).sum(0).abs().max() < 1e-5


@pytest.mark.parametrize("n_classes", [None, 3])
@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e5, 1e30])
def test_the_scale_of_scores_does_not_matter(n_classes, scale):
    scores, _, labels = drawn([0.5, 1.0, 1.6], [-1.0, 0.5, -2.0], n_rows=200)
    scores = scores.double()
    before = ZLPRCalibrator(n_classes).fit(scores, labels)
    after = ZLPRCalibrator(n_classes).fit(scale * scores, labels)
    torch.testing.assert_close(after(scale * scores), before(scores), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(after.threshold / scale, before.threshold, rtol=1e-5, atol=1e-7)


def test_curves_never_fall():
    scores, _, labels = drawn([-1.0, 1.0], [0.0, 0.0], n_rows=500)
    calibrator = ZLPRCalibrator(2).fit(scores, labels)
    assert calibrator.slope[0] == 0
    assert calibrator.slope[1] > 0.5
    line = torch.linspace(-9, 9, 50).unsqueeze(-1).expand(50, 2)
    assert (calibrator(line).diff(dim=0) >= 0).all()
    share = labels[:, 0].double().mean()
    assert abs(calibrator(line)[0, 0] - share) < 0.02


def test_separable_and_missing_labels_stay_finite():
    scores = torch.linspace(-1, 1, 40).unsqueeze(-1).expand(40, 3)
    labels = torch.stack([scores[:, 0] > 0, scores[:, 0] > 9, scores[:, 0] < 9], -1)
    calibrator = ZLPRCalibrator(3, threshold="f1").fit(scores, labels)
    for value in calibrator.state_dict().values():
        assert not value.isnan().any()
    assert torch.isfinite(calibrator.slope).all()
    assert torch.equal(calibrator.predict(scores)[:, 0], labels[:, 0])
    assert calibrator.predict(scores)[:, 2].all()


def f1(predicted, labels):
    return 2 * (predicted & labels).sum(0) / (predicted.sum(0) + labels.sum(0))


@pytest.mark.parametrize("n_classes", [None, 3])
def test_no_threshold_has_a_better_f1(n_classes):
    scores, _, labels = drawn([1.0, 0.6, 2.0], [-2.0, 0.5, 0.0], n_rows=200)
    scores = (4 * scores).round() / 4  # ties
    calibrator = ZLPRCalibrator(n_classes, threshold="f1").fit(scores, labels)
    if n_classes is None:
        scores, labels = scores.reshape(-1, 1), labels.reshape(-1, 1)
    best = f1(calibrator.predict(scores), labels)
    for value in scores.unique().tolist():
        for threshold in (value - 0.1, value + 0.1):
            assert (f1(scores > threshold, labels) <= best + 1e-6).all()


def test_half_is_a_probability_of_one_half():
    scores, _, labels = drawn([1.0, 2.0], [-1.0, 0.5], n_rows=500)
    calibrator = ZLPRCalibrator(2).fit(scores, labels)
    sure = (calibrator(scores) - 0.5).abs() > 1e-5
    assert torch.equal(calibrator.predict(scores)[sure], (calibrator(scores) > 0.5)[sure])


def test_masked_and_infinite_scores_do_not_count():
    scores, _, labels = drawn([1.0, 2.0], [-1.0, 0.5], n_rows=400)
    expected = ZLPRCalibrator(2).fit(scores[:300], labels[:300])
    mask = (torch.arange(400) < 350).unsqueeze(-1)
    odd, wrong = scores.clone(), labels.long()
    odd[300:350] = -math.inf
    odd[350:], wrong[350:] = math.nan, -100
    calibrator = ZLPRCalibrator(2).fit(odd, wrong, mask)
    assert torch.allclose(calibrator.slope, expected.slope)
    assert torch.allclose(calibrator.bias, expected.bias)
    ends = calibrator(torch.tensor([[-math.inf, math.inf]]))
    assert torch.equal(ends, torch.tensor([[0.0, 1.0]]))


def test_the_state_is_a_plain_state_dict():
    scores, _, labels = drawn([1.0, 2.0], [-1.0, 0.5], n_rows=100)
    fitted = ZLPRCalibrator(2, threshold="f1").fit(scores, labels)
    other = ZLPRCalibrator(2)
    other.load_state_dict(fitted.state_dict())
    assert torch.equal(other(scores), fitted(scores))
    assert torch.equal(other.predict(scores), fitted.predict(scores))
    assert "n_classes=2" in repr(fitted)


def test_before_a_fit_it_is_the_formula():
    scores = torch.randn(3, 2)
    calibrator = ZLPRCalibrator()
    assert torch.allclose(calibrator(scores), zlpr_probability(scores))
    assert torch.equal(calibrator.predict(scores), scores > 0)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert calibrator(scores.to(dtype)).dtype == dtype


TWO = torch.zeros(2)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (ValueError, "n_classes: .*got 0", lambda: ZLPRCalibrator(0)),
        (TypeError, "n_classes: .*got float", lambda: ZLPRCalibrator(2.0)),
        (ValueError, "threshold: expected one of", lambda: ZLPRCalibrator(threshold="x")),
        (ValueError, "strength: .*got 0", lambda: ZLPRCalibrator(strength=0)),
        (ValueError, r"scores: expected shape \(\*batch, 3\)", lambda: ZLPRCalibrator(3)(TWO)),
        (ValueError, "target: expected labels 0 or", lambda: ZLPRCalibrator().fit(TWO, TWO + 0.5)),
        (ValueError, "scores: .*NaN", lambda: ZLPRCalibrator().fit(TWO * torch.nan, TWO)),
        (ValueError, "scores: .*finite", lambda: ZLPRCalibrator().fit(TWO + torch.inf, TWO)),
    ],
)
def test_bad_input_is_named(kind, message, call):
    with pytest.raises(kind, match=message):
        call()
