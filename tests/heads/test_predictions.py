"""topk, log_prob and sample of the dense heads have ways of their own without a gradient."""

import math

import pytest
import torch

import lastlayer
from lastlayer import heads
from lastlayer.samplers import Unigram

N, D, V = 6, 12, 203


def unigram():
    return Unigram(torch.arange(1, V + 1, dtype=torch.float64).rsqrt())


def band_order():
    return torch.randperm(V)


HEADS = {
    "full": lambda **o: heads.FullSoftmax(D, V, **o),
    "capped": lambda **o: heads.FullSoftmax(D, V, softcap=3.0, temperature=0.7, **o),
    "unbiased": lambda **o: heads.FullSoftmax(D, V, bias=False, temperature=2, **o),
    "self-normalized": lambda **o: heads.SelfNormalized(D, V, **o),
    "sampled": lambda **o: heads.SampledSoftmax(D, V, unigram(), 8, temperature=0.5, **o),
    "negative": lambda **o: heads.NegativeSampling(D, V, unigram(), 8, **o),
    "entmax": lambda **o: heads.EntmaxHead(D, V, **o),
    "softmax by entmax": lambda **o: heads.EntmaxHead(D, V, alpha=1.0, **o),
    "topk": lambda **o: heads.TopKSoftmaxHead(D, V, k=20, **o),
    "topk of many": lambda **o: heads.TopKSoftmaxHead(D, V, k=150, **o),
    "bands": lambda **o: heads.DifferentiatedSoftmax(D, [(50, 8), (V - 50, 4)], **o),
    "bands in order": lambda **o: heads.DifferentiatedSoftmax(
        D, [(50, 8), (V - 50, 4)], order=band_order(), **o
    ),
    "labels": lambda **o: heads.MultiLabel(D, V, **o),
}


def made(name, dtype=torch.float64, **options):
    head = HEADS[name](dtype=dtype, **options)
    with torch.no_grad():
        for each in head.parameters():
            each.normal_(std=1.0)
        if head.bias is not None:
            head.bias[7] = -math.inf
    hidden = torch.randn(N, D, dtype=dtype)
    hidden[2, 3] = math.nan
    return head, hidden


@pytest.mark.parametrize("chunk_rows", ["auto", 2])
@pytest.mark.parametrize("name", HEADS)
def test_as_with_a_gradient(name, chunk_rows):
    head, hidden = made(name, chunk_rows=chunk_rows)
    right = head.log_prob(hidden)
    assert right.requires_grad
    classes = torch.randint(V, (N, 4))
    classes[:, 0] = right.detach().nan_to_num(nan=-math.inf).argmax(-1)
    chosen = head.log_prob(hidden, classes)
    assert chosen.requires_grad
    right = right.detach()
    torch.testing.assert_close(chosen.detach(), right.gather(-1, classes), equal_nan=True)
    with torch.no_grad():
        torch.testing.assert_close(head.log_prob(hidden), right, equal_nan=True)
        found = head.log_prob(hidden, classes)
        torch.testing.assert_close(found, right.gather(-1, classes), equal_nan=True)
        found = head.log_prob(hidden, classes[:, 0])
        torch.testing.assert_close(found, right.gather(-1, classes[:, :1])[:, 0], equal_nan=True)


@pytest.mark.parametrize("name", HEADS)
def test_the_best_are_those_of_a_sort(name):
    head, hidden = made(name, torch.float32)
    known = torch.tensor([0, 1, 3, 4, 5])
    for k in (1, 9, 40, V):
        values, classes = head.topk(hidden, k)
        with torch.no_grad():
            logs = head.log_prob(hidden)
        keys = logs.nan_to_num(nan=math.inf, neginf=-math.inf)
        expected = keys.sort(dim=-1, descending=True, stable=True)
        torch.testing.assert_close(values[known], expected.values[known, :k])
        torch.testing.assert_close(values, logs.gather(-1, classes), equal_nan=True)
        assert (classes.sort(-1).values.diff(dim=-1) > 0).all()
        if name != "labels":
            assert classes[2].tolist() == [*range(k)]
            assert values[2].isnan().all()


