"""lastlayer compare on a GPU: every head of the usual selection, with costs and explorer."""

import pytest
from rich.console import Console

from lastlayer.lab.comparison import compare
from lastlayer.lab.options import CompareOptions

pytestmark = pytest.mark.gpu
LINE = "the cat sat on the mat and the dog saw the cat run to the old mill by the sea\n"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "small.txt"
    path.write_text(LINE * 300, encoding="utf-8")
    return str(path)


@pytest.fixture
def labels(tmp_path):
    rows = (f'{{"text": "{LINE.strip()} {i % 7}", "labels": ["l{i % 3}", "m{i % 5}"]}}\n'
            for i in range(400))  # fmt: skip
    path = tmp_path / "small.jsonl"
    path.write_text("".join(rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("task", "model"), [("lm", "lstm"), ("lm", "transformer"), ("multilabel", "bag")]
)
def test_every_head_trains_and_is_judged(task, model, text, labels, tmp_path):
    options = CompareOptions(
        data=text if task == "lm" else labels, task=task, model=model, device="cuda",
        budget="12steps", seeds=1, width=32, batch=8, length=8 if task == "lm" else None, lr=0.01,
    )  # fmt: skip
    quiet = Console(quiet=True)
    done = compare(options, tmp_path / "out", resume=False, console=quiet)
    assert len(done.results) >= (8 if task == "lm" else 3)
    for result in done.results:
        assert result["status"] == "ok", result.get("traceback", result["reason"])
        assert result["peak_memory_mb"] > 0
        assert result["explorer"]
    assert any(cost.get("ms") for cost in done.costs["costs"])
