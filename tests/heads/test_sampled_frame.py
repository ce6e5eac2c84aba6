"""What all sampled heads share: draws that can be repeated, gradients, dtypes, and old mistakes."""

import copy
import inspect
import itertools
import math
from functools import partial

import pytest
import torch
from sampled import Scripted
from torch.utils.checkpoint import checkpoint

from lastlayer import heads, samplers
from lastlayer.fused.sampled import Rule, rows_at_a_time, sampled_loss
from lastlayer.heads import FullSoftmax, ImportanceSampling, SampledSoftmax

COUNTS = 1.0 / torch.arange(1, 51)


def make(cls=SampledSoftmax, **options):
    return cls(6, 50, samplers.Unigram(COUNTS), 12, **options)


def batch(*shape, dtype=torch.float32):
    return torch.randn(*shape, 6, dtype=dtype), torch.randint(50, shape)


class TestDraws:
    def test_each_step_draws_anew_and_counts_itself(self):
        head, (hidden, target) = make(seed=3), batch(8)
        assert head.rng_counter.tolist() == [3, 0]
        losses = {head(hidden, target).item() for _ in range(4)}
        assert len(losses) == 4
        assert head.rng_counter.tolist() == [3, 4]

    @pytest.mark.parametrize("cls", [SampledSoftmax, ImportanceSampling])
    def test_a_resumed_run_draws_what_the_first_one_would_have(self, cls, tmp_path):
        head, (hidden, target) = make(cls, seed=5), batch(8)
        for _ in range(3):
            head(hidden, target)
        head.save(tmp_path)
        other, loaded = make(cls), cls.load(tmp_path)
        other.load_state_dict(head.state_dict())
        for _ in range(2):
            first = head(hidden, target)
            assert torch.equal(first, other(hidden, target))
            assert torch.equal(first, loaded(hidden, target))

    def test_eval_mode_draws_nothing(self):
        head, (hidden, target) = make().eval(), batch(8)
        exact = FullSoftmax.from_linear(head.to_linear())(hidden, target)
        assert torch.equal(head(hidden, target), exact)
        assert head.rng_counter.tolist() == [0, 0]

    def test_torch_s_own_chance_is_left_alone(self):
        head, (hidden, target) = make(), batch(8)
        before = torch.get_rng_state()
        head(hidden, target)
        assert torch.equal(torch.get_rng_state(), before)

    def test_ranks_draw_the_same_unless_asked_not_to(self, monkeypatch):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        hidden, target = batch(8)
        alike, apart = make(), make(per_rank=True)
        apart.load_state_dict(alike.state_dict())
        losses = {}
        for rank in (0, 1, 7):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            for name, head in (("alike", alike), ("apart", apart)):
                loss = copy.deepcopy(head)(hidden, target)
                losses.setdefault(name, set()).add(loss.item())
        assert len(losses["alike"]) == 1
        assert len(losses["apart"]) == 3


