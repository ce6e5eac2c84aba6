"""The tokens of the standard library, numbered, and kept between runs."""

import hashlib
import io
import json
import platform
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data._assemble import part_limit
from lastlayer.lab.data._cache import cache_folder
from lastlayer.lab.data._ids import FirstCome, IdStream
from lastlayer.lab.data._stdlib import TOKENIZER, SourceFile, source_files, tokens_of
from lastlayer.lab.data.text_data import PARTS, Ids
from lastlayer.lab.data.vocabulary import write_whole


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
