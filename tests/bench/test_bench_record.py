import json
import math

import pytest
import torch
from lastlayer.bench.record import append, environment, version
from lastlayer.bench.results import read


def test_records_come_back_as_they_were_written_in_order(tmp_path, make_record):
    path = tmp_path / "r.jsonl"
    written = [make_record(), make_record(method="entmax 1.5", median_ms=None, status="failed: x")]
    for record in written:
        append(path, record)
    assert read(path) == written
    assert [json.loads(line)["method"] for line in path.read_text().splitlines()] == [
        "sparsemax",
        "entmax 1.5",
    ]


def test_an_error_that_is_not_finite_is_written_as_null(tmp_path, make_record):
    path = tmp_path / "r.jsonl"
    append(path, make_record(error=math.nan, row_sum_error=math.inf))
    (record,) = read(path)
    assert record.error is None
    assert record.row_sum_error is None


def test_a_line_cut_off_is_named(tmp_path, make_record):
    path = tmp_path / "r.jsonl"
    append(path, make_record())
    with path.open("a") as file:
        file.write('{"run": "run 2", "qu')
    with pytest.raises(ValueError, match=r"r\.jsonl:2: expected one JSON object"):
        read(path)


def test_missing_and_unknown_fields_are_named(tmp_path, make_record):
    path = tmp_path / "r.jsonl"
    append(path, make_record())
    values = json.loads(path.read_text())
    del values["seed"]
    values["colour"] = "red"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"missing fields \['seed'\], unknown \['colour'\]"):
        read(path)


def test_each_family_has_its_own_fields(tmp_path, make_record, make_fused):
    path = tmp_path / "r.jsonl"
    written = [make_fused(), make_record()]
    for record in written:
        append(path, record)
    assert read(path) == written
    assert read(path)[0].weight_error == 2.3e-3


def test_a_family_that_is_not_known_is_named(tmp_path, make_record):
    path = tmp_path / "r.jsonl"
    append(path, make_record(family="trees"))
    with pytest.raises(ValueError, match=r"expected a family among maps, .*, got 'trees'"):
        read(path)


def test_the_environment_names_versions_and_threads():
    found = environment(torch.device("cpu"), quick=True)
    assert (found.device_type, found.quick) == ("cpu", True)
    assert found.torch == torch.__version__
    assert found.threads == torch.get_num_threads()
    assert found.device


def test_an_absent_distribution_has_no_version():
    assert version("no-such-distribution") is None
