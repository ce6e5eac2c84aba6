"""Records with named fields, from JSON lines or from a hub, as text or as labelled bags."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lastlayer.lab.data._assemble import assemble, enough
from lastlayer.lab.data._bags import Bags, labelled_bags
from lastlayer.lab.data._ids import FirstCome, IdStream
from lastlayer.lab.data._rows import LabelLists
from lastlayer.lab.data.errors import DataError, broken
from lastlayer.lab.data.label_data import LabelData, LabelPart
from lastlayer.lab.data.text_data import TextData
from lastlayer.lab.data.vocabulary import END


class Record(NamedTuple):
    """Named fields, the part they belong to, and where they stand."""

    part: str
    path: Path | str
    line: int
    fields: Mapping[str, Any]

    def broken(self, what: str, remedy: str) -> DataError:
        """An error about this record."""
        return broken(what, remedy, path=self.path, line=self.line)

    def text(self, names: str) -> str:
        """The text of one field, or of several with commas between their names."""
        return " ".join(self._text(name.strip()) for name in names.split(","))

    def _text(self, name: str) -> str:
        value = self.field(name, "text_field")
        if not isinstance(value, str):
            what = f"expected a text in the field {name!r}, got {type(value).__name__}"
            raise self.broken(what, "give another text_field")
        return value

    def labels(self, name: str) -> list[str]:
        """The labels: a list of texts or of whole numbers, or one of them alone."""
        value = self.field(name, "labels_field")
        several = value if isinstance(value, list) else [value]
        for label in several:
            if isinstance(label, bool) or not isinstance(label, (str, int)):
                what = f"expected a list of names or ids in the field {name!r}, got {label!r}"
                raise self.broken(what, "give another labels_field")
        return [str(label) for label in several]

    def field(self, name: str, option: str) -> Any:
        """What is in a field."""
        if name not in self.fields:
            some = ", ".join(map(repr, list(self.fields)[:8])) or "none"
            raise self.broken(f"no field {name!r}; it has {some}", f"give another {option}")
        return self.fields[name]


def text_records(
    name: str,
    records: Iterable[Record],
    description: dict[str, Any],
    *,
    text_field: str,
    limit: int | None,
    where: str,
    **options: Any,
) -> TextData:
    """The words of each record, and ``<eos>`` after it."""
    words = FirstCome()
    streams: dict[str, IdStream] = {}
    for record in records:
        most = enough(record.part, limit)
        stream = streams.setdefault(record.part, IdStream(words))
        if most is None or stream.length < most:
            stream.add([*record.text(text_field).split(), END])
    parts = {part: stream.finish(enough(part, limit)) for part, stream in streams.items()}
    check_training(parts, where)
    return assemble(name, list(words), parts, description, limit=limit, where=where, **options)


def labelled_records(
    name: str,
    records: Iterable[Record],
    description: dict[str, Any],
    *,
    text_field: str,
    labels_field: str,
    where: str,
    **options: Any,
) -> LabelData:
    """The words of each record as a bag."""
    words, labels = FirstCome(), FirstCome()
    bags: dict[str, tuple[Bags, LabelLists]] = {}
    for record in records:
        bag, lists = bags.setdefault(record.part, (Bags(words), LabelLists(labels)))
        bag.add(record.text(text_field).split())
        lists.add(record.labels(labels_field))
    parts = {part: LabelPart(bag.finish(), lists.finish()) for part, (bag, lists) in bags.items()}
    check_training(parts, where)
    return labelled_bags(
        name, parts, list(words), list(labels), description, where=where, **options
    )


def check_training(parts: Mapping[str, object], where: str) -> None:
    """There has to be a training part."""
    if not parts:
        raise broken("an empty file: no records", "give a file with records in it", path=where)
    if "train" not in parts:
        what = f"records of {' and '.join(sorted(parts))}, and none for training"
        raise broken(what, "give a file for training too", path=where)
