"""Sampled heads at their edges: forward passes made twice, nothing to look at, all there is."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lastlayer import heads, samplers
from lastlayer.heads import in_batch_softmax_loss, target_partitions
from lastlayer.optim import RowAdam

N_CLASSES, D = 40, 6
COUNTS = [1 / rank for rank in range(1, N_CLASSES + 1)]


def unigram():
    return samplers.Unigram(COUNTS)


DRAWING = {
    "sampled softmax": lambda: heads.SampledSoftmax(D, N_CLASSES, unigram(), 8),
    "importance": lambda: heads.ImportanceSampling(D, N_CLASSES, unigram(), 8),
    "enough": lambda: heads.ImportanceSampling(D, N_CLASSES, unigram(), 8, target_ess=9.0),
    "noise contrastive": lambda: heads.NoiseContrastive(D, N_CLASSES, unigram(), 8),
    "negative sampling": lambda: heads.NegativeSampling(D, N_CLASSES, unigram(), 8),
    "some rows": lambda: heads.SelfNormalized(D, N_CLASSES, fraction=0.3),
}


def batch(n=20):
    return torch.randn(n, D, requires_grad=True), torch.randint(N_CLASSES, (n,))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", DRAWING)
def test_a_checkpoint_sees_the_same_draws(name, reentrant):
    head, plain = DRAWING[name](), DRAWING[name]()
    plain.load_state_dict(head.state_dict())
    batches = [batch(), batch()]
    # Both passes are waiting when the first gradient is asked for.
    losses = [checkpoint(head, *each, use_reentrant=reentrant) for each in batches]
    assert head.draws.tolist() == [0, 2]
    for (hidden, target), loss in zip(batches, losses, strict=True):
        leaves = hidden, *plain.parameters()
        wanted = torch.autograd.grad(plain(hidden, target), leaves)
        head.zero_grad(set_to_none=True)
        hidden.grad = None
        loss.backward()
        found = hidden.grad, *(each.grad for each in head.parameters())
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
    assert head.draws.tolist() == [0, 2]


def test_a_checkpoint_that_forgets_chance_is_told():
    head, (hidden, target) = DRAWING["sampled softmax"](), batch()
    loss = checkpoint(head, hidden, target, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(RuntimeError, match="preserve_rng_state=True"):
        loss.backward()


def test_a_proposal_that_learns_cannot_be_checkpointed():
    head, (hidden, target) = heads.AdaptiveImportanceSampling(D, N_CLASSES, COUNTS), batch()
    loss = checkpoint(head, hidden, target, use_reentrant=False)
    with pytest.raises(RuntimeError, match="cannot be recomputed"):
        loss.backward()


@pytest.mark.parametrize("shape", [(0,), (0, 2), (3, 0)])
def test_nothing_to_look_at(shape):
    made = [DRAWING[name]() for name in DRAWING if name != "some rows"]
    made += [heads.PartialSoftmax(D, N_CLASSES, k=5), heads.TargetSampling(D, N_CLASSES)]
    made[-1].use([1, 2])
    several = (*shape, 2)
    for head in made:
        for target in (torch.zeros(shape, dtype=torch.int64),
                       torch.zeros(several, dtype=torch.int64)):  # fmt: skip
            hidden = torch.randn(*shape, D, requires_grad=True)
            loss = head(hidden, target)
            loss.backward()
            assert loss.item() == 0.0
    adaptive = heads.AdaptiveImportanceSampling(D, N_CLASSES, COUNTS)
    nothing = torch.zeros(shape, dtype=torch.int64)
    context = torch.zeros(*shape, 1, dtype=torch.int64)
    assert adaptive(torch.randn(*shape, D), nothing, context=context).item() == 0.0


@pytest.mark.parametrize("n_classes", range(2, 11))
def test_targets_that_are_all_there_is(n_classes):
    """Their probabilities sum to 1 and a little, by rounding; no draw counts."""
    for sampler in (samplers.Uniform(n_classes), samplers.Unigram(COUNTS[:n_classes])):
        head = heads.SampledSoftmax(D, n_classes, sampler, 5)
        hidden = torch.randn(2, D, requires_grad=True)
        loss = head(hidden, torch.arange(n_classes).expand(2, n_classes))
        loss.backward()
        assert loss.isfinite()
        assert hidden.grad.isfinite().all()
        covered = heads.SampledSoftmax(D, n_classes, sampler, 64, head_classes=n_classes - 1)
        target = torch.full((2,), n_classes - 1)
        exact = heads.FullSoftmax(D, n_classes)
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
    head = heads.PartialSoftmax(D, N_CLASSES, k=5, sparse=True)
    hidden, target = torch.randn(4, D), torch.tensor([-100, 3, -100, -100])
    before = head.weight.detach().clone()
    head(hidden, target).backward()
    assert head.weight.grad.coalesce().indices().shape[1] <= 6
    RowAdam(head.parameters(), weight_decay=0.5).step()
    assert int((head.weight != before).any(1).sum()) <= 6


@pytest.mark.parametrize("mixture_rate", [100.0, 1e4, 1e6])
def test_a_large_rate_leaves_a_mixture(mixture_rate):
    sampler = samplers.AdaptiveNGram(COUNTS, 2, mixture_rate=mixture_rate)
    context = torch.randint(N_CLASSES, (8, 1))
    for _ in range(4):
        sampler.update(context, torch.randint(N_CLASSES, (8, 10)), 3 * torch.randn(8, 10))
    every = torch.arange(N_CLASSES).expand(8, -1)
    total = sampler.log_prob(every, context=context).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize("wrong", [0.1, -math.inf, math.nan])
def test_logarithms_of_probabilities_are_checked(wrong):
    query, log_q = torch.randn(4, D), torch.full((4,), -2.0)
    log_q[2] = wrong
    with pytest.raises(ValueError, match=r"log_q: expected logarithms .* at position 2"):
        in_batch_softmax_loss(query, query, log_q)


def test_importance_sampling_in_float64_has_float64_probabilities():
    head = heads.ImportanceSampling(D, N_CLASSES, unigram(), 8, dtype=torch.float64)
    hidden, target = torch.randn(5, D, dtype=torch.float64), torch.randint(N_CLASSES, (5,))
    ids = head.sampler.sample(8, counter=head.draws.clone())
    log_q = head.sampler.log_prob(ids, dtype=torch.float64)
    scores = hidden @ head.weight.T + head.bias
    logits = scores[:, ids] - log_q - math.log(8)
    wanted = (logits.logsumexp(-1) - scores.gather(1, target[:, None]).squeeze(1)).mean()
    torch.testing.assert_close(head(hidden, target), wanted, rtol=1e-13, atol=1e-13)


def test_an_audit_counts_what_each_row_drew():
    hidden, target = torch.randn(64, D), torch.randint(N_CLASSES, (64,))
    head = heads.ImportanceSampling(D, N_CLASSES, unigram(), 4, target_ess=100.0)
    found = head.audit(8.0 * hidden, target, n_draws=2)
    assert found.n_samples > 64
    assert found.took_all > 0.5
    assert "all classes taken by" in found.table()
    explained = head.explain(found, n_rows=64)
    assert explained.n_samples == found.n_samples
    assert explained.speedup < 1.0
    assert "took all classes" in explained.reason
    assert "an audit counts" in head.explain().reason


def test_what_is_always_counted_or_drawn_for_each_row_is_part_of_the_cost():
    some = heads.SampledSoftmax(D, N_CLASSES, unigram(), 4, head_classes=10).explain(n_rows=8)
    assert some.sampled.gathered == 4 + 10 + 8
    assert some.speedup == pytest.approx(N_CLASSES / (4 + 10 + 1))
    own = heads.AdaptiveImportanceSampling(D, N_CLASSES, COUNTS, n_samples=4, target_ess=4.0)
    assert own.explain(n_rows=8).sampled.gathered == 4 * 8 + 8


@pytest.mark.parametrize("rows", [0, 5])
def test_an_audit_where_no_row_counts(rows):
    head = heads.AdaptiveImportanceSampling(D, N_CLASSES, COUNTS)
    target, context = torch.full((rows,), -100), torch.zeros(rows, 1, dtype=torch.int64)
    found = head.audit(torch.randn(rows, D), target, n_draws=2, context=context)
    assert found.n_rows == 0
    assert found.mean_ess == 0.0


def sampled(**options):
    return heads.SampledSoftmax(D, 9, **options)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: sampled(head_classes={1}), TypeError, "head_classes: expected"),
        (lambda: sampled(head_classes=None), TypeError, "head_classes: expected"),
        (lambda: sampled(head_classes=-1), ValueError, "expected 0 to 8.*got -1"),
        (lambda: heads.TargetSampling(D, 9).use({1}), TypeError, "classes: expected.*got set"),
        (lambda: samplers.Unigram([1, 2], power=math.inf), ValueError, "finite number, got inf"),
        (
            lambda: heads.ImportanceSampling(D, 9, n_samples=8, max_samples=70),
            ValueError,
            "max_samples: expected None without target_ess",
        ),
    ],
)
def test_bad_options(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_weights_count_in_all_of_a_self_normalised_loss(reduction):
    options = dict(alpha=0.2, class_weight=torch.rand(9) + 0.1, reduction=reduction)
    whole = heads.SelfNormalized(4, 9, dtype=torch.float64, **options)
    nearly = heads.SelfNormalized(4, 9, dtype=torch.float64, fraction=1 - 1e-12, **options)
    nearly.load_state_dict(whole.state_dict())
    hidden, target = torch.randn(6, 4, dtype=torch.float64), torch.randint(9, (6,))
    target[2] = -100
    torch.testing.assert_close(whole(hidden, target), nearly(hidden, target))
    scores = hidden @ whole.weight.T + whole.bias
    log_z = scores.logsumexp(-1)
    weight = torch.where(target < 0, 0.0, whole.class_weight.double()[target.clamp(min=0)])
    right = scores.gather(-1, target.clamp(min=0)[:, None]).squeeze(-1)
    losses = weight * (log_z - right + 0.2 * log_z.square())
    total = {"mean": losses.sum() / weight.sum(), "sum": losses.sum(), "none": losses}[reduction]
    torch.testing.assert_close(whole(hidden, target), total)


def test_an_audit_does_not_tell_of_an_older_step():
    hidden, target = torch.randn(8, D), torch.randint(N_CLASSES, (8,))
    head = heads.TargetSampling(D, N_CLASSES)
    head.use([1, 2, 3])
    head(hidden, target)
    head.use(None)
    assert (head.audit(hidden[:6], target[:6], 2).ess == N_CLASSES).all()
    head.use([3])
    assert (head.audit(hidden, torch.full((8,), 3), 2).ess == 0).all(), "all hits"
    sampled = heads.SampledSoftmax(D, 1, n_samples=3)
    assert sampled.audit(hidden, torch.zeros(8, dtype=torch.int64), 2).log_z_error is None


@pytest.mark.parametrize("head_classes", [3, [7, 8, 9]])
def test_classes_that_always_count_are_there_after_meta(head_classes):
    def make(**how):
        return heads.SampledSoftmax(
            D, 10, samplers.Unigram(range(1, 11)), 5, head_classes=head_classes, **how
        )

    head, other = make(), make(device="meta").to_empty(device="cpu")
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.tail.head_ids, head.tail.head_ids)
    hidden, target = torch.randn(8, D), torch.randint(10, (8,))
    torch.testing.assert_close(other(hidden, target), head(hidden, target))


def test_rows_without_a_context_do_not_move_the_mixture():
    sampler = samplers.AdaptiveNGram([1.0] * 6)
    sampler.mixture.copy_(torch.tensor([858993459, 2**32 - 858993459]))
    before = sampler.mixture.clone()
    for _ in range(20):
        sampler.update(torch.full((4, 1), -1), torch.arange(4), torch.randn(4, 4))
    torch.testing.assert_close(sampler.mixture, before, rtol=0, atol=40)
    nothing = sampler.sample_with_log_prob(2, context=torch.zeros(0, 1, dtype=torch.int64))
    assert nothing.log_prob.shape == (0, 2)


def test_a_probability_that_rounding_left_above_one():
    query = torch.randn(3, 4)
    made = [
        heads.in_batch_softmax_loss(
            query, query.clone(), torch.tensor([first, -30.0, -30.0]), reduction="none"
        )
        for first in (1e-7, 0.0)
    ]
    assert not made[0].isnan().any()
    torch.testing.assert_close(*made)
