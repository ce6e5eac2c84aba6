"""What samplers say about input that they cannot use."""

import math
import warnings

import numpy as np
import pytest
import torch

from lastlayer import samplers

COUNTS = {
    "got -2 for class 2": [3, 1, -2],
    "got nan for class 1": [3, math.nan, 1],
    "got inf for class 0": torch.tensor([math.inf, 1.0]),
    "got 3 zeros; .* use Uniform": [0, 0, 0],
    r"expected one number per class and at least one class, got none": [],
    r"expected shape \(n_classes,\), one number per class, got \(2, 2\)": np.ones((2, 2)),
}


@pytest.mark.parametrize("make", [samplers.Unigram, samplers.AdaptiveNGram])
@pytest.mark.parametrize("told", COUNTS)
def test_counts_that_are_none(make, told):
    with pytest.raises(ValueError, match=f"counts: .*{told}"):
        make(COUNTS[told])


@pytest.mark.parametrize(
    "counts", ["abc", 5, None, [1j, 2], ["a"], [[1], [1, 2]], torch.tensor([True, False])]
)
def test_counts_of_another_type(counts):
    with pytest.raises(TypeError, match="counts: expected one number per class, got"):
        samplers.Unigram(counts)


@pytest.mark.parametrize("power", [-1, math.nan, math.inf])
def test_powers_that_are_none(power):
    with pytest.raises(ValueError, match="power: expected a finite number of at least 0, got"):
        samplers.Unigram([1, 2], power=power)
    with pytest.raises(TypeError, match="power: expected a number, got str"):
        samplers.Unigram([1, 2], power="1")


@pytest.mark.parametrize("make", [samplers.Uniform, samplers.LogUniform, samplers.InBatch])
def test_numbers_of_classes_that_are_none(make):
    for n, bound in ((0, "least 1"), (-3, "least 1"), (2**31 + 1, f"most {2**31}")):
        with pytest.raises(ValueError, match=f"n_classes: expected at {bound}, got {n}"):
            make(n)
    for n in (2.0, True, "7"):
        with pytest.raises(TypeError, match="n_classes: expected an int, got"):
            make(n)


def test_log_uniform_warns_where_classes_are_not_sorted():
    counts = torch.tensor([9, 4, 7, 1])
    with pytest.warns(UserWarning, match=r"rank 1 has a count of 4 .* order=.* or use Unigram"):
        samplers.LogUniform(4, counts=counts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samplers.LogUniform(4, counts=[9, 7, 7, 0])
        sampler = samplers.LogUniform(4, counts=counts, order=counts.argsort(descending=True))
    probs = sampler.log_prob(torch.arange(4))
    assert probs.argsort(descending=True).tolist() == [0, 2, 1, 3]
    with pytest.raises(ValueError, match=r"counts: expected shape \(4,\), .*got \(3,\)"):
        samplers.LogUniform(4, counts=[1, 2, 3])


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ([0, 1, 1], "each class once, got class 1 at positions 1 and 2"),
        ([0, 1, 3], "expected class ids from 0 to 2, got 3 at position 2"),
        ([0, -1, 2], "got -1 at position 1"),
        ([0, 1], "expected all 3 classes, got 2"),
    ],
)
def test_orders_that_are_none(order, told):
    with pytest.raises(ValueError, match=f"order: .*{told}"):
        samplers.LogUniform(3, order=order)
    with pytest.raises(TypeError, match=r"order: expected all class ids .*got an array of float64"):
        samplers.LogUniform(3, order=[0.0, 1.0, 2.0])


def test_more_different_classes_than_there_are():
    with pytest.raises(ValueError, match="n: expected at most 4, got 5"):
        samplers.Uniform(4).unique(5)
    with pytest.raises(ValueError, match=r"method: expected one of \('fixed', 'poisson'\)"):
        samplers.Uniform(4).unique(2, method="rejection")


def test_forks_that_are_none():
    counter = torch.tensor([1, 2])
    with pytest.raises(TypeError, match="rng_counter: expected an int64 tensor"):
        samplers.fork((1, 2), 0)
    with pytest.raises(TypeError, match="number: expected an int, got float"):
        samplers.fork(counter, 0.5)
    with pytest.raises(ValueError, match="number: expected at least 0"):
        samplers.fork(counter, -1)
    with pytest.raises(ValueError, match=r"rng_counter: .*got torch.int64 of shape \(3,\)"):
        samplers.fork(torch.zeros(3, dtype=torch.int64), 0)


def test_generators_that_are_none():
    with pytest.raises(TypeError, match=r"generator: expected a torch\.Generator, got int"):
        samplers.Uniform(3).sample(2, generator=5)


def test_a_target_outside_the_classes_is_named():
    sampler = samplers.Uniform(5)
    with pytest.raises(
        ValueError, match=r"target: expected class ids from 0 to 4, got 5 at position \(0, 1\)"
    ):
        sampler.log_complement(torch.tensor([[0, 5]]))
    with pytest.raises(ValueError, match="target: expected class ids"):
        sampler.without(torch.tensor([-1]), torch.tensor([0]))


@pytest.mark.gpu
def test_devices_that_differ_are_named():
    sampler = samplers.Unigram([1, 2]).cuda()
    with pytest.raises(
        ValueError, match="ids: expected the device of the sampler, cuda:0, got cpu"
    ):
        sampler.log_prob(torch.tensor([0]))
    with pytest.raises(ValueError, match="rng_counter: expected the device"):
        sampler.sample(2, rng_counter=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="generator: expected one on the device"):
        sampler.sample(2, generator=torch.Generator())
