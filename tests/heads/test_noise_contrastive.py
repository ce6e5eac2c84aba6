"""Heads that tell data from noise: the loss, what it teaches, and what is made of it."""

import math

import pytest
import torch
from torch.nn.utils import parametrize

from lastlayer import nce_loss, negative_sampling_loss, samplers
from lastlayer.heads import NegativeSampling, NoiseContrastive
from lastlayer.testing import check_head

D, V, K = 6, 20, 30
COUNTS = 1.0 / torch.arange(1, V + 1).double()
# Two contexts, as one-hot hidden states.
DATA = torch.tensor([[0.5, 0.25, 0.15, 0.07, 0.03], [0.1, 0.1, 0.1, 0.1, 0.6]])
both_heads = pytest.mark.parametrize("kind", [NoiseContrastive, NegativeSampling])


def make(kind=NoiseContrastive, dtype=torch.float64, **options):
    head = kind(D, V, samplers.Unigram(COUNTS), K, dtype=dtype, **options)
    torch.nn.init.normal_(head.weight)
    return head


def batch(n=9, dtype=torch.float64):
    return torch.randn(n, D, dtype=dtype, requires_grad=True), torch.randint(V, (n,))


def loss_on_scores(head, hidden, target, **options):
    """The same loss by the function on scores, from the draws of the next step."""
    ids = head.sampler.sample(head.n_samples, rng_counter=head.rng_counter)
    scores = torch.nn.functional.linear(hidden, head.weight, head.bias)
    positive = scores.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    negative = scores[..., ids]
    if isinstance(head, NegativeSampling):
        return negative_sampling_loss(positive, negative, **options)
    log_q = [head.sampler.log_prob(each, dtype=torch.float64) for each in (target, ids)]
    return nce_loss(positive, negative, *log_q, log_z=head.log_z, **options)


def dense(gradients):
    return [each.to_dense() for each in gradients]


