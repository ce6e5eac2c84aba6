"""lastlayer.lab.compare: a comparison from Python, with a backbone and batches of one's own."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lastlayer.lab
from lastlayer.heads import FullSoftmax
from lastlayer.lab import CompareResult, compare, load_trained
from lastlayer.lab.api import GivenFeed, _as_arguments
from lastlayer.lab.errors import LabError

QUICK = {"seeds": 1, "steps": 6, "lr": 0.02, "progress": False, "device": "cpu"}
CPU = torch.device("cpu")


def linear() -> nn.Module:
    return nn.Linear(4, 8)


def rows(n: int = 160, classes: int = 4) -> list:
    """The largest of four features, later classes more often."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, 4, generator=draw) + torch.arange(4) * 0.3
    target = inputs.argmax(1) % classes
    return list(zip(inputs.split(16), target.split(16), strict=True))


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> CompareResult:
    batches = rows(320)
    out = tmp_path_factory.mktemp("api") / "out"
    given = {**QUICK, "seeds": 2, "steps": 60}
    heads = ["full", "adaptive:cutoffs=2"]
    return compare(linear, batches[4:], batches[:2], heads, test=batches[2:4], out=out, **given)


def test_it_learns_and_says_so(compared):
    assert [run.status for run in compared.runs] == ["ok"] * 4
    assert not compared.interrupted
    assert compared.verdict.recommended is not None
    assert compared.verdict.sentence == str(compared)
    full = compared.results.summaries[0]
    assert full.mean("top1") > 0.7
    assert compared.results.beats_baseline(full)


def test_tables_and_curves(compared):
    assert "Full softmax" in compared.table("markdown")
    assert compared.table().row_count == 2
    records = compared.curves()
    assert {record["seed"] for record in records} == {1, 2}
    assert records[0]["step"] == 0
    assert all(0 <= record["accuracy"] <= 1 for record in records)
    with pytest.raises(LabError, match="kind: expected rich or markdown, got 'html'"):
        compared.table("html")


def test_the_page_goes_where_it_is_wanted(compared, tmp_path):
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    page = compared.report(tmp_path / "new" / "page.html")
    assert "Full softmax" in page.read_text(encoding="utf-8")
    assert (compared.folder / "report.html").is_file()


def test_a_trained_run_comes_back_with_the_classes_it_was_given(compared):
    folder = compared.folder / "runs" / "full-s1"
    trained = load_trained(str(folder), backbone=linear)
    inputs, target = rows(320)[5]
    best = trained.head.topk(trained.body(inputs), 1).classes[:, 0].tolist()
    found = torch.tensor([int(trained.vocabulary.tokens[i]) for i in best])
    assert (found == target).double().mean() > 0.6
    assert trained.vocabulary.counts.tolist() == sorted(trained.vocabulary.counts)[::-1]
    with pytest.raises(LabError, match="backbone: expected the function"):
        load_trained(folder)
    with pytest.raises(LabError, match="path: expected one run, got 4 in") as told:
        load_trained(compared.folder)
    assert "--" not in str(told.value)


def test_errors_name_arguments_and_leave_other_commands_alone():
    told = (
        "--ray: expected a cluster; `ray start --head`, or use --ray local, or lower --vocab-size"
    )
    expected = "ray: expected a cluster; `ray start --head`, or use ray='local', or lower n_classes"
    assert _as_arguments(told) == expected


def test_a_resumed_comparison_has_the_same_runs(compared):
    before = [run.test for run in compared.runs]
    batches = rows(320)
    given = {**QUICK, "seeds": 2, "steps": 60, "out": compared.folder, "test": batches[2:4]}
    heads = ["full", "adaptive:cutoffs=2"]
    again = compare(linear, batches[4:], batches[:2], heads, resume=True, **given)
    assert [run.test for run in again.runs] == before
    with pytest.raises(LabError, match="out: expected a folder that is new or empty"):
        compare(linear, batches[4:], batches[:2], heads, **given)
    with pytest.raises(LabError, match=r"resume: expected the settings .* data was"):
        compare(linear, batches[5:], batches[:2], heads, resume=True, **given)


def test_every_head_starts_from_the_same_weights():
    made = []

    def backbone() -> nn.Module:
        made.append(linear())
        made[-1].first = made[-1].weight.detach().clone()
        return made[-1]

    batches = rows()
    compare(backbone, batches, batches, ["full", "hierarchical"], **QUICK)
    one, other = made[-2:]
    assert torch.equal(one.first, other.first)
    assert not torch.equal(one.first, one.weight)


@pytest.mark.parametrize("own", [False, True], ids=["shared generator", "own generator"])
def test_batches_of_a_loader_depend_on_seed_and_step_alone(own):
    data = TensorDataset(torch.arange(40).float(), torch.arange(40))
    generator = torch.Generator() if own else None
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=generator)
    sizes = {"train": [8] * 5, "valid": [8] * 5}
    feed = GivenFeed({"train": loader, "valid": loader}, sizes, torch.arange(40), "lm", CPU)
    first = [feed.batch(1, step).target for step in range(7)]
    torch.rand(5)
    for step in (6, 0, 1, 5):
        assert torch.equal(feed.batch(1, step).target, first[step])
    assert not torch.equal(feed.batch(2, 0).target, first[0])
    assert sorted(torch.cat(first[:5]).tolist()) == list(range(40))
    state = torch.get_rng_state()
    assert sum(batch.size for batch in feed.held_out("valid", 16)) == 16
    assert torch.equal(torch.get_rng_state(), state)


