"""Every kind of broken data has an error that names the file, the place and the remedy."""

import gzip

import pytest

from lastlayer.lab.data import DataError, load

TEXT = "a b a b c\n" * 20
NAMESPACE = "http://mulan.sourceforge.net/labels"
XML = f'<labels xmlns="{NAMESPACE}"><label name="x"/><label name="y"/></labels>'
HEADER = "@relation r\n@attribute f numeric\n@attribute x {0,1}\n@attribute y {0,1}\n@data\n"
ROWS = "1.5,0,1\n2,1,0\n" * 10


def broken(tmp_path, name, content, **options):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        load(path, **options)
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert ";" in message, "no remedy"
    return message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "a.txt: no tokens; give a file with text in it"),
        (" \t ", "a.txt: too short: the train part has 1 of 1 token; give at least 20"),
        ("word", "a.txt: too short: the valid part has 0 of 2 tokens"),
        ("same " * 100, "one class"),
        (b"PK\x03\x04\x00\x00" * 50, "a.txt: a binary file: a NUL after 4 characters; give text"),
        (bytes(range(1, 256)) * 9, "a.txt: a binary file, not utf-8: byte 0x80"),
        ("a b c d e f g h i j k l m n o p q r s t u v w x", "no word comes 2 times"),
    ],
)
def test_text_that_is_none(tmp_path, content, message):
    assert message in broken(tmp_path, "a.txt", content)


def test_a_wrong_encoding_names_the_byte_and_what_to_try(tmp_path):
    content = (TEXT + "caf\u00e9 a b\n").encode("latin-1")
    message = broken(tmp_path, "a.txt", content)
    assert f"a.txt:21: not utf-8: byte 0xe9 at offset {len(TEXT) + 3}" in message
    assert "encoding='latin-1'" in message
    assert load(tmp_path / "a.txt", encoding="latin-1").n_classes >= 4


def test_the_offset_counts_all_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("lastlayer.lab.data.files._BLOCK", 16)
    content = ("é" * 9 + "\n").encode() * 5
    message = broken(tmp_path, "a.txt", content + b"ab\xc3")
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
        ('{"body": "x"}', "a.jsonl:2: no field 'text'; it has 'body'; give another text_field"),
        ('{"text": 3}', "a.jsonl:2: expected a text in the field 'text', got int"),
        ('{"text": "x", "labels": [1.5]}', "a.jsonl:2: expected a list of names or ids"),
    ],
)
def test_broken_json_lines(tmp_path, line, message):
    content = f'{{"text": "a b", "labels": ["x"]}}\n{line}\n'
    assert message in broken(tmp_path, "a.jsonl", content, task="multilabel")


def test_json_lines_without_records_or_with_one_label(tmp_path):
    assert "no records" in broken(tmp_path, "a.jsonl", "\n", task="multilabel")
    assert "no records" in broken(tmp_path, "a.jsonl", "")
    one = '{"text": "a b", "labels": ["x"]}\n' * 20
    assert "one class: 1 label in all" in broken(tmp_path, "a.jsonl", one, task="multilabel")
    few = '{"text": "a b", "labels": ["x", "y"]}\n' * 3
    assert "too short" in broken(tmp_path, "a.jsonl", few, task="multilabel")
    only = '{"text": "a b", "labels": ["x", "y"], "split": "test"}\n' * 20
    assert "none for training" in broken(tmp_path, "a.jsonl", only, task="multilabel")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,2 3:x", "a.svm:2: malformed entry '3:x'"),
        ("1,2 3", "a.svm:2: malformed entry '3'"),
        ("1 3:1:2", "a.svm:2: malformed entry '3:1:2'"),
        ("1 3:1 3:2", "a.svm:2: index 3 comes twice"),
        ("1 -3:1", "a.svm:2: index -3 is negative"),
        ("1 3:nan", "a.svm:2: the value of index 3 is nan"),
    ],
)
def test_broken_svmlight(tmp_path, line, message):
    content = f"1,2 1:0.5\n{line}\n"
    assert message in broken(tmp_path, "a.svm", content, task="multilabel")


def test_rows_are_no_text_and_text_has_no_labels(tmp_path):
    assert "give task='multilabel'" in broken(tmp_path, "a.svm", "1 1:2\n")
    assert "no word begins with __label__" in broken(tmp_path, "a.txt", TEXT, task="multilabel")
    assert "an empty file" in broken(tmp_path, "b.svm", "", task="multilabel")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not ARFF: no line with @data"),
        (HEADER, "an empty file: no rows after @data"),
        (HEADER + "1,0,1\n?,0,1\n", "a.arff:7: a missing value (?) of 'f'; fill it in"),
        (HEADER + "1,0,1\n1,?,1\n", "a.arff:7: a missing value (?) of 'x'"),
        (HEADER + "{0 1,1 ?}\n", "a.arff:6: a missing value (?) of 'x'"),
        (HEADER + "1,0,1\n1,0\n", "a.arff:7: 2 values for 3 attributes"),
        (HEADER + "1,0,1\nz,0,1\n", "a.arff:7: expected a number for 'f', got 'z'"),
        (HEADER + "1,0,1\n1,0,2\n", "a.arff:7: '2' is no value of 'y'; its header has 0, 1"),
        (HEADER + "{0 1}\n{5 1}\n", "a.arff:7: index 5 of 3 attributes"),
        (HEADER + "{0 1}\n{0 1\n", "a.arff:7: a sparse row without its }"),
        (HEADER + "{0 1}\n{0 1,0 2}\n", "a.arff:7: index 0 comes twice"),
        (HEADER + "{0 1}\n{zero 1}\n", "a.arff:7: malformed entry 'zero 1'"),
        (HEADER + "{0 1}\n1,0,1\n", "sparse rows and dense ones in one file"),
        (HEADER.replace("numeric", "number") + ROWS, "a.arff:2: unknown type 'number'"),
        (HEADER.replace("@relation r", "hello") + ROWS, "a.arff:1: expected @relation"),
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
    message = broken(tmp_path, "a-train.arff", HEADER + ROWS, task="multilabel")
    assert "got none; name it a.xml, or give labels=PATH" in message
    gone = tmp_path / "gone.xml"
    assert "cannot be read" in broken(
        tmp_path, "a-train.arff", HEADER + ROWS, task="multilabel", labels=gone
    )


def test_parts_of_one_arff_set_have_the_same_columns(tmp_path):
    (tmp_path / "a.xml").write_text(XML)
    (tmp_path / "a-train.arff").write_text(HEADER + ROWS)
    (tmp_path / "a-test.arff").write_text(HEADER.replace(" f ", " g ") + ROWS)
    with pytest.raises(DataError, match=r"a-test\.arff: its attributes are not those"):
        load(tmp_path, task="multilabel")


def test_a_link_to_nowhere(tmp_path):
    (tmp_path / "a.txt").symlink_to("gone.txt")
    with pytest.raises(DataError, match=r"a\.txt: a link to gone\.txt, which does not exist; mend"):
        load(tmp_path / "a.txt")


def test_the_hub_needs_its_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match=r'hf:wikitext: needs .*pip install "lastlayer\[hub\]"'):
        load("hf:wikitext")
    with pytest.raises(DataError, match="expected hf:name"):
        load("hf:a:b:c:d")