class TestGradients:
    @pytest.mark.parametrize("cls", [SampledSoftmax, ImportanceSampling])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_sparse_is_dense_with_zeros_left_out(self, cls, dtype, reduction):
        dense = make(cls, dtype=dtype, reduction=reduction)
        sparse = make(cls, dtype=dtype, reduction=reduction, sparse=True)
        sparse.load_state_dict(dense.state_dict())
        (hidden, target), ids = (
            batch(9, dtype=dtype),
            dense.sampler.sample(12, rng_counter=dense.rng_counter),
        )
        target[4] = -100
        made = [
            torch.autograd.grad(head(hidden, target).sum(), list(head.parameters()))
            for head in (dense, sparse)
        ]
        touched = torch.cat([ids, target[target >= 0]]).unique()
        for one, other in zip(*made, strict=True):
            assert other.is_coalesced()
            assert one.dtype == other.dtype == dtype
            assert torch.equal(other.indices()[0], touched)
            assert torch.equal(other.to_dense(), one)

    def test_an_optimiser_takes_sparse_gradients(self):
        head, (hidden, target) = make(sparse=True), batch(16)
        optimiser = torch.optim.SparseAdam(head.parameters(), lr=0.1)
        before = head.eval()(hidden, target).item()
        for _ in range(30):
            optimiser.zero_grad()
            head.train()(hidden, target).backward()
            optimiser.step()
        assert head.eval()(hidden, target).item() < 0.7 * before

    def test_backward_can_be_repeated_but_not_differentiated(self):
        head, (hidden, target) = make(), batch(5)
        hidden.requires_grad_()
        loss = head(hidden, target)
        first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(loss, hidden, create_graph=True)

    @pytest.mark.parametrize("chunk_rows", [1, 4, "low"])
    def test_chunks_change_nothing(self, chunk_rows):
        whole, parts = make(dtype=torch.float64), make(dtype=torch.float64, chunk_rows=chunk_rows)
        parts.load_state_dict(whole.state_dict())
        hidden, target = batch(11, dtype=torch.float64)
        for head in (whole, parts):
            head(hidden, target).backward()
        for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)

    def test_what_is_not_learned_gets_no_gradient(self):
        head, (hidden, target) = make(), batch(5)
        head.weight.requires_grad_(False)
        head(hidden, target).backward()
        assert head.weight.grad is None
        assert head.bias.grad is not None
        head.bias.requires_grad_(False)
        assert not head(hidden, target).requires_grad

    def test_tied_embeddings_share_their_gradient(self):
        table = torch.nn.Embedding(50, 6)
        head = SampledSoftmax.from_linear(table, sampler=samplers.Unigram(COUNTS), n_samples=12)
        hidden, target = batch(5)
        head(hidden, target).backward()
        assert head.weight is table.weight
        assert table.weight.grad is not None
        with pytest.raises(TypeError, match="class_weight: expected none"):
            SampledSoftmax.from_linear(table, class_weight=torch.ones(50))


class TestOldMistakes:
    """Each was shipped by a library in use."""

    def test_the_temperature_does_not_scale_the_correction(self):
        ids = [3, 8, 20]
        head = SampledSoftmax(6, 50, Scripted(COUNTS, ids), 3, temperature=0.1, bias=False)
        hidden, target = batch(1)
        target[0] = 0
        scores = (hidden @ head.weight.t() / 0.1)[0]
        log_q = head.sampler.log_prob(torch.tensor([0, *ids]))
        left = torch.log1p(-log_q[0].exp()) - math.log(3)
        logits = torch.cat([scores[:1], scores[ids] - log_q[1:] + left])
        torch.testing.assert_close(head(hidden, target), logits.logsumexp(0) - scores[0])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_keeps_the_correction_in_full(self, dtype):
        # In bfloat16 a log-probability of -7.1 is off by 0.013.
        head = SampledSoftmax(6, 5000, samplers.Unigram(1.0 / torch.arange(1, 5001)), 400)
        head = head.to(dtype)
        head.reduction = "none"
        hidden, target = torch.randn(32, 6).to(dtype), torch.randint(5000, (32,))
        exact = copy.deepcopy(head).double()
        losses, expected = head(hidden, target), exact(hidden.double(), target)
        torch.testing.assert_close(losses.double(), expected, rtol=0.0, atol=1e-4)

    def test_a_hit_in_float16_makes_no_infinity(self):
        head = SampledSoftmax(6, 50, Scripted(COUNTS, [4, 4, 7, 9]), 4, dtype=torch.float16)
        hidden = torch.randn(3, 6).half().requires_grad_()
        loss = head(hidden, torch.tensor([4, 7, 4]))
        (1024 * loss).backward()
        assert loss.isfinite()
        assert hidden.grad.isfinite().all()
        assert head.weight.grad.isfinite().all()

    def test_draws_that_come_twice_count_twice(self):
        head = SampledSoftmax(6, 50, Scripted(COUNTS, [5, 5, 9]), 3, reduction="none")
        hidden = torch.randn(1, 6)
        scores = (hidden @ head.weight.t() + head.bias)[0]
        log_q = head.sampler.log_prob(torch.tensor([30, 5, 9]))
        left = torch.log1p(-log_q[0].exp()) - math.log(3)
        logits = torch.stack([
            scores[30], scores[5] - log_q[1] + left + math.log(2), scores[9] - log_q[2] + left
        ])  # fmt: skip
        loss = head(hidden, torch.tensor([30]))
        torch.testing.assert_close(loss[0], logits.logsumexp(0) - scores[30])

    def test_biases_of_draws_and_targets_count(self):
        head, (hidden, target) = make(), batch(64)
        head(hidden, target).backward()
        ids = head.sampler.sample(12, rng_counter=(0, 0))
        assert bool((head.bias.grad[ids] != 0).all())
        assert bool((head.bias.grad[target] != 0).all())
        # What is pushed down is pulled up: the slopes of a row sum to 0.
        assert abs(float(head.bias.grad.sum())) < 1e-6

    def test_a_frequent_target_does_not_bias_the_rest(self):
        """Draws that are left out must not count in the average: here nine in ten are."""
        counts = torch.tensor([90.0, 5.0, 3.0, 2.0])
        n, rows = 40, 20_000
        sampler = samplers.Unigram(counts)
        log_q = sampler.log_prob(torch.arange(4))
        ids = sampler.sample(rows * n, rng_counter=(8, 8)).view(rows, n)
        logits = counts.log()
        weight = logits[:, None].clone().requires_grad_()
        left = torch.log(-torch.expm1(log_q[0])).expand(rows)
        loss, _ = sampled_loss(
            torch.ones(rows, 1), weight, None, torch.zeros(rows, 1, dtype=torch.int64),
            ids, log_q[ids], Rule(average=True), shift=left, reduction="mean",
        )  # fmt: skip
        loss.backward()
        expected = logits.softmax(0)
        expected[0] -= 1.0
        # A row is without any draw that counts in 1.5 % of the cases.
        torch.testing.assert_close(weight.grad[:, 0], expected, rtol=0.03, atol=1e-3)

    def test_rare_classes_keep_their_probability(self):
        # Clipped at 1e-6 they would all be alike.
        counts = torch.ones(3_000_000)
        counts[0] = 3e6
        head = SampledSoftmax(2, 3_000_000, samplers.Unigram(counts), 8, correction="classic")
        expected = math.log(1 / 6e6)
        assert abs(float(head.sampler.log_prob(torch.tensor([5]))[0]) - expected) < 1e-4

    def test_several_targets_out_of_range_are_named(self):
        head, (hidden, _) = make(), batch(3)
        target = torch.tensor([[1, 2], [3, 50], [4, -100]])
        with pytest.raises(ValueError, match=r"target: .*got 50 at position \(1, 1\)"):
            head(hidden, target)
        with pytest.raises(ValueError, match="target: expected shape"):
            head(hidden, target[:2])


