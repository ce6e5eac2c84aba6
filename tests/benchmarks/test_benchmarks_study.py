"""The study: a small comparison is kept, resumed, and becomes a page."""

import json
import math
import os
import signal

import pytest

from benchmarks import study
from benchmarks.__main__ import main
from lastlayer.lab import comparison
from lastlayer.lab.metrics import three_digits
from lastlayer.lab.options import CompareOptions

pytest.importorskip("altair")
pytest.importorskip("vl_convert")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the data of a study of two heads, two seeds and eight steps."""
    text = "the cook puts the lemon into the soup and the cake into the oven"
    lines = [text[4 * (i % 5) : 40 + i % 26] for i in range(200)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tiny.txt").write_text("\n".join(lines), encoding="utf-8")
    options = CompareOptions(
        heads=("full", "benchmarks.study:ColdSoftmax"), task="lm", budget="8steps", seeds=2,
        batch=4, length=8, width=8, lr="0.01",
    )  # fmt: skip
    tiny = study.Study("tiny.txt", "Tiny", "A cook at work.", options)
    monkeypatch.setattr(study, "STUDIES", {"tiny": tiny, "wikitext2": study.STUDIES["wikitext2"]})
    monkeypatch.setattr("lastlayer.lab.costs.SAMPLED_SECONDS", 0.0)
    return tmp_path


def run(place):
    data, out, kept = (str(place / name) for name in ("data", "out", "kept"))
    return main(["study", "tiny", data, "--out", out, "--json", kept])


def kept(place):
    return json.loads((place / "kept" / "tiny.json").read_text(encoding="utf-8"))


def test_what_was_kept_makes_the_page(place):
    assert run(place) == 0
    assert str(place) not in (place / "kept" / "tiny.json").read_text(encoding="utf-8")
    (place / "kept" / "tiny.md").write_text("What surprised us.\n", encoding="utf-8")
    (place / "docs" / "pictures").mkdir(parents=True)
    written = study.write_page(place / "kept", place / "docs")
    assert [path.name for path in written] == ["study-tiny.png", "study.md"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    page = written[1].read_text(encoding="utf-8")
    runs = kept(place)["runs"]
    for slug, title in (("full", "Full softmax"), ("benchmarks.study-coldsoftmax", "ColdSoftmax")):
        tests = [runs[f"{slug}-s{seed}"]["result"]["test"]["perplexity"] for seed in (1, 2)]
        assert f"| {title} | {three_digits(math.prod(tests) ** 0.5)}" in page
    assert "8 steps" in page
    assert "of 4 runs were best on validation data before their last step" in page
    assert page.index("A cook at work.") < page.index("What surprised us.")
    assert page.count("## ") == 2

    saved = kept(place) | {"disturbed": True}
    (place / "kept" / "tiny.json").write_text(json.dumps(saved), encoding="utf-8")
    page = study.write_page(place / "kept", place / "docs")[-1].read_text(encoding="utf-8")
    assert "Times are left out" in page
    assert "time per step" not in page


def test_the_lead_of_two_heads_is_told_at_each_validation(place):
    assert run(place) == 0
    study.unpack(kept(place), place / "again")
    lines = study._lead(study.read_results(place / "again")).splitlines()
    order = [each.strip() for each in lines[0].strip("|").split("|")]
    slugs = {"Full softmax": "full", "ColdSoftmax": "benchmarks.study-coldsoftmax"}
    curves = [
        [kept(place)["runs"][f"{slugs[head]}-s{seed}"]["metrics"] for seed in (1, 2)]
        for head in order[1:3]
    ]
    assert len(lines) == 2 + len(curves[0][0])
    for i, line in enumerate(lines[2:]):
        ours, theirs = (
            math.exp(sum(math.log(points[i]["perplexity"]) for points in seeds) / 2)
            for seeds in curves
        )
        numbers = [float(each.strip(" %")) for each in line.strip("|").split("|")]
        expected = [curves[0][0][i]["step"], ours, theirs, 100 * (theirs / ours - 1)]
        assert numbers == pytest.approx(expected, rel=0.005, abs=0.06)


def test_a_study_that_was_stopped_goes_on(place, monkeypatch):
    perform, made = comparison.perform, []

    def stopping(*given):
        made.append(given[1:3])
        if len(made) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return perform(*given)

    monkeypatch.setattr(comparison, "perform", stopping)
    assert run(place) == 1
    first = kept(place)["runs"]
    assert [each["result"]["status"] for each in first.values()].count("ok") == 1
    assert run(place) == 0
    runs = kept(place)["runs"]
    assert [each["result"]["status"] for each in runs.values()] == ["ok"] * 4
    assert runs["full-s1"] == first["full-s1"]
    assert len(made) == 5, "the run that had ended was made again"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cook", "data"], "name: expected one of tiny, wikitext2, got 'cook'"),
        (["tiny", "nowhere"], "data: expected a folder with tiny.txt, got 'nowhere'"),
        (["wikitext2", "data"], "data: expected a folder with wikitext2, got 'data'"),
    ],
)
def test_mistakes_are_told_before_any_work(place, monkeypatch, capsys, words, told):
    monkeypatch.chdir(place)
    assert main(["study", *words, "--out", "out", "--json", "kept"]) == 2
    assert told in capsys.readouterr().err
    assert [path.name for path in place.iterdir()] == ["data"]
