"""Python's own standard library, which is on every machine: its source, and what it imports."""

import hashlib
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
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data.files import DataError, broken
from lastlayer.lab.data.rows import Bags, LabelData, LabelLists, labelled_bags
from lastlayer.lab.data.text import (
    END,
    PARTS,
    FirstCome,
    Ids,
    IdStream,
    Reading,
    TextData,
    assemble,
    part_limit,
    write_whole,
)  # fmt: skip

VARIABLE = "LASTLAYER_CACHE"


def cache_folder() -> Path:
    """``$LASTLAYER_CACHE``, or ``lastlayer`` where the system keeps such things; not created."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "lastlayer"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "lastlayer"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lastlayer"


NEWLINE = "<newline>"
# Counted up whenever other tokens come out of the same source.
TOKENIZER = 1
# What others installed; what a build wrote, with the paths of that machine in it.
_OTHERS = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_BUILT = ("_sysconfigdata", "_sysconfig_vars")
# Comments and layout are left out: what is left is what Python itself reads.
_LEFT_OUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


class SourceFile(NamedTuple):
    """A module: where it is, which part it is in, and its place in the order of the corpus."""

    name: str
    path: Path
    part: str
    place: bytes


@cache
def root() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files() -> list[SourceFile]:
    """All modules, with their tests, in an order that mixes packages but is always the same.

    The hash of the path decides both the order and the part: eight of ten files are for training,
    one each for valid and test. So a file stays in its part when others come or go.
    """
    folder = root()
    files = []
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        if _OTHERS.isdisjoint(relative.parts) and not path.name.startswith(_BUILT):
            digest = hashlib.sha256(relative.as_posix().encode()).digest()
            tenth = int.from_bytes(digest[:8]) % 10
            part = {0: "valid", 1: "test"}.get(tenth, "train")
            files.append(SourceFile(relative.as_posix(), path, part, digest[8:16]))
    if not files:
        what = "no Python source in the standard library's folder"
        raise broken(what, "give data of your own", path=folder)
    return sorted(files, key=lambda file: file.place)


def tokens_of(path: Path) -> list[str]:
    """The tokens of a module; none where it is not Python, as some test files are on purpose."""
    try:
        with tokenize.open(path) as file:
            source = file.read()
        with warnings.catch_warnings():
            # Some tests hold source that Python warns of.
            warnings.simplefilter("ignore")
            return [*source_tokens(source), END]
    except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
        return []
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); give data of your own"
        ) from None


def source_tokens(source: str) -> Iterator[str]:
    """The tokens of Python source, without comments and layout."""
    # By place: the names of a named tuple take twice the time.
    for kind, text, *_ in tokenize.generate_tokens(io.StringIO(source).readline):
        if kind not in _LEFT_OUT:
            yield NEWLINE if kind == tokenize.NEWLINE else text


class Sources(NamedTuple):
    """Files in their order; the tokens of file i are ``ids[offsets[i] : offsets[i + 1]]``."""

    files: list[SourceFile]
    names: list[str]
    ids: Ids
    offsets: NDArray[np.int64]
    cached: bool

    def tokens(self, file: int) -> Ids:
        """The numbers of the tokens of a file."""
        return self.ids[self.offsets[file] : self.offsets[file + 1]]


def read_sources(*, limit: int | None, count_files: bool = False, cache: bool = True) -> Sources:
    """All of them, from the cache where they are in it.

    With a limit, of training tokens or of training files, and nothing in the cache, only as many
    files are read as it takes. They are the first of each part: the result is the same.
    """
    files = source_files()
    path = cache_folder() / f"{_key(files)}.npz"
    found = _read(path, files) if cache else None
    if found is not None:
        return found
    sources = _tokenise(files, limit, count_files)
    if cache and limit is None:
        return sources._replace(cached=_write(path, sources))
    return sources


def _tokenise(files: Sequence[SourceFile], limit: int | None, count_files: bool) -> Sources:
    numbers = FirstCome()
    stream = IdStream(numbers)
    missing = {part: part_limit(part, limit) for part in PARTS}
    used, offsets = [], [0]
    for file in files:
        wanted = missing[file.part]
        if wanted is not None and wanted <= 0:
            continue
        stream.add(tokens_of(file.path))
        length = stream.length - offsets[-1]
        if wanted is not None:
            missing[file.part] = wanted - (min(1, length) if count_files else length)
        used.append(file)
        offsets.append(stream.length)
    return Sources(used, list(numbers), stream.finish(), np.array(offsets), cached=False)


def _key(files: Sequence[SourceFile]) -> str:
    """Another one for another Python, another set of files, or files of other sizes."""
    sizes = [(file.name, file.path.stat().st_size) for file in files]
    digest = hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]
    python = f"{platform.python_implementation()}-{platform.python_version()}".lower()
    return f"stdlib-{python}-t{TOKENIZER}-{digest}"


def _write(path: Path, sources: Sources) -> bool:
    """Whether it could be kept; a full or read-only disk only makes the next run slower."""
    names = json.dumps(sources.names).encode()
    content = io.BytesIO()
    np.savez(
        content, ids=sources.ids, offsets=sources.offsets, names=np.frombuffer(names, np.uint8)
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.getvalue())
    except OSError:
        return False
    return True


def _read(path: Path, files: list[SourceFile]) -> Sources | None:
    """None where there is no such file, or one that is damaged: zip files have checksums."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            ids, offsets = content["ids"], content["offsets"]
            names = json.loads(content["names"].tobytes())
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    if len(offsets) != len(files) + 1 or offsets[-1] != len(ids):
        return None
    return Sources(files, names, ids, offsets, cached=True)


