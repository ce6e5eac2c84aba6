"""Spans under ZLPR and BCE: a made corpus is read, counted, trained on, and becomes tables."""

import gzip
import json
import random

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from lastlayer import zlpr_loss
from lastlayer.heads import GlobalPointer
from studies import globalpointer as gp
from studies.__main__ import main

CPU = torch.device("cpu")
NAMES = {"name": ["王小明", "李雷"], "address": ["北京", "上海市"]}


def sentence(rng):
    """Fillers around names; one in three sentences has none."""
    text, label = "", {}
    for _ in range(rng.choice([0, 1, 2])):
        text += "".join(rng.choices("的是在了和有", k=rng.randint(1, 5)))
        kind = rng.choice(list(NAMES))
        found = rng.choice(NAMES[kind])
        place = [len(text), len(text) + len(found) - 1]
        label.setdefault(kind, {}).setdefault(found, []).append(place)
        text += found
    return {"text": text + "。", "label": label}


@pytest.fixture
def folder(tmp_path):
    rng = random.Random(0)
    (tmp_path / "cluener").mkdir()
    for name, n in ((gp.TRAIN, 120), (gp.DEV, 40)):
        lines = "\n".join(json.dumps(sentence(rng), ensure_ascii=False) for _ in range(n))
        (tmp_path / name).write_bytes(gzip.compress(lines.encode()))
    return tmp_path


@pytest.fixture
def texts(folder):
    return gp.read(folder / gp.DEV)


@pytest.fixture
def encode(texts):
    ids = {c: i for i, c in enumerate(sorted({c for x in texts for c in x.text}), start=2)}
    return gp.Encoder(ids, sorted(NAMES))


def test_spans_are_read_where_the_names_stand(texts):
    assert len(texts) == 40
    assert any(not each.spans for each in texts)
    for each in texts:
        for kind, start, end in each.spans:
            assert each.text[start : end + 1] in NAMES[kind]


