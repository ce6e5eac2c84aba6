"""The examples of the page run, and its figures are those of the records."""

import doctest
import json
from pathlib import Path

import pytest

from benchmarks import vectors
from benchmarks.__main__ import main

ROOT = Path(__file__).parent.parent.parent
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"


def test_the_examples_of_the_page_run():
    found = doctest.testfile(str(DOCS / "word_vectors.md"), module_relative=False)
    assert found.attempted > 15
    assert found.failed == 0


def test_the_committed_figures_are_those_of_the_committed_records():
    assert (DOCS / vectors.PAGE).read_text(encoding="utf-8") == vectors.render(RESULTS), (
        f"docs/{vectors.PAGE} is out of date: python -m benchmarks page"
    )


def test_figures_are_medians_of_ratios_and_means_with_errors(tmp_path):
    speeds = {"gensim": [10e3, 20e3, 40e3], "lastlayer": [70e3, 120e3, 320e3]}
    found = {
        name: {"words_per_second": speed} | {metric: [0.1, 0.2, 0.3] for metric in vectors.METRICS}
        for name, speed in speeds.items()
    }
    line = {
        "family": "vectors", "date": "2", "device": "cpu", "threads": 1, "quick": False,
        "python": "3", "numba": "0", "gensim": "4", "n_words": 5, "vocabulary": 2, "epochs": 3,
        "commit": "abc", "case": {"title": vectors.CASES[0].title, "target": 6.0}, "found": found,
    }  # fmt: skip
    assert "No measurements" in vectors.render(tmp_path)
    older = line | {"date": "1", "commit": "old"}
    lines = [line, older, line | {"quick": True, "date": "3"}]
    (tmp_path / "vectors.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = vectors.render(tmp_path)
    assert "| lastlayer | 120k | 7.0 | 6 | 0.200 ± 0.058 | 0.200 ± 0.058 | 20.0 ± 5.8 % |" in made
    assert "abc" in made
    assert "old" not in made


def test_the_command_says_what_is_absent(tmp_path, capsys):
    assert main(["vectors", str(tmp_path)]) == 2
    assert "data: expected a folder with wikitext2/" in capsys.readouterr().err
    assert main(["vectors", str(tmp_path), "--threads", "0"]) == 2
    assert "--threads: expected at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("installed", [True, False])
def test_a_quick_run(tmp_path, capsys, monkeypatch, installed):
    if installed:
        pytest.importorskip("gensim.models", reason="gensim is not installed")
    else:
        monkeypatch.setattr(vectors.record, "version", lambda name: None)
    make_data(tmp_path)
    out = tmp_path / "r.jsonl"
    options = ["--quick", "--seeds", "2", "--only", "hierarchical", "--json", str(out)]
    assert main(["vectors", str(tmp_path), *options]) == 0
    shown = capsys.readouterr().out
    assert ("pip install gensim" in shown) is not installed
    (line,) = map(json.loads, out.read_text().splitlines())
    assert list(line["found"]) == (["gensim", "lastlayer"] if installed else ["lastlayer"])
    for values in line["found"].values():
        assert all(len(each) == 2 for each in values.values())
        # Five words near each other: at most about as surprising as a uniform choice of 5.
        assert 0.0 < values["loss"][0] < 2.0


def make_data(folder):
    import gzip

    words = [chr(97 + i) * 2 for i in range(5)]
    text = "\n".join(" ".join(words[i:] + words[:i]) for i in range(5)) + "\n"
    for path in ("wikitext2/train", "wikitext2/test", "brown/brown"):
        (folder / path).parent.mkdir(exist_ok=True)
        with gzip.open(folder / f"{path}.txt.gz", "wt") as file:
            file.write("# name\n" + text * 60)
    (folder / "wordeval").mkdir()
    for name in vectors.SIMILARITIES:
        pairs = "aa bb 5.0\nbb cc 2.0\ncc dd 1.0\nqq aa 3\n"
        (folder / "wordeval" / f"{name}.txt").write_text(pairs)
    (folder / "wordeval" / "questions-words.txt").write_text(": some\nAA BB CC DD\nAA BB CC QQ\n")