@pytest.mark.parametrize("name", [name for name in HEADS if name != "labels"])
def test_draws_have_their_shares(name):
    head, hidden = made(name, torch.float32)
    hidden = hidden[[0, 5]]
    drawn = head.sample(hidden, 4000, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        probs = head.log_prob(hidden).exp()
    assert (probs.gather(-1, drawn) > 0).all()
    shares = torch.zeros_like(probs).scatter_add(-1, drawn, torch.ones(2, 4000)) / 4000
    assert (shares - probs).abs().max() < 5 * 0.5 / math.sqrt(4000)
    again = head.sample(hidden, 4000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(drawn, again)
    with pytest.raises(ValueError, match="expected rows with valid probabilities"):
        head.sample(torch.full((1, D), math.nan))


@pytest.mark.parametrize("name", HEADS)
def test_of_equal_classes_the_lower_one_comes_first(name):
    head, _ = made(name, torch.float32)
    with torch.no_grad():
        for each in head.parameters():
            each.zero_()
    classes = head.topk(torch.randn(3, D), 12).classes
    if name == "negative":
        # The proposal decides, which has the first classes more often.
        assert classes[0].tolist() == [*range(12)]
    assert (classes == torch.arange(12)).all()


@pytest.mark.parametrize("name", ["full", "capped", "topk", "bands", "entmax"])
def test_a_masked_row_has_no_probabilities(name):
    head, _ = made(name, torch.float32)
    with torch.no_grad():
        head.bias.fill_(-math.inf)
        hidden = torch.randn(2, D)
        assert (head.log_prob(hidden) == -math.inf).all()
        assert (head.log_prob(hidden, torch.tensor([0, 9])) == -math.inf).all()
        values, classes = head.topk(hidden, 5)
        assert (values == -math.inf).all()
        assert (classes == torch.arange(5)).all()


@pytest.mark.parametrize("name", HEADS)
def test_half_precision_and_autocast(name):
    head, hidden = made(name, torch.float32)
    hidden = hidden[:2]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logs, top = head.log_prob(hidden), head.topk(hidden, 3)
        target = head.log_prob(hidden, top.classes)
    narrow = head.to(torch.bfloat16)
    with torch.no_grad():
        right = narrow.log_prob(hidden.bfloat16())
        best = narrow.topk(hidden.bfloat16(), 3)
    assert logs.dtype == right.dtype == top.values.dtype == torch.float32
    # In "negative" the bias is widened before the log of the proposal is added.
    torch.testing.assert_close(logs, right, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(target, right.gather(-1, top.classes), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(top.values, best.values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", HEADS)
def test_no_rows_and_more_dimensions(name):
    head, _ = made(name, torch.float32)
    with torch.no_grad():
        assert head.log_prob(torch.empty(0, D)).shape == (0, V)
        assert head.topk(torch.empty(2, 0, D), 3).classes.shape == (2, 0, 3)
        hidden = torch.randn(2, 3, D)
        assert head.log_prob(hidden).shape == (2, 3, V)
        assert head.log_prob(hidden, torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3)
        assert head.topk(hidden, 4).values.shape == (2, 3, 4)
        if name != "labels":
            assert head.sample(hidden, 2).shape == (2, 3, 2)
            assert head.sample(torch.empty(0, D)).shape == (0, 1)


def test_as_the_maps():
    """Heads against the maps of the library on scores in float64."""
    for name, of_map in {
        "entmax": lambda s: lastlayer.entmax(s, 1.5),
        "topk": lambda s: lastlayer.topk_softmax(s, 20),
        "full": lambda s: torch.softmax(s, -1),
    }.items():
        head, hidden = made(name)
        hidden = hidden[[0, 1]]
        with torch.no_grad():
            scores = hidden @ head.weight.t() + head.bias
            torch.testing.assert_close(head.log_prob(hidden).exp(), of_map(scores))
