"""Importance sampling: its estimator, its stopping, and the proposal that learns."""

import math
from functools import partial

import pytest
import torch
from sampled import Scripted, expected_gradient

from lastlayer import samplers
from lastlayer.fused import sampled
from lastlayer.fused.sampled import sampled_loss
from lastlayer.heads import AdaptiveImportanceSampling, ImportanceSampling
from lastlayer.heads.sampled.importance import SELF_NORMALISED
from lastlayer.testing import check_head

UNEVEN = samplers.Unigram(range(1, 24))
COUNTS = range(1, 24)
HEADS = {
    "one block": partial(ImportanceSampling, 7, 23, UNEVEN, 10),
    "sparse": partial(
        ImportanceSampling, 7, 23, UNEVEN, 10, sparse=True, bias=False, ignore_index=None
    ),
    "until it is enough": partial(ImportanceSampling, 7, 23, UNEVEN, 10, target_ess=30),
    "enough, sparse": partial(ImportanceSampling, 7, 23, UNEVEN, 10, target_ess=30, sparse=True),
}
# Rows that draw apart are not the same alone and in a batch; here every row takes all classes.
EXACT = {
    "all classes": partial(ImportanceSampling, 7, 23, UNEVEN, 4, target_ess=4, max_samples=4),
    "adaptive": partial(
        AdaptiveImportanceSampling, 7, 23, COUNTS, n_samples=3, target_ess=3, max_samples=3
    ),
    "adaptive, sparse": partial(
        AdaptiveImportanceSampling,
        7,
        23,
        COUNTS,
        n_samples=3,
        target_ess=3,
        max_samples=3,
        sparse=True,
        order=3,
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_contract(name, seed):
    compiled = "aot_eager" if name == "one block" else False
    check_head(HEADS[name], loss_is_nll=False, compile=compiled, draws=2000, seed=seed)


@pytest.mark.parametrize("name", EXACT)
def test_contract_where_rows_take_all_classes(name, seed):
    # A proposal that has learned from a pass cannot repeat it.
    fixed = "adaptive" not in name
    check_head(EXACT[name], compile=False, checkpoint=fixed, draws=2000, seed=seed)


def test_the_loss_is_that_of_the_formula():
    ids = [4, 1, 4, 0, 7, 2]
    head = ImportanceSampling(
        5, 8, Scripted(range(1, 9), ids), 6, reduction="none", dtype=torch.float64
    )
    hidden, target = torch.randn(7, 5).double().requires_grad_(), torch.randint(8, (7,))
    scores = hidden @ head.weight.t() + head.bias
    log_q = head.sampler.log_prob(torch.tensor(ids))
    logits = scores[:, ids] - log_q
    own = scores.gather(1, target[:, None]).squeeze(1)
    expected = logits.logsumexp(1) - math.log(6) - own
    losses = head(hidden, target)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    # The gradient of the paper: weights normalised by their own sum.
    r = logits.detach().exp()
    r = r / r.sum(1, keepdim=True)
    by_scores = torch.zeros(7, 8).double()
    by_scores.index_add_(1, torch.tensor(ids), r)
    by_scores[torch.arange(7), target] -= 1.0
    made = torch.autograd.grad(losses.sum(), [hidden, head.weight, head.bias])
    torch.testing.assert_close(made[0], by_scores @ head.weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made[1], by_scores.t() @ hidden, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made[2], by_scores.sum(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(head.ess, 1.0 / r.square().sum(1), rtol=1e-6, atol=1e-6)
    assert not head.ess.requires_grad


def test_the_bias_falls_with_every_draw():
    logits = torch.tensor([1.2, 0.3, -0.5, 0.8, -1.0, 0.1], dtype=torch.float64)
    exact = logits.softmax(0)
    exact[2] -= 1.0
    far = []
    for n in (1, 2, 4):
        made = expected_gradient(ImportanceSampling, logits, (6, 3, 1, 2, 1, 2), 2, n)
        far.append(float((made - exact).abs().sum()))
    # a / n - b / n², so that the first steps are a little short of one half.
    assert far[1] < 0.67 * far[0]
    assert far[2] < 0.6 * far[1]


@pytest.mark.parametrize("n", [8, 16, 32])
def test_the_bias_is_that_of_the_theory_over_n(n):
    """n times the bias is -(p² / q - p Σ p² / q), up to terms of 1 / n."""
    rows, v = 200_000, 6
    sampler = samplers.Unigram((6, 3, 1, 2, 1, 2))
    log_q = sampler.log_prob(torch.arange(v), dtype=torch.float64)
    logits = torch.tensor([1.2, 0.3, -0.5, 0.8, -1.0, 0.1], dtype=torch.float64)
    ids = sampler.sample(rows * n, rng_counter=(1, n)).view(rows, n)
    weight = logits[:, None].clone().requires_grad_()
    target = torch.full((rows, 1), 2)
    loss, _ = sampled_loss(
        torch.ones(rows, 1, dtype=torch.float64), weight, None, target, ids, log_q[ids],
        SELF_NORMALISED, reduction="mean",
    )  # fmt: skip
    loss.backward()
    p = logits.softmax(0)
    made = weight.grad[:, 0] - p
    made[2] += 1.0
    spread = p.square() / log_q.exp()
    expected = -(spread - p * spread.sum())
    error = 5 * n * (spread / n / rows).sqrt()
    assert bool(((n * made - expected).abs() < error + 3.0 / n * expected.abs().max()).all())
    assert float((n * made - expected).norm()) < 0.4 * float(expected.norm())


def test_a_proposal_equal_to_the_model_has_no_bias_and_a_full_sample_size():
    probs = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0])
    head = ImportanceSampling(1, 5, samplers.Unigram(probs), 32, bias=False, reduction="none")
    with torch.no_grad():
        head.weight.copy_(probs.log()[:, None])
    losses = head(torch.ones(5, 1), torch.arange(5))
    torch.testing.assert_close(head.ess, torch.full((5,), 32.0))
    torch.testing.assert_close(losses, -(probs / 16).log())


class TestStopping:
    def head(self, **options):
        generator = torch.Generator().manual_seed(5)
        sampler = samplers.Unigram(1.0 / torch.arange(1, 401))
        head = ImportanceSampling(16, 400, sampler, 20, bias=False, **options)
        with torch.no_grad():
            head.weight.copy_(torch.randn(400, 16, generator=generator))
        scale = torch.linspace(0.0, 1.5, 24)[:, None]
        hidden = scale * torch.randn(24, 16, generator=generator)
        return head, hidden, torch.arange(24) * 7

    def test_every_row_reaches_its_sample_size_or_takes_all_classes(self):
        head, hidden, target = self.head(target_ess=60, max_samples=400, reduction="none")
        losses = head(hidden, target)
        assert head.took_all.any()
        assert not head.took_all.all()
        assert bool((head.ess[~head.took_all] >= 60).all())
        assert bool((head.ess[head.took_all] < 60).all())
        assert bool((head.n_drawn[head.took_all] == 400).all())
        assert len(head.n_drawn.unique()) > 3
        assert bool((head.n_drawn % 20 == 0).all())
        exact = head.eval()(hidden, target)
        torch.testing.assert_close(losses[head.took_all], exact[head.took_all])

    def test_a_row_stops_with_the_first_block_that_is_enough(self):
        head, hidden, target = self.head(target_ess=60, max_samples=400, reduction="none")
        counter = head.rng_counter.clone()
        losses = head(hidden, target)
        blocks = [head.sampler.sample(20, rng_counter=samplers.fork(counter, b)) for b in range(20)]
        scores = hidden @ head.weight.t()
        for row in (~head.took_all).nonzero().squeeze(1).tolist():
            used = int(head.n_drawn[row]) // 20
            for some in (used - 1, used):
                ids = torch.cat(blocks[:some]) if some else torch.zeros(0, dtype=torch.int64)
                x = scores[row, ids] - head.sampler.log_prob(ids)
                ess = (2 * x.logsumexp(0) - (2 * x).logsumexp(0)).exp() if some else torch.zeros(())
                assert bool(ess >= 60) == (some == used)
            torch.testing.assert_close(head.ess[row], ess, rtol=1e-4, atol=1e-4)
            expected = x.logsumexp(0) - math.log(len(ids)) - scores[row, target[row]]
            torch.testing.assert_close(losses[row], expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("sparse", [False, True])
    def test_gradients_of_rows_that_stopped_apart(self, sparse):
        head, hidden, target = self.head(target_ess=60, max_samples=400, sparse=sparse)
        target[3] = -100
        start = head.state_dict()["rng_counter"].clone()
        hidden.requires_grad_()
        head(hidden, target).backward()
        assert head.weight.grad.is_sparse == sparse
        one_by_one = torch.zeros_like(head.weight)
        head.reduction, by_hidden = "none", hidden.grad.clone()
        made, hidden.grad, head.weight.grad = head.weight.grad.to_dense(), None, None
        head.rng_counter.copy_(start)
        losses = head(hidden, target)
        for row in range(24):
            (part,) = torch.autograd.grad(losses[row], head.weight, retain_graph=True)
            one_by_one += part.to_dense() / 23
        torch.testing.assert_close(made, one_by_one)
        (again,) = torch.autograd.grad(losses.sum() / 23, hidden)
        torch.testing.assert_close(by_hidden, again)
        assert losses[3] == 0.0
        assert head.n_drawn[3] == 0
        assert not head.took_all[3]

    def test_a_nan_does_not_go_on_drawing(self):
        head, hidden, target = self.head(target_ess=60, reduction="none")
        hidden[1, 0] = math.nan
        losses = head(hidden, target)
        assert losses[1].isnan()
        assert losses[[0, 2]].isfinite().all()
        assert head.n_drawn[1] == 20

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"target_ess": 0}, "target_ess: expected a finite number above 0"),
            ({"target_ess": "many"}, "target_ess: expected a number, got str"),
            ({"target_ess": 5, "max_samples": 19}, "max_samples: expected at least n_samples=20"),
            ({"target_ess": 500, "max_samples": 400}, "target_ess: expected at most max_samples"),
            ({"target_ess": 5, "max_samples": 2.5}, "max_samples: expected an int"),
        ],
    )
    def test_what_cannot_be_reached_is_refused(self, options, message):
        with pytest.raises((ValueError, TypeError), match=message):
            self.head(**options)


