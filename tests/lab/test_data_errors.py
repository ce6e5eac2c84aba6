"""Every kind of broken data has an error that names the file, the place and the remedy."""

import gzip
import json

import numpy as np
import pytest

from lastlayer.lab.data import DataError, load

TEXT = "a b a b c\n" * 20
NAMESPACE = "http://mulan.sourceforge.net/labels"
XML = f'<labels xmlns="{NAMESPACE}"><label name="x"/><label name="y"/></labels>'
HEADER = "@relation r\n@attribute f numeric\n@attribute x {0,1}\n@attribute y {0,1}\n@data\n"
ROWS = "1.5,0,1\n2,1,0\n" * 10
RECORDS = [{"text": f"a b c{i % 4}", "label": f"l{i % 3}", "n": i} for i in range(30)]


def broken(tmp_path, name, content, **options):
    """The message, which has a remedy; nothing but a DataError is raised."""
    path = tmp_path / name
    if isinstance(content, list):
        content = "\n".join(json.dumps(each) for each in content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        load(path, **options)
    message = str(caught.value)
    assert ";" in message, "no remedy"
    return message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "a.txt: no tokens"),
        (" \t ", "a.txt: too short: the train part has 1 of 1 token"),
        ("word", "a.txt: too short: the valid part has 0 of 2 tokens"),
        ("same " * 100, "one class"),
        (b"PK\x03\x04\x00\x00" * 50, "a.txt: a binary file: a NUL after 4 characters"),
        (bytes(range(1, 256)) * 9, "a.txt: a binary file, not utf-8: byte 0x80"),
        ("a b c d e f g h i j k l m n o p q r s t u v w x", "no word occurs 2 times"),
    ],
)
def test_text_that_is_none(tmp_path, content, message):
    assert message in broken(tmp_path, "a.txt", content, task="lm")


def test_a_wrong_encoding_names_the_byte_and_what_to_try(tmp_path):
    content = (TEXT + "caf\u00e9 a b\n").encode("latin-1")
    message = broken(tmp_path, "a.txt", content)
    assert f"a.txt:21: not utf-8: byte 0xe9 at offset {len(TEXT) + 3}" in message
    assert "encoding='latin-1'" in message
    assert load(tmp_path / "a.txt", encoding="latin-1").n_classes >= 4
    table = "text,label\n" + "a b c,x\na b d,y\n" * 2000 + "caf\u00e9 a b,x\n"
    assert "a.csv:4002: not utf-8" in broken(tmp_path, "a.csv", table.encode("latin-1"))


def test_the_offset_counts_all_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("lastlayer.lab.data.files._BLOCK", 16)
    content = ("é" * 9 + "\n").encode() * 5
    message = broken(tmp_path, "a.txt", content + b"ab\xc3", task="lm")
    assert f":6: not utf-8: byte 0xc3 at offset {len(content) + 2}" in message


def test_utf_16_is_recognised_by_its_mark(tmp_path):
    assert "give encoding='utf-16'" in broken(tmp_path, "a.txt", TEXT.encode("utf-16"))
    assert load(tmp_path / "a.txt", encoding="utf-16").n_classes == 5


def test_an_encoding_that_does_not_exist(tmp_path):
    assert "encoding: expected the name" in broken(tmp_path, "a.txt", TEXT, encoding="utf-9")


