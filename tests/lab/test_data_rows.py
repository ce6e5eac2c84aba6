"""Rows with classes or labels, and pairs: tables, svmlight, ARFF, hidden states, a hub."""

import gzip
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from lastlayer.lab.data import DataError, LabelData, PairData, SparseRows, TextData, load
from lastlayer.lab.data.rows import mixed_rows

LABELS = ("red", "green", "blue")


def documents(seed, n=60):
    """Texts and labels; each label in some of them."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        some = sorted({LABELS[i % 3], LABELS[rng.integers(3)]})
        words = [f"w{j}" for j in rng.integers(0, 9, 5)]
        rows.append((" ".join(words), some))
    return rows


def dense(part):
    features = part.features
    return features.dense() if isinstance(features, SparseRows) else features


def labels_of(data, part):
    lists = part.labels
    return [
        {data.label_names[c] for c in lists.indices[lists.offsets[i] : lists.offsets[i + 1]]}
        for i in range(part.n_rows)
    ]


def check_invariants(data):
    """What holds for every set of labelled rows."""
    assert (np.diff(data.counts) <= 0).all()
    expected = np.bincount(data.train.labels.indices, minlength=data.n_classes)
    assert np.array_equal(data.counts, expected)
    for part in (data.train, data.valid, data.test):
        assert dense(part).shape == (part.n_rows, data.n_features)
        assert dense(part).dtype == np.float32
        for i in range(part.n_rows):
            own = part.labels.indices[part.labels.offsets[i] : part.labels.offsets[i + 1]]
            assert (np.diff(own) > 0).all()
        rows = np.arange(part.n_rows)[::-2]
        some = part.select(rows)
        assert np.array_equal(dense(some), dense(part)[rows])
        assert labels_of(data, some) == [labels_of(data, part)[i] for i in rows]
    assert json.loads(json.dumps(data.description)) == data.description


def test_json_lines_with_splits_in_them(tmp_path, seed):
    rows = documents(seed)
    splits = ["train", "validation", "test"]
    lines = [
        json.dumps({"title": "t", "body": text, "topics": labels, "split": splits[i % 3]})
        for i, (text, labels) in enumerate(rows)
    ]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    data = load(
        tmp_path / "a.jsonl.gz",
        task="multilabel",
        text="title, body",
        label="topics",
        min_count=1,
    )
    check_invariants(data)
    assert labels_of(data, data.train) == [{*labels} for _, labels in rows[::3]]
    assert labels_of(data, data.test) == [{*labels} for _, labels in rows[2::3]]
    for text, row in zip([text for text, _ in rows[::3]], dense(data.train), strict=True):
        words = f"t {text}".split()
        expected = np.array([np.log1p(words.count(name)) for name in data.feature_names])
        np.testing.assert_allclose(row, expected / np.linalg.norm(expected), rtol=1e-5)


def test_json_lines_as_text(tmp_path):
    lines = [json.dumps({"text": f"a b\nc{i % 3}"}) for i in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    data = load(tmp_path / "a.jsonl")
    assert data.vocabulary.decode(data.train[:4]) == ["a", "b", "c0", "<eos>"]
    assert len(data.train) + len(data.valid) + len(data.test) == 120
    assert len(load(tmp_path / "a.jsonl", limit=16).train) == 16


def test_labels_may_be_numbers_or_one_alone(tmp_path):
    lines = [json.dumps({"text": "a b", "labels": 7 if i % 2 else [7, 8]}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = load(tmp_path / "a.jsonl", task="multilabel")
    assert data.label_names == ("7", "8")


def test_marked_text_equals_json_lines(tmp_path, seed):
    rows = documents(seed)
    marked = [" ".join([*(f"__label__{c}" for c in own), text]) for text, own in rows]
    (tmp_path / "a.txt").write_text("\n".join(marked))
    objects = [json.dumps({"text": text, "labels": own}) for text, own in rows]
    (tmp_path / "b.jsonl").write_text("\n".join(objects))
    one = load(tmp_path / "a.txt", task="multilabel")
    other = load(tmp_path / "b.jsonl", task="multilabel")
    check_invariants(one)
    assert one.fingerprint == other.fingerprint


TEXTS = ["red wine and cheese", "green tea and cake", "blue sky and sea", "red roses in snow"]
ROWS = [
    {"id": i, "text": f"{TEXTS[i % 4]} {i % 7}", "label": LABELS[i % 3], "size": 0.5 * i}
    for i in range(60)
]


def write_table(path, rows=ROWS):
    """In the format that the suffix says."""
    pyarrow = pytest.importorskip("pyarrow")
    table, kind = pyarrow.Table.from_pylist(rows), path.suffix
    if kind == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    elif kind == ".feather":
        pytest.importorskip("pyarrow.feather").write_feather(table, str(path))
    elif kind == ".arrow":
        with (
            pyarrow.OSFile(str(path), "wb") as sink,
            pyarrow.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)
    elif kind == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        mark = "\t" if kind in (".tsv", ".txt") else ","
        lines = [[str(each) for each in row.values()] for row in rows]
        path.write_text("\n".join(mark.join(line) for line in [list(rows[0]), *lines]) + "\n")
    return path


TABLES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".parquet", ".feather", ".arrow")


@pytest.mark.parametrize("suffix", TABLES)
def test_tables_of_all_formats_are_the_same(tmp_path, suffix):
    data = load(write_table(tmp_path / f"a{suffix}"))
    assert isinstance(data, LabelData)
    assert data.task == "classification"
    assert data.description["columns"] == {"text": ["text"], "label": "label"}
    assert data.description["task_reason"]
    check_invariants(data)
    assert data.fingerprint == load(write_table(tmp_path / "b.jsonl")).fingerprint
    assert (np.diff(data.train.labels.offsets) == 1).all()


def test_packed_tables_and_other_separators(tmp_path):
    plain = write_table(tmp_path / "a.csv")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "c.csv").write_text(plain.read_text().replace(",", ";"))
    (tmp_path / "d.csv").write_bytes(plain.read_text().replace("red", "r\xe9d").encode("latin-1"))
    known = load(plain).fingerprint
    assert load(tmp_path / "b.csv.gz").fingerprint == known
    assert load(tmp_path / "c.csv").fingerprint == known
    assert "r\xe9d" in load(tmp_path / "d.csv", encoding="latin-1").feature_names


def test_quotes_lines_and_missing_headers(tmp_path):
    rows = [f'"say ""{i % 5}"", then\nleave, all of it",{LABELS[i % 3]}' for i in range(30)]
    (tmp_path / "a.csv").write_text("text,label\n" + "\n".join(rows))
    data = load(tmp_path / "a.csv", min_count=1)
    assert sum(part.n_rows for part in (data.train, data.valid, data.test)) == 30
    assert {"say", "leave,", '"0",'} <= {*data.feature_names}
    (tmp_path / "b.tsv").write_text("".join(f'"{i}" is a quote\t{i % 2}\n' for i in range(30)))
    bare = load(tmp_path / "b.tsv")
    assert bare.description["columns"] == {"text": ["column1"], "label": "column2"}


def test_columns_that_are_asked_for(tmp_path):
    path = write_table(tmp_path / "a.csv")
    data = load(path, label="label", features="size,id")
    assert data.feature_names == ("size", "id")
    assert data.train.features.dtype == np.float32
    other = load(path, label="id", text="text", task="multilabel")
    assert other.n_classes == 60
    assert load(path, text="text", task="lm").task == "lm"
    vectors = [{"v": [0.5 * i, 1.0], "class": i % 3} for i in range(30)]
    made = load(write_table(tmp_path / "b.parquet", vectors))
    assert (made.task, made.feature_names) == ("classification", ("v[0]", "v[1]"))


@pytest.mark.parametrize(
    ("rows", "task"),
    [
        ([{"text": f"a b c{i % 3}"} for i in range(30)], "lm"),
        ([{"review": f"a b c{i % 3}", "stars": i % 5} for i in range(40)], "classification"),
        ([{"x": 0.5 * i, "y": i % 3, "z": i / 7} for i in range(40)], "classification"),
        ([{"text": "a b", "tags": ["x", "y"][: i % 3]} for i in range(30)], "multilabel"),
        ([{"text": "a b", "tags": ["x|y", "x", "y|z", "z|x"][i % 4]} for i in range(30)],
         "multilabel"),
        ([{"text": "a b", "label": ["Oslo, Norway", "Rome, Italy"][i % 2]} for i in range(30)],
         "classification"),
        ([{"question": f"who is {i} and why", "answer": f"he is {i} for fun"} for i in range(30)],
         "pairs"),
    ],
)  # fmt: skip
def test_the_task_follows_from_the_columns(tmp_path, rows, task):
    for suffix in (".jsonl", ".csv"):
        if suffix == ".csv" and any(isinstance(v, list) or "," in str(v) for v in rows[1].values()):
            continue
        data = load(write_table(tmp_path / f"a{suffix}", rows))
        assert data.task == task
        assert data.description["task_reason"] != "as asked"
    kinds = {"lm": TextData, "pairs": PairData}
    assert isinstance(data, kinds.get(task, LabelData))


def test_empty_rows_are_left_out_and_rare_classes_kept(tmp_path):
    rows = [dict(row) for row in ROWS]
    rows[3]["text"], rows[4]["label"] = "", None
    rows[5]["label"] = "once"
    data = load(write_table(tmp_path / "a.jsonl", rows))
    assert data.description["left_out"] == 2
    assert sum(part.n_rows for part in (data.train, data.valid, data.test)) == 58
    assert "once" in data.label_names
    assert len(data.description["notes"]) == 3
    text = load(tmp_path / "a.jsonl", text="text", task="lm")
    assert text.description["left_out"] == 1
    parts = (text.train, text.valid, text.test)
    assert sum(text.vocabulary.decode(part).count("<eos>") for part in parts) == 59


def test_pairs_of_one_query_or_key_belong_together(tmp_path):
    rows = [{"q": f"what about number {i // 3}", "a": f"this is the answer {i}"} for i in range(60)]
    data = load(write_table(tmp_path / "a.jsonl", rows))
    assert isinstance(data, PairData)
    assert data.train.query.shape == (48, len(data.feature_names))
    everything = np.concatenate([p.group for p in (data.train, data.valid, data.test)])
    assert (np.bincount(everything) == 3).all()
    for part in (data.train, data.valid):
        same = part.group[:, None] == part.group
        assert np.array_equal((part.query.dense()[:, None] == part.query.dense()).all(-1), same)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("several", [False, True])
def test_hidden_states(tmp_path, seed, suffix, several):
    rng = np.random.default_rng(seed)
    hidden, target = rng.normal(size=(50, 4)).astype(np.float32), np.arange(50) % 5 * 10
    if several:
        target = np.stack([target, np.where(np.arange(50) % 2, 99, -100)], 1)
    path = tmp_path / f"a{suffix}"
    if suffix == ".npz":
        np.savez(path, hidden=hidden.astype(np.float64), target=target)
    else:
        pytest.importorskip("safetensors.numpy").save_file(
            {"hidden": hidden, "target": target}, str(path)
        )
    data = load(path)
    check_invariants(data)
    assert data.hidden
    assert data.task == ("multilabel" if several else "classification")
    assert {*data.label_names} == {"0", "10", "20", "30", "40"} | ({"99"} if several else set())
    held = np.sort(mixed_rows(50)[45:])
    np.testing.assert_array_equal(data.test.features, hidden[held])


def test_classes_that_never_come_and_targets_that_are_padding(tmp_path):
    target = np.arange(40) % 4
    target[7] = -100
    np.savez(tmp_path / "a.npz", hidden=np.ones((40, 2)), target=target, n_classes=9)
    data = load(tmp_path / "a.npz")
    assert data.n_classes == 9
    assert sum(part.n_rows for part in (data.train, data.valid, data.test)) == 39
    np.savez(tmp_path / "b.npz", query=np.ones((40, 2)), key=np.ones((40, 3)))
    assert load(tmp_path / "b.npz").widths == (2, 3)


def test_an_attribute_of_arff_is_the_class(tmp_path):
    header = "@relation r\n@attribute f numeric\n@attribute Class {a,b,c}\n@data\n"
    rows = [f"{i},{'abc'[i % 3]}" for i in range(30)]
    (tmp_path / "a.arff").write_text(header + "\n".join(rows))
    data = load(tmp_path / "a.arff")
    check_invariants(data)
    assert (data.task, {*data.label_names}) == ("classification", {*"abc"})
    assert load(tmp_path / "a.arff", label="Class").fingerprint == data.fingerprint


def test_svmlight_with_one_label_each_is_classification(tmp_path):
    lines = [f"{i % 3} 1:{i} 3:2" for i in range(30)]
    (tmp_path / "a.svm").write_text("\n".join(lines))
    data = load(tmp_path / "a.svm")
    assert (data.task, data.n_features) == ("classification", 3)
    assert load(tmp_path / "a.svm", task="multilabel").task == "multilabel"


@pytest.mark.parametrize("first", [0, 1])
def test_svmlight(tmp_path, seed, first):
    rng = np.random.default_rng(seed)
    table = np.round(rng.normal(size=(40, 6)) * (rng.random((40, 6)) < 0.5), 3)
    table[:, [0, 5]] = np.where(table[:, [0, 5]] == 0, 1.0, table[:, [0, 5]])
    labels = [sorted({*rng.integers(0, 3, i % 3).tolist()}) for i in range(40)]
    labels[:10] = [[0, 1], [1, 2]] * 5  # each in some row that is not held out
    lines = ["40 6 3"] * (1 - first)
    for row, own in zip(table, labels, strict=True):
        pairs = [f"{i + first}:{value}" for i, value in enumerate(row) if value]
        lines.append(" ".join([",".join(map(str, own)), *pairs, "# remark"]))
    (tmp_path / "train.svm").write_text("\n".join(lines))
    (tmp_path / "test.svm").write_text("0 1:2.5\n")
    data = load(tmp_path, task="multilabel")
    check_invariants(data)
    assert data.description["first_index"] == first
    assert data.n_features == 6
    assert data.train.n_rows + data.valid.n_rows == 40
    assert dense(data.test)[0, 1 - first] == 2.5
    held = np.sort(mixed_rows(40)[36:])
    np.testing.assert_array_equal(dense(data.valid), table[held].astype(np.float32))
    assert labels_of(data, data.valid) == [{str(c) for c in labels[i]} for i in held]


ATTRIBUTES = """% remark
@RELATION r

