"""The study of noise-contrastive estimation: noise of each row, normalisers, and its verdict."""

import json
import math

import pytest
import torch
from made_text import write_spelled_wikitext
from torch.nn.functional import cross_entropy, softplus

from lastlayer.heads import NegativeSampling, NoiseContrastive
from lastlayer.lab.data.text import Reading
from lastlayer.samplers import Unigram
from studies import nce
from studies.__main__ import main
from studies.language import Model, Setting, feed_of, fit, perplexity, wikitext2

COUNTS = 1.0 / torch.arange(1, 41)
CPU = torch.device("cpu")


def _rows(n):
    return torch.randn(n, 8), torch.randint(40, (n,))


def test_each_row_has_noise_of_its_own_and_the_loss_is_the_formula():
    head = nce.OwnNoiseContrastive(8, 40, Unigram(COUNTS), n_samples=5)
    hidden, target = _rows(30)
    loss = head(hidden, target)
    before = head.rng_counter.clone()
    assert before.tolist() == [0, 1]
    ids, _ = head._draw(torch.tensor([0, 0]), torch.float32)
    assert ids.shape == (30, 5)
    assert (ids[0] != ids[1:]).any(1).float().mean() > 0.9
    scores = head.to_linear()(hidden)
    less = head.sampler.log_prob(torch.arange(40)) + math.log(5)
    own = (scores - less).gather(1, target.unsqueeze(1))
    noise = (scores - less).gather(1, ids)
    expected = (softplus(-own).squeeze(1) + softplus(noise).sum(1)).mean()
    torch.testing.assert_close(loss, expected)
    found, wanted = (torch.autograd.grad(x, [head.weight, head.bias]) for x in (loss, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("own", "shared"),
    [(nce.OwnNoiseContrastive, NoiseContrastive), (nce.OwnNegativeSampling, NegativeSampling)],
)
def test_a_single_row_shares_its_noise_with_nobody(own, shared):
    hidden, target = _rows(1)
    one, other = (kind(8, 40, Unigram(COUNTS), n_samples=7, seed=3) for kind in (own, shared))
    other.load_state_dict(one.state_dict())
    for _ in range(2):
        torch.testing.assert_close(one(hidden, target), other(hidden, target))


def test_negative_sampling_with_biases_is_nce():
    hidden, target = _rows(20)
    one, other = (kind(8, 40, Unigram(COUNTS), n_samples=7, seed=3)
                  for kind in (nce.OwnNoiseContrastive, nce.OwnNegativeSampling))  # fmt: skip
    for head in (one, other):
        head.init_bias_from_counts(COUNTS)
    other.weight.data.copy_(one.weight)
    losses = [head(hidden, target) for head in (one, other)]
    torch.testing.assert_close(*losses)
    slopes = [
        torch.autograd.grad(loss, [head.weight, head.bias])
        for loss, head in zip(losses, (one, other), strict=True)
    ]
    torch.testing.assert_close(*slopes)
    torch.testing.assert_close(one.log_prob(hidden), other.log_prob(hidden))


@pytest.mark.parametrize("method", [nce.METHODS[3], nce.METHODS[-1], nce.METHODS[0]], ids=str)
def test_normalisers_are_those_of_the_heads(tmp_path, method):
    data = wikitext2(write_spelled_wikitext(tmp_path) / "wikitext2", Reading(vocab_size=200))
    setting = Setting(width=8, epochs=1, held_out=2_000)
    make = lambda: nce.make_head(method, data, setting.width)  # noqa: E731
    _, model = fit(data, make, 0.01, 1, setting, CPU, start_at_counts=method.kind != nce.UNBIASED)
    feed, head = feed_of(data, setting, CPU), model.head
    found = nce.normalisers(model, feed, setting.held_out)
    hidden = torch.cat([each for each, _ in nce.states(model, feed, "test", setting.held_out)])
    target = torch.cat([each for _, each in nce.states(model, feed, "test", setting.held_out)])
    if isinstance(head, NoiseContrastive):
        drift = head.drift(hidden)
        assert found["log_z"] == pytest.approx(drift.mean, abs=1e-4)
        assert found["log_z_std"] == pytest.approx(drift.deviation, abs=1e-4)
    if isinstance(head, NegativeSampling):
        assert found["log_z"] == pytest.approx(head._row_log_z(hidden).mean().item(), abs=1e-4)
        bare = cross_entropy(head.to_linear()(hidden), target)
        assert found["raw"] == pytest.approx(bare.exp().item(), rel=1e-4)
    else:
        exact = perplexity(Model(model.body, head), feed, "test", setting)
        assert found["raw"] == pytest.approx(exact, rel=1e-4)


def test_quick_on_made_text(tmp_path, capsys):
    arguments = [
        "--quick",
        "--data",
        str(write_spelled_wikitext(tmp_path)),
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(["nce", *arguments]) == 0
    assert "The pattern " in capsys.readouterr().out
    kept = json.loads((tmp_path / "o" / "nce.json").read_text(encoding="utf-8"))
    runs = kept["found"]["runs"]
    assert {"full softmax", "NCE, unigram, k = 1", "NCE, uniform, k = 25"} <= set(runs)
    negative, same = (runs[f"{kind}, unigram, k = 25"][0] for kind in (nce.NEGATIVE, nce.NCE))
    assert negative["test"] == pytest.approx(same["test"], rel=1e-3)


def _found(perplexities):
    """As the paper's figures would be kept."""
    run = {"valid": [200.0, 150.0], "seconds": [0.0, 2.0], "rate": 0.01, "flat": True,
           "log_z": 0.1, "log_z_std": 0.2, "raw": 300.0}  # fmt: skip
    runs = {
        name: [run | {"test": perplexity * more} for more in (0.999, 1.0, 1.001)]
        for name, perplexity in perplexities.items()
    }
    return {"words": 10_000, "tokens": 900_000, "width": 100, "runs": runs}


def test_the_verdict_follows_the_figures():
    assert nce.verdict(_found(nce.PUBLISHED)).word == "holds"
    names = list(nce.PUBLISHED)
    turned = dict(zip(names, [100.0, *list(nce.PUBLISHED.values())[:0:-1]], strict=True))
    found = nce.verdict(_found(turned))
    assert found.word == "does not hold"
    assert "with neither" in found.why
    assert "not better at every k" in found.why
    assert nce.verdict(_found(dict.fromkeys(names, 163.5))).word == "holds in part"
