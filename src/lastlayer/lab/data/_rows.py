"""Labelled rows in parts become a :class:`LabelData`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lastlayer.lab.data._assemble import TENTH, part_limit
from lastlayer.lab.data._ids import FirstCome
from lastlayer.lab.data.errors import broken
from lastlayer.lab.data.label_data import Integers, LabelData, LabelPart, Lists
from lastlayer.lab.data.text_data import PARTS


class LabelLists:
    """Grows by one list of labels a row; each label counts once in it."""

    def __init__(self, names: FirstCome) -> None:
        self._names = names
        self._indices: list[int] = []
        self._offsets = [0]

    def add(self, labels: Sequence[str]) -> None:
        """Append a row."""
        self._indices.extend(sorted({self._names[label] for label in labels}))
        self._offsets.append(len(self._indices))

    def finish(self) -> Lists:
        """All rows."""
        return Lists(np.array(self._indices, np.int64), np.array(self._offsets, np.int64))


def mixed_rows(n: int) -> Integers:
    """Rows in an order that looks random and is the same on every machine."""
    # The finaliser of splitmix64: numpy's own generators may change with its version.
    x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable").astype(np.int64)


def three_parts(parts: dict[str, LabelPart], limit: int | None, where: str) -> dict[str, LabelPart]:
    """Cut missing parts from the training rows, a tenth each, mixed; then keep to the limit."""
    train = parts["train"]
    rows, each = np.arange(train.n_rows), train.n_rows // TENTH
    result = dict(parts)
    if any(part not in parts for part in PARTS):
        rows = mixed_rows(train.n_rows)
    for part in reversed(PARTS):
        if part not in result:
            rows, taken = rows[: len(rows) - each], rows[len(rows) - each :]
            result[part] = train.select(np.sort(taken))
    result["train"] = train.select(np.sort(rows))
    for part in PARTS:
        most = part_limit(part, limit)
        if most is not None and result[part].n_rows > most:
            some = np.sort(mixed_rows(result[part].n_rows)[:most])
            result[part] = result[part].select(some)
        if not result[part].n_rows:
            total = sum(each.n_rows for each in parts.values())
            what = f"too short: the {part} part has none of {total} rows"
            remedy = "give at least 10 rows, or files of your own for all three parts"
            raise broken(what, remedy, path=where)
    return result


def assemble_rows(
    name: str,
    parts: dict[str, LabelPart],
    feature_names: Sequence[str],
    label_names: Sequence[str],
    description: dict[str, Any],
    *,
    where: str,
) -> LabelData:
    """Order the labels by falling count, and check that there is something to learn."""
    counts = np.bincount(parts["train"].labels.indices, minlength=len(label_names))
    if len(label_names) < 2:
        what = f"one class: {len(label_names)} label{'s' * (len(label_names) != 1)} in all"
        raise broken(what, "multi-label data needs at least two", path=where)
    if not counts.any():
        raise broken("no row of the training part has a label", "check the labels", path=where)
    if not feature_names:
        raise broken("no features", "give rows with at least one", path=where)
    order = np.array(sorted(range(len(counts)), key=lambda i: (-counts[i], label_names[i])))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    ordered = {part: _renumbered(parts[part], place) for part in PARTS}
    return LabelData(
        name=name,
        train=ordered["train"],
        valid=ordered["valid"],
        test=ordered["test"],
        feature_names=tuple(feature_names),
        label_names=tuple(label_names[i] for i in order),
        counts=counts[order].astype(np.int64),
        description={
            "name": name,
            "task": "multilabel",
            "classes": len(label_names),
            "features": len(feature_names),
            "rows": {part: ordered[part].n_rows for part in PARTS},
            **description,
        },
    )


def _renumbered(part: LabelPart, place: Integers) -> LabelPart:
    labels = part.labels
    row = np.repeat(np.arange(labels.n_rows), np.diff(labels.offsets))
    indices = place[labels.indices]
    return part._replace(labels=Lists(indices[np.lexsort((indices, row))], labels.offsets))
