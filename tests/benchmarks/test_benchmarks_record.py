import json
import math
import re

import pytest
import torch

from benchmarks import record
from benchmarks.record import ROOT, append, newest, read


def test_records_come_back_as_they_were_written(tmp_path, make_record):
    path = tmp_path / "r.jsonl"
    written = [make_record(), make_record(family="heads", median_ms=None, status="failed: x")]
    for each in written:
        append(path, each)
    assert read(path) == written
    assert read(tmp_path) == written


def test_an_error_that_is_not_finite_is_written_as_null(tmp_path, make_record):
    append(tmp_path / "r.jsonl", make_record(errors={"loss": math.nan}))
    assert json.loads((tmp_path / "r.jsonl").read_text())["errors"] == {"loss": None}
    (found,) = read(tmp_path / "r.jsonl")
    assert found.errors == {"loss": None}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"run": "run 2", "qu', r"r\.jsonl:2: expected one JSON object"),
        ('{"family": "trees"}', r"r\.jsonl:2: expected a family of fused, .*, got 'trees'"),
        (
            '{"family": "maps", "errors": {}, "x": 1}',
            r"r\.jsonl:2: expected the fields of a record, got .*'x'",
        ),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, make_record, line, message):
    path = tmp_path / "r.jsonl"
    append(path, make_record())
    with path.open("a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_the_committed_results_can_be_read():
    found = read(ROOT / "benchmarks" / "results")
    assert len(found) > 700
    assert {r.family for r in found} == set(record.FAMILIES)
    # Where the old median was of a replayed graph, the eager time is the median now.
    path = ROOT / "benchmarks" / "results" / "maps-h200.jsonl"
    old = [json.loads(line) for line in path.read_text().splitlines()]
    for before, now in zip(old, read(path), strict=True):
        if "commit" in before:
            assert (now.median_ms, now.commit) == (before.get("median_ms"), before["commit"])
        elif before["eager_ms"] is not None:
            assert (now.median_ms, now.replayed_ms) == (before["eager_ms"], before["median_ms"])
        elif before["median_ms"] is not None:
            assert now.of_limit(now.median_ms) == pytest.approx(before["fraction_of_copy"])
    compiled = [
        r for r in read(path.with_name("fused-h200.jsonl"))
        if (r.label, r.shape, r.section) == ("torch compiled", (8192, 4096, 128256), "large width")
    ]  # fmt: skip
    assert compiled
    for each in compiled:
        assert each.flop == pytest.approx(6 * 8192 * 4096 * 128256)
        assert set(each.errors) == {"loss", "hidden", "weight"}


def test_of_each_case_the_newest_full_run_counts(make_record):
    later = dict(run="run 2", date="2026-11-16T00:00:00+00:00")
    old, other = make_record(), make_record(section="small width")
    new, quick = make_record(**later), make_record(run="run 3", date="2026-12-01", quick=True)
    assert newest([new, quick, old, other]) == [other, new]


def test_the_environment_names_commit_versions_and_threads():
    found = record.environment(torch.device("cpu"), quick=True)
    assert found["commit"] is None or re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", found["commit"])
    assert (found["device_type"], found["quick"]) == ("cpu", True)
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert record.environment(torch.device("cpu"), quick=True, at="abc")["commit"] == "abc"
    assert record.version("no-such-distribution") is None
