"""Text: vocabularies, layouts, parts, limits, tokenizers, and the corpora that are always there."""

import gzip
import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from lastlayer.lab.data import DataError, Vocabulary, load, stdlib, text
from lastlayer.lab.data.stdlib import cache_folder, source_files, tokens_of, without_imports


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


def chosen_from(counts, vocab_size=None, min_count=None):
    numbers = np.fromiter(counts.values(), np.int64, len(counts))
    return text.choose(list(counts), numbers, vocab_size, min_count)[0]


@pytest.mark.parametrize("vocab_size", [2, 5, 1000])
@pytest.mark.parametrize("min_count", [1, 3])
def test_a_vocabulary_keeps_the_most_frequent(seed, vocab_size, min_count):
    counts = dict(Counter(" ".join(words(seed)).split()))
    chosen = chosen_from(counts, vocab_size=vocab_size, min_count=min_count)
    allowed = sorted((-n, token) for token, n in counts.items() if n >= min_count)
    expected = [token for _, token in allowed][: vocab_size - 1]
    assert [token for token in chosen.tokens if token != "<unk>"] == expected
    assert chosen.counts.sum() == sum(counts.values())
    for token, n in zip(chosen.tokens, chosen.counts, strict=True):
        assert token == "<unk>" or counts[token] == n


def test_what_comes_once_is_unknown_unless_the_text_has_unknowns_of_its_own():
    assert "b" not in chosen_from({"a": 2, "b": 1}).ids
    own = chosen_from({"a": 2, "b": 1, "<unk>": 5})
    assert own.tokens == ("<unk>", "a", "b")
    assert own.counts.tolist() == [5, 2, 1]


def test_a_vocabulary_is_saved_as_json(tmp_path):
    words = chosen_from({"é\ud800\n": 3, "b": 2, '"': 2})
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
    for name, own in zip(names, texts, strict=True):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(own.encode()) if name.endswith("gz") else own.encode())
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


@pytest.fixture
def tokenizer(tmp_path):
    """A small BPE, in a folder as Hugging Face's models have it."""
    package = pytest.importorskip("tokenizers")
    made = package.Tokenizer(package.models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=80, special_tokens=["[UNK]"], show_progress=False
    )
    made.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    (tmp_path / "model").mkdir()
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model"


def test_a_tokenizer_cuts_the_text_and_all_its_tokens_are_classes(tmp_path, tokenizer):
    package = pytest.importorskip("tokenizers")
    lines = ["the cat sat", "on the mat"] * 20
    (tmp_path / "a.txt").write_text("\n".join(lines) + "\n")
    data = load(tmp_path / "a.txt", tokenizer=tokenizer)
    own = package.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    expected = [token for line in lines for token in (*own.encode(line).tokens, "<eos>")]
    assert all_tokens(data) == expected
    assert {*own.get_vocab()} <= {*data.vocabulary.tokens}
    assert load(tmp_path / "a.txt", tokenizer=tokenizer / "tokenizer.json").fingerprint == (
        data.fingerprint
    )
    assert load(tmp_path / "a.txt", tokenizer=tokenizer, vocab_size=9).n_classes == 9
    rows = [json.dumps({"text": line, "label": len(line) % 3}) for line in lines]
    (tmp_path / "b.jsonl").write_text("\n".join(rows))
    bags = load(tmp_path / "b.jsonl", tokenizer=tokenizer)
    assert {*bags.feature_names} <= {*own.get_vocab(), "<unk>"}
    cutter = text.Tokenizer(tokenizer)
    assert cutter.joined([*cutter.cut("the cat"), "<eos>", *cutter.cut("sat")]) == "the cat<eos>sat"


