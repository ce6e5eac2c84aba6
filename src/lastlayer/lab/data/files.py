"""Files: which of them hold which part, their text, and errors that name the place."""

import codecs
import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import IO


class DataError(ValueError):
    """Data that cannot be used. The message names the file, the place, and the remedy."""


def broken(
    what: str, remedy: str, *, path: Path | str | None = None, line: int | None = None
) -> DataError:
    """``file:line: what is wrong; what to do``."""
    place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
    return DataError(f"{place}{what}; {remedy}")


_BLOCK = 2**20
# UTF-32 first: its mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def existing(source: str) -> Path:
    """The path, or an error that names what is nearest to it."""
    if not source.strip():
        raise DataError("expected a file, a folder or hf:name, got an empty name; give a path")
    path = Path(source).expanduser()
    try:
        if path.exists():
            return path
        if path.is_symlink():
            raise broken(f"a link to {path.readlink()}, which does not exist", "mend it", path=path)
        remedy = _nearest(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    raise broken("no such file or folder", remedy, path=path)


def _nearest(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"the folder {parent} does not exist either"
    names = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    near = get_close_matches(path.name, names, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(str(parent / name) for name in near)}?"
    some = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"{parent} has {some}" if names else f"{parent} is empty"


def plain_suffix(path: Path) -> str:
    """The suffix in small letters, without that of gzip."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix


def plain_stem(path: Path) -> str:
    """The name in small letters, without suffixes of the format and of gzip."""
    return Path(path.name.lower().removesuffix(".gz")).stem


def text_blocks(path: Path, encoding: str = "utf-8") -> Iterator[str]:
    """The text in blocks of whole lines; their ends are line feeds, whatever the file has.

    A line of more than a million characters comes in pieces that end with a space.
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
    number = 1
    pieces: list[str] = []
    for block in text_blocks(path, encoding):
        *whole, last = block.split("\n")
        for line in whole:
            yield number, "".join([*pieces, line]) if pieces else line
            pieces.clear()
            number += 1
        if last:
            pieces.append(last)
    if pieces:
        yield number, "".join(pieces)


def _decoded(path: Path, encoding: str) -> Iterator[str]:
    decoder = _decoder(encoding)
    newlines = io.IncrementalNewlineDecoder(decoder, translate=True)
    read = line = 0
    for block in _bytes(path):
        if not read:
            _check_mark(path, block, encoding)
        read += len(block)
        try:
            text = newlines.decode(block)
        except UnicodeDecodeError as error:
            # What the decoder kept of the blocks before stands in front of this one.
            offset = read - len(error.object) + error.start
            before = error.object[: error.start].count(b"\n")
            raise _not_decoded(path, encoding, error, offset, line + before + 1) from None
        nul = text.find("\0")
        if nul >= 0:
            what = f"a binary file: a NUL after {read - len(block) + nul:,} characters"
            if encoding.lower().startswith(("utf-16", "utf-32")):
                raise broken(what, "give the encoding it was written with", path=path)
            raise broken(what, "give text, or encoding='utf-16' if that is what it is", path=path)
        line += text.count("\n")
        yield text
    try:
        yield newlines.decode(b"", final=True)
    except UnicodeDecodeError as error:
        offset = read - len(error.object) + error.start
        raise _not_decoded(path, encoding, error, offset, line + 1) from None


def _decoder(encoding: str) -> codecs.IncrementalDecoder:
    try:
        name = codecs.lookup(encoding).name
        # A mark at the beginning is no part of the text.
        return codecs.getincrementaldecoder("utf-8-sig" if name == "utf-8" else name)()
    except (LookupError, TypeError):
        raise DataError(
            f"encoding: expected the name of an encoding, got {encoding!r}; utf-8, utf-16, "
            "latin-1 and cp1252 are common ones"
        ) from None


def _check_mark(path: Path, block: bytes, encoding: str) -> None:
    for mark, name in _MARKS:
        if block.startswith(mark) and not encoding.lower().startswith(name):
            what = f"begins with the mark of {name.upper()}, and was read as {encoding}"
            raise broken(what, f"give encoding={name!r}", path=path)


def _not_decoded(
    path: Path, encoding: str, error: UnicodeDecodeError, offset: int, line: int
) -> DataError:
    byte = error.object[error.start]
    what = f"not {encoding}: byte 0x{byte:02x} at offset {offset:,}"
    # Byte by byte, text in an old encoding has few control characters; other files have many.
    some = error.object[max(0, error.start - 512) : error.start + 512]
    controls = sum(c < 32 and c not in b"\t\n\r\f\x1b" for c in some)
    if controls > len(some) // 50:
        return broken(f"a binary file, {what}", "give text", path=path)
    other = "utf-8" if encoding.lower().startswith(("utf-16", "utf-32", "ascii")) else "latin-1"
    remedy = f"give the encoding it was written with, perhaps encoding={other!r}"
    return broken(what, remedy, path=path, line=line)


def _bytes(path: Path) -> Iterator[bytes]:
    try:
        with opened(path) as file:
            while block := file.read(_BLOCK):
                yield block
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise broken(f"damaged gzip data ({error})", "fetch the file again", path=path) from None
    except OSError as error:
        raise _unreadable(path, error) from None


def opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    """The bytes of a file, of a packed one those that it holds."""
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rb")
    return path.open("rb")


def _unreadable(path: Path, error: OSError) -> DataError:
    reason = error.strerror or str(error)
    return broken(f"cannot be read ({reason})", "check the path and its permissions", path=path)


_WORDS = {
    "train": "train", "training": "train", "trn": "train",
    "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid", "trial": "valid",
    "test": "test", "testing": "test", "tst": "test", "heldout": "test", "eval": "test",
}  # fmt: skip
TEXT = (".txt", ".text", ".tokens", ".raw", ".md", ".rst", ".tok", "")
# They stand beside data and are not it.
_BESIDE = ("readme", "source", "license", "licence", "copying", "changelog", "notice")


def part_named(name: str) -> str | None:
    """The part that a file's or a split's name speaks of: ``ptb.train.txt``, ``wiki.valid``."""
    parts = {_WORDS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in _WORDS}
    return parts.pop() if len(parts) == 1 else None


def files_with(folder: Path, suffixes: Iterable[str]) -> list[Path]:
    """Files of these kinds in a folder and its folders, without hidden ones and notes."""
    kinds = {*suffixes}
    found = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file() or plain_suffix(path) not in kinds:
            continue
        if not plain_stem(path).startswith(_BESIDE):
            found.append(path)
    return found


def by_part(files: list[Path]) -> dict[str, Path] | None:
    """One file a part where their names say so, and None where they do not.

    A file that names no part is left out beside ones that do: MULAN has both the whole set and its
    parts, for example.
    """
    parts: dict[str, Path] = {}
    for path in files:
        part = part_named(plain_stem(path))
        if part is None:
            continue
        if part in parts:
            what = f"two files for the {part} part, {parts[part].name} and {path.name}"
            raise broken(what, "give a folder with one of them", path=path.parent)
        parts[part] = path
    if not parts:
        return None
    if "train" not in parts:
        some = next(iter(parts.values()))
        what = f"a file for the {next(iter(parts))} part ({some.name}) but none for training"
        raise broken(what, f"add {some.name.replace(next(iter(parts)), 'train')}", path=some.parent)
    return parts


def files_by_part(path: Path, suffixes: Iterable[str]) -> dict[str, Path]:
    """A file alone is for training; in a folder there is one, or one for each part."""
    if not path.is_dir():
        return {"train": path}
    kinds = tuple(suffixes)
    files = [file for file in files_with(path, kinds) if file.parent == path]
    named = by_part(files)
    if named:
        return named
    if len(files) == 1:
        return {"train": files[0]}
    what = f"{len(files)} files of the kind {kinds[0]}, and their names do not tell parts"
    example = ", ".join(f"{part}{kinds[0]}" for part in ("train", "valid", "test"))
    raise broken(what, f"name them {example}, or name one of them", path=path)


def folders_by_part(folder: Path, files: list[Path]) -> dict[str, list[Path]] | None:
    """The files in ``train/`` and, where there are such folders, in ``valid/`` and ``test/``."""
    parts: dict[str, list[Path]] = {}
    for path in files:
        first, *rest = path.relative_to(folder).parts
        part = part_named(first) if rest else None
        if part is not None:
            parts.setdefault(part, []).append(path)
    if "train" not in parts:
        return None
    return {part: mixed(folder, some) for part, some in parts.items()}


def mixed(folder: Path, files: list[Path]) -> list[Path]:
    """In an order that a hash of their paths gives: always the same, and no matter of the names."""

    def place(path: Path) -> bytes:
        return hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest()

    return sorted(files, key=place)
