"""The second embedded corpus: which modules a file imports, from its other tokens."""

import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from lastlayer.lab.data._assemble import part_limit
from lastlayer.lab.data._bags import Bags, labelled_bags
from lastlayer.lab.data._ids import FirstCome
from lastlayer.lab.data._rows import LabelLists
from lastlayer.lab.data._stdlib import NEWLINE
from lastlayer.lab.data._stdlib_tokens import Sources, read_sources
from lastlayer.lab.data.label_data import LabelData, LabelPart
from lastlayer.lab.data.text_data import PARTS
from lastlayer.lab.data.vocabulary import END

NAME = "Python standard library, imports"
# A module is a label where this many files for training import it.
_FEWEST = 5
# After these a statement begins: `try: import x` is one line.
_BEGINS = {NEWLINE, ";", ":"}
_ENDS = {NEWLINE, ";", END}


def stdlib_labels(
    *, vocab_size: int | None, min_count: int | None, limit: int | None, cache: bool
) -> LabelData:
    """One row a file. Import statements are taken out of it, and top-level modules are labels."""
    sources = read_sources(limit=limit, count_files=True, cache=cache)
    rows = [(part, *_without_imports(sources, i)) for i, part in _first_files(sources, limit)]
    known = Counter(label for part, _, labels in rows if part == "train" for label in labels)
    words, modules = FirstCome(), FirstCome()
    bags = {part: Bags(words) for part in PARTS}
    lists = {part: LabelLists(modules) for part in PARTS}
    for part, tokens, labels in rows:
        bags[part].add(tokens)
        lists[part].add([label for label in sorted(labels) if known[label] >= _FEWEST])
    parts = {part: LabelPart(bags[part].finish(), lists[part].finish()) for part in PARTS}
    description = {
        "source": "embedded",
        "format": "python source",
        "python": platform.python_version(),
        "split": "by file, 80/10/10 by a hash of its path",
        "labels": f"modules that {_FEWEST} or more files for training import",
    }
    return labelled_bags(
        NAME,
        parts,
        list(words),
        list(modules),
        description,
        vocab_size=vocab_size,
        min_count=min_count,
        limit=limit,
        where=NAME,
    )


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
