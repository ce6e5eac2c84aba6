"""Sampled softmax: its loss by hand, its bias against the exact gradient, and its options."""

import copy
import itertools
import math
from functools import partial

import pytest
import torch
from sampled import Scripted, every_draw, expected_gradient

from lastlayer import samplers
from lastlayer.fused.sampled import Rule, sampled_loss
from lastlayer.heads import (
    FullSoftmax,
    ImportanceSampling,
    PartialSoftmax,
    SampledSoftmax,
    TargetSampling,
    in_batch_softmax_loss,
    target_partitions,
)
from lastlayer.optim import RowAdam
from lastlayer.testing import check_head

UNEVEN = samplers.Unigram(range(1, 24))
HEADS = {
    "exact": partial(SampledSoftmax, 7, 23, UNEVEN, 10),
    "sparse": partial(SampledSoftmax, 7, 23, UNEVEN, 10, sparse=True),
    "classic": partial(SampledSoftmax, 7, 23, UNEVEN, 10, correction="classic", head_classes=3),
    "plain": partial(
        SampledSoftmax,
        7,
        23,
        samplers.Uniform(23),
        10,
        correction="none",
        temperature=0.7,
        bias=False,
    ),
    "a head of chosen classes": partial(
        SampledSoftmax, 7, 23, UNEVEN, 10, head_classes=[5, 1, 7], ignore_index=4
    ),
    "a tail of its own": partial(
        SampledSoftmax, 7, 23, samplers.Unigram(range(1, 19)), 10, head_classes=5, chunk_rows=2
    ),
    "different classes": partial(SampledSoftmax, 7, 23, UNEVEN, 10, unique=True, ignore_index=None),
    "the best": partial(PartialSoftmax, 7, 23, 5),
    "the best, sparse": partial(PartialSoftmax, 7, 23, 5, sparse=True, chunk_rows=3),
    "a part of the data": partial(TargetSampling, 7, 23),
}


@pytest.mark.parametrize("name", HEADS)
def test_contract(name, seed):
    compiled = name in ("exact", "a head of chosen classes", "the best")
    check_head(
        HEADS[name], loss_is_nll=False, compile="aot_eager" if compiled else False, draws=2000,
        seed=seed,
    )  # fmt: skip


def by_hand(head, hidden, target, ids):
    """The loss of each row from all scores, as the formulas say it."""
    scores = (hidden @ head.weight.t() + (0 if head.bias is None else head.bias)) / head.temperature
    log_q = head.sampler.log_prob(torch.arange(head.n_classes), dtype=torch.float64)
    losses = []
    for row, own in zip(scores, target.tolist(), strict=True):
        drawn = [c for c in ids.tolist() if c != own]
        left = math.log1p(-math.exp(log_q[own]))
        if head.correction == "exact":
            logits = [row[c] - log_q[c] - math.log(len(drawn)) + left for c in drawn]
            positive = row[own]
        elif head.correction == "classic":
            logits = [row[c] - log_q[c] - math.log(len(ids)) for c in drawn]
            positive = row[own] - log_q[own] - math.log(len(ids))
        else:
            logits, positive = [row[c] for c in drawn], row[own]
        losses.append(torch.stack([positive, *logits]).logsumexp(0) - positive)
    return torch.stack(losses)