def test_damaged_gzip(tmp_path):
    whole = gzip.compress(TEXT.encode())
    assert "damaged gzip" in broken(tmp_path, "a.txt.gz", whole[: len(whole) // 2])
    assert "damaged gzip" in broken(tmp_path, "b.txt.gz", b"no gzip at all")


def test_a_path_that_is_not_there_names_the_nearest(tmp_path):
    (tmp_path / "corpus.txt").write_text(TEXT)
    with pytest.raises(DataError, match=r"corpsu\.txt: no such file .*did you mean .*corpus\.txt"):
        load(tmp_path / "corpsu.txt")
    with pytest.raises(DataError, match=r"has corpus\.txt"):
        load(tmp_path / "zzz")
    with pytest.raises(DataError, match="does not exist either"):
        load(tmp_path / "no" / "no")
    with pytest.raises(DataError, match="got an empty name"):
        load("")


def test_folders_without_text_or_without_training(tmp_path):
    with pytest.raises(DataError, match="no text files"):
        load(tmp_path)
    (tmp_path / "x.test.txt").write_text(TEXT)
    with pytest.raises(DataError, match=r"none for training; add x\.train\.txt"):
        load(tmp_path)
    (tmp_path / "y.test.txt").write_text(TEXT)
    with pytest.raises(DataError, match="two files for the test part"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "a.jsonl:2: not JSON"),
        ("[1]", "a.jsonl:2: expected an object, got list"),
        ('{"text": 3}', "a.jsonl:2: expected a text in the column 'text', got int"),
        ('{"text": "x", "labels": [1.5]}', "a.jsonl:2: expected names or ids"),
        ('{"text": "x", "labels": {"y": 1}}', "a.jsonl:2: expected names or ids"),
        ('{"text": "x", "labels": [7]}', "a.jsonl:2: mixed types in the column 'labels'"),
    ],
)
def test_broken_json_lines(tmp_path, line, message):
    content = f'{{"text": "a b", "labels": ["x"]}}\n{line}\n'
    assert message in broken(tmp_path, "a.jsonl", content, task="multilabel")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv"])
def test_tables_without_rows(tmp_path, suffix):
    assert "an empty file: no rows" in broken(tmp_path, f"a{suffix}", "")
    assert "an empty file: no rows" in broken(tmp_path, f"a{suffix}", "\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "txt"}, "no column 'txt'; there are 'text', 'label', 'n'; did you mean 'text'?"),
        ({"label": "Lable"}, "did you mean 'label'?"),
        ({"features": "n,m"}, "no column 'm'"),
        ({"features": "text"}, "a.jsonl:1: expected a number in the column 'text', got 'a b c0'"),
        ({"text": "n"}, "a.jsonl:1: expected a text in the column 'n', got int"),
        ({"task": "pairs"}, "pairs need two columns of text, got 'text'"),
        ({"task": "pairs", "text": "text,label,n"}, "pairs need two columns"),
    ],
)
def test_columns_that_are_not_what_is_asked(tmp_path, options, message):
    if "task" not in options:
        options = {"label": "label", **options}
    assert message in broken(tmp_path, "a.jsonl", RECORDS, **options)


def test_labels_that_cannot_be_learned(tmp_path):
    one = [{"text": f"a b{i}", "label": "x"} for i in range(20)]
    assert "one class" in broken(tmp_path, "a.jsonl", one)
    assert "one class" in broken(tmp_path, "a.jsonl", one, task="multilabel")
    few = [{"text": "a b", "label": f"{i}"} for i in range(3)]
    assert "too short" in broken(tmp_path, "a.jsonl", few, label="label")
    alone = [{"text": f"a b{i}", "label": f"row {i}"} for i in range(40)]
    assert "each of the 32 classes of the training part occurs once" in broken(
        tmp_path, "a.jsonl", alone, label="label"
    )
    held = [{"text": "a b", "label": f"{i % 2}", "split": "test"} for i in range(20)]
    assert "none for training" in broken(tmp_path, "a.jsonl", held)
    real = [{"text": "a b", "label": i + 0.5} for i in range(20)]
    assert "expected names or ids" in broken(tmp_path, "a.jsonl", real)
    table = "text,label\n" + "".join(f"a b,{i}.5\n" for i in range(20))
    assert "expected classes in the column 'label'" in broken(tmp_path, "a.csv", table)
    lists = [{"text": "a b", "label": ["x", "y"]} for _ in range(20)]
    assert "give task='multilabel'" in broken(tmp_path, "a.jsonl", lists, task="classification")


def test_tables_that_leave_it_open(tmp_path):
    two = [{"text": "a b c", "kind": f"{i % 2}k", "sort": f"{i % 3}s"} for i in range(30)]
    message = broken(tmp_path, "a.jsonl", two)
    assert "it may be 'kind', 'sort'" in message
    assert "label='NAME'" in message
    numbers = "x,z\n" + "".join(f"{i},{i / 7}\n" for i in range(30))
    assert "there are 'x', 'z'" in broken(tmp_path, "a.csv", numbers)
    assert "two columns called 'text'" in broken(tmp_path, "b.csv", "text,text\na b,c d\n" * 9)
    assert "Expected 2 columns, got 3" in broken(tmp_path, "c.csv", "text,label\na,b\na,b,c\n")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather", ".npz", ".safetensors"])
