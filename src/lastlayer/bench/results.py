"""Measurements back from their files: one JSON object a line, of any family."""

import json
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TypeVar

from lastlayer.bench.contrastive.record import ContrastiveRecord
from lastlayer.bench.fused.record import FusedRecord
from lastlayer.bench.heads.record import HeadRecord
from lastlayer.bench.maps.record import MapRecord
from lastlayer.bench.multilabel.record import MultilabelRecord
from lastlayer.bench.record import Record

KINDS: dict[str, type[Record]] = {
    "maps": MapRecord,
    "fused": FusedRecord,
    "heads": HeadRecord,
    "multilabel": MultilabelRecord,
    "contrastive": ContrastiveRecord,
}

RecordT = TypeVar("RecordT", bound=Record)


def read(path: Path) -> list[Record]:
    """All records of a file, in order.

    Raises:
        ValueError: a line is not a record; the message names file and line.
    """
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            records.append(_parse(line, f"{path}:{number}"))
    return records


def of_kind(kind: type[RecordT], records: Iterable[Record]) -> list[RecordT]:
    """Those of one family."""
    return [record for record in records if isinstance(record, kind)]


def _parse(line: str, where: str) -> Record:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected one JSON object, got {line[:60]!r}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected one JSON object, got {line[:60]!r}")
    kind = KINDS.get(values.get("family", ""))
    if kind is None:
        raise ValueError(
            f"{where}: expected a family among {', '.join(KINDS)}, got {values.get('family')!r}"
        )
    known = {field.name for field in fields(kind)}
    # A field added later gets a default, so that older files stay readable.
    required = {field.name for field in fields(kind) if field.default is MISSING}
    missing, unknown = sorted(required - set(values)), sorted(set(values) - known)
    if missing or unknown:
        raise ValueError(f"{where}: not a record; missing fields {missing}, unknown {unknown}")
    values["shape"] = tuple(values["shape"])
    return kind(**values)
