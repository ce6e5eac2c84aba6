"""JSON lines: one record with a text, and labels where they are wanted, a line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lastlayer.lab.data._files import lines
from lastlayer.lab.data._layout import files_by_part, part_named
from lastlayer.lab.data._records import Record
from lastlayer.lab.data.errors import broken

SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")


def json_records(path: Path, encoding: str) -> Iterator[Record]:
    """Of a file, or of a folder with one for each part.

    In a single file a field ``split`` may say which part a record is in.
    """
    files = files_by_part(path, SUFFIXES)
    for part, file in files.items():
        for number, line in lines(file, encoding):
            if line.strip():
                fields = _fields(file, number, line)
                named = part_named(str(fields.get("split", ""))) if len(files) == 1 else part
                yield Record(named or "train", file, number, fields)


def _fields(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        what = f"not JSON ({error})"
        raise broken(what, "give one object a line", path=path, line=number) from None
    if not isinstance(fields, dict):
        what = f"expected an object, got {type(fields).__name__}"
        raise broken(what, "give one object a line", path=path, line=number)
    return fields
