"""The embedded corpus: the source of Python's standard library, and the modules it imports."""

import io
import json
import os
import platform
import sys
import sysconfig
import tokenize
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data.files import PARTS, broken, digest
from lastlayer.lab.data.rows import (
    LabelData,
    LabelPart,
    label_lists,
    labelled_words,
    word_lists,
)
from lastlayer.lab.data.text import (
    END,
    FirstCome,
    Ids,
    Reading,
    TextData,
    language_data,
)
from lastlayer.lab.records import replacing

VARIABLE = "LASTLAYER_CACHE"


def cache_folder() -> Path:
    """``$LASTLAYER_CACHE``, or ``lastlayer`` in the system's cache folder; it is not created."""
    if own := os.environ.get(VARIABLE):
        return Path(own)
    home, found = Path.home(), os.environ.get
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "lastlayer"
    if sys.platform == "win32":
        return Path(found("LOCALAPPDATA") or home / "AppData" / "Local") / "lastlayer"
    return Path(found("XDG_CACHE_HOME") or home / ".cache") / "lastlayer"


NEWLINE = "<newline>"
# Version of the tokenization, part of the cache key.
TOKENIZATION = 1
# Installed packages, and generated files with paths of the build machine.
_OTHERS = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_BUILT = ("_sysconfigdata", "_sysconfig_vars")
# Comments and layout are left out.
_LEFT_OUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
}  # fmt: skip


class SourceFile(NamedTuple):
    """A module: its relative path, its path and its part."""

    name: str
    path: Path
    part: str


def root() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files() -> list[SourceFile]:
    """All modules and their tests, in a fixed order that mixes packages.

    A hash of the path decides the order and the part: eight of ten files are for training, one each
    for valid and test. So a file stays in its part when others are added or removed.
    """
    folder, placed = root(), []
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        if _OTHERS.isdisjoint(relative.parts) and not path.name.startswith(_BUILT):
            hashed = digest(relative.as_posix())
            part = {0: "valid", 1: "test"}.get(int.from_bytes(hashed[:8]) % 10, "train")
            placed.append((hashed[8:16], SourceFile(relative.as_posix(), path, part)))
    if not placed:
        what = "no Python source in the standard library's folder"
        raise broken(what, "give data of your own", path=folder)
    return [file for _, file in sorted(placed)]


def tokens_of(path: Path) -> list[str]:
    """The tokens of a module; none if it is not valid Python, as some test files."""
    try:
        with tokenize.open(path) as file:
            source = file.read()
        with warnings.catch_warnings():
            # Some tests contain source that causes warnings.
            warnings.simplefilter("ignore")
            return [*source_tokens(source), END]
    except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
        return []
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise broken(what, "give data of your own", path=path) from None


def source_tokens(source: str) -> Iterator[str]:
    """The tokens of Python source, without comments and layout."""
    # Unpacking takes half the time of reading the fields of a named tuple.
    for kind, text, *_ in tokenize.generate_tokens(io.StringIO(source).readline):
        if kind not in _LEFT_OUT:
            yield NEWLINE if kind == tokenize.NEWLINE else text


def _sources(
    reading: Reading, *, rows: bool, cache: bool
) -> tuple[list[str], dict[str, list[Ids]]]:
    """All distinct tokens, and for each part the token ids of each of its files.

    Files that are not valid Python are skipped. With a limit, files are read until each part has
    enough tokens, or rows.
    """
    files = source_files()
    path = cache_folder() / f"{_key(files)}.npz"
    held = _read(path, len(files)) if cache else None
    missing = {part: reading.most(part) for part in PARTS}
    taken: dict[str, list[Ids]] = {part: [] for part in PARTS}
    numbers, read = FirstCome(), list[Ids]()
    for i, file in enumerate(files):
        wanted = missing[file.part]
        if wanted is not None and wanted <= 0:
            continue
        if held is None:
            own = np.fromiter(map(numbers.__getitem__, tokens_of(file.path)), np.int32)
            read.append(own)
        else:
            own = held.ids[held.offsets[i] : held.offsets[i + 1]]
        if len(own):
            taken[file.part].append(own)
            if wanted is not None:
                missing[file.part] = wanted - (1 if rows else len(own))
    if held is not None:
        return held.names, taken
    if cache and reading.limit is None:
        offsets = np.cumsum([0, *map(len, read)])
        _write(path, _Held(list(numbers), np.concatenate(read), offsets))
    return list(numbers), taken


