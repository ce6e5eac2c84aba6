"""The adaptive n-gram proposal: exact at all times, and better with every update."""

import math

import pytest
import torch

from lastlayer.kernels.context_lists import SHARES, UNUSED, WAYS
from lastlayer.kernels.context_lists.reference import find, place_
from lastlayer.samplers import AdaptiveNGram
from lastlayer.samplers.ngram import ContextLists
from lastlayer.testing import check_sampler
from waits import no_waits

CLASSES = 300


def zipf(n):
    return 1.0 / torch.arange(1, n + 1, dtype=torch.float64)


def contexts_of(order, rows, n=CLASSES):
    return torch.randint(-1, n, (rows, order - 1))


def everything(sampler, context):
    ids = torch.arange(sampler.n_classes).expand(len(context), -1)
    return sampler.log_prob(ids, context, dtype=torch.float64).exp()


def taught(order, *, steps=25, width=20, rows=6, contexts=64):
    sampler = AdaptiveNGram(zipf(CLASSES), order, contexts=contexts, width=width, rate=0.3)
    context = contexts_of(order, rows)
    for _ in range(steps):
        sampler.update(context, torch.randint(CLASSES, (rows, 30)), 2 * torch.randn(rows, 30))
    return sampler, context


@pytest.mark.parametrize("order", [2, 3])
def test_it_keeps_the_contract(order):
    sampler, context = taught(order)
    assert not torch.allclose(everything(sampler, context)[:1], everything(sampler, context))
    check_sampler(sampler, context=context[:3])


@pytest.mark.gpu
@pytest.mark.parametrize("order", [2, 3])
def test_it_keeps_the_contract_on_a_gpu(order):
    sampler, context = taught(order)
    check_sampler(sampler, context=context[:3], device="cuda")


@pytest.mark.gpu
def test_a_gpu_draws_what_a_cpu_draws():
    sampler, context = taught(3)
    here = sampler.sample(500, context=context, rng_counter=(1, 2))
    there = sampler.cuda().sample(500, context=context.cuda(), rng_counter=(1, 2))
    assert torch.equal(there.cpu(), here)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu():
    sampler, context = taught(3)
    sampler, context = sampler.cuda(), context.cuda()
    counter, scores = torch.tensor([1, 2], device="cuda"), torch.randn(6, 30, device="cuda")
    with no_waits():
        ids = sampler.sample(30, context=context, rng_counter=counter)
        sampler.log_prob(ids, context)
        sampler.update(context, ids, scores)


def needed(sampler, logits, step, *, ess=50, block=50):
    """Draws until each context has its effective sample size: how many, and what they were."""
    contexts, n_classes = logits.shape
    context = torch.arange(contexts)[:, None]
    drawn, scores = [], []
    count = torch.zeros(contexts, dtype=torch.int64)
    total = square = torch.zeros(contexts, dtype=torch.float64)
    going = torch.ones(contexts, dtype=torch.bool)
    while bool(going.any()):
        counter = (step, len(drawn))
        ids = sampler.sample(block, context=context, rng_counter=counter)
        found = logits.gather(1, ids)
        ratio = (found - sampler.log_prob(ids, context, dtype=torch.float64)).exp()
        total = total + torch.where(going, ratio.sum(1), 0.0)
        square = square + torch.where(going, ratio.square().sum(1), 0.0)
        # A context that has enough repeats a class of its own: a class counts once.
        repeated = drawn[0][:, :1].expand(-1, block) if drawn else ids
        ids = torch.where(going[:, None], ids, repeated)
        drawn.append(ids)
        scores.append(logits.gather(1, ids))
        count += block * going
        going = going & (total.square() < ess * square) & (count < n_classes)
    return count.double().mean().item(), context, torch.cat(drawn, 1), torch.cat(scores, 1)


def test_samples_for_an_effective_sample_size_fall_by_a_factor_of_four():
    n_classes, contexts = 5000, 40
    unigram = zipf(n_classes)
    # The factor depends on the logits: a fixed case, whose draws are fixed by their counters.
    fixed = torch.Generator().manual_seed(2008)
    noise = torch.randn(contexts, n_classes, dtype=torch.float64, generator=fixed)
    logits = unigram.log() + 2 * noise
    model = logits.log_softmax(1)
    sampler = AdaptiveNGram(unigram, contexts=contexts * 2, width=1024, rate=0.1)
    first = sum(needed(sampler, logits, -step)[0] for step in range(1, 5)) / 4
    counts, divergence = [], []
    for step in range(60):
        count, context, ids, scores = needed(sampler, logits, step)
        counts.append(count)
        sampler.update(context, ids, scores)
        if step % 20 == 0 or step == 59:
            proposal = everything(sampler, context)
            assert (proposal.sum(1) - 1).abs().max() < 1e-6
            divergence.append((model.exp() * (model - proposal.log())).sum(1).mean().item())
    last = sum(counts[-20:]) / 20
    assert first > 4 * last, f"{first} to {last}"
    assert divergence == sorted(divergence, reverse=True)
    assert divergence[-1] < divergence[0] / 2


