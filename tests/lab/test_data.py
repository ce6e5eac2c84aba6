"""Text: vocabularies, layouts, parts, limits, and what goes to disk."""

import gzip
import json
from collections import Counter

import numpy as np
import pytest

from lastlayer.lab.data import DataError, Vocabulary, load, text


def words(seed, n=400, types=30):
    """Words by a falling chance, in lines."""
    rng = np.random.default_rng(seed)
    drawn = [f"w{i}" for i in np.minimum(rng.geometric(0.15, n), types)]
    return [" ".join(drawn[i : i + 7]) for i in range(0, n, 7)]


def all_tokens(data):
    return [t for part in (data.train, data.valid, data.test) for t in data.vocabulary.decode(part)]


def test_every_line_ends_with_eos_and_the_order_is_kept(tmp_path, seed):
    lines = ["", *words(seed), ""]
    (tmp_path / "a.txt").write_text("\n".join(lines))  # the last line has no end of its own
    data = load(tmp_path / "a.txt", min_count=1)
    expected = [token for line in lines[:-1] for token in [*line.split(), "<eos>"]]
    known = {*data.vocabulary.tokens}
    assert all_tokens(data) == [token if token in known else "<unk>" for token in expected]
    assert data.task == "lm"
    assert json.loads(json.dumps(data.description)) == data.description


def test_counts_are_those_of_the_training_part_and_fall(tmp_path, seed):
    (tmp_path / "a.txt").write_text("\n".join(words(seed)) + "\n")
    data = load(tmp_path / "a.txt")
    assert np.array_equal(np.bincount(data.train, minlength=data.n_classes), data.counts)
    assert (np.diff(data.counts) <= 0).all()
    assert data.train.dtype == np.int32
    assert data.counts.dtype == np.int64


@pytest.mark.parametrize("vocab_size", [2, 5, 1000])
@pytest.mark.parametrize("min_count", [1, 3])
def test_a_vocabulary_keeps_the_most_frequent(seed, vocab_size, min_count):
    counts = dict(Counter(" ".join(words(seed)).split()))
    chosen = Vocabulary.from_counts(counts, vocab_size=vocab_size, min_count=min_count)
    allowed = sorted((-n, token) for token, n in counts.items() if n >= min_count)
    expected = [token for _, token in allowed][: vocab_size - 1]
    assert [token for token in chosen.tokens if token != "<unk>"] == expected
    assert chosen.counts.sum() == sum(counts.values())
    for token, n in zip(chosen.tokens, chosen.counts, strict=True):
        assert token == "<unk>" or counts[token] == n


def test_what_comes_once_is_unknown_unless_the_text_has_unknowns_of_its_own():
    assert "b" not in Vocabulary.from_counts({"a": 2, "b": 1}).ids
    own = Vocabulary.from_counts({"a": 2, "b": 1, "<unk>": 5})
    assert own.tokens == ("<unk>", "a", "b")
    assert own.counts.tolist() == [5, 2, 1]


def test_a_vocabulary_is_saved_as_json(tmp_path):
    words = Vocabulary.from_counts({"é\ud800\n": 3, "b": 2, '"': 2})
    words.save(tmp_path / "vocabulary.json")
    again = Vocabulary.load(tmp_path / "vocabulary.json")
    assert again.tokens == words.tokens
    assert np.array_equal(again.counts, words.counts)
    assert [p.name for p in tmp_path.iterdir()] == ["vocabulary.json"]
    assert again.encode(["b", "new"]).tolist() == [again.ids["b"], again.unknown]


@pytest.mark.parametrize("content", ["", "[]", '{"tokens": ["a"], "counts": [1, 2]}'])
def test_a_broken_vocabulary_is_refused(tmp_path, content):
    (tmp_path / "v.json").write_text(content)
    with pytest.raises(DataError, match=r"v\.json.*vocabulary\.json of a run"):
        Vocabulary.load(tmp_path / "v.json")


