"""Lines of words, some of which are labels: fastText's ``__label__sauce How much …``."""

from collections.abc import Iterator
from pathlib import Path

from lastlayer.lab.data._files import lines
from lastlayer.lab.data._layout import TEXT, files_by_part
from lastlayer.lab.data._records import Record
from lastlayer.lab.data.errors import broken

MARK = "__label__"


def marked_records(
    path: Path, encoding: str, text_field: str, labels_field: str
) -> Iterator[Record]:
    """One record a line that is not empty."""
    for part, file in files_by_part(path, TEXT).items():
        marked = False
        number = 0
        for number, line in lines(file, encoding):
            words = line.split()
            labels = [word.removeprefix(MARK) for word in words if word.startswith(MARK)]
            marked = marked or bool(labels)
            if words:
                text = " ".join(word for word in words if not word.startswith(MARK))
                yield Record(part, file, number, {text_field: text, labels_field: labels})
        if number and not marked:
            what = f"no labels: no word begins with {MARK}"
            remedy = "mark labels so, or give JSON lines, svmlight or ARFF; or task='lm'"
            raise broken(what, remedy, path=file)