class _Held(NamedTuple):
    """The content of the cache; the ids of file i are ``ids[offsets[i] : offsets[i + 1]]``."""

    names: list[str]
    ids: Ids
    offsets: NDArray[np.int64]


def _key(files: Sequence[SourceFile]) -> str:
    """The cache key: depends on the version of Python, and on names and sizes of all files."""
    sizes = [(file.name, file.path.stat().st_size) for file in files]
    python = f"{platform.python_implementation()}-{platform.python_version()}".lower()
    return f"stdlib-{python}-t{TOKENIZATION}-{digest(json.dumps(sizes)).hex()[:16]}"


def _write(path: Path, held: _Held) -> None:
    """Write the cache; errors such as a full disk are ignored, the next run is only slower."""
    names = np.frombuffer(json.dumps(held.names).encode(), np.uint8)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new, new.open("wb") as file:
            np.savez(file, ids=held.ids, offsets=held.offsets, names=names)


def _read(path: Path, files: int) -> _Held | None:
    """Read the cache; None if there is no such file, or it is damaged (zip has checksums)."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            ids, offsets = content["ids"], content["offsets"]
            names = json.loads(content["names"].tobytes())
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    whole = len(offsets) == files + 1 and offsets[-1] == len(ids)
    return _Held(names, ids, offsets) if whole else None


_DESCRIBED = {
    "name": "Python standard library",
    "source": "embedded",
    "format": "python source",
    "python": platform.python_version(),
    "split": "by file, 80/10/10 by a hash of its path",
}


def stdlib_text(reading: Reading, *, cache: bool) -> TextData:
    """The corpus for a language model; each file is in one part and ends with ``<eos>``."""
    names, taken = _sources(reading, rows=False, cache=cache)
    parts = {part: np.concatenate(own) for part, own in taken.items()}
    return language_data(names, parts, _DESCRIBED, reading)


# A module is a label if at least this many training files import it.
_FEWEST = 5
# Tokens after which a statement begins: `try: import x` is one line.
_BEGINS = {NEWLINE, ";", ":"}
_ENDS = {NEWLINE, ";", END}


def stdlib_labels(reading: Reading, *, cache: bool) -> LabelData:
    """One row per file without its import statements; labels are the top-level modules in them."""
    names, taken = _sources(reading, rows=True, cache=cache)
    rows = {
        part: [without_imports([names[t] for t in ids]) for ids in own]
        for part, own in taken.items()
    }
    known = Counter(label for _, labels in rows["train"] for label in labels)
    words, modules = FirstCome(), FirstCome()
    parts = {}
    for part, own in rows.items():
        labels = ([m for m in sorted(some) if known[m] >= _FEWEST] for _, some in own)
        parts[part] = LabelPart(
            word_lists((kept for kept, _ in own), words), label_lists(labels, modules)
        )
    described = {
        **_DESCRIBED, "name": "Python standard library, imports",
        "labels": f"modules that {_FEWEST} or more files for training import",
    }  # fmt: skip
    return labelled_words(parts, words, list(modules), described, reading, task="multilabel")


def without_imports(tokens: Sequence[str]) -> tuple[list[str], set[str]]:
    """The tokens of a file without import statements, and the modules that it imports."""
    kept: list[str] = []
    modules: set[str] = set()
    begins, first = True, 0
    while first < len(tokens):
        token = tokens[first]
        if begins and token in ("import", "from"):
            end = next(i for i in range(first, len(tokens)) if tokens[i] in _ENDS)
            modules.update(_modules(tokens[first:end]))
            first = end
            continue
        kept.append(token)
        begins = token in _BEGINS
        first += 1
    return kept, modules


def _modules(statement: Sequence[str]) -> Iterator[str]:
    """Top-level modules: ``import a.b as c, d`` has a and d, ``from . import c`` has none."""
    if statement[0] == "from":
        if statement[1].isidentifier():
            yield statement[1]
        return
    for before, name in pairwise(statement):
        if before in ("import", ","):
            yield name