def acceptance(width, steps):
    """5000 classes, 40 contexts, logits of a noisy unigram, blocks and sample size of 50."""
    generator = torch.Generator().manual_seed(11)
    unigram = 1.0 / torch.arange(1, 5001).double()
    unigram /= unigram.sum()
    logits = unigram.log()[:, None] + 2.0 * torch.randn(5000, 40, generator=generator).double()
    head = AdaptiveImportanceSampling(
        40, 5000, unigram, target_ess=50, n_samples=50, max_samples=5000, bias=False, width=width
    )
    with torch.no_grad():
        head.weight.copy_(logits)
    probs, used = logits.softmax(0).t(), []
    for _ in range(steps):
        target = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        head(torch.eye(40), target, torch.arange(40)[:, None])
        used.append(float(head.n_drawn.double().mean()))
    return head, probs, used


def test_the_proposal_learns_to_need_a_quarter_of_the_draws():
    head, probs, used = acceptance(width=512, steps=150)
    before, after = sum(used[:3]) / 3, sum(used[-10:]) / 10
    assert after < before / 4
    everything = torch.arange(5000).expand(40, -1)
    log_q = head.sampler.log_prob(everything, torch.arange(40)[:, None], dtype=torch.float64)
    assert float((log_q.exp().sum(1) - 1.0).abs().max()) < 1e-6
    unigram = head.sampler.unigram.log_prob(everything, dtype=torch.float64)
    far = [(probs * (probs.log() - each)).sum(1).mean() for each in (unigram, log_q)]
    assert far[1] < 0.5 * far[0]