def test_batches_have_every_sentence_once_and_labels_as_listed(texts, encode):
    order = torch.Generator().manual_seed(0)
    for generator in (None, order):
        seen = []
        for batch in encode.batches(texts, 7, generator):
            right = gp.dense(batch.spans, 2, batch.characters.shape[1])
            listed = [{tuple(s) for s in row if s[0] != gp.NO_SPAN} for row in batch.spans.tolist()]
            assert [{tuple(s) for s in row.nonzero().tolist()} for row in right] == listed
            seen += [
                (tuple(x for x in row if x != gp.PADDING), frozenset(spans))
                for row, spans in zip(batch.characters.tolist(), listed, strict=True)
            ]
        kinds = {kind: i for i, kind in enumerate(encode.types)}
        expected = [
            (tuple(encode.characters[c] for c in x.text),
             frozenset((kinds[kind], a, b) for kind, a, b in x.spans))
            for x in texts
        ]  # fmt: skip
        assert sorted(seen, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("efficient", [True, False])
def test_losses_are_those_of_all_spans(texts, encode, efficient):
    torch.manual_seed(0)
    batch = encode(texts[:6])
    n = batch.characters.shape[1]
    states, mask = torch.randn(6, n, 8), batch.characters != gp.PADDING
    head = GlobalPointer(8, 2, 4, efficient=efficient, ignore_index=gp.NO_SPAN)
    scores, right = head.scores(states, mask), gp.dense(batch.spans, 2, n)
    zlpr = gp.SpanLoss(head, "ZLPR")((states, mask), batch.spans)
    torch.testing.assert_close(zlpr, zlpr_loss(scores.flatten(-2), right.flatten(-2)))
    total = 0.0
    for text in range(6):
        length = len(texts[text].text)
        for start in range(length):
            each = (text, slice(None), start, slice(start, length))
            total += binary_cross_entropy_with_logits(
                scores[each], right[each].float(), reduction="sum"
            )
    bce = gp.SpanLoss(head, "BCE")((states, mask), batch.spans)
    torch.testing.assert_close(bce, total / 12)
    assert torch.autograd.grad(bce, head.project.weight)[0].isfinite().all()


def test_counts_are_those_of_decoded_spans(texts, encode):
    torch.manual_seed(0)
    settings = gp.Settings(width=8, pairs=64, head_size=4)
    reader = gp.Reader(len(encode.characters) + 2, settings).eval()
    head = GlobalPointer(8, 2, 4)
    torch.nn.init.normal_(head.project.weight, std=3.0)
    found = gp.count(reader, head, texts, encode, CPU)
    for threshold in (-6.0, 0.0, 1.5):
        hits, said = torch.zeros(2), torch.zeros(2)
        for each in texts:
            batch = encode([each])
            with torch.no_grad():
                (spans,) = head.decode(*reader(batch.characters), threshold=threshold)
            wanted = {tuple(x) for x in batch.spans[0].tolist()}
            for span in spans:
                said[span.type] += 1
                hits[span.type] += span[:3] in wanted
        at = gp.THRESHOLDS.index(threshold)
        assert found.said[at].tolist() == said.tolist()
        assert found.hits[at].tolist() == hits.tolist()
        assert hits.sum() > 0
        told = found.told(threshold)
        assert told["precision"] == pytest.approx((hits.sum() / said.sum()).item())
        p, r = told["precision"], told["recall"]
        assert told["f1"] == pytest.approx(2 * p * r / (p + r))
        assert told["f1"] == pytest.approx(found.f1()[at].item())
    kinds = [kind for x in texts for kind, _, _ in x.spans]
    assert found.there[0].tolist() == [kinds.count(kind) for kind in encode.types]


def test_scores_start_at_the_frequencies_of_spans(texts, encode):
    shares = gp.shares(texts, encode.types)
    batch = encode(texts)
    mask = batch.characters != gp.PADDING
    right = gp.dense(batch.spans, 2, mask.shape[1])
    head = GlobalPointer(8, 2, 4, efficient=True)
    torch.nn.init.zeros_(head.project.weight)
    torch.nn.init.zeros_(head.project.bias)
    gp.start_from_counts(head, shares)
    scores = head.scores(torch.randn(*mask.shape, 8), mask)
    there = (scores > -torch.inf).sum((0, 2, 3))
    torch.testing.assert_close(right.sum((0, 2, 3)) / there, shares)
    for kind in range(2):
        values = scores[:, kind][scores[:, kind] > -torch.inf]
        torch.testing.assert_close(values.sigmoid(), shares[kind].expand_as(values))
    with pytest.raises(ValueError, match="expected an efficient one with biases"):
        gp.start_from_counts(GlobalPointer(8, 2, 4), shares)


def test_runs_become_tables_and_a_plot(folder, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--quick", "--seeds", "2", "--device", "cpu", "--data", str(folder)]
    assert main(["globalpointer", *arguments, "--out", str(out)]) == 0
    assert "The pattern " in capsys.readouterr().out
    kept = json.loads((out / "globalpointer.json").read_text(encoding="utf-8"))
    assert (out / "globalpointer.png").read_bytes().startswith(b"\x89PNG")
    found = kept["found"]
    assert found["sizes"] == {"train": 96, "valid": 24, "dev": 40}
    assert list(found["runs"]) == list(gp.METHODS)
    for grid in gp.grids(found):
        assert {len(row) for row in grid.rows} == {len(grid.headings)}
    for runs in found["runs"].values():
        assert len(runs) == 2
        for run in runs:
            assert run["dev"][gp.ZERO]["threshold"] == 0.0
            assert max(run["valid"][gp.TUNED]) >= max(run["valid"][gp.ZERO])


def test_the_verdict_follows_the_figures():
    def made(bce_at_0, bce_tuned):
        runs = {}
        for i, (name, method) in enumerate(gp.METHODS.items()):
            f1 = dict.fromkeys((gp.ZERO, gp.TUNED), 0.7)
            if method.loss == "BCE":
                f1 = {gp.ZERO: bce_at_0, gp.TUNED: bce_tuned}
            runs[name] = [
                {"valid": {way: [0.1, 0.2, 0.2] for way in f1}, "dev": {
                    way: {"f1": value + 1e-4 * seed * (-1) ** i, "precision": 0.5, "recall": 0.5}
                    for way, value in f1.items()}}
                for seed in range(3)
            ]  # fmt: skip
        return {"runs": runs, "share": 0.001}

    assert gp.verdict(made(0.5, 0.6)).word == "holds"
    assert gp.verdict(made(0.5, 0.7)).word == "holds in part"
    assert gp.verdict(made(0.8, 0.8)).word == "does not hold"
    assert gp.verdict(made(0.7, 0.7)).word == "does not hold"