def test_files_that_are_not_what_their_suffix_says(tmp_path, suffix):
    assert f"not a file of the kind {suffix}" in broken(tmp_path, f"a{suffix}", b"hello there")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"hidden": np.ones((9, 2))}, "no array 'target'; there are 'hidden' (9, 2)"),
        ({"target": np.ones(9, int)}, "no array 'hidden'"),
        ({"hidden": np.ones((3, 3, 2)), "target": np.ones(9, int)}, "shape (n, d)"),
        ({"hidden": np.ones((9, 2)), "target": np.ones(9)}, "expected integers"),
        ({"hidden": np.ones((9, 2)), "target": np.ones(8, int)}, "expected 9 rows"),
        ({"hidden": np.full((9, 2), np.nan), "target": np.ones(9, int)}, "row 0 is not finite"),
        ({"hidden": np.ones((30, 2)), "target": np.ones(30, int)}, "one class"),
        ({"hidden": np.ones((9, 2)), "target": np.arange(9), "n_classes": 4}, "below n_classes"),
        ({"query": np.ones((9, 2)), "key": np.ones((8, 2))}, "expected 9 rows"),
    ],
)
def test_hidden_states_of_wrong_shapes(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError) as caught:
        load(tmp_path / "a.npz")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "option", [{"vocab_size": 5}, {"min_count": 2}, {"encoding": "latin-1"}], ids=str
)
def test_options_that_do_not_apply_are_refused(tmp_path, option):
    (name,) = option
    told = f"{name}: expected none for data "
    assert told in broken(tmp_path, "a.svm", "1 1:2\n2 3:4\n" * 10, **option)
    np.savez(tmp_path / "a.npz", hidden=np.eye(20), target=np.arange(20) % 2)
    with pytest.raises(DataError, match=told):
        load(tmp_path / "a.npz", **option)
    if name != "encoding":
        numbers = [{"x": i, "label": f"l{i % 2}"} for i in range(20)]
        assert told in broken(tmp_path, "a.jsonl", numbers, features="x", **option)


@pytest.mark.parametrize(
    "line", ["1,2 3:x", "1,2 3", "1 3:1:2", "1 3:1 3:2", "1 3:1 2:2", "1 -3:1", "x 3:1", "1.5 3:1"]
)
def test_broken_svmlight(tmp_path, line):
    message = broken(tmp_path, "a.svm", f"1,2 1:0.5\n{line}\n", task="multilabel")
    assert "a.svm:2: " in message or "row 2: " in message


def test_rows_are_no_text_and_text_has_no_labels(tmp_path):
    assert "row 2: the value of index 3 is nan" in broken(tmp_path, "a.svm", "1 1:2\n2 3:nan\n")
    assert "give task='classification'" in broken(tmp_path, "a.svm", "1 1:2\n", task="lm")
    assert "expected a table" in broken(tmp_path, "a.txt", TEXT, task="multilabel")
    assert "no word begins with __label__" in broken(tmp_path, "a.txt", TEXT, label="x")
    assert "an empty file" in broken(tmp_path, "b.svm", "", task="multilabel")
    assert "expected one label" in broken(tmp_path, "b.svm", "1,2 1:1\n", task="classification")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not ARFF: no line with @data"),
        (HEADER, "an empty file: no rows after @data"),
        (HEADER + "1,0,1\n?,0,1\n", "a.arff:7: a missing value (?) of 'f'; fill it in"),
        (HEADER + "1,0,1\n1,?,1\n", "a.arff:7: a missing value (?) of 'x'"),
        (HEADER + "{0 1,1 ?}\n", "a.arff:6: a missing value (?) of 'x'"),
        (HEADER + "1,0,1\n1,0\n", "a.arff:7: fewer values than attributes"),
        (HEADER + ROWS + "z,0,1\n" + ROWS, "a.arff:26: expected a number for 'f', got 'z'"),
        (HEADER + "1,0,1\n1,0,2\n", "a.arff:7: '2' is no value of 'y'; its header has 0, 1"),
        (HEADER + "{0 1}\n{5 1}\n", "a.arff:7: malformed entry '5 1}' of 3 attributes"),
        (HEADER + "{0 1}\n{0 1\n", "a.arff:7: malformed entry '0 1'"),
        (HEADER + "{0 1}\n{0 1,0 2}\n", "a.arff:7: malformed entry '0 2}'"),
        (HEADER + "{0 1}\n{zero 1}\n", "a.arff:7: malformed entry 'zero 1}'"),
        (HEADER + "{0 1}\n{2 7}\n", "a.arff:7: '7' is no value of 'y'; its header has 0, 1"),
        (HEADER + "{0 1}\n1,0,1\n", "sparse rows and dense ones in one file"),
        (HEADER.replace("numeric", "number") + ROWS, "a.arff:2: unknown attribute number"),
        (HEADER.replace("numeric", "string") + ROWS, "a.arff:2: String attributes"),
        (HEADER.replace("y {0,1}", "y {0,1,2}") + ROWS, "a label is 0 or 1"),
        (HEADER.replace("y {0,1}", "y numeric") + "1,0,3\n" * 20, "the label 'y' is 3 in a row"),
    ],
)
def test_broken_arff(tmp_path, content, message):
    (tmp_path / "a.xml").write_text(XML)
    assert message in broken(tmp_path, "a.arff", content, task="multilabel")