TEXT_NAME, LABELS_NAME = "Python standard library", "Python standard library, imports"
_DESCRIBED = {
    "source": "embedded",
    "format": "python source",
    "python": platform.python_version(),
    "split": "by file, 80/10/10 by a hash of its path",
}


def stdlib_text(reading: Reading, *, cache: bool) -> TextData:
    """Files whole in one part each; each ends with ``<eos>``."""
    sources = read_sources(limit=reading.limit, cache=cache)
    parts = {}
    for part in PARTS:
        places = [i for i, file in enumerate(sources.files) if file.part == part]
        parts[part] = np.concatenate([sources.tokens(i) for i in places])
    return assemble(TEXT_NAME, sources.names, parts, _DESCRIBED, reading, where=TEXT_NAME)


# A module is a label where this many files for training import it.
_FEWEST = 5
# After these a statement begins: `try: import x` is one line.
_BEGINS = {NEWLINE, ";", ":"}
_ENDS = {NEWLINE, ";", END}


def stdlib_labels(reading: Reading, *, cache: bool) -> LabelData:
    """One row a file. Import statements are taken out of it, and top-level modules are labels."""
    sources = read_sources(limit=reading.limit, count_files=True, cache=cache)
    files = _first_files(sources, reading.limit)
    rows = [(part, *_without_imports(sources, i)) for i, part in files]
    known = Counter(label for part, _, labels in rows if part == "train" for label in labels)
    words, modules = FirstCome(), FirstCome()
    bags = {part: (Bags(words), LabelLists(modules)) for part in PARTS}
    for part, tokens, labels in rows:
        bags[part][0].add(tokens)
        bags[part][1].add(label for label in sorted(labels) if known[label] >= _FEWEST)
    labels_are = f"modules that {_FEWEST} or more files for training import"
    return labelled_bags(
        LABELS_NAME, bags, words, list(modules), {**_DESCRIBED, "labels": labels_are}, reading,
        where=LABELS_NAME,
    )  # fmt: skip


def _first_files(sources: Sources, limit: int | None) -> Iterator[tuple[int, str]]:
    """Files that are Python, by their number, and the part of each."""
    taken = dict.fromkeys(PARTS, 0)
    for i, file in enumerate(sources.files):
        most = part_limit(file.part, limit)
        if len(sources.tokens(i)) and (most is None or taken[file.part] < most):
            taken[file.part] += 1
            yield i, file.part


def _without_imports(sources: Sources, file: int) -> tuple[list[str], set[str]]:
    """The tokens of a file that belong to no import, and the modules that it imports."""
    names = sources.names
    tokens = [names[i] for i in sources.tokens(file)]
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
    """``import a.b as c, d`` has a and d, ``from a.b import c`` has a, ``from . import c`` none."""
    if statement[0] == "from":
        if statement[1].isidentifier():
            yield statement[1]
        return
    for before, name in pairwise(statement):
        if before in ("import", ","):
            yield name
