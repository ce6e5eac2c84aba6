"""A head with any number of labels a row."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lastlayer.fused.recompute import weighted_sum_in_chunks
from lastlayer.heads.multi_label import MultiLabel
from lastlayer.losses.calibration import ZLPRCalibrator
from lastlayer.losses.multilabel import asymmetric_loss, bce_loss, multilabel_sparsemax_loss
from lastlayer.losses.zlpr import zlpr_loss
from lastlayer.maps.sparsemax import sparsemax
from lastlayer.testing import check_multilabel_head

PAD = -100
LOSSES = {
    "zlpr": zlpr_loss,
    "bce": bce_loss,
    "asymmetric": asymmetric_loss,
    "sparsemax": multilabel_sparsemax_loss,
}
with_each_loss = pytest.mark.parametrize("loss", LOSSES)


def made(loss, **options):
    head = MultiLabel(6, 23, loss, dtype=torch.float64, **options)
    hidden = 2 * torch.randn(2, 5, 6, dtype=torch.float64)
    lists = torch.randint(23, (2, 5, 3))
    lists[0, 1] = PAD
    lists[1, 2, 1:] = PAD
    return head, hidden.requires_grad_(), lists


def dense(lists, smoothing=0.0, n_classes=23):
    listed = torch.nn.functional.one_hot(torch.where(lists == PAD, n_classes, lists), n_classes + 1)
    on = listed.sum(-2)[..., :n_classes].clamp(max=1).double()
    return on * (1 - 2 * smoothing) + smoothing


@with_each_loss
@pytest.mark.parametrize("bias", [True, False])
def test_it_keeps_the_contract(loss, bias):
    # Compiled code that is right for one loss is right for all that share it.
    compiled = "aot_eager" if bias and loss in ("zlpr", "bce") else False
    check_multilabel_head(lambda: MultiLabel(7, 19, loss, bias), compile=compiled)


@with_each_loss
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_dense_labels(loss, reduction, smoothing):
    head, hidden, lists = made(loss, reduction=reduction, label_smoothing=smoothing, chunk_rows=3)
    right = LOSSES[loss](head.to_linear()(hidden), dense(lists, smoothing), reduction=reduction)
    ours = head(hidden, lists)
    torch.testing.assert_close(ours, right)
    upstream = torch.rand_like(right)
    leaves = [hidden, *head.parameters()]
    torch.testing.assert_close(
        *(torch.autograd.grad((each * upstream).sum(), leaves) for each in (ours, right))
    )


@with_each_loss
def test_soft_labels(loss):
    head, hidden, _ = made(loss)
    lists = torch.rand(2, 5, 23).argsort(-1)[..., :4]
    values = torch.rand(2, 5, 4, dtype=torch.float64)
    labels = torch.zeros(2, 5, 23, dtype=torch.float64).scatter(-1, lists, values)
    right = LOSSES[loss](head.to_linear()(hidden), labels)
    torch.testing.assert_close(head(hidden, lists, values=values), right)
    in_csr = lists.flatten(), torch.arange(0, 41, 4)
    torch.testing.assert_close(head(hidden, *in_csr, values=values.flatten()), right)


def test_the_mean_of_sparsemax_leaves_rows_without_a_label_out():
    head, hidden, lists = made("sparsemax")
    values = torch.rand(lists.shape, dtype=torch.float64)
    values[1, 1] = 0.0
    losses = LOSSES["sparsemax"]
    on = torch.zeros(2, 5, 24, dtype=torch.float64)
    for place in reversed(range(3)):
        where = torch.where(lists == PAD, 23, lists)[..., place : place + 1]
        on.scatter_(-1, where, values[..., place : place + 1])
    right = losses(head.to_linear()(hidden), on[..., :23])
    torch.testing.assert_close(head(hidden, lists, values=values), right)


@pytest.mark.parametrize("chunk_rows", [1, 4, "auto"])
def test_predict_is_what_lies_above_the_threshold(chunk_rows):
    for loss in LOSSES:
        head, hidden, _ = made(loss, chunk_rows=chunk_rows)
        scores = head.to_linear()(hidden)
        values = sparsemax(scores) if loss == "sparsemax" else scores
        for threshold in (None, 0.2, torch.rand(23, dtype=torch.float64)):
            on = values > (0.0 if threshold is None else threshold)
            lists = head.predict(hidden, threshold=threshold)
            assert lists.shape == (2, 5, on.sum(-1).max())
            assert torch.equal(dense(lists) > 0, on)


def test_predicted_lists_of_nothing():
    head = MultiLabel(3, 4, bias=False)
    assert head.predict(torch.zeros(2, 3)).shape == (2, 0)
    assert torch.isfinite(head(torch.zeros(2, 3), head.predict(torch.zeros(2, 3))))


def test_the_best_labels_are_told_apart_where_their_probabilities_are_1():
    linear = torch.nn.Linear(1, 5, bias=False)
    linear.weight.data[:, 0] = torch.tensor([80.0, 90.0, 70.0, 90.0, -1.0])
    head = MultiLabel.from_linear(linear)
    best = head.topk(torch.ones(1), 4)
    assert best.classes.tolist() == [1, 3, 0, 2]
    assert torch.equal(best.values, torch.zeros(4))


def test_probabilities():
    scores = torch.tensor([[2.0, -1.0, 0.0]])
    linear = torch.nn.Linear(1, 3, bias=False)
    linear.weight.data.copy_(scores.mT)
    expected = {"zlpr": (2 * scores).sigmoid(), "bce": scores.sigmoid()}
    expected |= {"asymmetric": scores.sigmoid(), "sparsemax": sparsemax(scores)}
    for loss, probs in expected.items():
        head = MultiLabel.from_linear(linear, loss=loss)
        torch.testing.assert_close(head.probability(torch.ones(1, 1)), probs)


def test_options_are_saved(tmp_path):
    options = {"gamma_negative": 2.0, "margin": 0.0}
    head = MultiLabel(
        3, 9, "asymmetric", label_smoothing=0.1, loss_options=options, reduction="sum"
    )
    head.save(tmp_path)
    loaded = MultiLabel.load(tmp_path)
    assert repr(loaded) == repr(head)
    hidden, lists = torch.randn(4, 3), torch.randint(9, (4, 2))
    assert torch.equal(loaded(hidden, lists), head(hidden, lists))
    dense_labels = dense(lists, 0.1, 9).float()
    right = asymmetric_loss(head.to_linear()(hidden), dense_labels, reduction="sum", **options)
    torch.testing.assert_close(head(hidden, lists), right)


@pytest.mark.parametrize("n_classes", [None, 23])
def test_a_calibrator_gives_probabilities_and_thresholds(tmp_path, n_classes):
    head, hidden, _ = made("zlpr")
    scores = head.to_linear()(hidden).detach()
    fitted = ZLPRCalibrator(n_classes).fit(scores, torch.rand(scores.shape) < 0.3)
    head.calibrator = fitted
    head.save(tmp_path)
    for each in (head, MultiLabel.load(tmp_path)):
        with torch.no_grad():
            torch.testing.assert_close(each.probability(hidden), fitted(scores))
            classes = torch.randint(23, (2, 5, 4))
            chosen = fitted(scores).gather(-1, classes)
            torch.testing.assert_close(each.probability(hidden, classes), chosen)
            best = each.topk(hidden, 3)
        torch.testing.assert_close(best.values.exp(), fitted(scores).gather(-1, best.classes))
        assert torch.equal(dense(each.predict(hidden)) > 0, fitted.predict(scores))
    torch.testing.assert_close(
        head.probability(hidden, classes), head.probability(hidden).gather(-1, classes)
    )


@with_each_loss
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_kept_graph_can_be_walked_again(loss, reduction):
    head, hidden, lists = made(loss, reduction=reduction, chunk_rows=3)
    leaves = [hidden, *head.parameters()]
    total = head(hidden, lists).sum()
    first, second, third = (
        torch.autograd.grad(factor * total, leaves, retain_graph=True) for factor in (1.0, 3.0, 1.0)
    )
    torch.testing.assert_close([3.0 * each for each in first], list(second))
    torch.testing.assert_close(first, third)


def test_a_weight_changed_in_place_before_backward_is_found_out():
    head, hidden, lists = made("sparsemax")
    total = head(hidden, lists)
    with torch.no_grad():
        head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@with_each_loss
def test_a_reduction_that_does_not_exist_is_refused(loss):
    head, hidden, lists = made(loss)
    head.reduction = "avg"
    with pytest.raises(ValueError, match="reduction: expected one of"):
        head(hidden, lists)


@with_each_loss
def test_lists_of_any_integers(loss):
    head, hidden, lists = made(loss)
    right = head(hidden, lists)
    assert head(hidden, lists.int()) == right
    # Sums of the other form may have another order.
    flat = head(hidden, lists.to(torch.int16).flatten(), torch.arange(0, 31, 3).int())
    torch.testing.assert_close(flat, right)


@pytest.mark.parametrize("chunk_classes", [1, 7, "low"])
def test_chunk_classes_bound_the_slabs(chunk_classes):
    for loss in ("zlpr", "bce"):
        head, hidden, lists = made(loss, chunk_classes=chunk_classes)
        right = LOSSES[loss](head.to_linear()(hidden), dense(lists))
        torch.testing.assert_close(head(hidden, lists), right)
    with pytest.raises(ValueError, match=r"chunk_classes: expected 'auto'.*chunk_rows="):
        MultiLabel(2, 3, "asymmetric", chunk_classes=chunk_classes)


def test_chunk_classes_are_what_is_held():
    head, hidden, lists = (
        MultiLabel(6, 640, chunk_classes=64),
        torch.randn(32, 6),
        torch.randint(640, (32, 3)),
    )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        head(hidden, lists).backward()
    largest = max(event.self_cpu_memory_usage for event in seen.events())
    assert 0 < largest <= max(head.weight.nbytes, (32 * 64 + 1) * 4)


class TestClassWeight:
    """There are none: the losses of labels have no weights per label."""

    def test_in_the_constructor(self):
        with pytest.raises(TypeError, match="class_weight"):
            MultiLabel(2, 3, class_weight=torch.ones(3))

    def test_from_a_layer(self):
        with pytest.raises(TypeError, match="class_weight: expected none"):
            MultiLabel.from_linear(torch.nn.Linear(2, 3), class_weight=torch.ones(3))

    def test_set_later(self):
        head = MultiLabel(2, 3)
        head.class_weight = torch.ones(3)
        with pytest.raises(TypeError, match="class_weight: expected none"):
            head(torch.zeros(1, 2), torch.zeros(1, 1).long())


class TestConfig:
    @pytest.mark.parametrize("loss", ["zlpr", "asymmetric"])
    def test_it_makes_the_same_head(self, loss):
        head, hidden, lists = made(
            loss, label_smoothing=0.1, reduction="sum", chunk_rows=4, ignore_index=-1,
            loss_options={"margin": 0.1} if loss == "asymmetric" else None,
            calibrator=ZLPRCalibrator(23, threshold="f1"),
        )  # fmt: skip
        scores = head.to_linear()(hidden).detach()
        head.calibrator.fit(scores, torch.rand(scores.shape) < 0.3)
        other = MultiLabel(**head.config(), dtype=torch.float64)
        assert repr(other) == repr(head)
        other.load_state_dict(head.state_dict())
        lists = torch.where(lists == PAD, -1, lists)
        assert torch.equal(other(hidden, lists), head(hidden, lists))
        assert torch.equal(other.predict(hidden), head.predict(hidden))
        assert other.calibrator is not head.calibrator

    def test_what_from_linear_makes_can_be_loaded(self, tmp_path):
        head = MultiLabel.from_linear(
            torch.nn.Linear(4, 9), loss="bce", chunk_classes=3, calibrator=ZLPRCalibrator()
        )
        head.save(tmp_path)
        loaded = MultiLabel.load(tmp_path)
        assert repr(loaded) == repr(head)
        hidden = torch.randn(3, 4)
        assert torch.equal(loaded.probability(hidden), head.probability(hidden))


class TestBiasFromCounts:
    COUNTS = (5, 0, 20, 10)

    @pytest.mark.parametrize("loss", ["zlpr", "bce", "asymmetric"])
    def test_probabilities_are_the_shares_of_rows(self, loss):
        head = MultiLabel(3, 4, loss, dtype=torch.float64)
        head.init_bias_from_counts(self.COUNTS, n_rows=20)
        right = torch.tensor([0.25, 0.025, 0.975, 0.5], dtype=torch.float64)
        torch.testing.assert_close(head.probability(head.weight.new_zeros(3)), right)

    def test_counts_that_are_shares_of_rows(self):
        head = MultiLabel(3, 4, "bce", dtype=torch.float64)
        head.init_bias_from_counts([0.25, 0.0, 1.0, 0.02], n_rows=1)
        right = torch.tensor([0.25, 0.01, 0.99, 0.02], dtype=torch.float64)
        torch.testing.assert_close(head.probability(head.weight.new_zeros(3)), right)

    def test_sparsemax_starts_at_the_shares_of_labels(self):
        head = MultiLabel(3, 4, "sparsemax", dtype=torch.float64)
        right = torch.tensor([5, 0.5, 20, 10], dtype=torch.float64)
        for n_rows in (None, 20):
            head.init_bias_from_counts(self.COUNTS, n_rows)
            torch.testing.assert_close(sparsemax(head.bias.detach()), right / right.sum())

    @pytest.mark.parametrize(
        ("options", "given", "words"),
        [
            ({}, {}, "n_rows: expected the number of rows"),
            ({}, {"n_rows": 19}, "counts: expected at most n_rows=19"),
            ({"loss": "sparsemax"}, {"n_rows": 19}, "counts: expected at most n_rows=19"),
            ({"bias": False}, {"n_rows": 20}, "a head with biases"),
        ],
    )
    def test_what_cannot_be(self, options, given, words):
        head = MultiLabel(3, 4, **options)
        before = None if head.bias is None else head.bias.detach().clone()
        with pytest.raises(ValueError, match=words):
            head.init_bias_from_counts(self.COUNTS, **given)
        assert head.bias is None or torch.equal(head.bias, before)


def test_there_is_no_sample():
    with pytest.raises(NotImplementedError, match=r"torch\.bernoulli"):
        MultiLabel(2, 3).sample(torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"loss": "softmax"}, ValueError, "loss: expected one of .*zlpr.*sparsemax"),
        ({"label_smoothing": 0.7}, ValueError, "label_smoothing: expected 0 to below 0.5"),
        ({"ignore_index": None}, TypeError, "ignore_index: expected an int"),
        ({"loss_options": {"margin": 0.1}}, ValueError, "loss_options: expected none"),
        ({"loss": "asymmetric", "loss_options": {"margin": 2.0}}, ValueError, "margin"),
        ({"calibrator": torch.nn.Identity()}, TypeError, "calibrator: expected a ZLPRCalibrator"),
        ({"calibrator": ZLPRCalibrator(4)}, ValueError, "calibrator: expected one for 3 labels"),
        (
            {"calibrator": ZLPRCalibrator(), "loss": "sparsemax"},
            ValueError,
            "calibrator: expected none",
        ),
        ({"n_classes": 0}, ValueError, "n_classes: expected at least 1"),
    ],
)
def test_bad_options(options, error, words):
    with pytest.raises(error, match=words):
        MultiLabel(**{"in_features": 2, "n_classes": 3} | options)


@pytest.mark.parametrize("threshold", ["0", True, torch.zeros(4)])
def test_bad_thresholds(threshold):
    with pytest.raises((TypeError, ValueError), match="threshold: expected"):
        MultiLabel(2, 3).predict(torch.zeros(1, 2), threshold=threshold)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options", [{}, {"gamma_negative": 2.5, "margin": 0.0, "focus_gradient": False}]
)
@pytest.mark.parametrize("soft", [False, True])
def test_the_asymmetric_loss_is_that_of_scores_and_dense_labels(soft, options, reduction):
    head = MultiLabel(
        6, 40, loss="asymmetric", reduction=reduction, loss_options=options, dtype=torch.float64
    )
    hidden = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    positives = torch.stack([torch.randperm(40)[:4] for _ in range(6)]).view(2, 3, 4)
    positives[0, 0, 1:] = -100
    values = torch.rand(2, 3, 4, dtype=torch.float64) if soft else None
    labels = torch.zeros(2, 3, 41, dtype=torch.float64)
    given = torch.ones(2, 3, 4, dtype=torch.float64) if values is None else values
    labels.scatter_(-1, torch.where(positives < 0, 40, positives), given)
    scores = torch.nn.functional.linear(hidden, head.weight, head.bias)
    expected = asymmetric_loss(scores, labels[..., :40], reduction=reduction, **options)
    made = head(hidden, positives, values=values)
    torch.testing.assert_close(made, expected)
    wanted = [hidden, head.weight, head.bias]
    upstream = torch.randn_like(made)
    for one, other in zip(
        torch.autograd.grad(made, wanted, upstream),
        torch.autograd.grad(expected, wanted, upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_gradients_of_a_weighted_sum_are_made_once(steps):
    rows, weight = torch.randn(7, 3).double().requires_grad_(), torch.randn(4, 3).double()
    weights, weight = torch.rand(7).double(), weight.requires_grad_()
    own, calls = torch.randn(7, 4).double(), []

    def losses(some, of_some, vectors):
        calls.append(len(some))
        return ((some @ vectors.t()).exp() * of_some).sum(-1)

    chunks = [slice(a, min(7, a + steps)) for a in range(0, 7, steps)]
    total = weighted_sum_in_chunks(losses, rows, [own], [weight], chunks, weights)
    expected = (losses(rows, own, weight) * weights).sum()
    del calls[-1]
    torch.testing.assert_close(total, expected)
    leaves = rows, weight
    for factor in (1.0, 3.0):
        found = torch.autograd.grad(factor * total, leaves, retain_graph=True)
        wanted = torch.autograd.grad(factor * expected, leaves, retain_graph=True)
        torch.testing.assert_close(found, wanted)
    assert calls == [each.stop - each.start for each in chunks]
    made = []
    for each in (total, expected):
        first = torch.autograd.grad(each.square(), leaves, create_graph=True)
        made.append(torch.autograd.grad(sum(some.square().sum() for some in first), leaves))
    torch.testing.assert_close(*made)
