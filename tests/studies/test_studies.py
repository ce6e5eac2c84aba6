"""``python -m studies``: what is refused, the frame, and the shortest studies in quick versions."""

import gzip
import json
import os
import random
from pathlib import Path

import pytest
import torch
from sklearn.metrics import f1_score

from lastlayer import sparsemax
from studies import frame, label_proportions, linear, multilabel_table, topk_softmax
from studies.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def data():
    """The real data sets, where this machine has them."""
    named = os.environ.get(frame.DATA_VARIABLE)
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data: set {frame.DATA_VARIABLE} to the folder with the data sets")
    return folder


@pytest.fixture
def no_data(monkeypatch):
    monkeypatch.delenv(frame.DATA_VARIABLE, raising=False)


def test_the_list_has_every_study(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(frame.STUDIES)
    assert all(
        frame.load(name).title in line for name, line in zip(frame.STUDIES, lines, strict=True)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["huffmann"], "name: expected one of huffman-bits, trees"),
        (["label-proportions", "--seeds", "0"], "--seeds: expected at least 1, got 0"),
        (["label-proportions", "--device", "tpu"], "--device: expected auto, cpu or cuda"),
        (["label-proportions", "--device", "cuda"], "--device: expected cpu, got cuda"),
        (["huffman-bits"], "--data: expected a folder with 1 more file(s), got no folder"),
    ],
)
def test_bad_options_are_refused(no_data, capsys, tmp_path, arguments, message):
    out = tmp_path / "out"
    assert main([*arguments, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("name", [each for each in frame.STUDIES if each != "label-proportions"])
def test_missing_data_says_what_to_download_and_where_to_put_it(no_data, capsys, tmp_path, name):
    out = tmp_path / "out"
    assert main([name, "--quick", "--data", str(tmp_path), "--out", str(out)]) == 2
    told = capsys.readouterr().err
    needed = frame.load(name).needs
    assert needed
    assert all(each.path in told and each.source in told for each in needed)
    assert "--data FOLDER or LASTLAYER_DATA=FOLDER" in told
    assert not out.exists()


def test_a_study_that_fails_writes_nothing(monkeypatch, tmp_path, capsys):
    def fails(*_):
        raise ValueError("broken off")

    monkeypatch.setattr(label_proportions, "one_run", fails)
    out = tmp_path / "out"
    assert main(["label-proportions", "--quick", "--out", str(out)]) == 2
    assert "broken off" in capsys.readouterr().err
    assert not out.exists()


def _written(out, name):
    kept = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert kept["study"] == name
    assert kept["quick"]
    assert name in kept["command"]
    assert kept["seeds"]
    assert kept["versions"]["torch"]
    assert kept["machine"]["name"]
    return kept


def test_label_proportions_quick(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(label_proportions, "PENALTIES", (1e-4,))
    assert main(["label-proportions", "--quick", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "The pattern holds" in shown or "The pattern does not hold" in shown
    assert "A quick version" in shown
    assert len(_written(tmp_path, "label-proportions")["found"]["runs"]) == 4


def test_huffman_bits_quick_on_made_text(tmp_path, capsys):
    rng = random.Random(0)
    words = [f"w{int(rng.paretovariate(0.6)) % 30_000}" for _ in range(60_000)]
    (tmp_path / "brown").mkdir()
    text = "# made\n" + "\n".join(" ".join(words[i : i + 20]) for i in range(0, len(words), 20))
    (tmp_path / "brown" / "brown.txt.gz").write_bytes(gzip.compress(text.encode()))
    arguments = ["huffman-bits", "--quick", "--data", str(tmp_path), "--out", str(tmp_path / "o")]
    assert main(arguments) == 0
    assert "9.16" in capsys.readouterr().out
    for bits in _written(tmp_path / "o", "huffman-bits")["found"]["bits"].values():
        assert bits["entropy"] <= bits["huffman"] <= bits["entropy"] + 1
        assert bits["huffman"] <= bits["balanced"]


def test_topk_softmax_quick_on_real_data(data, monkeypatch, tmp_path):
    monkeypatch.setattr(topk_softmax, "TEST", 14_000)
    options = ["--quick", "--data", str(data), "--out", str(tmp_path)]
    assert main(["topk-softmax", *options]) == 0
    runs = _written(tmp_path, "topk-softmax")["found"]["runs"]
    assert runs["top-5 softmax"][0]["support"] == 5


@pytest.mark.skipif(
    not os.environ.get("LASTLAYER_TEST_FULL"), reason="minutes: LASTLAYER_TEST_FULL=1 runs it"
)
@pytest.mark.parametrize("name", frame.STUDIES)
def test_every_study_quick_on_real_data(data, tmp_path, name):
    assert main([name, "--quick", "--data", str(data), "--out", str(tmp_path)]) == 0
    _written(tmp_path, name)


def test_f1_is_that_of_the_authors_and_that_of_sklearn():
    labels = torch.rand(50, 7) < 0.3
    predicted = torch.rand(50, 7) < 0.4
    found = multilabel_table.f1_scores(labels.double(), predicted)
    for key, average in (("micro", "micro"), ("sklearn", "macro")):
        assert found[key] == pytest.approx(f1_score(labels, predicted, average=average))
    hits = (labels & predicted).sum(0) / 1.0
    p, r = ((hits / each.sum(0)).mean().item() for each in (predicted, labels))
    assert found["macro"] == pytest.approx(2 * p * r / (p + r))


def test_the_linear_model_is_at_a_minimum():
    features = torch.randn(60, 5, dtype=torch.float64)
    shares = torch.softmax(torch.randn(60, 4, dtype=torch.float64), -1)
    loss = lambda scores: torch.nn.functional.cross_entropy(scores, shares)  # noqa: E731
    found = dict(linear.fit_path(features, 4, loss, (0.1, 0.01), steps=500))
    assert list(found) == [0.1, 0.01]
    for penalty, model in found.items():
        weight = model.weight.clone().requires_grad_()
        value = loss(linear.Linear(weight)(features))
        value = value + penalty / 2 * weight[:, :-1].square().sum()
        (slope,) = torch.autograd.grad(value, weight)
        assert slope.abs().max() < 1e-4


def test_documents_have_proportions_and_errors_vanish_where_they_are_met():
    made = label_proportions.simulate(10, "uniform", 200, seed=1)
    assert {name: len(each.shares) for name, each in made.items()} == label_proportions.ROWS
    shares = made["test"].shares
    assert torch.allclose(shares.sum(1), torch.ones(len(shares), dtype=shares.dtype))
    assert label_proportions.errors(shares, shares) == {"square": 0.0, "js": 0.0}
    other = sparsemax(torch.randn_like(shares))
    assert all(value > 0 for value in label_proportions.errors(other, shares).values())


def test_the_page_is_made_from_what_is_kept(tmp_path):
    kept = frame.KEPT
    names = [name for name in frame.STUDIES if (kept / f"{name}.json").is_file()]
    (tmp_path / "pictures").mkdir()
    written = frame.write_page(kept, tmp_path)
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert len(written) == len(names) + 1
    assert page == (frame.DOCS / "results.md").read_text(encoding="utf-8")
    assert all(f"## `{name}`" in page and f"results-{name}.png" in page for name in names)
    assert all(f"`{name}`" in page for name in frame.STUDIES)


def test_a_quick_run_is_not_published(tmp_path):
    kept = {"study": "huffman-bits", "quick": True}
    (tmp_path / "huffman-bits.json").write_text(json.dumps(kept))
    with pytest.raises(ValueError, match="expected a full run, got a quick one"):
        frame.write_page(tmp_path, tmp_path)


def test_what_is_kept_is_small_and_says_how_it_was_made():
    for path in frame.KEPT.glob("*.json"):
        kept = json.loads(path.read_text(encoding="utf-8"))
        assert not kept["quick"]
        assert len(kept["seeds"]) >= 3
        assert kept["command"].startswith(f"python -m studies {kept['study']} ")
        assert path.stat().st_size < 100_000