def test_what_is_no_tokenizer_is_refused(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a b a b\n" * 20)
    (tmp_path / "other.json").write_text("{}")
    for path in (tmp_path / "other.json", tmp_path, tmp_path / "gone"):
        with pytest.raises(DataError):
            load(tmp_path / "a.txt", tokenizer=path)


SOURCE = '''"""Module {i}."""
import os, sys as system; import xml.etree
from json import (
    dumps,
)
from . import beside
from ..above import other
try: import zlib
except ImportError: zlib = None


def f{i}(x=[1, 2]):  # a remark
    from os.path import join
    yield from range({i})
    return "import this", x[1:2]
'''


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small folder in place of the standard library, and a cache of its own."""
    folder = tmp_path / "lib"
    (folder / "package").mkdir(parents=True)
    (folder / "site-packages").mkdir()
    for i in range(60):
        place = folder if i % 2 else folder / "package"
        (place / f"m{i}.py").write_text(SOURCE.format(i=i))
    (folder / "broken.py").write_text("'''never ends\n")
    (folder / "coded.py").write_bytes(b"# coding: no-such-thing\n")
    (folder / "latin.py").write_bytes(b"x = '\xe9'\n")
    (folder / "site-packages" / "others.py").write_text("others = 1\n")
    (folder / "_sysconfigdata_x.py").write_text("build = 1\n")
    monkeypatch.setattr(stdlib, "root", lambda: folder)
    monkeypatch.setenv("LASTLAYER_CACHE", str(tmp_path / "cache"))
    return folder


def test_tokens_are_what_python_reads(library):
    tokens = tokens_of(library / "m1.py")
    assert tokens[:5] == ['"""Module 1."""', "<newline>", "import", "os", ","]
    assert tokens[-1] == "<eos>"
    assert tokens[tokens.index("def") :][:8] == ["def", "f1", "(", "x", "=", "[", "1", ","]
    assert not any("remark" in token or token.isspace() for token in tokens)
    for name in ("broken.py", "coded.py", "latin.py"):
        assert tokens_of(library / name) == []


def test_files_are_whole_in_one_part(library):
    data = load(min_count=1)
    names = {file.name: file.part for file in source_files()}
    assert "site-packages/others.py" not in names
    assert "_sysconfigdata_x.py" not in names
    for part in ("train", "valid", "test"):
        decoded = data.vocabulary.decode(getattr(data, part))
        readable = [
            name for name, own in names.items() if own == part and tokens_of(library / name)
        ]
        assert decoded.count("<eos>") == len(readable) > 0


def test_a_file_stays_in_its_part_when_others_come(library):
    before = {file.name: file.part for file in source_files()}
    (library / "another.py").write_text("x = 1\n")
    after = {file.name: file.part for file in source_files()}
    assert before.items() <= after.items()


def test_the_cache_gives_the_same_and_a_damaged_one_is_made_again(library, tmp_path):
    fresh = load(cache=False)
    assert not (tmp_path / "cache").exists()
    assert load().fingerprint == fresh.fingerprint
    (kept,) = (tmp_path / "cache").iterdir()
    whole = kept.read_bytes()
    assert load().fingerprint == fresh.fingerprint
    for damaged in (b"", whole[: len(whole) // 2], whole[:2000] + b"\xff" * 90 + whole[2090:]):
        kept.write_bytes(damaged)
        assert load().fingerprint == fresh.fingerprint
        assert kept.read_bytes() == whole
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [kept.name]


def test_what_is_in_the_cache_is_not_read_again(library, monkeypatch):
    first = load()
    monkeypatch.setattr(stdlib, "tokens_of", lambda _: pytest.fail("read again"))
    assert load().fingerprint == first.fingerprint
    (library / "m1.py").write_text("another = 'size'\n")
    with pytest.raises(pytest.fail.Exception):
        load()


def test_a_folder_that_cannot_be_written_is_no_error(library, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LASTLAYER_CACHE", str(tmp_path / "file" / "cache"))
    assert load().n_classes > 10


@pytest.mark.parametrize("task", ["lm", "multilabel"])
def test_a_limit_gives_the_same_with_and_without_a_cache(library, task, monkeypatch):
    monkeypatch.setattr(stdlib, "_FEWEST", 2)
    limit = 500 if task == "lm" else 16
    alone = load(task=task, limit=limit)
    load()
    cached = load(task=task, limit=limit)
    assert alone.fingerprint == cached.fingerprint
    assert len(alone.train) == limit if task == "lm" else alone.train.n_rows == limit


def test_imports_are_labels_and_leave_the_tokens(library):
    data = load(task="multilabel")
    assert {*data.label_names} == {"os", "sys", "xml", "json", "zlib"}
    assert (data.counts == data.train.n_rows).all()
    assert data.feature_names.count("import") == 0
    assert "from" in data.feature_names  # of `yield from`
    assert "dumps" not in data.feature_names
    assert "system" not in data.feature_names
    assert '"import this"' in data.feature_names


def test_imports_at_the_end_of_a_file():
    tokens = ["x", "<newline>", "import", "a", "<newline>", "from", "b", "import", "c", "<eos>"]
    kept, modules = without_imports(tokens)
    assert modules == {"a", "b"}
    assert kept == ["x", "<newline>", "<newline>", "<eos>"]


def test_a_python_without_source(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib, "root", lambda: tmp_path)
    with pytest.raises(DataError, match=r"no Python source.*give data of your own"):
        load()


def test_where_caches_are(monkeypatch, tmp_path):
    monkeypatch.delenv("LASTLAYER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / "lastlayer"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder().parts[-3:] == ("Library", "Caches", "lastlayer")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "lastlayer"


def test_data_is_read_without_torch():
    code = "import sys, lastlayer.lab.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_real_one_has_the_shape_of_source():
    data = load(limit=20_000, cache=False)
    assert [len(data.train), len(data.valid), len(data.test)] == [20_000, 2500, 2500]
    assert {"<newline>", "(", ")", "self", "<eos>"} <= {*data.vocabulary.tokens}
