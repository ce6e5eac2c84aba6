"""Which files of a folder hold which part."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from lastlayer.lab.data._files import plain_stem, plain_suffix
from lastlayer.lab.data.errors import broken

_WORDS = {
    "train": "train", "training": "train", "trn": "train",
    "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid",
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