class TestAdaptive:
    def head(self, **options):
        given = {"target_ess": 10, "n_samples": 20, **options}
        return AdaptiveImportanceSampling(6, 50, range(1, 51), **given)

    def test_it_learns_in_training_alone(self):
        head, hidden = self.head(), torch.randn(9, 6)
        words = torch.randint(50, (10,))
        context, target = words[:-1, None], words[1:]
        before = {name: each.clone() for name, each in head.sampler.state_dict().items()}
        exact = head.eval()(hidden, target, context)
        torch.testing.assert_close(exact, torch.nn.functional.cross_entropy(
            hidden @ head.weight.t() + head.bias, target))  # fmt: skip
        torch.testing.assert_close(head(hidden, target), exact)
        same = head.sampler.state_dict()
        assert all(torch.equal(same[name], each) for name, each in before.items())
        head.train()(hidden, target, context)
        same = head.sampler.state_dict()
        assert not all(torch.equal(same[name], each) for name, each in before.items())

    @pytest.mark.parametrize("order", [2, 3])
    def test_a_resumed_run_draws_the_same(self, order):
        head, hidden = self.head(order=order), torch.randn(3, 4, 6)
        target = torch.randint(50, (3, 4))
        context = torch.randint(-1, 50, (3, 4, order - 1))
        head(hidden, target, context)
        other = self.head(order=order, seed=9)
        other.load_state_dict(head.state_dict())
        for _ in range(2):
            losses = [each(hidden, target, context) for each in (head, other)]
            assert torch.equal(*losses)
            assert torch.equal(head.n_drawn, other.n_drawn)

    def test_ignored_rows_teach_nothing(self):
        head, hidden = self.head(), torch.randn(4, 6)
        target = torch.full((4,), -100)
        before = {name: each.clone() for name, each in head.sampler.state_dict().items()}
        loss = head(hidden, target, torch.randint(50, (4, 1)))
        loss.backward()
        same = head.sampler.state_dict()
        assert loss == 0.0
        assert all(torch.equal(same[name], each) for name, each in before.items())

    @pytest.mark.parametrize("order", [2, 3])
    def test_losses_and_gradients_are_those_of_its_draws(self, order):
        """Of rows that draw different numbers of blocks, one by one in float64."""
        head = self.head(order=order, target_ess=30, n_samples=11, dtype=torch.float64)
        head.reduction = "none"
        hidden = (torch.linspace(0, 4, 12)[:, None] * torch.randn(12, 6)).double()
        hidden.requires_grad_()
        target, context = torch.randint(50, (12,)), torch.randint(-1, 50, (12, order - 1))
        target[4] = -100
        for _ in range(3):
            counter = head.rng_counter.clone()
            forks = [samplers.fork(counter, block) for block in range(32)]
            drawn = [head.sampler.sample(11, context=context, rng_counter=each) for each in forks]
            ids = torch.cat(drawn, 1)
            log_q = head.sampler.log_prob(ids, context, dtype=torch.float64)
            losses = head(hidden, target, context)
            scores = hidden @ head.weight.t() + head.bias
            expected = torch.zeros(12, dtype=torch.float64)
            for row in range(12):
                count = int(head.n_drawn[row])
                log_r = scores[row, ids[row, :count]] - log_q[row, :count]
                if target[row] >= 0:
                    estimate = log_r.logsumexp(0) - math.log(count)
                    whole = scores[row].logsumexp(0) if head.took_all[row] else estimate
                    expected[row] = whole - scores[row, target[row]]
            torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
            inputs = [hidden, head.weight, head.bias]
            made = torch.autograd.grad(losses.sum(), inputs)
            for one, other in zip(made, torch.autograd.grad(expected.sum(), inputs), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
            assert len(head.n_drawn.unique()) > 2

    def test_a_nan_stays_in_its_row(self):
        head, hidden = self.head(target_ess=40, reduction="none"), torch.randn(5, 6)
        hidden[1, 0] = math.nan
        hidden.requires_grad_()
        losses = head(hidden, torch.randint(50, (5,)), torch.arange(5)[:, None])
        assert losses.isnan().tolist() == [False, True, False, False, False]
        losses.sum().backward()
        assert hidden.grad.isnan().any(1).tolist() == [False, True, False, False, False]
        assert head.n_drawn[1] == 20

    def test_sparse_and_dense_gradients_agree(self):
        made = []
        for sparse in (False, True):
            torch.manual_seed(3)
            head = self.head(sparse=sparse)
            hidden = torch.randn(8, 6, requires_grad=True)
            target, context = torch.randint(50, (8,)), torch.randint(50, (8, 1))
            head(hidden, target, context).backward()
            made.append([hidden.grad, head.weight.grad.to_dense(), head.bias.grad.to_dense()])
        for one, other in zip(*made, strict=True):
            torch.testing.assert_close(one, other)

    @pytest.mark.parametrize(
        ("context", "message"),
        [
            (torch.zeros(4, 2, dtype=torch.int64), r"context: expected shape \(4, 1\)"),
            (torch.zeros(4, dtype=torch.int64), r"context: expected shape \(4, 1\)"),
            (torch.zeros(4, 1), "context: expected integer class ids"),
            (torch.full((4, 1), 50), "context: expected class ids from 0 to 49, got 50"),
            ([[1]] * 4, "context: expected a torch.Tensor"),
        ],
    )
    def test_a_context_that_does_not_fit_is_refused(self, context, message):
        with pytest.raises((ValueError, TypeError), match=message):
            self.head()(torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64), context)

    def test_counts_that_do_not_fit_are_refused(self):
        with pytest.raises(ValueError, match=r"counts: expected shape \(50,\).*got \(40,\)"):
            AdaptiveImportanceSampling(6, 50, range(1, 41))
        with pytest.raises(ValueError, match="order: expected at most 3, got 4"):
            self.head(order=4)