def test_an_update_is_the_formula():
    sampler = AdaptiveNGram(zipf(6), contexts=8, width=6, rate=0.25, mixture_rate=0.0)
    context = torch.tensor([[4]])
    before = everything(sampler, torch.tensor([[1]]))[0]
    bigram = before.clone()
    for _ in range(3):
        ids = torch.randint(6, (1, 4))
        scores = torch.randn(6, dtype=torch.float64)
        seen = ids.unique()
        moved = bigram[seen].sum() * scores[seen].softmax(0)
        bigram[seen] = 0.75 * bigram[seen] + 0.25 * moved
        sampler.update(context, ids, scores[ids])
    told = everything(sampler, context)[0]
    assert torch.allclose(told, 0.5 * before + 0.5 * bigram, atol=1e-9)
    # Other contexts stay.
    assert torch.equal(everything(sampler, torch.tensor([[1]]))[0], before)


def test_the_mixture_moves_to_what_fits():
    sampler = AdaptiveNGram(zipf(50), 3, contexts=64, width=50, rate=0.2, mixture_rate=0.5)
    parts = sampler.mixture.double() / 2**32
    assert torch.allclose(parts, torch.full((3,), 1 / 3, dtype=torch.float64))
    # Scores depend on the last word alone: many second to last words share what a bigram knows.
    table = 3 * torch.randn(50, 50)
    for _ in range(200):
        context = torch.stack([torch.randint(50, (16,)), torch.randint(3, (16,))], 1)
        ids = torch.randint(50, (16, 20))
        sampler.update(context, ids, table[context[:, 1]].gather(1, ids))
    assert int(sampler.mixture.sum()) == 2**32
    unigram, bigram, trigram = (sampler.mixture.double() / 2**32).tolist()
    assert bigram > trigram
    assert bigram > unigram
    # Parts are kept at 0.01 before they are made to sum to 1.
    assert min(unigram, trigram) >= 0.01 / 1.02


def test_short_lists_and_full_tables_stay_normalised():
    for width, contexts in ((1, 8), (3, 8), (2, 1)):
        sampler = AdaptiveNGram(zipf(100), 3, contexts=contexts, width=width, rate=0.9)
        for _ in range(20):
            context = torch.randint(100, (40, 2))
            sampler.update(context, torch.randint(100, (40, 7)), 5 * torch.randn(40, 7))
        total = everything(sampler, torch.randint(100, (50, 2))).sum(1)
        assert (total - 1).abs().max() < 1e-9
        lists = sampler.lists[0]
        assert int((lists.keys >= 0).sum()) <= len(lists.keys) - 1
        assert (lists.classes[-1] == UNUSED).all()


def test_extreme_scores_leave_every_class_a_probability():
    sampler = AdaptiveNGram(zipf(20), contexts=8, width=20, rate=1.0)
    context = torch.tensor([[3]])
    for scores in ([1000.0, 0.0, -1000.0], [-math.inf, 0.0, 5.0]):
        sampler.update(context, torch.tensor([[0, 1, 2]]), torch.tensor([scores]))
        probs = everything(sampler, context)
        assert (probs > 0).all()
        assert (probs.sum() - 1).abs() < 1e-9


def test_rows_that_say_nothing_change_nothing():
    sampler, context = taught(2)
    before = {name: value.clone() for name, value in sampler.state_dict().items()}
    ids = torch.randint(CLASSES, (6, 4))
    for bad in (math.nan, math.inf, -math.inf):
        sampler.update(context, ids, torch.full((6, 4), bad))
    sampler.update(torch.full((6, 1), -1), ids, torch.zeros(6, 4))
    sampler.update(context[:0], ids[:0], torch.zeros(0, 4))
    for name, value in sampler.state_dict().items():
        if name != "mixture":
            assert torch.equal(value, before[name]), name


def test_of_equal_contexts_the_last_row_teaches():
    both, last = (AdaptiveNGram(zipf(30), contexts=16, width=9, mixture_rate=0) for _ in range(2))
    ids, scores = torch.randint(30, (4, 5)), torch.randn(4, 5)
    both.update(torch.tensor([[7], [2], [7], [2]]), ids, scores)
    last.update(torch.tensor([[7], [2]]), ids[2:], scores[2:])
    context = torch.tensor([[7], [2], [5]])
    assert torch.equal(everything(both, context), everything(last, context))


