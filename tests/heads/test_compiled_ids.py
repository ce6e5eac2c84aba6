"""In compiled code on a CPU class ids are checked when it runs: kernels trust theirs."""

import numpy as np
import pytest
import torch

from lastlayer import heads, samplers, trees

V, D = 60, 8
COUNTS = 1.0 / np.arange(1.0, V + 1.0)
HEADS = {
    "full": lambda: heads.FullSoftmax(D, V),
    "entmax": lambda: heads.EntmaxHead(D, V),
    "topk": lambda: heads.TopKSoftmaxHead(D, V, 5),
    "binary": lambda: heads.HierarchicalSoftmax(D, trees.huffman(COUNTS)),
    "wide": lambda: heads.HierarchicalSoftmax(D, trees.huffman(COUNTS).collapse(40)),
    "adaptive": lambda: heads.AdaptiveSoftmax(D, cutoffs=[10, 30], n_classes=V),
    "differentiated": lambda: heads.DifferentiatedSoftmax(D, [(20, 4), (40, 4)]),
    "sampled": lambda: heads.SampledSoftmax(D, V, sampler=samplers.Unigram(COUNTS), n_samples=9),
    "noise": lambda: heads.NoiseContrastive(D, V, sampler=samplers.LogUniform(V), n_samples=9),
    "negative": lambda: heads.NegativeSampling(D, V, sampler=samplers.Uniform(V), n_samples=9),
    "partial": lambda: heads.PartialSoftmax(D, V, k=9),
    "self": lambda: heads.SelfNormalized(D, V, fraction=0.5),
}
# Torch warns of its own doings while it traces.
pytestmark = pytest.mark.filterwarnings("ignore")
every_head = pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
TOLD = rf"expected class ids from 0 to {V - 1}"


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager")


@every_head
def test_targets(make):
    head = make()
    hidden, target = torch.randn(5, D, requires_grad=True), torch.randint(V, (5,))
    target[0] = -100
    loss = compiled(head)
    loss(hidden, target).backward()
    for wrong in (V, -7, 10**11):
        outside = target.clone()
        outside[3] = wrong
        with pytest.raises(ValueError, match=rf"target: {TOLD}.* got {wrong} at position \(3,\)"):
            loss(hidden, outside)


@every_head
def test_classes(make):
    head = make()
    hidden, classes = torch.randn(5, D, requires_grad=True), torch.randint(V, (5, 2))
    log_prob = compiled(head.log_prob)
    torch.testing.assert_close(log_prob(hidden, classes), head.log_prob(hidden, classes))
    for wrong in (V, -7, 10**11):
        outside = classes.clone()
        outside[3, 1] = wrong
        with pytest.raises(ValueError, match=rf"classes: {TOLD}, got {wrong} at position \(3, 1\)"):
            log_prob(hidden, outside)


def test_inputs_of_an_adaptive_embedding():
    embedding = heads.AdaptiveSoftmax(D, cutoffs=[10, 30], n_classes=V).embedding()
    vectors = compiled(embedding)
    assert vectors(torch.randint(V, (4,))).shape == (4, D)
    with pytest.raises(ValueError, match=rf"classes: {TOLD}, got {V} at position \(1,\)"):
        vectors(torch.tensor([0, V, 1, 2]))


@pytest.mark.gpu
def test_nothing_waits_for_a_gpu_in_compiled_code():
    from waits import no_waits

    head = heads.HierarchicalSoftmax(D, trees.huffman(COUNTS), device="cuda")
    hidden = torch.randn(5, D, device="cuda", requires_grad=True)
    target = torch.randint(V, (5,), device="cuda")
    loss = compiled(head)
    loss(hidden, target)
    with no_waits():
        loss(hidden, target).backward()
