"""The study of recommendation: its measures by brute force, its losses by identities."""

import gzip
import json
import math
import random
from copy import deepcopy

import pytest
import torch
from torch.nn.functional import cross_entropy

from lastlayer.heads import FullSoftmax, NegativeSampling, NoiseContrastive
from lastlayer.samplers import Unigram
from studies import frame, recommend
from studies.__main__ import main

ITEMS = 60


def _users(n, low, high, seed=0):
    rng = random.Random(seed)
    return [rng.sample(range(ITEMS), rng.randint(low, high)) for _ in range(n)]


def _lists(users):
    return recommend.Lists(
        torch.tensor([item for user in users for item in user]),
        torch.tensor([0, *map(len, users)]).cumsum(0),
    )


def _write(folder, parts):
    (folder / "gowalla").mkdir()
    for name, users in parts.items():
        lines = [" ".join(map(str, (i, *user))) for i, user in enumerate(users)]
        (folder / "gowalla" / f"{name}.txt.gz").write_bytes(
            gzip.compress(("\n".join(lines) + "\n").encode())
        )


def test_quick_on_made_data(tmp_path, capsys):
    whole = _users(80, 14, 20)
    parts = {"train": slice(7, None), "valid": slice(0, 3), "test": slice(3, 7)}
    _write(tmp_path, {name: [user[at] for user in whole] for name, at in parts.items()})
    out = tmp_path / "out"
    assert main(["recommend", "--quick", "--data", str(tmp_path), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "The pattern" in shown
    assert all(name in shown for name in recommend.NAMES)
    found = json.loads((out / "recommend.json").read_text(encoding="utf-8"))["found"]
    assert (found["users"], found["items"]) == (80, ITEMS)
    for name, (run,) in found["runs"].items():
        assert 0 < run["test"]["recall"] < 1
        assert [point["epoch"] for point in run["curve"]] == [1, 2]
        assert ("with_log_q" in run) == (name in recommend.RAW)


def test_too_few_items_and_wrong_users_are_refused(tmp_path, capsys):
    few = [[1, 2, 3, 4]] * 3
    _write(tmp_path, {"train": few, "valid": few, "test": few})
    arguments = ["recommend", "--quick", "--data", str(tmp_path), "--out", str(tmp_path / "o")]
    assert main(arguments) == 2
    assert "expected more than 4 items per user" in capsys.readouterr().err
    path = tmp_path / "gowalla" / "train.txt.gz"
    path.write_bytes(gzip.compress(b"0 1 2\n2 1 2\n"))
    with pytest.raises(ValueError, match="expected users 0, 1"):
        recommend.read(path)


def test_lists_are_those_of_their_users():
    one, two = _users(9, 1, 5), _users(9, 1, 5, seed=1)
    users = torch.tensor([7, 0, 3])
    items, rows, sizes = _lists(one).of(users)
    assert items.tolist() == [item for u in users.tolist() for item in one[u]]
    assert rows.tolist() == [i for i, u in enumerate(users.tolist()) for _ in one[u]]
    assert sizes.tolist() == [len(one[u]) for u in users.tolist()]
    both = _lists(one).joined(_lists(two))
    expected = _lists([a + b for a, b in zip(one, two, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(both, expected, strict=True))


def test_targets_and_inputs_are_all_items_of_a_user():
    users = _users(30, 6, 12)
    some = torch.tensor([4, 29, 0, 11])
    batch = recommend.draw_targets(_lists(users), some, torch.Generator().manual_seed(3))
    inputs = batch.inputs[0].split(batch.inputs[1].tolist())
    for user, given, target in zip(some.tolist(), inputs, batch.target, strict=True):
        assert len(target) == recommend.TARGETS
        assert sorted(given.tolist() + target.tolist()) == sorted(users[user])
    again = recommend.draw_targets(_lists(users), some, torch.Generator().manual_seed(4))
    assert not torch.equal(batch.target, again.target)


def test_measures_are_those_of_brute_force(monkeypatch):
    monkeypatch.setattr(recommend, "TOP", 5)
    monkeypatch.setattr(recommend, "RANKED", 4)
    whole = _users(10, 12, 20)
    known, truth = [user[:6] for user in whole], [user[6:] for user in whole]
    torch.manual_seed(0)
    body = recommend.History(ITEMS)
    weight, bias = torch.randn(ITEMS, recommend.WIDTH), torch.randn(ITEMS)
    tail = torch.rand(ITEMS) < 0.5
    users = torch.tensor([8, 1, 2, 5, 9, 0])
    found = recommend.evaluate(body, weight, bias, _lists(known), _lists(truth), users, tail)
    recall, ndcg, tail_hits, tail_items, shown = [], [], 0, 0, set()
    for user in users.tolist():
        hidden = body.bag.weight[known[user]].sum(0) / math.sqrt(6)
        scores = (weight @ hidden + bias).tolist()
        rest = [item for item in range(ITEMS) if item not in known[user]]
        top = sorted(rest, key=lambda item: -scores[item])[:5]
        hits = [item in truth[user] for item in top]
        recall.append(sum(hits) / len(truth[user]))
        gain = sum(1 / math.log2(i + 2) for i, hit in enumerate(hits) if hit)
        ndcg.append(gain / sum(1 / math.log2(i + 2) for i in range(min(5, len(truth[user])))))
        tail_hits += sum(bool(tail[item]) for item in top if item in truth[user])
        tail_items += sum(bool(tail[item]) for item in truth[user])
        shown |= set(top)
    assert found["recall"] == pytest.approx(sum(recall) / len(recall))
    assert found["ndcg"] == pytest.approx(sum(ndcg) / len(ndcg))
    assert found["tail"] == pytest.approx(tail_hits / tail_items)
    assert found["distinct"] == len(shown)


def test_the_full_loss_is_the_mean_log_probability_of_all_targets():
    layer = FullSoftmax(recommend.WIDTH, ITEMS, dtype=torch.float64)
    head = recommend.Full(layer)
    hidden = torch.randn(7, recommend.WIDTH, dtype=torch.float64, requires_grad=True)
    target = torch.randint(ITEMS, (7, recommend.TARGETS))
    inputs = hidden, layer.weight, layer.bias
    made = torch.autograd.grad(head(hidden, target), inputs)
    scores = hidden @ layer.weight.T + layer.bias
    exact = -scores.log_softmax(1).gather(1, target).mean()
    assert head(hidden, target).item() == pytest.approx(exact.item())
    for one, other in zip(made, torch.autograd.grad(exact, inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_in_batch_is_a_softmax_over_the_targets_of_a_column():
    layer = FullSoftmax(recommend.WIDTH, ITEMS)
    head = recommend.InBatch(layer, "none")
    hidden = torch.randn(8, recommend.WIDTH)
    target = torch.randperm(ITEMS)[:32].view(8, 4)
    weight, bias = recommend.layer_of(head)
    assert torch.equal(weight, layer.weight)
    columns = [(hidden @ weight[ids].T + bias[ids]) for ids in target.T]
    exact = sum(cross_entropy(scores, torch.arange(8)) for scores in columns) / 4
    torch.testing.assert_close(head(hidden, target), exact)


def test_negative_sampling_with_biases_is_noise_contrastive_estimation():
    counts = torch.arange(1, ITEMS + 1)
    torch.manual_seed(0)
    heads = [kind(8, ITEMS, Unigram(counts), 32) for kind in (NoiseContrastive, NegativeSampling)]
    heads[1].weight.data.copy_(heads[0].weight)
    for head in heads:
        head.init_bias_from_counts(counts)
    hidden, target = torch.randn(5, 8), torch.randint(ITEMS, (5, 3))
    one, other = (head(hidden, target) for head in heads)
    torch.testing.assert_close(one, other)
    one.backward()
    other.backward()
    torch.testing.assert_close(heads[0].weight.grad, heads[1].weight.grad)
    torch.testing.assert_close(heads[0].bias.grad, heads[1].bias.grad)
    torch.testing.assert_close(heads[0].log_prob(hidden), heads[1].log_prob(hidden))


def test_the_tail_has_half_of_the_interactions():
    counts = torch.tensor([50, 1, 25, 25, 49, 50])
    tail = recommend.is_tail(counts)
    assert tail.tolist() == [False, True, True, True, True, False]


def _found(recall):
    """Three seeds each, and a curve that rises to its recall in the middle."""
    runs = {
        name: [
            {
                "rate": 0.01, "step_ms": 1.0,
                "test": dict.fromkeys(("recall", "ndcg", "tail"), value + 1e-4 * seed)
                | {"distinct": 9},
                "with_log_q": {"recall": value},
                "curve": [
                    {"epoch": i, "seconds": i * (9.0 if name == recommend.FULL else 1.0),
                     "recall": value * part, "ndcg": value}
                    for i, part in ((1, 0.5), (2, 1.0), (3, 0.9))
                ],
            }
            for seed in range(3)
        ]
        for name, value in recall.items()
    }  # fmt: skip
    popular = {"recall": 0.01, "ndcg": 0.01, "tail": 0.0, "distinct": 40}
    return {"users": 5, "items": 7, "popular": popular, "runs": runs}


def test_the_verdict_follows_the_figures():
    recall = dict.fromkeys(recommend.NAMES, 0.15) | dict.fromkeys(recommend.RAW, 0.1)
    found = _found(recall)
    said = recommend.verdict(found)
    assert said.word == "holds"
    assert "2 seconds instead of 18" in said.why
    assert "0 were best at their last validation" in said.why
    other = recommend.verdict(_found(recall | {recommend.IN_BATCH_RAW: 0.15}))
    assert other.word == "holds in part"
    nothing = dict.fromkeys(recommend.NAMES, 0.15) | {recommend.SAMPLED: 0.1}
    assert recommend.verdict(_found(nothing)).word == "does not hold"
    late = deepcopy(found)
    late["runs"][recommend.NCE][0]["curve"][-1]["recall"] = 0.2
    assert "1 were best at their last validation (NCE)" in recommend.verdict(late).why
    assert frame.draw(recommend.STUDY, found).startswith(b"\x89PNG")
    rows = recommend.grids(found)[0].rows
    assert [row[0] for row in rows[: len(recommend.NAMES)]] == list(recommend.NAMES)
