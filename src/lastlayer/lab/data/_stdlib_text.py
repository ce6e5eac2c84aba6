"""The embedded corpus: the standard library's source, to learn a language model from."""

import platform

import numpy as np

from lastlayer.lab.data._assemble import assemble
from lastlayer.lab.data._stdlib_tokens import read_sources
from lastlayer.lab.data.text_data import PARTS, TextData

NAME = "Python standard library"


def stdlib_text(
    *, vocab_size: int | None, min_count: int | None, limit: int | None, cache: bool
) -> TextData:
    """Files whole in one part each; each ends with ``<eos>``."""
    sources = read_sources(limit=limit, cache=cache)
    parts = {}
    for part in PARTS:
        places = [i for i, file in enumerate(sources.files) if file.part == part]
        parts[part] = np.concatenate([sources.tokens(i) for i in places])
    description = {
        "source": "embedded",
        "format": "python source",
        "python": platform.python_version(),
        "split": "by file, 80/10/10 by a hash of its path",
    }
    return assemble(
        NAME,
        sources.names,
        parts,
        description,
        vocab_size=vocab_size,
        min_count=min_count,
        limit=limit,
        where=NAME,
    )
