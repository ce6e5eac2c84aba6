"""``python -m studies zlpr-imbalance``: its measures, its axis, and a whole run on made data."""

import gzip
import json
import random

import pytest
import torch
from sklearn.metrics import f1_score, label_ranking_average_precision_score
from torch.nn.functional import linear

from lastlayer import bce_loss, zlpr_loss
from lastlayer.lab.data import load
from lastlayer.lab.evaluation import as_table
from studies import zlpr_imbalance
from studies.__main__ import main

LABELS, WORDS = 14, 40


def _rows(n, seed):
    """Lists of labels and words: a label brings two words of its own, low labels are frequent."""
    rng = random.Random(seed)
    for _ in range(n):
        labels = {min(int(rng.expovariate(0.3)), LABELS - 1) for _ in range(rng.randint(1, 3))}
        words = {2 * label + rng.randint(0, 1) for label in labels} | {rng.randrange(WORDS)}
        yield sorted(labels), sorted(words)


@pytest.fixture
def made(tmp_path):
    """A folder with both sets, made up and small."""
    (tmp_path / "cooking").mkdir()
    lines = [
        " ".join([*(f"__label__t{i}" for i in labels), *(f"w{i}" for i in words)])
        for labels, words in _rows(300, 0)
    ]
    text = gzip.compress("\n".join(lines).encode())
    (tmp_path / "cooking" / "cooking.stackexchange.txt.gz").write_bytes(text)
    folder = tmp_path / "mulan" / "delicious"
    folder.mkdir(parents=True)
    names = "".join(f'<label name="t{i}"></label>' for i in range(LABELS))
    xmlns = "http://mulan.sourceforge.net/labels"
    (folder / "delicious.xml").write_text(f'<labels xmlns="{xmlns}">{names}</labels>')
    head = [f"@attribute w{i} {{0,1}}" for i in range(WORDS)]
    head += [f"@attribute t{i} {{0,1}}" for i in range(LABELS)]
    for part, n in (("train", 200), ("test", 80)):
        rows = [
            "{" + ",".join(f"{i} 1" for i in [*words, *(WORDS + i for i in labels)]) + "}"
            for labels, words in _rows(n, n)
        ]
        whole = "\n".join(["@relation made", *head, "@data", *rows]) + "\n"
        (folder / f"delicious-{part}.arff").write_text(whole)
    return tmp_path


@pytest.fixture
def small(monkeypatch):
    sizes = {"SIZES": (4,), "WIDTH": 8, "EPOCHS": 2, "BATCH": 64, "RATES": (0.02,)}
    for name, value in sizes.items():
        monkeypatch.setattr(zlpr_imbalance, name, value)