def test_validation_data_in_place_of_test_data_is_noted():
    batches = rows()
    found = compare(linear, batches, batches[:2], ["full", FullSoftmax], **QUICK)
    assert any("No test batches" in note for note in found.verdict.notes)
    assert [run.status for run in found.runs] == ["ok", "ok"]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 8)

    def forward(self, given: dict) -> torch.Tensor:
        return self.embedding(given["tokens"])


def test_sequences_with_targets_to_ignore():
    draw = np.random.default_rng(0)
    batches = []
    for _ in range(6):
        tokens = torch.from_numpy(draw.integers(0, 6, (4, 5)))
        batches.append(({"tokens": tokens}, tokens.roll(-1, 1).masked_fill(tokens == 5, -100)))
    heads = ["full", "adaptive_importance"]
    found = compare(Tokens, batches, batches[:2], heads, task="lm", **QUICK)
    assert [run.status for run in found.runs] == ["ok", "ok"]
    kept = sum(int((target >= 0).sum()) for _, target in batches[:2])
    assert found.runs[0].test["rows"] == kept


def test_several_labels():
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    target = torch.where(inputs > 0, torch.arange(4), -100)
    batches = list(zip(inputs.split(16), target.split(16), strict=True))
    found = compare(linear, batches, batches, ["bce", "zlpr"], task="multilabel", **QUICK)
    assert [run.status for run in found.runs] == ["ok", "ok"]
    assert found.results.metric.key == "micro_f1"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"backbone": linear()}, "backbone: expected a function that returns a new module"),
        ({"backbone": lambda: 3}, "backbone: expected an nn.Module from it, got int"),
        ({"hidden": 9}, "backbone: expected hidden states of size 9, got 8"),
        (
            {"backbone": lambda: nn.LSTM(4, 8)},
            "backbone: expected a tensor of hidden states",
        ),
        ({"backbone": lambda: nn.Flatten(0)}, r"backbone: expected hidden states of shape \(16, h"),
        ({"backbone": lambda: linear().double()}, "Float|Double|dtype"),
        ({"train": iter(rows())}, "train: expected batches that can be iterated anew"),
        ({"train": [1, 2]}, r"train: batch 0: expected a pair \(inputs, target\), got int"),
        ({"valid": [{"x": 1}]}, "valid: batch 0: expected a pair .*, got dict"),
        ({"train": []}, "train: expected batches with targets, got none"),
        ({"train": rows(classes=1)}, "train: expected targets of at least 2 classes"),
        ({"n_classes": 3}, "train: expected classes from 0 to 2, .* got 3 in batch"),
        ({"train": rows(classes=2)}, "valid: expected classes from 0 to 1"),
        ({"valid": [(torch.ones(2, 4), torch.ones(2))]}, "valid: .* whole numbers as targets"),
        ({"counts": [1, 2, 3], "n_classes": 4}, "n_classes: expected 3"),
        ({"class_names": ["a", "a", "b", "c"]}, "class_names: expected 4 unique names, got 3"),
        ({"heads": ["zlpr"]}, "heads zlpr: expected a head for task classification"),
        ({"heads": ["ful"]}, "no head 'ful'; did you mean full"),
        ({"heads": ["char_cnn"]}, "heads char_cnn: "),
        ({"task": "pairs"}, "task: expected one of lm, classification, multilabel"),
        ({"epochs": 2}, "steps: expected None if epochs=2 is given"),
        ({"steps": 0}, "steps: expected a whole number from 1, got 0"),
        ({"steps": 2.5}, "steps: expected a whole number from 1, got 2.5"),
        ({"steps": "ten"}, "steps: expected a whole number from 1, got 'ten'"),
        ({"heads": "full"}, "heads: expected a list of heads, got 'full'"),
        ({"steps": None, "epochs": -1}, "epochs: expected a number above 0, got -1"),
        ({"resume": True}, "resume: expected a folder .*; leave out resume=True"),
        ({"lr": -1}, "lr: expected auto or a number above 0"),
        ({"device": "tpu"}, "device: expected one of auto, cpu, cuda"),
    ],
)
def test_mistakes_are_told_before_any_work(tmp_path, changed, message):
    given = {"backbone": linear, "train": rows(), "valid": rows(), **QUICK, **changed}
    out = tmp_path / "out"
    with pytest.raises((LabError, RuntimeError), match=message):
        compare(out=out, **{"heads": ["full"], **given})
    assert not out.exists()


def test_the_record_is_that_of_a_comparison(compared):
    record = json.loads((compared.folder / "compare.json").read_text())
    assert record["model"]["kind"] == "own"
    assert record["data"]["train_size"] == 256
    assert record["data"]["classes"] == 4


def test_what_is_exported():
    for name in lastlayer.lab.__all__:
        assert getattr(lastlayer.lab, name) is not None
    with pytest.raises(AttributeError):
        lastlayer.lab.nothing  # noqa: B018