class TestSizes:
    def test_memory_is_bounded_however_many_rows_and_draws(self):
        for n, m in itertools.product((1, 100, 8192, 1_000_000), (1, 256, 8192, 500_000)):
            for budget, narrow in itertools.product(("auto", "low"), (False, True)):
                like = torch.empty(0, device="meta" if narrow else "cpu")
                rows = rows_at_a_time(budget, n, m, like, narrow)
                assert 1 <= rows <= n
                # 128 rows are taken however wide they are.
                assert rows <= 128 or 4 * rows * m <= (280_000_000 if narrow else 60_000_000)
        assert rows_at_a_time("7", 100, 10, like, narrow=True) == 7
        assert rows_at_a_time("auto", 8192, 8192, like, narrow=True) == 8192


class TestRules:
    """The frame itself, as other heads use it."""

    @pytest.mark.parametrize("apart", [False, True])
    @pytest.mark.parametrize("shifted", [False, True])
    def test_a_logistic_rule(self, apart, shifted):
        hidden = torch.randn(5, 3).double().requires_grad_()
        weight = torch.randn(9, 3).double().requires_grad_()
        bias = torch.randn(9).double().requires_grad_()
        row_shift = torch.randn(5).double().requires_grad_() if shifted else None
        target = torch.tensor([[1], [4], [-1], [4], [8]])
        ids = torch.randint(9, (5, 7) if apart else (7,))
        log_expected = torch.randn(ids.shape).double()
        own = torch.randn(5, 1).double()
        loss_of = partial(
            sampled_loss, hidden, weight, bias, target, ids, log_expected,
            Rule(logistic=True, drop_hits=False), target_log_expected=own, row_shift=row_shift,
        )  # fmt: skip
        losses, _ = loss_of(reduction="none")
        scores = hidden @ weight.t() + bias
        scores = scores if row_shift is None else scores + row_shift[:, None]
        drawn = (scores.gather(1, ids) if apart else scores[:, ids]) - log_expected
        softplus = torch.nn.functional.softplus
        positive = scores.gather(1, target.clamp(min=0)) - own
        expected = softplus(-positive).squeeze(1) + softplus(drawn).sum(1)
        expected = torch.where(target.squeeze(1) < 0, 0.0, expected)
        torch.testing.assert_close(losses, expected)
        leaves = [hidden, weight, bias, *([row_shift] if shifted else [])]
        upstream = torch.randn(5).double()
        made = torch.autograd.grad(losses, leaves, upstream)
        truth = torch.autograd.grad(expected, leaves, upstream, retain_graph=True)
        for one, other in zip(made, truth, strict=True):
            torch.testing.assert_close(one, other)
        total, _ = loss_of(reduction="mean")
        made = torch.autograd.grad(total, leaves)
        mean = expected.sum() / 4
        for one, other in zip(made, torch.autograd.grad(mean, leaves), strict=True):
            torch.testing.assert_close(one, other)

    @pytest.mark.parametrize(
        ("with_target", "drop"), list(itertools.product((False, True), repeat=2))
    )
    @pytest.mark.parametrize("p", [1, 3])
    def test_draws_apart_and_shared_agree(self, with_target, drop, p):
        hidden, weight = torch.randn(6, 4).double(), torch.randn(11, 4).double()
        bias, target = torch.randn(11).double(), torch.randint(11, (6, p))
        ids, log_expected = torch.randint(11, (8,)), torch.randn(8).double()
        rule, made = Rule(with_target=with_target, drop_hits=drop, average=True), []
        for draws in ((ids, log_expected), (ids.expand(6, 8), log_expected.expand(6, 8))):
            leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
            loss, ess = sampled_loss(
                *leaves, target, *draws, rule, temperature=0.8, reduction="mean"
            )
            made.append([loss, ess, *torch.autograd.grad(loss, leaves)])
        for one, other in zip(*made, strict=True):
            torch.testing.assert_close(one, other)

    def test_the_signature_names_all_that_a_constructor_takes(self):
        for cls in (SampledSoftmax, ImportanceSampling):
            taken = inspect.signature(cls).parameters
            shared = {"bias", "sparse", "seed", "per_rank", "ignore_index", "reduction",
                      "chunk_rows", "device", "dtype"}  # fmt: skip
            assert all(taken[name].kind is inspect.Parameter.KEYWORD_ONLY for name in shared)
            assert "options" not in taken
            assert "class_weight" not in taken
            assert list(taken)[:4] == ["in_features", "n_classes", "sampler", "n_samples"]
            with pytest.raises(TypeError, match="unexpected keyword argument 'class_weight'"):
                cls(3, 4, class_weight=None)