def test_a_whole_run_on_made_data(made, small, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--seeds", "2", "--device", "cpu", "--data", str(made), "--out", str(out)]
    assert main(["zlpr-imbalance", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "The pattern" in shown
    found = json.loads((out / "zlpr-imbalance.json").read_text(encoding="utf-8"))["found"]
    for name, told in found["sets"].items():
        assert [*told["share"]] == ["4", str(LABELS)]
        assert sorted(told["share"].values(), reverse=True) == [*told["share"].values()]
        assert f"On {name} with" in shown
    per_set = 2 * (len(zlpr_imbalance.METHODS) + len(zlpr_imbalance.STARTS))
    assert len(found["runs"]) == 2 * 2 * (per_set + len(zlpr_imbalance.SOFT))
    for run in found["runs"]:
        assert 0 < run["epochs"] <= 2
        assert all(0 <= run[key]["test"] <= 1 for key in zlpr_imbalance.CHOSEN)
        if run["labels"] == 4:
            # The labels of the smallest set are all that there are.
            assert run["shared"]["micro"] == pytest.approx(run["micro"]["test"], abs=1e-5)


def test_the_verdict_follows_the_figures():
    """The same study with other figures comes out otherwise."""

    def of(zlpr, bce, from_0):
        runs = []
        for n, method in ((n, m) for n in (10, 100) for m in zlpr_imbalance.EVERY):
            native, tuned = zlpr if method.startswith("ZLPR") else bce
            if method == "BCE, biases from 0":
                native = from_0
            for seed in range(3):
                shift = 0.001 * seed
                run = {key: {"test": tuned + shift, "threshold": 0.0, "epoch": 5, "valid": 0.5}
                       for key in zlpr_imbalance.CHOSEN}  # fmt: skip
                run["native_micro"] = {**run["micro"], "test": native + 0.9 * shift}
                run |= {"set": "made", "labels": n, "method": method, "seed": seed, "epochs": 9,
                        "strength": 0.0, "rate": 0.01, "step_ms": 1.0, "map": 0.5}  # fmt: skip
                runs.append(run)
        found = {"sets": {"made": {"share": {"10": 0.1, "100": 0.01}}}, "runs": runs}
        return zlpr_imbalance.verdict(found)

    assert of((0.5, 0.5), (0.3, 0.45), 0.2).word == "holds"
    assert of((0.4, 0.5), (0.3, 0.5), 0.2).word == "holds in part"
    sturdy = of((0.4, 0.5), (0.45, 0.55), 0.1)
    assert sturdy.word == "holds in part"
    assert "Biases that start at the label frequencies do the same" in sturdy.why
    assert of((0.4, 0.5), (0.45, 0.55), 0.45).word == "does not hold"


def test_thresholds_that_are_swept_have_the_f1_that_they_say():
    scores = torch.randn(60, 12)
    truth = torch.rand(60, 12) < 0.15 * torch.sigmoid(2 * scores)
    thresholds, micro, macro = zlpr_imbalance.sweep(scores, truth)
    there = truth.any(0)
    for threshold, one, other in zip(thresholds, micro, macro, strict=True):
        guess = scores > threshold
        assert one.item() == pytest.approx(f1_score(truth, guess, average="micro"))
        theirs = f1_score(truth[:, there], guess[:, there], average="macro", zero_division=0)
        assert other.item() == pytest.approx(theirs)
        both = zlpr_imbalance.f1_above(scores, truth, threshold.item())
        assert both == (pytest.approx(one.item()), pytest.approx(other.item()))
    predicted = [(scores > t).sum().item() for t in thresholds]
    assert predicted[0] <= 0.25 * truth.sum()
    assert predicted[-1] >= 4.9 * truth.sum()


def test_ranking_is_that_of_sklearn():
    scores = torch.randn(40, 9)
    truth = torch.rand(40, 9) < 0.3
    truth[0] = False
    found = zlpr_imbalance.ranking(scores, truth)
    some = truth.any(1)
    theirs = label_ranking_average_precision_score(truth[some], scores[some])
    assert found["map"] == pytest.approx(theirs)
    for key, k in (("p1", 1), ("p5", 5)):
        best = scores[some].topk(k).indices
        assert found[key] == pytest.approx(truth[some].gather(1, best).double().mean().item())


def test_the_most_frequent_labels_are_kept_and_all_rows(made):
    data = load(made / "cooking" / "cooking.stackexchange.txt.gz", task="multilabel")
    cut = zlpr_imbalance.most_frequent(data, 5)
    assert cut.counts.tolist() == data.counts[:5].tolist()
    assert cut.n_classes == 5
    for part in ("train", "valid", "test"):
        one, other = getattr(data, part), getattr(cut, part)
        assert other.n_rows == one.n_rows
        for i in range(one.n_rows):
            before, after = (
                each.labels.indices[each.labels.offsets[i] : each.labels.offsets[i + 1]].tolist()
                for each in (one, other)
            )
            assert after == [label for label in before if label < 5]
    assert zlpr_imbalance.share(cut) > zlpr_imbalance.share(data)


@pytest.mark.parametrize(("name", "loss"), [("ZLPR", zlpr_loss), ("BCE", bce_loss)])
def test_changes_are_what_they_are_called(made, small, name, loss):
    data = load(made / "mulan" / "delicious", task="multilabel")
    hidden = torch.rand(6, 8)
    target = torch.tensor([[0, 3], [1, -100], [2, 5], [-100, -100], [7, 9], [4, -100]])
    labels = as_table(target, LABELS).double()

    def output(method, strength=0.0):
        torch.manual_seed(3)
        return zlpr_imbalance.Output(zlpr_imbalance.EVERY[method], strength, data, 0)

    plain = output(name)
    scores = plain.scores(hidden).double()
    assert torch.equal(plain.scores(hidden), linear(hidden, plain.head.weight, plain.head.bias))
    assert plain(hidden, target).item() == pytest.approx(loss(scores, labels).item(), rel=1e-5)
    zero = output(f"{name}, biases from 0")
    assert not zero.head.bias.any()
    eps = 0.5 * zlpr_imbalance.share(data)
    smooth = eps + (1 - 2 * eps) * labels
    soft = output(f"{name}, smoothing", 0.5)
    assert soft(hidden, target).item() == pytest.approx(loss(scores, smooth).item(), rel=1e-5)
    # With nearly all weight on one of two rows mixup only changes the order.
    mixed = output(f"{name}, mixup", 1e-6)(hidden, target)
    each = [loss(scores[i], labels[i]).item() for i in range(6)]
    assert min(each) <= mixed.item() <= max(each)


def test_weights_are_those_of_positives(made, small):
    data = load(made / "mulan" / "delicious", task="multilabel")
    hidden, target = torch.rand(3, 8), torch.tensor([[0, 3], [1, -100], [-100, -100]])
    for strength in (0.0, 0.5, 1.0):
        torch.manual_seed(3)
        made_of = zlpr_imbalance.EVERY["weighted BCE"]
        output = zlpr_imbalance.Output(made_of, strength, data, 0)
        scores, labels = output.scores(hidden).double(), as_table(target, LABELS).double()
        odds = torch.from_numpy((data.train.n_rows - data.counts) / data.counts)
        weight = 1 + (odds**strength - 1) * labels
        p = torch.sigmoid(scores)
        each = -weight * (labels * p.log() + (1 - labels) * (1 - p).log())
        assert output(hidden, target).item() == pytest.approx(each.sum(1).mean().item(), rel=1e-4)
