"""One short comparison of each task and format, and what each task is judged by."""

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.metrics import accuracy_score, f1_score, log_loss, top_k_accuracy_score
from typer.testing import CliRunner

from lastlayer.cli import app
from lastlayer.heads import FullSoftmax
from lastlayer.lab.comparison import compare
from lastlayer.lab.data import PairData, load
from lastlayer.lab.errors import LabError
from lastlayer.lab.evaluation import ClassJudge, PairJudge
from lastlayer.lab.feeding import RowFeed
from lastlayer.lab.models import InfoNCE, ModelSettings, build_body
from lastlayer.lab.options import CompareOptions
from lastlayer.lab.report import write_report
from lastlayer.lab.trained import load_trained

CLASSES = ("red", "green", "blue", "white", "black", "grey")
CPU = torch.device("cpu")


def rows(n=90):
    """Texts whose words tell their class, and most of those of its pair."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(n):
        words = [f"{CLASSES[i % 6]}{j}" for j in rng.integers(0, 4, 4)]
        made.append((" ".join(words), CLASSES[i % 6], " ".join([*words[:3], f"own{i // 6}"])))
    return made


def write(folder, kind):
    """A file of a kind, and the task that follows from it."""
    path = folder / f"a.{kind.partition(' ')[0]}"
    records = rows()
    if kind == "npz":
        target = np.arange(90) % 6
        np.savez(path, hidden=np.eye(6)[target] + 0.1, target=target)
    elif kind == "npz pairs":
        np.savez(path, query=np.eye(90), key=np.eye(90)[:, ::-1])
    elif kind == "safetensors":
        from safetensors.numpy import save_file

        target = np.stack([np.arange(90) % 6, np.where(np.arange(90) % 2, -100, 5)], 1)
        save_file({"hidden": np.ones((90, 5), np.float32), "target": target}, str(path))
    elif kind == "svm":
        path.write_text("".join(f"{i % 6} {1 + i % 6}:1 8:{0.01 * i:.2f}\n" for i in range(90)))
    elif kind == "arff":
        head = "@relation r\n@attribute f numeric\n@attribute class {0,1,2}\n@data\n"
        path.write_text(head + "".join(f"{i % 3 + 0.1 * i},{i % 3}\n" for i in range(90)))
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.table({"x": [i % 6 + 0.5 for i in range(90)], "class": list(range(6)) * 15})
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    elif kind == "txt marked":
        path.write_text("".join(f"__label__{c} __label__any {text}\n" for text, c, _ in records))
    elif kind == "txt":
        path.write_text("".join(f"{text} {other}\n" for text, _, other in records))
    elif kind == "tsv":
        path.write_text("".join(f"{text}\t{other}\n" for text, _, other in records))
    elif kind == "jsonl":
        lines = [{"text": t, "tags": [c, "any"][: i % 3]} for i, (t, c, _) in enumerate(records)]
        path.write_text("\n".join(map(json.dumps, lines)))
    else:
        path.write_text("title,category\n" + "".join(f"{text},{c}\n" for text, c, _ in records))
    return path


FORMATS = {
    "csv": "classification", "parquet": "classification", "svm": "classification",
    "arff": "classification", "npz": "classification", "safetensors": "multilabel",
    "jsonl": "multilabel", "txt marked": "multilabel", "txt": "lm", "tsv": "pairs",
    "npz pairs": "pairs",
}  # fmt: skip
HEADS = {
    "lm": ("full", "adaptive"),
    "classification": ("full", "nce"),
    "multilabel": ("zlpr", "bce"),
    "pairs": ("info_nce", "info_nce:symmetric=true,learn_temperature=true"),
}
JUDGED_BY = {
    "lm": {"perplexity", "top1"},
    "classification": {"top1", "top5", "macro_f1", "nll", "calibration", "by_decile"},
    "multilabel": {"micro_f1", "mean_average_precision"},
    "pairs": {"recall_at_1", "recall_at_10"},
}


def run(path, out, **options):
    shown = io.StringIO()
    given = {"data": str(path), "budget": "6steps", "seeds": 1, "lr": "0.05", **options}
    done = compare(CompareOptions(**given), out, resume=False, console=Console(file=shown))
    return done, shown.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_comparison_of_each_format(tmp_path, kind):
    task, path, out = FORMATS[kind], write(tmp_path, kind), tmp_path / "out"
    size = {} if kind in ("npz", "safetensors") else {"width": 8}
    done, shown = run(path, out, heads=HEADS[task], **size)
    assert f"Task: {task}" in shown
    asked = json.loads((out / "compare.json").read_text())
    assert asked["data"]["task"] == asked["model"]["task"] == task
    assert asked["data"]["description"]["task_reason"]
    for result in done.results:
        assert result["status"] == "ok", result["reason"]
        assert JUDGED_BY[task] <= result["test"].keys()
        trained = load_trained(out / "runs" / f"{result['slug']}-s1")
        assert trained.config["model"]["task"] == task
    assert JUDGED_BY[task] - {"calibration", "by_decile"} <= asked["baseline"]["test"].keys()


@pytest.mark.parametrize("kind", ["csv", "npz", "tsv"])
def test_pages_of_new_tasks(tmp_path, kind):
    pytest.importorskip("altair")
    out = tmp_path / "out"
    run(write(tmp_path, kind), out, heads=HEADS[FORMATS[kind]], seeds=2)
    assert write_report(out, pictures=False).is_file()
    named = {"tsv": "recall@1"}.get(kind, "accuracy")
    assert named in (out / "summary.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 9}, "--width: expected none with hidden states of size 6, got 9"),
        ({"model": "bag"}, "--model: expected none with hidden states"),
        ({"heads": ("zlpr",)}, "expected a head for --task classification"),
        ({"model": "lstm"}, "--model: expected bag for --task classification, got 'lstm'"),
    ],
)
def test_what_does_not_go_with_hidden_states(tmp_path, options, message):
    with pytest.raises(LabError, match=message):
        run(write(tmp_path, "npz"), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_mistakes_of_data_end_with_code_2_and_name_options(tmp_path):
    path = write(tmp_path, "csv")
    for words, message in (
        (["--label", "categry"], "give another --label"),
        (["--text", "titel"], "did you mean 'title'? give another --text"),
        (["--tokenizer", str(tmp_path)], "tokenizer.json"),
        (["--task", "pairs"], "give --text NAME,NAME"),
        (["--task", "ranking"], "--task: expected one of"),
    ):
        result = CliRunner().invoke(app, ["compare", str(path), "--out", f"{tmp_path}/o", *words])
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())
        assert not (tmp_path / "o").exists()


def test_inspect_counts_classes(tmp_path):
    result = CliRunner().invoke(app, ["inspect", str(write(tmp_path, "csv")), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["task"], found["classes"], found["sizes"]["train"]) == ("classification", 6, 72)
    assert CliRunner().invoke(app, ["inspect", str(write(tmp_path, "tsv"))]).exit_code == 2


def test_a_tokenizer_goes_with_the_model(tmp_path):
    package = pytest.importorskip("tokenizers")
    made = package.Tokenizer(package.models.BPE())
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(vocab_size=60, show_progress=False)
    made.train_from_iterator([text for text, _, _ in rows()], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "out"
    given = {"model": "bag", "width": 8, "heads": ("full",)}
    run(write(tmp_path, "txt"), out, tokenizer=str(tmp_path / "tokenizer.json"), **given)
    (tmp_path / "tokenizer.json").unlink()
    invoke = CliRunner().invoke
    assert invoke(app, ["export", str(out), "--to", str(tmp_path / "model")]).exit_code == 0
    words = ["generate", str(tmp_path / "model"), "--prompt", "red1 red2", "--tokens", "3"]
    result = invoke(app, [*words, "--top", "0"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("red1 red2")


def test_classes_are_judged_as_scikit_learn_does(tmp_path, seed):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    target = rng.integers(0, 7, 400)
    hidden = rng.normal(size=(400, 5)).astype(np.float32)
    np.savez(tmp_path / "a.npz", hidden=hidden, target=target)
    data = load(tmp_path / "a.npz")
    judge = ClassJudge(RowFeed(data, 16, CPU), data.counts)
    head = FullSoftmax(5, 7)
    found = judge.at_the_end(torch.nn.Identity(), head)
    truth = data.test.labels.indices
    scores = head.log_prob(torch.from_numpy(data.test.features)).exp().detach().numpy()
    scores /= scores.sum(1, keepdims=True)
    classes, guess = np.arange(7), scores.argmax(1)
    assert found["top1"] == pytest.approx(accuracy_score(truth, guess))
    assert found["top5"] == pytest.approx(top_k_accuracy_score(truth, scores, k=5, labels=classes))
    assert found["macro_f1"] == pytest.approx(f1_score(truth, guess, average="macro"))
    assert found["nll"] == pytest.approx(log_loss(truth, scores, labels=classes), rel=1e-4)
    majority = judge.baseline()["test"]
    assert majority["top1"] == pytest.approx((truth == data.counts.argmax()).mean())


def pairs_of(tmp_path, query, key) -> PairData:
    np.savez(tmp_path / "a.npz", query=query, key=key)
    data = load(tmp_path / "a.npz")
    assert isinstance(data, PairData)
    return data


def test_pairs_are_judged_by_the_rank_of_their_key(tmp_path):
    data = pairs_of(tmp_path, np.eye(80), np.eye(80))

    class Given(torch.nn.Module):
        def forward(self, pair):
            return torch.stack(pair, 1)

    judge = PairJudge(RowFeed(data, 8, CPU), data.counts)
    perfect = judge.at_the_end(Given(), InfoNCE(80))
    assert (perfect["recall_at_1"], perfect["reciprocal_rank"]) == (1.0, 1.0)
    chance = judge.baseline()["test"]
    assert (chance["recall_at_1"], chance["recall_at_10"]) == (1 / 8, 1.0)
    same = pairs_of(tmp_path, np.ones((80, 3)), np.ones((80, 3)))
    nothing = PairJudge(RowFeed(same, 8, CPU), same.counts).at_the_end(Given(), InfoNCE(3))
    assert nothing["recall_at_1"] == 0.0


def test_towers_learn_pairs(tmp_path, seed):
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(200, 6)).astype(np.float32)
    data = pairs_of(tmp_path, query, query @ rng.normal(size=(6, 9)))
    feed = RowFeed(data, 40, CPU)
    torch.manual_seed(seed)
    body = build_body(ModelSettings("bag", "pairs", 6, 16, dense=True, keys=9))
    body.fit(*(torch.from_numpy(each) for each in data.train[:2]))
    head, judge = InfoNCE(16, learn_temperature=True), PairJudge(feed, data.counts)
    before = judge.on_the_way(body, head)
    steps = torch.optim.Adam([p for p in body.parameters() if p.requires_grad], 0.02)
    for step in range(60):
        batch = feed.batch(0, step)
        steps.zero_grad()
        head(body(batch.inputs), batch.target).backward()
        for p in body.parameters():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
        steps.step()
    assert judge.score(judge.on_the_way(body, head)) < judge.score(before) - 0.1
    assert head.log_temperature.grad is not None