def test_importance_sampling_in_float64_has_float64_probabilities():
    head = ImportanceSampling(7, 23, UNEVEN, 8, dtype=torch.float64)
    hidden, target = torch.randn(5, 7, dtype=torch.float64), torch.randint(23, (5,))
    ids = head.sampler.sample(8, rng_counter=head.rng_counter.clone())
    log_q = head.sampler.log_prob(ids, dtype=torch.float64)
    scores = hidden @ head.weight.T + head.bias
    logits = scores[:, ids] - log_q - math.log(8)
    wanted = (logits.logsumexp(-1) - scores.gather(1, target[:, None]).squeeze(1)).mean()
    torch.testing.assert_close(head(hidden, target), wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("n", [1, 2, 30])
def test_row_sparse_gradients_have_no_more_slots_than_classes(n):
    """As on a GPU, where the host does not know how many classes were drawn."""
    v, d, q = 9, 5, 4
    slopes, hidden = torch.randn(n, q), torch.randn(n, d)
    entries = torch.randint(1, v - 1, (n * q,), dtype=torch.int32)
    nothing, shapes = torch.empty(0), ((v, d), (v,))
    given = entries, nothing, nothing, slopes, hidden, torch.tensor(0.5)
    known, (weight, bias) = sampled._slotted(given, shapes, [torch.float32] * 2, True)
    known = known.squeeze(0)
    assert known.shape == (min(v, n * q),) == weight.shape[:1] == bias.shape
    vectors = 0.5 * (slopes[..., None] * hidden[:, None]).reshape(-1, d)
    expected = torch.zeros(v, d).index_add_(0, entries, vectors)
    torch.testing.assert_close(torch.zeros(v, d).index_add_(0, known, weight), expected)
    expected = torch.zeros(v).index_add_(0, entries, 0.5 * slopes.flatten())
    torch.testing.assert_close(torch.zeros(v).index_add_(0, known, bias), expected)
    assert set(known.tolist()) == set(entries.tolist())
