"""The source of Python's standard library as tokens: a corpus that is on every machine."""

import hashlib
import io
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lastlayer.lab.data.errors import DataError, broken
from lastlayer.lab.data.vocabulary import END

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