@pytest.mark.parametrize("correction", ["exact", "classic", "none"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_the_loss_is_that_of_the_formula(correction, bias, temperature):
    head = SampledSoftmax(
        6, 23, samplers.Unigram(range(1, 24)), 15, correction=correction, bias=bias,
        temperature=temperature, reduction="none", dtype=torch.float64,
    )  # fmt: skip
    hidden, target = torch.randn(9, 6).double().requires_grad_(), torch.randint(23, (9,))
    ids = head.sampler.sample(15, rng_counter=head.rng_counter)
    target[0] = ids[3]  # a hit
    losses, expected = head(hidden, target), by_hand(head, hidden, target, ids)
    # Log-probabilities of draws are float32.
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    upstream = torch.randn(9).double()
    leaves = [hidden, *head.parameters()]
    made = torch.autograd.grad(losses, leaves, upstream)
    for one, other in zip(made, torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


LOGITS = torch.tensor([1.2, 0.3, -0.5, 0.8, -1.0, 0.1], dtype=torch.float64)
COUNTS = (6, 3, 1, 2, 1, 2)


def biases(n, **options):
    """Σ |E[gradient] - exact| over all classes and the mean of all targets, over every draw."""
    total = 0.0
    for target in (0, 2):
        made = expected_gradient(SampledSoftmax, LOGITS, COUNTS, target, n, **options)
        exact = LOGITS.softmax(0)
        exact[target] -= 1.0
        total += float((made - exact).abs().sum())
    return total


def test_the_expected_gradient_comes_near_the_exact_one_as_one_over_n():
    of = {n: biases(n) for n in (1, 2, 4)}
    # With hits left out some rows have fewer draws: the fall is a little less than one half.
    assert of[2] < 0.65 * of[1]
    assert of[4] < 0.6 * of[2]


def test_the_exact_correction_has_less_bias_than_the_classic_one_and_none():
    exact, classic, none = (biases(3, correction=each) for each in ("exact", "classic", "none"))
    assert exact < 0.7 * classic
    assert classic < none


def test_different_classes_have_less_bias_than_repeated_ones():
    repeated, different = biases(3), 0.0
    for target in (0, 2):
        head = SampledSoftmax(1, 6, samplers.Unigram(COUNTS), 3, unique=True, dtype=torch.float64,
                              bias=False)  # fmt: skip
        with torch.no_grad():
            head.weight.copy_(LOGITS[:, None])
        total, times = torch.zeros(6, dtype=torch.float64), 1500
        for _ in range(times):
            head.weight.grad = None
            head(torch.ones(1, 1).double(), torch.tensor([target])).backward()
            total += head.weight.grad[:, 0]
        exact = LOGITS.softmax(0)
        exact[target] -= 1.0
        different += float((total / times - exact).abs().sum())
    # A mean of 1500 draws is off by about 0.02 in all.
    assert different < repeated


@pytest.mark.parametrize(("sigma", "n"), [(0.5, 20), (2.0, 20), (0.5, 200), (2.0, 200)])
def test_the_order_of_corrections_on_zipf_classes(sigma, n):
    v, rows = 200, 20_000 if n == 20 else 4000
    generator = torch.Generator().manual_seed(int(10 * sigma) + n)
    sampler = samplers.Unigram(1.0 / torch.arange(1, v + 1))
    log_q = sampler.log_prob(torch.arange(v))
    logits = log_q + sigma * torch.randn(v, generator=generator)
    ids = sampler.sample(rows * n, rng_counter=(3, n)).view(rows, n)
    far = {"exact": 0.0, "classic": 0.0, "none": 0.0}
    for target in (0, 1, 3, 10):
        own, left = log_q[target], torch.log(-torch.expm1(log_q[target]))
        classic = (own + math.log(n)).expand(rows, 1)
        ways = {
            "exact": (log_q[ids], Rule(average=True), {"shift": left.expand(rows)}),
            "classic": (log_q[ids] + math.log(n), Rule(), {"target_log_expected": classic}),
            "none": (torch.zeros(rows, n), Rule(), {}),
        }
        exact = logits.softmax(0)
        exact[target] -= 1.0
        for name, (log_expected, rule, rest) in ways.items():
            weight = logits[:, None].clone().requires_grad_()
            own_target = torch.full((rows, 1), target)
            loss, _ = sampled_loss(
                torch.ones(rows, 1), weight, None, own_target, ids, log_expected, rule,
                reduction="mean", **rest,
            )  # fmt: skip
            loss.backward()
            far[name] += float((weight.grad[:, 0] - exact).abs().sum())
    assert far["exact"] < 0.8 * far["classic"]
    assert far["exact"] < 0.3 * far["none"]


@pytest.mark.parametrize("head_classes", [4, [0, 1, 2, 3], [2, 9, 17]])
@pytest.mark.parametrize("own_tail", [False, True])
def test_with_all_of_the_tail_drawn_once_the_loss_is_exact(head_classes, own_tail):
    size = 4 if head_classes == 4 else len(head_classes)
    sampler = samplers.Unigram(range(1, 21 - size if own_tail else 21))
    head = SampledSoftmax(
        5, 20, sampler, sampler.n_classes, head_classes=head_classes, unique=True, reduction="none"
    )
    hidden, target = torch.randn(20, 5), torch.arange(20)
    losses = head(hidden, target)
    torch.testing.assert_close(losses, head.eval()(hidden, target))


def test_an_exact_head_makes_the_estimate_better():
    v, budget = 2000, 256
    generator = torch.Generator().manual_seed(4)
    counts = 1.0 / torch.arange(1, v + 1)
    logits = counts.log() + 2.0 * torch.randn(v, generator=generator)
    exact = logits.softmax(0)
    errors = {}
    for name, n_head in (("tail", 128), ("all", 0)):
        sampler = samplers.Unigram(counts[n_head:])
        head = SampledSoftmax(1, v, sampler, budget - n_head, head_classes=n_head, bias=False)
        with torch.no_grad():
            head.weight.copy_(logits[:, None])
        total = 0.0
        for target in range(40):
            head.weight.grad = None
            head(torch.ones(1, 1), torch.tensor([target])).backward()
            truth = exact.clone()
            truth[target] -= 1.0
            total += float((head.weight.grad[:, 0] - truth).square().sum())
        errors[name] = total
    assert errors["tail"] < 0.7 * errors["all"]


def test_several_targets_count_with_the_mean_of_their_log_probabilities():
    head = SampledSoftmax(
        5, 12, samplers.Unigram(range(1, 13)), 12, unique=True, reduction="none",
        dtype=torch.float64,
    )  # fmt: skip
    hidden = torch.randn(4, 5).double().requires_grad_()
    target = torch.tensor([[3, 5, -100], [7, -100, -100], [1, 1, 2], [-100, -100, -100]])
    losses = head(hidden, target)
    log_prob = head.log_prob(hidden)
    expected = torch.stack([
        -(log_prob[0, 3] + log_prob[0, 5]) / 2, -log_prob[1, 7],
        -(2 * log_prob[2, 1] + log_prob[2, 2]) / 3, torch.zeros(()).double(),
    ])  # fmt: skip
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(head.eval()(hidden, target), expected)
    leaves, upstream = [hidden, *head.parameters()], torch.randn(4).double()
    made = torch.autograd.grad(losses, leaves, upstream)
    for one, other in zip(made, torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for reduction, total in (("sum", expected.sum()), ("mean", expected.sum() / 3)):
        head.reduction = reduction
        for mode in (True, False):
            torch.testing.assert_close(
                head.train(mode)(hidden, target), total, rtol=1e-6, atol=1e-6
            )


def test_no_target_of_a_row_is_its_negative():
    head = SampledSoftmax(3, 4, Scripted((1, 1, 1, 1), [2, 0, 3, 2]), 4, reduction="none")
    hidden = torch.randn(1, 3)
    scores = hidden @ head.weight.t() + head.bias
    loss = head(hidden, torch.tensor([[2, 3]]))
    # Only 0 is left, which stands for the classes 0 and 1.
    total = torch.stack([scores[0, 2], scores[0, 3], scores[0, 0] + math.log(2.0)]).logsumexp(0)
    torch.testing.assert_close(loss[0], total - (scores[0, 2] + scores[0, 3]) / 2)


def test_a_row_whose_draws_are_all_hits_has_no_loss():
    head = SampledSoftmax(3, 4, Scripted((1, 1, 1, 1), [2, 2]), 2, reduction="none")
    hidden = torch.randn(2, 3, requires_grad=True)
    losses = head(hidden, torch.tensor([2, 1]))
    losses.sum().backward()
    assert losses[0] == 0.0
    assert losses[1] > 0.0
    assert hidden.grad[0].abs().sum() == 0.0
    assert hidden.grad.isfinite().all()


def test_partial_softmax_is_the_softmax_of_the_best_and_the_target():
    head = PartialSoftmax(5, 30, 4, reduction="none", dtype=torch.float64)
    hidden, target = torch.randn(12, 5).double().requires_grad_(), torch.randint(30, (12,))
    scores = hidden @ head.weight.t() + head.bias
    expected = []
    for row, own in zip(scores, target.tolist(), strict=True):
        chosen = {own, *row.topk(4).indices.tolist()}
        expected.append(row[sorted(chosen)].logsumexp(0) - row[own])
    expected = torch.stack(expected)
    losses = head(hidden, target)
    torch.testing.assert_close(losses, expected)
    leaves = [hidden, head.weight, head.bias]
    made = torch.autograd.grad(losses.sum(), leaves)
    for one, other in zip(made, torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(one, other)
    assert bool((losses <= head.eval()(hidden, target) + 1e-12).all())


def test_target_sampling_is_a_softmax_over_the_classes_of_a_part():
    target = torch.randint(50, (300,))
    head = TargetSampling(6, 50, sparse=True)
    hidden = torch.randn(300, 6)
    torch.testing.assert_close(head(hidden, target), head.eval()(hidden, target))
    head.train()
    covered = 0
    for part in target_partitions(target, 10):
        assert part.start == covered
        covered = part.stop
        some = slice(part.start, part.stop)
        head.use(part.classes)
        scores = hidden[some] @ head.weight[part.classes].t() + head.bias[part.classes]
        places = torch.searchsorted(part.classes, target[some])
        assert torch.equal(part.classes[places], target[some])
        expected = torch.nn.functional.cross_entropy(scores, places)
        loss = head(hidden[some], target[some])
        torch.testing.assert_close(loss, expected)
        head.weight.grad = None
        loss.backward()
        assert torch.equal(head.weight.grad.coalesce().indices()[0], part.classes)
        if part.stop < 300:
            assert len(part.classes) == 10
            assert target[part.stop] not in part.classes
    assert covered == 300
    head.use(None)
    assert head.classes is None


def test_partitions_of_one_class_of_nothing_and_of_all():
    assert [part[:2] for part in target_partitions([4, 4, 4], 1)] == [(0, 3)]
    assert list(target_partitions(torch.empty(0, dtype=torch.int64), 3)) == []
    assert [part[:2] for part in target_partitions(range(10), 100)] == [(0, 10)]
    with pytest.raises(TypeError, match="target: expected class ids"):
        next(target_partitions([0.5], 2))
    with pytest.raises(ValueError, match="classes: expected class ids from 0 to 9, got 10"):
        TargetSampling(3, 10).use([3, 10])
    with pytest.raises(ValueError, match="classes: expected unique class ids, got class 3 twice"):
        TargetSampling(3, 10).use([3, 3])


@pytest.mark.parametrize("correction", ["exact", "classic", "none"])
def test_in_batch_loss_is_that_of_the_formula(correction):
    n, m = 6, 9
    query = torch.randn(n, 4).double().requires_grad_()
    key = torch.randn(m, 4).double().requires_grad_()
    ids = torch.tensor([3, 1, 3, 4, 5, 1, 9, 3, 2])
    log_q = torch.randn(m).double().log_softmax(0)
    scores = query @ key.t() / 0.3
    expected = []
    for i in range(n):
        others = [j for j in range(m) if ids[j] != ids[i]]
        if correction == "exact":
            left = torch.log1p(-log_q[i].exp()) - math.log(len(others))
            logits, own = [scores[i, j] - log_q[j] + left for j in others], scores[i, i]
        elif correction == "classic":
            logits, own = [scores[i, j] - log_q[j] for j in others], scores[i, i] - log_q[i]
        else:
            logits, own = [scores[i, j] for j in others], scores[i, i]
        expected.append(torch.stack([own, *logits]).logsumexp(0) - own)
    expected = torch.stack(expected)
    losses = in_batch_softmax_loss(
        query, key, log_q, ids=ids, correction=correction, temperature=0.3, reduction="none"
    )
    torch.testing.assert_close(losses, expected)
    upstream = torch.randn(n).double()
    made = torch.autograd.grad(losses, [query, key], upstream)
    for one, other in zip(made, torch.autograd.grad(expected, [query, key], upstream), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("correction", ["exact", "classic", "none"])
@pytest.mark.parametrize("n", [1, 6])
def test_in_batch_losses_of_a_small_problem_are_those_of_chunks(correction, n):
    """A small problem takes one product in torch, unless chunks are asked for."""
    query, key = torch.randn(n, 4).double(), torch.randn(n + 2, 4).double()
    log_q = torch.randn(n + 2).double().log_softmax(0)
    some = torch.randint(3, (n + 2,))
    for ids in (None, some, torch.zeros_like(some)):
        for reduction in ("mean", "sum"):
            made = []
            for chunk_rows in ("auto", 1):
                leaves = query.clone().requires_grad_(), key.clone().requires_grad_()
                loss = in_batch_softmax_loss(
                    *leaves, log_q, ids=ids, correction=correction, temperature=0.7,
                    reduction=reduction, chunk_rows=chunk_rows,
                )  # fmt: skip
                made.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
            torch.testing.assert_close(*made, rtol=1e-10, atol=1e-10)


def test_in_batch_loss_of_scores_that_are_not_finite():
    query = torch.tensor([[torch.inf], [1.0]])
    key = torch.tensor([[1.0], [1.0]])
    made = [in_batch_softmax_loss(query, key, correction="none", chunk_rows=c) for c in ("auto", 1)]
    torch.testing.assert_close(*made, equal_nan=True)


def test_in_batch_loss_without_ids_leaves_out_its_own_key_alone():
    query, key = torch.randn(5, 3), torch.randn(5, 3)
    loss = in_batch_softmax_loss(query, key, correction="none")
    expected = torch.nn.functional.cross_entropy(query @ key.t(), torch.arange(5))
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_q": None}, "log_q: expected one log-probability per key, got None"),
        ({"log_q": torch.zeros(4)}, r"log_q: expected shape \(5,\)"),
        ({"key": torch.zeros(4, 3)}, r"key: expected shape \(m, 3\) with m of at least 5"),
        ({"ids": torch.zeros(5)}, "ids: expected torch.int64"),
        ({"temperature": 0.0}, "temperature: expected a finite number above 0"),
        ({"correction": "both"}, "correction: expected one of"),
        ({"query": torch.zeros(5)}, r"query: expected shape \(n, d\)"),
    ],
)
def test_in_batch_loss_refuses_what_does_not_fit(change, message):
    given = {"query": torch.zeros(5, 3), "key": torch.zeros(5, 3), "log_q": torch.zeros(5)}
    with pytest.raises((ValueError, TypeError), match=message):
        in_batch_softmax_loss(**{**given, **change})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_samples": 24, "unique": True}, "n_samples: expected at most 23.*unique"),
        ({"n_samples": 0}, "n_samples: expected at least 1"),
        ({"correction": "logq"}, "correction: expected one of"),
        ({"temperature": -1.0}, "temperature: expected a finite number above 0"),
        ({"head_classes": 23}, "head_classes: expected 0 to 22"),
        ({"head_classes": -1}, "head_classes: expected 0 to 22"),
        ({"head_classes": [3, 3]}, "head_classes: expected unique class ids"),
        ({"head_classes": [30]}, "head_classes: expected class ids from 0 to 22, got 30"),
        ({"head_classes": 2.0}, "head_classes: expected the number"),
        ({"sampler": samplers.Uniform(22)}, "sampler: expected one for 23 classes.*got one for 22"),
        ({"sampler": [1, 2]}, "sampler: expected one of lastlayer.samplers.*got list"),
        ({"sampler": samplers.InBatch(23)}, "sampler: expected one without context, got InBatch"),
        ({"seed": 1.5}, "seed: expected an int"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    given = {"sampler": UNEVEN, "n_samples": 5, **options}
    with pytest.raises((ValueError, TypeError), match=message):
        SampledSoftmax(3, 23, **given)


def test_every_draw_is_every_draw():
    draws = list(every_draw(3, 2))
    assert draws == [list(each) for each in itertools.product(range(3), repeat=2)]
    head = SampledSoftmax(1, 3, Scripted((2, 1, 1), [0, 2]), 2)
    assert copy.deepcopy(head).sampler.sample(2).tolist() == [0, 2]


@pytest.mark.parametrize("n_classes", range(2, 11))
def test_targets_that_are_all_there_is(n_classes):
    """Their probabilities sum to 1 and a little, by rounding; no draw counts."""
    for sampler in (
        samplers.Uniform(n_classes),
        samplers.Unigram([1 / rank for rank in range(1, n_classes + 1)]),
    ):
        head = SampledSoftmax(6, n_classes, sampler, 5)
        hidden = torch.randn(2, 6, requires_grad=True)
        loss = head(hidden, torch.arange(n_classes).expand(2, n_classes))
        loss.backward()
        assert loss.isfinite()
        assert hidden.grad.isfinite().all()
        covered = SampledSoftmax(6, n_classes, sampler, 64, head_classes=n_classes - 1)
        target = torch.full((2,), n_classes - 1)
        exact = FullSoftmax(6, n_classes)
        exact.load_state_dict({"weight": covered.weight, "bias": covered.bias})
        torch.testing.assert_close(covered(hidden, target), exact(hidden, target))


def test_partitions_leave_out_what_is_ignored():
    parts = list(target_partitions([3, -100, 1, -100, 2, 2, -100], 2))
    assert [(each.start, each.stop, each.classes.tolist()) for each in parts] == [
        (0, 4, [1, 3]), (4, 7, [2]),
    ]  # fmt: skip
    assert [each.classes.tolist() for each in target_partitions([-100] * 3, 2)] == [[]]
    (part,) = target_partitions([7, 7], 2, ignore_index=None)
    assert part.classes.tolist() == [7]


def test_ignored_rows_touch_no_class():
    head = PartialSoftmax(6, 40, k=5, sparse=True)
    hidden, target = torch.randn(4, 6), torch.tensor([-100, 3, -100, -100])
    before = head.weight.detach().clone()
    head(hidden, target).backward()
    assert head.weight.grad.coalesce().indices().shape[1] <= 6
    RowAdam(head.parameters(), weight_decay=0.5).step()
    assert int((head.weight != before).any(1).sum()) <= 6


@pytest.mark.parametrize("wrong", [0.1, -math.inf, math.nan])
def test_logarithms_of_probabilities_are_checked(wrong):
    query, log_q = torch.randn(4, 6), torch.full((4,), -2.0)
    log_q[2] = wrong
    with pytest.raises(ValueError, match=r"log_q: expected logarithms .* at position 2"):
        in_batch_softmax_loss(query, query, log_q)


def test_a_probability_that_rounding_left_above_one():
    query = torch.randn(3, 4)
    made = [
        in_batch_softmax_loss(
            query, query.clone(), torch.tensor([first, -30.0, -30.0]), reduction="none"
        )
        for first in (1e-7, 0.0)
    ]
    assert not made[0].isnan().any()
    torch.testing.assert_close(*made)


def sampled(**options):
    return SampledSoftmax(6, 9, samplers.Uniform(9), **options)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: sampled(head_classes={1}), TypeError, "head_classes: expected"),
        (lambda: sampled(head_classes=None), TypeError, "head_classes: expected"),
        (lambda: sampled(head_classes=-1), ValueError, "expected 0 to 8.*got -1"),
        (lambda: TargetSampling(6, 9).use({1}), TypeError, "classes: expected.*got set"),
        (
            lambda: ImportanceSampling(6, 9, samplers.Uniform(9), 8, max_samples=70),
            ValueError,
            "max_samples: expected None without target_ess",
        ),
    ],
)
def test_bad_options(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("head_classes", [3, [7, 8, 9]])
def test_classes_that_always_count_are_there_after_meta(head_classes):
    def make(**how):
        return SampledSoftmax(
            6, 10, samplers.Unigram(range(1, 11)), 5, head_classes=head_classes, **how
        )

    head, other = make(), make(device="meta").to_empty(device="cpu")
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.head_ids, head.head_ids)
    hidden, target = torch.randn(8, 6), torch.randint(10, (8,))
    torch.testing.assert_close(other(hidden, target), head(hidden, target))