@pytest.mark.parametrize(
    ("xml", "message"),
    [
        (XML.replace('"y"', '"z"'), "1 of its 2 labels are no attributes of a.arff: 'z'"),
        ("<labels", "a.xml: not XML"),
        ("<labels/>", "a.xml: 0 names of labels"),
        (XML.replace('<label name="y"/>', ""), "one class: 1 label in all"),
    ],
)
def test_labels_that_do_not_match(tmp_path, xml, message):
    (tmp_path / "a.xml").write_text(xml)
    assert message in broken(tmp_path, "a.arff", HEADER + ROWS, task="multilabel")


def test_the_label_file_has_to_be_found(tmp_path):
    message = broken(tmp_path, "a-train.arff", HEADER + ROWS)
    assert "got none; name it a.xml, or give label='PATH'" in message
    for label, told in ((str(tmp_path / "gone.xml"), "cannot be read"), ("g", "no attribute 'g'")):
        assert told in broken(tmp_path, "a-train.arff", HEADER + ROWS, label=label)
    assert "got numbers" in broken(tmp_path, "a-train.arff", HEADER + ROWS, label="f")


def test_parts_of_one_arff_set_have_the_same_columns(tmp_path):
    (tmp_path / "a.xml").write_text(XML)
    (tmp_path / "a-train.arff").write_text(HEADER + ROWS)
    (tmp_path / "a-test.arff").write_text(HEADER.replace(" f ", " g ") + ROWS)
    with pytest.raises(DataError, match=r"a-test\.arff: its attributes are not those"):
        load(tmp_path)


def test_a_link_to_nowhere(tmp_path):
    (tmp_path / "a.txt").symlink_to("gone.txt")
    with pytest.raises(DataError, match=r"a\.txt: a link to gone\.txt, which does not exist"):
        load(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [
        ("datasets", "hf:wikitext", "hub"),
        ("pyarrow.csv", "a.csv", "lab"),
        ("sklearn.datasets", "a.svm", "lab"),
        ("safetensors.torch", "a.safetensors", "lab"),
    ],
)
def test_packages_that_are_missing_are_named(tmp_path, monkeypatch, package, name, extra):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("1 1:2\n") if extra == "lab" else None
    with pytest.raises(DataError, match=rf'pip install "lastlayer\[{extra}\]"'):
        load(name)


def test_names_of_the_hub():
    with pytest.raises(DataError, match="expected hf:name"):
        load("hf:a:b:c:d")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.svm", {"text": "x"}),
        ("a.svm", {"label": "x"}),
        ("a.svm", {"tokenizer": "tokenizer.json"}),
        ("a.jsonl", {"text": "text", "features": "n"}),
        ("a.jsonl", {"label": "label", "task": "lm"}),
        (None, {"label": "x"}),
        (None, {"task": "classification"}),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path, name, options):
    (tmp_path / "a.svm").write_text("1 1:1\n2 1:2\n" * 20)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    with pytest.raises(DataError):
        load(name and tmp_path / name, **options)