def test_ids_may_be_shared_by_all_rows():
    shared, spread = (AdaptiveNGram(zipf(30), contexts=16, width=9) for _ in range(2))
    context, ids, scores = torch.tensor([[7], [2]]), torch.randint(30, (5,)), torch.randn(2, 5)
    shared.update(context, ids, scores)
    spread.update(context, ids.expand(2, -1), scores)
    assert torch.equal(everything(shared, context), everything(spread, context))


def test_contexts_find_their_places():
    places = ContextLists(1000, 2).keys
    nowhere = len(places) - 1
    assert nowhere == 1024
    keys = torch.randperm(10**6)[:500]
    placed = place_(places, keys)
    held = placed != nowhere
    assert held.double().mean() > 0.95
    assert len(placed[held].unique()) == int(held.sum())
    assert torch.equal(find(places, keys), placed)
    assert torch.equal(place_(places, keys.flip(0)).flip(0), placed)
    assert (find(places, torch.tensor([-1, 10**7])) == nowhere).all()
    # A bucket that is full turns others away.
    crowded = ContextLists(1, 2).keys
    assert int((place_(crowded, torch.arange(30)) != len(crowded) - 1).sum()) == WAYS


def test_lists_share_out_what_the_unigram_gives_them():
    sampler, context = taught(2)
    lists = sampler.lists[0]
    place = find(lists.keys, context[:, 0])
    assert (lists.end[place][:, -1] == SHARES).all()
    used = lists.classes[place] != UNUSED
    listed = torch.where(used, sampler.unigram.weight[lists.classes[place].long() * used], 0)
    assert torch.equal(
        listed.sum(1)[place < len(lists.keys) - 1], lists.mass[place][place < len(lists.keys) - 1]
    )


@pytest.mark.parametrize("order", [2, 3])
def test_contexts_of_the_wrong_order_are_refused(order):
    sampler = AdaptiveNGram(zipf(9), order, contexts=8, width=4)
    told = rf"context: expected shape \(rows, {order - 1}\), the words before for order {order}"
    for context in (torch.zeros(3, order), torch.zeros(3), torch.zeros(3, order - 1, 1)):
        with pytest.raises(ValueError, match=told):
            sampler.sample(2, context=context.long())
    with pytest.raises(ValueError, match="context: expected class ids from 0 to 8, got 9"):
        sampler.sample(2, context=torch.full((1, order - 1), 9))


def test_other_bad_input_is_refused():
    sampler = AdaptiveNGram(zipf(9), contexts=8, width=4)
    context, ids, scores = torch.tensor([[1], [2]]), torch.zeros(2, 3).long(), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"scores: expected shape \(2, m\)"):
        sampler.update(context, ids, scores[:, :2])
    with pytest.raises(TypeError, match="scores: expected a floating dtype"):
        sampler.update(context, ids, ids)
    with pytest.raises(ValueError, match="ids: expected class ids from 0 to 8, got 9"):
        sampler.update(context, ids + 9, scores)
    with pytest.raises(ValueError, match=r"ids: expected shape \(2, n\) or \(2,\)"):
        sampler.log_prob(torch.zeros(3, 2).long(), context)
    with pytest.raises(ValueError, match="order: expected at most 3, got 4"):
        AdaptiveNGram(zipf(9), 4)
    with pytest.raises(ValueError, match="rate: expected a number from 0 to 1, got 2"):
        AdaptiveNGram(zipf(9), rate=2)
    with pytest.raises(ValueError, match="unique: expected a sampler without context"):
        sampler.unique(2)


@pytest.mark.parametrize("mixture_rate", [100.0, 1e4, 1e6])
def test_a_large_rate_leaves_a_mixture(mixture_rate):
    sampler = AdaptiveNGram(zipf(40), 2, mixture_rate=mixture_rate)
    context = torch.randint(40, (8, 1))
    for _ in range(4):
        sampler.update(context, torch.randint(40, (8, 10)), 3 * torch.randn(8, 10))
    every = torch.arange(40).expand(8, -1)
    total = sampler.log_prob(every, context=context).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))


def test_rows_without_a_context_do_not_move_the_mixture():
    sampler = AdaptiveNGram([1.0] * 6)
    sampler.mixture.copy_(torch.tensor([858993459, 2**32 - 858993459]))
    before = sampler.mixture.clone()
    for _ in range(20):
        sampler.update(torch.full((4, 1), -1), torch.arange(4), torch.randn(4, 4))
    torch.testing.assert_close(sampler.mixture, before, rtol=0, atol=40)
    nothing = sampler.sample_with_log_prob(2, context=torch.zeros(0, 1, dtype=torch.int64))
    assert nothing.log_prob.shape == (0, 2)