@ATTRIBUTE 'a b' NUMERIC
@attribute colour {red, 'dark, blue'}
@attribute flag {no,yes}
@attribute note date "yyyy"
@attribute x\\~y {0,1}
@attribute z {0,1}
@DATA
"""
NAMES = '<labels><label name="x~y"><label name="z"/></label></labels>'


def arff_rows(seed, n=30):
    rng = np.random.default_rng(seed)
    drawn = [(round(float(rng.normal()), 3), *rng.integers(0, 2, 4).tolist()) for _ in range(n)]
    # Each label at least once, whichever rows are held out.
    return [(1.5, 1, 0, 1, 1)] * 10 + drawn


def test_arff_dense_and_sparse_are_the_same(tmp_path, seed):
    rows = arff_rows(seed)
    colours, flags = ("red", "'dark, blue'"), ("no", "yes")
    lines = [f"{a},{colours[c]},{flags[f]},2020,{x},{z}" for a, c, f, x, z in rows]
    sparse = []
    for a, c, f, x, z in rows:
        pairs = [f"0 {a}", f"1 {colours[c]}" * c, f"2 {flags[f]}" * f, "4 1" * x, "5 1" * z]
        sparse.append("{" + ", ".join(filter(None, pairs)) + "}")
    for kind, text in (("dense", lines), ("sparse", sparse)):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "set-train.arff").write_text(ATTRIBUTES + "\n".join(text[:-5]) + "\n")
        (folder / "set-test.arff").write_text(ATTRIBUTES + "% more\n" + "\n".join(text[-5:]))
        (folder / "set.arff").write_text("the whole set is left out beside its parts")
        (folder / "set.xml").write_text(NAMES)
    one = load(tmp_path / "dense", task="multilabel")
    other = load(tmp_path / "sparse", task="multilabel")
    check_invariants(one)
    assert one.fingerprint == other.fingerprint
    assert one.feature_names == ("a b", "colour=red", "colour=dark, blue", "flag")
    assert {*one.label_names} == {"x~y", "z"}
    assert one.description["left_out"] == ["note"]
    expected = [[a, 1 - c, c, f] for a, c, f, _, _ in rows[-5:]]
    np.testing.assert_array_equal(one.test.features, np.array(expected, np.float32))
    assert labels_of(one, one.test) == [
        {name for name, on in (("x~y", x), ("z", z)) if on} for *_, x, z in rows[-5:]
    ]


def test_sparse_arff_of_numbers_stays_sparse(tmp_path):
    header = "@relation r\n@attribute f numeric\n@attribute g {0,1}\n@attribute l {0,1}\n"
    rows = ["{0 2.5,2 1}", "{1 1,3 1}", "{}"] * 10
    (tmp_path / "a.arff").write_text(f"{header}@attribute m {{0,1}}\n@data\n" + "\n".join(rows))
    (tmp_path / "a.xml").write_text('<labels><label name="l"/><label name="m"/></labels>')
    data = load(tmp_path / "a.arff", task="multilabel")
    check_invariants(data)
    assert isinstance(data.train.features, SparseRows)
    total = sum(dense(part).sum(0) for part in (data.train, data.valid, data.test))
    assert total.tolist() == [25.0, 10.0]


def test_the_first_value_is_what_a_sparse_row_leaves_out(tmp_path):
    header = "@relation r\n@attribute f {YES,NO}\n@attribute l {1,0}\n@attribute m {0,1}\n@data\n"
    rows = ["{}", "{0 NO,1 0,2 1}"] * 10
    (tmp_path / "a.arff").write_text(header + "\n".join(rows))
    (tmp_path / "a.xml").write_text('<labels><label name="l"/><label name="m"/></labels>')
    data = load(tmp_path / "a.arff", task="multilabel")
    for features, own in zip(dense(data.train)[:, 0], labels_of(data, data.train), strict=True):
        assert own == ({"l"} if features else {"m"})


def test_a_limit_of_rows(tmp_path, seed):
    rows = documents(seed, 200)
    objects = [json.dumps({"text": text, "labels": own}) for text, own in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(objects))
    data = load(tmp_path / "a.jsonl", task="multilabel", limit=40)
    check_invariants(data)
    assert [part.n_rows for part in (data.train, data.valid, data.test)] == [40, 5, 5]


class FakeHub:
    """Has what the datasets package is asked for."""

    config = SimpleNamespace(HF_HUB_OFFLINE=True)

    def __init__(self, splits, features=None):
        self.splits, self.features, self.asked = splits, features, None

    def load_dataset(self, name, config, *, streaming):
        if name == "gone":
            raise FileNotFoundError("no such set\nand more")
        self.asked = name, config, streaming
        return {name: Rows(rows, self.features) for name, rows in self.splits.items()}


class Rows(list):
    def __init__(self, rows, features):
        super().__init__(rows)
        self.features = features


@pytest.fixture
def hub(monkeypatch):
    def install(*args):
        fake = FakeHub(*args)
        monkeypatch.setitem(sys.modules, "datasets", fake)
        return fake

    return install


def test_text_of_the_hub(hub):
    rows = [{"text": f"a b c{i % 3}", "other": f"x y{i % 4}"} for i in range(30)]
    fake = hub({"train": rows, "validation": rows[:9], "unsupervised": rows, "test": rows[:3]})
    data = load("hf:who/what:config-1:text", task="lm")
    assert fake.asked == ("who/what", "config-1", True)
    assert [len(data.train), len(data.valid), len(data.test)] == [120, 36, 12]
    other = load("hf:who/what::other", task="lm", limit=20)
    assert fake.asked == ("who/what", None, True)
    assert "x" in other.vocabulary.ids
    assert len(other.train) == 20
    with pytest.raises(DataError, match=r"hf:gone: FileNotFoundError: no such set and more; check"):
        load("hf:gone")


def test_labels_of_the_hub_have_their_names(hub):
    rows = [{"text": f"a b c{i % 3}", "labels": [i % 2, 2]} for i in range(30)]
    named = SimpleNamespace(feature=SimpleNamespace(int2str=lambda i: LABELS[i]))
    hub({"train": rows}, {"labels": named})
    data = load("hf:set", task="multilabel")
    check_invariants(data)
    assert data.label_names[0] == "blue"
    assert {*data.label_names} == {*LABELS}
