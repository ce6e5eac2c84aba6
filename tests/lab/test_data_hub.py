"""Sets of a hub with the real datasets package, from folders: nothing is fetched."""

import json

import pytest
from typer.testing import CliRunner

from lastlayer.cli import app
from lastlayer.lab.data import DataError, load

datasets = pytest.importorskip("datasets", reason='pip install "lastlayer[hub]"')

NAMES = ["sport", "art", "law"]
SIZES = {"train": 40, "validation": 12, "test": 11}
CONFIGS = "---\nconfigs:\n" + "".join(
    f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train.txt\n"
    for name in ("en", "de")
)


def lines(rows: int, word: str = "word") -> list[str]:
    return [f"{word} a b{i % 3} c{i % 5}" for i in range(rows)]


def labelled(rows: int):
    """Rows as a hub keeps them: labels are numbers, and the set knows their names."""
    kinds = datasets.Features(
        {
            "body": datasets.Value("string"),
            "labels": datasets.Sequence(datasets.ClassLabel(names=NAMES)),
            "one": datasets.ClassLabel(names=NAMES),
        }
    )
    # A secret label is -1.
    columns = {
        "body": lines(rows),
        "labels": [[i % 2, 2][: i % 3] for i in range(rows)],
        "one": [i % 3 - (i % 3 == 0) for i in range(rows)],
    }
    return datasets.Dataset.from_dict(columns, features=kinds)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sizes(data) -> list[int]:
    return [getattr(part, "n_rows", len(part)) for part in (data.train, data.valid, data.test)]


@pytest.mark.parametrize("place", ["hf:./set", "hf:set", "hf:{}/set"])
def test_text_of_a_folder(here, place):
    (here / "set").mkdir()
    for name, rows in SIZES.items():
        (here / "set" / f"{name}.txt").write_text("\n".join(lines(rows)), encoding="utf-8")
    data = load(place.format(here))
    # Four words and the end of a line.
    assert sizes(data) == [5 * rows for rows in SIZES.values()]
    assert data.vocabulary.tokens[0] in ("word", "a", "<eos>")
    assert sizes(load("hf:./set", limit=50))[0] == 50


def test_one_config_of_several(here):
    for name in ("en", "de"):
        (here / "set" / name).mkdir(parents=True)
        (here / "set" / name / "train.txt").write_text("\n".join(lines(40, name)))
    (here / "set" / "README.md").write_text(CONFIGS + "---\n")
    assert "de" in load("hf:./set:de").vocabulary.ids
    assert "de" not in load("hf:./set:en").vocabulary.ids
    for source in ("hf:./set", "hf:./set:fr"):
        with pytest.raises(DataError, match=r"\['en', 'de'\]; check the name, its config"):
            load(source)


def test_json_lines_of_a_folder(here):
    (here / "set").mkdir()
    rows = [{"text": line, "labels": NAMES[: i % 3]} for i, line in enumerate(lines(30))]
    (here / "set" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = load("hf:./set", task="multilabel")
    assert data.label_names == ("sport", "art")
    assert sum(sizes(data)) == 30
    with pytest.raises(DataError, match=r"no column 'body'; there are 'text', 'labels'"):
        load("hf:./set::body", task="multilabel")


@pytest.mark.parametrize("saved", [False, True])
def test_labels_of_a_folder_have_their_names(here, saved):
    (here / "set").mkdir()
    if saved:
        parts = {name: labelled(rows) for name, rows in SIZES.items()}
        datasets.DatasetDict(parts).save_to_disk("set")
    else:
        for name, rows in SIZES.items():
            labelled(rows).to_parquet(f"set/{name}.parquet")
    data = load("hf:./set::body", task="multilabel")
    assert set(data.label_names) == {*NAMES}
    assert sizes(data) == list(SIZES.values())
    single = load("hf:./set::body", task="multilabel", label="one")
    assert set(single.label_names) == {"art", "law"}
    assert 0 < len(single.train.labels.indices) < SIZES["train"]


def test_a_set_that_was_saved_without_splits_is_for_training(here):
    labelled(40).save_to_disk("set")
    assert sizes(load("hf:./set::body", task="lm")) == [160, 20, 20]


def test_splits_of_other_names_are_told(here):
    datasets.DatasetDict({"unsupervised": labelled(9)}).save_to_disk("set")
    with pytest.raises(DataError, match="no split for training; it has 'unsupervised'"):
        load("hf:./set::body")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf:./nosuch", "hf:./nosuch: no such file or folder; check the spelling"),
        ("hf:no/such", "hf:no/such: no such folder, and http://127.0.0.1:9 is out of reach"),
    ],
)
def test_what_is_not_there_is_told_at_once_with_exit_code_2(here, monkeypatch, source, message):
    # Nothing listens there.
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "*")
    for command in ("inspect", "compare"):
        result = CliRunner().invoke(app, [command, source])
        assert result.exit_code == 2, result.output
        assert message in result.output
        assert "Retry" not in result.output
