"""Each example runs, on made data of the form that it reads."""

import gzip
import json
import os
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


needs_gloo = pytest.mark.skipif(
    sys.platform == "win32" or not torch.distributed.is_gloo_available(),
    reason="processes meet through gloo",
)


def run(name, *arguments, processes=None):
    """What an example prints, in one process or in several that torchrun starts."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    launcher = []
    if processes is not None:
        launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)
    done = subprocess.run(
        [sys.executable, "-W", "error", *launcher, EXAMPLES / name, *map(str, arguments)],
        env=environment, capture_output=True, encoding="utf-8", timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def mulan(tmp_path, seed):
    """Two labels that two features tell, in ARFF."""
    draw = random.Random(seed)
    header = "@relation made\n@attribute a numeric\n@attribute b numeric\n"
    header += "@attribute low {0,1}\n@attribute high {0,1}\n@data\n"
    for part, rows in (("train", 80), ("test", 40)):
        points = [(draw.uniform(-1, 1), draw.uniform(-1, 1)) for _ in range(rows)]
        lines = [f"{a:.4f},{b:.4f},{int(a < 0)},{int(b > 0)}" for a, b in points]
        with gzip.open(tmp_path / f"made-{part}.arff.gz", "wt", encoding="utf-8") as file:
            file.write(header + "\n".join(lines) + "\n")
    names = '<labels><label name="low"></label><label name="high"></label></labels>'
    (tmp_path / "made.xml").write_text(names)
    return tmp_path


@pytest.fixture
def snli(tmp_path, seed):
    """Texts of five words, and hypotheses with two of them; some premises have two."""
    draw = random.Random(seed)
    words = [f"word{i}" for i in range(60)]
    premises = [" ".join(draw.sample(words, 5)) for _ in range(60)]
    pairs = [(p, " ".join(draw.sample(p.split(), 2))) for p in [*premises, *premises[:20]]]
    draw.shuffle(pairs)
    with gzip.open(tmp_path / "small_train.tsv.gz", "wt", encoding="utf-8") as file:
        file.writelines(f"3\t3\t{p}\t{h}\n" for p, h in pairs[:60])
        file.write("1\t1\tneutral\tpair\n")
    records = [{"sentence1": p, "sentence2": h, "gold_label": "entailment"} for p, h in pairs[60:]]
    records.append({"sentence1": "other", "sentence2": "pair", "gold_label": "neutral"})
    (tmp_path / "dev.jsonl").write_text("\n".join(map(json.dumps, records)))
    return tmp_path


@pytest.fixture
def cluener(tmp_path, seed):
    """Small letters around a name in capitals and a number."""
    draw = random.Random(seed)

    def some(letters):
        return "".join(draw.choices(letters, k=draw.randint(1, 4)))

    for part, texts in (("train", 300), ("dev", 60)):
        lines = []
        for _ in range(texts):
            pieces = [some("abc"), some("XYZ"), some("abc"), some("123"), some("abc")]
            text, label = "".join(pieces), {}
            for kind, place in (("name", 1), ("number", 3)):
                start = len("".join(pieces[:place]))
                label[kind] = {pieces[place]: [[start, start + len(pieces[place]) - 1]]}
            lines.append(json.dumps({"text": text, "label": label}))
        (tmp_path / f"{part}.json").write_text("\n".join(lines))
    return tmp_path


def test_spans_are_found(cluener):
    printed = run("cluener_spans.py", cluener, "--epochs", 4)
    assert "300 texts, 9 characters, types: name, number" in printed
    scores = re.findall(r"F1 ([\d.]+)", printed)
    assert len(scores) == 4
    assert float(scores[-1]) > 0.8


def test_losses_of_many_labels_are_compared(mulan):
    printed = run("mulan_multilabel.py", mulan, "--steps", 60)
    assert "80 rows" not in printed
    assert "2 features, 2 labels" in printed
    found = dict(re.findall(r"^(zlpr|bce|asymmetric|sparsemax) +([\d.]+)", printed, re.MULTILINE))
    assert set(found) == {"zlpr", "bce", "asymmetric", "sparsemax"}
    # The labels are told by the features; all labels for every row have an F1 of about 2/3.
    assert float(found["zlpr"]) > 0.75


def test_premises_are_found(snli):
    printed = run("snli_retrieval.py", snli, "--epochs", 2)
    assert "60 pairs in" in printed
    assert "20 pairs held out" in printed
    recalls = re.findall(r"recall@1 ([\d.]+), recall@10 ([\d.]+)", printed)
    assert len(recalls) == 3
    assert all(0.0 <= float(first) <= float(ten) <= 1.0 for first, ten in recalls)
    # Texts that share both words of a hypothesis are few.
    assert float(recalls[0][1]) > 0.5


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_a_language_model_is_trained_on_a_text(tmp_path, seed):
    draw = random.Random(seed)
    for part, lines in (("train", 400), ("valid", 40)):
        text = [
            " ".join(str((k * n) % 7) for k in range(8)) for n in draw.choices(range(7), k=lines)
        ]
        (tmp_path / f"{part}.txt").write_text("\n".join(text))
    printed = run("wikitext_gpt2.py", tmp_path, "--head", "hierarchical", "--steps", 40)
    loss, perplexity = re.search(r"9 words: loss ([\d.]+), perplexity ([\d.]+)", printed).groups()
    # Guessing among the eight words of the text has a perplexity of 8.
    assert 0.0 < float(loss) < 2.0
    assert float(perplexity) < 5.0


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_many_labels_are_learned():
    printed = run("many_label_classifier.py", "--labels", 50, "--steps", 60)
    found = float(re.search(r"50 labels: recall@5 ([\d.]+)", printed).group(1))
    # Without the text, the five most frequent labels are about 0.4 of all.
    assert found > 0.6


@needs_gloo
@pytest.mark.parametrize("processes", [None, 2])
def test_classes_are_spread_over_processes(processes):
    given = "--classes", 500, "--steps", 40, "--rows", 64
    printed = run("class_parallel.py", *given, processes=processes)
    here = 500 // (processes or 1)
    found = re.findall(rf"has {here} classes; (\d+) of 50 are correct", printed)
    assert len(found) == (processes or 1)
    assert min(map(int, found)) > 40
    assert "one process loads it as FullSoftmax" in printed


@needs_gloo
@pytest.mark.parametrize("head", ["full", "sampled"])
def test_many_classes_are_spread_over_processes(head):
    given = "--classes", 20_000, "--steps", 2, "--head", head
    printed = run("class_parallel_10m.py", *given, processes=2)
    assert len(re.findall(r"process \d: peak memory [\d.]+ GB", printed)) == 2
    # The exact softmax sends what the plan says; a sampled one at most that.
    planned = re.search(r"class-parallel: a step sends ([\d.]+) kB", printed).group(1)
    for sent in re.findall(r"([\d.,]+) kB received in 6 calls", printed):
        assert float(sent) <= float(planned) + 0.05
        assert head == "sampled" or float(sent) == pytest.approx(float(planned), abs=0.1)


def test_each_example_says_how_it_is_run():
    for path in EXAMPLES.glob("*.py"):
        top = path.read_text(encoding="utf-8").split('"""')[1]
        assert f"python examples/{path.name}" in top
