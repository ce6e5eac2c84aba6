"""The corpora that are always there."""

import subprocess
import sys

import numpy as np
import pytest

from lastlayer.lab.data import DataError, load, stdlib
from lastlayer.lab.data.stdlib import Sources, SourceFile, cache_folder, source_files, tokens_of

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
    names = sorted({*tokens})
    ids = np.array([names.index(token) for token in tokens], np.int32)
    file = SourceFile("x.py", None, "train", b"")
    sources = Sources([file], names, ids, np.array([0, len(ids)]), cached=False)
    kept, modules = stdlib._without_imports(sources, 0)
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
