"""Text files: words between white space, and ``<eos>`` where a line ends."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lastlayer.lab.data._assemble import assemble, enough
from lastlayer.lab.data._files import text_blocks
from lastlayer.lab.data._ids import FirstCome, IdStream
from lastlayer.lab.data._layout import TEXT, by_part, files_with, folders_by_part, mixed
from lastlayer.lab.data.errors import broken
from lastlayer.lab.data.text_data import Ids, TextData
from lastlayer.lab.data.vocabulary import END

_MARK = f" {END} "
Blocks = Iterable[list[str]]


def text_data(path: Path, *, encoding: str, limit: int | None, **options: Any) -> TextData:
    """A file, or a folder of files."""
    parts, layout = _parts(path)
    blocks = {part: _words_of_all(files, encoding) for part, files in parts.items()}
    description = {"source": str(path), "format": "text", "encoding": encoding, "split": layout}
    return from_blocks(path.name, blocks, description, limit=limit, where=str(path), **options)


def from_blocks(
    name: str,
    blocks: Mapping[str, Blocks],
    description: dict[str, Any],
    *,
    limit: int | None,
    where: str,
    vocab_size: int | None,
    min_count: int | None,
) -> TextData:
    """Number the words of each part as they come, then choose the vocabulary."""
    numbers = FirstCome()
    parts: dict[str, Ids] = {}
    for part, words in blocks.items():
        parts[part] = _read(words, numbers, enough(part, limit))
    return assemble(
        name,
        list(numbers),
        parts,
        description,
        vocab_size=vocab_size,
        min_count=min_count,
        limit=limit,
        where=where,
    )


def _read(blocks: Blocks, numbers: FirstCome, most: int | None) -> Ids:
    stream = IdStream(numbers)
    for block in blocks:
        stream.add(block)
        if most is not None and stream.length >= most:
            break
    return stream.finish(most)


def _parts(path: Path) -> tuple[dict[str, list[Path]], str]:
    if not path.is_dir():
        return {"train": [path]}, "a tenth each, from the end"
    files = files_with(path, TEXT)
    if not files:
        kinds = ", ".join(filter(None, TEXT))
        raise broken(f"no text files ({kinds}) in this folder", "name a file in it", path=path)
    folders = folders_by_part(path, files)
    if folders:
        return folders, "by the names of the folders"
    named = by_part([file for file in files if file.parent == path])
    if named:
        return {part: [file] for part, file in named.items()}, "by the names of the files"
    return {"train": mixed(path, files)}, "files mixed by a hash of their paths, a tenth each"


def _words_of_all(files: list[Path], encoding: str) -> Iterator[list[str]]:
    for file in files:
        yield from words_of(file, encoding)


def words_of(path: Path, encoding: str) -> Iterator[list[str]]:
    """Words of a file in blocks; the last line ends with ``<eos>`` too."""
    block = ""
    for block in text_blocks(path, encoding):
        yield block.replace("\n", _MARK).split()
    if block and not block.endswith("\n"):
        yield [END]