@both_heads
@pytest.mark.parametrize(
    "options",
    [{}, {"sparse": True}, {"bias": False}, {"reduction": "sum"}, {"chunk_rows": 2}],
    ids=str,
)
def test_the_loss_and_its_gradients_are_those_of_the_formula(kind, options):
    head = make(kind, **options)
    hidden, target = batch()
    leaves = [hidden, *head.parameters()]
    expected = loss_on_scores(head, hidden, target, reduction=head.reduction)
    truth = torch.autograd.grad(expected, leaves)
    loss = head(hidden, target)
    made = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(loss, expected)
    assert all(each.is_sparse == head.sparse for each in made[1:])
    for ours, theirs in zip(dense(made), truth, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("log_z", [-1.5, 3, "learned"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_log_z_fixed_or_learned(log_z, reduction):
    head = make(log_z=log_z, reduction=reduction)
    if log_z == "learned":
        torch.nn.init.constant_(head.log_z, 0.8)
    hidden, target = batch()
    leaves = [hidden, *head.parameters()]
    upstream = torch.randn(9).double() if reduction == "none" else torch.tensor(1.0).double()
    expected = loss_on_scores(head, hidden, target, reduction=reduction)
    truth = torch.autograd.grad(expected, leaves, upstream)
    made = torch.autograd.grad(head(hidden, target), leaves, upstream)
    assert len(made) == 3 + (log_z == "learned")
    for ours, theirs in zip(made, truth, strict=True):
        torch.testing.assert_close(ours, theirs)


@both_heads
def test_sparse_and_dense_gradients_are_equal_to_the_bit(kind):
    hidden, target = batch(dtype=torch.float32)
    gradients = []
    state = make(kind, torch.float32).state_dict()
    for sparse in (True, False):
        head = make(kind, torch.float32, sparse=sparse)
        head.load_state_dict(state)
        made = torch.autograd.grad(head(hidden, target), [head.weight, head.bias])
        gradients.append(dense(made))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@both_heads
def test_hits_and_duplicates_count(kind):
    """With one class everything drawn is the target, and all draws are the same."""
    head = kind(D, 1, samplers.Uniform(1), 3, bias=False, dtype=torch.float64)
    hidden = torch.randn(4, D, dtype=torch.float64)
    scores = hidden @ head.weight[0]
    less = math.log(3) if kind is NoiseContrastive else 0.0
    softplus = torch.nn.functional.softplus
    expected = softplus(less - scores) + 3 * softplus(scores - less)
    loss = head(hidden, torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(loss, expected.mean())


@both_heads
def test_several_targets_are_rows_that_share_their_noise(kind):
    head = make(kind, reduction="none")
    hidden, _ = batch()
    target = torch.randint(V, (9, 3))
    target[2, 1] = target[4] = -100
    before = head.rng_counter.clone()
    losses = head(hidden, target)
    alone = []
    for column in target.unbind(-1):
        head.rng_counter.copy_(before)
        alone.append(head(hidden, column))
    there = target != -100
    expected = torch.stack(alone, -1).sum(-1) / there.sum(-1).clamp(min=1)
    torch.testing.assert_close(losses, expected)
    assert losses[4] == 0


def test_biases_start_at_the_noise_so_that_z_is_1():
    for log_z in (0.0, 2.5, "learned"):
        head = NoiseContrastive(D, V, samplers.Unigram(COUNTS), K, log_z=log_z)
        start = log_z if log_z == 2.5 else 0.0
        expected = (COUNTS / COUNTS.sum()).log() + start
        torch.testing.assert_close(head.bias.detach().double(), expected, rtol=1e-6, atol=1e-6)
        at_zero = head.drift(torch.zeros(3, D))
        assert abs(at_zero.mean) < 1e-5
        torch.nn.init.zeros_(head.bias)
        head.reset_parameters()
        torch.testing.assert_close(head.bias.detach().double(), expected, rtol=1e-6, atol=1e-6)


def test_a_layer_that_is_taken_over_keeps_its_biases():
    linear = torch.nn.Linear(D, V)
    before = linear.bias.detach().clone()
    sampler = samplers.Unigram(COUNTS)
    head = NoiseContrastive.from_linear(linear, sampler=sampler, n_samples=K, log_z="learned")
    assert head.weight is linear.weight
    assert torch.equal(head.bias, before)
    head(torch.randn(4, D), torch.arange(4)).backward()


def train(head, steps=300):
    """On both contexts, with each class as often among 100 targets as the data has it."""
    optimizer = torch.optim.Adam(head.parameters(), lr=0.3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    hidden = torch.eye(2).repeat_interleave(100, 0)
    often = (100 * DATA).round().long()
    target = torch.cat([torch.arange(5).repeat_interleave(each) for each in often])
    for _ in range(steps):
        optimizer.zero_grad()
        head(hidden, target).backward()
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("log_z", [0.0, "learned"])
def test_nce_learns_the_distribution_of_the_data_and_its_normaliser(log_z):
    noise = samplers.Unigram([1.0, 2.0, 3.0, 2.0, 1.0])
    head = NoiseContrastive(2, 5, noise, 2048, log_z=log_z, bias=log_z == 0.0)
    train(head)
    everything = torch.arange(5)
    contexts = torch.eye(2)
    torch.testing.assert_close(head.log_prob(contexts).exp(), DATA, atol=0.02, rtol=0)
    unnormalised = head.unnormalized_log_prob(contexts, everything.expand(2, 5)).exp()
    torch.testing.assert_close(unnormalised, DATA, atol=0.03, rtol=0)
    assert head.drift(contexts).largest < 0.05


def test_negative_sampling_learns_the_data_once_it_is_calibrated():
    noise = samplers.Unigram([1.0, 2.0, 3.0, 2.0, 1.0])
    head = NegativeSampling(2, 5, noise, 2048)
    # From scores of 0 it is a long way to log(p / kq).
    torch.nn.init.constant_(head.bias, -math.log(2048))
    train(head)
    contexts = torch.eye(2)
    torch.testing.assert_close(head.log_prob(contexts).exp(), DATA, atol=0.02, rtol=0)
    plain = torch.softmax(head.to_linear()(contexts), -1)
    assert (plain - DATA).abs().max() > 0.05


def test_at_its_optimum_negative_sampling_is_calibrated_exactly():
    q = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2], dtype=torch.float64)
    head = NegativeSampling(2, 5, samplers.Unigram(q), 7, bias=False, dtype=torch.float64)
    head.weight.data.copy_((DATA.double() / (7 * q)).log().t())
    contexts = torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(head.log_prob(contexts).exp(), DATA.double(), rtol=1e-6, atol=0)
    assert head._row_log_z(contexts).abs().max() < 1e-6


@both_heads
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_in_eval_mode_the_loss_is_exact(kind, reduction):
    head = make(kind, reduction=reduction).eval()
    hidden, target = batch()
    target[3] = -100
    counted = target != -100
    found = head.log_prob(hidden, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    losses = torch.where(counted, -found, 0.0)
    expected = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / 8}[reduction]
    torch.testing.assert_close(head(hidden, target), expected)
    assert torch.equal(head.rng_counter, torch.tensor([0, 0]))


def test_unnormalised_log_probabilities_need_no_other_class():
    head = make(log_z=1.25)
    hidden, _ = batch()
    classes = torch.randint(V, (9, 4))
    scores = torch.nn.functional.linear(hidden, head.weight, head.bias)
    made = head.unnormalized_log_prob(hidden, classes)
    torch.testing.assert_close(made, (scores.gather(-1, classes) - 1.25).detach())
    exact = torch.logsumexp(scores, -1) - 1.25
    drift = head.drift(hidden)
    torch.testing.assert_close(drift.mean, exact.mean().item())
    torch.testing.assert_close(drift.deviation, exact.std(correction=0).item())
    torch.testing.assert_close(drift.largest, exact.abs().max().item())
    assert head.drift(hidden[:0]) == (0.0, 0.0, 0.0)


@both_heads
def test_a_resumed_run_draws_the_same_noise(kind):
    head = make(kind, seed=5)
    hidden, target = batch()
    for _ in range(3):
        head(hidden, target)
    other = make(kind)
    other.load_state_dict(head.state_dict())
    for _ in range(3):
        assert torch.equal(head(hidden, target), other(hidden, target))


@pytest.mark.parametrize(
    "options",
    [
        {"kind": NoiseContrastive},
        {"kind": NoiseContrastive, "log_z": "learned", "sparse": True},
        {"kind": NegativeSampling},
        {"kind": NegativeSampling, "bias": False, "sparse": True},
    ],
    ids=str,
)
def test_the_heads_keep_the_contract(options, seed):
    options = dict(options)
    kind = options.pop("kind")
    check_head(
        lambda: kind(8, 30, samplers.Unigram(torch.rand(30) + 0.1), 20, **options),
        loss_is_nll=False,
        seed=seed,
    )


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="log_z: expected a number or 'learned', got 'free'"):
        NoiseContrastive(D, V, samplers.Uniform(V), log_z="free")
    with pytest.raises(TypeError, match="log_z: expected a number or 'learned', got bool"):
        NoiseContrastive(D, V, samplers.Uniform(V), log_z=True)
    with pytest.raises(ValueError, match="log_z: expected a finite number, got nan"):
        NoiseContrastive(D, V, samplers.Uniform(V), log_z=math.nan)
    with pytest.raises(ValueError, match="sampler: expected one for 20 classes"):
        NegativeSampling(D, V, samplers.Uniform(V + 1))
    with pytest.raises(ValueError, match="classes: expected class ids from 0 to 19, got 20"):
        make().unnormalized_log_prob(batch()[0], torch.tensor([V]))


@pytest.mark.parametrize("how", ["functional_call", "parametrize"])
def test_log_z_is_learned_wherever_the_parameter_comes_from(how):
    head, (hidden, target) = make(log_z="learned"), batch()
    expected = make(log_z="learned")
    expected.load_state_dict(head.state_dict())
    (truth,) = torch.autograd.grad(expected(hidden, target), expected.log_z)
    assert truth.abs() > 0
    if how == "functional_call":
        given = {name: each.detach().clone() for name, each in head.named_parameters()}
        given["log_z"].requires_grad_()
        loss = torch.func.functional_call(head, given, (hidden, target))
        (made,) = torch.autograd.grad(loss, given["log_z"])
    else:
        parametrize.register_parametrization(head, "log_z", torch.nn.Identity())
        loss = head(hidden, target)
        (made,) = torch.autograd.grad(loss, head.parametrizations.log_z.original)
        assert head.config()["log_z"] == "learned"
    torch.testing.assert_close(made, truth)


@both_heads
def test_biases_from_counts_predict_the_frequencies(kind):
    """Also where the noise has others; for noise-contrastive estimation Z is then right as well."""
    options = {"log_z": 0.7} if kind is NoiseContrastive else {}
    head = kind(D, V, samplers.Uniform(V), K, dtype=torch.float64, **options)
    head.init_bias_from_counts(COUNTS)
    at_zero = torch.zeros(1, D, dtype=torch.float64)
    found = head.log_prob(at_zero)[0].exp().detach()
    torch.testing.assert_close(found, COUNTS / COUNTS.sum())
    assert head._row_log_z(at_zero).abs().max() < 1e-6
    without = kind(D, V, samplers.Uniform(V), K, bias=False)
    with pytest.raises(ValueError, match="init_bias_from_counts: expected a head with biases"):
        without.init_bias_from_counts(COUNTS)
