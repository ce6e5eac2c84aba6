"""Files: assignment to parts, decoding, and errors that name file and line."""

import codecs
import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import IO, Any, TypeVar

PARTS = ("train", "valid", "test")


class DataError(ValueError):
    """Data that cannot be used. The message names the file, the place, and the remedy."""

    line: int | None = None
    has_place = False

    def at(self, place: object) -> "DataError":
        """The same error with the name of its file, unless it has one already."""
        if self.has_place or not str(place).strip():
            return self
        line = "" if self.line is None else f":{self.line}"
        made = DataError(f"{place}{line}: {self}")
        made.has_place = True
        return made


def broken(what: str, remedy: str, *, path: object = None, line: int | None = None) -> DataError:
    """An error ``file:line: what is wrong; remedy``; :func:`placed` adds the file if not given."""
    error = DataError(f"{what}; {remedy}")
    error.line = line
    return error if path is None else error.at(path)


@contextmanager
def placed(path: object) -> Iterator[None]:
    """Add this file to errors that do not name one."""
    try:
        yield
    except DataError as error:
        raise error.at(path) from error.__cause__
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise broken(f"damaged gzip data ({error})", "fetch the file again", path=path) from None
    except OSError as error:
        what = f"cannot be read ({error.strerror or error})"
        raise broken(what, "check the path and its permissions", path=path) from None


Read = TypeVar("Read")


def read_each(files: dict[str, Path], read: Callable[[Path], Read]) -> dict[str, Read]:
    """Read the file of each part."""
    made = {}
    for part, file in files.items():
        with placed(file):
            made[part] = read(file)
    return made


def some(names: Iterable[object], most: int = 8) -> str:
    """The first few names in quotes, for a message."""
    known = [repr(each) for each in names]
    return ", ".join(known[:most]) + (", …" if len(known) > most else "")


def needed(module: str, extra: str = "lab") -> Any:
    """Import a module of another package, or raise an error that names the extra to install."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0].replace("sklearn", "scikit-learn")
        what = f"needs the package {package}, which is not installed"
        raise broken(what, f'pip install "lastlayer[{extra}]"') from None


def existing(source: str) -> Path:
    """The path, or an error that suggests similar names."""
    if not source.strip():
        raise broken("expected a file, a folder or hf:name, got an empty name", "give a path")
    path = Path(source).expanduser()
    with placed(path):
        if path.exists():
            return path
        if path.is_symlink():
            raise broken(f"a link to {path.readlink()}, which does not exist", "correct the link")
        raise broken("no such file or folder", _nearest(path))


def _nearest(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"the folder {parent} does not exist either"
    names = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    near = get_close_matches(path.name, names, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(str(parent / name) for name in near)}?"
    listed = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"{parent} has {listed}" if names else f"{parent} is empty"


def opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    """Open a file for reading bytes; gzip is decompressed."""
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")


def plain_suffix(path: Path) -> str:
    """The suffix in lower case, without that of gzip."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def plain_stem(path: Path) -> str:
    """The name in lower case, without the suffixes of the format and of gzip."""
    return Path(path.name.lower().removesuffix(".gz")).stem


_BLOCK = 2**20
# Byte-order marks; UTF-32 first, since its mark begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip


def text_blocks(path: Path, encoding: str = "utf-8") -> Iterator[str]:
    """Read text in blocks of whole lines; line ends are converted to line feeds.

    A line of more than a million characters is split at white space.
    """
    rest = ""
    for block in _decoded(path, encoding):
        text = rest + block if rest else block
        end = text.rfind("\n") + 1 or max(text.rfind(" "), text.rfind("\t")) + 1
        if end:
            yield text[:end]
        rest = text[end:]
    if rest:
        yield rest


