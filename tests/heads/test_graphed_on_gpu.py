"""Heads in torch.cuda.make_graphed_callables, as the docs recommend it for small steps."""

import copy

import numpy as np
import pytest
import torch

from lastlayer import heads, samplers, trees

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

V, D, N = 500, 32, 200
COUNTS = 1.0 / np.arange(1.0, V + 1.0)
HUFFMAN = trees.huffman(COUNTS)
HEADS = {
    "full": lambda **how: heads.FullSoftmax(D, V, **how),
    "entmax": lambda **how: heads.EntmaxHead(D, V, **how),
    "topk": lambda **how: heads.TopKSoftmaxHead(D, V, 5, **how),
    "binary": lambda **how: heads.HierarchicalSoftmax(D, HUFFMAN, **how),
    "binary, sparse": lambda **how: heads.HierarchicalSoftmax(D, HUFFMAN, sparse=True, **how),
    "wide": lambda **how: heads.HierarchicalSoftmax(D, HUFFMAN.collapse(20), **how),
    "adaptive": lambda **how: heads.AdaptiveSoftmax(D, cutoffs=[50, 200], n_classes=V, **how),
    "differentiated": lambda **how: heads.DifferentiatedSoftmax(D, [(100, 24), (400, 8)], **how),
    "sampled": lambda **how: heads.SampledSoftmax(
        D, V, sampler=samplers.Unigram(COUNTS), n_samples=50, **how
    ),
    "sampled, sparse": lambda **how: heads.SampledSoftmax(
        D, V, sampler=samplers.Unigram(COUNTS), n_samples=50, sparse=True, **how
    ),
    "noise": lambda **how: heads.NoiseContrastive(
        D, V, sampler=samplers.LogUniform(V), n_samples=50, sparse=True, **how
    ),
    "negative": lambda **how: heads.NegativeSampling(
        D, V, sampler=samplers.Uniform(V), n_samples=50, **how
    ),
}


def batch():
    hidden = torch.randn(N, D, device="cuda", requires_grad=True)
    target = torch.randint(V, (N,), device="cuda")
    target[::9] = -100
    return hidden, target


def step(head, hidden, target):
    """The loss, and the gradients of hidden and of all parameters."""
    head.zero_grad(set_to_none=True)
    hidden.grad = None
    loss = head(hidden, target)
    loss.backward()
    found = [p.grad.to_dense().clone() for p in head.parameters() if p.grad is not None]
    return [loss.detach().clone(), hidden.grad.clone(), *found]


@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
def test_a_graphed_head_gives_what_the_head_gives(make):
    head = make(device="cuda")
    plain = copy.deepcopy(head)
    graphed = torch.cuda.make_graphed_callables(head, batch())
    for _ in range(3):
        hidden, target = batch()
        plain.load_state_dict(graphed.state_dict())
        # Twice: a sampled head draws other classes.
        made = step(graphed, hidden, target) + step(graphed, hidden, target)
        expected = step(plain, hidden, target) + step(plain, hidden, target)
        assert len(made) >= 6
        for got, right in zip(made, expected, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)
        assert all(map(torch.equal, graphed.buffers(), plain.buffers()))


def test_gradients_that_are_there_already_are_added_to():
    head = HEADS["sampled"](device="cuda")
    plain = copy.deepcopy(head)
    graphed = torch.cuda.make_graphed_callables(head, batch())
    plain.load_state_dict(graphed.state_dict())
    batches = [batch() for _ in range(3)]
    for each in (graphed, plain):
        for parameter in each.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for hidden, target in batches:
            each(hidden, target).backward()
    for one, other in zip(graphed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_outside_of_training_the_head_is_itself():
    graphed = torch.cuda.make_graphed_callables(HEADS["sampled, sparse"](device="cuda"), batch())
    graphed.eval()
    hidden, target = batch()
    loss = graphed(hidden[:7], target[:7])
    expected = -graphed.log_prob(hidden[:7]).gather(-1, target[:7].clamp(min=0)[:, None])[1:].mean()
    torch.testing.assert_close(loss, expected)
    assert graphed.topk(hidden[:7], 3).classes.shape == (7, 3)