@pytest.mark.parametrize(
    "names",
    [
        ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("train.txt", "dev.txt", "test.txt"),
        ("train/a.txt", "validation/a.txt", "test/a.txt"),
        ("x-train.txt.gz", "x-val.txt.gz", "x-test.txt.gz"),
    ],
)
def test_names_tell_the_parts(tmp_path, names):
    texts = ["a a b b <unk>\n", "b new\n", "a\n"]
    for name, text in zip(names, texts, strict=True):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    (tmp_path / "README.txt").write_text("not this")
    data = load(tmp_path)
    decode = data.vocabulary.decode
    assert decode(data.train) == ["a", "a", "b", "b", "<unk>", "<eos>"]
    assert decode(data.valid) == ["b", "<unk>", "<eos>"]
    assert decode(data.test) == ["a", "<eos>"]


def test_missing_parts_are_cut_from_the_end_of_the_training_part(tmp_path, seed):
    (tmp_path / "train.txt").write_text("\n".join(words(seed)) + "\n")
    (tmp_path / "test.txt").write_text("w1 w2\n")
    data = load(tmp_path)
    whole = sum(len(line.split()) + 1 for line in words(seed))
    assert len(data.valid) == whole // 10
    assert len(data.train) == whole - whole // 10
    assert len(data.test) == 3


def test_a_folder_of_files_is_mixed_the_same_way_each_time(tmp_path):
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"file{i} a b a b\n")
    first, second = load(tmp_path, min_count=1), load(tmp_path, min_count=1)
    assert first.fingerprint == second.fingerprint
    files = [token for token in all_tokens(first) if token.startswith("file")]
    assert files != sorted(files, key=lambda name: int(name[4:]))
    assert first.fingerprint != load(tmp_path, min_count=2).fingerprint


def test_a_limit_takes_the_beginning(tmp_path, seed):
    (tmp_path / "a.txt").write_text("\n".join(words(seed)) + "\n")
    whole, part = load(tmp_path / "a.txt", min_count=1), load(tmp_path / "a.txt", limit=80)
    assert [len(part.train), len(part.valid), len(part.test)] == [80, 10, 10]
    beginning = whole.vocabulary.decode(whole.train[:80])
    got = part.vocabulary.decode(part.train)
    few = load(tmp_path / "a.txt", limit=9, min_count=1)
    assert [len(few.train), len(few.valid), len(few.test)] == [9, 2, 2]
    assert all(mine in (theirs, "<unk>") for mine, theirs in zip(got, beginning, strict=True))


def test_much_text_is_mapped_from_a_file(tmp_path, seed, monkeypatch):
    (tmp_path / "a.txt").write_text("\n".join(words(seed)) + "\n")
    in_memory = load(tmp_path / "a.txt")
    monkeypatch.setattr(text, "MEMORY_TOKENS", 50)
    monkeypatch.setattr(text, "_CHUNK", 33)
    monkeypatch.setattr("lastlayer.lab.data.files._BLOCK", 64)
    mapped = load(tmp_path / "a.txt")
    assert isinstance(mapped.train, np.memmap)
    assert mapped.fingerprint == in_memory.fingerprint


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_encodings_and_ends_of_lines(tmp_path, encoding, end, monkeypatch):
    monkeypatch.setattr("lastlayer.lab.data.files._BLOCK", 7)  # cuts characters in two
    text = "".join(f"é ü é ü ñ{end}" for _ in range(9))
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    data = load(tmp_path / "a.txt", encoding=encoding.removesuffix("-sig"), min_count=1)
    assert all_tokens(data) == ["é", "ü", "é", "ü", "ñ", "<eos>"] * 9


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"vocab_size": 1}, ValueError, "vocab_size: expected at least 2, got 1"),
        ({"min_count": 0}, ValueError, "min_count: expected at least 1, got 0"),
        ({"min_count": 1.5}, TypeError, "min_count: expected an int or None, got float"),
        ({"limit": 1}, ValueError, "limit: expected at least 2, got 1"),
        ({"limit": "9"}, TypeError, "limit: expected an int or None, got str"),
        ({"task": "translation"}, ValueError, "task: expected one of"),
    ],
)
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        load(None, **options)
