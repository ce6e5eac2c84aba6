"""Numbered tokens in parts become a :class:`TextData`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lastlayer.lab.data._ids import counted, renumber
from lastlayer.lab.data.errors import broken
from lastlayer.lab.data.text_data import PARTS, Ids, TextData
from lastlayer.lab.data.vocabulary import END, UNKNOWN, choose

# The share of what is held out for each of valid and test, and what goes with a limit of training.
TENTH, PER_LIMIT = 10, 8


def part_limit(part: str, limit: int | None) -> int | None:
    """Where the training part is limited, valid and test take an eighth of that each."""
    return limit if limit is None or part == "train" else max(2, limit // PER_LIMIT)


def enough(part: str, limit: int | None) -> int | None:
    """What has to be read: the training part may be what the others are cut from."""
    if limit is None or part != "train":
        return part_limit(part, limit)
    # A tenth of it has to be a token and its successor.
    return max(limit * TENTH // PER_LIMIT, 2 * TENTH)


def hold_out(parts: dict[str, Ids]) -> dict[str, Ids]:
    """The parts that are missing, cut from the end of the training part: a tenth of it each."""
    train = parts["train"]
    each = len(train) // TENTH
    result = dict(parts)
    for part in reversed(PARTS):
        if part not in result:
            train, result[part] = train[: len(train) - each], train[len(train) - each :]
    return {**result, "train": train}


def assemble(
    name: str,
    names: Sequence[str],
    parts: dict[str, Ids],
    description: dict[str, Any],
    *,
    vocab_size: int | None,
    min_count: int | None,
    limit: int | None,
    where: str,
) -> TextData:
    """Choose the vocabulary by the training part, and number the tokens of all parts by it.

    The ids in ``parts`` are places in ``names``; they are renumbered in place. ``where`` is what an
    error calls the source.
    """
    total = sum(map(len, parts.values()))
    if not total:
        raise broken("no tokens", "give a file with text in it", path=where)
    parts = {part: ids[: part_limit(part, limit)] for part, ids in hold_out(parts).items()}
    for part in PARTS:
        if len(parts[part]) < 2:
            found = f"{len(parts[part])} of {total} token{'s' if total > 1 else ''}"
            remedy = "give at least 20 tokens, or files of your own for all three parts"
            raise broken(f"too short: the {part} part has {found}", remedy, path=where)
    counts = counted(parts["train"], len(names))
    special = np.isin(
        np.arange(len(names)), [i for i, n in enumerate(names) if n in (UNKNOWN, END)]
    )
    seen = int(np.count_nonzero(counts[~special]))
    if seen < 2:
        what = "one class: the training part has one word alone" if seen else "no words"
        raise broken(what, "give a text with at least two different words", path=where)
    vocabulary, table = choose(names, counts, vocab_size=vocab_size, min_count=min_count)
    if {*vocabulary.tokens} <= {UNKNOWN, END}:
        what = f"no word comes {min_count or 2} times in the {len(parts['train'])} tokens"
        raise broken(what, "lower min_count", path=where)
    ids = {part: renumber(parts[part], table) for part in PARTS}
    return TextData(
        name=name,
        vocabulary=vocabulary,
        train=ids["train"],
        valid=ids["valid"],
        test=ids["test"],
        description={
            "name": name,
            "task": "lm",
            "classes": len(vocabulary),
            "tokens": {part: len(ids[part]) for part in PARTS},
            "types": seen,
            "vocab_size": vocab_size,
            "min_count": min_count,
            "limit": limit,
            "unknown_share": float(vocabulary.counts[vocabulary.unknown] / len(ids["train"])),
            **description,
        },
    )