def recorded():
    hidden, target = batch(20)
    return hidden.requires_grad_(), target


DRAWING = {
    "sampled softmax": lambda: heads.SampledSoftmax(6, 50, samplers.Unigram(COUNTS), 8),
    "importance": lambda: heads.ImportanceSampling(6, 50, samplers.Unigram(COUNTS), 8),
    "enough": lambda: heads.ImportanceSampling(6, 50, samplers.Unigram(COUNTS), 8, target_ess=9.0),
    "noise contrastive": lambda: heads.NoiseContrastive(6, 50, samplers.Unigram(COUNTS), 8),
    "negative sampling": lambda: heads.NegativeSampling(6, 50, samplers.Unigram(COUNTS), 8),
    "some rows": lambda: heads.SelfNormalized(6, 50, fraction=0.3),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", DRAWING)
def test_a_checkpoint_sees_the_same_draws(name, reentrant):
    head, plain = DRAWING[name](), DRAWING[name]()
    plain.load_state_dict(head.state_dict())
    batches = [recorded(), recorded()]
    # Both passes are waiting when the first gradient is asked for.
    losses = [checkpoint(head, *each, use_reentrant=reentrant) for each in batches]
    assert head.rng_counter.tolist() == [0, 2]
    for (hidden, target), loss in zip(batches, losses, strict=True):
        leaves = hidden, *plain.parameters()
        wanted = torch.autograd.grad(plain(hidden, target), leaves)
        head.zero_grad(set_to_none=True)
        hidden.grad = None
        loss.backward()
        found = hidden.grad, *(each.grad for each in head.parameters())
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
    assert head.rng_counter.tolist() == [0, 2]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_checkpoints_with_several_calls(reentrant):
    """Also where the random state is not kept, and gradients are asked for twice."""
    head, plain, (hidden, target) = DRAWING["importance"](), DRAWING["importance"](), recorded()
    plain.load_state_dict(head.state_dict())

    def twice(module, states):
        return module(states.sin(), target) + 2.0 * module(states.cos(), target)

    def nested(states):
        how = {"use_reentrant": reentrant, "preserve_rng_state": False}
        return checkpoint(twice, head, states, **how).square()

    loss = checkpoint(nested, hidden, use_reentrant=reentrant)
    head.zero_grad(set_to_none=True)
    loss.backward(retain_graph=True)
    loss.backward()
    assert head.rng_counter.tolist() == [0, 2]
    wanted = torch.autograd.grad(twice(plain, hidden).square(), (hidden, plain.weight))
    torch.testing.assert_close(hidden.grad, 2 * wanted[0])
    torch.testing.assert_close(head.weight.grad, 2 * wanted[1])


@pytest.mark.parametrize("name", DRAWING)
def test_without_gradients_nothing_is_counted_or_drawn_from_torch(name):
    head, (hidden, target) = DRAWING[name](), recorded()
    before = torch.get_rng_state()
    with torch.no_grad():
        first, second = head(hidden, target), head(hidden, target)
    assert torch.equal(torch.get_rng_state(), before)
    assert head.rng_counter.tolist() == [0, 0]
    # The draws are those of the next step.
    assert torch.equal(first, second)
    torch.testing.assert_close(head(hidden, target).detach(), first)
    assert head.rng_counter.tolist() == [0, 1]


def test_without_gradients_a_proposal_does_not_learn():
    head, (hidden, target) = heads.AdaptiveImportanceSampling(6, 50, COUNTS), recorded()
    before = {name: each.clone() for name, each in head.state_dict().items()}
    with torch.no_grad():
        head(hidden, target, torch.randint(50, (20, 1)))
    assert all(torch.equal(each, before[name]) for name, each in head.state_dict().items())


def test_hooks_on_saved_tensors_are_no_checkpoint():
    head, plain, (hidden, target) = DRAWING["importance"](), DRAWING["importance"](), recorded()
    plain.load_state_dict(head.state_dict())
    with torch.autograd.graph.save_on_cpu():
        loss = head(hidden, target)
    assert head.rng_counter.tolist() == [0, 1]
    made = torch.autograd.grad(loss, hidden)[0]
    torch.testing.assert_close(made, torch.autograd.grad(plain(hidden, target), hidden)[0])


def test_a_call_inside_a_backward_pass_is_refused():
    head, (hidden, target) = DRAWING["sampled softmax"](), recorded()
    hidden.register_hook(lambda _: head(hidden.detach(), target))
    with pytest.raises(RuntimeError, match="inside a backward pass without a recorded RNG"):
        hidden.sum().backward()


@pytest.mark.parametrize("name", [name for name in DRAWING if name != "some rows"])
@pytest.mark.parametrize("options", [{}, {"seed": 7, "sparse": True, "bias": False}])
def test_a_config_is_what_the_constructor_takes(name, options, tmp_path):
    head = DRAWING[name]()
    head = type(head)(**{**head.config(), **options})
    same = type(head)(**head.config())
    assert same.config() == head.config()
    same.load_state_dict(head.state_dict())
    head.save(tmp_path)
    loaded = heads.Head.load(tmp_path)
    again = type(head)(**loaded.config())
    again.load_state_dict(head.state_dict())
    hidden, target = recorded()
    expected = head(hidden, target)
    for other in (same, loaded, again):
        assert torch.equal(other(hidden, target), expected)
        assert repr(other) == repr(head)
        assert other.seed == head.seed


@pytest.mark.parametrize(
    "cls",
    [SampledSoftmax, ImportanceSampling, heads.NoiseContrastive, heads.NegativeSampling],
)
def test_a_sampler_is_required(cls):
    told = r"sampler: .* got None; give samplers.Unigram\(counts\).* samplers.Uniform\(9\)"
    with pytest.raises(TypeError, match=told):
        cls(3, 9)


@pytest.mark.parametrize("head_classes", [0, 4])
def test_a_bias_of_minus_infinity_masks_a_class(head_classes):
    """It has no mass; it was drawn all the same, and counts where draws are averaged."""
    ids = [6, 7, 7, 8, 9, 6]
    head = SampledSoftmax(
        6, 10, Scripted(range(1, 11), ids), len(ids), dtype=torch.float64, reduction="none",
        head_classes=head_classes,
    )  # fmt: skip
    with torch.no_grad():
        head.bias[7] = head.bias[2] = -torch.inf
    hidden = torch.randn(3, 6).double().requires_grad_()
    target = torch.tensor([0, 6, 9])
    scores = hidden @ head.weight.t() + head.bias
    q = head.sampler.log_prob(torch.arange(10), dtype=torch.float64)
    expected = []
    for row, own in zip(scores, target.tolist(), strict=True):
        drawn = [c for c in ids if c != own]
        always = [c for c in range(head_classes) if c != own]
        left = torch.cat([q[:head_classes], q[own].expand(int(own >= head_classes))]).exp().sum()
        shift = torch.log1p(-left) - math.log(len(drawn))
        logits = torch.cat([row[[own, *always]], row[drawn] - q[drawn] + shift])
        expected.append(logits.logsumexp(0) - row[own])
    losses = head(hidden, target)
    torch.testing.assert_close(losses, torch.stack(expected))
    made, truth = (
        torch.autograd.grad(each.sum(), (hidden, head.weight), retain_graph=True)
        for each in (losses, torch.stack(expected))
    )
    for one, other in zip(made, truth, strict=True):
        torch.testing.assert_close(one, other)


def test_where_all_draws_are_masked_only_the_target_is_left():
    head = SampledSoftmax(6, 5, Scripted([1.0] * 5, [1, 2, 2]), 3, reduction="none")
    with torch.no_grad():
        head.bias[1:3] = -torch.inf
    hidden = torch.randn(2, 6, requires_grad=True)
    losses = head(hidden, torch.tensor([0, 4]))
    assert losses.tolist() == [0.0, 0.0]
    losses.sum().backward()
    assert not hidden.grad.any()
    assert not head.weight.grad.any()
    # A masked target is impossible.
    assert head(hidden, torch.tensor([1, 1])).tolist() == [math.inf, math.inf]


def test_targets_of_any_integer_dtype():
    head, (hidden, target) = make(), batch(8)
    state = head.state_dict()["rng_counter"].clone()
    losses = set()
    for dtype in (torch.int64, torch.int32, torch.uint8):
        head.rng_counter.copy_(state)
        losses.add(head(hidden, target.to(dtype)).item())
    assert len(losses) == 1


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", [name for name in DRAWING if name != "some rows"])
def test_a_kept_graph_gives_the_same_gradients_again(name, sparse, reduction):
    head = DRAWING[name]()
    head.sparse, head.reduction = sparse, reduction
    hidden, target = recorded()
    loss, leaves = head(hidden, target).sum(), [hidden, *head.parameters()]
    first, second = (torch.autograd.grad(3.0 * loss, leaves, retain_graph=True) for _ in range(2))
    third = torch.autograd.grad(3.0 * loss, leaves)
    for one, two, three in zip(first, second, third, strict=True):
        assert torch.equal(one.to_dense(), two.to_dense())
        assert torch.equal(one.to_dense(), three.to_dense())


def test_a_proposal_that_learns_cannot_be_checkpointed():
    head, (hidden, target) = heads.AdaptiveImportanceSampling(6, 50, COUNTS), recorded()
    loss = checkpoint(head, hidden, target, use_reentrant=False)
    with pytest.raises(RuntimeError, match="cannot be recomputed"):
        loss.backward()


@pytest.mark.parametrize("shape", [(0,), (0, 2), (3, 0)])
def test_nothing_to_look_at(shape):
    made = [DRAWING[name]() for name in DRAWING if name != "some rows"]
    made += [heads.PartialSoftmax(6, 50, k=5), heads.TargetSampling(6, 50)]
    made[-1].use([1, 2])
    several = (*shape, 2)
    for head in made:
        for target in (torch.zeros(shape, dtype=torch.int64),
                       torch.zeros(several, dtype=torch.int64)):  # fmt: skip
            hidden = torch.randn(*shape, 6, requires_grad=True)
            loss = head(hidden, target)
            loss.backward()
            assert loss.item() == 0.0
    adaptive = heads.AdaptiveImportanceSampling(6, 50, COUNTS)
    nothing = torch.zeros(shape, dtype=torch.int64)
    context = torch.zeros(*shape, 1, dtype=torch.int64)
    assert adaptive(torch.randn(*shape, 6), nothing, context=context).item() == 0.0