def lines(path: Path, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    """Numbered lines from 1, without their ends."""
    numbers, rest = count(1), ""
    for block in _decoded(path, encoding):
        *whole, rest = (rest + block).split("\n")
        yield from ((next(numbers), line) for line in whole)
    if rest:
        yield next(numbers), rest


def _decoded(path: Path, encoding: str) -> Iterator[str]:
    try:
        name = codecs.lookup(encoding).name
    except (LookupError, TypeError):
        raise DataError(
            f"encoding: expected the name of an encoding, got {encoding!r}; utf-8, utf-16, "
            "latin-1 and cp1252 are common ones"
        ) from None
    # A byte-order mark is not part of the text.
    name = "utf-8-sig" if name == "utf-8" else name
    wide = name.startswith(("utf-16", "utf-32"))
    with placed(path), opened(path) as stream:
        start = stream.read(4)
        stream.seek(0)
        for mark, own in _MARKS.items():
            if start.startswith(mark) and not name.startswith(own):
                what = f"has the byte-order mark of {own.upper()}, but was read as {encoding}"
                raise broken(what, f"give encoding={own!r}")
        read = 0
        text = io.TextIOWrapper(stream, name)
        try:
            while block := text.read(_BLOCK):
                if (nul := block.find("\0")) >= 0:
                    what = f"a binary file: a NUL after {read + nul:,} characters"
                    remedy = "text, or encoding='utf-16' if that is what it is"
                    remedy = "the encoding it was written with" if wide else remedy
                    raise broken(what, f"give {remedy}")
                read += len(block)
                yield block
        except UnicodeDecodeError:
            until = stream.tell()
            stream.seek(0)
            raise _not_decoded(stream.read(until), encoding, name) from None


def _not_decoded(content: bytes, encoding: str, name: str) -> DataError:
    """An error that names the byte and line where decoding fails."""
    try:
        content.decode(name)
        place = len(content) - 1
    except UnicodeDecodeError as error:
        place = error.start
    what = f"not {encoding}: byte 0x{content[place]:02x} at offset {place:,}"
    # Text in another encoding has few control characters; binary files have many.
    around = content[max(0, place - 512) : place + 512]
    if sum(c < 32 and c not in b"\t\n\r\f\x1b" for c in around) > len(around) // 50:
        return broken(f"a binary file, {what}", "give text")
    other = "utf-8" if name.startswith(("utf-16", "utf-32", "ascii")) else "latin-1"
    remedy = f"give the encoding it was written with, perhaps encoding={other!r}"
    return broken(what, remedy, line=content[:place].count(b"\n") + 1)


_WORDS = {
    "train": "train", "training": "train", "trn": "train",
    "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid", "trial": "valid",
    "test": "test", "testing": "test", "tst": "test", "heldout": "test", "eval": "test",
}  # fmt: skip
TEXT = (".txt", ".text", ".tokens", ".raw", ".md", ".rst", ".tok", "")
# Names of files in the folder that are not data.
_BESIDE = ("readme", "source", "license", "licence", "copying", "changelog", "notice")


def part_named(name: str) -> str | None:
    """The part in the name of a file or a split, such as ``ptb.train.txt``; None if unclear."""
    parts = {_WORDS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in _WORDS}
    return parts.pop() if len(parts) == 1 else None


def files_with(folder: Path, suffixes: Iterable[str], *, below: bool = False) -> list[Path]:
    """Files with these suffixes in a folder, or also below it, without hidden ones and notes."""
    kinds = {*suffixes}
    return [
        path
        for path in sorted(folder.rglob("*") if below else folder.iterdir())
        if plain_suffix(path) in kinds
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and not plain_stem(path).startswith(_BESIDE)
    ]


def by_part(files: list[Path]) -> dict[str, Path] | None:
    """One file per part by their names; None if no name contains a part.

    If some files name a part, files that do not are left out: for example, MULAN has both the whole
    dataset and its parts.
    """
    parts: dict[str, Path] = {}
    for path in files:
        part = part_named(plain_stem(path))
        if part in parts:
            what = f"two files for the {part} part, {parts[part].name} and {path.name}"
            raise broken(what, "give a folder with one of them", path=path.parent)
        if part is not None:
            parts[part] = path
    if parts and "train" not in parts:
        part, one = next(iter(parts.items()))
        what = f"a file for the {part} part ({one.name}) but none for training"
        raise broken(what, f"add {one.name.replace(part, 'train')}", path=one.parent)
    return parts or None


def files_by_part(path: Path, suffixes: Iterable[str]) -> dict[str, Path]:
    """The file of each part: a single file is for training, a folder has one file per part."""
    if not path.is_dir():
        return {"train": path}
    kinds = tuple(suffixes)
    files = files_with(path, kinds)
    if named := by_part(files):
        return named
    if len(files) == 1:
        return {"train": files[0]}
    what = f"{len(files)} files of the kind {kinds[0]}, and their names do not name parts"
    example = ", ".join(f"{part}{kinds[0]}" for part in PARTS)
    raise broken(what, f"name them {example}, or name one of them", path=path)


def text_files(path: Path) -> tuple[dict[str, list[Path]], str]:
    """The text files of each part, and a description of how parts were assigned."""
    if not path.is_dir():
        return {"train": [path]}, "a tenth each, from the end"
    files = files_with(path, TEXT, below=True)
    if not files:
        kinds = ", ".join(filter(None, TEXT))
        raise broken(f"no text files ({kinds}) in this folder", "name a file in it", path=path)
    # A fixed order that does not depend on how names sort.
    files.sort(key=lambda file: digest(file.relative_to(path).as_posix()))
    folders: dict[str, list[Path]] = {}
    for file in files:
        first, *rest = file.relative_to(path).parts
        if rest and (part := part_named(first)):
            folders.setdefault(part, []).append(file)
    if "train" in folders:
        return folders, "by the names of the folders"
    if named := by_part(sorted(file for file in files if file.parent == path)):
        return {part: [file] for part, file in named.items()}, "by the names of the files"
    return {"train": files}, "files mixed by a hash of their paths, a tenth each"


def digest(text: str) -> bytes:
    """A hash that is the same on every machine."""
    return hashlib.sha256(text.encode()).digest()
