import io
import json

import pytest
from made_runs import make
from rich.console import Console

from lastlayer.lab.errors import LabError
from lastlayer.lab.results import read_results
from lastlayer.lab.show import show
from lastlayer.lab.verdict import verdict


def _shown(paths, *, width=100, as_json=False) -> str:
    out = io.StringIO()
    show(paths, as_json=as_json, console=Console(file=out, width=width))
    return out.getvalue()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    above = tmp_path_factory.mktemp("show")
    one = make(above / "one", heads=3, seeds=2)
    other = make(above / "other", heads=3, seeds=2, steps=4000)
    return one, other


def test_settings_that_differ_are_marked(folders):
    lines = _shown(folders).splitlines()
    marked = [line.split()[1] for line in lines if line.strip().startswith("≠")]
    assert marked == ["budget.amount"]
    assert any("settings.batch" in line and line.count("64") == 2 for line in lines)


def test_one_folder_has_nothing_that_differs(folders):
    assert "≠" not in _shown(folders[:1])


@pytest.mark.parametrize("width", [60, 80, 97, 200])
def test_results_have_a_row_for_each_head_and_fit(folders, width):
    text = _shown(folders[:1], width=width)
    table = text[text.index("Results") :]
    for title in ("Full softmax", "Hierarchical softmax"):
        assert title in table
    for summary in read_results(folders[0]).summaries:
        assert f"{summary.mean('perplexity'):.0f}" in table
    # Nothing is cut off: a column that has no room is left out.
    assert "…" not in table
    assert ("calibration" in table) == ("error" in table) == (width == 200)
    sentence = text.rstrip().splitlines()[-1]
    assert sentence == verdict(read_results(folders[0])).sentence
    assert all(len(line) <= width for line in text.splitlines() if line != sentence)


def test_runs_are_summarised_as_if_no_other_had_been_made(folders):
    runs = [folders[0] / "runs" / name for name in ("full-s0", "full-s1", "adaptive-s0")]
    found = json.loads(_shown(runs, as_json=True))
    assert [each["name"] for each in found["settings"]] == ["full-s0", "full-s1", "adaptive-s0"]
    (results,) = found["results"]
    assert {head["spec"].split(":")[0] for head in results["heads"]} == {"full", "adaptive"}
    assert len(results["runs"]) == 3
    seeds = {head["spec"].split(":")[0]: head["means"]["perplexity"]["n"]
             for head in results["heads"]}  # fmt: skip
    assert seeds == {"full": 2, "adaptive": 1}


def test_json_has_the_settings_and_the_results(folders):
    found = json.loads(_shown(folders, as_json=True))
    assert [each["settings"]["budget.amount"] for each in found["settings"]] == [3000, 4000]
    assert [results["ranked_by"] for results in found["results"]] == ["perplexity"] * 2
    assert all(results["verdict"] for results in found["results"])


def test_a_comparison_without_a_result_is_shown(tmp_path):
    make(tmp_path, heads=2, seeds=1, statuses={"full": "nan", "adaptive": "not started"})
    text = _shown([tmp_path])
    assert "nan" in text
    assert "not started" in text


def test_what_is_no_folder_of_runs_is_told(tmp_path):
    with pytest.raises(LabError, match=r"config\.json, or of a comparison"):
        show([tmp_path])
    with pytest.raises(LabError, match="expected at least one"):
        show([])


def test_a_run_without_its_comparison_is_told(folders, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LabError, match=r"compare\.json"):
        show([tmp_path])
