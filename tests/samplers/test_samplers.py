"""Every sampler draws with the probabilities that it records."""

import copy
import math

import numpy as np
import pytest
import torch

from lastlayer import samplers
from lastlayer.testing import check_sampler
from lastlayer.testing.suite import MOST_DEVIATIONS, chi_square_deviations
from waits import no_waits


def zipf(n, power=1.0):
    return 1.0 / np.arange(1, n + 1) ** power


SAMPLERS = {
    "uniform": lambda: samplers.Uniform(300),
    "uniform of one": lambda: samplers.Uniform(1),
    "uniform of a power of two": lambda: samplers.Uniform(64),
    "log-uniform": lambda: samplers.LogUniform(1000),
    "log-uniform of two": lambda: samplers.LogUniform(2),
    "log-uniform, ordered": lambda: samplers.LogUniform(500, order=torch.randperm(500)),
    "unigram": lambda: samplers.Unigram(zipf(700)),
    "unigram of one": lambda: samplers.Unigram([3]),
    "unigram to a power": lambda: samplers.Unigram(torch.rand(257) ** 4, power=0.75),
    "unigram with zeros": lambda: samplers.Unigram([0, 5, 0, 0, 1, 0]),
    "unigram of many": lambda: samplers.Unigram(zipf(30_000)),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", SAMPLERS)
def test_it_keeps_the_contract(name):
    check_sampler(SAMPLERS[name]())


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAMPLERS)
def test_it_keeps_the_contract_on_a_gpu(name):
    check_sampler(SAMPLERS[name](), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_gpu_draws_what_a_cpu_draws(name):
    here = SAMPLERS[name]()
    there = copy.deepcopy(here).cuda()
    for counter in ((0, 0), (-(2**63), 2**63 - 1), (12345, 67)):
        ids = here.sample(10_001, rng_counter=counter)
        assert torch.equal(there.sample(10_001, rng_counter=counter).cpu(), ids)
        n = (here.n_classes + 1) // 2
        for method in ("fixed", "poisson"):
            mine, other = (
                each.unique(n, method=method, rng_counter=counter) for each in (here, there)
            )
            assert torch.equal(other.ids.cpu(), mine.ids)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu():
    drawn_from = [samplers.Uniform(300), samplers.LogUniform(300), samplers.Unigram(zipf(300))]
    counter = torch.tensor([1, 2], device="cuda")
    for sampler in (each.cuda() for each in drawn_from):
        sampler.unique(10, rng_counter=counter)  # makes its table once
        with no_waits():
            ids = sampler.sample_with_log_prob(100, rng_counter=counter).ids
            sampler.log_prob(ids)
            sampler.without(ids[:5], ids)
            sampler.sample(100)
            sampler.unique(10, rng_counter=counter)


def closed_form(n, edges):
    """The probability of the classes between neighbouring edges."""
    return np.diff(np.log1p(edges) / math.log1p(n))


@pytest.mark.parametrize("n", [1000, 2**20 - 1, 2**20, 100_000_000])
def test_log_uniform_has_its_closed_form_at_any_size(n):
    sampler = samplers.LogUniform(n)
    draws = 400_000
    ids = sampler.sample(draws, rng_counter=(5, n)).numpy()
    assert ids.min() >= 0
    assert ids.max() < n
    # As many bins as there are classes at the front, and then bins of equal probability.
    edges = np.unique(np.floor(np.expm1(np.linspace(0, 1, 2000) * math.log1p(n))))
    edges[-1] = n
    found = np.histogram(ids, bins=edges)[0]
    expected = draws * closed_form(n, edges)
    assert abs(chi_square_deviations(found, expected)) < MOST_DEVIATIONS
    told = sampler.log_prob(torch.tensor([0, n // 2, n - 1]), dtype=torch.float64).exp()
    for k, prob in zip((0, n // 2, n - 1), told.tolist(), strict=True):
        assert prob == pytest.approx(math.log1p(1 / (k + 1)) / math.log1p(n), rel=1e-12)


@pytest.mark.parametrize("n", [1, 7, 2**31 - 1, 2**31])
def test_log_uniform_stays_within_its_classes(n):
    ids = samplers.LogUniform(n).sample(10_000, rng_counter=(1, 1))
    assert int(ids.min()) >= 0
    assert int(ids.max()) < n


def test_uniform_reaches_every_part_of_a_billion_classes():
    n, draws = 2**31 - 1, 200_000
    ids = samplers.Uniform(n).sample(draws, rng_counter=(3, 1)).numpy()
    found = np.histogram(ids, bins=np.linspace(0, n, 1001))[0]
    assert abs(chi_square_deviations(found, np.full(1000, draws / 1000))) < MOST_DEVIATIONS
    # Neighbours are told apart: the lowest bits of ids are as random as the highest.
    low = np.bincount(ids % 97, minlength=97)
    assert abs(chi_square_deviations(low, np.full(97, draws / 97))) < MOST_DEVIATIONS


def test_a_resumed_run_draws_the_same():
    sampler = samplers.Unigram(zipf(1000))
    run = [sampler.sample(50, rng_counter=(9, step)) for step in range(20)]
    resumed = samplers.Unigram.from_config(sampler._saved_config())
    resumed.load_state_dict(sampler.state_dict())
    for step in range(10, 20):
        assert torch.equal(resumed.sample(50, rng_counter=(9, step)), run[step])
    assert len({tuple(ids.tolist()) for ids in run}) == 20


def test_ranks_draw_the_same_or_others_as_they_ask():
    sampler, counter = samplers.Uniform(10**6), torch.tensor([4, 2])
    streams = [samplers.fork(counter, rank) for rank in range(8)]
    assert all(int(stream[1]) == 2 for stream in streams)
    drawn = [
        tuple(sampler.sample(9, rng_counter=stream).tolist()) for stream in [counter, *streams]
    ]
    assert len(set(drawn)) == 9
    assert tuple(sampler.sample(9, rng_counter=samplers.fork(counter, 3)).tolist()) == drawn[4]
    # Another seed gives the same rank another stream.
    assert not torch.equal(samplers.fork(torch.tensor([5, 2]), 3), streams[3])


@pytest.mark.parametrize("name", SAMPLERS)
def test_what_is_left_without_the_target(name):
    sampler = SAMPLERS[name]()
    target = torch.tensor([[-100, 0], [sampler.n_classes - 1, -1]])
    prob = sampler.log_prob(target.clamp(min=0), dtype=torch.float64).exp()
    expected = torch.where(target < 0, 1.0, 1.0 - prob)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        left = sampler.log_complement(target, dtype=dtype)
        assert left.dtype == dtype
        torch.testing.assert_close(left.exp().double(), expected, rtol=0, atol=tolerance)
        assert left[target < 0].eq(0.0).all()


def test_a_target_is_left_out_by_renormalising():
    sampler = samplers.Unigram([0.5, 0.25, 0.125, 0.125])
    log_prob = sampler.without(torch.tensor([0, 2]), torch.tensor([1, 2, 3, 0]))
    expected = torch.tensor([[0.5, 0.25, 0.25, 0.0], [2 / 7, 0.0, 1 / 7, 4 / 7]])
    assert torch.allclose(log_prob.exp(), expected, atol=1e-7)
    assert torch.allclose(
        sampler.log_complement(torch.tensor([0, 2])).exp(), torch.tensor([0.5, 0.875])
    )


def test_the_complement_of_nearly_everything_is_exact():
    sampler = samplers.Unigram([10**12, 1.0])
    told = sampler.log_complement(torch.tensor([0]), dtype=torch.float64)
    assert told.item() == pytest.approx(
        sampler.log_prob(torch.tensor([1]), dtype=torch.float64).item(), abs=1e-12
    )
    assert samplers.Uniform(1).log_complement(torch.tensor([0])).item() == -math.inf


def test_probabilities_below_a_millionth_are_recorded_as_they_are():
    n = 50_000_000
    assert samplers.Uniform(n).log_prob(torch.tensor([7])).item() == pytest.approx(-math.log(n))
    rare = samplers.Unigram([1e9, 1.0])
    assert rare.log_prob(torch.tensor([1])).exp().item() == pytest.approx(1e-9, rel=1e-4)


def test_it_can_be_compiled():
    sampler = samplers.Unigram(zipf(100))

    def negatives(counter):
        ids, log_prob = sampler.sample_with_log_prob(32, rng_counter=counter)
        return ids, log_prob - sampler.log_complement(ids)

    counter = torch.tensor([3, 4])
    expected = negatives(counter)
    torch._dynamo.reset()
    made = torch.compile(negatives, backend="aot_eager", fullgraph=True)(counter)
    assert torch.equal(made[0], expected[0])
    assert torch.allclose(made[1], expected[1])


@pytest.mark.parametrize("power", [1.0, 0.75, 0.0])
def test_a_unigram_keeps_its_counts(power):
    counts = zipf(300)
    sampler = samplers.Unigram(counts, power)
    assert sampler.config()["power"] == power
    assert np.array_equal(sampler.config()["counts"], counts)
    loaded = samplers.Unigram.from_config(sampler._saved_config())
    loaded.load_state_dict(sampler.state_dict())
    assert repr(loaded) == repr(sampler) == f"Unigram(n_classes=300, power={power})"
    # What was loaded tells its weights instead: they have the same probabilities.
    again = samplers.Unigram(**loaded.config())
    ids = torch.arange(300)
    assert torch.allclose(again.log_prob(ids), sampler.log_prob(ids), rtol=1e-6)
    sampler.load_state_dict(copy.deepcopy(sampler.state_dict()))
    assert np.array_equal(sampler.config()["counts"], counts)


def test_ids_of_any_integer_dtype():
    for sampler in (samplers.Uniform(20), samplers.Unigram(zipf(20)), samplers.LogUniform(20)):
        ids = torch.arange(20)
        for dtype in (torch.int32, torch.int16, torch.uint8):
            assert torch.equal(sampler.log_prob(ids.to(dtype)), sampler.log_prob(ids))
            left = sampler.log_complement(ids.to(dtype))
            assert torch.equal(left, sampler.log_complement(ids))
